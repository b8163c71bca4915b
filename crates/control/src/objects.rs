//! The object directory: every logical buffer, who owns it, and whether it is still there.
//!
//! One entry stands for one logical buffer whatever its shard count. Arrays that share device
//! buffers (an array and the single-device arrays it was taken apart into) share a [`Storage`],
//! so that deleting one is seen through all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::{BufferId, Bytes, HostId, Status};
use ir::ArraySpec;

use crate::memory::Charge;

/// Device memory that one or several buffers name.
#[derive(Debug)]
pub(crate) struct Storage {
    deleted: AtomicBool,
    pub bytes: Bytes,
    /// Devices that hold a shard of it.
    pub shards: u64,
    /// What it counts for, until it is deleted or nobody names it.
    charge: Mutex<Option<Charge>>,
}

impl Storage {
    /// Memory for one buffer.
    pub fn of(spec: &ArraySpec, charge: Option<Charge>) -> Arc<[Arc<Self>]> {
        let shards = spec.sharding.devices.len() as u64;
        let (deleted, charge) = (AtomicBool::new(false), Mutex::new(charge));
        Arc::new([Arc::new(Self { deleted, bytes: spec.device_bytes(), shards, charge })])
    }

    /// Runs `look` on what it counts for.
    pub fn charged(&self, look: impl FnOnce(&Charge)) {
        if let Some(charge) = &*self.charge.lock().unwrap_or_else(PoisonError::into_inner) {
            look(charge);
        }
    }

    /// Counts for something else from now on, if it still counts.
    pub fn recharge(&self, charge: Option<Charge>) {
        let mut counted = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.is_some() {
            *counted = charge;
        }
    }

    fn mark_deleted(&self) {
        self.deleted.store(true, Ordering::Relaxed);
        *self.charge.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// One logical buffer.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    pub id: BufferId,
    pub spec: Arc<ArraySpec>,
    /// Hosts that hold shards.
    pub hosts: Arc<[HostId]>,
    /// What it shares; one entry unless it was assembled from several.
    pub storage: Arc<[Arc<Storage>]>,
    /// Set when it can only ever give this error.
    pub error: Option<Arc<Status>>,
}

impl Buffer {
    /// A buffer with memory of its own.
    pub fn new(
        id: BufferId,
        spec: Arc<ArraySpec>,
        hosts: Arc<[HostId]>,
        charge: Option<Charge>,
    ) -> Self {
        let storage = Storage::of(&spec, charge);
        Self { id, spec, hosts, storage, error: None }
    }

    /// A buffer without device memory that gives `error` on use.
    pub fn poisoned(id: BufferId, spec: Arc<ArraySpec>, error: Arc<Status>) -> Self {
        Self { id, spec, hosts: Arc::new([]), storage: Arc::new([]), error: Some(error) }
    }

    /// A buffer that shares the device memory of `parts`.
    pub fn sharing(
        id: BufferId,
        spec: Arc<ArraySpec>,
        hosts: Arc<[HostId]>,
        parts: &[&Buffer],
    ) -> Self {
        let mut storage: Vec<Arc<Storage>> = Vec::new();
        for part in parts {
            for shared in part.storage.iter() {
                if !storage.iter().any(|known| Arc::ptr_eq(known, shared)) {
                    storage.push(shared.clone());
                }
            }
        }
        Self { id, spec, hosts, storage: storage.into(), error: None }
    }

    pub fn is_deleted(&self) -> bool {
        self.storage.iter().any(|storage| storage.deleted.load(Ordering::Relaxed))
    }

    pub fn mark_deleted(&self) {
        self.storage.iter().for_each(|storage| storage.mark_deleted());
    }

    /// Bytes of device memory that go when this buffer goes.
    pub fn bytes_held(&self) -> Bytes {
        if self.is_deleted() || self.storage.len() != 1 || Arc::strong_count(&self.storage[0]) > 1 {
            return Bytes(0);
        }
        self.storage[0].bytes
    }
}
