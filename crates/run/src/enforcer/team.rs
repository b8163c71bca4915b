//! Who is in a team, and by which ways ranks reach each other.

use std::time::Duration;

use base::{BitsPerSecond, Channel, HostId, TransferTag};

use super::EnforcerError;
use crate::channel::DataPlane;

/// What the line is called on which ranks agree on plans.
pub(super) const AGREEMENT: u32 = 0xffff;
/// How much may wait to leave a host by a channel of known rate: as much as leaves in this time. More
/// would let one transfer keep others waiting in front of a link that they share.
const QUEUE: Duration = Duration::from_micros(2500);
const QUEUE_BYTES: std::ops::RangeInclusive<usize> = 64 << 10..=4 << 20;

/// One channel that every rank has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TeamChannel {
    /// Which of the data plane's.
    pub channel: Channel,
    /// What it carries, if somebody knows.
    pub rate: Option<BitsPerSecond>,
}

impl TeamChannel {
    /// How many bytes may wait to leave a host by it.
    pub(super) fn queue(&self) -> usize {
        let bytes = self.rate.map(|rate| (rate.0 / 8.0 * QUEUE.as_secs_f64()) as usize);
        bytes.unwrap_or(usize::MAX).clamp(*QUEUE_BYTES.start(), *QUEUE_BYTES.end())
    }
}

/// Ranks that communicate, as one of them sees it.
#[derive(Debug)]
pub struct Team<'a> {
    /// This host's end of the data plane, on which its peers are known.
    pub plane: &'a DataPlane,
    /// What tells the team from others of the same hosts.
    pub name: TransferTag,
    /// Which rank this is.
    pub rank: u32,
    /// The host of each rank.
    pub hosts: &'a [HostId],
    /// What people call each rank, if that is not its number: teams of some of the ranks of a program
    /// are named by theirs.
    pub names: Option<&'a [u32]>,
    /// By what they communicate.
    pub ways: &'a [TeamChannel],
    /// How long a rank may keep others waiting.
    pub timeout: Duration,
    /// How long to wait until all have joined.
    pub meeting: Duration,
}

impl Team<'_> {
    /// What lines are called, and the ways that they take: one for each way, and one on which ranks
    /// agree on plans.
    pub(super) fn names(&self) -> Vec<(u32, TeamChannel)> {
        let of_ways = self.ways.iter().map(|&way| (way.channel.0, way));
        let agreement = self.ways.first().map(|&way| (AGREEMENT, way));
        of_ways.chain(agreement).collect()
    }

    /// A rank cannot be joined, however long this one waits.
    pub(super) fn absent(&self, rank: u32, reason: &str) -> EnforcerError {
        self.unmet(rank, None, reason)
    }

    /// A rank has not come in time.
    pub(super) fn late(&self, rank: u32, reason: &str) -> EnforcerError {
        self.unmet(rank, Some(self.meeting.as_secs_f64()), reason)
    }

    fn unmet(&self, rank: u32, seconds: Option<f64>, reason: &str) -> EnforcerError {
        let error = EnforcerError::Join { rank, seconds, reason: reason.to_owned() };
        error.called(self.names.unwrap_or_default())
    }

    /// This rank itself cannot join.
    pub(super) fn no(&self, error: &impl ToString) -> EnforcerError {
        self.absent(self.rank, &error.to_string())
    }
}
