//! All-to-alls: complete, and close to what the links between nodes allow.

use base::{Bytes, VertexId};
use fabric::{Dragonfly, LinkModel};
use route::{RouteError, Timing, all_to_all, verify};

fn dragonfly(chips: u32) -> Dragonfly {
    Dragonfly::new(chips, LinkModel::default()).expect("it can be")
}

/// Schedules and checks it; and what part it reaches of the bound, which is that a chip sends and a
/// node sends to the others over all their links at once.
fn exchanged(chips: u32, block: Bytes) -> f64 {
    let dragonfly = dragonfly(chips);
    let timing = Timing::default();
    let (transfers, schedule) = all_to_all(&dragonfly, block, timing).expect("it can be");
    assert_eq!(transfers.len() as u32, chips * (chips - 1), "a transfer for each pair");
    let pairs: std::collections::BTreeSet<_> =
        transfers.iter().map(|one| (one.source, one.target)).collect();
    assert_eq!(pairs.len(), transfers.len());
    verify(dragonfly.network(), &transfers, &schedule).expect("the schedule holds");
    let links = dragonfly.network().links();
    let leave = links
        .iter()
        .filter(|link| dragonfly.node_of(link.source) == 0 && dragonfly.node_of(link.target) != 0);
    let [chip, node] = [
        f64::from(chips - 1) / dragonfly.network().out_of(VertexId(0)).len() as f64,
        f64::from(8 * (chips - 8)) / leave.count().max(1) as f64,
    ];
    let slot = timing.slot(&links[0]).0 as f64;
    let bound = chip.max(node) * timing.vectors(block) as f64 * slot;
    bound / schedule.end().0 as f64
}

#[test]
fn links_between_nodes_are_full() {
    for chips in [8, 72, 264] {
        let efficiency = exchanged(chips, Bytes((64 << 20) / u64::from(chips)));
        assert!(efficiency > 0.97, "{efficiency} of the bound on {chips} chips");
    }
}

#[test]
fn small_ones_are_complete() {
    for chips in [8, 16, 24, 136] {
        for block in [0, 1, 3000] {
            exchanged(chips, Bytes(block));
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let large = all_to_all(&dragonfly(8), Bytes(1 << 30), Timing::default());
    assert!(matches!(large, Err(RouteError::Size { .. })));
    let racks = all_to_all(&dragonfly(288), Bytes(320), Timing::default());
    assert!(matches!(racks, Err(RouteError::NoWay { .. })));
}
