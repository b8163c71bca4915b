//! Lanes: connections that are one team's alone, and carry what it wants.

use std::collections::HashMap;
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
}

type Opened = (LaneName, HostId, Socket);

/// Lanes that peers have opened and nobody has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    waiting: Mutex<HashMap<TransferTag, Vec<Opened>>>,
    came: Condvar,
}

impl Lanes {
    /// Keeps a lane for its team.
    pub fn offer(&self, lane: LaneName, from: HostId, socket: Socket) {
        let mut waiting = self.waiting.lock();
        if waiting.values().map(Vec::len).sum::<usize>() >= WAITING_MAX {
            tracing::warn!(%from, "a lane is turned away, since too many wait for their teams");
            return;
        }
        waiting.entry(lane.team).or_default().push((lane, from, socket));
        self.came.notify_all();
    }

    /// A lane of a team, if one comes in time.
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
}
