//! The data shown by `fairway status`: a plain copy of the controller's state and metrics.

use std::collections::{BTreeMap, HashSet};

use base::{Bytes, ClientId, HostId, IslandId, Nanos};

use crate::accounts::Share;
use crate::controller::Controller;
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

impl Controller {
    /// Returns a snapshot of the state.
    pub fn overview(&self) -> Overview {
        let memory = self.memory_by_host();
        let host =
            |&id: &HostId| self.host_overview(id, memory.get(&id).copied().unwrap_or_default());
        let islands = self.cluster.islands().iter().map(|island| IslandOverview {
            id: island.id,
            state: self.island_state(island.id),
            hosts: island.hosts.iter().map(host).collect(),
        });
        let mut clients: Vec<_> = self
            .clients
            .iter()
            .map(|(&id, client)| {
                let account = self.scheduler.accounts.get(id).cloned().unwrap_or_default();
                ClientOverview {
                    id,
                    buffers: client.buffers.len() as u32,
                    bytes: client.bytes_held(),
                    executables: client.executables.len() as u32,
                    backlog: client.backlog.len() as u32,
                    queued: self.scheduler.queued(id) as u32,
                    share: account.share,
                    device_time: account.device_time,
                    moved: account.moved,
                }
            })
            .collect();
        clients.sort_by_key(|client| client.id);
        Overview { islands: islands.collect(), clients, plans: self.plans.overview() }
    }

    /// Returns the device memory of live buffers on each host. Shared storage is counted once;
    /// buffers assembled from several storages are not counted.
    fn memory_by_host(&self) -> BTreeMap<HostId, Bytes> {
        let mut seen = HashSet::new();
        let mut memory: BTreeMap<HostId, Bytes> = BTreeMap::new();
        let buffers = self.clients.values().flat_map(|client| client.buffers.values());
        for buffer in buffers.filter(|buffer| !buffer.is_deleted() && buffer.storage.len() == 1) {
            if !seen.insert(buffer.storage[0].id()) {
                continue;
            }
            let each = buffer.storage[0].shard_bytes();
            for &device in buffer.spec.sharding.devices.iter() {
                *memory.entry(self.device(device).host).or_default() += each;
            }
        }
        memory
    }

    fn host_overview(&self, id: HostId, memory: Bytes) -> HostOverview {
        let state = self.scheduler.host(id);
        let devices = self.cluster.devices().filter(|device| device.host == id).count() as u32;
        let usage = self.scheduler.memory.usage(id);
        HostOverview {
            id,
            process: state.info.as_ref().map(|info| info.process),
            devices,
            device_kind: state
                .info
                .as_ref()
                .map_or_else(String::new, |info| info.device_kind.to_string()),
            lost: state.lost.as_ref().map(|error| error.message.clone()),
            memory: usage.map_or(memory, |(_, in_use, _)| Bytes(in_use)),
            capacity: usage.map(|(each, _, _)| Bytes(each * u64::from(devices))),
            spilled: Bytes(usage.map_or(0, |(_, _, spilled)| spilled)),
            queued: self.scheduler.queue_length(id) as u32,
            in_flight: state.in_flight(),
            running: self
                .watchdog
                .running(id)
                .map(|running| (running.client, self.now.since(running.since))),
        }
    }
}
