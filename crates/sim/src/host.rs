//! A modelled host: executes commands in order, as `fairway.host` does, and has one launch queue for
//! all of its devices.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use base::{BufferId, Bytes, Channel, ClientId, ExecutableId, HostId, Nanos, TransferTag};
use protocol::{Acknowledge, Command};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::binding::RunOf;

/// Maximum launches in flight per host, for back-pressure; the same as on real hosts.
pub(crate) const UNFINISHED_LAUNCHES: usize = 16;

/// A launch in the device queue.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    /// Its first result buffer, which identifies its gang.
    pub gang: BufferId,
    pub executable: ExecutableId,
    pub client: ClientId,
    pub results: u32,
    /// If set, report completion, with the busy time since then.
    pub report_since: Option<Nanos>,
}

/// An entry of a host's queue: a command, or a step of a program run.
#[derive(Debug, Clone)]
pub(crate) enum Todo {
    Command(Command),
    /// One step, with the run that binds its slots and tags.
    Step {
        program: ExecutableId,
        index: u32,
        run: Arc<RunOf>,
    },
    /// The end of this host's part of a run.
    EndOfRun {
        acknowledge: Acknowledge,
    },
}

/// The state of one host.
#[derive(Debug, Default)]
pub(crate) struct SimHost {
    pub queue: VecDeque<Todo>,
    /// When its thread is free, and whether a turn at its queue is scheduled.
    pub free_at: Nanos,
    pub awake: bool,
    pub programs: FxHashMap<ExecutableId, Arc<Vec<Command>>>,
    /// Buffers with messages outstanding, and the number outstanding.
    pub missing: FxHashMap<BufferId, usize>,
    /// Buffers that wait for each message.
    pub waits: FxHashMap<TransferTag, SmallVec<[BufferId; 1]>>,
    /// Messages that arrived before they were expected, and their sizes.
    pub early: FxHashMap<TransferTag, Bytes>,
    /// Next hops of each message to relay on arrival.
    pub relays: FxHashMap<TransferTag, Vec<Onward>>,
    /// Buffers not yet computed, and the messages to send once they are.
    pub computing: FxHashMap<BufferId, Vec<Then>>,
    /// Device launch queue; the first launch is next or running.
    pub devices: VecDeque<Given>,
    pub device_free_at: Nanos,
    /// When each channel to other hosts is free.
    pub channels_free_at: BTreeMap<Channel, Nanos>,
    pub last_launch: u64,
    /// Start of the work that the next report covers.
    pub begun: Option<Nanos>,
}

/// A message to send once its source buffer is computed.
#[derive(Debug, Clone)]
pub(crate) struct Then {
    pub onward: Onward,
    pub size: Bytes,
}

/// The next hop of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Onward {
    pub tag: TransferTag,
    pub to: HostId,
    pub channel: Channel,
}

impl SimHost {
    /// Returns whether messages of this buffer are outstanding.
    pub fn is_missing(&self, buffer: BufferId) -> bool {
        self.missing.contains_key(&buffer)
    }

    /// Records the arrival of a message; returns the hops to relay it to.
    pub fn arrive(&mut self, tag: TransferTag, size: Bytes) -> Vec<Onward> {
        let onward = self.relays.remove(&tag).unwrap_or_default();
        let Some(buffers) = self.waits.remove(&tag) else {
            if onward.is_empty() {
                self.early.insert(tag, size);
            }
            return onward;
        };
        for buffer in buffers {
            let left = self.missing.get_mut(&buffer).expect("a message is waited for by a buffer");
            *left -= 1;
            if *left == 0 {
                self.missing.remove(&buffer);
            }
        }
        onward
    }

    /// Registers the messages from which each of these buffers is assembled.
    pub fn expect(&mut self, buffers: &[BufferId], tags: impl Iterator<Item = TransferTag>) {
        let mut left = 0;
        for tag in tags {
            if self.early.remove(&tag).is_none() {
                self.waits.insert(tag, buffers.into());
                left += 1;
            }
        }
        if left > 0 {
            self.missing.extend(buffers.iter().map(|&buffer| (buffer, left)));
        }
    }
}
