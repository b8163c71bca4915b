//! Migration of a client's virtual devices to another island, with all their arrays and programs.
//!
//! Back-pressure holds the client's requests meanwhile. When all earlier requests are dispatched
//! and answered (draining), its programs are compiled for the new physical devices; then its arrays
//! are copied there; then both replace the old ones. If a stage fails, the migration is rolled
//! back. Other clients are not affected.
//!
//! Source: PATHWAYS §4.1 (virtual devices let the mapping to physical ones change), §4.2 (programs
//! are lowered again when it does).

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BufferId, ClientId, Code, DeviceId, HostId, IslandId, Status, TransferTag};
use ir::ArraySpec;
use protocol::Command;
use smallvec::smallvec;
use topology::Island;

use super::Controller;
use crate::events::Handle;
use crate::islands::IslandState;
use crate::migration::{Migration, Places, Stage};
use crate::objects::Buffer;
use crate::pending::Waiting;
use crate::programs::{Executable, Purpose};
use crate::reshard::{self, ShardMove};
use crate::slices::Load;

impl Controller {
    /// Starts to migrate everything that a client has on an island through virtual devices.
    ///
    /// # Errors
    /// A program takes batches of an input there, or no other island has space for its slices; the
    /// message says why.
    pub(super) fn begin_move(&mut self, client: ClientId, from: IslandId) -> Result<(), Status> {
        let takes_input = |found: &&Arc<Executable>| {
            let is_there = |device: &DeviceId| self.device(*device).island == from;
            found.takes_input() && found.devices.iter().any(is_there)
        };
        if let Some(found) = self.clients[&client].executables.values().find(takes_input) {
            let (code, name) = (Code::FailedPrecondition, &found.compiled.name);
            let why = format!(
                "hosts of island {from} make batches for {name} of client {client}; where they are \
                 in their data is not moved; let the client end its input first"
            );
            return Err(Status::new(code, why));
        }
        let slices = self.slices.on(client, |device| self.device(device).island == from);
        let others = self.cluster.islands().iter().filter(|island| {
            island.id != from
                && self.island_state(island.id) == IslandState::Up
                && !self.removals.contains_key(&island.id)
        });
        let places = others.filter_map(|island| {
            let (busiest, places) = self.places_on(client, island, &slices)?;
            Some((busiest, island.id, places))
        });
        let Some((_, to, places)) = places.min_by_key(|place| (place.0, place.1)) else {
            let sizes: Vec<String> = slices.iter().map(|slice| slice.len().to_string()).collect();
            return Err(Status::new(
                Code::FailedPrecondition,
                format!(
                    "client {client} has slices of {} devices on island {from}, for which no \
                     other island that is up has the room; add one, or let the client free them",
                    sizes.join(", ")
                ),
            ));
        };
        let number = self.next_id();
        let migration = Migration::new(number, from, to, places);
        self.migrations.insert(client, migration);
        Ok(())
    }

    /// Returns the devices of an island that slices would get, and the load of the busiest of them.
    fn places_on(
        &self,
        client: ClientId,
        island: &Island,
        slices: &[Vec<DeviceId>],
    ) -> Option<(u32, Places)> {
        let mut load = self.slices.load();
        let mut places = Places::new();
        let mut busiest = 0;
        for slice in slices {
            let memory = slice.iter().map(|&device| self.slices.memory(client, device)).max();
            let memory = memory.filter(|&bytes| bytes > 0);
            let block = self.best_block(island, (slice.len() as u32, memory), &load)?;
            for (&number, device) in slice.iter().zip(block.devices) {
                let used: &mut Load = load.entry(device).or_default();
                used.add(memory.unwrap_or(0));
                busiest = busiest.max(used.slices);
                places.insert(number, (self.slices.physical(number)?, device));
            }
        }
        Some((busiest, places))
    }

    /// Advances migrations whose client is drained, and ends removals that wait for none.
    pub(super) fn advance_migrations(&mut self) {
        let drained: Vec<ClientId> = self
            .migrations
            .iter()
            .filter(|(client, migration)| {
                migration.stage == Stage::Draining
                    && self.scheduler.queued(**client) == 0
                    && self.pending.values().all(|pending| pending.client != **client)
                    && self.assembling.values().all(|program| program.client != **client)
            })
            .map(|(&client, _)| client)
            .collect();
        for client in drained {
            self.compile_anew(client);
        }
        self.end_removals();
    }

