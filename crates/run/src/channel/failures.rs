//! Messages that never come: their receivers have an error instead.

use std::sync::Arc;

use base::{Code, HostId, Status, TransferTag};

use super::detour::TakeFailure;
use super::inbox::ReceiveResult;
use super::relays::{Forward, RelayJob, Relays};
use super::{CONTROLLER, DataPlane, Inner};

impl DataPlane {
    /// Removes a peer and fails the messages that are still expected from it; those with tags below
    /// `tag` never arrive.
    pub fn lose_peer(&self, host: HostId, tag: TransferTag, error: &Status) {
        self.0.lose_peer(host, tag, error);
    }

    /// Whether a host is a peer: it has been registered, and not been lost since.
    pub fn is_peer(&self, host: HostId) -> bool {
        self.0.is_peer(host)
    }

    /// Messages of a peer with smaller tags never arrive. Returns whether those from there on may.
    pub fn begins_at(&self, host: HostId, tag: TransferTag) -> bool {
        self.0.raise_first_tag(host, tag) == tag
    }

    /// Sets what takes failures of messages to peers that are not reached, once.
    pub fn on_undelivered(&self, take: Box<TakeFailure>) {
        self.0.detour.set(take);
    }

    /// Reports to the receiver that a message has failed and will never arrive; to one that is not
    /// reached, by what [`DataPlane::on_undelivered`] has set.
    ///
    /// # Errors
    /// The peer is unknown or lost, or unreachable and there is no other way.
    pub fn send_failure(&self, to: HostId, tag: TransferTag, error: &Status) -> Result<(), Status> {
        if to == self.0.credentials.me {
            self.0.arrive(tag, Err(error.clone()));
            return Ok(());
        }
        self.0.send_failure(to, tag, error)
    }

    /// Reports to a peer that a host is lost: messages that it expects from that host, and all with
    /// tags below `tag`, fail with this error.
    ///
    /// # Errors
    /// The peer is unknown or unreachable.
    pub fn send_loss(
        &self,
        to: HostId,
        (lost, tag): (HostId, TransferTag),
        error: &Status,
    ) -> Result<(), Status> {
        self.0.to_peer(to, |peer| peer.send_loss(lost, tag, error))
    }
}

impl Inner {
    fn is_peer(&self, host: HostId) -> bool {
        self.peers.read().contains_key(&host)
    }

    fn send_failure(&self, to: HostId, tag: TransferTag, error: &Status) -> Result<(), Status> {
        let detour = self.detour.get();
        let sent = self.to_peer(to, |peer| peer.send_failure(tag, error, detour.is_none()));
        match detour {
            Some(take) if sent.is_err() && self.is_peer(to) => {
                take(to, tag, error);
                Ok(())
            }
            _ => sent,
        }
    }

    /// Returns why a host is not a peer.
    pub(super) fn gone(&self, host: HostId) -> Status {
        let unknown = || format!("host {host} is not reachable on the data plane");
        let lost = self.lost.lock().get(&host).cloned();
        lost.unwrap_or_else(|| Status::new(Code::Unavailable, unknown()))
    }

    /// Returns why a message of a host cannot arrive, if that is so.
    pub(super) fn never_comes(&self, tag: TransferTag, from: HostId) -> Option<Status> {
        if from == self.credentials.me || from == CONTROLLER {
            return None;
        }
        let may_come = self.is_peer(from) && !self.is_of_earlier(tag, from);
        (!may_come).then(|| self.gone(from))
    }

    /// Whether an earlier process of a peer was to send this message.
    pub(super) fn is_of_earlier(&self, tag: TransferTag, from: HostId) -> bool {
        self.first_tags.read().get(&from).is_some_and(|&first| tag < first)
    }

    /// Notes that messages of a peer with smaller tags never arrive; returns the least that may.
    pub(super) fn raise_first_tag(&self, host: HostId, tag: TransferTag) -> TransferTag {
        let mut first_tags = self.first_tags.write();
        let first = first_tags.entry(host).or_insert(tag);
        *first = tag.max(*first);
        *first
    }

    pub(super) fn lose_peer(self: &Arc<Self>, host: HostId, tag: TransferTag, error: &Status) {
        self.raise_first_tag(host, tag);
        let lost = self.peers.write().remove(&host);
        lost.inspect(|peer| peer.give_up());
        self.lost.lock().insert(host, error.clone());
        self.segments.lock().retain(|(from, _), _| *from != host);
        self.partial.lock().retain(|_, partial| partial.from != host);
        self.inbox.lose(host, error);
        self.excuse(host, error);
    }

    /// Fails the messages of a lost host that were to be relayed.
    fn excuse(self: &Arc<Self>, lost: HostId, error: &Status) {
        for tag in self.relays.owed_by(lost) {
            self.arrive(tag, Err(error.clone()));
        }
    }
}

impl Forward for Inner {
    fn relays(&self) -> &Relays {
        &self.relays
    }

    fn forward(&self, relay: RelayJob, outcome: &ReceiveResult) {
        let (to, onward) = (relay.to, relay.onward);
        let sent = match outcome {
            Ok(payload) => self.send(to, relay.channel, onward, payload.as_ref()),
            Err(error) => Err(error.clone()),
        };
        let Err(error) = sent else { return };
        if let Err(error) = self.send_failure(to, onward, &error) {
            tracing::debug!(%error, "the receiver of a message that is not relayed is lost");
        }
    }
}
