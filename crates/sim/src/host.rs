//! A modelled host: takes commands in order, as `fairway.host` does, and has one queue of work
//! for its devices.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use base::{BufferId, Bytes, Channel, ClientId, ExecutableId, HostId, Nanos, TransferTag};
use control::{Acknowledge, Command};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Launches that devices may have before them; the same as on real hosts.
pub(crate) const UNFINISHED_LAUNCHES: usize = 16;

/// A launch that its devices have been given.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    /// Its first result, which names its gang.
    pub gang: BufferId,
    pub executable: ExecutableId,
    pub client: ClientId,
    pub results: u32,
    /// Report when it has ended: work since then.
    pub report_since: Option<Nanos>,
}

/// What a host does next: a command, or a step of a program's run.
#[derive(Debug, Clone)]
pub(crate) enum Todo {
    Command(Command),
    /// One step, with what its slots and tags stand for.
    Step {
        program: ExecutableId,
        index: u32,
        run: Arc<RunOf>,
    },
    /// The end of a run's part.
    EndOfRun {
        acknowledge: Acknowledge,
    },
}

/// What the slots and tags of a run stand for.
#[derive(Debug)]
pub(crate) struct RunOf {
    pub args: Arc<[BufferId]>,
    pub first_buffer: BufferId,
    pub first_tag: TransferTag,
    pub client: ClientId,
}

impl RunOf {
    pub fn buffer(&self, slot: BufferId) -> BufferId {
        match self.args.get(slot.0 as usize) {
            Some(&buffer) => buffer,
            None => BufferId(self.first_buffer.0 + slot.0 - self.args.len() as u64),
        }
    }
}

/// One host.
#[derive(Debug, Default)]
pub(crate) struct SimHost {
    pub queue: VecDeque<Todo>,
    /// When its thread is free; whether it will look at its queue then.
    pub free_at: Nanos,
    pub awake: bool,
    pub programs: FxHashMap<ExecutableId, Arc<Vec<Command>>>,
    /// Buffers whose messages have not all come, and how many are missing.
    pub missing: FxHashMap<BufferId, usize>,
    /// The buffers that wait for each message.
    pub waits: FxHashMap<TransferTag, SmallVec<[BufferId; 1]>>,
    /// Messages that came before they were expected, and their sizes.
    pub early: FxHashMap<TransferTag, Bytes>,
    /// What each message becomes when it comes and goes on.
    pub relays: FxHashMap<TransferTag, Vec<Onward>>,
    /// Buffers that devices have not finished, and what is to be done then.
    pub computing: FxHashMap<BufferId, Vec<Then>>,
    /// Work of the devices, the first being next or under way.
    pub devices: VecDeque<Given>,
    pub device_free_at: Nanos,
    /// When each of its channels to other hosts is free.
    pub channels_free_at: BTreeMap<Channel, Nanos>,
    pub last_launch: u64,
    /// When the work of the next report began.
    pub begun: Option<Nanos>,
}

/// A message that waits for its buffer to be computed.
#[derive(Debug, Clone)]
pub(crate) struct Then {
    pub onward: Onward,
    pub size: Bytes,
}

/// Where a message goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Onward {
    pub tag: TransferTag,
    pub to: HostId,
    pub channel: Channel,
}

impl SimHost {
    /// Is this buffer made of messages that have not come?
    pub fn is_missing(&self, buffer: BufferId) -> bool {
        self.missing.contains_key(&buffer)
    }

    /// A message is there; returns where it goes on to.
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

    /// Each of these buffers will be made of these messages.
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
