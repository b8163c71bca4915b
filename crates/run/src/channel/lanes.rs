//! Lanes: connections that are dedicated to one team, which defines their protocol.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{array, fmt};

use base::{HostId, TransferTag};
use parking_lot::{Condvar, Mutex};

use super::frame::{FrameKind, Header};
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

impl LaneName {
    /// Returns the frame that makes a connection of `from`, which has read `taken` bytes of the lane,
    /// the lane's.
    pub fn header(self, from: HostId, taken: u64) -> Header {
        let channels = u64::from(self.channel & 0xffff | self.via << 16);
        let offset = channels | u64::from(self.epoch) << 32;
        Header { kind: FrameKind::Lane, from, tag: self.team, length: 0, offset, total: taken }
    }

    /// Returns the lane that such a frame names.
    pub fn of(header: &Header) -> Self {
        let [channel, via] =
            array::from_fn(|index| u32::from((header.offset >> (16 * index)) as u16));
        Self { team: header.tag, channel, epoch: (header.offset >> 32) as u32, via }
    }

    /// Waits at most `timeout` for the peer to accept the first connection of a lane, and returns
    /// whether it has. Until then it may still refuse the connection: once accepted, it is the team's,
    /// even if this side closes it at once.
    ///
    /// # Errors
    /// The peer has closed the connection, or answers something else.
    pub fn await_acceptance(self, socket: &mut Socket, timeout: Duration) -> io::Result<bool> {
        if !socket.is_readable_within(timeout)? {
            return Ok(false);
        }
        socket.set_timeout(Some(timeout))?;
        let answer = Header::read(socket)?;
        socket.set_timeout(None)?;
        if answer.kind != FrameKind::Lane || Self::of(&answer) != self {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "another lane was accepted"));
        }
        Ok(true)
    }
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
    /// Passes a connection to its team's callback, or queues it for the team; accepts it if it is the
    /// first of its lane. A later one is accepted by the lane itself, which says what it has read.
    ///
    /// # Errors
    /// Too many lanes wait for their teams, the connection has ended, or it is a later one of a lane
    /// whose team is not there: its first one was never accepted, or the team has ended.
    pub fn offer(&self, mut opened: Opened) -> io::Result<()> {
        let watch = self.watches.lock().get(&opened.lane.team).cloned();
        if let Some(watch) = watch {
            watch(opened);
            return Ok(());
        }
        if opened.lane.epoch > 0 {
            return Err(io::Error::other("a lane is opened again, but its team is not there"));
        }
        let mut waiting = self.waiting.lock();
        if waiting.values().map(Vec::len).sum::<usize>() >= WAITING_MAX {
            return Err(io::Error::other("too many lanes wait for their teams"));
        }
        let accepted = opened.lane.header(opened.from, opened.taken);
        opened.socket.write_all(&accepted.encode())?;
        waiting.entry(opened.lane.team).or_default().push(opened);
        self.came.notify_all();
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::super::socket::ChannelListener;
    use super::*;

    fn connected() -> (Socket, Socket) {
        let listener = ChannelListener::bind("tcp:127.0.0.1:0").unwrap();
        let here = Socket::connect(&listener.address().unwrap()).unwrap();
        (here, listener.accept().unwrap())
    }

    #[test]
    fn a_lane_is_not_opened_again_where_its_team_is_not() {
        let lanes = Lanes::default();
        let team = TransferTag(7);
        let offer = |epoch| {
            let (here, socket) = connected();
            let lane = LaneName { team, channel: 0, epoch, via: 0 };
            (here, lanes.offer(Opened { lane, from: HostId(1), taken: 0, socket }))
        };
        let (_first, accepted) = offer(0);
        accepted.unwrap();
        let (_again, refused) = offer(1);
        assert!(refused.unwrap_err().to_string().contains("its team is not there"));
        assert_eq!(lanes.take(team, Duration::ZERO).unwrap().lane.epoch, 0);
        assert!(lanes.take(team, Duration::ZERO).is_none());
    }
}
