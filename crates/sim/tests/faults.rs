//! Runs with faults by seed; `fairway dev sim-faults` runs more.

use sim::faults::{FaultCounts, run};

#[test]
fn invariants_hold_in_runs_with_faults() {
    let mut counts = FaultCounts::default();
    for seed in 0..300 {
        let done = run(seed, false);
        assert!(done.violation.is_none(), "{}", done.violation.unwrap());
        counts.add(&done.counts);
    }
    let injected = [counts.kills, counts.stalls, counts.partitions, counts.departures];
    assert!(injected.iter().all(|&count| count > 20), "{counts:?}");
    assert!(counts.removals > 5 && counts.freezes > 5 && counts.losses > 100, "{counts:?}");
    assert!(counts.reads > 1000 && counts.errors > 100, "{counts:?}");
}
