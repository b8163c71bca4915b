//! Launches that do not end: whose they are and since when, and what is done when their client is gone.
//!
//! What devices have been given cannot be taken back. A client that leaves an endless loop behind would
//! keep an island for ever, so after a grace its hosts are replaced.

use base::{ClientId, ExecutableId, HostId, Nanos, Status};
use rustc_hash::FxHashMap;

use crate::command::Command;
use crate::controller::Controller;
use crate::hosts::HostState;
use crate::protocol::Effect;

/// What a host has been busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningLaunch {
    /// Whose launch it is.
    pub client: ClientId,
    /// Of which program.
    pub executable: ExecutableId,
    /// Since when no launch has ended there.
    pub since: Nanos,
}

/// What each host is busy with, as of the last tick.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    /// With how many reports of ends had come.
    running: FxHashMap<HostId, (u64, RunningLaunch)>,
}

impl Watchdog {
    /// Notes what a host is busy with.
    fn note(&mut self, host: HostId, state: &HostState, is_up: bool, now: Nanos) {
        let Some(part) = state.first_unfinished().filter(|_| is_up) else {
            self.running.remove(&host);
            return;
        };
        let running =
            RunningLaunch { client: part.client, executable: part.executable, since: now };
        match self.running.get(&host) {
            Some((reports, known))
                if *reports == state.reports() && known.client == part.client => {}
            _ => drop(self.running.insert(host, (state.reports(), running))),
        }
    }

    /// What a host has been busy with.
    pub fn running(&self, host: HostId) -> Option<RunningLaunch> {
        self.running.get(&host).map(|(_, running)| *running)
    }
}

impl Controller {
    /// Time has passed: replaces hosts that are stuck in a launch of a client that is gone.
    pub(crate) fn tick(&mut self) {
        let hosts: Vec<HostId> = self.cluster.hosts().iter().map(|host| host.id).collect();
        for &host in &hosts {
            if self.scheduler.ask_about_rest(host) {
                self.effects.push(Effect::ToHost { host, command: Command::ReportEnd });
            }
            let state = self.scheduler.host(host);
            // What the process before had begun is not the one's that is starting.
            let is_up = state.lost.is_none() && !self.awaited.contains(&state.island);
            self.watchdog.note(host, state, is_up, self.now);
        }
        for host in hosts {
            let Some(running) = self.watchdog.running(host) else { continue };
            let waited = self.now.since(running.since);
            if self.clients.contains_key(&running.client) || waited < self.config.grace {
                continue;
            }
            if self.scheduler.host(host).lost.is_some() {
                continue; // with another host of its island, a moment ago
            }
            let island = self.cluster.host(host).expect("listed above").island;
            let seconds = waited.0 as f64 / 1e9;
            let error = Status::new(
                base::Code::DataLoss,
                format!(
                    "island {island} was restarted: a launch of client {}, which is gone, had not \
                     ended on host {host} after {seconds:.0} s; arrays and programs of island \
                     {island} are gone; restore them from a checkpoint",
                    running.client
                ),
            );
            self.lose_island(island, &error);
            self.effects.push(Effect::RestartIsland(island));
        }
    }
}