    /// Maps the virtual devices to their new physical devices and recompiles the programs on them.
    fn compile_anew(&mut self, client: ClientId) {
        let migration = self.migrations.get_mut(&client).expect("the caller found it");
        migration.stage = Stage::Compiling;
        let number = migration.number;
        let places = migration.places.clone();
        for (&device, &(_, to)) in &places {
            self.put_at(client, device, to);
        }
        let state = &self.clients[&client];
        let mut programs: Vec<(Handle, Arc<Executable>)> = state
            .executables
            .iter()
            .filter(|(_, found)| found.devices.iter().any(|device| places.contains_key(device)))
            .map(|(&name, found)| (name, found.clone()))
            .collect();
        programs.sort_by_key(|program| program.0);
        let migration = self.migrations.get_mut(&client).expect("seen above");
        migration.missing = programs.len();
        if programs.is_empty() {
            return self.send_arrays(client);
        }
        for (name, program) in programs {
            self.compile_again(client, &program, Purpose::Move(number, name));
        }
    }

    fn put_at(&mut self, client: ClientId, device: DeviceId, physical: DeviceId) {
        self.slices.place(client, device, physical);
        self.cluster.place(device, physical);
        self.scheduler.memory.place(device, physical);
    }

    /// A program is compiled for the new devices, or has failed to compile.
    pub(super) fn program_moved(
        &mut self,
        client: ClientId,
        (number, name): (u64, Handle),
        made: Result<Executable, Status>,
    ) {
        let migration =
            self.migrations.get_mut(&client).filter(|migration| migration.number == number);
        let Some(migration) = migration else {
            if let Ok(made) = made {
                self.unload(client, &made);
            }
            return;
        };
        match made {
            Ok(made) => drop(migration.programs.insert(name, made)),
            Err(error) => drop(migration.error.get_or_insert(error)),
        }
        migration.missing -= 1;
        if migration.missing > 0 {
            return;
        }
        match migration.error.clone() {
            Some(error) => self.stay(client, &error),
            None => self.send_arrays(client),
        }
    }

    /// Copies the arrays to the new devices.
    fn send_arrays(&mut self, client: ClientId) {
        let migration = self.migrations.get_mut(&client).expect("the caller found it");
        migration.stage = Stage::Copying;
        let places = migration.places.clone();
        let state = &self.clients[&client];
        let mut arrays: Vec<(Handle, Buffer)> = state
            .buffers
            .iter()
            .filter(|(_, buffer)| {
                let devices = &buffer.spec.sharding.devices;
                buffer.error.is_none()
                    && !buffer.is_deleted()
                    && devices.iter().any(|device| places.contains_key(device))
            })
            .map(|(&name, buffer)| (name, buffer.clone()))
            .collect();
        arrays.sort_by_key(|array| array.0);
        let mut asked: BTreeMap<HostId, Vec<BufferId>> = BTreeMap::new();
        for end in state.completions.values().filter(|end| end.error.is_none()) {
            for &host in end.hosts.iter() {
                asked.entry(host).or_default().push(end.id);
            }
        }
        let mut moved = Vec::with_capacity(arrays.len());
        for (name, buffer) in arrays {
            match self.send_array(client, &buffer, &places) {
                Ok(there) => {
                    for &host in there.hosts.iter() {
                        asked.entry(host).or_default().push(there.id);
                    }
                    moved.push((name, there));
                }
                Err(error) => return self.stay(client, &error),
            }
        }
        let migration = self.migrations.get_mut(&client).expect("seen above");
        migration.arrays = moved;
        if asked.is_empty() {
            return self.arrays_moved(client, None);
        }
        let hosts: Vec<HostId> = asked.keys().copied().collect();
        let ticket = self.await_hosts(client, 0, &hosts, Waiting::Moved);
        for (host, buffers) in asked {
            self.send(client, host, Command::CheckReady { ticket, buffers });
        }
    }

