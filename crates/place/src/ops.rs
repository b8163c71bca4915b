//! A model as a graph of operations, with their costs, edges and memory.

use base::{Bytes, Nanos};
use thiserror::Error;

/// Cost of an operation for one batch size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cost {
    /// Compute time on one device.
    pub time: Nanos,
    /// Activations that it keeps until the step is over.
    pub kept: Bytes,
}

/// An input of an operation from another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Edge {
    /// Index of the other operation.
    pub from: u32,
    /// Size of the input, by batch size.
    pub sizes: Vec<Bytes>,
}

/// The dimension along which an operation is split (sharding).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Split {
    /// Everything, block by block: inputs, parameters and outputs. What SiP-ML's public simulator does
    /// with all operations; right where each element depends on its neighbours only.
    #[default]
    Blocks,
    /// Samples: each shard has all parameters, and shards all-reduce gradients.
    Samples,
    /// Outputs, such as columns of a matrix: each shard needs the whole input.
    Outputs,
    /// Inputs, such as rows of a matrix: outputs of shards are partial sums.
    Inputs,
}

/// An operation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Op {
    /// Human-readable name.
    pub name: String,
    /// Cost, by batch size.
    pub costs: Vec<Cost>,
    /// Inputs from other operations.
    pub after: Vec<Edge>,
    /// Memory that it holds always: parameters, their gradients, optimizer state.
    pub resident: Bytes,
    /// Gradients that its copies all-reduce in each step.
    pub gradients: Bytes,
    /// The operation whose parameters it uses and with which it is placed, if it is not placed by
    /// itself.
    pub with: Option<u32>,
    /// The device of an existing placement, if there is one.
    pub device: Option<u32>,
    /// Most shards into which it can be split.
    pub shards_max: u32,
    /// Dimension along which it is split.
    pub split: Split,
    /// Part of its time that each shard takes in full, such as launch overhead.
    pub launch: Nanos,
}

/// An additional all-reduce among the devices of some operations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpSum {
    /// Operations that must be done before.
    pub after: Vec<u32>,
    /// Bytes per device.
    pub size: Bytes,
}

/// One training step of a model.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OpGraph {
    /// Batch sizes for which costs are known, in ascending order.
    pub batches: Vec<u32>,
    /// Operations, in any order.
    pub ops: Vec<Op>,
    /// All-reduces besides those of gradients of copies.
    pub sums: Vec<OpSum>,
}

/// Why a model cannot be placed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum OpError {
    /// A reference to an operation that does not exist.
    #[error("operation {name:?} names operation {found}; there are {ops}")]
    Unknown {
        /// Name of the operation.
        name: String,
        /// Index that it refers to.
        found: u32,
        /// Number of operations.
        ops: u32,
    },
    /// A collective between its devices is invalid.
    #[error(transparent)]
    Collective(#[from] ir::CollectiveError),
    /// The operations have a cyclic dependency.
    #[error("operation {name:?} needs itself, by others")]
    Cycle {
        /// An operation that is part of, or depends on, the cycle.
        name: String,
    },
    /// The number of costs is not that of batch sizes.
    #[error("operation {name:?} has {found} costs; expected {batches}, one for each batch")]
    Costs {
        /// Name of the operation.
        name: String,
        /// Number of costs.
        found: usize,
        /// Number of batch sizes.
        batches: usize,
    },
    /// The batch sizes are invalid.
    #[error("batches are {found:?}; expected at least one, from 1 on, each larger than the last")]
    Batches {
        /// The batch sizes.
        found: Vec<u32>,
    },
    /// An operation is placed with another that is itself placed with a third.
    #[error("operation {name:?} is where {other:?} is, which has no place of its own")]
    With {
        /// Name of the operation.
        name: String,
        /// Name of the other.
        other: String,
    },
    /// A shard exceeds the memory of a device.
    #[error(
        "operation {name:?} needs {needed} of a device, cut as far as it can be; one has {has}"
    )]
    Large {
        /// Name of the operation.
        name: String,
        /// Memory of one shard.
        needed: Bytes,
        /// Memory of one device.
        has: Bytes,
    },
    /// No device has enough memory left.
    #[error("operation {name:?} finds no device with {needed} left, of {devices} with {has} each")]
    Full {
        /// Name of the operation.
        name: String,
        /// Memory of one shard.
        needed: Bytes,
        /// Number of devices.
        devices: u32,
        /// Memory of each.
        has: Bytes,
    },
}

