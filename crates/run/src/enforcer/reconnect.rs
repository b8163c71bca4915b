//! Reaching another rank again when a connection to it is of no use any more.
//!
//! Either rank may open another connection, by the same channel or by another one, and says what it has
//! read of the lane; what comes after that is sent again. So a channel that goes down costs time and
//! nothing else, as long as another one leads to the same rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{Channel, HostId, TransferTag};
use parking_lot::Mutex;

use super::stream::ReliableStream;
use super::team::TeamChannel;
use crate::channel::{DataPlane, LaneName, Opened};

/// How long a rank may take to accept a connection.
const CONNECTING: Duration = Duration::from_secs(1);
/// The higher one of two ranks leaves it to the lower one for so long.
const COURTESY: Duration = Duration::from_millis(300);
/// How often a lane is connected again without hearing from the other side, and how long after the
/// first time; each pause is twice the one before.
const ATTEMPTS_MAX: u32 = 8;
const PAUSE: Duration = Duration::from_millis(10);
/// What is kept for whoever asks what people should know.
const NOTICES_MAX: usize = 64;

/// What it takes to reach the other ranks of a team by one channel, or instead of it.
#[derive(Debug)]
pub(super) struct Reconnector {
    pub plane: DataPlane,
    pub team: TransferTag,
    pub rank: u32,
    pub hosts: Vec<HostId>,
    pub ways: Vec<TeamChannel>,
    /// What the line is called, and the way that it takes as long as that leads anywhere.
    pub line: u32,
    pub own: Channel,
    /// Connections that others have opened, and nobody has looked at.
    pub offers: Arc<Mutex<Vec<Opened>>>,
    /// What people call each rank, if that is not its number, and what they should know.
    pub names: Vec<u32>,
    pub notices: Arc<Mutex<Vec<String>>>,
}

impl Reconnector {
    /// Goes on by connections that others have opened; returns whether there were any.
    pub fn take_offers(&self, lanes: &mut [Option<ReliableStream>]) -> bool {
        let offers = std::mem::take(&mut *self.offers.lock());
        let mut any = false;
        for offer in offers {
            let rank = self.hosts.iter().position(|&host| host == offer.from);
            let Some(lane) = rank.and_then(|rank| lanes[rank].as_mut()) else { continue };
            // Of two that were opened at a time, that of the lower rank counts.
            let is_newer = offer.lane.epoch > lane.epoch
                || offer.lane.epoch == lane.epoch && lane.peer < self.rank;
            if !is_newer {
                continue;
            }
            any = true;
            if offer.lane.way != self.own.0 {
                self.notice(lane.peer, Channel(offer.lane.way), "it connected by another one");
            }
            if let Err(error) = lane.resume(offer.socket, offer.lane, offer.taken) {
                lane.broken = Some(error.to_string());
            }
        }
        any
    }

    /// Connects a lane again that is of no use any more, by whichever way leads to its rank.
    ///
    /// # Errors
    /// None does; the text says why.
    pub fn mend(&self, lanes: &mut [Option<ReliableStream>], peer: u32) -> Result<(), String> {
        let Some(lane) = &lanes[peer as usize] else { return Ok(()) };
        let (since, pause) = match lane.attempts {
            0 if self.rank > peer => (Instant::now(), COURTESY),
            0 => (Instant::now(), Duration::ZERO),
            // What takes connections and ends them at once is given time to go away, or to come back.
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
        if lane.attempts >= ATTEMPTS_MAX {
            return Err(reason);
        }
        let own = self.own;
        let others = self.ways.iter().map(|way| way.channel).filter(|&other| other != own);
        for way in std::iter::once(own).chain(others) {
            let (team, epoch) = (self.team, lane.epoch + 1);
            let name = LaneName { team, channel: self.line, epoch, way: way.0 };
            match self.plane.open_lane(self.hosts[peer as usize], name, lane.taken(), CONNECTING) {
                Err(error) => tracing::debug!(%error, "a way to rank {peer} is of no use"),
                Ok(socket) => {
                    lane.reopen(socket, name).map_err(|error| error.to_string())?;
                    if way != own {
                        self.notice(peer, way, &reason);
                    }
                    return Ok(());
                }
            }
        }
        Err(reason)
    }

    /// Notes that a channel leads to a rank no more, and what goes instead.
    fn notice(&self, peer: u32, way: Channel, reason: &str) {
        let (own, rank) = (self.own, self.names.get(peer as usize).copied().unwrap_or(peer));
        tracing::warn!(%reason, "channel {own} to rank {rank} goes by channel {way} now");
        let mut notices = self.notices.lock();
        let text =
            format!("channel {own} to rank {rank} is lost: {reason}; channel {way} carries it now");
        if notices.len() < NOTICES_MAX && !notices.contains(&text) {
            notices.push(text);
        }
    }

    /// Does the way that a lane takes lead to its rank?
    pub fn leads_to(&self, lane: &ReliableStream) -> bool {
        self.plane.probe(self.hosts[lane.peer as usize], lane.way, CONNECTING)
    }
}
