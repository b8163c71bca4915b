//! What runs: sharded arrays, and programs of sharded computations.

mod array;
mod dtype;
mod program;
mod region;
mod sharding;
mod sparse;
mod text;

pub use array::ArraySpec;
pub use dtype::DType;
pub use program::{
    Function, FunctionId, Node, NodeId, Operation, Program, ProgramError, ValueId, Work,
};
pub use region::Region;
pub use sharding::{Partition, Sharding};
pub use sparse::{Ends, Side, Sparse};
pub use text::TextError;

/// The extents of an array, major to minor.
pub type Dims = smallvec::SmallVec<[i64; 4]>;
