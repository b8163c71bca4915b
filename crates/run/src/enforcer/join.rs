//! Rendezvous: how the ranks of a team connect to each other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::EnforcerError;
use super::arena::SharedArena;
use super::reconnect::Reconnector;
use super::stream::ReliableStream;
use super::team::{AGREEMENT, Team, TeamChannel};
use crate::channel::{LaneName, Opened, Socket};

/// Interval between attempts to reach a rank that does not listen yet.
const AGAIN: Duration = Duration::from_millis(20);
/// Interval between checks for lost ranks while waiting for them.
const LOOK: Duration = Duration::from_millis(200);
const LOST: &str = "it is lost";
/// Flow-control window: how far one rank may be ahead of another, in bytes.
const WINDOW: usize = 1 << 20;

impl Team<'_> {
    /// Opens, for each transport, the lanes to all other ranks. Lower ranks connect to higher ones.
    pub(super) fn lines(&self) -> Result<Vec<Vec<Option<ReliableStream>>>, EnforcerError> {
        let ranks = self.hosts.len();
        if self.rank as usize >= ranks {
            return Err(EnforcerError::Rank { rank: self.rank, ranks });
        }
        if self.channels.is_empty() {
            return Err(EnforcerError::Channels { found: 1, channels: 0 });
        }
        let deadline = Instant::now() + self.meeting;
        let none = || (0..ranks).map(|_| None).collect::<Vec<Option<ReliableStream>>>();
        let names = self.names();
        let mut lines: Vec<_> = names.iter().map(|_| none()).collect();
        for (line, &(name, via)) in lines.iter_mut().zip(&names) {
            for (rank, lane) in (0..).zip(line).skip(self.rank as usize + 1) {
                if name != AGREEMENT || self.rank == 0 {
                    let socket = self.open(rank, (name, via), deadline)?;
                    *lane = Some(self.lane(socket, rank, via)?);
                }
            }
        }
        let mut missing = self.rank as usize * self.channels.len() + usize::from(self.rank > 0);
        while missing > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(opened) = self.plane.lanes().take(self.name, left.min(LOOK)) else {
                self.check_files()?;
                let mut absent = (0..self.rank).filter(|&rank| {
                    lines
                        .iter()
                        .any(|line: &Vec<Option<ReliableStream>>| line[rank as usize].is_none())
                });
                // Where any rank is lost, those that found out earlier have left, and never connect.
                let lost = (0..ranks as u32).find(|&rank| self.has_lost(rank));
                if let Some(lost) = lost.or_else(|| absent.clone().find(|&rank| self.is_lost(rank)))
                {
                    return Err(self.absent(lost, LOST));
                }
                if left.is_zero() {
                    return Err(self.late(absent.next().unwrap_or(0), "it does not connect"));
                }
                continue;
            };
            let channel = names.iter().position(|(name, _)| *name == opened.lane.channel);
            let lower = &self.hosts[..self.rank as usize];
            let rank = lower.iter().position(|&host| host == opened.from);
            let (Some(channel), Some(rank)) = (channel, rank) else {
                tracing::warn!(host = %opened.from, "a host that is not awaited wants to join");
                continue;
            };
            if opened.lane.channel == AGREEMENT && rank > 0 {
                continue; // only the first rank agrees with all
            }
            let lane = self.lane(opened.socket, rank as u32, names[channel].1)?;
            if lines[channel][rank].replace(lane).is_none() {
                missing -= 1;
            }
        }
        Ok(lines)
    }

    /// Whether a rank's host is lost, or refuses connections.
    fn is_lost(&self, rank: u32) -> bool {
        self.has_lost(rank) || self.plane.is_gone(self.hosts[rank as usize])
    }

    /// Whether the process that was this rank's host when the team was named was reported lost.
    fn has_lost(&self, rank: u32) -> bool {
        self.plane.has_lost(self.hosts[rank as usize], self.name)
    }

    /// Fails if this rank can open no more file descriptors. Such a rank can neither connect nor
    /// accept, and would take all others for lost.
    fn check_files(&self) -> Result<(), EnforcerError> {
        let opened = eventfd(0, EventfdFlags::CLOEXEC);
        opened.map(drop).map_err(|error| self.no(&std::io::Error::from(error)))
    }

    /// Maps the memory that all ranks share, if they are local on some channel; also returns which
    /// channels are local.
    pub(super) fn ground(
        &self,
        lines: &mut [Vec<Option<ReliableStream>>],
    ) -> Result<(Option<Arc<SharedArena>>, Vec<bool>), EnforcerError> {
        let is_near = |via: &TeamChannel| self.plane.is_local(self.hosts, via.channel);
        let near: Vec<bool> = self.channels.iter().map(is_near).collect();
        let Some(first) = near.iter().position(|&near| near) else { return Ok((None, near)) };
        let ground = SharedArena::meet(self, &mut lines[first], Instant::now() + self.meeting)?;
        Ok((Some(ground), near))
    }

    fn open(
        &self,
        rank: u32,
        (channel, via): (u32, TeamChannel),
        deadline: Instant,
    ) -> Result<Socket, EnforcerError> {
        let lane = LaneName { team: self.name, channel, epoch: 0, via: via.channel.0 };
        let host = self.hosts[rank as usize];
        let attempt = || -> Result<Socket, String> {
            let opened = self.plane.open_lane(host, lane, 0, self.meeting);
            let mut socket = opened.map_err(|error| error.to_string())?;
            let mut accepts = || lane.await_acceptance(&mut socket, LOOK);
            while !accepts().map_err(|error| format!("it refuses the connection: {error}"))? {
                if self.is_lost(rank) || Instant::now() >= deadline {
                    return Err("it does not accept the connection".to_owned());
                }
            }
            Ok(socket)
        };
        loop {
            let failure = match attempt() {
                Ok(socket) => return Ok(socket),
                Err(failure) => failure,
            };
            self.check_files()?;
            if self.is_lost(rank) {
                return Err(self.absent(rank, LOST));
            }
            if Instant::now() >= deadline {
                return Err(self.late(rank, &failure));
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Builds the reconnector of a transport.
    pub(super) fn mender(
        &self,
        (line, via): (u32, TeamChannel),
        offers: Arc<Mutex<Vec<Opened>>>,
        notices: Arc<Mutex<Vec<String>>>,
    ) -> Reconnector {
        Reconnector {
            plane: self.plane.clone(),
            team: self.name,
            rank: self.rank,
            hosts: self.hosts.to_vec(),
            channels: self.channels.to_vec(),
            line,
            own: via.channel,
            offers,
            names: self.names.unwrap_or_default().to_vec(),
            notices,
        }
    }

    fn lane(
        &self,
        socket: Socket,
        rank: u32,
        via: TeamChannel,
    ) -> Result<ReliableStream, EnforcerError> {
        if via.rate.is_some() {
            socket.set_send_buffer(via.queue()).map_err(|error| self.no(&error))?;
        }
        ReliableStream::new(socket, rank, via.channel, WINDOW).map_err(|error| self.no(&error))
    }
}
