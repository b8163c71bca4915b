//! Reconnects to another rank after a connection has failed.
//!
//! Either rank may open a new connection, by the same channel or by another one (failover), and says
//! how many bytes of the lane it has read; later bytes are retransmitted. So a channel that goes down
//! costs time but no data, as long as another channel reaches the same rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{Channel, HostId, TransferTag};
use parking_lot::Mutex;

use super::stream::ReliableStream;
use super::team::TeamChannel;
use crate::channel::{DataPlane, LaneName, Opened};

/// Timeout of one connection attempt.
const CONNECTING: Duration = Duration::from_secs(1);
/// Head start of the lower rank: on a first attempt, the higher rank of a pair waits this long.
const COURTESY: Duration = Duration::from_millis(300);
/// Maximum number of reconnects of a lane without hearing from the other side, and the backoff after
/// the first one; each later backoff is twice as long.
const ATTEMPTS_MAX: u32 = 8;
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum number of notices that are kept until they are taken.
const NOTICES_MAX: usize = 64;

/// The state that is needed to reconnect the lanes of one transport, by its own channel or another.
#[derive(Debug)]
pub(super) struct Reconnector {
    pub plane: DataPlane,
    pub team: TransferTag,
    pub rank: u32,
    pub hosts: Vec<HostId>,
    pub channels: Vec<TeamChannel>,
    /// Name of the transport, and the channel that it uses as long as that reaches the peers.
    pub line: u32,
    pub own: Channel,
    /// Connections that peers have opened and that have not been accepted yet.
    pub offers: Arc<Mutex<Vec<Opened>>>,
    /// Display name of each rank, if that is not its number, and warnings for the user.
    pub names: Vec<u32>,
    pub notices: Arc<Mutex<Vec<String>>>,
}

impl Reconnector {
    /// Resumes lanes on connections that peers have opened; returns whether any lane was resumed.
    pub fn take_offers(&self, lanes: &mut [Option<ReliableStream>]) -> bool {
        let offers = std::mem::take(&mut *self.offers.lock());
        let mut any = false;
        for offer in offers {
            let rank = self.hosts.iter().position(|&host| host == offer.from);
            let Some(lane) = rank.and_then(|rank| lanes[rank].as_mut()) else { continue };
            // If both ranks open a connection of the same epoch, that of the lower rank wins.
            let is_newer = offer.lane.epoch > lane.epoch
                || offer.lane.epoch == lane.epoch && lane.peer < self.rank;
            if !is_newer {
                continue;
            }
            any = true;
            if offer.lane.via != self.own.0 {
                self.notice(lane.peer, Channel(offer.lane.via), "it connected by another one");
            }
            if let Err(error) = lane.resume(offer.socket, offer.lane, offer.taken) {
                lane.broken = Some(error.to_string());
            }
        }
        any
    }

    /// Reconnects a broken lane by any channel that reaches its rank, its own channel first.
    ///
    /// # Errors
    /// The rank is lost, no channel reaches it, or the retries are exhausted; the text is the reason of
    /// the first failure.
    pub fn mend(&self, lanes: &mut [Option<ReliableStream>], peer: u32) -> Result<(), String> {
        let Some(lane) = &lanes[peer as usize] else { return Ok(()) };
        let (since, pause) = match lane.attempts {
            0 if self.rank > peer => (Instant::now(), COURTESY),
            0 => (Instant::now(), Duration::ZERO),
            // Backoff: a listener that accepts and closes at once may disappear, or recover.
            count => (lane.attempted, PAUSE * (1 << (count - 1))),
        };
        while since.elapsed() < pause {
            self.take_offers(lanes);
            if lanes[peer as usize].as_ref().is_some_and(|lane| lane.broken.is_none()) {
                return Ok(());
            }
            std::thread::sleep(PAUSE / 2);
        }
        let lane = lanes[peer as usize].as_mut().expect("it was there");
        let reason = lane.broken.clone().unwrap_or_default();
        if lane.attempts >= ATTEMPTS_MAX || self.has_lost(peer) {
            return Err(reason);
        }
        let own = self.own;
        let others =
            self.channels.iter().map(|channel| channel.channel).filter(|&other| other != own);
        for via in std::iter::once(own).chain(others) {
            let (team, epoch) = (self.team, lane.epoch + 1);
            let name = LaneName { team, channel: self.line, epoch, via: via.0 };
            match self.plane.open_lane(self.hosts[peer as usize], name, lane.taken(), CONNECTING) {
                Err(error) => tracing::debug!(%error, "a channel to rank {peer} is of no use"),
                Ok(socket) => {
                    lane.reopen(socket, name).map_err(|error| error.to_string())?;
                    if via != own {
                        self.notice(peer, via, &reason);
                    }
                    return Ok(());
                }
            }
        }
        Err(reason)
    }

    /// Records that a channel no longer reaches a rank, and which channel replaces it.
    fn notice(&self, peer: u32, via: Channel, reason: &str) {
        let (own, rank) = (self.own, self.names.get(peer as usize).copied().unwrap_or(peer));
        tracing::warn!(%reason, "channel {own} to rank {rank} goes by channel {via} now");
        let mut notices = self.notices.lock();
        let text =
            format!("channel {own} to rank {rank} is lost: {reason}; channel {via} carries it now");
        if notices.len() < NOTICES_MAX && !notices.contains(&text) {
            notices.push(text);
        }
    }

    /// Whether a rank is lost. A process that has its host's place would accept connections, and not
    /// answer.
    fn has_lost(&self, peer: u32) -> bool {
        self.plane.has_lost(self.hosts[peer as usize], self.team)
    }

    /// Probes whether the channel that a lane uses reaches its rank.
    pub fn leads_to(&self, lane: &ReliableStream) -> bool {
        let host = self.hosts[lane.peer as usize];
        !self.has_lost(lane.peer) && self.plane.probe(host, lane.via, CONNECTING)
    }
}
