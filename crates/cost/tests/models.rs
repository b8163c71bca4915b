//! All models fulfil one contract: what they agree about takes the same time.

use std::collections::BTreeMap;

use base::{BitsPerSecond, Bytes, Nanos};
use cost::{ChannelCost, ClosedForm, NetworkModel};
use ir::CollectiveKind;
use topology::Topology;

const SIZE: Bytes = Bytes(80_000_000);

fn models() -> [Box<dyn NetworkModel>; 3] {
    let flat: Topology = "elect-flat:8,rate=80Gbit/s,latency=1us".parse().unwrap();
    let interconnect = flat.interconnect().clone();
    let forms = ClosedForm { interconnect: interconnect.clone(), measured: BTreeMap::new() };
    let channel = ChannelCost::of(BitsPerSecond(80e9), Nanos(1_000));
    [Box::new(interconnect), Box::new(forms), Box::new(channel)]
}

#[test]
fn channels_interconnects_and_closed_forms_agree_on_a_switch() {
    let all: Vec<u32> = (0..8).collect();
    let exchange = CollectiveKind::AllToAll { sizes: vec![1; 64].into() };
    for model in models() {
        assert!(model.devices() >= 8);
        assert_eq!(model.port().rate, BitsPerSecond(80e9));
        assert_eq!(model.transfer_time(2, 2, SIZE), Nanos(0));
        assert_eq!(model.transfer_time(2, 5, SIZE), Nanos(8_001_000));
        let reduce = model.collective_time(&CollectiveKind::AllReduce, &all, SIZE);
        assert_eq!(reduce, Nanos(14 * 1_001_000), "14 rounds of an eighth");
        let gather = model.collective_time(&CollectiveKind::AllGather, &all, SIZE);
        assert_eq!(gather, Nanos(7 * 1_001_000));
        assert_eq!(model.collective_time(&CollectiveKind::AllReduce, &all[..1], SIZE), Nanos(0));
        // Of each rank's eighth, an eighth stays; closed forms have all messages under way at once.
        let rounds = model.collective_time(&exchange, &all, SIZE).0;
        assert!((875_000..=882_000).contains(&rounds), "{rounds}");
    }
}

#[test]
fn measurements_replace_the_closed_form_of_what_was_measured() {
    let flat: Topology = "elect-flat:8,rate=80Gbit/s".parse().unwrap();
    let measured = BTreeMap::from([(4, vec![(1e6, 1e-3), (2e6, 1.5e-3)])]);
    let forms = ClosedForm { interconnect: flat.interconnect().clone(), measured };
    let time = |devices: &[u32], size| {
        forms.collective_time(&CollectiveKind::AllReduce, devices, Bytes(size)).0
    };
    assert_eq!(time(&[0, 1, 2, 3], 1_500_000), 1_250_000);
    assert_eq!(time(&[4, 5, 6, 7], 1_500_000), 1_250_000);
    assert_ne!(time(&[0, 1, 2, 4], 1_500_000), 1_250_000, "not at equal distances");
    assert_ne!(time(&[0, 1], 1_500_000), 1_250_000, "two were not measured");
}

#[test]
fn transfers_of_a_round_share_ports_links_and_servers() {
    let size = Bytes(1_000_000);
    let time = |topology: &str, transfers: &[(u32, u32, Bytes)]| {
        let topology: Topology = topology.parse().unwrap();
        topology.interconnect().round_time(transfers).0
    };
    let one = time("elect-flat:8,rate=80Gbit/s,latency=0us", &[(0, 1, size)]);
    assert_eq!(one, 100_000);
    let to_all: Vec<_> = (1..8).map(|other| (0, other, size)).collect();
    assert_eq!(time("elect-flat:8,rate=80Gbit/s,latency=0us", &to_all), 7 * one);
    // Around a ring, neighbours share nothing; opposite ends cross four links each.
    let apart =
        |distance: u32| -> Vec<_> { (0..8).map(|one| (one, (one + distance) % 8, size)).collect() };
    let ring = "ring:8,rate=80Gbit/s,latency=0us";
    assert_eq!(time(ring, &apart(1)), one);
    assert!(time(ring, &apart(4)) >= 2 * one, "{}", time(ring, &apart(4)));
    // Eight devices of a server share its link to another.
    let cluster = "elect-cluster:16,rate=80Gbit/s,server=80Gbit/s,latency=0us";
    let across: Vec<_> = (0..8).map(|one| (one, one + 8, size)).collect();
    assert_eq!(time(cluster, &across), 8 * one);
    let channel = ChannelCost { incast: 0.5, ..ChannelCost::of(BitsPerSecond(80e9), Nanos(0)) };
    let from_all: Vec<_> = (1..3).map(|other| (other, 0, size)).collect();
    assert_eq!(channel.round_time(&from_all), Nanos(3 * one));
}

#[test]
fn a_broadcast_carries_its_vector_whole() {
    let all: Vec<u32> = (0..8).collect();
    for kind in [CollectiveKind::Broadcast { root: 0 }, CollectiveKind::Reduce { root: 0 }] {
        for model in models() {
            let transfer = model.transfer_time(0, 1, SIZE);
            assert_eq!(model.collective_time(&kind, &all[..2], SIZE), transfer);
            let along = model.collective_time(&kind, &all, SIZE);
            assert_eq!(along, Nanos(transfer.0 + 6 * 1_000), "six more hops, in small pieces");
        }
        assert_eq!([1, 2, 8].map(|ranks| kind.ring_load(ranks)), [0.0, 1.0, 1.0]);
    }
    assert_eq!(CollectiveKind::AllReduce.ring_load(4), 1.5);
    assert_eq!(CollectiveKind::AllGather.ring_load(4), 0.75);
}
