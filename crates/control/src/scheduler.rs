//! Gang scheduling: dispatches a launch to all hosts of its gang in one step.
//!
//! Each client has one FIFO queue per host. A command is dispatched when all before it in its queue
//! have been; a query about buffers may overtake, once the commands that make its buffers have been
//! dispatched. A launch is dispatched when it is at the front of its queue on every host of its
//! gang and each host has capacity for it. Of the launches that are ready, the one with the highest
//! priority and then the least virtual time comes first. A launch that waits for window space on a
//! host blocks others from all hosts of its gang, so that narrow gangs do not starve a wide one.
//!
//! No deadlock can form: a receive is dispatched only after the sends that it waits for, so every
//! dependency of a command is dispatched before it, and the dispatch order is total over all hosts.
//! A command that waits for device memory waits for runs of whole programs to end, which hold
//! theirs already.
//!
//! Source: PATHWAYS §4.4. Differs from the paper: 1. The paper enqueues in FIFO order and names
//! other policies as possible. 2. One scheduler for all islands: with an independent order per
//! island, two clients that use the same two islands could deadlock each other.

use std::collections::{BTreeMap, BTreeSet};

use base::{BufferId, ClientId, ExecutableId, HostId, IslandId, Nanos};
use protocol::Command;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use topology::Cluster;

use crate::accounts::Accounts;
use crate::arrivals::Arrivals;
use crate::config::Dispatch;
use crate::hosts::HostState;
use crate::inputs::Inputs;
use crate::memory::DeviceMemory;
use crate::submissions::{LaunchRequest, Member, Out, TransferRole};
use gangs::{Gang, Gangs};
use queues::ClientQueues;
use run_times::RunTimes;
use transfers::Transfers;

mod dispatch;
mod gangs;
mod losses;
mod queues;
mod reports;
mod run_times;
mod transfers;

/// The gang scheduler of all islands.
#[derive(Debug)]
pub(crate) struct GangScheduler {
    hosts: Vec<HostState>,
    /// Number of devices of each island.
    island_devices: Vec<u32>,
    pub accounts: Accounts,
    pub inputs: Inputs,
    arrivals: Arrivals,
    queues: BTreeMap<ClientId, ClientQueues>,
    gangs: Gangs,
    next_gang: u64,
    transfers: Transfers,
    pub memory: DeviceMemory,
    /// Whether a command has waited for device memory since all queues were last tried.
    is_short: bool,
    /// Disconnected clients whose runs in progress are not yet fully dispatched.
    leaving: BTreeSet<ClientId>,
    run_times: RunTimes,
    /// Sequence number of the last launch on each island.
    sequences: Vec<u64>,
    window: u32,
    mode: Dispatch,
    /// With sequential dispatch: launches of each client that are not yet enqueued on devices.
    unenqueued: FxHashMap<ClientId, u32>,
}

impl GangScheduler {
    /// Creates a scheduler with at most `window` launches in flight to each host.
    pub fn new(cluster: &Cluster, window: u32, mode: Dispatch) -> Self {
        let mut scheduler = Self {
            hosts: Vec::new(),
            island_devices: Vec::new(),
            accounts: Accounts::default(),
            inputs: Inputs::default(),
            arrivals: Arrivals::default(),
            queues: BTreeMap::new(),
            gangs: Gangs::default(),
            next_gang: 0,
            transfers: Transfers::default(),
            memory: DeviceMemory::default(),
            is_short: false,
            leaving: BTreeSet::new(),
            run_times: RunTimes::default(),
            sequences: Vec::new(),
            window,
            mode,
            unenqueued: FxHashMap::default(),
        };
        for island in cluster.islands() {
            scheduler.add_island(cluster, island.id);
        }
        scheduler
    }

    /// Adds the hosts of an island; their ids follow those of all earlier hosts.
    pub fn add_island(&mut self, cluster: &Cluster, id: IslandId) {
        let island = cluster.island(id).expect("islands are known");
        self.hosts.extend(island.hosts.iter().map(|_| HostState::new(id)));
        for device in island.devices.iter().filter_map(|&device| cluster.device(device)) {
            self.memory.add_device(device);
        }
        self.island_devices.push(island.devices.len() as u32);
        self.sequences.push(0);
    }

    pub fn host(&self, host: HostId) -> &HostState {
        &self.hosts[host.0 as usize]
    }

    /// Returns whether a host must now be asked to report short launches that are not acknowledged
    /// one by one.
    pub fn ask_about_rest(&mut self, host: HostId) -> bool {
        let state = &mut self.hosts[host.0 as usize];
        state.lost.is_none() && state.ask_about_rest()
    }

    pub fn all_joined(&self) -> bool {
        self.hosts.iter().all(|state| state.info.is_some())
    }

    /// Returns whether all hosts have joined, except those that are lost.
    pub fn nobody_is_missing(&self) -> bool {
        self.hosts.iter().all(|state| state.info.is_some() || state.lost.is_some())
    }

    /// Returns the number of queued commands of a client, over all hosts.
    pub fn queued(&self, client: ClientId) -> usize {
        self.queues.get(&client).map_or(0, |queues| queues.length)
    }

    /// Returns the number of commands queued for a host.
    pub fn queue_length(&self, host: HostId) -> usize {
        self.queues.values().map(|queues| queues.length_at(host)).sum()
    }

    /// Returns measured over expected run time of a program, if it was measured.
    pub fn factor(&self, executable: ExecutableId) -> Option<f64> {
        self.run_times.factor(executable)
    }

    /// Forgets the measurements of a program.
    pub fn forget(&mut self, executable: ExecutableId) {
        self.run_times.forget(executable);
    }

