//! Memory quotas of clients, accounted in the order of their requests, not of dispatch.

use std::sync::{Arc, Mutex, PoisonError};

use base::DeviceId;
use rustc_hash::FxHashMap;

use super::footprint::ShardMemory;

/// Bytes that one client holds on each device.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    held: Mutex<FxHashMap<DeviceId, u64>>,
}

impl Quota {
    /// Returns the bytes held on a device.
    pub fn held(&self, device: DeviceId) -> u64 {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.get(&device).copied().unwrap_or_default()
    }

    /// Charges memory to the quota until the charge is dropped.
    pub fn charge(self: &Arc<Self>, shards: Vec<(u32, ShardMemory)>) -> Charge {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, shard) in &shards {
            *held.entry(shard.device).or_default() += shard.bytes;
        }
        Charge { quota: self.clone(), shards }
    }

    fn give_back(&self, shards: &[(u32, ShardMemory)]) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, shard) in shards {
            if let Some(bytes) = held.get_mut(&shard.device) {
                *bytes -= shard.bytes;
            }
        }
    }
}

/// Memory charged to a client's quota.
#[derive(Debug)]
pub(crate) struct Charge {
    quota: Arc<Quota>,
    /// Each shard with its position in its array.
    pub shards: Vec<(u32, ShardMemory)>,
}

impl Charge {
    /// Keeps the charge of only those shards whose position satisfies `is_kept`.
    pub fn keep(&mut self, is_kept: impl Fn(u32) -> bool) {
        let (kept, gone) = self.shards.drain(..).partition(|(position, _)| is_kept(*position));
        self.shards = kept;
        self.quota.give_back(&gone);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quota.give_back(&self.shards);
    }
}
