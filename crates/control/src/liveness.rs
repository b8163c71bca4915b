//! Failure detection: which hosts still answer heartbeats, in the controller's own time.
//!
//! A host that answers none for most of the timeout is lost. Only heartbeats count, and no other
//! reports: they take the path of the data, so a host that is cut off from its peers is found too.

use std::collections::BTreeMap;

use base::{HostId, Nanos};

/// A host that has joined and is not lost.
#[derive(Debug)]
struct Heard {
    /// When it joined or last answered.
    at: Nanos,
    /// Why the last heartbeat could not be sent; `None` if it was, or was answered.
    cause: Option<String>,
}

/// Failure detector of all hosts.
#[derive(Debug)]
pub(crate) struct Liveness {
    /// Silence after which a host is lost.
    limit: Nanos,
    interval: Nanos,
    ticked: Nanos,
    heard: BTreeMap<HostId, Heard>,
}

/// A host that has answered no heartbeat for too long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Silent {
    pub host: HostId,
    /// How long it was silent and, if known, why.
    pub cause: String,
}

impl Liveness {
    /// Creates a detector that expects a tick every `interval`.
    pub fn new(limit: Nanos, interval: Nanos) -> Self {
        Self { limit, interval, ticked: Nanos(0), heard: BTreeMap::new() }
    }

    /// Watches a host, which has joined.
    pub fn watch(&mut self, host: HostId, now: Nanos) {
        self.heard.insert(host, Heard { at: now, cause: None });
    }

    /// Notes that a host has answered; ignored if it is watched no longer.
    pub fn answered(&mut self, host: HostId, now: Nanos) {
        if let Some(heard) = self.heard.get_mut(&host) {
            *heard = Heard { at: now, cause: None };
        }
    }

    /// Notes why a heartbeat did not reach a host, for the error should it be lost.
    pub fn unreachable(&mut self, host: HostId, cause: String) {
        if let Some(heard) = self.heard.get_mut(&host) {
            heard.cause = Some(cause);
        }
    }

    /// Watches a host no longer.
    pub fn forget(&mut self, host: HostId) {
        self.heard.remove(&host);
    }

    /// Returns the hosts that are to be sent a heartbeat, in order.
    pub fn watched(&self) -> impl Iterator<Item = HostId> {
        self.heard.keys().copied()
    }

    /// Returns the hosts that have been silent for too long.
    ///
    /// Time in which the controller itself did not run (a frozen machine) is no silence of its hosts.
    pub fn tick(&mut self, now: Nanos) -> Vec<Silent> {
        let elapsed = now.since(std::mem::replace(&mut self.ticked, now));
        if elapsed > Nanos(2 * self.interval.0) {
            let stopped = elapsed.since(self.interval);
            for heard in self.heard.values_mut() {
                heard.at = now.min(Nanos(heard.at.0 + stopped.0));
            }
        }
        let silence = |heard: &Heard| now.since(heard.at);
        let silent = self.heard.iter().filter(|(_, heard)| silence(heard) >= self.limit);
        silent
            .map(|(&host, heard)| {
                let mut cause = format!("no answer for {:.1} s", silence(heard).0 as f64 / 1e9);
                if let Some(why) = &heard.cause {
                    cause += &format!(": {why}");
                }
                Silent { host, cause }
            })
            .collect()
    }
}
