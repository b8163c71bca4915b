//! Placed steps over interconnects, in virtual time.

use base::{BitsPerSecond, Bytes, Nanos};
use ir::{Collective, Dependency, StepGraph, StepOp};
use proptest::prelude::*;
use sim::fluid::flow;
use topology::{Clos, Faults, Interconnect, InterconnectKind, Ring, Topology};

fn flat(devices: u32) -> Interconnect {
    // One byte per nanosecond.
    Interconnect {
        devices,
        rate: BitsPerSecond(8e9),
        latency: Nanos(0),
        kind: InterconnectKind::Flat,
        faults: Faults::default(),
    }
}

fn ring(devices: u32, wavelengths: u32) -> Interconnect {
    let every = Nanos(100_000);
    let ring = Ring { wavelengths, reach: 16, every, delay: Nanos(25_000) };
    let rate = BitsPerSecond(25e9 * f64::from(wavelengths));
    Interconnect { rate, kind: InterconnectKind::Ring(ring), ..flat(devices) }
}

fn transfer(source: u32, target: u32, size: u64) -> StepOp {
    StepOp::Transfer { source, target, size: Bytes(size) }
}

fn all_reduce(devices: Vec<u32>, size: u64) -> StepOp {
    StepOp::collective(Collective::all_reduce, devices, Bytes(size)).unwrap()
}

fn step(devices: u32) -> StepGraph {
    StepGraph::new("step", devices)
}

/// Adds a node that depends on others of the step.
fn add(graph: &mut StepGraph, op: StepOp, after: &[u32]) -> u32 {
    let after: Vec<Dependency> = after.iter().copied().map(Dependency::on).collect();
    graph.add("", op, &after)
}

#[test]
fn ports_are_shared() {
    let mut graph = step(3);
    let computed = add(&mut graph, StepOp::compute(0, Nanos(50)), &[]);
    add(&mut graph, transfer(0, 1, 1000), &[computed]);
    add(&mut graph, transfer(0, 2, 500), &[computed]);
    let came = flow(&flat(3), &graph).unwrap();
    // Each gets half of the bandwidth until the smaller one ends.
    assert_eq!(came.times[2].1, Nanos(1050));
    assert_eq!(came.end, Nanos(1550));
}

/// As in a schedule, and as the contract of network models says.
#[test]
fn a_transfer_of_a_device_to_itself_takes_no_time() {
    let mut graph = step(2);
    let stays = add(&mut graph, transfer(1, 1, 1000), &[]);
    let goes = add(&mut graph, transfer(0, 1, 1000), &[stays]);
    let came = flow(&Interconnect { latency: Nanos(70), ..flat(2) }, &graph).unwrap();
    assert_eq!(came.times[stays as usize], (Nanos(0), Nanos(0)));
    assert_eq!(came.times[goes as usize], (Nanos(0), Nanos(1070)));
}

#[test]
fn an_all_reduce_moves_what_a_ring_moves() {
    let mut graph = step(4);
    add(&mut graph, all_reduce(vec![0, 1, 2, 3], 4000), &[]);
    assert_eq!(flow(&flat(4), &graph).unwrap().end, Nanos(6000));
}

/// What was less than half a byte of a hop got no circuit, and the step never ended.
#[test]
fn flows_of_less_than_a_byte_end() {
    let mut graph = step(16);
    add(&mut graph, transfer(2, 1, 1000), &[]);
    let scatter = StepOp::collective(Collective::reduce_scatter, vec![0, 3, 1], Bytes(1)).unwrap();
    add(&mut graph, scatter, &[]);
    let came = flow(&ring(16, 64), &graph).unwrap();
    assert!(came.end < Nanos(1_000_000), "{:?}", came.end);
}

#[test]
fn an_all_to_all_goes_from_each_to_each() {
    let mut graph = step(4);
    let all: Vec<u32> = (0..4).collect();
    let exchange = StepOp::collective(Collective::all_to_all, all, Bytes(4000)).unwrap();
    add(&mut graph, exchange, &[]);
    let came = flow(&flat(4), &graph).unwrap();
    // Each device sends three of its four blocks of 1000 bytes.
    assert_eq!((came.end, came.moved), (Nanos(3000), Bytes(12_000)));
}

