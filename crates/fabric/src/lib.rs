//! Islands, hosts and devices: what there is to run on.

mod cluster;
mod spec;

pub use cluster::{Cluster, Device, Host, Island};
pub use spec::{FabricError, IslandSpec};
