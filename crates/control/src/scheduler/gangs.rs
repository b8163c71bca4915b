//! Gangs whose launches are not dispatched yet.

use std::collections::BTreeSet;

use base::{BufferId, ClientId, ExecutableId, InputId, IslandId, Nanos};
use protocol::Command;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::submissions::{Member, SegmentPosition};

/// Queued gangs by their number; later ones have greater numbers.
pub(super) type Gangs = FxHashMap<u64, Gang>;

/// A launch request in the queue.
#[derive(Debug)]
pub(super) struct Gang {
    pub client: ClientId,
    pub executable: ExecutableId,
    pub position: SegmentPosition,
    pub members: SmallVec<[Member; 2]>,
    pub islands: SmallVec<[IslandId; 2]>,
    pub expected: Nanos,
    /// Inputs that it takes batches from, named once per batch.
    pub inputs: SmallVec<[InputId; 1]>,
    /// Number of members at the front of their queues.
    pub first: usize,
}

impl Gang {
    /// Returns the first buffer that it makes; hosts use the same numbers for their parts of an
    /// array.
    pub fn first_buffer(&self) -> Option<BufferId> {
        self.members.iter().find_map(|member| match &member.command {
            Command::Launch { first_result: first, .. }
            | Command::RunExchange { first_result: first, .. }
            | Command::RunColocated { first_result: first, .. }
            | Command::RunProgram { first_buffer: first, .. } => Some(*first),
            _ => None,
        })
    }

    /// Returns whether it is at the front of the queues of all its hosts.
    pub fn is_in_front(&self) -> bool {
        self.first == self.members.len()
    }
}

/// Returns the remaining gangs of a client's runs that have begun.
pub(super) fn begun(gangs: &Gangs, client: ClientId) -> BTreeSet<u64> {
    let of_client = gangs.iter().filter(|(_, gang)| gang.client == client);
    let mut found: Vec<(u64, SegmentPosition)> =
        of_client.map(|(&id, gang)| (id, gang.position)).collect();
    found.sort_unstable_by_key(|gang| gang.0);
    // The segments of a run are consecutive, and all of them are queued at once.
    let mut has_first_left = true;
    found.retain(|(_, position)| match position {
        SegmentPosition::Whole => false,
        SegmentPosition::First => {
            has_first_left = false;
            false
        }
        SegmentPosition::Middle => has_first_left,
        SegmentPosition::Last => std::mem::replace(&mut has_first_left, true),
    });
    found.into_iter().map(|gang| gang.0).collect()
}
