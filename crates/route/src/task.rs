//! Tasks: transfers of tensors, and computations on chips.

use base::{Address, Bytes, Ticks, VertexId};
use smallvec::SmallVec;

/// Task numbers.
pub type Tasks = SmallVec<[u32; 2]>;

/// A unit of work on links or on a chip.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Task {
    /// A transfer over links.
    Transfer(RouteTransfer),
    /// A computation on a chip.
    Computation(Computation),
}

/// The transfer of a tensor from one vertex to another: pushed by the source, since both ends know
/// when.
///
/// Source: the multi-TSP system §4.2.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouteTransfer {
    /// Source.
    pub source: VertexId,
    /// Target.
    pub target: VertexId,
    /// Size of the tensor.
    pub size: Bytes,
    /// Dependencies: tasks that must be done before it begins.
    pub after: Tasks,
    /// Transfers that bring the tensor to the source: each vector may be forwarded as soon as all of
    /// them have brought theirs.
    pub from: Tasks,
    /// Address of the first vector at the source.
    pub read: Address,
    /// Address to write at the target.
    pub write: Address,
    /// Whether it is added to the target's memory (a reduction) instead of replacing it.
    pub sums: bool,
}

/// A computation that occupies one chip exclusively.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Computation {
    /// The chip.
    pub chip: VertexId,
    /// Duration.
    pub length: Ticks,
    /// Dependencies: tasks that must be done before it begins.
    pub after: Tasks,
}

impl RouteTransfer {
    /// Creates a transfer without dependencies, between the beginnings of both memories.
    pub fn new(source: VertexId, target: VertexId, size: Bytes) -> Self {
        let (after, from) = (Tasks::new(), Tasks::new());
        Self { source, target, size, after, from, read: Address(0), write: Address(0), sums: false }
    }
}

impl Task {
    /// Returns all dependencies: tasks that all or a part of it waits for.
    pub fn waits_for(&self) -> impl Iterator<Item = u32> + '_ {
        let (after, from) = match self {
            Task::Transfer(transfer) => (&transfer.after, transfer.from.as_slice()),
            Task::Computation(computation) => (&computation.after, [].as_slice()),
        };
        after.iter().chain(from).copied()
    }

    /// Returns the transfer, if it is one.
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
