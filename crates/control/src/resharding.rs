//! Reshardings that clients prepare once and run many times.

use ir::Sharding;

/// A resharding of arrays of any shapes.
#[derive(Debug)]
pub struct Resharding {
    /// Sharding of each result.
    pub outputs: Vec<Sharding>,
    /// Whether the arguments are deleted.
    pub donates: bool,
}
