//! Transfers between hosts, whose receives are dispatched after all their sends.

use rustc_hash::FxHashMap;

use crate::submissions::TransferRole;

/// Transfers with sends that are not dispatched yet.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    /// Sends of each transfer that are not dispatched yet, and their total number.
    pub unsent: FxHashMap<u64, (u32, u32)>,
}

impl Transfers {
    /// Announces a transfer of `sends` send commands.
    pub fn announce(&mut self, transfer: u64, sends: u32) {
        if sends > 0 {
            self.unsent.insert(transfer, (sends, sends));
        }
    }

    /// Returns whether a command must wait for sends.
    pub fn must_wait(&self, link: TransferRole) -> bool {
        matches!(link, TransferRole::Receives(transfer) if self.unsent.contains_key(&transfer))
    }

    /// Notes that a command was dispatched; returns its transfer if it was the last send of it.
    pub fn on_dispatched(&mut self, link: TransferRole) -> Option<u64> {
        let TransferRole::Sends(transfer) = link else { return None };
        let (unsent, _) = self.unsent.get_mut(&transfer)?;
        *unsent -= 1;
        if *unsent > 0 {
            return None;
        }
        self.unsent.remove(&transfer);
        Some(transfer)
    }

    /// Returns whether another command of a transfer has been dispatched.
    pub fn has_begun(&self, link: TransferRole) -> bool {
        match link {
            TransferRole::None => false,
            TransferRole::Sends(transfer) | TransferRole::Receives(transfer) => {
                self.unsent.get(&transfer).is_none_or(|(left, all)| left < all)
            }
        }
    }

    /// Forgets transfers, none of whose sends will be dispatched.
    pub fn forget(&mut self, transfers: &[u64]) {
        self.unsent.retain(|transfer, _| !transfers.contains(transfer));
    }
}
