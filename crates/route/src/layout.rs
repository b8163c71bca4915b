//! Memory layout of a collective's data.

use base::{Address, VertexId};
use topology::RotationalSymmetry;

use crate::schedule::RoutePlan;

/// A collective's plan, and the layout of its data in each chip's memory.
#[derive(Clone, PartialEq, Debug)]
pub struct RoutedCollective {
    /// The plan.
    pub plan: RoutePlan,
    /// The layout.
    pub layout: Layout,
}

/// Addresses of a tensor that is divided into one shard per chip.
///
/// Shards are ordered relative to a chip: first those of its own part of the symmetry, then those of
/// the next part. So all parts use the same addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Vectors per shard.
    pub shard: u64,
    /// Number of shards.
    pub shards: u32,
    /// Addresses of the input, one copy each. A chip has the whole tensor, or its shard, or the shards
    /// that it sends.
    pub inputs: Vec<Address>,
    /// Addresses of the result, which is the sum of the tensors at these.
    pub results: Vec<Address>,
}

impl Layout {
    /// Returns the offset of chip `of`'s shard in a tensor at `chip`, in vectors.
    pub fn place(&self, circle: &RotationalSymmetry, chip: VertexId, of: VertexId) -> u64 {
        let ahead = (circle.turn_of(of) + circle.turns() - circle.turn_of(chip)) % circle.turns();
        u64::from(ahead * circle.part() + circle.kind_of(of)) * self.shard
    }

    /// Returns the memory that the layout needs on a chip, in vectors.
    pub fn vectors(&self) -> u64 {
        let tensor = self.shard * u64::from(self.shards);
        let starts = self.inputs.iter().chain(&self.results).map(|start| u64::from(start.0));
        starts.max().unwrap_or(0) + tensor
    }
}
