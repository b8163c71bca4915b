//! The intermediate representation: sharded arrays, programs of sharded computations, and step graphs.
//!
//! A [`Program`] is what was captured: one node for each sharded computation or transfer, whatever its
//! number of shards. [`lower`] turns it into a [`StepGraph`]: what each device computes and
//! communicates.

mod array;
mod collective;
mod dtype;
mod gangs;
mod lower;
mod placement;
mod program;
mod region;
mod sharding;
mod sparse;
mod sparse_checks;
mod step;
mod text;
mod verify;

pub use array::ArraySpec;
pub use collective::{Collective, CollectiveError, CollectiveKind, cut};
pub use dtype::DType;
pub use lower::{gangs, lower};
pub use placement::{Placement, PlacementError};
pub use program::{
    Carried, Function, FunctionId, Node, NodeId, Operation, Program, ProgramError, ValueId, Work,
};
pub use region::Region;
pub use sharding::{Partition, Sharding};
pub use sparse::{Ends, Side, Sparse};
pub use step::{
    CollectiveOp, Dependency, Devices, StepGraph, StepGraphError, StepNode, StepOp, Successors,
};
pub use text::TextError;

/// The extents of an array, major to minor.
pub type Dims = smallvec::SmallVec<[i64; 4]>;
