//! Messages that have arrived, are expected, or will never come.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use base::{Code, HostId, Status, TransferTag};
use parking_lot::{Condvar, Mutex};

use super::memory::Payload;

#[derive(Debug)]
enum Slot {
    Expected(HostId),
    Arrived(Payload),
    Failed(Status),
    /// Nobody wants it any more; vanishes on arrival.
    Unwanted,
}

/// What a message has become.
pub(crate) type Outcome = Result<Payload, Status>;

/// All messages that concern this process.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    slots: Mutex<HashMap<TransferTag, Slot>>,
    changed: Condvar,
}

impl Inbox {
    /// Notes that `tag` will come from `from`, so that the loss of `from` fails it.
    pub fn expect(&self, tag: TransferTag, from: HostId) {
        self.slots.lock().entry(tag).or_insert(Slot::Expected(from));
    }

    /// A message is there, or will never be.
    pub fn deliver(&self, tag: TransferTag, outcome: Outcome) {
        let mut slots = self.slots.lock();
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
            }
        }
    }

    /// Waits for a message and takes it.
    pub fn take(&self, tag: TransferTag, timeout: Duration) -> Outcome {
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

    /// What a message has become, if it is there or known never to come; it stays.
    pub fn look(&self, tag: TransferTag) -> Option<Outcome> {
        match self.slots.lock().get(&tag) {
            Some(Slot::Arrived(payload)) => Some(Ok(payload.clone())),
            Some(Slot::Failed(error)) => Some(Err(error.clone())),
            Some(Slot::Expected(_) | Slot::Unwanted) | None => None,
        }
    }

    /// Nobody will take this message.
    pub fn discard(&self, tag: TransferTag) {
        let mut slots = self.slots.lock();
        match slots.remove(&tag) {
            Some(Slot::Arrived(_) | Slot::Failed(_)) => {}
            Some(Slot::Expected(_) | Slot::Unwanted) | None => {
                slots.insert(tag, Slot::Unwanted);
            }
        }
    }

    /// Whatever is still expected from `host` will never come.
    pub fn lose(&self, host: HostId, error: &Status) {
        let mut slots = self.slots.lock();
        for slot in slots.values_mut() {
            if matches!(slot, Slot::Expected(from) if *from == host) {
                *slot = Slot::Failed(error.clone());
            }
        }
        self.changed.notify_all();
    }

    /// Messages that have arrived and were not taken.
    pub fn waiting(&self) -> usize {
        let slots = self.slots.lock();
        slots.values().filter(|slot| matches!(slot, Slot::Arrived(_))).count()
    }
}
