//! Another way for failures of messages to peers that are not reached.

use std::fmt;
use std::sync::OnceLock;

use base::{HostId, Status, TransferTag};

/// What takes the failure of a message to a peer.
pub type TakeFailure = dyn Fn(HostId, TransferTag, &Status) + Send + Sync;

/// What takes failures, once it is set.
#[derive(Default)]
pub(crate) struct Detour(OnceLock<Box<TakeFailure>>);

impl Detour {
    pub fn set(&self, take: Box<TakeFailure>) {
        drop(self.0.set(take));
    }

    pub fn get(&self) -> Option<&TakeFailure> {
        self.0.get().map(Box::as_ref)
    }
}

impl fmt::Debug for Detour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Detour").field(&self.get().is_some()).finish()
    }
}
