//! Watchdog for launches that do not end: finds their client and start, and acts when the client is
//! gone.
//!
//! Launches issued to devices cannot be cancelled. A client that leaves an endless loop behind
//! would block an island for ever, so after a grace period its hosts are restarted.

use base::{ClientId, ExecutableId, HostId, Nanos, Status};
use protocol::Command;
use rustc_hash::FxHashMap;

use crate::controller::Controller;
use crate::events::Effect;
use crate::hosts::HostState;

/// The launch that a host is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningLaunch {
    /// The client that launched it.
    pub client: ClientId,
    /// Its program.
    pub executable: ExecutableId,
    /// Time of the first tick that saw it, with no launch acknowledged since.
    pub since: Nanos,
}

/// The launch that each host is running, as of the last tick.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    /// The launch, and how many acknowledgements had been received when it was first seen.
    running: FxHashMap<HostId, (u64, RunningLaunch)>,
}

impl Watchdog {
    /// Notes which launch a host is running.
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

    /// Returns the launch that a host is running.
    pub fn running(&self, host: HostId) -> Option<RunningLaunch> {
        self.running.get(&host).map(|(_, running)| *running)
    }
}

impl Controller {
    /// Handles a tick: loses hosts that are silent and sends heartbeats to the others, requests
    /// acknowledgements of short launches, and restarts islands that are stuck in a launch of a
    /// disconnected client.
    pub(crate) fn tick(&mut self) {
        for silent in self.liveness.tick(self.now) {
            self.host_lost(silent.host, &silent.cause);
        }
        self.effects.extend(self.liveness.watched().map(Effect::Heartbeat));
        let hosts: Vec<HostId> = self.cluster.hosts().iter().map(|host| host.id).collect();
        for &host in &hosts {
            if self.scheduler.ask_about_rest(host) {
                self.effects.push(Effect::ToHost { host, command: Command::ReportEnd {} });
            }
            let state = self.scheduler.host(host);
            // Launches of the previous incarnation are not attributed to one that is starting.
            let is_up = state.lost.is_none() && !self.awaited.contains(&state.island);
            self.watchdog.note(host, state, is_up, self.now);
        }
        for host in hosts {
            let Some(running) = self.watchdog.running(host) else { continue };
            let waited = self.now.since(running.since);
            if self.clients.contains_key(&running.client) || waited < self.config.grace() {
                continue;
            }
            if self.scheduler.host(host).lost.is_some() {
                continue; // lost in this loop, with another host of its island
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
