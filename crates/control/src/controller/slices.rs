//! Slices of devices: which devices a client gets.

use std::collections::BTreeMap;

use base::{Bytes, ClientId, Code, DeviceId, HostId, Status};
use place::min_cost_contiguous_range;
use topology::Island;

use super::Controller;
use crate::islands::IslandState;
use crate::slices::{self, Load, Slice, SliceBlock, SliceRequest};

impl Controller {
    /// Returns the numbers that a client's virtual devices may have, in order; none if it has
    /// disconnected.
    pub fn slice_numbers(&self, client: ClientId) -> impl Iterator<Item = DeviceId> + use<> {
        let count = self.clients.get(&client).map_or(0, |state| state.virtual_devices);
        slices::numbers(client, count)
    }

    /// Allocates a slice for a client.
    ///
    /// # Errors
    /// No island has space for it; the message lists the islands and what each has.
    pub fn allocate(&mut self, client: ClientId, wanted: &SliceRequest) -> Result<Slice, Status> {
        if !self.clients.contains_key(&client) {
            return Err(Status::new(Code::NotFound, format!("client {client} is not connected")));
        }
        let count = wanted.device_count()?;
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
        let numbers = slices::numbers(client, self.clients[&client].virtual_devices);
        let slice = self.next_id();
        let reserved = (&block.devices[..], wanted.memory.unwrap_or(0));
        let devices = self.slices.add(client, numbers, slice, reserved)?;
        for (&number, &physical) in devices.iter().zip(&block.devices) {
            self.cluster.place(number, physical);
            self.scheduler.memory.place(number, physical);
        }
        Ok(Slice { devices, island: block.island })
    }

    /// Frees a slice. Arrays on it stay until they are deleted.
    pub fn release(&mut self, client: ClientId, devices: &[DeviceId]) {
        self.slices.release(client, devices);
    }

    /// Frees all slices of a disconnected client.
    pub(super) fn release_all(&mut self, client: ClientId) {
        for device in self.slices.remove(client) {
            self.cluster.forget(device);
        }
    }

    /// Returns the best devices of an island for a slice: contiguous, in few other slices, on few
    /// hosts. Each has the requested memory left besides the reservations of other slices.
    pub(super) fn best_block(
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
        Status::new(
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
