//! What the controller keeps of each client.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Bytes, Code, Status};
use rustc_hash::FxHashMap;

use crate::memory::Quota;
use crate::objects::Buffer;
use crate::programs::Executable;
use crate::protocol::{Handle, Request, RequestId};
use crate::renewal::Renewal;

/// Names chosen by the server start here; clients count up from 1.
const FIRST_SERVER_HANDLE: Handle = 1 << 63;
/// Bytes that a client may have asked for and not fetched; one array may be larger.
const READS_BYTES: u64 = 1 << 30;
/// What the smallest read counts as, for what is kept beside its bytes.
const READ_BYTES_MIN: u64 = 4 << 10;

/// Reads whose bytes a client has not fetched yet.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    by_request: FxHashMap<RequestId, u64>,
    bytes: u64,
}

impl Reads {
    /// A read is on its way.
    pub fn insert(&mut self, request: RequestId, bytes: u64) {
        self.bytes += bytes;
        self.by_request.insert(request, bytes);
    }

    /// A read has been fetched, or has failed.
    pub fn remove(&mut self, request: RequestId) {
        self.bytes -= self.by_request.remove(&request).unwrap_or(0);
    }
}

/// One connected client: its names, its programs and its requests that must wait.
#[derive(Debug)]
pub(crate) struct ClientState {
    pub buffers: FxHashMap<Handle, Buffer>,
    pub executables: FxHashMap<Handle, Arc<Executable>>,
    /// Completions that can be awaited: a buffer that holds the end of a run.
    pub completions: FxHashMap<Handle, Buffer>,
    /// Uploads that have arrived and were not used yet.
    pub uploads: FxHashMap<Handle, bytes::Bytes>,
    /// Requests behind one that waits for an upload, in the client's order.
    pub backlog: VecDeque<(RequestId, Request)>,
    /// A program that is being compiled again, for which the backlog waits.
    pub renewal: Option<Renewal>,
    /// Virtual devices that it was told of when it connected.
    pub virtual_devices: u32,
    /// What it holds of each device.
    pub quota: Arc<Quota>,
    /// Bytes of reads that it has asked for and not fetched yet.
    pub reads: Reads,
    next_handle: Handle,
}

impl ClientState {
    pub fn new(virtual_devices: u32) -> Self {
        Self {
            virtual_devices,
            buffers: FxHashMap::default(),
            executables: FxHashMap::default(),
            completions: FxHashMap::default(),
            uploads: FxHashMap::default(),
            backlog: VecDeque::new(),
            renewal: None,
            quota: Arc::default(),
            reads: Reads::default(),
            next_handle: FIRST_SERVER_HANDLE,
        }
    }

    /// A name that no client chooses.
    pub fn mint(&mut self) -> Handle {
        self.next_handle += 1;
        self.next_handle
    }

    /// The buffer of this name, usable or not.
    pub fn buffer(&self, handle: Handle) -> Result<&Buffer, Status> {
        self.buffers.get(&handle).ok_or_else(|| unknown("array", handle))
    }

    /// The buffer of this name if it can be used.
    pub fn live(&self, handle: Handle) -> Result<&Buffer, Status> {
        let buffer = self.buffer(handle)?;
        if let Some(error) = &buffer.error {
            return Err(error.as_ref().clone());
        }
        if buffer.is_deleted() {
            return Err(Status::new(
                Code::InvalidArgument,
                format!("array {handle} has been deleted or donated; use it before, or copy it"),
            ));
        }
        Ok(buffer)
    }

    /// The program of this name.
    pub fn executable(&self, handle: Handle) -> Result<&Arc<Executable>, Status> {
        self.executables.get(&handle).ok_or_else(|| unknown("executable", handle))
    }

    /// Does this request need bytes that have not arrived yet, or room for bytes that are fetched too
    /// slowly?
    pub fn must_wait(&self, request: &Request) -> bool {
        match request {
            Request::Put { shards, .. } => {
                shards.iter().any(|shard| !self.uploads.contains_key(&shard.upload))
            }
            Request::Read { array, .. } => {
                let unfetched = self.reads.bytes;
                unfetched > 0 && unfetched + self.bytes_of(*array) > READS_BYTES
            }
            _ => false,
        }
    }

    /// Does the oldest request that waits need this upload?
    pub fn awaits_upload(&self, upload: Handle) -> bool {
        match self.backlog.front() {
            Some((_, Request::Put { shards, .. })) => {
                shards.iter().any(|shard| shard.upload == upload)
            }
            _ => false,
        }
    }

    /// Bytes of an array, none of one that there is not; at least what is kept beside them.
    pub fn bytes_of(&self, array: Handle) -> u64 {
        let bytes = self.buffers.get(&array).map_or(0, |buffer| buffer.spec.shard_bytes(0).0);
        bytes.max(READ_BYTES_MIN)
    }

    pub fn bytes_held(&self) -> Bytes {
        self.buffers.values().map(Buffer::bytes_held).sum()
    }
}

fn unknown(what: &str, handle: Handle) -> Status {
    Status::new(
        Code::NotFound,
        format!("no {what} has the handle {handle}; it was never made or is already destructed"),
    )
}
