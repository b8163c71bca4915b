//! Bytes on their way between a client and its arrays, by session and handle.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use base::ClientId;
use bytes::Bytes;
use parking_lot::Mutex;

#[derive(Debug)]
struct Kept {
    client: ClientId,
    reads: HashMap<u64, Bytes>,
}

/// The bytes of finished reads of all sessions. A session's key cannot be guessed, so one
/// client cannot name another's bytes.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<HashMap<u64, Kept>>);

impl Buffers {
    /// Registers a session and returns its key.
    pub fn open(&self, client: ClientId) -> u64 {
        // A fresh random hasher: its keys come from the operating system.
        let key = RandomState::new().hash_one(client.0).max(1);
        self.0.lock().insert(key, Kept { client, reads: HashMap::new() });
        key
    }

    /// Forgets a session.
    pub fn close(&self, key: u64) {
        self.0.lock().remove(&key);
    }

    /// Whose session it is.
    pub fn client(&self, key: u64) -> Option<ClientId> {
        self.0.lock().get(&key).map(|kept| kept.client)
    }

    /// Keeps the bytes of a read until the client deletes them.
    pub fn keep(&self, key: u64, handle: u64, data: Bytes) {
        if let Some(kept) = self.0.lock().get_mut(&key) {
            kept.reads.insert(handle, data);
        }
    }

    /// The bytes of a read.
    pub fn read(&self, key: u64, handle: u64) -> Option<Bytes> {
        self.0.lock().get(&key)?.reads.get(&handle).cloned()
    }

    /// Forgets the bytes of a read; says whether there were any.
    pub fn forget(&self, key: u64, handle: u64) -> bool {
        self.0.lock().get_mut(&key).is_some_and(|kept| kept.reads.remove(&handle).is_some())
    }
}
