//! The order of commands to each host, and how many launches may be on their way.
//!
//! A host has one queue. Launches take a credit; when none is left they wait, and everything
//! behind them waits too, so that the order a host sees is the order of the controller. This is
//! the seam for other scheduling policies: whoever decides what enters the queues decides the
//! island's order.
//!
//! What has left a queue cannot be taken back, so the credits follow the work: a launch shall
//! wait at its host long enough to hide the way there, and hardly longer. Every few launches the
//! host is asked to say that it has got so far; how long that took raises or lowers the credits.

use std::collections::{HashMap, VecDeque};

use base::{ClientId, HostId, IslandId, Nanos, Status};
use fabric::Cluster;

use crate::seam::{Command, HostInfo};

/// Credits rise while launches wait less than this at their host...
const SHORT_WAIT: Nanos = Nanos(10_000_000);
/// ...and fall when they wait longer than this.
const LONG_WAIT: Nanos = Nanos(40_000_000);
/// Credits never fall below this.
const LEAST_CREDITS: u32 = 4;
/// Acknowledgements asked for while all credits are used.
const ACKNOWLEDGEMENTS: u32 = 4;

/// What the controller knows of one host.
#[derive(Debug)]
pub(crate) struct HostState {
    pub info: Option<HostInfo>,
    pub lost: Option<Status>,
    island: IslandId,
    /// Sequence number of the last launch sent to it.
    last_launch: u64,
    /// Launches that may be on their way.
    credits: u32,
    /// Launches on their way, so far as the host has said.
    in_flight: u32,
    /// Of those, the ones since an acknowledgement was last asked for.
    unasked: u32,
    /// When each acknowledgement that is still missing was asked for.
    asked: VecDeque<Nanos>,
    /// Acknowledgements to come before credits may rise again: those of all launches that were
    /// sent before they rose. A host hands its first launches over at once, however slow they are.
    settling: u32,
    queue: VecDeque<Command>,
}

impl HostState {
    fn new(island: IslandId, credits: u32) -> Self {
        Self {
            info: None,
            lost: None,
            island,
            last_launch: 0,
            credits,
            in_flight: 0,
            unasked: 0,
            asked: VecDeque::new(),
            settling: ACKNOWLEDGEMENTS,
            queue: VecDeque::new(),
        }
    }

    /// Makes a command ready to leave if it may; launches learn what they follow.
    fn release(&mut self, command: &mut Command, now: Nanos) -> bool {
        let (Command::Launch { sequence, previous, acknowledge, .. }
        | Command::Run { sequence, previous, acknowledge, .. }) = command
        else {
            return true;
        };
        // Without a missing acknowledgement nothing would ever give a credit back.
        if self.in_flight >= self.credits && !self.asked.is_empty() {
            return false;
        }
        *previous = std::mem::replace(&mut self.last_launch, *sequence);
        self.in_flight += 1;
        self.unasked += 1;
        *acknowledge = self.unasked >= (self.credits / ACKNOWLEDGEMENTS).max(1)
            || self.in_flight >= self.credits;
        if *acknowledge {
            self.unasked = 0;
            self.asked.push_back(now);
        }
        true
    }

    /// Commands of the queue that may go now, in order.
    fn released(&mut self, now: Nanos) -> Vec<Command> {
        let mut released = Vec::new();
        while let Some(mut command) = self.queue.pop_front() {
            if !self.release(&mut command, now) {
                self.queue.push_front(command);
                break;
            }
            released.push(command);
        }
        released
    }
}

/// All hosts.
#[derive(Debug)]
pub(crate) struct Hosts {
    states: Vec<HostState>,
    window: u32,
    queued: usize,
}

impl Hosts {
    /// Hosts that may have up to `window` launches on their way.
    pub fn new(cluster: &Cluster, window: u32) -> Self {
        let first = window.min(ACKNOWLEDGEMENTS * LEAST_CREDITS);
        let states = cluster.hosts().iter().map(|host| HostState::new(host.island, first));
        Self { states: states.collect(), window, queued: 0 }
    }

    pub fn get(&self, host: HostId) -> &HostState {
        &self.states[host.0 as usize]
    }

