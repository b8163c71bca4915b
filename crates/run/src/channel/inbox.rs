//! The inbox: messages that have arrived, are expected, or have failed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::{Code, HostId, Status, TransferTag};
use parking_lot::{Condvar, Mutex};

use super::memory::Payload;

#[derive(Debug)]
enum Slot {
    Expected(HostId),
    Arrived(Payload),
    Failed(Status),
    /// Discarded: dropped on arrival.
    Unwanted,
}

/// The outcome of a message.
pub(crate) type ReceiveResult = Result<Payload, Status>;

/// All messages to this process.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    slots: Mutex<HashMap<TransferTag, Slot>>,
    /// Messages with smaller tags are dropped; changed under the lock of `slots`.
    first_tag: AtomicU64,
    changed: Condvar,
    watches: Mutex<Watches>,
    /// Signalled when a watch has ended.
    ended: Condvar,
}

/// Watched groups of messages. Lock order: after `slots`.
#[derive(Debug, Default)]
struct Watches {
    by_tag: HashMap<TransferTag, Vec<u64>>,
    /// Number of messages that have not settled, by group.
    left: HashMap<u64, usize>,
    ended: Vec<u64>,
    closed: bool,
}

impl Inbox {
    /// Registers that `tag` will come from `from`, so that the loss of `from` fails it.
    pub fn expect(&self, tag: TransferTag, from: HostId) {
        self.slots.lock().entry(tag).or_insert(Slot::Expected(from));
    }

    /// Delivers a message or its failure.
    pub fn deliver(&self, tag: TransferTag, outcome: ReceiveResult) {
        let mut slots = self.slots.lock();
        if tag.0 < self.first_tag.load(Ordering::Relaxed) {
            return;
        }
        match slots.get(&tag) {
            Some(Slot::Unwanted) => {
                slots.remove(&tag);
            }
            Some(Slot::Arrived(_) | Slot::Failed(_)) => {}
            Some(Slot::Expected(_)) | None => {
                let slot = match outcome {
                    Ok(payload) => Slot::Arrived(payload),
                    Err(error) => Slot::Failed(error),
                };
                slots.insert(tag, slot);
                self.changed.notify_all();
                self.settle(tag);
            }
        }
    }

    /// Watches a group of messages: [`Inbox::ended`] returns `name` once all of them have arrived or
    /// failed.
    pub fn watch(&self, name: u64, tags: &[TransferTag]) {
        let slots = self.slots.lock();
        let mut watches = self.watches.lock();
        let mut left = 0;
        for tag in tags {
            if !matches!(slots.get(tag), Some(Slot::Arrived(_) | Slot::Failed(_))) {
                watches.by_tag.entry(*tag).or_default().push(name);
                left += 1;
            }
        }
        if left > 0 {
            watches.left.insert(name, left);
        } else {
            watches.ended.push(name);
            self.ended.notify_all();
        }
    }

    /// Waits for watches to end and returns their names; empty once the data plane is closed.
    pub fn ended(&self) -> Vec<u64> {
        let mut watches = self.watches.lock();
        while watches.ended.is_empty() && !watches.closed {
            self.ended.wait(&mut watches);
        }
        std::mem::take(&mut watches.ended)
    }

    /// Ends all waits for watches.
    pub fn close(&self) {
        self.watches.lock().closed = true;
        self.ended.notify_all();
    }

    /// Updates the watches of a message that has settled.
    fn settle(&self, tag: TransferTag) {
        let mut watches = self.watches.lock();
        for name in watches.by_tag.remove(&tag).unwrap_or_default() {
            let Some(left) = watches.left.get_mut(&name) else { continue };
            *left -= 1;
            if *left == 0 {
                watches.left.remove(&name);
                watches.ended.push(name);
                self.ended.notify_all();
            }
        }
    }

    /// Waits for a message and takes it.
    pub fn take(&self, tag: TransferTag, timeout: Duration) -> ReceiveResult {
        let deadline = Instant::now() + timeout;
        let mut slots = self.slots.lock();
        loop {
            match slots.remove(&tag) {
                Some(Slot::Arrived(payload)) => return Ok(payload),
                Some(Slot::Failed(error)) => return Err(error),
                Some(waiting) => {
                    slots.insert(tag, waiting);
                }
                None => {}
            }
            if self.changed.wait_until(&mut slots, deadline).timed_out() {
                return Err(Status::new(
                    Code::DeadlineExceeded,
                    format!("message {tag} did not arrive within {timeout:?}"),
                ));
            }
        }
    }

    /// Returns the outcome of a message, if it has settled, without taking it.
    pub fn look(&self, tag: TransferTag) -> Option<ReceiveResult> {
        match self.slots.lock().get(&tag) {
            Some(Slot::Arrived(payload)) => Some(Ok(payload.clone())),
            Some(Slot::Failed(error)) => Some(Err(error.clone())),
            Some(Slot::Expected(_) | Slot::Unwanted) | None => None,
        }
    }

    /// Discards a message, now or when it arrives.
    pub fn discard(&self, tag: TransferTag) {
        let mut slots = self.slots.lock();
        self.settle(tag);
        match slots.remove(&tag) {
            Some(Slot::Arrived(_) | Slot::Failed(_)) => {}
            Some(Slot::Expected(_) | Slot::Unwanted) | None => {
                slots.insert(tag, Slot::Unwanted);
            }
        }
    }

    /// Drops messages with smaller tags, those that have arrived and all to come.
    pub fn drop_before(&self, tag: TransferTag) {
        let mut slots = self.slots.lock();
        self.first_tag.store(tag.0, Ordering::Relaxed);
        slots.retain(|&known, _| known >= tag);
    }

    /// Fails all messages that are still expected from `host`.
    pub fn lose(&self, host: HostId, error: &Status) {
        let mut slots = self.slots.lock();
        for (tag, slot) in slots.iter_mut() {
            if matches!(slot, Slot::Expected(from) if *from == host) {
                *slot = Slot::Failed(error.clone());
                self.settle(*tag);
            }
        }
        self.changed.notify_all();
    }

    /// Returns the number of messages that have arrived and were not taken.
    pub fn waiting(&self) -> usize {
        let slots = self.slots.lock();
        slots.values().filter(|slot| matches!(slot, Slot::Arrived(_))).count()
    }
}
