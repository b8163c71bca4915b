//! Footprints: the device memory that commands need on a host.

use base::{BufferId, DeviceId};
use protocol::Command;
use smallvec::SmallVec;

/// Bytes on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardMemory {
    pub device: DeviceId,
    pub bytes: u64,
}

/// The memory of a shard of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResultSource {
    /// Newly allocated: index into `made`.
    Made(u32),
    /// Shared with an argument: index of the argument, and of its shard.
    Argument(u32, u32),
}

/// Memory that a command needs and leaves allocated on one host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Memory that is newly allocated and stays.
    pub made: Vec<ShardMemory>,
    /// Each result, as an offset from the first new buffer, and the memory of its shards.
    pub results: Vec<(u32, SmallVec<[ResultSource; 2]>)>,
    /// Memory needed temporarily: for a launch, besides `made`; for the run of a whole program, in
    /// total besides its arguments.
    pub scratch: Vec<ShardMemory>,
    /// Peak memory of the run of a whole program, arguments included.
    pub needs: Vec<ShardMemory>,
    /// Arguments whose memory results may reuse; they are deleted afterwards.
    pub donated: SmallVec<[u32; 4]>,
    /// Number of steps of a whole program; zero for any other command.
    pub steps: u32,
}

impl Footprint {
    /// Footprint of consecutive results with memory of their own.
    pub fn making(results: impl Iterator<Item = SmallVec<[ShardMemory; 4]>>) -> Self {
        Self::making_at((0..).zip(results))
    }

    /// Footprint of results at these offsets from the first, with memory of their own.
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

/// Returns the buffers that a command needs on its host's devices.
pub(crate) fn uses(command: &Command) -> SmallVec<[BufferId; 8]> {
    match command {
        Command::Launch { args, .. }
        | Command::RunExchange { args, .. }
        | Command::RunColocated { args, .. } => args.clone(),
        Command::RunProgram { args, .. } => args.iter().copied().collect(),
        Command::Copy { source, .. }
        | Command::Bitcast { source, .. }
        | Command::Send { source, .. }
        | Command::Read { buffer: source, .. } => [*source].into_iter().collect(),
        Command::AssembleShards { shards, .. } => shards.iter().map(|shard| shard.source).collect(),
        Command::Collective { given, .. } | Command::RowExchange { given, .. } => {
            given.iter().flat_map(|group| group.buffers.iter().copied()).collect()
        }
        _ => SmallVec::new(),
    }
}

/// Returns the first buffer that a command makes.
pub(crate) fn first_made(command: &Command) -> Option<BufferId> {
    match command {
        Command::Launch { first_result: first, .. }
        | Command::RunExchange { first_result: first, .. }
        | Command::RunColocated { first_result: first, .. }
        | Command::RunProgram { first_buffer: first, .. }
        | Command::Put { buffer: first, .. }
        | Command::Copy { buffer: first, .. }
        | Command::Bitcast { buffer: first, .. }
        | Command::Receive { buffer: first, .. } => Some(*first),
        Command::Collective { made, .. } | Command::RowExchange { made, .. } => {
            made.first().map(|group| group.values[0].buffer)
        }
        _ => None,
    }
}
