//! A model as its operations: what each takes, what it gives to which others, what it keeps.

use base::{Bytes, Nanos};
use thiserror::Error;

/// What an operation takes and leaves, of one batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cost {
    /// How long one device computes.
    pub time: Nanos,
    /// What it keeps until the step is over.
    pub kept: Bytes,
}

/// What an operation needs of another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Edge {
    /// The other.
    pub from: u32,
    /// How much of it, by batch.
    pub sizes: Vec<Bytes>,
}

/// What an operation is cut along.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Split {
    /// Everything: what it needs, its parameters and what it gives, block by block. What SiP-ML's
    /// public simulator does with all operations; right where each number comes of those beside it.
    #[default]
    Blocks,
    /// Samples: each shard has all parameters, and shards add up gradients.
    Samples,
    /// What it gives, such as columns of a matrix: each shard needs all that the operation needs.
    Outputs,
    /// What it needs, such as rows of a matrix: shards have to be added up.
    Inputs,
}

/// An operation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Op {
    /// What people call it.
    pub name: String,
    /// What it takes, by batch.
    pub costs: Vec<Cost>,
    /// What it needs.
    pub after: Vec<Edge>,
    /// What it always has on its device: parameters, their gradients, what an optimizer keeps.
    pub resident: Bytes,
    /// What copies of it tell each other in a step: gradients.
    pub gradients: Bytes,
    /// The operation where its shards are, if it has no places of its own: whose parameters it uses.
    pub with: Option<u32>,
    /// The device where it was, where somebody has placed it before.
    pub device: Option<u32>,
    /// Into how many shards it can be cut.
    pub shards_max: u32,
    /// Along what.
    pub split: Split,
    /// The part of its time that each shard takes, such as to be launched.
    pub launch: Nanos,
}

/// Operations whose devices add up what they have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpSum {
    /// When these are done.
    pub after: Vec<u32>,
    /// How much each device has.
    pub size: Bytes,
}

/// A model in training, one step of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OpGraph {
    /// Samples for which costs are known, fewest first.
    pub batches: Vec<u32>,
    /// Operations, in any order.
    pub ops: Vec<Op>,
    /// What is added up besides gradients of copies.
    pub sums: Vec<OpSum>,
}

/// What cannot be placed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum OpError {
    /// It names what is not there.
    #[error("operation {name:?} names operation {found}; there are {ops}")]
    Unknown {
        /// Which operation.
        name: String,
        /// What it names.
        found: u32,
        /// How many there are.
        ops: u32,
    },
    /// What its devices communicate cannot be a collective.
    #[error(transparent)]
    Collective(#[from] ir::CollectiveError),
    /// Operations that need each other.
    #[error("operation {name:?} needs itself, by others")]
    Cycle {
        /// One of them.
        name: String,
    },
    /// Not a cost for every batch.
    #[error("operation {name:?} has {found} costs; expected {batches}, one for each batch")]
    Costs {
        /// Which operation.
        name: String,
        /// How many there are.
        found: usize,
        /// How many there should be.
        batches: usize,
    },
    /// Batches that are no batches.
    #[error("batches are {found:?}; expected at least one, from 1 on, each larger than the last")]
    Batches {
        /// As given.
        found: Vec<u32>,
    },
    /// It is where another is that is elsewhere itself.
    #[error("operation {name:?} is where {other:?} is, which has no place of its own")]
    With {
        /// Which operation.
        name: String,
        /// The other.
        other: String,
    },
    /// No device can hold it.
    #[error(
        "operation {name:?} needs {needed} of a device, cut as far as it can be; one has {has}"
    )]
    Large {
        /// Which operation.
        name: String,
        /// Of one shard.
        needed: Bytes,
        /// Of one device.
        has: Bytes,
    },
    /// All of it is too much.
    #[error("operation {name:?} finds no device with {needed} left, of {devices} with {has} each")]
    Full {
        /// Which operation.
        name: String,
        /// Of one shard.
        needed: Bytes,
        /// How many devices there are.
        devices: u32,
        /// Of each.
        has: Bytes,
    },
}

/// Operations with what they take of one batch, in an order in which each comes behind what it needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Costed {
    /// Of each operation, by its number.
    pub costs: Vec<Cost>,
    /// What each needs of which, and how much.
    pub after: Vec<Vec<(u32, Bytes)>>,
    /// Numbers, each behind those of what it needs.
    pub order: Vec<u32>,
}

impl OpGraph {
    /// What all takes for so many samples: between batches that are known, in proportion; beyond, as
    /// between the last two. O(operations + edges).
    ///
    /// # Errors
    /// The graph makes no sense; it says where.
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

    /// Which known batches a batch is made of, and with what weight.
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
