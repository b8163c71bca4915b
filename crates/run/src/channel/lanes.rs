//! Lanes: connections that are one team's alone, and carry what it wants.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{HostId, TransferTag};
use parking_lot::{Condvar, Mutex};

use super::socket::Socket;

/// Lanes that may wait for their team; more are turned away.
const WAITING_MAX: usize = 4096;

/// Which lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneName {
    /// Of which team; whoever makes teams gives out these numbers.
    pub team: TransferTag,
    /// By which channel.
    pub channel: u32,
    /// Which connection of the lane this is: 0, and one more for each that takes the place of another.
    pub epoch: u32,
    /// Which way it takes: the lane's own channel, or another one that goes on for it.
    pub way: u32,
}

/// A connection that a peer has opened for a lane.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Of which lane.
    pub lane: LaneName,
    /// Who has opened it.
    pub from: HostId,
    /// How many bytes of the lane it has read.
    pub taken: u64,
    /// The connection.
    pub socket: Socket,
}

/// Takes what peers open for a team from now on.
type Watch = Arc<dyn Fn(Opened) + Send + Sync>;

/// Lanes that peers have opened and nobody has taken yet, and who takes them.
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
    /// Keeps a connection for its team, or gives it to whoever takes them.
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

    /// A connection for a team, if one comes in time.
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

    /// From now on `watch` takes what is opened for a team.
    pub fn watch(&self, team: TransferTag, watch: Watch) {
        self.watches.lock().insert(team, watch);
    }

    /// Nobody takes it any more.
    pub fn unwatch(&self, team: TransferTag) {
        self.watches.lock().remove(&team);
        self.waiting.lock().remove(&team);
    }
}
