//! Operations cut into shards that take about as long as each other.
//!
//! Source: SiP-ML §3.2. An operation is cut into a power of two of shards, so many that each takes
//! about a quantum of time; shards meet block by block, never all with all. Differs from the paper:
//! what uses the parameters of another operation is cut like that one, and lies where it does.

use base::{Bytes, Nanos};

use crate::ops::{Costed, OpGraph};

/// One shard of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shard {
    /// Of which operation.
    pub op: u32,
    /// How long it computes.
    pub time: Nanos,
    /// What its device must hold for it.
    pub memory: Bytes,
    /// Shards that it needs something of, and how much.
    pub after: Vec<(u32, Bytes)>,
    /// The shard in whose place it is; itself, if it has one of its own.
    pub place: u32,
}

/// A model cut into shards, each behind those that it needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Balanced {
    /// All shards.
    pub shards: Vec<Shard>,
    /// Of each operation, its first shard and how many it has.
    pub of: Vec<(u32, u32)>,
}

impl Balanced {
    /// Cuts operations into shards of about this time, into at most so many each.
    /// O(shards + edges of shards).
    ///
    /// # Arguments
    /// - `costed`: what the operations of `graph` take.
    pub fn new(graph: &OpGraph, costed: &Costed, quantum: Nanos, most: u32) -> Self {
        let counts = counts(graph, costed, quantum, most);
        let mut of = vec![(0, 0); graph.ops.len()];
        let mut shards: Vec<Shard> = Vec::new();
        for &op in &costed.order {
            let count = counts[op as usize];
            of[op as usize] = (shards.len() as u32, count);
            let cost = costed.costs[op as usize];
            let each = |whole: u64| whole.div_ceil(u64::from(count));
            let memory = Bytes(each(graph.ops[op as usize].resident.0 + cost.kept.0));
            for number in 0..count {
                let after = costed.after[op as usize].iter().flat_map(|&(from, size)| {
                    let (first, sources) = of[from as usize];
                    blocks(number, count, sources).map(move |source| {
                        (first + source, Bytes(size.0.div_ceil(u64::from(count.max(sources)))))
                    })
                });
                let after = after.collect();
                let place = shards.len() as u32;
                shards.push(Shard { op, time: Nanos(each(cost.time.0)), memory, after, place });
            }
        }
        for (op, &(first, count)) in graph.ops.iter().zip(&of) {
            if let Some(with) = op.with {
                let place = of[with as usize].0;
                (0..count)
                    .for_each(|number| shards[(first + number) as usize].place = place + number);
            }
        }
        Self { shards, of }
    }

    /// What each of so many devices holds, if shards lie on these.
    pub fn held(&self, devices: &[u32], count: u32) -> Vec<Bytes> {
        let mut held = vec![Bytes(0); count as usize];
        for (shard, &device) in self.shards.iter().zip(devices) {
            held[device as usize] += shard.memory;
        }
        held
    }
}

/// Into how many shards each operation is cut.
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

/// Shards of one operation that a shard of another needs: as many after one another as there are of
/// them for each, or the one of which it needs a part.
fn blocks(number: u32, count: u32, sources: u32) -> std::ops::Range<u32> {
    if sources >= count {
        let each = sources / count;
        number * each..(number + 1) * each
    } else {
        let source = number / (count / sources);
        source..source + 1
    }
}