/// Operations with their costs for one batch size, and a topological order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Costed {
    /// Cost by operation.
    pub costs: Vec<Cost>,
    /// Inputs by operation: from which, and how many bytes.
    pub after: Vec<Vec<(u32, Bytes)>>,
    /// Operations in topological order.
    pub order: Vec<u32>,
}

impl OpGraph {
    /// Returns costs for a batch size by linear interpolation between known ones; outside their range
    /// by extrapolation from the two nearest, or in proportion if only one is known. O(operations +
    /// edges).
    ///
    /// # Errors
    /// The graph is invalid.
    pub fn at(&self, batch: u32) -> Result<Costed, OpError> {
        self.check()?;
        let order = self.order()?;
        let weights = self.weights(batch);
        let mixed = |value: &dyn Fn(usize) -> u64| {
            let sum: f64 = weights.iter().map(|&(at, weight)| value(at) as f64 * weight).sum();
            sum.max(0.0).round() as u64
        };
        let cost = |op: &Op| Cost {
            time: Nanos(mixed(&|at| op.costs[at].time.0)),
            kept: Bytes(mixed(&|at| op.costs[at].kept.0)),
        };
        let edge = |edge: &Edge| (edge.from, Bytes(mixed(&|at| edge.sizes[at].0)));
        Ok(Costed {
            costs: self.ops.iter().map(cost).collect(),
            after: self.ops.iter().map(|op| op.after.iter().map(edge).collect()).collect(),
            order,
        })
    }

    /// Known batch sizes, by index, and the weights with which they are combined.
    fn weights(&self, batch: u32) -> Vec<(usize, f64)> {
        let batches = &self.batches;
        if let [one] = batches[..] {
            return vec![(0, f64::from(batch) / f64::from(one))];
        }
        let above = batches.partition_point(|&known| known < batch).clamp(1, batches.len() - 1);
        let (from, to) = (f64::from(batches[above - 1]), f64::from(batches[above]));
        let part = (f64::from(batch) - from) / (to - from);
        vec![(above - 1, 1.0 - part), (above, part)]
    }

    fn check(&self) -> Result<(), OpError> {
        let rises = self.batches.windows(2).all(|pair| pair[0] < pair[1]);
        if self.batches.first().is_none_or(|&first| first == 0) || !rises {
            return Err(OpError::Batches { found: self.batches.clone() });
        }
        let (ops, batches) = (self.ops.len() as u32, self.batches.len());
        for op in &self.ops {
            let name = || op.name.clone();
            let named = op.after.iter().map(|edge| edge.from).chain(op.with);
            if let Some(found) = named.into_iter().find(|&found| found >= ops) {
                return Err(OpError::Unknown { name: name(), found, ops });
            }
            let counts = op.after.iter().map(|edge| edge.sizes.len()).chain([op.costs.len()]);
            if let Some(found) = counts.into_iter().find(|&found| found != batches) {
                return Err(OpError::Costs { name: name(), found, batches });
            }
            let other = op.with.map(|with| &self.ops[with as usize]);
            if let Some(other) = other.filter(|other| other.with.is_some()) {
                return Err(OpError::With { name: name(), other: other.name.clone() });
            }
        }
        for sum in &self.sums {
            if let Some(&found) = sum.after.iter().find(|&&found| found >= ops) {
                return Err(OpError::Unknown { name: "a sum".to_owned(), found, ops });
            }
        }
        Ok(())
    }

    fn order(&self) -> Result<Vec<u32>, OpError> {
        let mut waits: Vec<usize> = self.ops.iter().map(|op| op.after.len()).collect();
        let mut next: Vec<Vec<u32>> = vec![Vec::new(); self.ops.len()];
        for (number, op) in (0..).zip(&self.ops) {
            op.after.iter().for_each(|edge| next[edge.from as usize].push(number));
        }
        let mut order: Vec<u32> =
            (0..self.ops.len() as u32).filter(|&op| waits[op as usize] == 0).collect();
        let mut at = 0;
        while let Some(&op) = order.get(at) {
            at += 1;
            for &other in &next[op as usize] {
                waits[other as usize] -= 1;
                if waits[other as usize] == 0 {
                    order.push(other);
                }
            }
        }
        match waits.iter().position(|&count| count > 0) {
            Some(op) => Err(OpError::Cycle { name: self.ops[op].name.clone() }),
            None => Ok(order),
        }
    }
}
