//! The network without a schedule: messages queue, and their latencies depend on contention.

use base::{Bytes, Ticks, VertexId};
use route::{RouteTransfer, Timing, route, verify};
use sim::network::{Machine, Message, Nothing, RingAllReduce, Routed, Routing, Traffic, Uniform};
use topology::{Fabric, Topology};

fn fabric(name: &str) -> Fabric {
    let topology: Topology = name.parse().expect("it can be");
    topology.links().expect("it is of links").clone()
}

fn timing() -> Timing {
    Timing::default()
}

/// Source: a ring all-reduce takes 2 (n - 1) messages of a part, each with its hop latency and its
/// length.
#[test]
fn a_ring_takes_what_it_should() {
    for (chips, chunks) in [(8, 1), (64, 4), (1024, 1)] {
        let vectors = 64;
        let mut ring = RingAllReduce::new(chips, vectors, chunks);
        let fabric = fabric(&format!("ring:{chips}"));
        let found = Routed::new(&fabric, timing(), Routing::Minimal, 0).run(&mut ring);
        let link = &fabric.network().links()[0];
        let each = timing().hop(link).0 + u64::from(vectors) * timing().slot(link).0;
        let steps = u64::from(2 * (chips - 1) * chunks);
        assert_eq!(found.end, Ticks(steps * each), "{chips} chips, {chunks} chunks");
        assert_eq!(found.messages, steps * u64::from(chips));
    }
    assert!("ring:1,rate=8Gbit/s,latency=5ns".parse::<Topology>().is_ok());
}

#[test]
fn every_message_comes_and_none_sooner_than_its_way_allows() {
    let fabric = fabric("dragonfly:72");
    for routing in [Routing::Minimal, Routing::Adaptive] {
        let mut uniform = Uniform::new(72, 50, 1, Ticks(1_000_000), 3);
        let found = Routed::new(&fabric, timing(), routing, 4).run(&mut uniform);
        assert_eq!(found.messages, 72 * 50);
        let link = &fabric.network().links()[0];
        let least = timing().hop(link) + timing().slot(link);
        assert!(uniform.latencies.iter().all(|latency| *latency >= least));
        let mut again = Uniform::new(72, 50, 1, Ticks(1_000_000), 3);
        assert_eq!(Routed::new(&fabric, timing(), routing, 4).run(&mut again), found);
        assert_eq!(again.latencies, uniform.latencies, "by the same seed");
    }
}

/// One chip sends all its data to another.
struct ToOne;

impl Traffic for ToOne {
    fn begin(&mut self, send: &mut dyn FnMut(Ticks, Message)) {
        for tag in 0..200 {
            let (source, target) = (VertexId(0), VertexId(9));
            send(Ticks(0), Message { source, target, vectors: 100, tag });
        }
    }

    fn came(&mut self, _: &Message, _: Ticks, _: Ticks, _: &mut Vec<Message>) {}
}

#[test]
fn what_would_queue_for_one_link_goes_around_it() {
    let fabric = fabric("dragonfly:264");
    let end = |routing| Routed::new(&fabric, timing(), routing, 1).run(&mut ToOne).end;
    let (minimal, adaptive) = (end(Routing::Minimal), end(Routing::Adaptive));
    assert!(2 * adaptive.0 < minimal.0, "{adaptive} after {minimal}");
}

/// The same traffic with small differences in its start: with a schedule each message has a constant
/// latency; without one no two runs are alike.
#[test]
fn a_schedule_has_no_variance() {
    let fabric = fabric("dragonfly:72");
    let messages = Uniform::new(72, 4, 27, Ticks(1), 8).messages();
    let transfers: Vec<RouteTransfer> = messages
        .iter()
        .map(|(_, one)| RouteTransfer::new(one.source, one.target, Bytes(27 * 320)))
        .collect();
    let plan = route(fabric.network(), transfers, timing()).expect("they make sense");
    verify(fabric.network(), &plan).expect("the plan holds");
    let machine = Machine::new(fabric.network(), &plan, &Nothing).expect("it can be carried out");
    let runs: Vec<_> = (0..3).map(|_| machine.run(&mut [], |_| true)).collect();
    assert!(runs.iter().all(|run| *run == runs[0]));
    let outcome = runs[0].as_ref().expect("it is carried out");
    assert_eq!((outcome.incidents.len(), outcome.end + Ticks(23_616)), (0, plan.end()));
    let dynamic = |seed| {
        let mut uniform = Uniform::new(72, 4, 27, Ticks(100_000), 8 + seed);
        Routed::new(&fabric, timing(), Routing::Adaptive, seed).run(&mut uniform);
        uniform.latencies.into_iter().max()
    };
    assert!((1..4).any(|seed| dynamic(seed) != dynamic(0)));
}
