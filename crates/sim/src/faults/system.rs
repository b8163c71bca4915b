//! The event loop: clients, the production controller, and hosts.

use std::collections::{BTreeMap, BTreeSet};

use base::{BufferId, ExecutableId, HostId, Nanos, Random};
use control::{Config, Controller, Effect, Event};
use protocol::{Command, Report};
use topology::{Cluster, IslandSpec};

use super::checks::Troubles;
use super::event::{SimEvent, ToHost};
use super::host::{Action, Input, Process};
use super::network::{HostMachine, latency};
use super::user::User;
use super::{BrokenInvariant, FaultCounts, FaultRun};
use crate::queue::EventQueue;

mod clients;
mod gangs;
mod supervisor;

const ISLANDS: u32 = 4;
const HOSTS: u32 = 2;
/// Longest run; what is not answered by then is never answered.
const END: Nanos = Nanos::from_millis(400_000);
/// How long hosts are given to free what gone clients had.
const REST: Nanos = Nanos::from_millis(2_000);

/// A computation over several hosts.
#[derive(Debug)]
struct Gang {
    executable: ExecutableId,
    members: BTreeMap<HostId, (u64, Input)>,
    outcome: Option<[i64; 2]>,
}

/// The whole system.
#[derive(Debug)]
pub(super) struct FaultySystem {
    pub seed: u64,
    pub random: Random,
    pub now: Nanos,
    pub controller: Controller,
    pub machines: Vec<HostMachine>,
    pub users: Vec<User>,
    pub troubles: Troubles,
    pub counts: FaultCounts,
    /// Until when the controller's machine is frozen.
    pub frozen_until: Nanos,
    /// Whether nothing goes wrong any more.
    pub is_ending: bool,
    /// Islands whose restart is scheduled.
    pub restarting: BTreeSet<usize>,
    queue: EventQueue<SimEvent>,
    gangs: BTreeMap<BufferId, Gang>,
    /// Hosts of each function.
    members: BTreeMap<ExecutableId, BTreeSet<HostId>>,
    log: Option<Vec<String>>,
    violation: Option<BrokenInvariant>,
    longest_wait: Nanos,
}

/// Number of the island of a host.
fn island_of(host: HostId) -> usize {
    (host.0 / HOSTS) as usize
}

impl FaultySystem {
    pub fn new(seed: u64, with_log: bool) -> Self {
        let spec = Self::island();
        let cluster = Cluster::new(&vec![spec; ISLANDS as usize]);
        let hosts = cluster.hosts().len();
        Self {
            seed,
            random: Random::of(&[seed]),
            now: Nanos(0),
            controller: Controller::new(cluster, Config::default()),
            machines: (0..hosts).map(|_| HostMachine::default()).collect(),
            users: Vec::new(),
            troubles: Troubles::default(),
            counts: FaultCounts::default(),
            frozen_until: Nanos(0),
            is_ending: false,
            restarting: BTreeSet::new(),
            queue: EventQueue::new(),
            gangs: BTreeMap::new(),
            members: BTreeMap::new(),
            log: with_log.then(Vec::new),
            violation: None,
            longest_wait: Nanos(0),
        }
    }

    /// All islands are of this shape.
    pub fn island() -> IslandSpec {
        IslandSpec::new(HOSTS, 1)
    }

    /// Runs to the end, or to the first violation.
    pub fn run(&mut self) {
        for island in 0..ISLANDS as usize {
            self.start_island(island);
        }
        self.at(Nanos(0), SimEvent::Tick);
        self.until(|system| system.controller.is_up(), "islands do not come up");
        self.add_users();
        self.schedule_faults();
        self.until(Self::is_over, "requests are not answered, or islands do not come back");
        self.is_ending = true;
        for user in 0..self.users.len() {
            if self.users[user].is_here {
                let sent = self.users[user].read_all(self.now);
                self.send(user, sent);
            }
        }
        self.until(Self::is_over, "last reads are not answered");
        self.end();
    }

