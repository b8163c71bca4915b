//! Hardware topology: islands, hosts and devices, and the networks that join chips.

pub mod circuits;
mod cluster;
mod dcn;
mod dragonfly;
mod fabric;
mod interconnect;
mod network;
mod paths;
mod spec;
mod symmetry;
mod topologies;
mod topology;
mod wiring;

pub use cluster::{Cluster, Device, Host, Island};
pub use dcn::Dcn;
pub use dragonfly::{Dragonfly, DragonflyError};
pub use fabric::Fabric;
pub use interconnect::{
    Around, Clos, Faults, Interconnect, InterconnectError, InterconnectKind, Ring,
};
pub use network::{Cable, Link, Network, NetworkError, RATES};
pub use paths::LinkPaths;
pub use spec::{FabricError, IslandSpec};
pub use symmetry::RotationalSymmetry;
pub use topologies::{clusters, fat_tree, ring, switch, torus};
pub use topology::{Topology, TopologyError};
pub use wiring::LinkModel;
