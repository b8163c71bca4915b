//! Islands that are added and removed while clients run (elasticity).
//!
//! Source: PATHWAYS §4.1 (backend compute resources are added and removed dynamically).

use std::collections::BTreeSet;

use base::{ClientId, Code, DeviceId, HostId, IslandId, Status};
use topology::IslandSpec;

use super::Controller;
use crate::events::Effect;
use crate::islands::{IslandState, Removal};

impl Controller {
    /// Adds an island, whose hosts can join from now on. A lost or removed island of the same shape
    /// comes back under its old number, with its old devices.
    pub fn add_island(&mut self, spec: &IslandSpec) -> IslandId {
        let devices = (spec.hosts * spec.devices_per_host) as usize;
        let again = self.cluster.islands().iter().find(|island| {
            let shape = (island.hosts.len(), island.devices.len());
            let state = self.island_state(island.id);
            shape == (spec.hosts as usize, devices)
                && matches!(state, IslandState::Lost | IslandState::Removed)
        });
        if let Some(island) = again {
            let id = island.id;
            self.awaited.insert(id);
            self.removed.remove(&id);
            return id;
        }
        let id = self.cluster.add_island(spec);
        self.scheduler.add_island(&self.cluster, id);
        self.incarnations.add();
        self.awaited.insert(id);
        id
    }

    /// Starts to remove an island. Slices on it migrate to other islands; then its hosts are
    /// stopped.
    ///
    /// # Arguments
    /// - `force`: remove it at once, even if clients use it; they see it as a loss.
    ///
    /// # Errors
    /// There is no such island, it is the last one that is up, or what clients have there cannot be
    /// migrated; the message says what and whose.
    pub fn remove_island(&mut self, id: IslandId, force: bool) -> Result<Vec<Effect>, Status> {
        let refused = |code, why: String| Err(Status::new(code, why));
        if self.cluster.island(id).is_none() || self.island_state(id) == IslandState::Removed {
            let islands = self.cluster.islands().iter().map(|island| island.id);
            let left = islands.filter(|&id| self.island_state(id) != IslandState::Removed);
            let left = left.map(|id| id.to_string()).collect::<Vec<_>>().join(", ");
            let why = format!("there is no island {id}; there are: {left}");
            return refused(Code::NotFound, why);
        }
        let is_other = |island: &topology::Island| {
            island.id != id && self.island_state(island.id) == IslandState::Up
        };
        if !self.cluster.islands().iter().any(is_other) {
            let why = format!("island {id} is the only one that is up");
            return refused(Code::FailedPrecondition, why);
        }
        if force || self.island_state(id) != IslandState::Up {
            self.take_away(id);
            return Ok(std::mem::take(&mut self.effects));
        }
        self.check_unused(id, |device| self.slices.physical(device).is_none())?;
        self.removals.insert(id, Removal::default());
        for client in self.users(id, |_| true) {
            if let Err(error) = self.begin_move(client, id) {
                self.removals.remove(&id);
                self.migrations.retain(|_, migration| migration.from != id);
                return Err(error);
            }
        }
        self.advance_migrations();
        Ok(std::mem::take(&mut self.effects))
    }

    /// Returns the outcome of the removal of an island; `None` while it is in progress.
    pub fn removal(&mut self, id: IslandId) -> Option<Result<(), Status>> {
        match self.removals.get_mut(&id) {
            None => Some(Ok(())),
            Some(removal) if removal.is_over => {
                let removal = self.removals.remove(&id).expect("seen above");
                Some(removal.error.map_or(Ok(()), Err))
            }
            Some(_) => None,
        }
    }

    /// Removes islands whose migrations have all ended.
    pub(super) fn end_removals(&mut self) {
        let waiting: Vec<IslandId> = self
            .removals
            .iter()
            .filter(|(id, removal)| !removal.is_over && !self.is_moving(**id))
            .map(|(&id, _)| id)
            .collect();
        for id in waiting {
            let unused = self.check_unused(id, |_| true);
            let removal = self.removals.get_mut(&id).expect("listed above");
            removal.is_over = true;
            removal.error = removal.error.take().or(unused.err());
            if removal.error.is_none() {
                self.take_away(id);
            }
        }
    }

    fn take_away(&mut self, id: IslandId) {
        let error = Status::new(
            Code::DataLoss,
            format!(
                "island {id} was removed; arrays and programs that were on it are gone; restore \
                 them from a checkpoint on another island"
            ),
        );
        self.awaited.remove(&id);
        self.removed.insert(id);
        self.lose_island(id, &error);
    }

    /// Fails if clients use devices of an island for which `counts` is true.
    fn check_unused(&self, id: IslandId, counts: impl Fn(DeviceId) -> bool) -> Result<(), Status> {
        let users = self.users(id, counts);
        if users.is_empty() { Ok(()) } else { Err(in_use(id, &users)) }
    }

    /// Returns the state of an island.
    ///
    /// # Panics
    /// There is no such island.
    pub fn island_state(&self, id: IslandId) -> IslandState {
        if self.removed.contains(&id) {
            return IslandState::Removed;
        }
        let hosts = &self.cluster.island(id).expect("islands are known").hosts;
        let is_lost = |host: &HostId| self.scheduler.host(*host).lost.is_some();
        if self.awaited.contains(&id) {
            IslandState::Starting
        } else if hosts.iter().any(is_lost) {
            IslandState::Lost
        } else if hosts.iter().any(|host| self.scheduler.host(*host).info.is_none()) {
            IslandState::Starting
        } else {
            IslandState::Up
        }
    }

    /// Marks an island as up once all its hosts have joined.
    pub(super) fn island_joins(&mut self, id: IslandId) {
        let hosts = &self.cluster.island(id).expect("islands are known").hosts;
        let is_there = |host: &HostId| {
            let state = self.scheduler.host(*host);
            state.info.is_some() && state.lost.is_none()
        };
        if hosts.iter().all(is_there) {
            self.awaited.remove(&id);
            self.removed.remove(&id);
        }
    }

    /// Returns the clients with arrays, programs or slices on devices of an island for which
    /// `counts` is true.
    fn users(&self, id: IslandId, counts: impl Fn(DeviceId) -> bool) -> BTreeSet<ClientId> {
        let is_on = |device: &DeviceId| self.device(*device).island == id && counts(*device);
        let uses = |client: &ClientId| {
            let state = &self.clients[client];
            let mut arrays = state.buffers.values().filter(|buffer| buffer.error.is_none());
            arrays.any(|buffer| buffer.spec.sharding.devices.iter().any(is_on))
                || state.executables.values().any(|found| found.devices.iter().any(is_on))
                || self.slices.of(*client).any(|device| is_on(&device))
        };
        self.clients.keys().copied().filter(uses).collect()
    }
}

fn in_use(id: IslandId, users: &BTreeSet<ClientId>) -> Status {
    let users: Vec<String> = users.iter().map(ToString::to_string).collect();
    Status::new(
        Code::FailedPrecondition,
        format!(
            "island {id} is used by client {} by the numbers of its devices, which cannot be \
             moved as slices can; wait until they are gone, or force it, which they see as a loss",
            users.join(", ")
        ),
    )
}
