//! Schedules of MPMD steps, compared with lower bounds.

use std::sync::Arc;

use base::{BitsPerSecond, Bytes, Nanos};
use cost::ChannelCost;
use ir::{Collective, Dependency, StepGraph, StepOp};
use plan::{CommStrategy, DeviceProblem, DeviceProblemError, QueuePolicy, SearchLimits};
use proptest::prelude::*;

fn channel(rate: f64) -> ChannelCost {
    let (rate, sums) = (BitsPerSecond(rate), BitsPerSecond(1e15));
    ChannelCost { rate, latency: Nanos(0), sums, incast: 0.0, overlap: Vec::new() }
}

/// Operation and dependencies of a node.
type Node = (StepOp, Vec<Dependency>);

fn node(op: StepOp, after: &[u32]) -> Node {
    (op, after.iter().copied().map(Dependency::on).collect())
}

fn compute(device: u32, time: u64) -> StepOp {
    StepOp::compute(device, Nanos(time))
}

fn transfer(source: u32, target: u32, size: u64) -> StepOp {
    StepOp::Transfer { source, target, size: Bytes(size) }
}

fn all_reduce(devices: Vec<u32>, size: u64) -> StepOp {
    StepOp::collective(Collective::all_reduce, devices, Bytes(size)).unwrap()
}

/// A problem of four devices.
fn problem(nodes: Vec<Node>, rates: &[f64], steps: u32) -> DeviceProblem {
    let mut step = StepGraph::new("step", 4);
    for (op, after) in nodes {
        step.add("", op, &after);
    }
    let channels = rates.iter().map(|&rate| Arc::new(channel(rate)) as _).collect();
    DeviceProblem::new(step, channels, steps).unwrap()
}

/// Rate at which a byte takes a nanosecond.
const BYTE_A_NANO: f64 = 8e9;

#[test]
fn what_the_rest_waits_for_goes_first() {
    // Device 0 sends 100 bytes that nothing depends on, then 50 for a long computation on device 2.
    let nodes = vec![
        node(compute(0, 10), &[]),
        node(transfer(0, 1, 100), &[0]),
        node(transfer(0, 2, 50), &[0]),
        node(compute(2, 200), &[2]),
    ];
    let graph = problem(nodes, &[BYTE_A_NANO], 1);
    assert_eq!(graph.end(&graph.greedy(), QueuePolicy::Fifo), Nanos(10 + 100 + 50 + 200));
    assert_eq!(graph.end(&graph.greedy(), QueuePolicy::CriticalPath), Nanos(10 + 50 + 200));
}

#[test]
fn an_all_reduce_takes_every_member_and_pieces_let_others_between() {
    let nodes = vec![
        node(all_reduce(vec![0, 1], 1_000_000), &[]),
        node(compute(0, 100_000), &[]),
        node(transfer(0, 1, 10_000), &[1]),
        node(compute(1, 2_000_000), &[2]),
    ];
    let graph = problem(nodes, &[BYTE_A_NANO], 1);
    let whole = graph.end(&graph.greedy(), QueuePolicy::CriticalPath);
    assert_eq!(whole, Nanos(1_000_000 + 10_000 + 2_000_000), "the transfer waits for all of it");
    let limits = SearchLimits { evaluations: 500, chains: 1, seed: 0 };
    let found = graph.search(QueuePolicy::CriticalPath, &limits);
    assert_eq!(found.end, Nanos(125_000 + 10_000 + 2_000_000), "or for an eighth of it");
    assert_eq!(found, graph.search(QueuePolicy::CriticalPath, &limits));
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let job = (0..3_u8, 0..4_u32, 1..4_u32, 1..500_u64).prop_map(|(kind, one, apart, size)| {
        let other = (one + apart) % 4;
        match kind {
            0 => compute(one, size),
            1 => transfer(one, other, size),
            _ => all_reduce(vec![one, other], size),
        }
    });
    let after = prop::collection::vec((any::<prop::sample::Index>(), 0..2_u32), 0..3);
    prop::collection::vec((job, after), 1..25).prop_map(|given| {
        let count = given.len();
        let make = |(number, (job, after)): (usize, (StepOp, Vec<(prop::sample::Index, u32)>))| {
            let after = after.into_iter().filter_map(|(which, before)| {
                let node = which.index(if before == 0 { number.max(1) } else { count }) as u32;
                let is_there = before > 0 || (node as usize) < number;
                is_there.then_some(Dependency { node, steps_before: before })
            });
            (job, after.collect())
        };
        given.into_iter().enumerate().map(make).collect()
    })
}

#[test]
fn a_computation_of_several_devices_takes_all_of_them_at_a_time() {
    let nodes = vec![
        node(compute(0, 100), &[]),
        node(StepOp::compute(vec![0, 1], Nanos(50)), &[]),
        node(compute(1, 30), &[]),
    ];
    let graph = problem(nodes, &[BYTE_A_NANO], 1);
    assert_eq!(graph.end(&[], QueuePolicy::Strict), Nanos(100 + 50 + 30));
    assert_eq!(graph.end(&[], QueuePolicy::Fifo), Nanos(100 + 50), "device 1 does not wait idle");
}

