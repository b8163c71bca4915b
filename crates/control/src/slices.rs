//! Slices: devices that a client asked for by shape instead of by number.
//!
//! A slice's devices are virtual: numbers of the client's own, each placed on a physical device by
//! the resource manager here. Work is spread by giving each slice the devices that fewest others
//! have, close together.
//!
//! Source: PATHWAYS §4.1. Differs from the paper: 1. a device may be in several slices; the
//! scheduler shares it out.

use std::collections::BTreeMap;

use base::{Bytes, ClientId, Code, DeviceId, HostId, IslandId, Status};
use fabric::{Cluster, Island};
use place::min_cost_contiguous_range;

use crate::controller::Controller;
use crate::islands::IslandState;

/// The first number of a virtual device; physical ones are below.
const FIRST: u32 = 1 << 20;
/// Most virtual devices of a client, and how far apart the numbers of two clients are.
const MOST: u32 = 1024;
/// Virtual devices of a client where there are few physical ones.
const LEAST: u32 = 64;

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceRequest {
    /// Extents of its mesh.
    pub shape: Vec<u32>,
    /// On which island; none leaves it to the resource manager.
    pub island: Option<IslandId>,
    /// Bytes of each device that no other slice has asked for; none asks for no memory.
    pub memory: Option<u64>,
}

/// What it gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Its virtual devices, the last axis of the mesh varying fastest.
    pub devices: Vec<DeviceId>,
    /// Where they are.
    pub island: IslandId,
}

/// A virtual device. It stays where it is unless its island is taken away, since arrays and programs
/// that were made for it may be used again; once freed it is given out again for the same place.
#[derive(Debug, Clone, Copy)]
struct Place {
    physical: DeviceId,
    in_use: bool,
    /// Bytes that were asked for.
    memory: u64,
    /// The slice it was last in, and its position there.
    slice: u64,
    position: usize,
}

/// Virtual devices of all clients.
#[derive(Debug, Default)]
pub(crate) struct Slices {
    places: BTreeMap<ClientId, BTreeMap<DeviceId, Place>>,
}

impl Slices {
    /// Virtual devices that a client has in use.
    pub fn of(&self, client: ClientId) -> impl Iterator<Item = DeviceId> {
        let places = self.places.get(&client).into_iter().flatten();
        places.filter(|(_, place)| place.in_use).map(|(&device, _)| device)
    }

    /// Virtual devices of a client that lie where `is_there` says, slice by slice.
    pub fn on(&self, client: ClientId, is_there: impl Fn(DeviceId) -> bool) -> Vec<Vec<DeviceId>> {
        let places = self.places.get(&client).into_iter().flatten();
        let mut found: Vec<_> = places.filter(|(_, place)| is_there(place.physical)).collect();
        found.sort_by_key(|(_, place)| (place.slice, place.position));
        let same = |a: &(&DeviceId, &Place), b: &(&DeviceId, &Place)| a.1.slice == b.1.slice;
        found
            .chunk_by(same)
            .map(|slice| slice.iter().map(|(device, _)| **device).collect())
            .collect()
    }

    /// Where a virtual device is.
    pub fn physical(&self, device: DeviceId) -> Option<DeviceId> {
        self.places.values().find_map(|places| places.get(&device)).map(|place| place.physical)
    }

    /// Gives a virtual device another place.
    pub fn place(&mut self, client: ClientId, device: DeviceId, physical: DeviceId) {
        let places = self.places.entry(client).or_default();
        if let Some(place) = places.get_mut(&device) {
            place.physical = physical;
        }
    }

    /// What slices have of each physical device.
    pub fn load(&self) -> BTreeMap<DeviceId, Load> {
        let mut load: BTreeMap<DeviceId, Load> = BTreeMap::new();
        let places = self.places.values().flat_map(BTreeMap::values);
        for place in places.filter(|place| place.in_use) {
            load.entry(place.physical).or_default().add(place.memory);
        }
        load
    }

    /// Bytes that were asked for on a virtual device.
    pub fn memory(&self, client: ClientId, device: DeviceId) -> u64 {
        self.places.get(&client).and_then(|places| places.get(&device)).map_or(0, |p| p.memory)
    }
}

