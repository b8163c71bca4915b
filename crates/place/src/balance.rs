//! Splits operations into shards of about equal time.
//!
//! Source: SiP-ML §3.2. An operation is split into a power of two of shards, such that each takes about
//! a quantum of time. Differs from the paper: 1. an operation that uses the parameters of another is
//! split like that one, and placed with it; 2. operations that are not split block by block ([`Split`])
//! exchange data by collectives, as their shards need the whole input or hold partial sums.

use base::{Bytes, Nanos};
use ir::CollectiveKind;

use crate::ops::{Costed, Op, OpGraph, Split};

/// One shard of an operation, or a collective between shards.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpShard {
    /// Index of its operation.
    pub op: u32,
    /// Compute time.
    pub time: Nanos,
    /// Memory that it needs on its device.
    pub memory: Bytes,
    /// Shards that it depends on, and the bytes that it needs of each.
    pub after: Vec<(u32, Bytes)>,
    /// The shard whose device it shares; itself, if it is placed by itself.
    pub place: u32,
    /// The collective, if it is one; then it computes nothing and is not placed.
    pub meeting: Option<ShardCollective>,
}

/// A collective from the shards of one operation to those of another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardCollective {
    /// Kind of collective.
    pub kind: CollectiveKind,
    /// Size of the whole vector.
    pub size: Bytes,
    /// First shard and number of shards of the receiving operation.
    pub receivers: (u32, u32),
}

/// A model split into shards, each after the shards that it depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Balanced {
    /// All shards, in topological order.
    pub shards: Vec<OpShard>,
    /// By operation, its first shard and its number of shards.
    pub of: Vec<(u32, u32)>,
}

impl Balanced {
    /// Splits operations into at most `most` shards each, of about `quantum` each. O(shards + edges of
    /// shards).
    ///
    /// # Arguments
    /// - `costed`: the costs of the operations of `graph`.
    pub fn new(graph: &OpGraph, costed: &Costed, quantum: Nanos, most: u32) -> Self {
        let counts = counts(graph, costed, quantum, most);
        let mut balanced = Self { shards: Vec::new(), of: vec![(0, 0); graph.ops.len()] };
        for &op in &costed.order {
            balanced.add(graph, costed, op, counts[op as usize]);
        }
        for (op, &(first, count)) in graph.ops.iter().zip(&balanced.of) {
            if let Some(with) = op.with {
                let place = balanced.of[with as usize].0;
                (0..count).for_each(|number| {
                    balanced.shards[(first + number) as usize].place = place + number;
                });
            }
        }
        balanced
    }

    /// Adds the shards of one operation after its dependencies.
    fn add(&mut self, graph: &OpGraph, costed: &Costed, number: u32, count: u32) {
        let op = &graph.ops[number as usize];
        let needed = &costed.after[number as usize];
        let meets: Vec<Option<CollectiveKind>> =
            needed.iter().map(|&(from, _)| self.meets(graph, from, (number, op, count))).collect();
        let met = meets.iter().flatten().count() as u32;
        let first = self.shards.len() as u32 + met;
        let mut after: Vec<(u32, Bytes)> = Vec::new();
        for (&(from, size), kind) in needed.iter().zip(&meets) {
            let Some(kind) = kind.clone() else { continue };
            let (start, sources) = self.of[from as usize];
            let place = self.shards.len() as u32;
            after.push((place, Bytes(0)));
            self.shards.push(OpShard {
                op: number,
                time: Nanos(0),
                memory: Bytes(0),
                after: (start..start + sources).map(|source| (source, Bytes(0))).collect(),
                place,
                meeting: Some(ShardCollective { kind, size, receivers: (first, count) }),
            });
        }
        self.of[number as usize] = (first, count);
        let cost = costed.costs[number as usize];
        let each = |whole: u64| whole.div_ceil(u64::from(count));
        let resident = op.resident.0;
        let resident = if op.split == Split::Samples { resident } else { each(resident) };
        let memory = Bytes(resident + each(cost.kept.0));
        let launch = op.launch.0.min(cost.time.0);
        let time = Nanos(launch + each(cost.time.0 - launch));
        for shard in 0..count {
            let apart = needed.iter().zip(&meets).filter(|(_, kind)| kind.is_none());
            let apart = apart.flat_map(|(&(from, size), _)| {
                let (start, sources) = self.of[from as usize];
                blocks(shard, count, sources).map(move |source| {
                    (start + source, Bytes(size.0.div_ceil(u64::from(count.max(sources)))))
                })
            });
            let after = after.iter().copied().chain(apart).collect();
            let (op, place) = (number, self.shards.len() as u32);
            self.shards.push(OpShard { op, time, memory, after, place, meeting: None });
        }
    }

