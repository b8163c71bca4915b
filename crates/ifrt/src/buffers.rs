//! Bytes on their way between a client and its arrays, by session and handle.
//!
//! What a session has uploaded and no array has taken yet is bounded: further uploads wait, and so does
//! the client. What it has read and not fetched yet is bounded by the controller, which is told when
//! bytes are fetched.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use base::ClientId;
use bytes::Bytes;
use control::RequestId;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Bytes of a session's uploads that may be here at once; one upload may be larger.
const UPLOADS_BYTES: u64 = 2 << 30;
/// What the smallest upload counts as, for what is kept beside its bytes.
const UPLOAD_BYTES_MIN: u64 = 4 << 10;
/// Calls of a session at once that fetch what it has read; each may have a few MiB under way.
const FETCHES: usize = 16;
/// How often a waiting upload looks whether an array waits for it.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Kept {
    client: ClientId,
    /// By handle, with the request that asked.
    reads: HashMap<u64, (RequestId, Bytes)>,
    uploads: Arc<Uploads>,
}

/// What a session's uploads take.
#[derive(Debug)]
struct Uploads {
    taken: Mutex<Taken>,
    freed: Notify,
    /// For calls that fetch what was read.
    fetches: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: u64,
    /// Uploads that are on their way or here.
    handles: HashSet<u64>,
}

/// Room for one upload; given back when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    uploads: Arc<Uploads>,
    handle: u64,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut taken = self.uploads.taken.lock();
        taken.bytes -= self.bytes;
        taken.handles.remove(&self.handle);
        drop(taken);
        self.uploads.freed.notify_waiters();
    }
}

/// Why there is no room for an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// The session has ended.
    Ended,
    /// An upload of this handle is here already.
    Twice,
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
        let uploads = Uploads {
            taken: Mutex::default(),
            freed: Notify::new(),
            fetches: Arc::new(Semaphore::new(FETCHES)),
        };
        let kept = Kept { client, reads: HashMap::new(), uploads: Arc::new(uploads) };
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
    /// once, since others may wait behind that array.
    ///
    /// # Errors
    /// The session ends meanwhile, or an upload of this handle is here already: an array takes each
    /// of its uploads once, so that what is awaited is no more than that array.
    pub async fn reserve(
        &self,
        (key, handle): (u64, u64),
        bytes: u64,
        is_awaited: impl Fn() -> bool,
    ) -> Result<Reservation, NoRoom> {
        let bytes = bytes.max(UPLOAD_BYTES_MIN);
        loop {
            let uploads = self.0.lock().get(&key).ok_or(NoRoom::Ended)?.uploads.clone();
            let freed = uploads.freed.notified();
            let fits = |taken: u64| taken == 0 || taken + bytes <= UPLOADS_BYTES;
            let admit = |anyway: bool| {
                let mut taken = uploads.taken.lock();
                if taken.handles.contains(&handle) {
                    return Err(NoRoom::Twice);
                }
                if !anyway && !fits(taken.bytes) {
                    return Ok(None);
                }
                taken.bytes += bytes;
                taken.handles.insert(handle);
                Ok(Some(Reservation { uploads: uploads.clone(), handle, bytes }))
            };
            if let Some(room) = admit(false)? {
                return Ok(room);
            }
            if is_awaited()
                && let Some(room) = admit(true)?
            {
                return Ok(room);
            }
            drop(tokio::time::timeout(LOOK, freed).await);
        }
    }

    /// Waits until a session has few calls that fetch what it has read; none once it has ended.
    pub async fn fetch(&self, key: u64) -> Option<OwnedSemaphorePermit> {
        let fetches = self.0.lock().get(&key)?.uploads.fetches.clone();
        fetches.acquire_owned().await.ok()
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
        let large = buffers.reserve((key, 1), 3 * UPLOADS_BYTES, never).await.unwrap();
        let soon = Duration::from_millis(50);
        let refused = tokio::time::timeout(soon, buffers.reserve((key, 2), 0, never)).await;
        assert!(refused.is_err(), "it must wait");
        let awaited = buffers.reserve((key, 3), 1, || true).await.unwrap();
        drop((large, awaited));
        let mut kept = Vec::new();
        for handle in 0..UPLOADS_BYTES / UPLOAD_BYTES_MIN {
            kept.push(buffers.reserve((key, handle), 0, never).await.unwrap().fill(vec![]));
        }
        let waiting = buffers.reserve((key, u64::MAX), 0, never);
        tokio::pin!(waiting);
        assert!(tokio::time::timeout(soon, &mut waiting).await.is_err(), "their number is bounded");
        kept.pop();
        assert!(waiting.await.is_ok());
        buffers.close(key);
        assert_eq!(buffers.reserve((key, 9), 0, never).await.unwrap_err(), NoRoom::Ended);
    }

    #[tokio::test]
    async fn an_upload_that_is_awaited_is_taken_once() {
        let buffers = Buffers::default();
        let key = buffers.open(ClientId(1));
        let _all = buffers.reserve((key, 1), UPLOADS_BYTES, || false).await.unwrap();
        let awaited = buffers.reserve((key, 2), 1, || true).await.unwrap().fill(vec![7; 1]);
        let again = buffers.reserve((key, 2), 1, || true).await.unwrap_err();
        assert_eq!(again, NoRoom::Twice, "it is here and not taken");
        drop(awaited);
        buffers.reserve((key, 2), 1, || true).await.unwrap();
    }
}
