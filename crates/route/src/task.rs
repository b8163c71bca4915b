//! What is asked for: tensors that move, and what chips compute between.

use base::{Address, Bytes, Ticks, VertexId};
use smallvec::SmallVec;

/// Other tasks, by their numbers.
pub type Tasks = SmallVec<[u32; 2]>;

/// One thing that takes time, on links or on a chip.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Task {
    /// On links.
    Transfer(RouteTransfer),
    /// On a chip.
    Computation(Computation),
}

/// A tensor that goes from one vertex to another: pushed, since both know when.
///
/// Source: the multi-TSP system §4.2.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouteTransfer {
    /// Who has it.
    pub source: VertexId,
    /// Who gets it.
    pub target: VertexId,
    /// How much it is.
    pub size: Bytes,
    /// Tasks that must be done before it begins.
    pub after: Tasks,
    /// Transfers that bring it to its source: each vector may go on as soon as all of them have
    /// brought theirs.
    pub from: Tasks,
    /// Where its first vector lies at the source.
    pub read: Address,
    /// Where it comes to lie at the target.
    pub write: Address,
    /// Whether it is added to what lies there, in place of replacing it.
    pub sums: bool,
}

/// What one chip computes, and nothing else meanwhile.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Computation {
    /// Where.
    pub chip: VertexId,
    /// How long it takes.
    pub length: Ticks,
    /// Tasks that must be done before it begins.
    pub after: Tasks,
}

impl RouteTransfer {
    /// One that may begin at once, from the beginning of one memory to that of the other.
    pub fn new(source: VertexId, target: VertexId, size: Bytes) -> Self {
        let (after, from) = (Tasks::new(), Tasks::new());
        Self { source, target, size, after, from, read: Address(0), write: Address(0), sums: false }
    }
}

impl Task {
    /// All tasks that something of it waits for.
    pub fn waits_for(&self) -> impl Iterator<Item = u32> + '_ {
        let (after, from) = match self {
            Task::Transfer(transfer) => (&transfer.after, transfer.from.as_slice()),
            Task::Computation(computation) => (&computation.after, [].as_slice()),
        };
        after.iter().chain(from).copied()
    }

    /// The transfer that it is, if it is one.
    pub fn transfer(&self) -> Option<&RouteTransfer> {
        match self {
            Task::Transfer(transfer) => Some(transfer),
            Task::Computation(_) => None,
        }
    }

    pub(crate) fn renumber(&mut self, change: impl Fn(u32) -> u32) {
        let (after, from) = match self {
            Task::Transfer(transfer) => (&mut transfer.after, transfer.from.as_mut_slice()),
            Task::Computation(computation) => (&mut computation.after, [].as_mut_slice()),
        };
        for number in after.iter_mut().chain(from) {
            *number = change(*number);
        }
    }
}

impl From<RouteTransfer> for Task {
    fn from(transfer: RouteTransfer) -> Self {
        Task::Transfer(transfer)
    }
}

impl From<Computation> for Task {
    fn from(computation: Computation) -> Self {
        Task::Computation(computation)
    }
}
