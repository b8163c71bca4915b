//! Slices: sets of devices that a client requests by shape instead of by number.
//!
//! A slice's devices are virtual: numbers private to the client, each mapped to a physical device
//! by this resource manager. Load is balanced by giving each slice neighbouring devices that are in
//! the fewest other slices.
//!
//! Source: PATHWAYS §4.1. Differs from the paper: 1. A device may be in several slices; the
//! scheduler shares it between them.

use std::collections::BTreeMap;

use base::{Bytes, ClientId, Code, DeviceId, HostId, IslandId, Status};
use fabric::{Cluster, Island};
use place::min_cost_contiguous_range;

use crate::controller::Controller;
use crate::islands::IslandState;

/// First virtual device number; physical device numbers are below.
const FIRST: u32 = 1 << 20;
/// Maximum number of virtual devices of a client, and the size of its range of numbers.
const MOST: u32 = 1024;
/// Minimum number of virtual devices of a client, where there are few physical ones.
const LEAST: u32 = 64;

/// A client's request for a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceRequest {
    /// Extents of its mesh.
    pub shape: Vec<u32>,
    /// The island to use; `None` leaves the choice to the resource manager.
    pub island: Option<IslandId>,
    /// Bytes that each device must have unreserved by other slices; `None` reserves no memory.
    pub memory: Option<u64>,
}

/// A slice of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Its virtual devices, in row-major order of the mesh.
    pub devices: Vec<DeviceId>,
    /// The island that they are on.
    pub island: IslandId,
}

/// A virtual device. It keeps its physical device unless its island is removed, since arrays and
/// programs that were made for it may be used again; once freed it is reused only for the same
/// physical device.
#[derive(Debug, Clone, Copy)]
struct Place {
    physical: DeviceId,
    in_use: bool,
    /// Bytes reserved on it.
    memory: u64,
    /// The slice that it was last in, and its position there.
    slice: u64,
    position: usize,
}

/// Virtual devices of all clients.
#[derive(Debug, Default)]
pub(crate) struct Slices {
    places: BTreeMap<ClientId, BTreeMap<DeviceId, Place>>,
}

impl Slices {
    /// Returns the virtual devices that a client has in use.
    pub fn of(&self, client: ClientId) -> impl Iterator<Item = DeviceId> {
        let places = self.places.get(&client).into_iter().flatten();
        places.filter(|(_, place)| place.in_use).map(|(&device, _)| device)
    }

    /// Returns the virtual devices of a client whose physical device satisfies `is_there`, slice by
    /// slice.
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

    /// Returns the physical device of a virtual one.
    pub fn physical(&self, device: DeviceId) -> Option<DeviceId> {
        self.places.values().find_map(|places| places.get(&device)).map(|place| place.physical)
    }

    /// Maps a virtual device to another physical device.
    pub fn place(&mut self, client: ClientId, device: DeviceId, physical: DeviceId) {
        let places = self.places.entry(client).or_default();
        if let Some(place) = places.get_mut(&device) {
            place.physical = physical;
        }
    }

    /// Returns the load that slices put on each physical device.
    pub fn load(&self) -> BTreeMap<DeviceId, Load> {
        let mut load: BTreeMap<DeviceId, Load> = BTreeMap::new();
        let places = self.places.values().flat_map(BTreeMap::values);
        for place in places.filter(|place| place.in_use) {
            load.entry(place.physical).or_default().add(place.memory);
        }
        load
    }

    /// Returns the bytes reserved on a virtual device.
    pub fn memory(&self, client: ClientId, device: DeviceId) -> u64 {
        self.places.get(&client).and_then(|places| places.get(&device)).map_or(0, |p| p.memory)
    }
}

/// Load that slices put on a device.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Load {
    /// Number of slices that it is in.
    pub slices: u32,
    /// Bytes that they reserve.
    pub memory: u64,
}

impl Load {
    /// Adds the load of another slice.
    pub fn add(&mut self, memory: u64) {
        self.slices += 1;
        self.memory += memory;
    }
}

/// Returns the number of virtual devices announced to a client that connects now: two per physical
/// device, between `LEAST` and `MOST`.
pub(crate) fn virtual_devices(cluster: &Cluster) -> u32 {
    (2 * cluster.devices().count() as u32).clamp(LEAST, MOST)
}

fn refused(code: Code, message: String) -> Status {
    Status::new(code, message)
}

impl Controller {
    /// Returns the numbers that a client's virtual devices may have, in order; none if it has
    /// disconnected.
    pub fn slice_numbers(&self, client: ClientId) -> impl Iterator<Item = DeviceId> + use<> {
        let clients = u64::from((i32::MAX as u32 - FIRST) / MOST);
        let first = FIRST + (client.0 % clients) as u32 * MOST;
        let count = self.clients.get(&client).map_or(0, |state| state.virtual_devices);
        (first..first + count).map(DeviceId)
    }

    /// Allocates a slice for a client.
    ///
    /// # Errors
    /// No island has space for it; the message lists the islands and what each has.
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

    /// Maps virtual device numbers of a client to physical devices.
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

    /// Frees a slice. Arrays on it stay until they are deleted.
    pub fn release(&mut self, client: ClientId, devices: &[DeviceId]) {
        let Some(known) = self.slices.places.get_mut(&client) else { return };
        for device in devices {
            if let Some(place) = known.get_mut(device) {
                place.in_use = false;
            }
        }
    }

    /// Frees all slices of a disconnected client.
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

    /// Returns the best devices of an island for a slice: contiguous, in few other slices, on few
    /// hosts. Each has the requested memory left besides the reservations of other slices.
    pub(crate) fn best_block(
        &self,
        island: &Island,
        (count, memory): (u32, Option<u64>),
        load: &BTreeMap<DeviceId, Load>,
    ) -> Option<SliceBlock> {
        let used = |device: &DeviceId| load.get(device).map_or(0, |load| load.slices);
        let fits = |devices: &[DeviceId]| match memory {
            None => true,
            // If the platform does not report its capacity, a reservation is recorded but not
            // checked.
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

    /// Returns the bytes of a device that no slice has reserved; `None` if its capacity is unknown.
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

/// A candidate for a slice.
pub(crate) struct SliceBlock {
    island: IslandId,
    pub devices: Vec<DeviceId>,
    /// Slices on the busiest device, the sum over all devices, hosts; ties go to the lowest island
    /// and device.
    cost: (u32, u32, usize, IslandId, DeviceId),
}
