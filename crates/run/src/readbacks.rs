//! Small arrays that clients read over a stream of their own, beside their sessions.
//!
//! The stock client needs two round trips to read an array: one until its bytes are there, and one
//! to fetch them. On this stream they come as soon as they are there.

use std::collections::HashMap;

use base::{ClientId, Status};
use bytes::Bytes;
use control::RequestId;
use parking_lot::Mutex;
use tokio::sync::mpsc;

/// An array that a client has asked for.
#[derive(Debug)]
pub struct Readback {
    /// The client's name for it.
    pub slot: u32,
    /// The request that asked for it.
    pub read: RequestId,
    /// Its bytes, or why there are none.
    pub value: Result<Bytes, Status>,
}

/// All clients' streams.
#[derive(Debug, Default)]
pub struct Readbacks(Mutex<HashMap<ClientId, mpsc::UnboundedSender<Readback>>>);

impl Readbacks {
    /// Opens the stream of a client; `None` if it has one.
    pub fn open(&self, client: ClientId) -> Option<mpsc::UnboundedReceiver<Readback>> {
        let mut streams = self.0.lock();
        if streams.get(&client).is_some_and(|stream| !stream.is_closed()) {
            return None;
        }
        // Bounded by the controller: a client's outstanding reads are, until they are fetched.
        let (sender, receiver) = mpsc::unbounded_channel();
        streams.insert(client, sender);
        Some(receiver)
    }

    /// Passes an array to a client.
    ///
    /// # Errors
    /// It has no stream; the array is returned.
    pub fn pass(&self, client: ClientId, readback: Readback) -> Result<(), Readback> {
        match self.0.lock().get(&client) {
            Some(stream) => stream.send(readback).map_err(|unsent| unsent.0),
            None => Err(readback),
        }
    }

    /// Forgets a client.
    pub(crate) fn leave(&self, client: ClientId) {
        self.0.lock().remove(&client);
    }
}
