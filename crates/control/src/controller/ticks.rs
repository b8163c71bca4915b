//! Ticks: what the controller does from time to time, without an event of a client or host.
//!
//! Launches issued to devices cannot be cancelled. A client that leaves an endless loop behind
//! would block an island for ever, so after a grace period its hosts are restarted.

use base::{Code, HostId, Status};
use protocol::Command;

use super::Controller;
use crate::events::Effect;

impl Controller {
    /// Handles a tick: loses hosts that are silent and sends heartbeats to the others, requests
    /// acknowledgements of short launches, and restarts islands that are stuck in a launch of a
    /// disconnected client.
    pub(super) fn tick(&mut self) {
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
                Code::DataLoss,
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