    /// Returns what has happened.
    pub fn finish(self) -> FaultRun {
        FaultRun {
            counts: self.counts,
            log: self.log.unwrap_or_default(),
            violation: self.violation,
            longest_wait: self.longest_wait,
        }
    }

    fn is_over(&self) -> bool {
        let is_done = |user: &User| !user.is_here || user.turns == 0 && user.asked.is_empty();
        self.users.iter().all(is_done) && self.is_whole()
    }

    /// Lets all clients leave, and checks that nothing is left.
    fn end(&mut self) {
        for user in 0..self.users.len() {
            self.depart(user);
        }
        let rest = self.now + REST;
        self.until(|system| system.now >= rest, "");
        for host in 0..self.machines.len() {
            let left = self.machines[host].process.as_mut().and_then(|process| process.left());
            if let Some(left) = left {
                self.violate(format!("host {host} still has {left}"));
            }
        }
        let overview = self.controller.overview();
        if !overview.clients.is_empty() {
            self.violate(format!("the controller still has {:?}", overview.clients));
        }
    }

    /// Runs until a condition holds.
    fn until(&mut self, holds: impl Fn(&Self) -> bool, otherwise: &str) {
        while self.violation.is_none() && !holds(self) {
            if self.now > END {
                let open: Vec<String> = self
                    .users
                    .iter()
                    .flat_map(|user| {
                        user.asked.iter().map(|(id, asked)| {
                            format!("{} ({id}) of client {}", asked.what, user.client)
                        })
                    })
                    .collect();
                self.note_waits();
                return self.violate(format!("{otherwise}: {}", open.join(", ")));
            }
            self.step();
        }
    }

    pub fn at(&mut self, when: Nanos, event: SimEvent) {
        self.queue.push(when.max(self.now), event);
    }

