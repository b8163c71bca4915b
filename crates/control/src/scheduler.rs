//! Gang scheduling: which client's launch goes next, on every host of the gang at once.
//!
//! Each client has one queue for each host. A command leaves when all before it in its queue have
//! left, and a question about buffers that are made by then at once. A launch leaves when nothing
//! is before it on any host of its gang and each has room for it, and then for all of them in one
//! step. Among launches that could go, that of the highest priority and then of the least virtual
//! time goes first, and what waits for room keeps others from its hosts, so that a wide gang is
//! not starved by narrow ones.
//!
//! No cycle of waits can form: a receive leaves only after the sends that it waits for, so whatever
//! a command waits for has left before it, and what has left is one order over all hosts.
//!
//! Source: PATHWAYS §4.4. Differs from the paper: 1. the paper enqueues in FIFO order and names
//! other policies as possible. 2. One scheduler for all islands: an order for each island on its
//! own would let two clients that use two islands block each other crosswise.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::{BufferId, ClientId, ExecutableId, HostId, IslandId, Nanos, Status};
use fabric::Cluster;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::accounts::Accounts;
use crate::hosts::{HostState, Part};
use crate::seam::{Command, HostInfo};

/// How fast estimates follow what is measured.
const ESTIMATE_GAIN: f64 = 0.25;
/// Least estimate of a run that was never measured.
const UNKNOWN: Nanos = Nanos(1_000_000);

/// What leaves for hosts, in order.
pub(crate) type Out = Vec<(HostId, Command)>;

/// What a command has to do with commands to other hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// Nothing.
    None,
    /// It is one of the sends of this transfer.
    Sends(u64),
    /// It must not leave before all sends of this transfer have.
    Receives(u64),
}

/// Launches that leave for all their hosts at once.
#[derive(Debug)]
struct Gang {
    client: ClientId,
    executable: ExecutableId,
    members: SmallVec<[(HostId, Command); 2]>,
    islands: SmallVec<[IslandId; 2]>,
    estimate: Nanos,
    /// Members with nothing before them in their queue.
    first: usize,
}

#[derive(Debug)]
enum Item {
    Command(Box<Command>, Link),
    Member(u64),
}

#[derive(Debug, Default)]
struct ClientQueues {
    hosts: BTreeMap<HostId, VecDeque<Item>>,
    /// Gangs with nothing before them on any host, in the client's order.
    ready: BTreeSet<u64>,
    /// Buffers on each host that were made ahead of what is queued there.
    early: BTreeMap<HostId, BTreeSet<BufferId>>,
    length: usize,
}

impl ClientQueues {
    /// May a command leave for a host although launches from that of buffer `first` on are queued
    /// there? Buffers are numbered in the order of requests, so those before it are made; a host
    /// must still have them, since nobody can ask for what a queued command frees or donates.
    fn may_overtake(&mut self, host: HostId, first: BufferId, command: &Command) -> bool {
        let early = self.early.entry(host).or_default();
        let is_made = |buffer: &BufferId| *buffer < first || early.contains(buffer);
        match command {
            Command::CheckReady { buffers, .. } => buffers.iter().all(is_made),
            Command::Read { buffer, .. } => is_made(buffer),
            Command::Gather { buffer, shards, .. } if shards.iter().all(|s| is_made(&s.1)) => {
                *early = early.split_off(&first);
                early.insert(*buffer);
                true
            }
            _ => false,
        }
    }
}

/// The scheduler.
#[derive(Debug)]
pub(crate) struct Scheduler {
    hosts: Vec<HostState>,
    /// Devices of each host, and of each island.
    host_devices: Vec<u32>,
    island_devices: Vec<u32>,
    pub accounts: Accounts,
    queues: BTreeMap<ClientId, ClientQueues>,
    gangs: FxHashMap<u64, Gang>,
    next_gang: u64,
    /// Sends of each transfer that have not left.
    unsent: FxHashMap<u64, u32>,
    /// Measured run time of each program on its hosts.
    measured: FxHashMap<ExecutableId, f64>,
    /// Launches given to each island so far.
    sequences: Vec<u64>,
    window: u32,
    mode: Dispatch,
    /// With sequential dispatch: launches of each client that devices have not been given.
    unenqueued: FxHashMap<ClientId, u32>,
}

