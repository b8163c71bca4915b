//! The snapshot that `fairway status` shows.

use std::collections::{BTreeMap, HashSet};

use base::{Bytes, HostId};

use super::Controller;
use crate::overview::{ClientOverview, HostOverview, IslandOverview, Overview};

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
