//! What commands take of a host's device memory.

use base::{BufferId, DeviceId};
use smallvec::SmallVec;

use crate::command::Command;

/// Bytes on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardMemory {
    pub device: DeviceId,
    pub bytes: u64,
}

/// Where a shard of a result lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResultSource {
    /// In memory of its own: which of those that are made.
    Made(u32),
    /// In that of an argument: which, and which of its shards.
    Argument(u32, u32),
}

/// What carrying out a command takes and leaves on one host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Memory that is new and stays.
    pub made: Vec<ShardMemory>,
    /// Each result, by its distance from the first new buffer, and where its shards lie.
    pub results: Vec<(u32, SmallVec<[ResultSource; 2]>)>,
    /// What is needed meanwhile: besides what is made, for one launch; in all, for the run of a
    /// whole program.
    pub scratch: Vec<ShardMemory>,
    /// All that the run of a whole program needs at a time, its arguments among it.
    pub needs: Vec<ShardMemory>,
    /// Arguments whose memory results may reuse; they are gone afterwards.
    pub donated: SmallVec<[u32; 4]>,
    /// Steps of a whole program; zero for anything else.
    pub steps: u32,
}

impl Footprint {
    /// That of results with memory of their own, which follow the first one.
    pub fn making(results: impl Iterator<Item = SmallVec<[ShardMemory; 4]>>) -> Self {
        Self::making_at((0..).zip(results))
    }

    /// The same of results at these distances from the first one.
    pub fn making_at(results: impl Iterator<Item = (u32, SmallVec<[ShardMemory; 4]>)>) -> Self {
        let mut footprint = Self::default();
        for (offset, shards) in results {
            let first = footprint.made.len() as u32;
            let sources = (first..first + shards.len() as u32).map(ResultSource::Made).collect();
            footprint.made.extend(shards);
            footprint.results.push((offset, sources));
        }
        footprint
    }
}

/// Buffers that a command needs on its host's devices.
pub(crate) fn uses(command: &Command) -> SmallVec<[BufferId; 8]> {
    match command {
        Command::Launch { args, .. } | Command::Exchange { args, .. } => args.clone(),
        Command::Run { args, .. } => args.iter().copied().collect(),
        Command::Copy { source, .. }
        | Command::Bitcast { source, .. }
        | Command::Send { source, .. }
        | Command::Read { buffer: source, .. } => [*source].into_iter().collect(),
        Command::Gather { shards, .. } => shards.iter().map(|shard| shard.1).collect(),
        Command::Sparse(part) => part.given.iter().flat_map(|group| group.values.clone()).collect(),
        _ => SmallVec::new(),
    }
}

/// The first buffer that a command makes.
pub(crate) fn first_made(command: &Command) -> Option<BufferId> {
    match command {
        Command::Launch { first_result: first, .. }
        | Command::Exchange { first_result: first, .. }
        | Command::Run { first_buffer: first, .. }
        | Command::Put { buffer: first, .. }
        | Command::Copy { buffer: first, .. }
        | Command::Bitcast { buffer: first, .. }
        | Command::Receive { buffer: first, .. } => Some(*first),
        Command::Sparse(part) => part.made.first().map(|group| group.values[0].0),
        _ => None,
    }
}