/// When a client's next launch may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dispatch {
    /// Whenever there is room for it, for what it needs is known in advance.
    #[default]
    Parallel,
    /// When the one before it has been given to its devices, as systems do that learn then what
    /// the next one needs. Source: PATHWAYS §4.5, Figure 4a.
    Sequential,
}

impl Scheduler {
    /// A scheduler whose hosts may have up to `window` launches before them.
    pub fn new(cluster: &Cluster, window: u32, mode: Dispatch) -> Self {
        let hosts = cluster.hosts().iter().map(|host| HostState::new(host.island)).collect();
        let mut host_devices = vec![0; cluster.hosts().len()];
        let mut island_devices = vec![0; cluster.islands().len()];
        for device in cluster.devices() {
            host_devices[device.host.0 as usize] += 1;
            island_devices[device.island.0 as usize] += 1;
        }
        Self {
            hosts,
            host_devices,
            island_devices,
            accounts: Accounts::default(),
            queues: BTreeMap::new(),
            gangs: FxHashMap::default(),
            next_gang: 0,
            unsent: FxHashMap::default(),
            measured: FxHashMap::default(),
            sequences: vec![0; cluster.islands().len()],
            window,
            mode,
            unenqueued: FxHashMap::default(),
        }
    }

    pub fn host(&self, host: HostId) -> &HostState {
        &self.hosts[host.0 as usize]
    }

    pub fn all_joined(&self) -> bool {
        self.hosts.iter().all(|state| state.info.is_some())
    }

    /// Commands of a client that wait, over all hosts.
    pub fn queued(&self, client: ClientId) -> usize {
        self.queues.get(&client).map_or(0, |queues| queues.length)
    }

    /// Commands that wait to leave for a host.
    pub fn queue_length(&self, host: HostId) -> usize {
        self.queues.values().filter_map(|queues| queues.hosts.get(&host)).map(VecDeque::len).sum()
    }

    /// How long a run of a program takes, if that was measured.
    pub fn measured(&self, executable: ExecutableId) -> Option<Nanos> {
        self.measured.get(&executable).map(|&time| Nanos(time as u64))
    }

    /// Forgets a program.
    pub fn forget(&mut self, executable: ExecutableId) {
        self.measured.remove(&executable);
    }

    /// Announces a transfer of so many sends.
    pub fn announce(&mut self, transfer: u64, sends: u32) {
        if sends > 0 {
            self.unsent.insert(transfer, sends);
        }
    }

    /// Sends a command of a client's, after all its earlier ones.
    pub fn send(
        &mut self,
        client: ClientId,
        host: HostId,
        command: Command,
        link: Link,
        out: &mut Out,
    ) {
        if self.host(host).lost.is_some() {
            return self.left(client, link, out);
        }
        let waits = match self.queues.get(&client).and_then(|queues| queues.hosts.get(&host)) {
            Some(queue) if !queue.is_empty() => true,
            _ => self.must_wait(link),
        };
        if waits && !self.overtakes(client, host, &command) {
            let queues = self.queues.entry(client).or_default();
            queues.length += 1;
            let item = Item::Command(Box::new(command), link);
            queues.hosts.entry(host).or_default().push_back(item);
            return;
        }
        out.push((host, command));
        self.left(client, link, out);
    }