/// What slices have of a device.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Load {
    /// How many slices it is in.
    pub slices: u32,
    /// Bytes that they asked for.
    pub memory: u64,
}

impl Load {
    /// It is in another slice.
    pub fn add(&mut self, memory: u64) {
        self.slices += 1;
        self.memory += memory;
    }
}

/// How many virtual devices a client that connects now is told of: two for each physical device,
/// within limits.
pub(crate) fn virtual_devices(cluster: &Cluster) -> u32 {
    (2 * cluster.devices().count() as u32).clamp(LEAST, MOST)
}

fn refused(code: Code, message: String) -> Status {
    Status::new(code, message)
}

impl Controller {
    /// The numbers that a client's virtual devices may have, lowest first; none if it is gone.
    pub fn slice_numbers(&self, client: ClientId) -> impl Iterator<Item = DeviceId> + use<> {
        let clients = u64::from((i32::MAX as u32 - FIRST) / MOST);
        let first = FIRST + (client.0 % clients) as u32 * MOST;
        let count = self.clients.get(&client).map_or(0, |state| state.virtual_devices);
        (first..first + count).map(DeviceId)
    }

    /// Gives a client a slice.
    ///
    /// # Errors
    /// There is no place for it; says which islands there are and what each has.
    pub fn allocate(&mut self, client: ClientId, wanted: &SliceRequest) -> Result<Slice, Status> {
        if !self.clients.contains_key(&client) {
            return Err(refused(Code::NotFound, format!("client {client} is not connected")));
        }
        let count = self.check_shape(wanted)?;
        let load = self.slices.load();
        let best = self
            .cluster
            .islands()
            .iter()
            .filter(|island| wanted.island.is_none_or(|id| id == island.id))
            .filter(|island| self.island_state(island.id) == IslandState::Up)
            .filter(|island| !self.removals.contains_key(&island.id))
            .filter_map(|island| self.best_block(island, (count, wanted.memory), &load))
            .min_by_key(|block| block.cost);
        let Some(block) = best else { return Err(self.no_place(wanted, count, &load)) };
        let devices = self.number(client, &block.devices, wanted.memory.unwrap_or(0))?;
        Ok(Slice { devices, island: block.island })
    }

    /// Gives physical devices numbers of a client's own.
    fn number(
        &mut self,
        client: ClientId,
        devices: &[DeviceId],
        memory: u64,
    ) -> Result<Vec<DeviceId>, Status> {
        let numbers = self.slice_numbers(client);
        let slice = self.next_id();
        let known = self.slices.places.entry(client).or_default();
        let mut fresh = numbers.filter(|n| !known.contains_key(n));
        let mut chosen: Vec<(DeviceId, DeviceId)> = Vec::with_capacity(devices.len());
        for &physical in devices {
            let freed = known.iter().find(|(number, place)| {
                place.physical == physical
                    && !place.in_use
                    && chosen.iter().all(|taken| taken.0 != **number)
            });
            let Some(number) = freed.map(|(&number, _)| number).or_else(|| fresh.next()) else {
                let all = self.clients[&client].virtual_devices;
                let message = format!(
                    "a client may have {all} virtual devices, and {} are in use; free a slice first",
                    known.values().filter(|place| place.in_use).count()
                );
                return Err(refused(Code::ResourceExhausted, message));
            };
            chosen.push((number, physical));
        }
        drop(fresh);
        for (position, &(number, physical)) in chosen.iter().enumerate() {
            known.insert(number, Place { physical, in_use: true, memory, slice, position });
            self.cluster.place(number, physical);
            self.scheduler.memory.place(number, physical);
        }
        Ok(chosen.into_iter().map(|(number, _)| number).collect())
    }

    /// Takes a slice back. What lies there stays until it is deleted.
    pub fn release(&mut self, client: ClientId, devices: &[DeviceId]) {
        let Some(known) = self.slices.places.get_mut(&client) else { return };
        for device in devices {
            if let Some(place) = known.get_mut(device) {
                place.in_use = false;
            }
        }
    }

