//! Relays: messages that this process forwards to other hosts.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use base::{Channel, HostId, TransferTag};
use parking_lot::Mutex;

use super::Inner;
use super::inbox::ReceiveResult;

/// Idle time after which a relay thread ends.
const IDLE: Duration = Duration::from_secs(5);

/// Where to forward one message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelayJob {
    pub from: HostId,
    pub onward: TransferTag,
    pub to: HostId,
    pub channel: Channel,
}

/// Queue of the relay thread of one channel and host.
type Line = Sender<(RelayJob, ReceiveResult)>;

/// Messages to be forwarded, on arrival or now.
#[derive(Debug, Default)]
pub(crate) struct Relays {
    /// Relays whose message has not arrived, by its tag.
    pub open: Mutex<HashMap<TransferTag, Vec<RelayJob>>>,
    /// Queues by channel and target host: messages of a queue are forwarded in the order of arrival.
    lines: Mutex<HashMap<(Channel, HostId), Line>>,
}

impl Relays {
    /// Returns the messages to be relayed that are expected from a host.
    pub fn owed_by(&self, host: HostId) -> Vec<TransferTag> {
        let open = self.open.lock();
        let is_owed = |relays: &Vec<RelayJob>| relays.iter().any(|relay| relay.from == host);
        open.iter().filter(|(_, relays)| is_owed(relays)).map(|(&tag, _)| tag).collect()
    }
}

impl Inner {
    /// Queues a message, or its failure, to be forwarded.
    pub(crate) fn pass_on(self: &Arc<Self>, relay: RelayJob, outcome: ReceiveResult) {
        let line = (relay.channel, relay.to);
        let mut lines = self.relays.lines.lock();
        // A thread removes its queue when it ends, unless it has panicked.
        let unsent = match lines.get(&line).map(|sender| sender.send((relay, outcome.clone()))) {
            Some(Ok(())) => return,
            Some(Err(unsent)) => unsent.0,
            None => (relay, outcome),
        };
        let (sender, waiting) = channel();
        sender.send(unsent).expect("its other end is here");
        let inner = Arc::downgrade(self);
        std::thread::spawn(move || carry(&inner, line, &waiting));
        lines.insert(line, sender);
    }

    fn carry_one(&self, relay: RelayJob, outcome: &ReceiveResult) {
        let (to, onward) = (relay.to, relay.onward);
        let sent = match outcome {
            Ok(payload) => self.send(to, relay.channel, onward, payload.as_ref()),
            Err(error) => Err(error.clone()),
        };
        let Err(error) = sent else { return };
        if let Err(error) = self.to_peer(to, |peer| peer.send_failure(onward, &error)) {
            tracing::warn!(%error, "a message could not be passed on");
        }
    }
}

/// Forwards the messages of one queue.
fn carry(
    inner: &Weak<Inner>,
    line: (Channel, HostId),
    waiting: &Receiver<(RelayJob, ReceiveResult)>,
) {
    loop {
        let next = match waiting.recv_timeout(IDLE) {
            Ok(next) => next,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let Some(inner) = inner.upgrade() else { return };
                let mut lines = inner.relays.lines.lock();
                let Ok(next) = waiting.try_recv() else {
                    lines.remove(&line);
                    return;
                };
                next
            }
        };
        let Some(inner) = inner.upgrade() else { return };
        inner.carry_one(next.0, &next.1);
    }
}