#[test]
fn a_computation_of_several_devices_ends_with_the_last() {
    let mut graph = step(3);
    let busy = add(&mut graph, StepOp::compute(1, Nanos(70)), &[]);
    let gang = add(&mut graph, StepOp::compute(vec![0, 1], Nanos(50)), &[]);
    add(&mut graph, StepOp::compute(2, Nanos(5)), &[gang]);
    let came = flow(&flat(3), &graph).unwrap();
    assert_eq!(came.times[busy as usize], (Nanos(0), Nanos(70)));
    assert_eq!(came.times[gang as usize], (Nanos(0), Nanos(120)), "device 0 begins at once");
    assert_eq!(came.end, Nanos(125));
    assert_eq!(came.busy, [Nanos(50), Nanos(120), Nanos(5)]);
}

#[test]
fn one_way_neighbour_traffic_gets_half_of_all_wavelengths() {
    for wavelengths in [40, 320] {
        let mut graph = step(64);
        let size = 1_000_000_000;
        for device in 0..64 {
            add(&mut graph, transfer(device, (device + 1) % 64, size), &[]);
        }
        let came = flow(&ring(64, wavelengths), &graph).unwrap();
        let half = f64::from(wavelengths) / 2.0 * 25e9 / 8e9;
        assert_eq!(came.end, Nanos((size as f64 / half) as u64));
    }
}

#[test]
fn an_all_reduce_goes_both_ways_around_fibre() {
    let mut graph = step(64);
    add(&mut graph, all_reduce((0..64).collect(), 1 << 30), &[]);
    let came = flow(&ring(64, 40), &graph).unwrap();
    let moved = 2.0 * 63.0 / 64.0 * f64::from(1 << 30);
    let expected = moved / (40.0 * 25.0 / 8.0);
    assert!((came.end.0 as f64 / expected - 1.0).abs() < 1e-6);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// For any demands and any number of wavelengths, no transfer starves.
    #[test]
    fn nobody_starves_on_fibre(
        wavelengths in 1_u32..20,
        flows in prop::collection::vec((0..48_u32, 1..48_u32, 1..(1_u64 << 32)), 1..120),
    ) {
        let mut graph = step(48);
        // Bytes over each segment, with each transfer on the shorter path around.
        let mut loads = [[0_u64; 48]; 2];
        for (source, up, size) in flows {
            add(&mut graph, transfer(source, (source + up) % 48, size), &[]);
            let (way, hops) = if up <= 24 { (0, up) } else { (1, 48 - up) };
            for hop in 0..hops {
                let at = if way == 0 { source + hop } else { source + 47 - hop };
                loads[way][at as usize % 48] += size;
            }
        }
        let most = loads.iter().flatten().max().copied().unwrap_or(0);
        let one = f64::from(wavelengths) * 25.0 / 8.0;
        let came = flow(&ring(48, 2 * wavelengths), &graph).unwrap();
        // The time of the fullest segment, plus that of reconfiguration.
        let bound = most as f64 / one;
        prop_assert!((came.end.0 as f64) < 4.0 * bound + 1e6, "{} > {bound}", came.end.0);
    }
}

#[test]
fn a_part_stands_for_all() {
    for (parts, interconnect) in [(8, flat(64)), (8, ring(64, 40))] {
        let mut all = step(64);
        let mut one = StepGraph::of_parts("step", 8, parts);
        for (graph, copies) in [(&mut all, parts), (&mut one, 1)] {
            for first in (0..copies).map(|copy| copy * 8) {
                for device in 0..8 {
                    let time = Nanos(u64::from(1000 * device));
                    let computed = add(graph, StepOp::compute(first + device, time), &[]);
                    let next = add(
                        graph,
                        transfer(first + device, first + (device + 3) % 8, 1 << 22),
                        &[computed],
                    );
                    add(
                        graph,
                        transfer(first + device, (first + device + 8) % 64, 1 << 20),
                        &[next],
                    );
                }
            }
        }
        let whole = flow(&interconnect, &all).unwrap();
        let part = flow(&interconnect, &one).unwrap();
        assert_eq!((whole.end, whole.changes), (part.end, part.changes));
        assert_eq!(whole.busy[..8], part.busy);
        assert_eq!(whole.moved.0, 8 * part.moved.0);
    }
}

#[test]
fn servers_share_their_ports() {
    let server = BitsPerSecond(8e9);
    let kind = InterconnectKind::Cluster { per_server: 4, server, oversubscription: 2.0 };
    let cluster = Interconnect { kind, rate: BitsPerSecond(80e9), ..flat(8) };
    let mut graph = step(8);
    let near = add(&mut graph, transfer(0, 1, 1000), &[]);
    let far: Vec<u32> =
        (0..4).map(|device| add(&mut graph, transfer(device, 4 + device, 1000), &[])).collect();
    let came = flow(&cluster, &graph).unwrap();
    // Four share one byte per nanosecond, and the network between two servers has the bandwidth of one.
    assert_eq!(came.times[far[0] as usize].1, Nanos(4000));
    assert!(came.times[near as usize].1 < Nanos(110));
}

