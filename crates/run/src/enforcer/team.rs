//! A team: its ranks, and the channels by which they reach each other.

use std::time::Duration;

use base::{BitsPerSecond, Channel, HostId, TransferTag};

use super::EnforcerError;
use crate::channel::DataPlane;

/// Name of the transport on which ranks agree on plans.
pub(super) const AGREEMENT: u32 = 0xffff;
/// Target queueing delay: a channel of known rate may queue as many bytes on a host as it sends in this
/// time. A longer queue would let one transfer delay others at a link that they share.
const QUEUE: Duration = Duration::from_micros(2500);
const QUEUE_BYTES: std::ops::RangeInclusive<usize> = 64 << 10..=4 << 20;

/// One channel that every rank has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TeamChannel {
    /// Its number on the data plane.
    pub channel: Channel,
    /// Its bandwidth, if known.
    pub rate: Option<BitsPerSecond>,
}

impl TeamChannel {
    /// Returns the maximum number of bytes that may be queued on a host to be sent by it.
    pub(super) fn queue(&self) -> usize {
        let bytes = self.rate.map(|rate| (rate.0 / 8.0 * QUEUE.as_secs_f64()) as usize);
        bytes.unwrap_or(usize::MAX).clamp(*QUEUE_BYTES.start(), *QUEUE_BYTES.end())
    }
}

/// Ranks that communicate, as seen by one of them.
#[derive(Debug)]
pub struct Team<'a> {
    /// This host's endpoint of the data plane, on which the peers are registered.
    pub plane: &'a DataPlane,
    /// Tag that distinguishes the team from other teams of the same hosts.
    pub name: TransferTag,
    /// This rank.
    pub rank: u32,
    /// The host of each rank.
    pub hosts: &'a [HostId],
    /// Display name of each rank, if that is not its number: a team of a subset of a program's ranks
    /// uses the program's numbers.
    pub names: Option<&'a [u32]>,
    /// The channels by which they communicate.
    pub channels: &'a [TeamChannel],
    /// Timeout: how long a rank may keep others waiting.
    pub timeout: Duration,
    /// Timeout for all ranks to join.
    pub meeting: Duration,
}

impl Team<'_> {
    /// Returns the names and channels of the transports: one for each channel, and one on which ranks
    /// agree on plans.
    pub(super) fn names(&self) -> Vec<(u32, TeamChannel)> {
        let transports = self.channels.iter().map(|&channel| (channel.channel.0, channel));
        let agreement = self.channels.first().map(|&channel| (AGREEMENT, channel));
        transports.chain(agreement).collect()
    }

    /// Builds the error for a rank that cannot be joined, no matter how long this rank waits.
    pub(super) fn absent(&self, rank: u32, reason: &str) -> EnforcerError {
        self.unmet(rank, None, reason)
    }

    /// Builds the error for a rank that has not joined before the timeout.
    pub(super) fn late(&self, rank: u32, reason: &str) -> EnforcerError {
        self.unmet(rank, Some(self.meeting.as_secs_f64()), reason)
    }

    fn unmet(&self, rank: u32, seconds: Option<f64>, reason: &str) -> EnforcerError {
        let error = EnforcerError::Join { rank, seconds, reason: reason.to_owned() };
        error.called(self.names.unwrap_or_default())
    }

    /// Builds the error for a failure of this rank to join.
    pub(super) fn no(&self, error: &impl ToString) -> EnforcerError {
        self.absent(self.rank, &error.to_string())
    }
}
