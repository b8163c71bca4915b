//! Allocation of optical circuits: wavelengths of a ring, and ports of circuit switches.
//!
//! Both are decided from a demand matrix, and hold until the next decision.

mod loads;
mod ring;
mod sweep;
mod switches;

pub use ring::{Circuit, Direction, Wavelengths};
pub use switches::{Leaves, Permutations, circuits, permutations};

/// Demand from one device to another.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Demand {
    /// Source device.
    pub source: u32,
    /// Target device.
    pub target: u32,
    /// Size, in any unit common to all demands.
    pub size: f64,
}
