//! Bytes in transit between a client and its arrays, by session and handle.
//!
//! Flow control: the bytes that a session has uploaded and no array has taken are bounded; further
//! uploads wait, and so does the client. Bytes that it has read but not fetched are bounded by the
//! controller, which is notified when they are fetched.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use base::ClientId;
use bytes::Bytes;
use control::RequestId;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Maximum number of bytes of a session's uploads held at once; a single upload may be larger.
const UPLOADS_BYTES: u64 = 2 << 30;
/// Minimum size that an upload counts as, which covers its bookkeeping.
const UPLOAD_BYTES_MIN: u64 = 4 << 10;
/// Maximum number of concurrent fetch calls of a session; each may have a few MiB in flight.
const FETCHES: usize = 16;
/// Interval at which a waiting upload checks whether an array awaits it.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Kept {
    client: ClientId,
    /// Read bytes by handle, with the request that asked for them.
    reads: HashMap<u64, (RequestId, Bytes)>,
    uploads: Arc<Uploads>,
}

/// Admission of a session's uploads and fetches.
#[derive(Debug)]
struct Uploads {
    taken: Mutex<Taken>,
    freed: Notify,
    /// Permits for calls that fetch read bytes.
    fetches: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: u64,
    /// Handles of uploads that are in transit or held.
    handles: HashSet<u64>,
}

/// Reserved capacity for one upload, released when dropped.
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

/// Why an upload is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// The session has ended.
    Ended,
    /// An upload with this handle is already held.
    Twice,
}

/// Bytes that keep their reservation until the last reference is dropped.
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
    /// Attaches the reservation to the bytes it was made for.
    pub fn fill(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(Reserved { bytes, _room: self })
    }
}

/// The bytes of all sessions. Session keys are unguessable, so a client cannot name another client's
/// bytes.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<HashMap<u64, Kept>>);

impl Buffers {
    /// Registers a session and returns its key.
    pub fn open(&self, client: ClientId) -> u64 {
        // A new random hasher: the operating system seeds its keys.
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

    /// Drops a session.
    pub fn close(&self, key: u64) {
        self.0.lock().remove(&key);
    }

    /// Returns the client of a session.
    pub fn client(&self, key: u64) -> Option<ClientId> {
        self.0.lock().get(&key).map(|kept| kept.client)
    }

    /// Waits until an upload is admitted (back-pressure). An upload that an array awaits (`is_awaited`)
    /// is admitted at once, since other uploads may be blocked behind that array.
    ///
    /// # Errors
    /// The session ends meanwhile, or an upload with this handle is already held: an array takes each
    /// of its uploads once, so awaited uploads are bounded by their arrays.
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

    /// Waits for a permit to fetch read bytes; `None` once the session has ended.
    pub async fn fetch(&self, key: u64) -> Option<OwnedSemaphorePermit> {
        let fetches = self.0.lock().get(&key)?.uploads.fetches.clone();
        fetches.acquire_owned().await.ok()
    }

    /// Keeps the bytes of a read until the client deletes them; returns the read that was kept under
    /// this handle before, if any.
    pub fn keep(&self, key: u64, handle: u64, read: RequestId, data: Bytes) -> Option<RequestId> {
        let mut sessions = self.0.lock();
        let before = sessions.get_mut(&key)?.reads.insert(handle, (read, data));
        before.map(|(read, _)| read)
    }

    /// Returns the bytes of a read.
    pub fn read(&self, key: u64, handle: u64) -> Option<Bytes> {
        self.0.lock().get(&key)?.reads.get(&handle).map(|(_, data)| data.clone())
    }

    /// Drops the bytes of a read; returns its client and the request that asked for it.
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
