//! What a sharded array is: element type, shape, and which device holds which region.
//!
//! The program graph of the design joins this crate when a layer needs it.

mod array;
mod dtype;
mod region;
mod sharding;

pub use array::ArraySpec;
pub use dtype::DType;
pub use region::Region;
pub use sharding::{Partition, Sharding};

/// The extents of an array, major to minor.
pub type Dims = smallvec::SmallVec<[i64; 4]>;
