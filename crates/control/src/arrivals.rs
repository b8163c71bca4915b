//! Arrays on their way from other hosts, and which launches must wait for them.
//!
//! A host hands launches to its devices in the island's one order, so a launch whose input has not
//! come holds up all launches behind it, whatever client they are of. Where several clients share an
//! island, a launch is therefore issued only once its hosts have what others send for it. A client that
//! has an island to itself needs no such round trip: its launches wait on the host.

use base::{BufferId, ClientId, HostId, IslandId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::command::Command;

/// What each host still expects from others.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// For whom.
    expected: FxHashMap<(HostId, BufferId), ClientId>,
    /// Clients that have used each island.
    users: FxHashMap<IslandId, SmallVec<[ClientId; 4]>>,
}

impl Arrivals {
    /// A client uses an island.
    pub fn note_user(&mut self, island: IslandId, client: ClientId) {
        let users = self.users.entry(island).or_default();
        if !users.contains(&client) {
            users.push(client);
        }
    }

    /// Do several clients use an island?
    pub fn is_shared(&self, island: IslandId) -> bool {
        self.users.get(&island).is_some_and(|users| users.len() > 1)
    }

    /// A host has been told to report when it has this buffer.
    pub fn expect(&mut self, host: HostId, buffer: BufferId, client: ClientId) {
        self.expected.insert((host, buffer), client);
    }

    /// A host has a buffer, or the error that it became; returns for whom.
    pub fn arrived(&mut self, host: HostId, buffer: BufferId) -> Option<ClientId> {
        self.expected.remove(&(host, buffer))
    }

    /// Must a command wait for what its host expects?
    pub fn delay(&self, host: HostId, command: &Command) -> bool {
        if self.expected.is_empty() {
            return false;
        }
        let is_expected = |buffer: &BufferId| self.expected.contains_key(&(host, *buffer));
        match command {
            Command::Launch { args, .. } | Command::Exchange { args, .. } => {
                args.iter().any(is_expected)
            }
            Command::Run { args, .. } => args.iter().any(is_expected),
            Command::CheckReady { buffers, .. } => buffers.iter().any(is_expected),
            Command::Gather { shards, .. } => shards.iter().any(|shard| is_expected(&shard.1)),
            Command::Copy { source, .. }
            | Command::Bitcast { source, .. }
            | Command::Send { source, .. }
            | Command::Read { buffer: source, .. } => is_expected(source),
            _ => false,
        }
    }

    /// A client is gone.
    pub fn drop_client(&mut self, client: ClientId) {
        self.expected.retain(|_, of| *of != client);
        for users in self.users.values_mut() {
            users.retain(|user| *user != client);
        }
    }

    /// A host is lost: nothing comes there any more.
    pub fn lose(&mut self, host: HostId) {
        self.expected.retain(|(at, _), _| *at != host);
    }
}