#[test]
fn loop_carried_dependencies_keep_steps_apart() {
    let step = |carried: bool| {
        let mut nodes = vec![node(compute(0, 100), &[]), node(transfer(0, 1, 40), &[0])];
        nodes.push(node(compute(1, 100), &[1]));
        if carried {
            nodes[0].1.push(Dependency { node: 2, steps_before: 1 });
        }
        problem(nodes, &[BYTE_A_NANO], 4)
            .end(&[CommStrategy { pieces: 1, channel: Some(0) }], QueuePolicy::Fifo)
    };
    assert_eq!(step(false), Nanos(4 * 100 + 40 + 100), "steps overlap");
    assert_eq!(step(true), Nanos(4 * 240), "each begins with what the one before has made");
}

#[test]
fn steps_that_cannot_be_planned_are_refused() {
    let step = StepGraph::of_parts("step", 2, 2);
    let parts = DeviceProblem::new(step, vec![Arc::new(channel(BYTE_A_NANO))], 1).unwrap_err();
    assert_eq!(parts, DeviceProblemError::Parts { parts: 2 });
    let ring: topology::Topology = "ring:4".parse().unwrap();
    let few = Arc::new(ring.interconnect().clone());
    let few = DeviceProblem::new(StepGraph::new("step", 5), vec![few], 1).unwrap_err();
    assert_eq!(few, DeviceProblemError::Devices { found: 5, devices: 4 });
    let none = DeviceProblem::new(StepGraph::new("step", 2), vec![], 1).unwrap_err();
    assert_eq!(none, DeviceProblemError::NoChannels);
    let mut step = StepGraph::new("step", 1);
    step.add("", transfer(0, 1, 10), &[]);
    let error = DeviceProblem::new(step, vec![Arc::new(channel(BYTE_A_NANO))], 1).unwrap_err();
    assert!(error.to_string().contains("node 0 is of device 1"), "{error}");
}

proptest! {
    /// A planned step communicates all that the step does, between the same devices, and its order
    /// contradicts no dependency, whatever the channels.
    #[test]
    fn plans_can_be_carried_out(nodes in nodes(), steps in 1..4_u32, seed in 0..100_u64) {
        let rates = [BYTE_A_NANO, BYTE_A_NANO / 2.0];
        let graph = problem(nodes.clone(), &rates, steps);
        let limits = SearchLimits { evaluations: 50, chains: 1, seed };
        let plan = graph.search(QueuePolicy::CriticalPath, &limits);
        let mut step = StepGraph::new("step", 4);
        nodes.iter().for_each(|(op, after)| { step.add("", op.clone(), after); });
        let planned = plan.apply(&step).unwrap();
        let sizes = |op: &StepOp| match op {
            StepOp::Compute { time, .. } => (op.devices().collect::<Vec<_>>(), time.0),
            StepOp::Transfer { size, .. } => (op.devices().collect(), size.0),
            StepOp::Collective(of) => (op.devices().collect(), of.size().0),
        };
        let mut carried = vec![0; step.len()];
        for (piece, &origin) in planned.graph.nodes().iter().zip(&planned.origins) {
            let (devices, size) = sizes(&piece.op);
            prop_assert_eq!(devices, sizes(step.op(origin)).0);
            carried[origin as usize] += size;
        }
        let all: Vec<u64> = step.nodes().iter().map(|node| sizes(&node.op).1).collect();
        prop_assert_eq!(carried, all);
        let order = planned.graph.order().unwrap();
        prop_assert_eq!(order.len(), planned.graph.len());
        let pieces: usize = plan.order.len();
        let computes = step.nodes().iter().filter(|node| matches!(node.op, StepOp::Compute { .. }));
        prop_assert_eq!(pieces + computes.count(), planned.graph.len());
    }

    /// The makespan is at least the work of any device or channel, and at most all work in sequence;
    /// and every plan ends.
    #[test]
    fn schedules_keep_to_what_there_is(nodes in nodes(), steps in 1..4_u32, pieces in 1..5_u32) {
        let graph = problem(nodes.clone(), &[BYTE_A_NANO, BYTE_A_NANO / 2.0], steps);
        let strategy = |kind: usize| CommStrategy {
            pieces: pieces + kind as u32 % 3,
            channel: [Some(0), Some(1), None][kind % 3],
        };
        let strategies: Vec<CommStrategy> = (0..graph.kinds()).map(strategy).collect();
        let (mut devices, mut sends, mut all) = ([0; 4], [0; 4], 0);
        for (op, _) in &nodes {
            match op {
                StepOp::Compute { devices: of, time } => {
                    devices[of[0] as usize] += time.0;
                    all += time.0;
                }
                StepOp::Transfer { source, size, .. } => {
                    sends[*source as usize] += size.0;
                    all += 2 * size.0;
                }
                StepOp::Collective(op) => {
                    for &device in op.devices.iter() {
                        sends[device as usize] += op.size().0;
                    }
                    all += 2 * op.size().0;
                }
            }
        }
        let rounding = 10 * nodes.len() as u64;
        for policy in [QueuePolicy::Fifo, QueuePolicy::CriticalPath] {
            let end = graph.end(&strategies, policy).0;
            prop_assert!(end <= u64::from(steps) * (all + rounding));
            for device in 0..4 {
                prop_assert!(end >= u64::from(steps) * devices[device]);
                // Both channels together send three bytes in two nanoseconds.
                let least = u64::from(steps) * sends[device] * 2 / 3;
                prop_assert!(end + u64::from(steps) * rounding >= least, "{end} < {least}");
            }
        }
        let found = graph.search(QueuePolicy::CriticalPath, &SearchLimits { evaluations: 30, chains: 1, seed: 1 });
        prop_assert!(found.end <= graph.end(&graph.greedy(), QueuePolicy::CriticalPath));
    }
}
