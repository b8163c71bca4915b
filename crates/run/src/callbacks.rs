//! Calls of hosts to functions in clients' processes (host callbacks).
//!
//! A client that has such functions opens a stream of its own, beside its session, under a key that
//! its session has named. A host reports a call with its operands, and waits for the answer on the
//! data plane under a tag of its own. Calls that a client can no longer answer are answered with an
//! error, so that no device waits for a process that is gone.

use std::collections::HashMap;
use std::sync::Arc;

use base::{ClientId, Code, HostId, Status, TransferTag};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::commands::CommandQueue;

/// Most calls of a client that are not answered. Each occupies a thread of a host.
const CALLS_MAX: usize = 4096;
/// Bytes that an answer may have beyond its results: their description, or the text of an error.
const ANSWER_EXTRA: u64 = 1 << 20;

/// What a client's process proves its stream with.
pub type CallbackKey = [u8; 32];

/// A call, for the client's process.
#[derive(Debug)]
pub struct Call {
    /// Its number, with which it is answered.
    pub number: u64,
    /// Which of the client's functions.
    pub function: u64,
    /// The operands, as host and plugin agree on them.
    pub operands: Bytes,
}

/// The host that has called, and how it is answered.
#[derive(Clone)]
pub(crate) struct Caller {
    pub host: HostId,
    /// Its connection: the answer is for this process.
    pub outgoing: Arc<CommandQueue>,
    pub tag: TransferTag,
}

/// A call that is not answered.
struct OpenCall {
    caller: Caller,
    /// Largest answer in bytes.
    limit: u64,
}

#[derive(Default)]
struct ClientCalls {
    key: Option<CallbackKey>,
    /// The stream, and which one it is, if it is open.
    stream: Option<(u64, mpsc::UnboundedSender<Call>)>,
    open: HashMap<u64, OpenCall>,
}

#[derive(Default)]
struct Calls {
    clients: HashMap<ClientId, ClientCalls>,
    /// Number of calls and streams so far.
    numbers: u64,
}

/// All clients' streams, and the calls that are not answered.
#[derive(Default)]
pub struct Callbacks(Mutex<Calls>);

impl Callbacks {
    /// Registers the key of a client's stream.
    pub fn register(&self, client: ClientId, key: CallbackKey) {
        self.0.lock().clients.entry(client).or_default().key = Some(key);
    }

    /// Opens the stream of the client that has this key; returns the client, the number of the
    /// stream, and the calls. `None` if no client has the key, or has a stream already.
    pub fn open(
        &self,
        key: &CallbackKey,
    ) -> Option<(ClientId, u64, mpsc::UnboundedReceiver<Call>)> {
        let mut calls = self.0.lock();
        calls.numbers += 1;
        let number = calls.numbers;
        let (client, found) =
            calls.clients.iter_mut().find(|(_, found)| found.key.as_ref() == Some(key))?;
        if found.stream.is_some() {
            return None;
        }
        // Not bounded by itself: each call is in `open`, which is.
        let (sender, receiver) = mpsc::unbounded_channel();
        found.stream = Some((number, sender));
        Some((*client, number, receiver))
    }

    /// Returns the client that has a key.
    pub fn owner(&self, key: &CallbackKey) -> Option<ClientId> {
        let calls = self.0.lock();
        let found = calls.clients.iter().find(|(_, found)| found.key.as_ref() == Some(key));
        found.map(|(&client, _)| client)
    }

