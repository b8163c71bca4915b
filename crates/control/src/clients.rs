//! What the controller keeps of each client.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Bytes, Code, Status};
use rustc_hash::FxHashMap;

use crate::memory::Quota;
use crate::objects::Buffer;
use crate::programs::Executable;
use crate::renewal::Renewal;
use crate::seam::{Handle, Request, RequestId};

/// Names chosen by the server start here; clients count up from 1.
const FIRST_SERVER_HANDLE: Handle = 1 << 63;

/// One connected client: its names, its programs and its requests that must wait.
#[derive(Debug)]
pub(crate) struct Client {
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
    next_handle: Handle,
}

impl Client {
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

    /// Does this request need bytes that have not arrived yet?
    pub fn must_wait(&self, request: &Request) -> bool {
        match request {
            Request::Put { shards, .. } => {
                shards.iter().any(|shard| !self.uploads.contains_key(&shard.upload))
            }
            _ => false,
        }
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
