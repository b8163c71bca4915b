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

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::{BufferId, ClientId, ExecutableId, HostId, InputId, IslandId, Nanos, Status};
use fabric::Cluster;
use protocol::Command;
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use crate::accounts::Accounts;
use crate::arrivals::Arrivals;
use crate::config::Dispatch;
use crate::hosts::{HostState, LaunchShare, Reporting};
use crate::inputs::Inputs;
use crate::memory::DeviceMemory;
use crate::submissions::{LaunchRequest, Member, Out, SegmentPosition, TransferRole};
use protocol::HostInfo;

/// Gain of the moving average that follows measured run times.
const ESTIMATE_GAIN: f64 = 0.25;
/// Lower bound of the estimate of a program that was never measured.
const UNKNOWN: Nanos = Nanos(1_000_000);

/// A launch request in the queue.
#[derive(Debug)]
struct Gang {
    client: ClientId,
    executable: ExecutableId,
    stretch: SegmentPosition,
    members: SmallVec<[Member; 2]>,
    islands: SmallVec<[IslandId; 2]>,
    expected: Nanos,
    /// Inputs that it takes batches from, named once per batch.
    inputs: SmallVec<[InputId; 1]>,
    /// Number of members at the front of their queues.
    first: usize,
}

impl Gang {
    /// Returns the first buffer that it makes; hosts use the same numbers for their parts of an
    /// array.
    fn first_buffer(&self) -> Option<BufferId> {
        self.members.iter().find_map(|member| match &member.command {
            Command::Launch { first_result: first, .. }
            | Command::RunExchange { first_result: first, .. }
            | Command::RunProgram { first_buffer: first, .. } => Some(*first),
            _ => None,
        })
    }
}

#[derive(Debug)]
enum Item {
    Command(Box<Command>, TransferRole),
    Member(u64),
}

/// Commands and launches of a client that are not dispatched yet: one FIFO queue per host.
#[derive(Debug, Default)]
struct ClientQueues {
    hosts: BTreeMap<HostId, VecDeque<Item>>,
    /// Gangs at the front of all their queues, in the client's order.
    ready: BTreeSet<u64>,
    /// Buffers on each host that were gathered ahead of the launches queued there.
    early: BTreeMap<HostId, BTreeSet<BufferId>>,
    /// Buffers of queued gathers that were inserted ahead of items queued before them.
    placed: BTreeSet<(HostId, BufferId)>,
    length: usize,
}

impl ClientQueues {
    /// Returns whether a command may overtake the launches queued for a host, the first of which
    /// makes buffer `first`. Buffers are numbered in the order of requests, so those before `first`
    /// are made; the host still has them, since a client cannot ask for a buffer that a queued
    /// command frees or donates.
    fn may_overtake(&mut self, host: HostId, first: BufferId, command: &Command) -> bool {
        let early = self.early.entry(host).or_default();
        let is_made = |buffer: &BufferId| *buffer < first || early.contains(buffer);
        match command {
            Command::CheckReady { buffers, .. } => buffers.iter().all(is_made),
            Command::Read { buffer, .. } => is_made(buffer),
            Command::AssembleShards { buffer, shards, .. }
                if shards.iter().all(|s| is_made(&s.source)) =>
            {
                *early = early.split_off(&first);
                early.insert(*buffer);
                true
            }
            _ => false,
        }
    }
}

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
    gangs: FxHashMap<u64, Gang>,
    next_gang: u64,
    /// Sends of each transfer that are not dispatched yet, and their total number.
    unsent: FxHashMap<u64, (u32, u32)>,
    pub memory: DeviceMemory,
    /// Whether a command has waited for device memory since all queues were last tried.
    is_short: bool,
    /// Disconnected clients whose runs in progress are not yet fully dispatched.
    leaving: BTreeSet<ClientId>,
    /// Measured run times of programs.
    measured: FxHashMap<ExecutableId, Measured>,
    /// Sequence number of the last launch on each island.
    sequences: Vec<u64>,
    window: u32,
    mode: Dispatch,
    /// With sequential dispatch: launches of each client that are not yet enqueued on devices.
    unenqueued: FxHashMap<ClientId, u32>,
}

