//! Relays: messages that this process forwards to other hosts.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use base::{Channel, HostId, TransferTag};
use parking_lot::Mutex;

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

/// What sends the messages that are relayed.
pub(crate) trait Forward: Send + Sync + 'static {
    /// The messages to be forwarded.
    fn relays(&self) -> &Relays;

    /// Sends a message, or its failure, onward.
    fn forward(&self, relay: RelayJob, outcome: &ReceiveResult);
}

impl Relays {
    /// Returns the messages to be relayed that are expected from a host.
    pub fn owed_by(&self, host: HostId) -> Vec<TransferTag> {
        let open = self.open.lock();
        let is_owed = |relays: &Vec<RelayJob>| relays.iter().any(|relay| relay.from == host);
        open.iter().filter(|(_, relays)| is_owed(relays)).map(|(&tag, _)| tag).collect()
    }
}

/// Queues a message, or its failure, to be forwarded.
pub(crate) fn pass_on<F: Forward>(owner: &Arc<F>, relay: RelayJob, outcome: ReceiveResult) {
    let line = (relay.channel, relay.to);
    let mut lines = owner.relays().lines.lock();
    // A thread removes its queue when it ends, unless it has panicked.
    let unsent = match lines.get(&line).map(|sender| sender.send((relay, outcome.clone()))) {
        Some(Ok(())) => return,
        Some(Err(unsent)) => unsent.0,
        None => (relay, outcome),
    };
    let (sender, waiting) = channel();
    sender.send(unsent).expect("its other end is here");
    let weak = Arc::downgrade(owner);
    std::thread::spawn(move || carry(&weak, line, &waiting));
    lines.insert(line, sender);
}

/// Forwards the messages of one queue.
fn carry<F: Forward>(
    owner: &Weak<F>,
    line: (Channel, HostId),
    waiting: &Receiver<(RelayJob, ReceiveResult)>,
) {
    loop {
        let next = match waiting.recv_timeout(IDLE) {
            Ok(next) => next,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let Some(owner) = owner.upgrade() else { return };
                let mut lines = owner.relays().lines.lock();
                let Ok(next) = waiting.try_recv() else {
                    lines.remove(&line);
                    return;
                };
                next
            }
        };
        let Some(owner) = owner.upgrade() else { return };
        owner.forward(next.0, &next.1);
    }
}
