//! The order of commands to each host, and how many launches may be on their way.
//!
//! A host has one queue. Launches take a credit; when none is left they wait, and everything
//! behind them waits too, so that the order a host sees is the order of the controller. This is
//! the seam for other scheduling policies: whoever decides what enters the queues decides the
//! island's order.

use std::collections::VecDeque;

use base::{HostId, Status};

use crate::seam::{Command, HostInfo};

/// What the controller knows of one host.
#[derive(Debug)]
pub(crate) struct HostState {
    pub info: Option<HostInfo>,
    pub lost: Option<Status>,
    /// Sequence number of the last launch put into its queue.
    last_launch: u64,
    credits: u32,
    queue: VecDeque<Command>,
}

impl HostState {
    fn new(window: u32) -> Self {
        Self { info: None, lost: None, last_launch: 0, credits: window, queue: VecDeque::new() }
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
    pub fn new(count: usize, window: u32) -> Self {
        Self { states: (0..count).map(|_| HostState::new(window)).collect(), window, queued: 0 }
    }

    pub fn get(&self, host: HostId) -> &HostState {
        &self.states[host.0 as usize]
    }

    pub fn get_mut(&mut self, host: HostId) -> &mut HostState {
        &mut self.states[host.0 as usize]
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

    /// Launches on their way to this host.
    pub fn in_flight(&self, host: HostId) -> u32 {
        self.window - self.get(host).credits
    }

    /// Sequence number of the launch that `host` was given before `sequence`.
    pub fn previous_launch(&mut self, host: HostId, sequence: u64) -> u64 {
        std::mem::replace(&mut self.get_mut(host).last_launch, sequence)
    }

    /// Returns the command if it may go now; keeps it otherwise. Commands to a lost host vanish.
    pub fn offer(&mut self, host: HostId, command: Command) -> Option<Command> {
        let state = &mut self.states[host.0 as usize];
        if state.lost.is_some() {
            return None;
        }
        if state.queue.is_empty() && take_credit(state, &command) {
            return Some(command);
        }
        state.queue.push_back(command);
        self.queued += 1;
        None
    }

    /// Gives back credits and returns what may go now, in order.
    pub fn launched(&mut self, host: HostId, count: u32) -> Vec<Command> {
        let window = self.window;
        let state = &mut self.states[host.0 as usize];
        state.credits = (state.credits + count).min(window);
        let mut released = Vec::new();
        while let Some(command) = state.queue.pop_front() {
            if !take_credit(state, &command) {
                state.queue.push_front(command);
                break;
            }
            self.queued -= 1;
            released.push(command);
        }
        released
    }

    /// A host is there, for the first time or again.
    pub fn join(&mut self, host: HostId, info: HostInfo) {
        let window = self.window;
        let state = self.get_mut(host);
        *state = HostState::new(window);
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

fn take_credit(state: &mut HostState, command: &Command) -> bool {
    if !matches!(command, Command::Launch { .. }) {
        return true;
    }
    if state.credits == 0 {
        return false;
    }
    state.credits -= 1;
    true
}

#[cfg(test)]
mod tests {
    use base::{BufferId, ClientId, ExecutableId};
    use smallvec::smallvec;

    use super::*;

    fn launch(sequence: u64) -> Command {
        Command::Launch {
            sequence,
            previous: sequence - 1,
            executable: ExecutableId(1),
            args: smallvec![],
            first_result: BufferId(sequence),
            results: 1,
            keep: smallvec![],
            completion: None,
            client: ClientId(1),
        }
    }

    #[test]
    fn nothing_overtakes_a_launch_without_credit() {
        let mut hosts = Hosts::new(1, 1);
        assert!(hosts.offer(HostId(0), launch(1)).is_some());
        assert!(hosts.offer(HostId(0), launch(2)).is_none());
        assert!(hosts.offer(HostId(0), Command::Free(vec![BufferId(1)])).is_none());
        assert!(hosts.offer(HostId(0), launch(3)).is_none());
        let released = hosts.launched(HostId(0), 1);
        assert!(matches!(released[..], [Command::Launch { sequence: 2, .. }, Command::Free(_)]));
        assert_eq!(hosts.queued(), 1);
    }
}
