//! The registry of islands with their hosts and devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BitsPerSecond, DeviceId, HostId, IslandId};

use crate::IslandSpec;

/// A device as described by its host.
#[derive(Clone, PartialEq, Debug)]
pub struct Device {
    /// Device number that clients see.
    pub id: DeviceId,
    /// Island it belongs to.
    pub island: IslandId,
    /// Host that owns it.
    pub host: HostId,
    /// Position among the devices of its island; the host's number for it.
    pub index: u32,
    /// Position among the devices of its host.
    pub local: u32,
    /// Vendor's name, such as `cpu` or `NVIDIA H200`.
    pub kind: Arc<str>,
    /// Memory kinds, the default one first.
    pub memories: Arc<[Arc<str>]>,
}

/// A host process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// Host number, unique over all islands.
    pub id: HostId,
    /// Island it belongs to.
    pub island: IslandId,
    /// Position in its island; `jax.distributed` process id.
    pub rank: u32,
}

/// An island.
#[derive(Clone, PartialEq, Debug)]
pub struct Island {
    /// Island number.
    pub id: IslandId,
    /// Its hosts, by rank.
    pub hosts: Vec<HostId>,
    /// Its devices, by index.
    pub devices: Vec<DeviceId>,
    /// Bandwidth of each channel of a host to other islands, in each direction; empty if unknown.
    pub channels: Vec<BitsPerSecond>,
}

/// All islands, and where each device is.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    islands: Vec<Island>,
    hosts: Vec<Host>,
    devices: BTreeMap<DeviceId, Device>,
    /// Virtual devices: aliases of devices, each for one client.
    aliases: BTreeMap<DeviceId, Device>,
}

impl Cluster {
    /// Creates a cluster from `specs`, numbering islands, hosts and devices in order. Device kinds,
    /// memories and channels are filled in when hosts report ([`Cluster::describe`],
    /// [`Cluster::set_channels`]).
    pub fn new(specs: &[IslandSpec]) -> Self {
        let mut cluster = Cluster::default();
        for spec in specs {
            cluster.add_island(spec);
        }
        cluster
    }

    /// Adds an island; it, its hosts and its devices get the next free numbers.
    pub fn add_island(&mut self, spec: &IslandSpec) -> IslandId {
        let id = IslandId(self.islands.len() as u32);
        let mut island =
            Island { id, hosts: Vec::new(), devices: Vec::new(), channels: Vec::new() };
        for rank in 0..spec.hosts {
            let host = HostId(self.hosts.len() as u32);
            self.hosts.push(Host { id: host, island: id, rank });
            island.hosts.push(host);
            for local in 0..spec.devices_per_host {
                let device = Device {
                    id: DeviceId(self.devices.len() as u32),
                    island: id,
                    host,
                    index: island.devices.len() as u32,
                    local,
                    kind: Arc::from("unknown"),
                    memories: Arc::from([]),
                };
                island.devices.push(device.id);
                self.devices.insert(device.id, device);
            }
        }
        self.islands.push(island);
        id
    }

    /// Records the device kind and memories that a host reported.
    pub fn describe(&mut self, host: HostId, kind: &Arc<str>, memories: &Arc<[Arc<str>]>) {
        let all = self.devices.values_mut().chain(self.aliases.values_mut());
        for device in all.filter(|device| device.host == host) {
            device.kind = kind.clone();
            device.memories = memories.clone();
        }
    }

    /// Records the bandwidth of each channel of an island's hosts, which are alike.
    ///
    /// # Panics
    /// Panics if there is no such island.
    pub fn set_channels(&mut self, island: IslandId, rates: Vec<BitsPerSecond>) {
        self.islands[island.0 as usize].channels = rates;
    }

    /// Returns all islands.
    pub fn islands(&self) -> &[Island] {
        &self.islands
    }

    /// Returns all hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Maps an alias to a device, replacing any earlier mapping of the alias.
    ///
    /// # Panics
    /// Panics if there is no such device.
    pub fn place(&mut self, alias: DeviceId, device: DeviceId) {
        let known = self.devices.get(&device).expect("aliases stand for known devices");
        self.aliases.insert(alias, Device { id: alias, ..known.clone() });
    }

    /// Removes an alias.
    pub fn forget(&mut self, alias: DeviceId) {
        self.aliases.remove(&alias);
    }

    /// Returns all devices in the order of their numbers, without aliases.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.values()
    }

    /// Returns the device with this number or alias.
    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.get(&id).or_else(|| self.aliases.get(&id))
    }

    /// Returns the host with this number.
    pub fn host(&self, id: HostId) -> Option<&Host> {
        self.hosts.get(id.0 as usize)
    }

    /// Returns the island with this number.
    pub fn island(&self, id: IslandId) -> Option<&Island> {
        self.islands.get(id.0 as usize)
    }
}
