//! Slices: sets of devices that a client requests by shape instead of by number.
//!
//! A slice's devices are virtual: numbers private to the client, each mapped to a physical device
//! by this resource manager. Load is balanced by giving each slice neighbouring devices that are in
//! the fewest other slices.
//!
//! Source: PATHWAYS §4.1. Differs from the paper: 1. A device may be in several slices; the
//! scheduler shares it between them.

use std::collections::BTreeMap;

use base::{ClientId, Code, DeviceId, IslandId, Status};
use topology::Cluster;

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

impl SliceRequest {
    /// Returns the number of its devices.
    ///
    /// # Errors
    /// There are none, or too many.
    pub(crate) fn device_count(&self) -> Result<u32, Status> {
        let count = self.shape.iter().try_fold(1_u32, |all, &extent| all.checked_mul(extent));
        count.filter(|&count| count > 0).ok_or_else(|| {
            Status::new(
                Code::InvalidArgument,
                format!("a slice of shape {:?} has no devices, or too many", self.shape),
            )
        })
    }
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
    /// Adds a slice of a client; returns the virtual device of each physical one.
    ///
    /// # Arguments
    /// - `numbers`: all virtual devices that the client may have.
    /// - `slice`: a number that no other slice has.
    /// - `devices`: the physical devices.
    /// - `memory`: bytes reserved on each.
    ///
    /// # Errors
    /// The client has too many virtual devices in use.
    pub fn add(
        &mut self,
        client: ClientId,
        numbers: impl ExactSizeIterator<Item = DeviceId>,
        slice: u64,
        (devices, memory): (&[DeviceId], u64),
    ) -> Result<Vec<DeviceId>, Status> {
        let all = numbers.len();
        let known = self.places.entry(client).or_default();
        let mut fresh = numbers.filter(|n| !known.contains_key(n));
        let mut chosen: Vec<DeviceId> = Vec::with_capacity(devices.len());
        for &physical in devices {
            let freed = known.iter().find(|(number, place)| {
                place.physical == physical && !place.in_use && !chosen.contains(number)
            });
            let Some(number) = freed.map(|(&number, _)| number).or_else(|| fresh.next()) else {
                let message = format!(
                    "a client may have {all} virtual devices, and {} are in use; free a slice first",
                    known.values().filter(|place| place.in_use).count()
                );
                return Err(Status::new(Code::ResourceExhausted, message));
            };
            chosen.push(number);
        }
        drop(fresh);
        for (position, (&number, &physical)) in chosen.iter().zip(devices).enumerate() {
            known.insert(number, Place { physical, in_use: true, memory, slice, position });
        }
        Ok(chosen)
    }

    /// Frees virtual devices; they keep their physical devices.
    pub fn release(&mut self, client: ClientId, devices: &[DeviceId]) {
        let Some(known) = self.places.get_mut(&client) else { return };
        for device in devices {
            if let Some(place) = known.get_mut(device) {
                place.in_use = false;
            }
        }
    }

    /// Removes all virtual devices of a client and returns them.
    pub fn remove(&mut self, client: ClientId) -> impl Iterator<Item = DeviceId> + use<> {
        self.places.remove(&client).unwrap_or_default().into_keys()
    }

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

/// Returns the first `count` virtual device numbers of a client, in order.
pub(crate) fn numbers(
    client: ClientId,
    count: u32,
) -> impl ExactSizeIterator<Item = DeviceId> + use<> {
    let clients = u64::from((i32::MAX as u32 - FIRST) / MOST);
    let first = FIRST + (client.0 % clients) as u32 * MOST;
    (first..first + count).map(DeviceId)
}

/// A candidate for a slice.
pub(crate) struct SliceBlock {
    pub island: IslandId,
    pub devices: Vec<DeviceId>,
    /// Slices on the busiest device, the sum over all devices, hosts; ties go to the lowest island
    /// and device.
    pub cost: (u32, u32, usize, IslandId, DeviceId),
}