    /// Copies one array; returns its buffer on the new devices.
    fn send_array(
        &mut self,
        client: ClientId,
        buffer: &Buffer,
        places: &Places,
    ) -> Result<Buffer, Status> {
        let at = |which: fn(&(DeviceId, DeviceId)) -> DeviceId| {
            let mut spec = ArraySpec::clone(&buffer.spec);
            let devices = spec.sharding.devices.iter();
            spec.sharding.devices =
                devices.map(|device| places.get(device).map_or(*device, which)).collect();
            spec
        };
        let (before, after) = (at(|place| place.0), Arc::new(at(|place| place.1)));
        let id = BufferId(self.next_id());
        self.client(client).lineage.note(id, 1, smallvec![buffer.id]);
        let mut next_id = self.next_id();
        let planned = reshard::plan(
            &self.cluster,
            (buffer.id, &before),
            (id, &after),
            (client, false),
            || {
                next_id += 1;
                TransferTag(next_id)
            },
        )?;
        self.advance_ids(next_id);
        if let ShardMove::Commands(commands) = planned {
            self.send_moves(client, commands);
        }
        let hosts = self.hosts_of(&after.sharding.devices);
        Ok(Buffer { id, hosts, ..buffer.clone() })
    }

    /// Completes a migration: all arrays are copied. An error is that of an array, which migrates
    /// with it, or the loss of an island.
    pub(super) fn arrays_moved(&mut self, client: ClientId, error: Option<Status>) {
        let Some(migration) = self.migrations.get(&client) else { return };
        if let (Some(error), false) = (error, self.island_state(migration.to) == IslandState::Up) {
            return self.stay(client, &error);
        }
        let Migration { programs, arrays, .. } =
            self.migrations.remove(&client).expect("seen above");
        for (name, there) in arrays {
            let owner = there.storage.len() == 1
                && there.storage[0].shards == there.spec.sharding.devices.len() as u64;
            if owner {
                there.storage[0].recharge(self.charge_made(client, &there.spec));
            }
            let known = self.client(client).buffers.get_mut(&name);
            match known.filter(|buffer| buffer.error.is_none()) {
                Some(buffer) => {
                    let old = std::mem::replace(buffer, there);
                    self.free(client, Some(old));
                }
                None => self.free(client, Some(there)),
            }
        }
        let mut ends = std::mem::take(&mut self.client(client).completions);
        for end in ends.values_mut().filter(|end| end.error.is_none()) {
            let old = Buffer { hosts: Arc::new([]), ..end.clone() };
            let old = std::mem::replace(end, old);
            self.free(client, Some(old));
        }
        self.client(client).completions = ends;
        for (name, program) in programs {
            self.replace_executable(client, name, program);
        }
        self.drain_backlog(client);
    }

    /// Rolls a failed migration back: everything stays on its old devices.
    fn stay(&mut self, client: ClientId, error: &Status) {
        let Some(migration) = self.migrations.remove(&client) else { return };
        for (&device, &(from, _)) in &migration.places {
            self.put_at(client, device, from);
        }
        let refused = Status::new(
            error.code,
            format!(
                "client {client} cannot be moved to island {}: {}",
                migration.to, error.message
            ),
        );
        if let Some(removal) = self.removals.get_mut(&migration.from) {
            removal.error.get_or_insert(refused);
        }
        self.discard(client, migration);
        self.drain_backlog(client);
    }

    /// Abandons the migration of a client that has disconnected.
    pub(super) fn forget_migration(&mut self, client: ClientId) {
        if let Some(migration) = self.migrations.remove(&client) {
            self.discard(client, migration);
        }
    }

    /// Frees what was made for a migration.
    fn discard(&mut self, client: ClientId, migration: Migration) {
        for (_, buffer) in migration.arrays {
            self.free(client, Some(buffer));
        }
        for program in migration.programs.into_values() {
            self.unload(client, &program);
        }
    }

    /// Returns whether any client is migrating away from an island.
    pub(super) fn is_moving(&self, from: IslandId) -> bool {
        self.migrations.values().any(|migration| migration.from == from)
    }
}
