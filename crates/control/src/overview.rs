//! What `fairway status` shows: a plain copy of the controller's state.

use std::collections::{BTreeMap, HashSet};

use base::{Bytes, ClientId, HostId, IslandId, Nanos};

use crate::accounts::Share;
use crate::controller::Controller;
use crate::islands::IslandState;
use crate::plans::PlanOverview;

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Overview {
    /// Islands with their hosts.
    pub islands: Vec<IslandOverview>,
    /// Clients by number.
    pub clients: Vec<ClientOverview>,
    /// Programs whose collectives go by plans, the last of those that are gone too.
    pub plans: Vec<PlanOverview>,
}

/// One island.
#[derive(Debug, Clone, PartialEq)]
pub struct IslandOverview {
    /// Its number.
    pub id: IslandId,
    /// Can work be given to it?
    pub state: IslandState,
    /// Its hosts by rank.
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
    /// What its devices are called.
    pub device_kind: String,
    /// Why it is lost, if it is.
    pub lost: Option<String>,
    /// Device memory in use.
    pub memory: Bytes,
    /// Device memory that there is, over its devices; none if nobody knows.
    pub capacity: Option<Bytes>,
    /// What makes way for others: bytes that lie in the host's own memory at present.
    pub spilled: Bytes,
    /// Commands waiting for credit.
    pub queued: u32,
    /// Launches on their way to it.
    pub in_flight: u32,
    /// Whose launch it has been busy with, and for how long.
    pub running: Option<(ClientId, Nanos)>,
}

/// One client.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientOverview {
    /// Its number.
    pub id: ClientId,
    /// Logical buffers it owns.
    pub buffers: u32,
    /// Device memory only it holds.
    pub bytes: Bytes,
    /// Programs it has loaded.
    pub executables: u32,
    /// Requests waiting for uploads.
    pub backlog: u32,
    /// Commands waiting for their turn.
    pub queued: u32,
    /// What it is entitled to.
    pub share: Share,
    /// Device time it has had, summed over devices.
    pub device_time: Nanos,
    /// What was moved for it, between hosts and between them and it.
    pub moved: Bytes,
}

impl Controller {
    /// A copy of what there is to see.
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

    /// Device memory that live buffers hold on each host, shared buffers counted once.
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
