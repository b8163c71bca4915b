//! Reshardings that clients prepare once and run many times.

use std::sync::Arc;

use base::DeviceId;
use ir::Sharding;

/// A resharding of arrays of any shapes.
#[derive(Debug)]
pub struct Resharding {
    /// The devices of the first argument.
    pub devices: Arc<[DeviceId]>,
    /// Sharding of each result.
    pub outputs: Vec<Sharding>,
    /// Whether the arguments are deleted.
    pub donates: bool,
}
