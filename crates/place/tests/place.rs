//! Placements: no worse than the rules, within device memory, and with all the work of the model in the
//! step graph.

use base::{BitsPerSecond, Bytes, Nanos, Random};
use ir::{CollectiveKind, StepGraph, StepOp};
use place::{
    Balanced, Cost, DeviceModel, Edge, Op, OpError, OpGraph, ParallelismCut, PlacementLimits, Rule,
    Split, assign, placed_by, step_of,
};
use proptest::prelude::*;

fn random_graph(count: u32, seed: u64) -> OpGraph {
    let mut random = Random::of(&[seed]);
    let ops = (0..count).map(|number| {
        let before = random.below(4) as u32;
        let after = random.distinct(before, number);
        let sizes = |random: &mut Random| vec![Bytes(1000 * (1 + random.below(20)))];
        let after =
            after.into_iter().map(|from| Edge { from, sizes: sizes(&mut random) }).collect();
        let time = Nanos(1000 * (1 + random.below(40)));
        let costs = vec![Cost { time, kept: Bytes(random.below(100)) }];
        let name = format!("op {number}");
        let resident = Bytes(random.below(1000));
        Op {
            name,
            costs,
            after,
            resident,
            gradients: resident,
            with: None,
            shards_max: 8,
            ..Op::default()
        }
    });
    OpGraph { batches: vec![1], ops: ops.collect(), sums: Vec::new() }
}

