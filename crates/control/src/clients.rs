//! The controller's state of each client.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Bytes, Code, Status};
use rustc_hash::FxHashMap;

use crate::events::{Handle, Request, RequestId};
use crate::lineage::Lineage;
use crate::memory::Quota;
use crate::objects::Buffer;
use crate::programs::Executable;

/// First handle chosen by the controller; clients count up from 1.
const FIRST_SERVER_HANDLE: Handle = 1 << 63;
/// Flow control: bytes of reads that a client may have outstanding; a single array may be larger.
const READS_BYTES: u64 = 1 << 30;
/// Minimum that a read counts as, for its bookkeeping.
const READ_BYTES_MIN: u64 = 4 << 10;

/// Outstanding reads: those whose bytes a client has not fetched yet.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    by_request: FxHashMap<RequestId, u64>,
    bytes: u64,
}

impl Reads {
    /// Adds an outstanding read.
    pub fn insert(&mut self, request: RequestId, bytes: u64) {
        self.bytes += bytes;
        self.by_request.insert(request, bytes);
    }

    /// Removes a read that has been fetched, or has failed.
    pub fn remove(&mut self, request: RequestId) {
        self.bytes -= self.by_request.remove(&request).unwrap_or(0);
    }
}

/// A recompilation of a lost program; the run that needs the program is first in the client's
/// backlog.
#[derive(Debug)]
pub(crate) struct Renewal {
    pub number: u64,
    pub name: Handle,
}

/// State of one connected client: its names, its programs and its waiting requests.
#[derive(Debug)]
pub(crate) struct ClientState {
    pub buffers: FxHashMap<Handle, Buffer>,
    pub executables: FxHashMap<Handle, Arc<Executable>>,
    /// Completions that can be awaited: each a buffer that becomes ready when a run ends.
    pub completions: FxHashMap<Handle, Buffer>,
    /// Uploads that have arrived and have not been used.
    pub uploads: FxHashMap<Handle, bytes::Bytes>,
    /// Requests in the client's order, the first of which waits for an upload, for outstanding
    /// reads, for a recompilation or for a migration.
    pub backlog: VecDeque<(RequestId, Request)>,
    /// The recompilation of a program, which the backlog waits for.
    pub renewal: Option<Renewal>,
    /// Number of virtual devices announced to it when it connected.
    pub virtual_devices: u32,
    /// Its memory quota on each device.
    pub quota: Arc<Quota>,
    /// Reads that it has requested and not fetched yet.
    pub reads: Reads,
    /// What its newest arrays were made from.
    pub lineage: Lineage,
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
            lineage: Lineage::default(),
            next_handle: FIRST_SERVER_HANDLE,
        }
    }

    /// Returns a new handle that no client chooses.
    pub fn mint(&mut self) -> Handle {
        self.next_handle += 1;
        self.next_handle
    }

    /// Returns the buffer of this name, usable or not.
    pub fn buffer(&self, handle: Handle) -> Result<&Buffer, Status> {
        self.buffers.get(&handle).ok_or_else(|| unknown("array", handle))
    }

    /// Returns the buffer of this name, or an error if it is poisoned or deleted.
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

    /// Returns the program of this name.
    pub fn executable(&self, handle: Handle) -> Result<&Arc<Executable>, Status> {
        self.executables.get(&handle).ok_or_else(|| unknown("executable", handle))
    }

    /// Admission: returns whether a request must wait for uploads that have not arrived, or for
    /// outstanding reads to be fetched.
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

    /// Returns whether the oldest waiting request needs this upload.
    pub fn awaits_upload(&self, upload: Handle) -> bool {
        match self.backlog.front() {
            Some((_, Request::Put { shards, .. })) => {
                shards.iter().any(|shard| shard.upload == upload)
            }
            _ => false,
        }
    }

    /// Returns the bytes that a read of this array counts as, at least `READ_BYTES_MIN`.
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