#[test]
fn what_has_no_circuit_goes_over_others() {
    // Each device sends to all others, over two switches.
    let kind = InterconnectKind::Circuits { switches: 2, every: None, delay: Nanos(0), clos: None };
    let switches = Interconnect { kind, ..flat(16) };
    let mut graph = step(16);
    for source in 0..16 {
        for target in (0..16).filter(|&target| target != source) {
            add(&mut graph, transfer(source, target, 1000), &[]);
        }
    }
    let came = flow(&switches, &graph).unwrap();
    assert!(came.end > Nanos(15_000), "an ideal switch would take so long");
}

#[test]
fn rings_of_rows_and_columns_join_all() {
    let Interconnect { rate, kind: InterconnectKind::Ring(ring), .. } = ring(64, 40) else {
        panic!()
    };
    let kind = InterconnectKind::Rings { columns: 8, ring };
    let rings = Interconnect { rate, kind, ..flat(64) };
    let (mut all, mut one) = (step(64), StepGraph::of_parts("step", 16, 4));
    for source in 0..64 {
        add(&mut all, transfer(source, (source + 11) % 64, 1 << 20), &[]);
    }
    for source in 0..16 {
        add(&mut one, transfer(source, source + 11, 1 << 20), &[]);
    }
    let whole = flow(&rings, &all).unwrap();
    assert_eq!(whole.end, flow(&rings, &one).unwrap().end);
    let error = flow(&rings, &StepGraph::of_parts("step", 4, 16)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a part has 4 devices; expected a multiple of 8, which stand together"
    );
}

/// Returns the makespan of an all-reduce over all devices, with these faults.
/// Two flows over one link of a ring share it; on a torus with a link each they do not.
#[test]
fn links_are_shared_as_paths_cross() {
    let graph = |pairs: &[(u32, u32)]| {
        let mut graph = StepGraph::new("step", 4);
        for &(source, target) in pairs {
            graph.add("", StepOp::Transfer { source, target, size: Bytes(1_000_000) }, &[]);
        }
        graph
    };
    let end = |name: &str, pairs: &[(u32, u32)]| {
        let topology: Topology = name.parse().unwrap();
        flow(topology.interconnect(), &graph(pairs)).unwrap().end.0
    };
    let line = "ring:4,rate=8Gbit/s,latency=0ns";
    assert_eq!(end(line, &[(0, 1)]), 1_000_000);
    assert_eq!(end(line, &[(0, 1), (1, 2)]), 1_000_000, "each has a link");
    assert_eq!(end(line, &[(0, 1), (0, 1)]), 2_000_000, "both have the same link");
    assert_eq!(end("switch:4,rate=8Gbit/s,latency=0ns", &[(0, 2), (1, 2)]), 2_000_000);
}

fn told(interconnect: Interconnect, faults: Faults) -> f64 {
    let devices = interconnect.devices;
    let mut graph = step(devices);
    add(&mut graph, all_reduce((0..devices).collect(), 1 << 30), &[]);
    flow(&Interconnect { faults, ..interconnect }, &graph).unwrap().end.0 as f64
}

#[test]
fn a_ring_that_is_cut_is_a_row() {
    let cut = Faults { is_cut: true, ..Faults::default() };
    // Whole sums go both ways instead of 63/64 of them, as the link between the two ends is gone.
    let whole = told(ring(64, 320), Faults::default());
    let row = told(ring(64, 320), cut.clone());
    assert!((row / whole - 64.0 / 63.0).abs() < 1e-3, "{row} {whole}");
    // The only path from the first device to the last passes all others.
    let mut graph = step(64);
    add(&mut graph, transfer(0, 63, 1 << 30), &[]);
    add(&mut graph, transfer(16, 32, 1 << 30), &[]);
    let around = flow(&ring(64, 320), &graph).unwrap();
    let along = flow(&Interconnect { faults: cut.clone(), ..ring(64, 320) }, &graph).unwrap();
    let slower = along.end.0 as f64 / around.end.0 as f64;
    assert!((1.9..2.1).contains(&slower), "{:?} {:?}", along.end, around.end);
    // A part that represents others is one in the middle.
    let (mut part, mut every) = (StepGraph::of_parts("step", 8, 8), step(64));
    for device in 0..8 {
        let members: Vec<u32> = (device..64).step_by(8).collect();
        add(&mut part, all_reduce(members.clone(), 1 << 30), &[]);
        add(&mut every, all_reduce(members, 1 << 30), &[]);
    }
    let faults = cut;
    let one = flow(&Interconnect { faults: faults.clone(), ..ring(64, 320) }, &part).unwrap();
    let all = flow(&Interconnect { faults, ..ring(64, 320) }, &every).unwrap();
    let same = one.end.0 as f64 / all.end.0 as f64;
    assert!((0.98..1.02).contains(&same), "{:?} {:?}", one.end, all.end);
}