fn room(devices: u32, reach: u32, memory: u64) -> DeviceModel {
    let (rate, latency) = (BitsPerSecond(8e9), Nanos(100));
    DeviceModel { devices, reach, rate, servers: None, latency, memory: Bytes(memory) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn no_rule_is_better(count in 1_u32..30, devices in 1_u32..9, seed: u64) {
        let graph = random_graph(count, seed);
        let balanced = Balanced::new(&graph, &graph.at(1).unwrap(), Nanos(10_000), devices);
        let room = room(devices, devices, 1 << 40);
        let limits = PlacementLimits { evaluations: 200, seed };
        let found = assign(&graph, &balanced, &room, &limits).unwrap();
        prop_assert!(found.end >= found.bound && found.end <= found.rule_end);
        for rule in Rule::ALL {
            prop_assert!(found.end <= placed_by(&graph, &balanced, &room, rule).unwrap().end);
        }
        prop_assert_eq!(&found, &assign(&graph, &balanced, &room, &limits).unwrap());
    }

    #[test]
    fn no_device_holds_more_than_it_can(count in 1_u32..30, devices in 1_u32..9, seed: u64, part in 1.0_f64..2.5) {
        let graph = random_graph(count, seed);
        let balanced = Balanced::new(&graph, &graph.at(1).unwrap(), Nanos(10_000), devices);
        let all: u64 = balanced.shards.iter().map(|shard| shard.memory.0).sum();
        let memory = (all as f64 / f64::from(devices) * part) as u64;
        let room = room(devices, devices, memory);
        match assign(&graph, &balanced, &room, &PlacementLimits { evaluations: 200, seed }) {
            Ok(found) => {
                let mut held = vec![0; devices as usize];
                for (shard, &device) in balanced.shards.iter().zip(&found.devices) {
                    held[device as usize] += shard.memory.0;
                }
                prop_assert!(held.into_iter().all(|held| held <= memory));
            }
            Err(error) => {
                let is_memory = matches!(error, OpError::Large { .. } | OpError::Full { .. });
                prop_assert!(is_memory, "{}", error);
            }
        }
    }

    #[test]
    fn tasks_do_all_that_the_model_does(count in 1_u32..20, power in 0_u32..4, copies in 1_u32..5, seed: u64) {
        let devices = 1 << power;
        let graph = random_graph(count, seed);
        let balanced = Balanced::new(&graph, &graph.at(1).unwrap(), Nanos(10_000), devices);
        let room = room(devices, devices, 1 << 40);
        let found = assign(&graph, &balanced, &room, &PlacementLimits { evaluations: 20, seed }).unwrap();
        let cut = ParallelismCut { copies, devices, width: devices };
        let tasks = step_of(&graph, &balanced, &found, cut, 1).unwrap();
        tasks.order().unwrap();
        prop_assert_eq!((tasks.devices, tasks.parts), (devices, copies));
        let (mut computed, mut summed) = (0, 0);
        for node in tasks.nodes() {
            match &node.op {
                StepOp::Compute { time, .. } => computed += time.0,
                StepOp::Transfer { source, target, .. } => prop_assert!(source != target),
                StepOp::Collective(op) => {
                    prop_assert_eq!(op.devices.len() as u32, copies);
                    summed += op.size().0;
                }
            }
        }
        let times: u64 = balanced.shards.iter().map(|shard| shard.time.0).sum();
        prop_assert_eq!(computed, times);
        let gradients: u64 = graph.ops.iter().map(|op| op.gradients.0).sum();
        prop_assert!(copies == 1 || summed >= gradients);
    }
}

#[test]
fn shards_meet_block_by_block() {
    let mut graph = random_graph(2, 0);
    graph.ops[0].after.clear();
    graph.ops[1].after = vec![Edge { from: 0, sizes: vec![Bytes(800)] }];
    for (one, other, expected) in [
        (40, 20, vec![vec![(0, 200), (1, 200)], vec![(2, 200), (3, 200)]]),
        (20, 40, vec![vec![(0, 200)], vec![(0, 200)], vec![(1, 200)], vec![(1, 200)]]),
    ] {
        graph.ops[0].costs[0].time = Nanos(one);
        graph.ops[1].costs[0].time = Nanos(other);
        let balanced = Balanced::new(&graph, &graph.at(1).unwrap(), Nanos(10), 8);
        let (first, count) = balanced.of[1];
        let after: Vec<Vec<(u32, u64)>> = balanced.shards[first as usize..(first + count) as usize]
            .iter()
            .map(|shard| shard.after.iter().map(|&(from, size)| (from, size.0)).collect())
            .collect();
        assert_eq!(after, expected);
    }
}

/// A chain of operations with these splits, each of 40 ns and 800 bytes of everything.
fn chain(splits: &[Split]) -> OpGraph {
    let edge = |from: u32| Edge { from, sizes: vec![Bytes(800)] };
    let op = |(number, &split): (u32, &Split)| Op {
        name: format!("op {number}"),
        costs: vec![Cost { time: Nanos(40), kept: Bytes(0) }],
        after: number.checked_sub(1).map(edge).into_iter().collect(),
        resident: Bytes(800),
        gradients: Bytes(800),
        shards_max: 4,
        split,
        ..Op::default()
    };
    OpGraph { batches: vec![1], ops: (0..).zip(splits).map(op).collect(), sums: Vec::new() }
}

/// Shards and step graph of a chain on four devices, split into up to four shards.
fn carried(graph: &OpGraph, copies: u32) -> (Balanced, StepGraph) {
    let balanced = Balanced::new(graph, &graph.at(1).unwrap(), Nanos(10), 4);
    let placed = placed_by(graph, &balanced, &room(4, 4, 1 << 40), Rule::Stages).unwrap();
    let cut = ParallelismCut { copies, devices: 4, width: 4 };
    let tasks = step_of(graph, &balanced, &placed, cut, 1).unwrap();
    tasks.order().unwrap();
    (balanced, tasks)
}

fn collectives(tasks: &StepGraph) -> Vec<(CollectiveKind, usize, u64)> {
    let found = tasks.nodes().iter().filter_map(|node| match &node.op {
        StepOp::Collective(op) => {
            Some((op.collective.kind().clone(), op.devices.len(), op.size().0))
        }
        _ => None,
    });
    found.collect()
}

#[test]
fn shards_tell_each_other_what_they_must() {
    use CollectiveKind::{AllGather, AllReduce, ReduceScatter};
    use Split::{Blocks, Inputs, Outputs};
    for (splits, expected) in [
        (vec![Blocks, Blocks], vec![]),
        (vec![Blocks, Outputs], vec![AllGather]),
        (vec![Outputs, Inputs], vec![]),
        (vec![Inputs, Blocks], vec![ReduceScatter]),
        (vec![Inputs, Outputs], vec![AllReduce]),
        (vec![Blocks, Outputs, Inputs, Blocks], vec![AllGather, ReduceScatter]),
    ] {
        let (balanced, tasks) = carried(&chain(&splits), 1);
        let expected: Vec<_> = expected.into_iter().map(|kind| (kind, 4, 800)).collect();
        assert_eq!(collectives(&tasks), expected, "{splits:?}");
        // No transfers between devices otherwise, and each device computes its quarter.
        assert!(!tasks.nodes().iter().any(|node| matches!(node.op, StepOp::Transfer { .. })));
        let computed = balanced.shards.iter().filter(|shard| shard.meeting.is_none());
        assert!(computed.clone().all(|shard| shard.time == Nanos(10)));
        assert_eq!(computed.count(), 4 * splits.len());
    }
}

#[test]
fn who_takes_other_samples_adds_gradients_up() {
    let (balanced, tasks) = carried(&chain(&[Split::Samples]), 1);
    assert!(balanced.shards.iter().all(|shard| shard.memory == Bytes(800)));
    assert_eq!(collectives(&tasks), [(CollectiveKind::AllReduce, 4, 800)]);
    let (_, tasks) = carried(&chain(&[Split::Samples]), 3);
    assert_eq!(collectives(&tasks), [(CollectiveKind::AllReduce, 12, 800)]);
    // Other splits all-reduce with the other copies only, each its part.
    let (balanced, tasks) = carried(&chain(&[Split::Outputs]), 3);
    assert!(balanced.shards.iter().all(|shard| shard.memory == Bytes(200)));
    assert_eq!(collectives(&tasks), vec![(CollectiveKind::AllReduce, 3, 200); 4]);
}

#[test]
fn launches_are_not_cut() {
    let mut graph = chain(&[Split::Blocks]);
    graph.ops[0].launch = Nanos(8);
    let (balanced, _) = carried(&graph, 1);
    assert!(balanced.shards.iter().all(|shard| shard.time == Nanos(8 + 32 / 4)));
}

#[test]
fn costs_lie_between_those_that_are_known() {
    let mut graph = random_graph(1, 0);
    graph.batches = vec![2, 4];
    let cost = |time| Cost { time: Nanos(time), kept: Bytes(0) };
    graph.ops[0].costs = vec![cost(100), cost(160)];
    let time = |batch| graph.at(batch).unwrap().costs[0].time.0;
    assert_eq!([1, 2, 3, 4, 8].map(time), [70, 100, 130, 160, 280]);
}

#[test]
fn what_is_wrong_is_said() {
    let graph = random_graph(3, 1);
    let mut cyclic = graph.clone();
    cyclic.ops[0].after = vec![Edge { from: 2, sizes: vec![Bytes(1)] }];
    cyclic.ops[2].after = vec![Edge { from: 0, sizes: vec![Bytes(1)] }];
    let error = cyclic.at(1).unwrap_err();
    assert_eq!(error.to_string(), "operation \"op 0\" needs itself, by others");
    let mut unknown = graph.clone();
    unknown.ops[1].with = Some(9);
    assert!(matches!(unknown.at(1), Err(OpError::Unknown { found: 9, .. })));
    let mut large = graph.clone();
    large.ops[1].resident = Bytes(1 << 30);
    large.ops[1].shards_max = 1;
    let balanced = Balanced::new(&large, &large.at(1).unwrap(), Nanos(1000), 4);
    let error = assign(
        &large,
        &balanced,
        &room(4, 4, 1 << 20),
        &PlacementLimits { evaluations: 0, seed: 0 },
    );
    assert!(error.unwrap_err().to_string().starts_with("operation \"op 1\" needs 1.0 GiB"));
    let mut batches = graph;
    batches.batches = vec![4, 2];
    assert!(matches!(batches.at(1), Err(OpError::Batches { .. })));
}
