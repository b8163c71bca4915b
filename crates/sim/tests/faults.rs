//! Runs with faults by seed; `fairway dev sim-faults` runs more.

use sim::faults::{FaultCounts, run};

/// Seeds that found a defect, each of which is mended.
///
/// In this order: buffers of a lost island were freed on its next incarnation; messages reached the
/// next process of a host; two removed islands came back under one number; a client on a slice that
/// left while its program was compiled ended the controller; hosts waited for transfers of a process
/// that had ended, or that an old list of addresses named; a whole program was assembled from
/// functions of a lost incarnation; what a leaving client had freed stayed on hosts; a dying
/// process's last messages stayed in inboxes.
const FOUND: [u64; 11] = [2, 131, 172, 1047, 1219, 3349, 7716, 2455, 2971, 11_791, 19_017];

#[test]
fn invariants_hold_in_runs_with_faults() {
    let mut counts = FaultCounts::default();
    for seed in (0..300).chain(FOUND) {
        let done = run(seed, false);
        assert!(done.violation.is_none(), "{}", done.violation.unwrap());
        counts.add(&done.counts);
    }
    for (what, count) in counts.by_name() {
        assert!(count > 10, "{count} {what}");
    }
}

#[test]
fn a_run_is_determined_by_its_seed() {
    let [one, again, other] = [5, 5, 6].map(|seed| run(seed, true).log);
    assert_eq!(one, again);
    assert_ne!(one, other);
}
