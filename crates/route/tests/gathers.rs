//! All-gathers: complete, and close to what the links of a chip allow.

use base::{Bytes, Ticks, VertexId};
use fabric::{Dragonfly, LinkModel, Network, clusters, torus};
use route::{Collective, Fault, RouteError, Timing, all_gather, verify};

/// Schedules and checks it; and what part of the bound it reaches, which is that every chip gets
/// what the others have over all its links at once.
fn gathered(network: &Network, shard: Bytes) -> (Collective, f64) {
    let timing = Timing::default();
    let found = all_gather(network, shard, timing).expect("it can be");
    assert!(found.gathers(network.endpoints()), "every chip has every piece");
    verify(network, &found.transfers, &found.schedule).expect("the schedule holds");
    let links = network.out_of(VertexId(0)).len() as f64;
    let vectors = timing.vectors(shard) * u64::from(network.endpoints() - 1);
    let slot = timing.slot(&network.links()[0]).0;
    let bound = vectors as f64 * slot as f64 / links;
    let efficiency = bound / found.schedule.end().0 as f64;
    (found, efficiency)
}

#[test]
fn links_are_full_to_three_percent() {
    for chips in [8, 72, 264] {
        let dragonfly = Dragonfly::new(chips, LinkModel::default()).expect("it can be");
        let shard = Bytes((64 << 20) / u64::from(chips));
        let (_, efficiency) = gathered(dragonfly.network(), shard);
        assert!(efficiency > 0.97, "{efficiency} of the bound on {chips} chips");
    }
}

#[test]
fn small_ones_and_other_fabrics_are_complete() {
    for shard in [1, 320, 5000] {
        for fabric in [torus(&[3, 4], LinkModel::default()), torus(&[2], LinkModel::default())] {
            gathered(&fabric.expect("it can be"), Bytes(shard));
        }
        let dragonfly = Dragonfly::new(16, LinkModel::default()).expect("it can be");
        gathered(dragonfly.network(), Bytes(shard));
    }
    let one = Network::new(1, 0, vec![]).expect("it computes");
    assert!(all_gather(&one, Bytes(5), Timing::default()).expect("nothing to do").gathers(1));
}

#[test]
fn what_cannot_be_is_refused() {
    let node = Dragonfly::new(8, LinkModel::default()).expect("it can be");
    let large = all_gather(node.network(), Bytes(1 << 30), Timing::default());
    assert!(matches!(large, Err(RouteError::Size { .. })));
    let model = LinkModel::default();
    let switched = clusters(2, 4, model, model).expect("it can be");
    let switched = all_gather(&switched, Bytes(320), Timing::default());
    assert!(matches!(switched, Err(RouteError::Uneven)));
}

#[test]
fn what_goes_on_before_it_has_come_is_found() {
    let ring = torus(&[5], LinkModel::default()).expect("it can be");
    let (good, _) = gathered(&ring, Bytes(32_000));
    let forwarded = good.transfers.iter().position(|transfer| transfer.from.is_some());
    let forwarded = forwarded.expect("a ring forwards");
    let mut early = good.clone();
    early.schedule.trains[forwarded].hops[0].start = Ticks(0);
    let fault = verify(&ring, &early.transfers, &early.schedule).expect_err("it is not there yet");
    assert!(matches!(fault, Fault::Early { .. } | Fault::Booked { .. }), "{fault}");
    let mut wrong = good.clone();
    wrong.pieces_of.swap(0, forwarded);
    assert!(!wrong.gathers(5));
    let mut short = good;
    short.transfers.pop();
    assert!(!short.gathers(5));
}
