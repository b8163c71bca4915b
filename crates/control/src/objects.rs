//! The object directory: every logical buffer, its owner, and whether it is still live.
//!
//! One entry stands for one logical buffer whatever its shard count (a sharded buffer). Arrays that
//! share device buffers (an array and the single-device arrays it was disassembled into) share a
//! [`Storage`], so that the deletion of a shard is visible through all of them. Each has a [`View`]
//! of its shards: a storage of which only one shard is still viewed is charged for that shard only.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{BufferId, Bytes, HostId, Status};
use ir::ArraySpec;

use crate::memory::{Charge, ShardMemory};

/// Device memory that one or several buffers share.
#[derive(Debug)]
pub(crate) struct Storage {
    /// Whether any of its shards is deleted.
    any_deleted: AtomicBool,
    pub bytes: Bytes,
    /// Number of devices that hold a shard of it.
    pub shards: u64,
    counted: Mutex<Counted>,
}

/// The quota charge of a storage, and the reference counts of its shards.
#[derive(Debug, Default)]
struct Counted {
    /// Charge of the shards that are viewed and not deleted.
    charge: Option<Charge>,
    /// Number of views of all shards.
    whole: u32,
    /// Number of partial views of each shard; empty until there is one.
    some: Vec<u32>,
    /// Whether each shard is deleted; empty until one is.
    deleted: Vec<bool>,
}

impl Storage {
    /// Creates the storage of one buffer.
    pub fn of(spec: &ArraySpec, charge: Option<Charge>) -> Arc<[View]> {
        let shards = spec.sharding.devices.len() as u64;
        let storage = Self {
            any_deleted: AtomicBool::new(false),
            bytes: spec.device_bytes(),
            shards,
            counted: Mutex::new(Counted { charge, ..Counted::default() }),
        };
        Arc::new([View::new(Arc::new(storage), None)])
    }

    fn counted(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of each shard.
    pub fn shard_bytes(&self) -> Bytes {
        Bytes(self.bytes.0 / self.shards.max(1))
    }

    /// Replaces its charge, if it has one.
    pub fn recharge(&self, charge: Option<Charge>) {
        let mut counted = self.counted();
        if counted.charge.is_some() {
            counted.charge = charge;
        }
    }
}

/// A buffer's view of all or some shards of a storage. A shard that no buffer views any more is no
/// longer charged to the client's quota.
#[derive(Debug)]
pub(crate) struct View {
    storage: Arc<Storage>,
    /// The viewed shards, in the buffer's order; all if `None`.
    positions: Option<Vec<u32>>,
}

impl View {
    fn new(storage: Arc<Storage>, positions: Option<Vec<u32>>) -> Self {
        let positions = positions.filter(|some| {
            some.len() as u64 != storage.shards || some.iter().zip(0..).any(|(&one, at)| one != at)
        });
        let mut counted = storage.counted();
        match &positions {
            None => counted.whole += 1,
            Some(positions) => {
                counted.some.resize(storage.shards as usize, 0);
                for &position in positions {
                    counted.some[position as usize] += 1;
                }
            }
        }
        drop(counted);
        Self { storage, positions }
    }

    /// Returns the identity of the storage.
    pub fn id(&self) -> *const Storage {
        Arc::as_ptr(&self.storage)
    }

    /// Returns whether it is the only view of its storage.
    fn is_only(&self) -> bool {
        Arc::strong_count(&self.storage) == 1
    }

    /// Returns its number of shards.
    fn length(&self) -> usize {
        self.positions.as_ref().map_or(self.storage.shards as usize, Vec::len)
    }

    /// Returns whether one of its shards is deleted.
    fn is_deleted(&self) -> bool {
        self.storage.any_deleted.load(Ordering::Relaxed) && {
            let deleted = &self.storage.counted().deleted;
            (0..self.length()).any(|index| deleted[self.position(index) as usize])
        }
    }

    /// Marks its shards as deleted.
    fn mark_deleted(&self) {
        let mut counted = self.storage.counted();
        let Counted { charge, deleted, .. } = &mut *counted;
        deleted.resize(self.storage.shards as usize, false);
        for index in 0..self.length() {
            deleted[self.position(index) as usize] = true;
        }
        if let Some(charge) = charge {
            charge.keep(|position| !deleted[position as usize]);
        }
        self.storage.any_deleted.store(true, Ordering::Relaxed);
    }

    /// Calls `look` on the memory of each of its shards that counts towards a quota.
    pub fn charged(&self, mut look: impl FnMut(&ShardMemory)) {
        let has = |position: &u32| self.positions.as_ref().is_none_or(|own| own.contains(position));
        let counted = self.storage.counted();
        let shards = counted.charge.iter().flat_map(|charge| &charge.shards);
        shards.filter(|(position, _)| has(position)).for_each(|(_, shard)| look(shard));
    }

    /// Returns whether another view of the same storage shares a shard with it.
    fn overlaps(&self, other: &Self) -> bool {
        let (Some(own), Some(others)) = (&self.positions, &other.positions) else { return true };
        own.iter().any(|position| others.contains(position))
    }

