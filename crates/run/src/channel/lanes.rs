//! Lanes: connections that are dedicated to one team, which defines their protocol.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{HostId, TransferTag};
use parking_lot::{Condvar, Mutex};

use super::socket::Socket;

/// Maximum number of lanes that wait for their teams; further ones are rejected.
const WAITING_MAX: usize = 4096;

/// Identity of a connection of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneName {
    /// The team; its creator assigns these tags.
    pub team: TransferTag,
    /// The channel, or transport, of the lane.
    pub channel: u32,
    /// Generation of the connection: 0, and one more for each reconnect.
    pub epoch: u32,
    /// The channel that the connection uses: the lane's own, or another after a failover.
    pub via: u32,
}

/// A connection that a peer has opened for a lane.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The lane.
    pub lane: LaneName,
    /// The peer.
    pub from: HostId,
    /// Number of bytes of the lane that the peer has read.
    pub taken: u64,
    /// The connection.
    pub socket: Socket,
}

/// Callback for connections that peers open for a team.
type Watch = Arc<dyn Fn(Opened) + Send + Sync>;

/// Opened lanes that wait for their team, and the callbacks of teams.
#[derive(Default)]
pub(crate) struct Lanes {
    waiting: Mutex<HashMap<TransferTag, Vec<Opened>>>,
    came: Condvar,
    watches: Mutex<HashMap<TransferTag, Watch>>,
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lanes").field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

impl Lanes {
    /// Passes a connection to its team's callback, or queues it for the team.
    pub fn offer(&self, opened: Opened) {
        let watch = self.watches.lock().get(&opened.lane.team).cloned();
        if let Some(watch) = watch {
            return watch(opened);
        }
        let mut waiting = self.waiting.lock();
        if waiting.values().map(Vec::len).sum::<usize>() >= WAITING_MAX {
            tracing::warn!(from = %opened.from, "too many lanes wait for their teams");
            return;
        }
        waiting.entry(opened.lane.team).or_default().push(opened);
        self.came.notify_all();
    }

    /// Takes a connection for a team, waiting at most `timeout`.
    pub fn take(&self, team: TransferTag, timeout: Duration) -> Option<Opened> {
        let deadline = Instant::now() + timeout;
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(mut opened) = waiting.remove(&team) {
                let first = opened.pop();
                if !opened.is_empty() {
                    waiting.insert(team, opened);
                }
                return first;
            }
            if self.came.wait_until(&mut waiting, deadline).timed_out() {
                return None;
            }
        }
    }

    /// Registers the callback for later connections to a team.
    pub fn watch(&self, team: TransferTag, watch: Watch) {
        self.watches.lock().insert(team, watch);
    }

    /// Unregisters the callback of a team and drops its queued connections.
    pub fn unwatch(&self, team: TransferTag) {
        self.watches.lock().remove(&team);
        self.waiting.lock().remove(&team);
    }
}