    /// Takes back all slices of a client that is gone.
    pub(crate) fn release_all(&mut self, client: ClientId) {
        for device in self.slices.places.remove(&client).unwrap_or_default().into_keys() {
            self.cluster.forget(device);
        }
    }

    fn check_shape(&self, wanted: &SliceRequest) -> Result<u32, Status> {
        let count = wanted.shape.iter().try_fold(1_u32, |all, &extent| all.checked_mul(extent));
        match count {
            Some(count) if count > 0 => Ok(count),
            _ => Err(refused(
                Code::InvalidArgument,
                format!("a slice of shape {:?} has no devices, or too many", wanted.shape),
            )),
        }
    }

    /// The devices of an island for a slice: neighbours, on few hosts, that few others have. Each
    /// has the memory that is asked for, besides what others asked for.
    pub(crate) fn best_block(
        &self,
        island: &Island,
        (count, memory): (u32, Option<u64>),
        load: &BTreeMap<DeviceId, Load>,
    ) -> Option<SliceBlock> {
        let used = |device: &DeviceId| load.get(device).map_or(0, |load| load.slices);
        let fits = |devices: &[DeviceId]| match memory {
            None => true,
            // Where the platform does not say what there is, a claim is noted, not checked.
            Some(bytes) => devices
                .iter()
                .all(|&one| self.unclaimed(one, load).is_none_or(|free| free >= bytes)),
        };
        let of = |first: u32| &island.devices[first as usize..][..count as usize];
        let cost = |first: u32| {
            let devices = of(first);
            if !fits(devices) {
                return None;
            }
            let mut hosts: Vec<HostId> =
                devices.iter().map(|&device| self.device(device).host).collect();
            hosts.dedup();
            let most = devices.iter().map(used).max().unwrap_or_default();
            let all: u32 = devices.iter().map(used).sum();
            Some((most, all, hosts.len(), island.id, devices[0]))
        };
        let (cost, first) =
            min_cost_contiguous_range(island.devices.len() as u32, count, false, cost)?;
        Some(SliceBlock { island: island.id, devices: of(first).to_vec(), cost })
    }

    /// Bytes of a device that no slice has asked for; none if its capacity is unknown.
    fn unclaimed(&self, device: DeviceId, load: &BTreeMap<DeviceId, Load>) -> Option<u64> {
        let claimed = load.get(&device).map_or(0, |load| load.memory);
        Some(self.scheduler.memory.capacity(device)?.saturating_sub(claimed))
    }

    fn no_place(
        &self,
        wanted: &SliceRequest,
        count: u32,
        load: &BTreeMap<DeviceId, Load>,
    ) -> Status {
        let has = |island: &Island| match self.island_state(island.id) {
            IslandState::Up => {
                let devices = island.devices.len();
                let most = island.devices.iter().map(|&device| self.unclaimed(device, load)).max();
                let memory = match (wanted.memory, most.flatten()) {
                    (None, _) | (_, None) => String::new(),
                    (_, Some(most)) => format!(", with at most {} free of claims", Bytes(most)),
                };
                Some(format!("island {} has {devices}{memory}", island.id))
            }
            IslandState::Starting => Some(format!("island {} is starting", island.id)),
            IslandState::Lost => Some(format!("island {} is lost", island.id)),
            IslandState::Removed => None,
        };
        let islands: Vec<String> = self.cluster.islands().iter().filter_map(has).collect();
        let place = match wanted.island {
            Some(island) => format!("on island {island}"),
            None => "on one island".to_owned(),
        };
        let memory = wanted.memory.map(|bytes| format!(" with {} each", Bytes(bytes)));
        let less = if memory.is_some() { "fewer or for less memory" } else { "fewer" };
        let memory = memory.unwrap_or_default();
        refused(
            Code::ResourceExhausted,
            format!(
                "a slice of shape {:?} needs {count} neighbouring devices{memory} {place}; {}; ask \
                 for {less}",
                wanted.shape,
                islands.join(", ")
            ),
        )
    }
}

/// Devices that could be a slice.
pub(crate) struct SliceBlock {
    island: IslandId,
    pub devices: Vec<DeviceId>,
    /// Slices of the busiest device, of all together, hosts, and then whichever comes first.
    cost: (u32, u32, usize, IslandId, DeviceId),
}
