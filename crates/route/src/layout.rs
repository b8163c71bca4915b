//! Where what a collective works on lies in chips' memories.

use base::{Address, VertexId};
use fabric::RotationalSymmetry;

use crate::schedule::RoutePlan;

/// A collective's plan, and where what it works on lies in each chip's memory.
#[derive(Clone, PartialEq, Debug)]
pub struct RoutedCollective {
    /// Who sends what when.
    pub plan: RoutePlan,
    /// Where things lie.
    pub layout: Layout,
}

/// Where a tensor lies that is cut into a shard for each chip.
///
/// Chips see shards in the order of the circle: first those of the chips of their own part, then
/// those of the next part. So all parts do the same at the same addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Vectors of a shard.
    pub shard: u64,
    /// How many shards there are.
    pub shards: u32,
    /// Where the tensor lies at first: a copy at each of these. A chip has all of it, or its shard,
    /// or the shards that it sends.
    pub inputs: Vec<Address>,
    /// Where the result is: the sum of what lies at these.
    pub results: Vec<Address>,
}

impl Layout {
    /// Where a chip has the shard of another, behind where the tensor begins.
    pub fn place(&self, circle: &RotationalSymmetry, chip: VertexId, of: VertexId) -> u64 {
        let ahead = (circle.turn_of(of) + circle.turns() - circle.turn_of(chip)) % circle.turns();
        u64::from(ahead * circle.part() + circle.kind_of(of)) * self.shard
    }

    /// How many vectors of a chip's memory all of it takes.
    pub fn vectors(&self) -> u64 {
        let tensor = self.shard * u64::from(self.shards);
        let starts = self.inputs.iter().chain(&self.results).map(|start| u64::from(start.0));
        starts.max().unwrap_or(0) + tensor
    }
}
