//! Messages that were delivered: one that is sent again is not delivered again.

use std::collections::{HashSet, VecDeque};

use base::TransferTag;

/// Number of messages that are remembered.
const RECENT_MAX: usize = 1 << 16;

/// The messages from other machines that were delivered last: one that comes again is not delivered
/// again.
#[derive(Debug, Default)]
pub(crate) struct RecentTags {
    tags: HashSet<TransferTag>,
    order: VecDeque<TransferTag>,
}

impl RecentTags {
    /// Adds a message; returns whether it is new.
    pub fn insert(&mut self, tag: TransferTag) -> bool {
        if !self.tags.insert(tag) {
            return false;
        }
        self.order.push_back(tag);
        if self.order.len() > RECENT_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.tags.remove(&oldest);
        }
        true
    }

    /// Whether a message has been delivered.
    pub fn contains(&self, tag: TransferTag) -> bool {
        self.tags.contains(&tag)
    }
}