    /// Returns which shard of the storage is its `index`-th.
    fn position(&self, index: usize) -> u32 {
        self.positions.as_ref().map_or(index as u32, |positions| positions[index])
    }
}

impl Deref for View {
    type Target = Storage;

    fn deref(&self) -> &Storage {
        &self.storage
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let mut counted = self.storage.counted();
        match &self.positions {
            None => counted.whole -= 1,
            Some(positions) => {
                for &position in positions {
                    counted.some[position as usize] -= 1;
                }
            }
        }
        let Counted { charge, whole, some, .. } = &mut *counted;
        // A storage that was never partially viewed releases its charge when it is dropped.
        if let (0, false, Some(charge)) = (*whole, some.is_empty(), charge) {
            charge.keep(|position| some[position as usize] > 0);
        }
    }
}

/// A logical buffer.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    pub id: BufferId,
    pub spec: Arc<ArraySpec>,
    /// Hosts that hold shards.
    pub hosts: Arc<[HostId]>,
    /// Views of its storage; a single view unless it was assembled from several storages, whose
    /// viewed shards are its own in this order.
    pub storage: Arc<[View]>,
    /// The error that every use of it returns, if it is poisoned.
    pub error: Option<Arc<Status>>,
}

impl Buffer {
    /// Creates a buffer with its own memory.
    pub fn new(
        id: BufferId,
        spec: Arc<ArraySpec>,
        hosts: Arc<[HostId]>,
        charge: Option<Charge>,
    ) -> Self {
        let storage = Storage::of(&spec, charge);
        Self { id, spec, hosts, storage, error: None }
    }

    /// Creates a poisoned buffer, without device memory, that returns `error` on use.
    pub fn poisoned(id: BufferId, spec: Arc<ArraySpec>, error: Arc<Status>) -> Self {
        Self { id, spec, hosts: Arc::new([]), storage: Arc::new([]), error: Some(error) }
    }

    /// Creates a buffer that shares the shards of other buffers, each given with its position
    /// there.
    pub fn sharing(
        id: BufferId,
        spec: Arc<ArraySpec>,
        hosts: Arc<[HostId]>,
        sources: &[(Self, u32)],
    ) -> Self {
        let mut views: Vec<(Arc<Storage>, Vec<u32>)> = Vec::new();
        for (source, place) in sources {
            let (view, index) = source.view(*place as usize);
            let position = view.position(index);
            match views.last_mut().filter(|(last, _)| Arc::ptr_eq(last, &view.storage)) {
                Some((_, positions)) => positions.push(position),
                None => views.push((view.storage.clone(), vec![position])),
            }
        }
        let view = |(storage, positions)| View::new(storage, Some(positions));
        Self { id, spec, hosts, storage: views.into_iter().map(view).collect(), error: None }
    }

    /// Returns the view that holds one of its shards, and the index of the shard in that view.
    fn view(&self, mut index: usize) -> (&View, usize) {
        for view in self.storage.iter() {
            if index < view.length() {
                return (view, index);
            }
            index -= view.length();
        }
        unreachable!("a buffer's views have as many shards as the buffer")
    }

    /// Returns whether one of its shards is deleted; the buffer cannot be used then. JAX itself
    /// tests the first shard only, so that a replicated array whose first copy is live can be read.
    pub fn is_deleted(&self) -> bool {
        self.storage.iter().any(View::is_deleted)
    }

    /// Deletes its shards, for all buffers that share them.
    pub fn mark_deleted(&self) {
        self.storage.iter().for_each(View::mark_deleted);
    }

    /// Returns the indices of the first donated buffer that shares a shard with another one, and of
    /// that one. O(views · log views).
    pub fn donated_twice(
        args: &[&Self],
        is_donated: impl Fn(usize) -> bool,
    ) -> Option<(usize, usize)> {
        let mut views: Vec<(*const Storage, usize, usize)> = Vec::with_capacity(args.len());
        for (at, buffer) in args.iter().enumerate() {
            let own = buffer.storage.iter().enumerate();
            views.extend(own.map(|(view, storage)| (storage.id(), at, view)));
        }
        views.sort_unstable();
        for same in views.chunk_by(|one, other| one.0 == other.0).filter(|same| same.len() > 1) {
            let of = |&(_, at, view): &(_, usize, usize)| &args[at].storage[view];
            for one in same.iter().filter(|one| is_donated(one.1)) {
                let overlaps = |other: &&_| *other != one && of(one).overlaps(of(other));
                if let Some(other) = same.iter().find(overlaps) {
                    return Some((one.1, other.1));
                }
            }
        }
        None
    }

    /// Returns the bytes of device memory that are freed with this buffer: 0 if it shares its
    /// storage or was assembled from several.
    pub fn bytes_held(&self) -> Bytes {
        if self.is_deleted() || self.storage.len() != 1 || !self.storage[0].is_only() {
            return Bytes(0);
        }
        let view = &self.storage[0];
        Bytes(view.shard_bytes().0 * view.length() as u64)
    }
}