/// Moving averages of expected and measured run time. Their quotient is the factor by which a
/// program runs longer than expected; segments with an expected time of zero leave it unchanged.
#[derive(Debug, Clone, Copy)]
struct Measured {
    expected: f64,
    actual: f64,
}

impl Measured {
    /// A single measurement is distorted by the wake-up latency of a host's thread, so it is
    /// averaged.
    fn learn(&mut self, found: Measured) {
        self.expected += ESTIMATE_GAIN * (found.expected - self.expected);
        self.actual += ESTIMATE_GAIN * (found.actual - self.actual);
    }
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
            gangs: FxHashMap::default(),
            next_gang: 0,
            unsent: FxHashMap::default(),
            memory: DeviceMemory::default(),
            is_short: false,
            leaving: BTreeSet::new(),
            measured: FxHashMap::default(),
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
        self.queues.values().filter_map(|queues| queues.hosts.get(&host)).map(VecDeque::len).sum()
    }

    /// Returns measured over expected run time of a program, if it was measured.
    pub fn factor(&self, executable: ExecutableId) -> Option<f64> {
        let Measured { expected, actual } = self.measured.get(&executable)?;
        Some(actual / expected.max(1.0))
    }

    /// Forgets the measurements of a program.
    pub fn forget(&mut self, executable: ExecutableId) {
        self.measured.remove(&executable);
    }

    /// Announces a transfer of `sends` send commands.
    pub fn announce(&mut self, transfer: u64, sends: u32) {
        if sends > 0 {
            self.unsent.insert(transfer, (sends, sends));
        }
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
        let waits = match self.queues.get(&client).and_then(|queues| queues.hosts.get(&host)) {
            Some(queue) if !queue.is_empty() => true,
            _ => self.must_wait(link),
        };
        let cannot = !self.fits_now(host, &command) || self.arrivals.delay(host, &command);
        if cannot || (waits && !self.overtakes(client, host, &command)) {
            let place = self.place(client, host, &command);
            let queues = self.queues.entry(client).or_default();
            queues.length += 1;
            if let Command::AssembleShards { buffer, .. } = command {
                queues.placed.insert((host, buffer));
            }
            let item = Item::Command(Box::new(command), link);
            queues.hosts.entry(host).or_default().insert(place, item);
            return;
        }
        self.dispatch_command(client, host, command, out);
        self.on_dispatched(client, link, out);
    }

    /// Dispatches a command. If clients share the island, the host is asked to report the arrival
    /// of a received buffer, and launches that need it wait here. This includes receives from hosts
    /// of the same island, which may forward messages of another island.
    fn dispatch_command(
        &mut self,
        client: ClientId,
        host: HostId,
        command: Command,
        out: &mut Out,
    ) {
        let is_shared = self.arrivals.is_shared(self.host(host).island);
        let arrival = match &command {
            Command::Receive { buffer, .. } if is_shared => Some(*buffer),
            _ => None,
        };
        self.memory.on_dispatch(host, command, out);
        if let Some(buffer) = arrival {
            self.arrivals.expect(host, buffer, client);
            out.push((host, Command::ReportArrival { buffer }));
        }
    }

    /// A buffer sent by other islands has arrived at a host: dispatches what waited for it.
    pub fn arrived(&mut self, host: HostId, buffer: BufferId, out: &mut Out) {
        let Some(client) = self.arrivals.arrived(host, buffer) else { return };
        let Some(queues) = self.queues.get(&client) else { return };
        let front = queues.hosts.get(&host).and_then(VecDeque::front);
        match front {
            Some(Item::Command(..)) => self.drain(client, host, out),
            Some(Item::Member(id)) if !self.is_delayed(&self.gangs[id]) => {
                // While it waited, its client was not backlogged on the island.
                for &island in &self.gangs[id].islands {
                    self.accounts.reactivate(client, island);
                }
            }
            _ => return,
        }
        self.dispatch(out);
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
        let Some(queues) = self.queues.get_mut(&client) else { return false };
        let Some(Item::Member(id)) = queues.hosts.get(&host).and_then(VecDeque::front) else {
            return false;
        };
        let first = self.gangs[id].first_buffer();
        first.is_some_and(|first| queues.may_overtake(host, first, command))
    }

    /// Returns the position at which a command enters its client's queue for a host. A query, or a
    /// gather, which makes shards of an array to be queried, is inserted right behind the items
    /// that make its buffers; otherwise a client waiting for a result would wait for everything
    /// requested since. All else goes to the end. O(items overtaken).
    fn place(&self, client: ClientId, host: HostId, command: &Command) -> usize {
        let Some(queues) = self.queues.get(&client) else { return 0 };
        let Some(queue) = queues.hosts.get(&host) else { return 0 };
        let asked: SmallVec<[BufferId; 4]> = match command {
            Command::CheckReady { buffers, .. } => buffers[..].into(),
            Command::Read { buffer, .. } => smallvec![*buffer],
            Command::AssembleShards { shards, .. } => {
                shards.iter().map(|shard| shard.source).collect()
            }
            _ => return queue.len(),
        };
        let is_early = |buffer| queues.early.get(&host).is_some_and(|early| early.contains(buffer));
        let is_ahead = |buffer| is_early(buffer) || queues.placed.contains(&(host, *buffer));
        let makes_others = |first: BufferId| asked.iter().all(|b| *b < first || is_ahead(b));
        let may_be_behind = |item: &&Item| match item {
            Item::Member(id) => self.gangs[id].first_buffer().is_some_and(makes_others),
            Item::Command(other, _) => {
                use Command::{CheckReady, Free, Read};
                matches!(**other, Free { .. } | CheckReady { .. } | Read { .. })
            }
        };
        // Never ahead of the front item: a gang counts its members at the front of their queues.
        queue.len() - queue.iter().skip(1).rev().take_while(may_be_behind).count()
    }

    fn must_wait(&self, link: TransferRole) -> bool {
        matches!(link, TransferRole::Receives(transfer) if self.unsent.contains_key(&transfer))
    }

    /// Notes that a command was dispatched; after the last send of a transfer its receives follow.
    fn on_dispatched(&mut self, client: ClientId, link: TransferRole, out: &mut Out) {
        let TransferRole::Sends(transfer) = link else { return };
        let Some((unsent, _)) = self.unsent.get_mut(&transfer) else { return };
        *unsent -= 1;
        if *unsent > 0 {
            return;
        }
        self.unsent.remove(&transfer);
        let Some(queues) = self.queues.get(&client) else { return };
        let waiting: Vec<HostId> = queues
            .hosts
            .iter()
            .filter(|(_, queue)| {
                let receives = TransferRole::Receives(transfer);
                matches!(queue.front(), Some(Item::Command(_, link)) if *link == receives)
            })
            .map(|(&host, _)| host)
            .collect();
        for host in waiting {
            self.drain(client, host, out);
        }
    }

    /// Submits a gang and dispatches it once it is ready. Members on lost hosts are dropped.
    pub fn submit(&mut self, wanted: LaunchRequest, out: &mut Out) {
        let LaunchRequest { client, executable, stretch, mut members, expected, inputs } = wanted;
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
            Gang { client, executable, stretch, members, islands, expected, inputs, first: 0 };
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
                && queues.and_then(|q| q.hosts.get(&member.host)).is_none_or(VecDeque::is_empty)
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
        let id = self.next_gang;
        let queues = self.queues.entry(gang.client).or_default();
        for member in &gang.members {
            let queue = queues.hosts.entry(member.host).or_default();
            gang.first += usize::from(queue.is_empty());
            queue.push_back(Item::Member(id));
            queues.length += 1;
        }
        if gang.first == gang.members.len() {
            queues.ready.insert(id);
        }
        self.gangs.insert(id, gang);
    }

    /// Returns whether device memory suffices for a gang on all its hosts.
    fn fits(&self, gang: &Gang) -> bool {
        gang.members.iter().all(|member| self.memory.fits(member.host, &member.command))
    }

    /// Returns whether a client must wait until its last launch is enqueued on the devices.
    fn is_held(&self, client: ClientId) -> bool {
        self.unenqueued.get(&client).is_some_and(|&count| count > 0)
    }

    /// Issues a gang to all its hosts and charges its client.
    fn issue_gang(&mut self, gang: Gang, out: &mut Out) {
        let Gang { client, executable, stretch, expected, .. } = gang;
        self.inputs.take(&gang.inputs);
        // A gang queued before its program was measured is charged by the measurement.
        let factor = self.factor(executable);
        let estimate = factor.map_or(expected.max(UNKNOWN), |factor| expected.times(factor));
        for &island in &gang.islands {
            let all = f64::from(self.island_devices[island.0 as usize].max(1));
            let here = gang.members.iter().filter(|member| self.host(member.host).island == island);
            let taken: u32 = here.map(|member| member.devices).sum();
            let cost = estimate.times(f64::from(taken) / all);
            self.accounts.charge(client, island, cost);
            self.sequences[island.0 as usize] += 1;
        }
        // The first measurement of a program is requested at once, as all earlier decisions rest on
        // guesses.
        let is_measured = factor.is_some();
        for Member { host, devices, mut command } in gang.members {
            let launches = 1;
            let part = LaunchShare {
                client,
                executable,
                devices,
                launches,
                expected,
                estimate,
                is_measured,
            };
            let state = &mut self.hosts[host.0 as usize];
            let sequence = self.sequences[state.island.0 as usize];
            let reporting = match self.mode {
                Dispatch::Sequential => Reporting::Each,
                Dispatch::Parallel if self.arrivals.is_shared(state.island) => Reporting::Often,
                Dispatch::Parallel => Reporting::Seldom,
            };
            let is_launch = state.issue(&mut command, sequence, part, self.window, reporting);
            if is_launch && reporting == Reporting::Each {
                *self.unenqueued.entry(client).or_default() += 1;
            }
            self.memory.on_dispatch(host, command, out);
        }
        if stretch == SegmentPosition::Last {
            self.memory.end_segmented(client);
        }
    }

    /// Dispatches everything that is ready.
    pub fn dispatch(&mut self, out: &mut Out) {
        loop {
            let before = out.len();
            self.dispatch_gangs(out);
            if !std::mem::take(&mut self.is_short) {
                break;
            }
            self.drain_all(out);
            if out.len() == before {
                break;
            }
        }
        self.reap_clients();
    }

    /// Dispatches ready gangs, each with the commands behind it.
    fn dispatch_gangs(&mut self, out: &mut Out) {
        while let Some(id) = self.next_to_leave() {
            let gang = self.gangs.remove(&id).expect("gangs that are ready exist");
            let client = gang.client;
            let hosts: SmallVec<[HostId; 8]> =
                gang.members.iter().map(|member| member.host).collect();
            let queues = self.queues.get_mut(&client).expect("a gang waits in queues");
            queues.ready.remove(&id);
            for host in &hosts {
                let popped = queues.hosts.get_mut(host).and_then(VecDeque::pop_front);
                debug_assert!(matches!(popped, Some(Item::Member(first)) if first == id));
            }
            queues.length -= hosts.len();
            self.issue_gang(gang, out);
            for host in hosts {
                self.drain(client, host, out);
            }
        }
    }

    /// Returns the next gang to dispatch, if any can be. Marks hosts where a gang waits for window
    /// space.
    fn next_to_leave(&mut self) -> Option<u64> {
        let mut ready: SmallVec<[u64; 16]> =
            self.queues.values().flat_map(|queues| queues.ready.iter().copied()).collect();
        if ready.is_empty() {
            return None;
        }
        let rank = |id: &u64| {
            let gang = &self.gangs[id];
            self.accounts.rank(gang.client, &gang.islands)
        };
        ready.sort_by(|a, b| rank(a).compare(&rank(b)).then(a.cmp(b)));
        let mut kept: BTreeSet<HostId> = BTreeSet::new();
        // While a gang waits for device memory on a host, no other segmented run begins there, or
        // it might starve.
        let mut short: BTreeSet<HostId> = BTreeSet::new();
        for id in ready {
            let gang = &self.gangs[&id];
            let hosts = || gang.members.iter().map(|member| member.host);
            let overtakes = hosts().any(|host| kept.contains(&host))
                || gang.stretch == SegmentPosition::First
                    && hosts().any(|host| short.contains(&host));
            let is_missing = !self.inputs.have(&gang.inputs) || self.is_delayed(gang);
            if overtakes || self.is_held(gang.client) || is_missing {
                continue;
            }
            let full = |host: &HostId| !self.hosts[host.0 as usize].has_window(self.window);
            if let Some(host) = hosts().find(full) {
                kept.extend(hosts());
                self.hosts[host.0 as usize].wanted = true;
            } else if self.fits(gang) {
                return Some(id);
            } else {
                short.extend(hosts());
                self.is_short = true;
            }
        }
        None
    }

    /// Dispatches commands of one queue up to the next launch or the next command that must wait.
    fn drain(&mut self, client: ClientId, host: HostId, out: &mut Out) {
        loop {
            let Some(queues) = self.queues.get_mut(&client) else { return };
            let Some(queue) = queues.hosts.get_mut(&host) else { return };
            match queue.front() {
                None => return,
                Some(Item::Member(id)) => {
                    let id = *id;
                    let gang = self.gangs.get_mut(&id).expect("members belong to gangs");
                    gang.first += 1;
                    if gang.first == gang.members.len() {
                        queues.ready.insert(id);
                    }
                    return;
                }
                Some(Item::Command(command, link)) => {
                    let link = *link;
                    if !self.memory.fits(host, command) {
                        self.is_short = true;
                        return;
                    }
                    let is_delayed = self.arrivals.delay(host, command);
                    if is_delayed || self.must_wait(link) {
                        return;
                    }
                    let queues = self.queues.get_mut(&client).expect("seen above");
                    let queue = queues.hosts.get_mut(&host).expect("seen above");
                    let Some(Item::Command(command, _)) = queue.pop_front() else {
                        unreachable!("seen above")
                    };
                    queues.length -= 1;
                    if let Command::AssembleShards { buffer, .. } = *command
                        && queues.placed.remove(&(host, buffer))
                    {
                        let early = queues.early.entry(host).or_default();
                        if let Some(Item::Member(id)) = queue.front()
                            && let Some(first) = self.gangs[id].first_buffer()
                        {
                            *early = early.split_off(&first);
                        }
                        early.insert(buffer);
                    }
                    self.dispatch_command(client, host, *command, out);
                    self.on_dispatched(client, link, out);
                }
            }
        }
    }

    /// Drains all queues that have a command at the front.
    fn drain_all(&mut self, out: &mut Out) {
        let fronts = self.queues.iter().flat_map(|(&client, queues)| {
            let hosts = queues.hosts.iter();
            let waiting =
                hosts.filter(|(_, queue)| matches!(queue.front(), Some(Item::Command(..))));
            waiting.map(move |(&host, _)| (client, host))
        });
        for (client, host) in fronts.collect::<Vec<_>>() {
            self.drain(client, host, out);
        }
    }

    /// Removes disconnected clients whose runs in progress are fully dispatched.
    fn reap_clients(&mut self) {
        while let Some(&client) =
            self.leaving.iter().find(|client| self.queues.get(client).is_none_or(|q| q.length == 0))
        {
            self.leaving.remove(&client);
            self.queues.remove(&client);
            self.accounts.close(client);
            self.memory.release(client);
        }
    }

    /// A host has finished its oldest batch of acknowledged launches, which kept it busy for
    /// `busy`.
    pub fn finished(&mut self, host: HostId, busy: Nanos, out: &mut Out) {
        let state = &mut self.hosts[host.0 as usize];
        let Some(batch) = state.finished() else { return };
        let island = state.island;
        let wanted = std::mem::take(&mut state.wanted);
        let all = f64::from(self.island_devices[island.0 as usize].max(1));
        let total = batch.estimate.0.max(1) as f64;
        for part in &batch.parts {
            if let Some(count) = self.unenqueued.get_mut(&part.client) {
                *count = count.saturating_sub(part.launches);
            }
            if self.mode == Dispatch::Sequential {
                continue; // only the enqueueing was reported, not the end of the work
            }
            let devices = f64::from(part.devices);
            let mut actual = part.estimate;
            // Zero means that they ended before the host was asked, so nothing was measured.
            if busy > Nanos(0) {
                actual = busy.times(part.estimate.0 as f64 / total);
                let found = Measured { expected: part.expected.0 as f64, actual: actual.0 as f64 };
                self.measured.entry(part.executable).or_insert(found).learn(found);
                let share = |time: Nanos| time.times(devices / all);
                self.accounts.settle(part.client, island, share(part.estimate), share(actual));
            }
            self.accounts.note_use(part.client, actual.times(devices));
        }
        if wanted || self.mode == Dispatch::Sequential {
            self.dispatch(out);
        }
        if self.host(host).in_flight() == 0 && self.is_idle(island) {
            self.accounts.sync_virtual_time(island);
        }
    }

    /// Returns whether an island has nothing in flight and nothing queued.
    fn is_idle(&self, island: IslandId) -> bool {
        let is_empty = |host| {
            let queues = self.queues.values().filter_map(|queues| queues.hosts.get(&host));
            queues.map(VecDeque::len).sum::<usize>() == 0
        };
        // The last host first: hosts finish roughly in order, so a busy one is found early.
        let mut hosts = self.hosts.iter().enumerate().rev().filter(|(_, s)| s.island == island);
        hosts.all(|(host, state)| state.in_flight() == 0 && is_empty(HostId(host as u32)))
    }

    /// A host has made the next batch of an input, or cannot make more.
    pub fn batch_made(&mut self, host: HostId, input: InputId, end: Option<Status>, out: &mut Out) {
        let ready = self.queues.values().flat_map(|queues| queues.ready.iter().copied());
        let waits = |id: &u64| {
            let wanted = &self.gangs[id].inputs;
            wanted.contains(&input) && !self.inputs.have(wanted)
        };
        let waiting: Vec<u64> = ready.filter(waits).collect();
        match end {
            None => self.inputs.made(input, host),
            Some(error) => {
                let (batches, others) = self.inputs.ended(input, host).unwrap_or_default();
                let end = || Command::EndInput { input, batches, error: error.clone() };
                out.extend(others.into_iter().map(|other| (other, end())));
            }
        }
        for gang in waiting.iter().map(|id| &self.gangs[id]) {
            if self.inputs.have(&gang.inputs) {
                // While it waited, its client was not backlogged on the island.
                for &island in &gang.islands {
                    self.accounts.reactivate(gang.client, island);
                }
            }
        }
        self.dispatch(out);
    }

    /// A client has disconnected: its queued commands are dropped, but runs and transfers that have
    /// begun on some host are completed; otherwise other hosts would keep messages that are never
    /// received and memory that is never freed.
    pub fn drop_client(&mut self, client: ClientId, out: &mut Out) {
        self.unenqueued.remove(&client);
        self.arrivals.drop_client(client);
        let begun = self.begun(client);
        let mut kept = ClientQueues::default();
        let mut unneeded: Vec<u64> = Vec::new();
        for (host, mut queue) in self.queues.remove(&client).unwrap_or_default().hosts {
            queue.retain(|item| match item {
                Item::Member(id) => begun.contains(id),
                Item::Command(_, link) => {
                    let has_begun = self.has_begun(*link);
                    if let (TransferRole::Sends(transfer), false) = (link, has_begun) {
                        unneeded.push(*transfer);
                    }
                    has_begun
                }
            });
            kept.length += queue.len();
            kept.hosts.insert(host, queue);
        }
        self.unsent.retain(|transfer, _| !unneeded.contains(transfer));
        self.gangs.retain(|id, gang| gang.client != client || begun.contains(id));
        for id in begun {
            let is_first = |host: &HostId| matches!(kept.hosts[host].front(), Some(Item::Member(first)) if *first == id);
            let gang = self.gangs.get_mut(&id).expect("listed above");
            gang.first = gang.members.iter().filter(|member| is_first(&member.host)).count();
            if gang.first == gang.members.len() {
                kept.ready.insert(id);
            }
        }
        self.queues.insert(client, kept);
        self.leaving.insert(client);
        for host in &mut self.hosts {
            host.wanted = false;
        }
        // Commands queued behind dropped launches are at the front now.
        self.drain_all(out);
        self.dispatch(out);
    }

    /// Returns the remaining gangs of a client's runs that have begun.
    fn begun(&self, client: ClientId) -> BTreeSet<u64> {
        let of_client = self.gangs.iter().filter(|(_, gang)| gang.client == client);
        let mut gangs: Vec<(u64, SegmentPosition)> =
            of_client.map(|(&id, gang)| (id, gang.stretch)).collect();
        gangs.sort_unstable_by_key(|gang| gang.0);
        // The segments of a run are consecutive, and all of them are queued at once.
        let mut has_first_left = true;
        gangs.retain(|(_, stretch)| match stretch {
            SegmentPosition::Whole => false,
            SegmentPosition::First => {
                has_first_left = false;
                false
            }
            SegmentPosition::Middle => has_first_left,
            SegmentPosition::Last => std::mem::replace(&mut has_first_left, true),
        });
        gangs.into_iter().map(|gang| gang.0).collect()
    }

    /// Returns whether another command of a transfer has been dispatched.
    fn has_begun(&self, link: TransferRole) -> bool {
        match link {
            TransferRole::None => false,
            TransferRole::Sends(transfer) | TransferRole::Receives(transfer) => {
                self.unsent.get(&transfer).is_none_or(|(left, all)| left < all)
            }
        }
    }

    /// A host has joined, for the first time or again.
    pub fn join(&mut self, host: HostId, info: HostInfo) {
        let state = &mut self.hosts[host.0 as usize];
        *state = HostState::new(state.island);
        self.memory.join(host, &info);
        state.info = Some(info);
    }

    /// A host is lost: drops everything queued for it; gangs continue without it.
    pub fn lose(&mut self, host: HostId, error: Status, out: &mut Out) {
        let state = &mut self.hosts[host.0 as usize];
        state.lost = Some(error);
        state.wanted = false;
        self.memory.lose(host);
        self.inputs.lose(host);
        self.arrivals.lose(host);
        let clients: Vec<ClientId> = self.queues.keys().copied().collect();
        for client in clients {
            let queues = self.queues.get_mut(&client).expect("listed above");
            let Some(queue) = queues.hosts.remove(&host) else { continue };
            queues.length -= queue.len();
            queues.placed.retain(|placed| placed.0 != host);
            for (place, item) in queue.into_iter().enumerate() {
                match item {
                    Item::Member(id) => self.leave_gang(client, id, host, place == 0),
                    Item::Command(_, link) => self.on_dispatched(client, link, out),
                }
            }
        }
        self.dispatch(out);
    }

    fn leave_gang(&mut self, client: ClientId, id: u64, host: HostId, was_first: bool) {
        let gang = self.gangs.get_mut(&id).expect("members belong to gangs");
        gang.members.retain(|member| member.host != host);
        gang.first -= usize::from(was_first);
        let queues = self.queues.get_mut(&client).expect("a gang waits in queues");
        if gang.members.is_empty() {
            queues.ready.remove(&id);
            if let Some(gang) = self.gangs.remove(&id)
                && gang.stretch == SegmentPosition::Last
            {
                self.memory.end_segmented(client);
            }
        } else if gang.first == gang.members.len() {
            queues.ready.insert(id);
        }
    }
}

#[cfg(test)]
mod tests;
