//! The data shown by `fairway status`: a plain copy of the controller's state and metrics.

use base::{Bytes, ClientId, HostId, IslandId, Nanos};

use crate::accounts::Share;
use crate::islands::IslandState;
use crate::plans::PlanOverview;

/// A snapshot of the controller.
#[derive(Debug, Clone, PartialEq)]
pub struct Overview {
    /// Islands with their hosts.
    pub islands: Vec<IslandOverview>,
    /// Clients, sorted by number.
    pub clients: Vec<ClientOverview>,
    /// Programs with planned collectives, including recently unloaded ones.
    pub plans: Vec<PlanOverview>,
}

/// One island.
#[derive(Debug, Clone, PartialEq)]
pub struct IslandOverview {
    /// Its number.
    pub id: IslandId,
    /// Whether work can be scheduled on it.
    pub state: IslandState,
    /// Its hosts, by rank.
    pub hosts: Vec<HostOverview>,
}

/// One host.
#[derive(Debug, Clone, PartialEq)]
pub struct HostOverview {
    /// Its number.
    pub id: HostId,
    /// Its process id, if it has joined.
    pub process: Option<u32>,
    /// Devices it owns.
    pub devices: u32,
    /// The vendor's name for its devices.
    pub device_kind: String,
    /// Why it is lost, if it is.
    pub lost: Option<String>,
    /// Device memory in use.
    pub memory: Bytes,
    /// Capacity of its devices' memory; `None` if it is unknown.
    pub capacity: Option<Bytes>,
    /// Memory evicted to the host at present.
    pub spilled: Bytes,
    /// Commands queued for it and not yet dispatched.
    pub queued: u32,
    /// Launches in flight to it.
    pub in_flight: u32,
    /// The client whose launch it is running, and for how long (watchdog).
    pub running: Option<(ClientId, Nanos)>,
}

/// One client.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientOverview {
    /// Its number.
    pub id: ClientId,
    /// Logical buffers it owns.
    pub buffers: u32,
    /// Device memory of its buffers, except those that share memory or were assembled from several.
    pub bytes: Bytes,
    /// Programs it has loaded.
    pub executables: u32,
    /// Requests that wait for uploads, outstanding reads, a recompilation or a migration.
    pub backlog: u32,
    /// Commands queued and not yet dispatched.
    pub queued: u32,
    /// Its weight and priority.
    pub share: Share,
    /// Device time used, summed over devices.
    pub device_time: Nanos,
    /// Bytes transferred for it, between hosts and between hosts and the client.
    pub moved: Bytes,
}
