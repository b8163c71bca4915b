//! Watchdog for launches that do not end: finds their client and start.

use base::{ClientId, ExecutableId, HostId, Nanos};
use rustc_hash::FxHashMap;

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
    pub fn note(&mut self, host: HostId, state: &HostState, is_up: bool, now: Nanos) {
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
