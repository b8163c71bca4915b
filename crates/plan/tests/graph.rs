//! Schedules of steps whose devices differ, held against what no schedule can beat.

use base::{BitsPerSecond, Bytes, Nanos};
use place::{CollectiveKind, Job};
use plan::{ChannelCost, Dependency, Graph, Limits, Line, Manner, Node};
use proptest::prelude::*;

fn channel(rate: f64) -> ChannelCost {
    let (rate, sums) = (BitsPerSecond(rate), BitsPerSecond(1e15));
    ChannelCost { rate, latency: Nanos(0), sums, incast: 0.0, overlap: Vec::new() }
}

fn node(job: Job, after: &[u32]) -> Node {
    let after = after.iter().map(|&task| Dependency { task, before: 0 });
    Node { job, after: after.collect() }
}

fn compute(device: u32, time: u64) -> Job {
    Job::Compute { device, time: Nanos(time) }
}

fn transfer(source: u32, target: u32, size: u64) -> Job {
    Job::Transfer { source, target, size: Bytes(size) }
}

fn all_reduce(members: std::sync::Arc<[u32]>, size: u64) -> Job {
    Job::Collective { kind: CollectiveKind::AllReduce, members, size: Bytes(size) }
}

/// A byte takes a nanosecond.
const BYTE_A_NANO: f64 = 8e9;

#[test]
fn what_the_rest_waits_for_goes_first() {
    // Device 0 sends 100 bytes that nobody waits for, then 50 that device 2 computes long with.
    let nodes = vec![
        node(compute(0, 10), &[]),
        node(transfer(0, 1, 100), &[0]),
        node(transfer(0, 2, 50), &[0]),
        node(compute(2, 200), &[2]),
    ];
    let graph = Graph::new(nodes, vec![channel(BYTE_A_NANO)], 1);
    assert_eq!(graph.end(&graph.greedy(), Line::Fifo), Nanos(10 + 100 + 50 + 200));
    assert_eq!(graph.end(&graph.greedy(), Line::CriticalPath), Nanos(10 + 50 + 200));
}

#[test]
fn an_all_reduce_takes_every_member_and_pieces_let_others_between() {
    let members: std::sync::Arc<[u32]> = [0, 1].into();
    let nodes = vec![
        node(all_reduce(members, 1_000_000), &[]),
        node(compute(0, 100_000), &[]),
        node(transfer(0, 1, 10_000), &[1]),
        node(compute(1, 2_000_000), &[2]),
    ];
    let graph = Graph::new(nodes, vec![channel(BYTE_A_NANO)], 1);
    let whole = graph.end(&graph.greedy(), Line::CriticalPath);
    assert_eq!(whole, Nanos(1_000_000 + 10_000 + 2_000_000), "the transfer waits for all of it");
    let limits = Limits { evaluations: 500, chains: 1, seed: 0 };
    let found = graph.search(Line::CriticalPath, &limits);
    assert_eq!(found.end, Nanos(125_000 + 10_000 + 2_000_000), "or for an eighth of it");
    assert_eq!(found, graph.search(Line::CriticalPath, &limits));
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let job = (0..3_u8, 0..4_u32, 1..4_u32, 1..500_u64).prop_map(|(kind, one, apart, size)| {
        let other = (one + apart) % 4;
        match kind {
            0 => compute(one, size),
            1 => transfer(one, other, size),
            _ => all_reduce([one, other].into(), size),
        }
    });
    let after = prop::collection::vec((any::<prop::sample::Index>(), 0..2_u32), 0..3);
    prop::collection::vec((job, after), 1..25).prop_map(|given| {
        let count = given.len();
        let make = |(number, (job, after)): (usize, (Job, Vec<(prop::sample::Index, u32)>))| {
            let after = after.into_iter().filter_map(|(which, before)| {
                let task = which.index(if before == 0 { number.max(1) } else { count }) as u32;
                let is_there = before > 0 || (task as usize) < number;
                is_there.then_some(Dependency { task, before })
            });
            Node { job, after: after.collect() }
        };
        given.into_iter().enumerate().map(make).collect()
    })
}

proptest! {
    /// No schedule is shorter than the work of any device or channel, or longer than all work in a row;
    /// and every plan ends.
    #[test]
    fn schedules_keep_to_what_there_is(nodes in nodes(), steps in 1..4_u32, pieces in 1..5_u32) {
        let graph = Graph::new(nodes.clone(), vec![channel(BYTE_A_NANO), channel(BYTE_A_NANO / 2.0)], steps);
        let manner = |kind: usize| Manner {
            pieces: pieces + kind as u32 % 3,
            channel: [Some(0), Some(1), None][kind % 3],
        };
        let manners: Vec<Manner> = (0..graph.kinds()).map(manner).collect();
        let (mut devices, mut sends, mut all) = ([0; 4], [0; 4], 0);
        for node in &nodes {
            match &node.job {
                Job::Compute { device, time } => {
                    devices[*device as usize] += time.0;
                    all += time.0;
                }
                Job::Transfer { source, size, .. } => {
                    sends[*source as usize] += size.0;
                    all += 2 * size.0;
                }
                Job::Collective { members, size, .. } => {
                    for &member in members.iter() {
                        sends[member as usize] += size.0;
                    }
                    all += 2 * size.0;
                }
            }
        }
        let rounding = 10 * nodes.len() as u64;
        for line in [Line::Fifo, Line::CriticalPath] {
            let end = graph.end(&manners, line).0;
            prop_assert!(end <= u64::from(steps) * (all + rounding));
            for device in 0..4 {
                prop_assert!(end >= u64::from(steps) * devices[device]);
                // Both channels together send three bytes in two nanoseconds.
                let least = u64::from(steps) * sends[device] * 2 / 3;
                prop_assert!(end + u64::from(steps) * rounding >= least, "{end} < {least}");
            }
        }
        let found = graph.search(Line::CriticalPath, &Limits { evaluations: 30, chains: 1, seed: 1 });
        prop_assert!(found.end <= graph.end(&graph.greedy(), Line::CriticalPath));
    }
}