#[cfg(test)]
mod tests {
    use base::DeviceId;
    use ir::{DType, Partition, Sharding};

    use super::*;
    use crate::memory::Quota;

    const SHARD_BYTES: u64 = 16;

    fn spec(devices: &[u32]) -> Arc<ArraySpec> {
        let devices = devices.iter().copied().map(DeviceId).collect();
        let sharding = Sharding { devices, memory: None, partition: Partition::Replicated };
        Arc::new(ArraySpec { dtype: DType::F32, dims: [4].as_slice().into(), sharding })
    }

    fn taken(sources: &[(Buffer, u32)], devices: &[u32]) -> Buffer {
        Buffer::sharing(BufferId(2), spec(devices), Arc::new([]), sources)
    }

    /// A buffer that is replicated on three devices.
    fn copies(quota: &Arc<Quota>) -> Buffer {
        let shard = |at| (at, ShardMemory { device: DeviceId(at), bytes: SHARD_BYTES });
        let charge = quota.charge((0..3).map(shard).collect());
        Buffer::new(BufferId(1), spec(&[0, 1, 2]), Arc::new([]), Some(charge))
    }

    fn held(quota: &Quota) -> [u64; 3] {
        [0, 1, 2].map(|device| quota.held(DeviceId(device)) / SHARD_BYTES)
    }

    #[test]
    fn what_is_left_of_an_array_counts_for_the_shards_that_are_left() {
        let quota = Arc::new(Quota::default());
        let whole = copies(&quota);
        let last = taken(&[(whole.clone(), 2)], &[2]);
        let again = taken(&[(last.clone(), 0), (whole.clone(), 0)], &[2, 0]);
        let first = taken(&[(again.clone(), 1)], &[0]);
        assert_eq!(held(&quota), [1, 1, 1]);
        drop(whole);
        assert_eq!(held(&quota), [1, 0, 1]);
        drop((last, again));
        assert_eq!(held(&quota), [1, 0, 0]);
        assert_eq!(first.bytes_held(), Bytes(SHARD_BYTES));
        drop(first);
        assert_eq!(held(&quota), [0, 0, 0]);
    }

    #[test]
    fn deleting_a_shard_deletes_all_that_have_it_and_leaves_the_other_shards() {
        let quota = Arc::new(Quota::default());
        let whole = copies(&quota);
        let parts = [0, 1, 2].map(|at| taken(&[(whole.clone(), at)], &[at]));
        parts[1].mark_deleted();
        let is_deleted = || parts.each_ref().map(Buffer::is_deleted);
        let charged = |buffer: &Buffer| {
            let mut devices = Vec::new();
            let views = buffer.storage.iter();
            views.for_each(|view| view.charged(|shard| devices.push(shard.device.0)));
            devices
        };
        assert_eq!((charged(&whole), charged(&parts[0])), (vec![0, 2], vec![0]));
        assert!(whole.is_deleted());
        assert_eq!(is_deleted(), [false, true, false]);
        assert_eq!(held(&quota), [1, 0, 1]);
        let pair = taken(&[(whole.clone(), 0), (whole.clone(), 2)], &[0, 2]);
        assert!(!pair.is_deleted());
        whole.mark_deleted();
        assert!(pair.is_deleted());
        assert_eq!(is_deleted(), [true; 3]);
        assert_eq!(held(&quota), [0, 0, 0]);
    }

    #[test]
    fn what_is_donated_may_not_be_another_argument_too() {
        let quota = Arc::new(Quota::default());
        let (whole, other) = (copies(&quota), copies(&quota));
        let parts = [0, 1].map(|at| taken(&[(whole.clone(), at)], &[at]));
        let first = |at: usize| at == 0;
        assert_eq!(Buffer::donated_twice(&[&whole, &other], |_| true), None);
        assert_eq!(Buffer::donated_twice(&[&whole, &whole], |_| false), None);
        assert_eq!(Buffer::donated_twice(&[&whole, &other, &whole], first), Some((0, 2)));
        assert_eq!(Buffer::donated_twice(&[&parts[0], &parts[1]], |_| true), None);
        assert_eq!(Buffer::donated_twice(&[&parts[0], &whole], first), Some((0, 1)));
        let again = taken(&[(other.clone(), 0), (parts[1].clone(), 0)], &[0, 1]);
        assert_eq!(Buffer::donated_twice(&[&parts[1], &again], first), Some((0, 1)));
    }

    #[test]
    fn an_array_put_together_again_counts_as_before() {
        let quota = Arc::new(Quota::default());
        let whole = copies(&quota);
        let all: Vec<_> = (0..3).map(|at| (whole.clone(), at)).collect();
        let again = taken(&all, &[0, 1, 2]);
        drop((whole, all));
        assert_eq!((held(&quota), again.storage.len()), ([1, 1, 1], 1));
        assert_eq!(again.bytes_held(), Bytes(3 * SHARD_BYTES));
    }
}