    /// Announces a transfer of `sends` send commands.
    pub fn announce(&mut self, transfer: u64, sends: u32) {
        self.transfers.announce(transfer, sends);
    }

    /// Dispatches a command of a client after all its earlier ones, or queues it.
    pub fn send(
        &mut self,
        client: ClientId,
        host: HostId,
        command: Command,
        link: TransferRole,
        out: &mut Out,
    ) {
        if self.host(host).lost.is_some() {
            return self.on_dispatched(client, link, out);
        }
        self.arrivals.note_user(self.host(host).island, client);
        let is_behind = self.queues.get(&client).is_some_and(|queues| !queues.is_empty_at(host));
        let waits = is_behind || self.transfers.must_wait(link);
        let cannot = !self.fits_now(host, &command) || self.arrivals.delay(host, &command);
        if cannot || waits && !self.overtakes(client, host, &command) {
            let queues = self.queues.entry(client).or_default();
            queues.insert(host, command, link, &self.gangs);
            return;
        }
        self.dispatch_command(client, host, command, out);
        self.on_dispatched(client, link, out);
    }

    /// Dispatches a command. If clients share the island, the host is asked to report the arrival
    /// of a received buffer, and launches that need it wait here. This includes receives from hosts
    /// of the same island, which may forward messages of another island. Results of Python
    /// functions are reported always.
    fn dispatch_command(
        &mut self,
        client: ClientId,
        host: HostId,
        command: Command,
        out: &mut Out,
    ) {
        let is_shared = || self.arrivals.is_shared(self.host(host).island);
        let expected = match &command {
            Command::Receive { buffer, .. } if is_shared() => buffer.0..buffer.0 + 1,
            // A function of the client's may take any time, also for the client's other launches.
            Command::RunColocated { first_result, results, .. } => {
                first_result.0..first_result.0 + results.len() as u64
            }
            _ => 0..0,
        };
        self.memory.on_dispatch(host, command, out);
        for buffer in expected.map(BufferId) {
            self.arrivals.expect(host, buffer, client);
            out.push((host, Command::ReportArrival { buffer }));
        }
    }

    /// Returns whether a gang must wait for buffers sent by other islands.
    fn is_delayed(&self, gang: &Gang) -> bool {
        gang.members.iter().any(|member| self.arrivals.delay(member.host, &member.command))
    }

    /// Returns whether device memory suffices for a command; if not, all queues are tried again
    /// later.
    fn fits_now(&mut self, host: HostId, command: &Command) -> bool {
        let fits = self.memory.fits(host, command);
        self.is_short |= !fits;
        fits
    }

    /// Returns whether a command is independent of the launches that its client has queued on a
    /// host.
    fn overtakes(&mut self, client: ClientId, host: HostId, command: &Command) -> bool {
        let queues = self.queues.get_mut(&client);
        queues.is_some_and(|queues| queues.overtakes(host, command, &self.gangs))
    }

    /// Notes that a command was dispatched; after the last send of a transfer its receives follow.
    fn on_dispatched(&mut self, client: ClientId, link: TransferRole, out: &mut Out) {
        let Some(transfer) = self.transfers.on_dispatched(link) else { return };
        let Some(queues) = self.queues.get(&client) else { return };
        for host in queues.receives_in_front(transfer).collect::<Vec<_>>() {
            self.drain(client, host, out);
        }
    }

    /// Submits a gang and dispatches it once it is ready. Members on lost hosts are dropped.
    pub fn submit(&mut self, wanted: LaunchRequest, out: &mut Out) {
        let LaunchRequest { client, executable, position, mut members, expected, inputs } = wanted;
        members.retain(|member| self.hosts[member.host.0 as usize].lost.is_none());
        let mut islands: SmallVec<[IslandId; 2]> = SmallVec::new();
        for member in &members {
            let island = self.host(member.host).island;
            if !islands.contains(&island) {
                islands.push(island);
            }
        }
        let expected = expected.max(Nanos(1)); // nonzero, as the factor multiplies it
        let gang =
            Gang { client, executable, position, members, islands, expected, inputs, first: 0 };
        let queues = self.queues.get(&client);
        if queues.is_none_or(|queues| queues.length == 0) {
            for &island in &gang.islands {
                self.accounts.reactivate(client, island);
            }
        }
        let is_free = |member: &Member| {
            let state = &self.hosts[member.host.0 as usize];
            !state.wanted
                && state.has_window(self.window)
                && queues.is_none_or(|queues| queues.is_empty_at(member.host))
        };
        for &island in &gang.islands {
            self.arrivals.note_user(island, client);
        }
        let may_go =
            !self.is_held(client) && self.inputs.have(&gang.inputs) && !self.is_delayed(&gang);
        if !may_go || !gang.members.iter().all(is_free) || !self.fits(&gang) {
            self.queue(gang);
            return self.dispatch(out);
        }
        self.issue_gang(gang, out);
        if self.is_short {
            self.dispatch(out);
        }
    }

    /// Appends a gang to its client's queue on each of its hosts.
    fn queue(&mut self, mut gang: Gang) {
        self.next_gang += 1;
        let queues = self.queues.entry(gang.client).or_default();
        queues.push_gang(self.next_gang, &mut gang);
        self.gangs.insert(self.next_gang, gang);
    }

    /// Returns whether device memory suffices for a gang on all its hosts.
    fn fits(&self, gang: &Gang) -> bool {
        gang.members.iter().all(|member| self.memory.fits(member.host, &member.command))
    }

    /// Returns whether a client must wait until its last launch is enqueued on the devices.
    fn is_held(&self, client: ClientId) -> bool {
        self.unenqueued.get(&client).is_some_and(|&count| count > 0)
    }
}

#[cfg(test)]
mod tests;
