//! Bytes on their way between a client and its arrays, by session and handle.
//!
//! What a session has uploaded and no array has taken yet is bounded: further uploads wait, and so does
//! the client. What it has read and not fetched yet is bounded by the controller, which is told when
//! bytes are fetched.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use base::ClientId;
use bytes::Bytes;
use control::RequestId;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes of a session's uploads that may be here at once; one upload may be larger.
const UPLOADS_BYTES: u64 = 2 << 30;
/// What the smallest upload counts as, for what is kept beside its bytes.
const UPLOAD_BYTES_MIN: u64 = 4 << 10;
/// How often a waiting upload looks whether an array waits for it.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Kept {
    client: ClientId,
    /// By handle, with the request that asked.
    reads: HashMap<u64, (RequestId, Bytes)>,
    uploads: Arc<Uploads>,
}

/// Bytes that a session's uploads take.
#[derive(Debug, Default)]
struct Uploads {
    bytes: Mutex<u64>,
    freed: Notify,
}

/// Room for one upload; given back when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    uploads: Arc<Uploads>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *self.uploads.bytes.lock() -= self.bytes;
        self.uploads.freed.notify_waiters();
    }
}

/// Bytes that hold their room as long as anybody holds them.
struct Reserved<T> {
    bytes: T,
    _room: Reservation,
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for Reserved<T> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl Reservation {
    /// The bytes that the room was for.
    pub fn fill(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(Reserved { bytes, _room: self })
    }
}

/// The bytes of all sessions. A session's key cannot be guessed, so one client cannot name another's
/// bytes.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<HashMap<u64, Kept>>);

impl Buffers {
    /// Registers a session and returns its key.
    pub fn open(&self, client: ClientId) -> u64 {
        // A fresh random hasher: its keys come from the operating system.
        let key = RandomState::new().hash_one(client.0).max(1);
        let kept = Kept { client, reads: HashMap::new(), uploads: Arc::default() };
        self.0.lock().insert(key, kept);
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

    /// Waits until there is room for an upload. One that an array waits for (`is_awaited`) has room at
    /// once, since others may wait behind that array. None if the session ends meanwhile.
    pub async fn reserve(
        &self,
        key: u64,
        bytes: u64,
        is_awaited: impl Fn() -> bool,
    ) -> Option<Reservation> {
        let bytes = bytes.max(UPLOAD_BYTES_MIN);
        loop {
            let uploads = self.0.lock().get(&key)?.uploads.clone();
            let freed = uploads.freed.notified();
            let fits = |taken: u64| taken == 0 || taken + bytes <= UPLOADS_BYTES;
            let admit = |anyway: bool| {
                let mut taken = uploads.bytes.lock();
                (anyway || fits(*taken)).then(|| {
                    *taken += bytes;
                    Reservation { uploads: uploads.clone(), bytes }
                })
            };
            if let Some(room) = admit(false).or_else(|| is_awaited().then(|| admit(true))?) {
                return Some(room);
            }
            drop(tokio::time::timeout(LOOK, freed).await);
        }
    }

    /// Keeps the bytes of a read until the client deletes them; returns the read that was kept under
    /// this handle before.
    pub fn keep(&self, key: u64, handle: u64, read: RequestId, data: Bytes) -> Option<RequestId> {
        let mut sessions = self.0.lock();
        let before = sessions.get_mut(&key)?.reads.insert(handle, (read, data));
        before.map(|(read, _)| read)
    }

    /// The bytes of a read.
    pub fn read(&self, key: u64, handle: u64) -> Option<Bytes> {
        self.0.lock().get(&key)?.reads.get(&handle).map(|(_, data)| data.clone())
    }

    /// Forgets the bytes of a read; says whose they were, and which request asked for them.
    pub fn forget(&self, key: u64, handle: u64) -> Option<(ClientId, RequestId)> {
        let mut sessions = self.0.lock();
        let kept = sessions.get_mut(&key)?;
        kept.reads.remove(&handle).map(|(read, _)| (kept.client, read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn uploads_wait_for_room_unless_an_array_waits_for_them() {
        let buffers = Buffers::default();
        let key = buffers.open(ClientId(1));
        let never = || false;
        let large = buffers.reserve(key, 3 * UPLOADS_BYTES, never).await.unwrap();
        let soon = Duration::from_millis(50);
        let refused = tokio::time::timeout(soon, buffers.reserve(key, 0, never)).await;
        assert!(refused.is_err(), "it must wait");
        let awaited = buffers.reserve(key, 1, || true).await.unwrap();
        drop((large, awaited));
        let small = buffers.reserve(key, 1, never).await.unwrap();
        let mut kept: Vec<_> = vec![small.fill(vec![7; 1])];
        for _ in 1..UPLOADS_BYTES / UPLOAD_BYTES_MIN {
            kept.push(buffers.reserve(key, 0, never).await.unwrap().fill(vec![]));
        }
        let waiting = buffers.reserve(key, 0, never);
        tokio::pin!(waiting);
        assert!(tokio::time::timeout(soon, &mut waiting).await.is_err(), "their number is bounded");
        kept.pop();
        assert!(waiting.await.is_some());
        buffers.close(key);
        assert!(buffers.reserve(key, 0, never).await.is_none());
    }
}