    /// The collective between the shards of two operations; none, if they are connected block by block.
    fn meets(
        &self,
        graph: &OpGraph,
        from: u32,
        (number, op, count): (u32, &Op, u32),
    ) -> Option<CollectiveKind> {
        let source = &graph.ops[from as usize];
        let owns = |op: &Op, number: u32| op.with.unwrap_or(number);
        // Operations that share a place exchange data locally.
        if owns(source, from) == owns(op, number) {
            return None;
        }
        let is_sum = source.split == Split::Inputs && self.of[from as usize].1 > 1;
        let needs_all = op.split == Split::Outputs && count > 1;
        match (is_sum, needs_all) {
            (true, true) => Some(CollectiveKind::AllReduce),
            (true, false) => Some(CollectiveKind::ReduceScatter),
            (false, true) => Some(CollectiveKind::AllGather),
            (false, false) => None,
        }
    }

    /// Memory in use on each of `count` devices under a placement.
    pub fn held(&self, devices: &[u32], count: u32) -> Vec<Bytes> {
        let mut held = vec![Bytes(0); count as usize];
        for (shard, &device) in self.shards.iter().zip(devices) {
            held[device as usize] += shard.memory;
        }
        held
    }

    /// Distinct devices of a collective under a placement, in ascending order.
    pub(crate) fn members(&self, number: usize, devices: &[u32]) -> Vec<u32> {
        let shard = &self.shards[number];
        let (first, count) = shard.meeting.as_ref().map_or((0, 0), |meeting| meeting.receivers);
        let receivers = (first..first + count).map(|shard| devices[shard as usize]);
        let from = shard.after.iter().map(|&(from, _)| devices[from as usize]);
        let mut members: Vec<u32> = receivers.chain(from).collect();
        members.sort_unstable();
        members.dedup();
        members
    }
}

/// The number of shards of each operation.
fn counts(graph: &OpGraph, costed: &Costed, quantum: Nanos, most: u32) -> Vec<u32> {
    let mut times: Vec<u64> = costed.costs.iter().map(|cost| cost.time.0).collect();
    for (op, cost) in graph.ops.iter().zip(&costed.costs) {
        if let Some(with) = op.with {
            let longest = &mut times[with as usize];
            *longest = (*longest).max(cost.time.0);
        }
    }
    let count = |op: usize| {
        let whole = times[op] / quantum.0.max(1);
        let cuts = most.min(graph.ops[op].shards_max).max(1);
        1 << whole.max(1).ilog2().min(cuts.ilog2())
    };
    (0..graph.ops.len())
        .map(|op| count(graph.ops[op].with.map_or(op, |with| with as usize)))
        .collect()
}

/// The range of source shards, of `sources`, that shard `number` of `count` depends on: equally many
/// for each shard, or the one of which it needs a part.
fn blocks(number: u32, count: u32, sources: u32) -> std::ops::Range<u32> {
    if sources >= count {
        let each = sources / count;
        number * each..(number + 1) * each
    } else {
        let source = number / (count / sources);
        source..source + 1
    }
}