    /// Does a command need nothing of the launches that its client has queued on a host?
    fn overtakes(&mut self, client: ClientId, host: HostId, command: &Command) -> bool {
        let Some(queues) = self.queues.get_mut(&client) else { return false };
        let Some(Item::Member(id)) = queues.hosts.get(&host).and_then(VecDeque::front) else {
            return false;
        };
        let first = self.gangs[id].members.iter().find_map(|(_, launch)| match launch {
            Command::Launch { first_result: first, .. }
            | Command::Exchange { first_result: first, .. }
            | Command::Run { first_buffer: first, .. } => Some(*first),
            _ => None,
        });
        first.is_some_and(|first| queues.may_overtake(host, first, command))
    }

    fn must_wait(&self, link: Link) -> bool {
        matches!(link, Link::Receives(transfer) if self.unsent.contains_key(&transfer))
    }

    /// A command has left; the last send of a transfer lets its receives leave.
    fn left(&mut self, client: ClientId, link: Link, out: &mut Out) {
        let Link::Sends(transfer) = link else { return };
        let Some(unsent) = self.unsent.get_mut(&transfer) else { return };
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
                let receives = Link::Receives(transfer);
                matches!(queue.front(), Some(Item::Command(_, link)) if *link == receives)
            })
            .map(|(&host, _)| host)
            .collect();
        for host in waiting {
            self.drain(client, host, out);
        }
    }

    /// Lets a gang leave when its turn has come. Members to lost hosts vanish.
    ///
    /// # Arguments
    /// - `expected`: its run time as far as it is known without measuring the program.
    pub fn submit(
        &mut self,
        client: ClientId,
        executable: ExecutableId,
        mut members: SmallVec<[(HostId, Command); 2]>,
        expected: Nanos,
        out: &mut Out,
    ) {
        members.retain(|(host, _)| self.hosts[host.0 as usize].lost.is_none());
        let mut islands: SmallVec<[IslandId; 2]> = SmallVec::new();
        for (host, _) in &members {
            let island = self.host(*host).island;
            if !islands.contains(&island) {
                islands.push(island);
            }
        }
        let is_measured = self.measured.contains_key(&executable);
        let estimate = if is_measured { expected } else { expected.max(UNKNOWN) };
        let gang = Gang { client, executable, members, islands, estimate, first: 0 };
        let queues = self.queues.get(&client);
        if queues.is_none_or(|queues| queues.length == 0) {
            for &island in &gang.islands {
                self.accounts.wake(client, island);
            }
        }
        let is_free = |(host, _): &(HostId, Command)| {
            let state = &self.hosts[host.0 as usize];
            !state.wanted
                && state.has_room(self.window)
                && queues.and_then(|q| q.hosts.get(host)).is_none_or(VecDeque::is_empty)
        };
        if !self.is_held(client) && gang.members.iter().all(is_free) {
            return self.give(gang, out);
        }
        self.queue(gang);
        self.dispatch(out);
    }

    /// Puts a gang behind what its client has queued on each of its hosts.
    fn queue(&mut self, mut gang: Gang) {
        self.next_gang += 1;
        let id = self.next_gang;
        let queues = self.queues.entry(gang.client).or_default();
        for (host, _) in &gang.members {
            let queue = queues.hosts.entry(*host).or_default();
            gang.first += usize::from(queue.is_empty());
            queue.push_back(Item::Member(id));
            queues.length += 1;
        }
        if gang.first == gang.members.len() {
            queues.ready.insert(id);
        }
        self.gangs.insert(id, gang);
    }

    /// Must a client wait until its last launch has been given to the devices?
    fn is_held(&self, client: ClientId) -> bool {
        self.unenqueued.get(&client).is_some_and(|&count| count > 0)
    }

    /// Hands a gang to all its hosts.
    fn give(&mut self, gang: Gang, out: &mut Out) {
        let Gang { client, executable, mut estimate, .. } = gang;
        // What was queued before its program was measured is charged for what it takes.
        let is_whole = matches!(gang.members.first(), Some((_, Command::Launch { .. })));
        if is_whole && let Some(measured) = self.measured(executable) {
            estimate = measured;
        }
        for &island in &gang.islands {
            let all = f64::from(self.island_devices[island.0 as usize].max(1));
            let members = gang.members.iter().map(|member| member.0);
            let taken = members.filter(|&host| self.host(host).island == island);
            let taken: u32 = taken.map(|host| self.host_devices[host.0 as usize]).sum();
            let cost = Nanos((estimate.0 as f64 * f64::from(taken) / all) as u64);
            self.accounts.charge(client, island, cost);
            self.sequences[island.0 as usize] += 1;
        }
        // The first word on a program comes soon, for all that is decided before is a guess.
        let is_measured = self.measured.contains_key(&executable);
        let part = Part { client, executable, launches: 1, estimate, is_measured };
        let one_by_one = self.mode == Dispatch::Sequential;
        for (host, mut command) in gang.members {
            let state = &mut self.hosts[host.0 as usize];
            let sequence = self.sequences[state.island.0 as usize];
            let is_launch = state.give(&mut command, sequence, part, self.window, one_by_one);
            if is_launch && one_by_one {
                *self.unenqueued.entry(client).or_default() += 1;
            }
            out.push((host, command));
        }
    }

    /// Lets everything leave whose turn has come.
    pub fn dispatch(&mut self, out: &mut Out) {
        while let Some(id) = self.next_to_leave() {
            let gang = self.gangs.remove(&id).expect("gangs that are ready exist");
            let client = gang.client;
            let hosts: SmallVec<[HostId; 8]> = gang.members.iter().map(|m| m.0).collect();
            let queues = self.queues.get_mut(&client).expect("a gang waits in queues");
            queues.ready.remove(&id);
            for host in &hosts {
                let popped = queues.hosts.get_mut(host).and_then(VecDeque::pop_front);
                debug_assert!(matches!(popped, Some(Item::Member(first)) if first == id));
            }
            queues.length -= hosts.len();
            self.give(gang, out);
            for host in hosts {
                self.drain(client, host, out);
            }
        }
    }

    /// The gang that goes next, if any can. Marks hosts for whose room one waits.
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
        for id in ready {
            let gang = &self.gangs[&id];
            let overtakes = gang.members.iter().any(|(host, _)| kept.contains(host));
            if overtakes || self.is_held(gang.client) {
                continue;
            }
            let full =
                |(host, _): &&(HostId, Command)| !self.hosts[host.0 as usize].has_room(self.window);
            match gang.members.iter().find(full) {
                None => return Some(id),
                Some(&(host, _)) => {
                    self.hosts[host.0 as usize].wanted = true;
                    kept.extend(gang.members.iter().map(|(host, _)| *host));
                }
            }
        }
        None
    }

    /// Lets commands of one queue leave up to the next launch or receive that must wait.
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
                Some(Item::Command(_, link)) => {
                    let link = *link;
                    if self.must_wait(link) {
                        return;
                    }
                    let queues = self.queues.get_mut(&client).expect("seen above");
                    let queue = queues.hosts.get_mut(&host).expect("seen above");
                    let Some(Item::Command(command, _)) = queue.pop_front() else {
                        unreachable!("seen above")
                    };
                    queues.length -= 1;
                    out.push((host, *command));
                    self.left(client, link, out);
                }
            }
        }
    }

    /// A host has finished what it was first asked about, and was busy with it for so long.
    pub fn finished(&mut self, host: HostId, busy: Nanos, out: &mut Out) {
        let state = &mut self.hosts[host.0 as usize];
        let Some(batch) = state.finished() else { return };
        let island = state.island;
        let wanted = std::mem::take(&mut state.wanted);
        let devices = f64::from(self.host_devices[host.0 as usize]);
        let all = f64::from(self.island_devices[island.0 as usize].max(1));
        let total = batch.estimate.0.max(1) as f64;
        for part in &batch.parts {
            if let Some(count) = self.unenqueued.get_mut(&part.client) {
                *count = count.saturating_sub(part.launches);
            }
            if self.mode == Dispatch::Sequential {
                continue; // the end of the work is not reported
            }
            let actual = busy.0 as f64 * part.estimate.0 as f64 / total;
            let each = actual / f64::from(part.launches.max(1));
            let known = self.measured.entry(part.executable).or_insert(each);
            *known += ESTIMATE_GAIN * (each - *known);
            let share = |time: f64| Nanos((time * devices / all) as u64);
            let estimate = share(part.estimate.0 as f64);
            // One measurement is as good as the moment at which a thread woke up; estimates are not
            // moved by it much, and so neither is who goes next. A guess is corrected at once.
            if !part.is_measured {
                self.accounts.settle(part.client, island, estimate, share(actual));
            }
            self.accounts.note_use(part.client, Nanos((actual * devices) as u64));
        }
        if wanted || self.mode == Dispatch::Sequential {
            self.dispatch(out);
        }
    }

    /// A client is gone: what it still wanted is dropped.
    pub fn drop_client(&mut self, client: ClientId, out: &mut Out) {
        if let Some(queues) = self.queues.remove(&client) {
            for item in queues.hosts.into_values().flatten() {
                match item {
                    Item::Member(id) => drop(self.gangs.remove(&id)),
                    Item::Command(_, Link::Sends(transfer)) => drop(self.unsent.remove(&transfer)),
                    Item::Command(..) => {}
                }
            }
        }
        self.accounts.close(client);
        self.unenqueued.remove(&client);
        for host in &mut self.hosts {
            host.wanted = false;
        }
        self.dispatch(out);
    }

    /// A host is there, for the first time or again.
    pub fn join(&mut self, host: HostId, info: HostInfo) {
        let state = &mut self.hosts[host.0 as usize];
        *state = HostState::new(state.island);
        state.info = Some(info);
    }

    /// A host is lost: what was queued for it is dropped, and gangs go on without it.
    pub fn lose(&mut self, host: HostId, error: Status, out: &mut Out) {
        let state = &mut self.hosts[host.0 as usize];
        state.lost = Some(error);
        state.wanted = false;
        let clients: Vec<ClientId> = self.queues.keys().copied().collect();
        for client in clients {
            let queues = self.queues.get_mut(&client).expect("listed above");
            let Some(queue) = queues.hosts.remove(&host) else { continue };
            queues.length -= queue.len();
            for (place, item) in queue.into_iter().enumerate() {
                match item {
                    Item::Member(id) => self.leave_gang(client, id, host, place == 0),
                    Item::Command(_, link) => self.left(client, link, out),
                }
            }
        }
        self.dispatch(out);
    }

    fn leave_gang(&mut self, client: ClientId, id: u64, host: HostId, was_first: bool) {
        let gang = self.gangs.get_mut(&id).expect("members belong to gangs");
        gang.members.retain(|member| member.0 != host);
        gang.first -= usize::from(was_first);
        let queues = self.queues.get_mut(&client).expect("a gang waits in queues");
        if gang.members.is_empty() {
            queues.ready.remove(&id);
            self.gangs.remove(&id);
        } else if gang.first == gang.members.len() {
            queues.ready.insert(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fabric::IslandSpec;
    use smallvec::smallvec;

    use super::*;
    use crate::accounts::Share;
    use crate::seam::Acknowledge;

    const WINDOW: u32 = 64;

    fn scheduler(islands: u32, hosts: u32) -> Scheduler {
        let spec = IslandSpec { hosts, devices_per_host: 1 };
        let cluster = Cluster::new(&vec![spec; islands as usize]);
        Scheduler::new(&cluster, WINDOW, Dispatch::Parallel)
    }

    fn launch(client: u64) -> Command {
        Command::Launch {
            sequence: 0,
            previous: 0,
            acknowledge: Acknowledge::No,
            executable: ExecutableId(client),
            args: smallvec![],
            first_result: BufferId(1),
            results: 1,
            keep: smallvec![],
            completion: None,
            client: ClientId(client),
        }
    }

    fn submit(scheduler: &mut Scheduler, client: u64, hosts: &[u32], out: &mut Out) {
        let members = hosts.iter().map(|&host| (HostId(host), launch(client))).collect();
        let executable = ExecutableId(client);
        let expected = scheduler.measured(executable).unwrap_or_default();
        scheduler.submit(ClientId(client), executable, members, expected, out);
    }

    /// `(host, client)` of the launches that left.
    fn launches(out: &Out) -> Vec<(u32, u64)> {
        let of = |(host, command): &(HostId, Command)| match command {
            Command::Launch { client, .. } => Some((host.0, client.0)),
            _ => None,
        };
        out.iter().filter_map(of).collect()
    }

    /// Runs what has left, one launch after another on each host; each takes its client's time.
    /// Returns device time by client until `until`, on the first host.
    fn simulate(
        scheduler: &mut Scheduler,
        times: &BTreeMap<u64, u64>,
        mut out: Out,
        until: u64,
    ) -> BTreeMap<u64, u64> {
        let hosts = scheduler.hosts.len();
        let mut had: BTreeMap<u64, u64> = BTreeMap::new();
        let mut now = vec![0_u64; hosts];
        let mut begun = vec![0_u64; hosts];
        let mut at_host: Vec<VecDeque<(u64, Acknowledge)>> = vec![VecDeque::new(); hosts];
        loop {
            for (host, command) in out.drain(..) {
                if let Command::Launch { client, acknowledge, .. } = command {
                    at_host[host.0 as usize].push_back((client.0, acknowledge));
                }
            }
            let busiest = (0..hosts).filter(|&host| !at_host[host].is_empty());
            let Some(host) = busiest.min_by_key(|&host| now[host]) else { return had };
            let (client, acknowledge) = at_host[host].pop_front().expect("seen above");
            now[host] += times[&client];
            if now[host] > until {
                return had;
            }
            if host == 0 {
                *had.entry(client).or_default() += times[&client];
            }
            if acknowledge != Acknowledge::No {
                let busy = Nanos(now[host] - std::mem::replace(&mut begun[host], now[host]));
                scheduler.finished(HostId(host as u32), busy, &mut out);
            }
        }
    }

    fn shares(weights: &[u32], times: &[u64], until: u64) -> Vec<f64> {
        let mut scheduler = scheduler(1, 2);
        let mut out = Out::new();
        let times: BTreeMap<u64, u64> = (1..).zip(times.iter().copied()).collect();
        for (client, &weight) in (1..).zip(weights) {
            let share = Share { weight, priority: 0 };
            scheduler.accounts.open(ClientId(client), share);
        }
        for client in 1..=weights.len() as u64 {
            for _ in 0..2 * until / times[&client] {
                submit(&mut scheduler, client, &[0, 1], &mut out);
            }
        }
        let had = simulate(&mut scheduler, &times, out, until);
        let total: u64 = had.values().sum();
        (1..=weights.len() as u64).map(|c| had[&c] as f64 / total as f64).collect()
    }

    #[test]
    fn device_time_follows_weights() {
        let second = 1_000_000_000;
        for times in [[1_000_000; 4], [300_000, 900_000, 2_000_000, 5_000_000]] {
            let equal = shares(&[1, 1, 1, 1], &times, 2 * second);
            assert!(equal.iter().all(|share| (share - 0.25).abs() < 0.02), "{equal:?}");
            let graded = shares(&[1, 2, 4, 8], &times, 2 * second);
            for (share, weight) in graded.iter().zip([1.0, 2.0, 4.0, 8.0]) {
                assert!((share - weight / 15.0).abs() < 0.02, "{graded:?}");
            }
        }
    }

    #[test]
    fn all_hosts_see_one_order() {
        let mut scheduler = scheduler(1, 3);
        let mut out = Out::new();
        for turn in 0..500 {
            let client = 1 + turn % 3;
            let hosts: &[u32] = if turn % 2 == 0 { &[0, 1, 2] } else { &[1, 2] };
            submit(&mut scheduler, client, hosts, &mut out);
        }
        let mut sent = out.clone();
        while scheduler.hosts.iter().any(|host| host.in_flight() > 0) {
            for host in 0..3 {
                let mut more = Out::new();
                scheduler.finished(HostId(host), Nanos(1_000_000), &mut more);
                sent.extend(more);
            }
        }
        let order = |host: u32| -> Vec<(u64, u64)> {
            let numbers = sent.iter().filter(|sent| sent.0.0 == host);
            let number = |(_, command): &(HostId, Command)| match command {
                Command::Launch { sequence, previous, .. } => (*sequence, *previous),
                _ => (0, 0),
            };
            numbers.map(number).collect()
        };
        assert_eq!(order(1), order(2));
        assert_eq!((order(0).len(), order(1).len()), (250, 500));
        for host in 0..3 {
            let mut last = 0;
            for (sequence, previous) in order(host) {
                assert!(previous == last && sequence > previous);
                last = sequence;
            }
        }
    }

    #[test]
    fn the_higher_priority_goes_first() {
        let mut scheduler = scheduler(1, 1);
        let mut out = Out::new();
        scheduler.accounts.open(ClientId(1), Share { weight: 9, priority: 0 });
        scheduler.accounts.open(ClientId(2), Share { weight: 1, priority: 1 });
        for client in [1, 2] {
            for _ in 0..100 {
                submit(&mut scheduler, client, &[0], &mut out);
            }
        }
        let given = out.len();
        assert!(launches(&out).iter().all(|launch| launch.1 == 1), "only client 1 was there");
        while scheduler.hosts[0].in_flight() > 0 {
            scheduler.finished(HostId(0), Nanos(1_000_000), &mut out);
        }
        assert_eq!(out.len(), 200);
        assert!(launches(&out)[given..given + 100].iter().all(|launch| launch.1 == 2));
    }

    #[test]
    fn a_receive_leaves_after_the_sends_it_waits_for() {
        let mut scheduler = scheduler(2, 1);
        let client = ClientId(1);
        let mut out = Out::new();
        for _ in 0..100 {
            submit(&mut scheduler, 1, &[0], &mut out);
        }
        out.clear();
        scheduler.announce(7, 1);
        let free = |buffer| Command::Free(vec![BufferId(buffer)]);
        scheduler.send(client, HostId(0), free(1), Link::Sends(7), &mut out);
        scheduler.send(client, HostId(1), free(2), Link::Receives(7), &mut out);
        submit(&mut scheduler, 1, &[1], &mut out);
        assert!(out.is_empty(), "the send waits behind launches, so all else waits for it");
        submit(&mut scheduler, 2, &[1], &mut out);
        assert_eq!(launches(&out), [(1, 2)], "which is nothing to another client");
        out.clear();
        for _ in 0..100 {
            scheduler.finished(HostId(0), Nanos(1_000_000), &mut out);
        }
        let after: Vec<u32> = out.iter().rev().take(3).map(|left| left.0.0).collect();
        assert_eq!(after, [1, 1, 0], "send, receive, launch");
    }

    #[test]
    fn questions_about_what_is_made_do_not_wait() {
        let mut scheduler = scheduler(1, 1);
        let client = ClientId(1);
        let mut out = Out::new();
        for number in 100..200 {
            let mut command = launch(1);
            if let Command::Launch { first_result, .. } = &mut command {
                *first_result = BufferId(number);
            }
            let members = smallvec![(HostId(0), command)];
            scheduler.submit(client, ExecutableId(1), members, Nanos(0), &mut out);
        }
        let queued = 200 - scheduler.queued(client) as u64;
        out.clear();
        let check = |buffer| Command::CheckReady { ticket: 1, buffers: vec![BufferId(buffer)] };
        let mut asks = |command| {
            let before = out.len();
            scheduler.send(client, HostId(0), command, Link::None, &mut out);
            out.len() > before
        };
        assert!(asks(check(queued - 1)), "its launch has left");
        assert!(!asks(check(queued)), "its launch is the first in the queue");
        let gather = |source, buffer| {
            let sharding = ir::Sharding::single(base::DeviceId(0), None);
            let dims = ir::Dims::new();
            let spec = Arc::new(ir::ArraySpec { dtype: ir::DType::F32, dims, sharding });
            let shards = vec![(0, BufferId(source), 0)];
            Command::Gather { buffer: BufferId(buffer), spec, shards }
        };
        assert!(asks(gather(100, 200)) && asks(check(200)));
        assert!(!asks(gather(queued, 201)) && !asks(check(201)));
        assert!(!asks(Command::Free(vec![BufferId(100)])), "it might be read by what is queued");
    }

    #[test]
    fn what_a_dead_client_queued_is_dropped() {
        let mut scheduler = scheduler(1, 2);
        let mut out = Out::new();
        for turn in 0..200 {
            submit(&mut scheduler, 1 + turn % 2, &[0, 1], &mut out);
        }
        let begun = launches(&out).iter().filter(|launch| launch.1 == 1).count();
        scheduler.drop_client(ClientId(1), &mut out);
        assert_eq!(scheduler.queued(ClientId(1)), 0);
        for _ in 0..200 {
            for host in 0..2 {
                scheduler.finished(HostId(host), Nanos(1_000_000), &mut out);
            }
        }
        let of = |client: u64| launches(&out).iter().filter(|launch| launch.1 == client).count();
        assert_eq!((of(1), of(2)), (begun, 200));
        assert_eq!((scheduler.gangs.len(), scheduler.queue_length(HostId(0))), (0, 0));
    }

    #[test]
    fn gangs_go_on_without_a_lost_host() {
        let mut scheduler = scheduler(2, 1);
        let mut out = Out::new();
        for _ in 0..100 {
            submit(&mut scheduler, 1, &[0, 1], &mut out);
        }
        let error = Status::new(base::Code::Unavailable, "gone");
        scheduler.lose(HostId(0), error, &mut out);
        for _ in 0..100 {
            scheduler.finished(HostId(1), Nanos(1_000_000), &mut out);
        }
        let on_second = launches(&out).iter().filter(|launch| launch.0 == 1).count();
        assert_eq!((on_second, scheduler.gangs.len()), (100, 0));
    }

    #[test]
    fn one_by_one_waits_for_no_exchange() {
        let spec = IslandSpec { hosts: 1, devices_per_host: 1 };
        let cluster = Cluster::new(&[spec]);
        let mut scheduler = Scheduler::new(&cluster, WINDOW, Dispatch::Sequential);
        let mut out = Out::new();
        let exchange = Command::Exchange {
            executable: ExecutableId(2),
            args: smallvec![],
            first_result: BufferId(1),
            results: Vec::new(),
            first_tag: base::TransferTag(1),
            client: ClientId(1),
        };
        let members = smallvec![(HostId(0), exchange)];
        scheduler.submit(ClientId(1), ExecutableId(2), members, Nanos(0), &mut out);
        submit(&mut scheduler, 1, &[0], &mut out);
        assert_eq!(launches(&out).len(), 1, "hosts do not report exchanges");
    }

    #[test]
    fn one_by_one_waits_for_each() {
        let spec = IslandSpec { hosts: 1, devices_per_host: 1 };
        let cluster = Cluster::new(&[spec]);
        let mut scheduler = Scheduler::new(&cluster, WINDOW, Dispatch::Sequential);
        let mut out = Out::new();
        for _ in 0..3 {
            submit(&mut scheduler, 1, &[0], &mut out);
        }
        for left in 1..=3 {
            assert_eq!(launches(&out).len(), left);
            scheduler.finished(HostId(0), Nanos(0), &mut out);
        }
    }
}