    pub fn all_joined(&self) -> bool {
        self.states.iter().all(|state| state.info.is_some())
    }

    /// Commands that wait for credit, over all hosts.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Commands that wait for credit at this host.
    pub fn queue_length(&self, host: HostId) -> usize {
        self.get(host).queue.len()
    }

    /// Launches on their way to this host that it was asked to acknowledge.
    pub fn in_flight(&self, host: HostId) -> u32 {
        self.get(host).in_flight - self.get(host).unasked
    }

    /// Returns the command if it may go now; keeps it otherwise. Commands to a lost host vanish.
    pub fn offer(&mut self, host: HostId, mut command: Command, now: Nanos) -> Option<Command> {
        let state = &mut self.states[host.0 as usize];
        if state.lost.is_some() {
            return None;
        }
        if state.queue.is_empty() && state.release(&mut command, now) {
            return Some(command);
        }
        state.queue.push_back(command);
        self.queued += 1;
        None
    }

    /// Gives back credits and returns what may go now, in order.
    pub fn launched(&mut self, host: HostId, count: u32, now: Nanos) -> Vec<Command> {
        let window = self.window;
        let state = &mut self.states[host.0 as usize];
        state.in_flight = state.in_flight.saturating_sub(count).max(state.unasked);
        if let Some(asked) = state.asked.pop_front() {
            let waited = now.0.saturating_sub(asked.0);
            state.settling = state.settling.saturating_sub(1);
            if waited > LONG_WAIT.0 {
                state.credits = (state.credits / 2).max(LEAST_CREDITS.min(window));
            } else if waited < SHORT_WAIT.0 && state.settling == 0 && !state.queue.is_empty() {
                state.credits = (state.credits * 2).min(window);
                state.settling = 2 * ACKNOWLEDGEMENTS;
            }
        }
        let released = state.released(now);
        self.queued -= released.len();
        released
    }

    /// Drops the launches of a client that no host has been sent yet, and returns what may go now
    /// that they are gone. A launch that one host of its gang has must stay with the others.
    pub fn drop_launches(&mut self, client: ClientId, now: Nanos) -> Vec<(HostId, Command)> {
        let mut waiting: HashMap<(IslandId, u64), u32> = HashMap::new();
        for state in &self.states {
            for command in &state.queue {
                if let Command::Launch { sequence, client: owner, .. } = command
                    && *owner == client
                {
                    *waiting.entry((state.island, *sequence)).or_default() += 1;
                }
            }
        }
        let mut released = Vec::new();
        for (number, state) in self.states.iter_mut().enumerate() {
            let before = state.queue.len();
            let island = state.island;
            state.queue.retain(|command| match command {
                Command::Launch { sequence, gang, .. } => {
                    waiting.get(&(island, *sequence)) != Some(gang)
                }
                _ => true,
            });
            let host = HostId(number as u32);
            released.extend(state.released(now).into_iter().map(|command| (host, command)));
            self.queued -= before - state.queue.len();
        }
        released
    }

    /// A host is there, for the first time or again.
    pub fn join(&mut self, host: HostId, info: HostInfo) {
        let first = self.window.min(ACKNOWLEDGEMENTS * LEAST_CREDITS);
        let state = &mut self.states[host.0 as usize];
        *state = HostState::new(state.island, first);
        state.info = Some(info);
    }

    /// Marks a host as lost and drops what was queued for it.
    pub fn lose(&mut self, host: HostId, error: Status) {
        let state = &mut self.states[host.0 as usize];
        state.lost = Some(error);
        self.queued -= state.queue.len();
        state.queue.clear();
    }
}

#[cfg(test)]
mod tests {
    use base::{BufferId, ExecutableId};
    use fabric::IslandSpec;
    use smallvec::smallvec;

    use super::*;

    fn hosts(count: u32, window: u32) -> Hosts {
        let spec = IslandSpec { hosts: count, devices_per_host: 1 };
        Hosts::new(&Cluster::new(&[spec]), window)
    }

