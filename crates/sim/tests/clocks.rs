//! Clocks: link latencies are measured correctly, chips synchronise and stay synchronised, and what
//! happens when they do not.

use base::{Bytes, VertexId};
use route::{RoutePlan, Timing, all_gather};
use sim::network::{ClockError, ClockModel, Clocks, MEASURED, Slack, keep_slots, measurements};
use topology::{Dragonfly, LinkModel};

const HZ: f64 = 900e6;
/// Cycles after which clocks with random initial offsets are synchronised.
const SETTLED: u64 = (0.004 * HZ) as u64;
/// The offset that a link's jitter allows: half the difference between its least and greatest latency.
const BOUND: f64 = 8.5;

fn dragonfly(chips: u32) -> Dragonfly {
    Dragonfly::new(chips, LinkModel::default()).expect("it can be")
}

fn clocks(dragonfly: &Dragonfly, model: ClockModel) -> Clocks {
    let mut clocks = Clocks::new(dragonfly.network(), VertexId(0), model).expect("they can be");
    clocks.advance(SETTLED, |_| true);
    clocks
}

fn gather(dragonfly: &Dragonfly) -> RoutePlan {
    let plan = all_gather(dragonfly.network(), Bytes(1 << 15), Timing::default());
    plan.expect("it can be").plan.whole(dragonfly.network())
}

/// Source: the multi-TSP system, Table 2.
#[test]
fn links_are_measured_as_they_are() {
    for (found, known) in measurements(100_000, 3).into_iter().zip(MEASURED) {
        assert!((found.mean - known.mean).abs() < 0.1, "{found:?} for {known:?}");
        assert!((found.deviation / known.deviation - 1.0).abs() < 0.1, "{found:?} for {known:?}");
        assert!(found.min >= known.min && found.max <= known.max, "{found:?} for {known:?}");
    }
}

#[test]
fn chips_stay_within_the_jitter_of_a_link() {
    for (chips, seconds) in [(8, 10.0), (264, 0.1)] {
        let dragonfly = dragonfly(chips);
        let mut clocks = clocks(&dragonfly, ClockModel::default());
        let mut most: f64 = 0.0;
        clocks.advance((seconds * HZ) as u64, |clocks| {
            most = most.max(clocks.spread());
            true
        });
        assert!(most < BOUND, "{most} cycles apart on {chips} chips");
        assert!(most > 1.0, "{most}: links jitter");
    }
}

/// Source: the multi-TSP system §3.2.
#[test]
fn a_program_starts_an_epoch_later_for_each_hop() {
    for (chips, epochs) in [(8, 1), (264, 3), (10_440, 7)] {
        let dragonfly = dragonfly(chips);
        let model = ClockModel { measurements: 1000, ..ClockModel::default() };
        let mut clocks = clocks(&dragonfly, model);
        for _ in 0..10 {
            let start = clocks.start();
            assert_eq!(start.cycles, epochs * 252, "of {chips} chips");
            let wanted = start.cycles as f64;
            let bound = BOUND * epochs as f64;
            assert!((wanted - start.first).abs() < bound, "{start:?} of {chips} chips");
            assert!((wanted - start.last).abs() < bound, "{start:?} of {chips} chips");
            assert!(start.last - start.first > 0.5, "{start:?}: counters are not quite aligned");
            clocks.advance(100_000, |_| true);
        }
    }
}

/// Chips whose counters were never aligned start when their own counters overflow.
#[test]
fn a_program_starts_anywhere_without_alignment() {
    let dragonfly = dragonfly(264);
    let model = ClockModel { measurements: 10, ..ClockModel::default() };
    let mut clocks = Clocks::new(dragonfly.network(), VertexId(0), model).expect("they can be");
    let start = clocks.start();
    assert!(start.last - start.first > 100.0, "{start:?}");
}

#[test]
fn slots_hold_while_chips_resynchronise_and_not_without() {
    let dragonfly = dragonfly(264);
    let (network, plan) = (dragonfly.network(), gather(&dragonfly));
    let cycles = (0.02 * HZ) as u64;
    let keep = |slack: Slack| {
        keep_slots(network, &plan, &mut clocks(&dragonfly, ClockModel::default()), slack, cycles)
    };
    let kept = keep(Slack::default()).expect("every vector is where it should be");
    assert!(kept.deskews > 1000 && kept.apart < 2.0 * BOUND, "{kept:?}");
    let wrong = keep(Slack { deskew: None, ..Slack::default() }).expect_err("clocks drift");
    // At 200 ppm, a drift of 32 cycles takes 160,000 cycles; with jitter less.
    assert!((40_000..200_000).contains(&wrong.cycle), "{wrong}");
    assert_eq!(keep(Slack { deskew: None, ..Slack::default() }), Err(wrong), "the same again");
    let tight = keep(Slack { margin: 5.0, ..Slack::default() }).expect_err("links jitter by more");
    assert!(tight.late > 0.0 && tight.cycle < 100_000, "{tight}");
    let shallow = Slack { buffer: 1, ..Slack::default() };
    assert!(keep(shallow).is_err_and(|wrong| wrong.late < 0.0), "vectors wait longer than a slot");
}

#[test]
fn clocks_that_cannot_be_held_are_refused() {
    let node = dragonfly(8);
    let new = |model| Clocks::new(node.network(), VertexId(0), model).err();
    let fast = new(ClockModel { drift_ppm: 200.0, ..ClockModel::default() });
    assert!(matches!(fast, Some(ClockError::Drift { .. })), "{fast:?}");
    let never = new(ClockModel { exchange: 0, ..ClockModel::default() });
    assert!(matches!(never, Some(ClockError::Zero { .. })), "{never:?}");
    assert!(new(ClockModel { drift_ppm: f64::NAN, ..ClockModel::default() }).is_some());
}