    /// Passes a call to a client.
    ///
    /// # Errors
    /// The client cannot be called, which is the answer.
    pub(crate) fn call(
        &self,
        client: ClientId,
        function: u64,
        operands: Bytes,
        caller: Caller,
        result_bytes: u64,
    ) -> Result<(), Status> {
        let gone = || {
            let text = "the client's process, which is to run a host callback, has ended";
            Status::new(Code::Unavailable, text)
        };
        let mut calls = self.0.lock();
        calls.numbers += 1;
        let number = calls.numbers;
        let found = calls.clients.get_mut(&client).ok_or_else(gone)?;
        if found.open.len() >= CALLS_MAX {
            let text = format!("{CALLS_MAX} host callbacks of the client are running already");
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let (_, stream) = found.stream.as_ref().ok_or_else(gone)?;
        stream.send(Call { number, function, operands }).map_err(|_| gone())?;
        let limit = result_bytes.saturating_add(ANSWER_EXTRA);
        found.open.insert(number, OpenCall { caller, limit });
        Ok(())
    }

    /// Returns the size in bytes that the answer of a call may have; `None` if no host waits for it.
    pub fn answer_limit(&self, client: ClientId, number: u64) -> Option<u64> {
        Some(self.0.lock().clients.get(&client)?.open.get(&number)?.limit)
    }

    /// Takes a call that is answered now.
    pub(crate) fn take(&self, client: ClientId, number: u64) -> Option<Caller> {
        let mut calls = self.0.lock();
        Some(calls.clients.get_mut(&client)?.open.remove(&number)?.caller)
    }

    /// Closes a stream; returns who waits for answers that it will not bring.
    pub(crate) fn close(&self, client: ClientId, stream: u64) -> Vec<Caller> {
        let mut calls = self.0.lock();
        let Some(found) = calls.clients.get_mut(&client) else { return Vec::new() };
        if found.stream.as_ref().is_none_or(|(number, _)| *number != stream) {
            return Vec::new();
        }
        found.stream = None;
        found.open.drain().map(|(_, call)| call.caller).collect()
    }

    /// Forgets a client; returns who waits for its answers.
    pub(crate) fn leave(&self, client: ClientId) -> Vec<Caller> {
        let left = self.0.lock().clients.remove(&client);
        left.into_iter().flat_map(|found| found.open.into_values()).map(|c| c.caller).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(tag: u64) -> Caller {
        Caller { host: HostId(0), outgoing: Arc::default(), tag: TransferTag(tag) }
    }

    #[test]
    fn a_call_reaches_the_stream_with_its_clients_key_and_no_other() {
        let callbacks = Callbacks::default();
        callbacks.register(ClientId(1), [1; 32]);
        callbacks.register(ClientId(2), [2; 32]);
        assert!(callbacks.open(&[3; 32]).is_none());
        let (client, _, mut calls) = callbacks.open(&[2; 32]).expect("the key is known");
        assert_eq!(client, ClientId(2));
        assert!(callbacks.open(&[2; 32]).is_none(), "a client has one stream");
        let refused = callbacks.call(ClientId(1), 7, Bytes::new(), caller(1), 4);
        assert_eq!(refused.unwrap_err().code, Code::Unavailable);
        callbacks.call(ClientId(2), 7, Bytes::new(), caller(2), 4).unwrap();
        let call = calls.try_recv().expect("it was called");
        assert_eq!(call.function, 7);
        assert_eq!(callbacks.answer_limit(ClientId(2), call.number), Some(4 + ANSWER_EXTRA));
        assert_eq!(callbacks.answer_limit(ClientId(1), call.number), None);
        assert_eq!(callbacks.take(ClientId(2), call.number).unwrap().tag, TransferTag(2));
        assert!(callbacks.take(ClientId(2), call.number).is_none(), "it is answered once");
    }

    #[test]
    fn the_end_of_a_stream_or_a_client_ends_its_calls() {
        let callbacks = Callbacks::default();
        callbacks.register(ClientId(1), [1; 32]);
        let (client, first, _calls) = callbacks.open(&[1; 32]).unwrap();
        callbacks.call(client, 0, Bytes::new(), caller(5), 0).unwrap();
        let left = callbacks.close(client, first);
        assert_eq!(left.iter().map(|caller| caller.tag.0).collect::<Vec<_>>(), [5]);
        let (_, second, _calls) = callbacks.open(&[1; 32]).expect("it may connect anew");
        assert!(callbacks.close(client, first).is_empty(), "that one has ended before");
        callbacks.call(client, 0, Bytes::new(), caller(6), 0).unwrap();
        assert_eq!(callbacks.leave(client).len(), 1);
        assert!(callbacks.close(client, second).is_empty());
        assert!(callbacks.call(client, 0, Bytes::new(), caller(7), 0).is_err());
    }

    #[test]
    fn calls_that_are_not_answered_are_bounded() {
        let callbacks = Callbacks::default();
        callbacks.register(ClientId(1), [1; 32]);
        let _stream = callbacks.open(&[1; 32]).unwrap();
        for tag in 0..CALLS_MAX as u64 {
            callbacks.call(ClientId(1), 0, Bytes::new(), caller(tag), 0).unwrap();
        }
        let refused = callbacks.call(ClientId(1), 0, Bytes::new(), caller(0), 0);
        assert_eq!(refused.unwrap_err().code, Code::ResourceExhausted);
    }
}