    pub fn soon(&mut self, event: SimEvent) {
        let takes = latency(&mut self.random);
        self.at(self.now + takes, event);
    }

    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("{:>13.6} {}", self.now.0 as f64 / 1e9, line()));
        }
    }

    /// Notes what all hosts wait for.
    fn note_waits(&mut self) {
        for host in 0..self.machines.len() {
            let waiting = self.machines[host].process.as_ref().map(Process::waiting);
            self.note(|| format!("host {host}: {}", waiting.unwrap_or_default()));
        }
        let gangs = format!("{:?}", self.gangs);
        self.note(|| format!("computations: {gangs}"));
    }

    pub fn violate(&mut self, what: String) {
        self.note(|| format!("VIOLATION: {what}"));
        let (seed, at) = (self.seed, self.now);
        self.violation.get_or_insert(BrokenInvariant { seed, at, what });
    }

    fn step(&mut self) {
        let Some((when, event)) = self.queue.pop() else { return };
        self.now = when;
        match event {
            SimEvent::User(user) => self.turn_of_user(user),
            SimEvent::Fault(fault) => self.inject(fault),
            SimEvent::ToHost(host, process, item) => self.reach_host(host, process, item),
            SimEvent::Turn(host, process) => self.turn_of_host(host, process),
            SimEvent::Ended(gang) => self.ended(gang),
            event @ SimEvent::Message { .. } => self.message(event),
            event => self.reach_controller(event),
        }
    }

    // The controller

    /// Delivers an event to the controller, unless its machine is frozen.
    fn reach_controller(&mut self, event: SimEvent) {
        if self.now < self.frozen_until {
            return self.queue.postpone(self.frozen_until, event);
        }
        let (host, process) = match &event {
            SimEvent::Report(host, process, _)
            | SimEvent::HeartbeatAnswered(host, process)
            | SimEvent::HeartbeatFailed(host, process)
            | SimEvent::ConnectionLost(host, process) => (*host, *process),
            SimEvent::Tick => {
                self.submit(Event::Tick);
                self.end_removals();
                let next = self.now + self.controller.config().tick_interval();
                return self.at(next, SimEvent::Tick);
            }
            _ => unreachable!("other events are not for the controller"),
        };
        let machine = &self.machines[host.0 as usize];
        // As in `run::World`: what a connection says after another has replaced it does not count.
        if machine.incarnation != process || !machine.is_connected {
            return;
        }
        if self.now < machine.cut_until && !matches!(event, SimEvent::HeartbeatFailed(..)) {
            return self.queue.postpone(machine.cut_until, event);
        }
        match event {
            SimEvent::Report(_, _, report) => {
                self.counts.lost_inputs += u64::from(matches!(report, Report::BuffersLost { .. }));
                self.note(|| format!("host {host} reports {report:?}"));
                self.submit(Event::Host { host, report });
            }
            SimEvent::HeartbeatAnswered(..) => self.submit(Event::HeartbeatAnswered(host)),
            SimEvent::HeartbeatFailed(..) => {
                let cause = "no route to host".to_owned();
                self.submit(Event::HeartbeatFailed { host, cause });
            }
            _ => {
                let cause = "its connection was closed".to_owned();
                self.submit(Event::HostLost { host, cause });
            }
        }
    }

    /// Lets the controller handle an event.
    pub fn submit(&mut self, event: Event) {
        let effects = self.controller.handle(self.now, event);
        self.apply(effects);
    }

    pub fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::ToHost { host, command } => {
                    if let Command::Compile { executable, .. } = &command {
                        self.members.entry(*executable).or_default().insert(host);
                    }
                    self.command(host, ToHost::Command(command));
                }
                Effect::Reply { client, id, result } => self.reply(client, id, result),
                Effect::Heartbeat(host) => self.heartbeat(host),
                Effect::Acknowledge { host, tag } => self.beside(host, ToHost::Acknowledge(tag)),
                Effect::LosePeer { host, lost, tag, error } => {
                    self.beside(host, ToHost::Lose(lost, tag, error));
                }
                Effect::StopHost(host) => self.stop_host(host),
                Effect::RestartIsland(island) => self.restart(island.0 as usize),
            }
        }
    }

    /// Sends something to a host on its connection, after all before.
    fn command(&mut self, host: HostId, item: ToHost) {
        let takes = latency(&mut self.random);
        let machine = &mut self.machines[host.0 as usize];
        if !machine.is_connected {
            return;
        }
        machine.to_host = machine.to_host.max(self.now + takes);
        let (when, process) = (machine.to_host, machine.incarnation);
        self.at(when, SimEvent::ToHost(host, process, item));
    }

    /// Sends something to a host ahead of its commands.
    fn beside(&mut self, host: HostId, item: ToHost) {
        let process = self.machines[host.0 as usize].incarnation;
        self.soon(SimEvent::ToHost(host, process, item));
    }

    fn heartbeat(&mut self, host: HostId) {
        let machine = &self.machines[host.0 as usize];
        let process = machine.incarnation;
        match machine.process.is_some() && self.now >= machine.cut_until {
            true => self.beside(host, ToHost::Heartbeat),
            false => self.soon(SimEvent::HeartbeatFailed(host, process)),
        }
    }

    // Hosts

    /// Delivers something to a process; while it is stopped or cut off, that waits.
    fn reach_host(&mut self, host: HostId, process: u64, item: ToHost) {
        let Some(ready) = self.reachable(host, process, true) else { return };
        if ready > self.now {
            return self.queue.postpone(ready, SimEvent::ToHost(host, process, item));
        }
        if !matches!(item, ToHost::Heartbeat) {
            self.note(|| format!("host {host} gets {item:?}"));
        }
        let mut out = Vec::new();
        let machine = &mut self.machines[host.0 as usize];
        let running = machine.process.as_mut().expect("reachable");
        match item {
            ToHost::Command(command) => running.push(command),
            ToHost::Lose(peer, tag, error) => running.lose(peer, (tag, &error), &mut out),
            ToHost::Acknowledge(tag) => running.acknowledge(tag),
            ToHost::Heartbeat => return self.soon(SimEvent::HeartbeatAnswered(host, process)),
        }
        self.act(host, process, out);
        self.turn_of_host(host, process);
    }

    /// Returns from when on a process takes messages, or takes part; `None` if it has ended.
    fn reachable(&self, host: HostId, process: u64, over_network: bool) -> Option<Nanos> {
        let machine = &self.machines[host.0 as usize];
        let cut = if over_network { machine.cut_until } else { Nanos(0) };
        machine.is_running(process).then(|| machine.stopped_until.max(cut))
    }

    /// Delivers a message; one that was held up is sent again only by a process that is still there.
    fn message(&mut self, mut event: SimEvent) {
        let SimEvent::Message { to, to_process, from, from_process, is_late, .. } = &mut event
        else {
            return;
        };
        let (to, to_process, from) = (*to, *to_process, *from);
        if *is_late && !self.machines[from.0 as usize].is_running(*from_process) {
            return;
        }
        let Some(ready) = self.reachable(to, to_process, true) else { return };
        let ready = ready.max(self.machines[from.0 as usize].cut_until);
        if ready > self.now {
            *is_late = true;
            return self.at(ready, event);
        }
        let SimEvent::Message { tag, content, .. } = event else { return };
        let mut out = Vec::new();
        let running = self.machines[to.0 as usize].process.as_mut().expect("reachable");
        if !running.store.is_late(tag, from) {
            running.arrive(tag, content, &mut out);
        }
        self.act(to, to_process, out);
        self.turn_of_host(to, to_process);
    }

    /// Lets a process execute what it can.
    pub fn turn_of_host(&mut self, host: HostId, process: u64) {
        let Some(ready) = self.reachable(host, process, false) else { return };
        if ready > self.now {
            return self.at(ready, SimEvent::Turn(host, process));
        }
        let mut out = Vec::new();
        let now = self.now;
        let machine = &mut self.machines[host.0 as usize];
        let running = machine.process.as_mut().expect("reachable");
        let mut outcome = Ok(false);
        if running.busy_until <= now {
            outcome = running.execute(&mut self.random, &mut out);
            if outcome == Ok(true) {
                running.busy_until = Nanos(now.0 + 2_000 + self.random.below(20_000));
                let next = running.busy_until;
                out.push(Action::Later(next));
            }
        }
        let running = self.machines[host.0 as usize].process.as_mut().expect("reachable");
        running.poll(now, &mut out);
        self.act(host, process, out);
        if let Err(wrong) = outcome {
            self.violate(format!("host {host}: {wrong}"));
        }
    }

    fn act(&mut self, host: HostId, process: u64, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Later(when) => self.at(when, SimEvent::Turn(host, process)),
                Action::Report(report) => {
                    let takes = latency(&mut self.random);
                    let machine = &mut self.machines[host.0 as usize];
                    machine.to_controller = machine.to_controller.max(self.now + takes);
                    let when = machine.to_controller;
                    self.at(when, SimEvent::Report(host, process, report));
                }
                Action::Send { to, tag, content } => {
                    let to_process = self.machines[to.0 as usize].incarnation;
                    let (from, from_process) = (host, process);
                    self.soon(SimEvent::Message {
                        to,
                        to_process,
                        from,
                        from_process,
                        tag,
                        content,
                        is_late: false,
                    });
                }
                Action::Join { gang, executable, input } => {
                    let members = BTreeMap::new();
                    let new = Gang { executable, members, outcome: None };
                    let known = self.gangs.entry(gang).or_insert(new);
                    known.members.insert(host, (process, input));
                    self.begin(gang);
                }
            }
        }
    }
}
