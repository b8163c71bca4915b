//! Relays: messages that this process forwards to other hosts.

use std::collections::HashMap;
use std::sync::Arc;

use base::{Channel, HostId, TransferTag};
use parking_lot::Mutex;

use super::inbox::ReceiveResult;
use crate::queues::Queues;

/// Where to forward one message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelayJob {
    pub from: HostId,
    pub onward: TransferTag,
    pub to: HostId,
    pub channel: Channel,
}

/// Messages to be forwarded, on arrival or now.
#[derive(Debug, Default)]
pub(crate) struct Relays {
    /// Relays whose message has not arrived, by its tag.
    pub open: Mutex<HashMap<TransferTag, Vec<RelayJob>>>,
    /// Queues by channel and target host: messages of a queue are forwarded in the order of arrival.
    queues: Queues<(Channel, HostId), (RelayJob, ReceiveResult)>,
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
    let weak = Arc::downgrade(owner);
    let forward = move |(relay, outcome): (RelayJob, ReceiveResult)| {
        if let Some(owner) = weak.upgrade() {
            owner.forward(relay, &outcome);
        }
    };
    owner.relays().queues.submit((relay.channel, relay.to), (relay, outcome), forward);
}
