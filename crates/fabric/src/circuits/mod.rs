//! Circuits that light takes: which wavelengths of a ring, which ports of circuit switches.
//!
//! Both are decided from what wants to go between which devices, and hold until the next decision.

mod ring;
mod switches;

pub use ring::{Circuit, Direction, Wavelengths};
pub use switches::{Leaves, Permutations, circuits, permutations};

/// What wants to go from one device to another.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Demand {
    /// From which.
    pub source: u32,
    /// To which.
    pub target: u32,
    /// How much, in whatever all demands are counted in.
    pub size: f64,
}