    fn launch(sequence: u64, client: u64, gang: u32) -> Command {
        Command::Launch {
            sequence,
            previous: 0,
            gang,
            acknowledge: false,
            executable: ExecutableId(1),
            args: smallvec![],
            first_result: BufferId(sequence),
            results: 1,
            keep: smallvec![],
            completion: None,
            client: ClientId(client),
        }
    }

    fn sequences(commands: &[Command]) -> Vec<(u64, u64)> {
        let numbers = commands.iter().filter_map(|command| match command {
            Command::Launch { sequence, previous, .. } => Some((*sequence, *previous)),
            _ => None,
        });
        numbers.collect()
    }

    #[test]
    fn nothing_overtakes_a_launch_without_credit() {
        let mut hosts = hosts(1, 1);
        let host = HostId(0);
        assert!(hosts.offer(host, launch(1, 1, 1), Nanos(0)).is_some());
        assert!(hosts.offer(host, launch(2, 1, 1), Nanos(0)).is_none());
        assert!(hosts.offer(host, Command::Free(vec![BufferId(1)]), Nanos(0)).is_none());
        assert!(hosts.offer(host, launch(3, 1, 1), Nanos(0)).is_none());
        let released = hosts.launched(host, 1, Nanos(1));
        assert!(matches!(released[..], [Command::Launch { sequence: 2, .. }, Command::Free(_)]));
        assert_eq!(hosts.queued(), 1);
    }

    #[test]
    fn launches_of_a_dead_client_go_unless_a_host_has_them() {
        let mut hosts = hosts(2, 4);
        for sequence in 1..=4 {
            for host in [HostId(0), HostId(1)] {
                assert!(hosts.offer(host, launch(sequence, 1, 2), Nanos(0)).is_some());
            }
        }
        for (sequence, client) in [(5, 1), (6, 2), (7, 1), (8, 2)] {
            for host in [HostId(0), HostId(1)] {
                assert!(hosts.offer(host, launch(sequence, client, 2), Nanos(0)).is_none());
            }
        }
        // The first host gets launch 5, the other does not yet.
        assert_eq!(sequences(&hosts.launched(HostId(0), 1, Nanos(1))), [(5, 4)]);
        assert!(hosts.drop_launches(ClientId(1), Nanos(2)).is_empty());
        assert_eq!(hosts.queued(), 5);
        assert_eq!(sequences(&hosts.launched(HostId(0), 4, Nanos(3))), [(6, 5), (8, 6)]);
        assert_eq!(sequences(&hosts.launched(HostId(1), 4, Nanos(3))), [(5, 4), (6, 5), (8, 6)]);
        assert_eq!(hosts.queued(), 0);
    }

    /// Sends launches that take `each` to a host that hands the first 16 to its device at once.
    /// Returns the most that waited at the host, ever and in the second half.
    fn most_waiting(window: u32, each: u64, count: u64) -> (usize, usize) {
        let mut hosts = hosts(1, window);
        let host = HostId(0);
        let mut at_host = VecDeque::new();
        let (mut ever, mut later) = (0, 0);
        for sequence in 1..=count {
            at_host.extend(hosts.offer(host, launch(sequence, 1, 1), Nanos(0)));
        }
        let (mut now, mut done, mut run) = (0, 0, 0);
        while let Some(command) = at_host.pop_front() {
            ever = ever.max(at_host.len());
            if run > count / 2 {
                later = later.max(at_host.len());
            }
            now += if run < 16 { 0 } else { each };
            run += 1;
            done += 1;
            if matches!(command, Command::Launch { acknowledge: true, .. }) {
                at_host.extend(hosts.launched(host, std::mem::take(&mut done), Nanos(now)));
            }
        }
        assert_eq!(run, count, "a launch was never sent");
        (ever, later)
    }

    #[test]
    fn credits_follow_the_work() {
        assert!(most_waiting(256, 10_000, 10_000).1 > 128);
        assert!(most_waiting(256, 5_000_000, 1_000).1 <= 16);
        let (ever, later) = most_waiting(256, 30_000_000, 1_000);
        assert!(ever <= 32 && later <= 4, "{ever} and {later}");
        assert_eq!(most_waiting(1, 10_000, 100).0, 0);
    }
}