#[test]
fn all_are_as_slow_as_who_has_least() {
    let fabrics = [
        flat(64),
        ring(64, 320),
        Interconnect {
            kind: InterconnectKind::Circuits {
                switches: 16,
                every: None,
                delay: Nanos(0),
                clos: None,
            },
            ..flat(64)
        },
    ];
    for fabric in fabrics {
        let faults = Faults { devices: vec![(9, 0.5), (40, 0.8)], ..Faults::default() };
        let slower = told(fabric.clone(), faults) / told(fabric.clone(), Faults::default());
        assert!((1.99..2.01).contains(&slower), "{slower} {fabric:?}");
    }
    let server = BitsPerSecond(8e9);
    let kind = InterconnectKind::Cluster { per_server: 4, server, oversubscription: 1.0 };
    let cluster = Interconnect { kind, rate: BitsPerSecond(80e9), ..flat(8) };
    let faults = Faults { servers: vec![(1, 0.25)], ..Faults::default() };
    assert_eq!(told(cluster.clone(), faults), 4.0 * told(cluster, Faults::default()));
}

#[test]
fn faults_that_cannot_be_are_refused() {
    let of = |devices: Vec<(u32, f64)>, servers: Vec<(u32, f64)>, is_cut: bool| {
        let faults = Faults { devices, servers, is_cut };
        Interconnect { faults, ..flat(8) }.check().unwrap_err().to_string()
    };
    assert_eq!(of(vec![(8, 0.5)], vec![], false), "a weak device is 8; expected 0 to 7");
    assert_eq!(of(vec![(1, 0.0)], vec![], false), "what is left of it is 0; expected 0.001 to 1");
    assert_eq!(
        of(vec![], vec![(0, 0.5)], false),
        "the number of weak servers is 1; expected 0 to 0"
    );
    assert_eq!(of(vec![], vec![], true), "the number of cuts is 1; expected 0 to 0");
}

#[test]
fn leaves_of_switches_are_in_the_way_of_what_leaves_them() {
    let told = |clos: Option<Clos>, apart: u32| {
        let kind = InterconnectKind::Circuits { switches: 16, every: None, delay: Nanos(0), clos };
        let mut graph = step(64);
        for device in 0..64 {
            add(&mut graph, transfer(device, (device + apart) % 64, 1 << 20), &[]);
        }
        flow(&Interconnect { kind, ..flat(64) }, &graph).unwrap().end.0 as f64
    };
    let clos = |oversubscription| Some(Clos { devices: 8, oversubscription });
    // All devices send to the other half: every circuit leaves its leaf.
    assert_eq!(told(clos(1.0), 32), told(None, 32));
    assert_eq!(told(clos(4.0), 32), 4.0 * told(None, 32));
    // One circuit of eight leaves its leaf, and can use the uplinks that the others do not need.
    assert_eq!(told(clos(4.0), 1), told(None, 1));
}

#[test]
fn switches_change_where_that_pays() {
    // In six phases each device sends to another, over two switches.
    let told = |times: Option<(u64, u64)>| {
        let every = times.map(|(every, _)| Nanos(every));
        let delay = Nanos(times.map_or(0, |(_, delay)| delay));
        let kind = InterconnectKind::Circuits { switches: 2, every, delay, clos: None };
        let mut graph = step(16);
        let mut before = vec![];
        for apart in 1..7 {
            let send =
                |device| add(&mut graph, transfer(device, (device + apart) % 16, 1 << 20), &before);
            before = (0..16).map(send).collect();
        }
        flow(&Interconnect { kind, ..flat(16) }, &graph).unwrap()
    };
    let once = told(None);
    assert_eq!(once.changes, 1);
    let fast = told(Some((100_000, 10_000)));
    assert!(2 * fast.end.0 < once.end.0, "{:?} beside {:?}", fast.end, once.end);
    assert!(fast.changes >= 6);
    // Nothing is transferred in the dark: with a long delay, static circuits are better.
    assert_eq!(told(Some((100_000_000, 30_000_000))).end, once.end);
}
