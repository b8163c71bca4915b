//! Arrivals of arrays from other hosts, and the launches that must wait for them.
//!
//! A host enqueues launches on its devices in the island's launch order, so a launch whose input
//! has not arrived blocks all launches behind it, of any client (head-of-line blocking). Where
//! several clients share an island, a launch is therefore issued only once its inputs have arrived
//! at its hosts. A client that has an island to itself needs no such round trip: its launches wait
//! on the host.

use base::{BufferId, ClientId, HostId, IslandId};
use protocol::Command;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Buffers that each host still expects from others.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// The client of each expected buffer.
    expected: FxHashMap<(HostId, BufferId), ClientId>,
    /// Clients that have used each island.
    users: FxHashMap<IslandId, SmallVec<[ClientId; 4]>>,
}

impl Arrivals {
    /// Notes that a client uses an island.
    pub fn note_user(&mut self, island: IslandId, client: ClientId) {
        let users = self.users.entry(island).or_default();
        if !users.contains(&client) {
            users.push(client);
        }
    }

    /// Returns whether several clients use an island.
    pub fn is_shared(&self, island: IslandId) -> bool {
        self.users.get(&island).is_some_and(|users| users.len() > 1)
    }

    /// Notes that a host will report the arrival of this buffer.
    pub fn expect(&mut self, host: HostId, buffer: BufferId, client: ClientId) {
        self.expected.insert((host, buffer), client);
    }

    /// Notes that a buffer, or the error that it became, has arrived at a host; returns its client.
    pub fn arrived(&mut self, host: HostId, buffer: BufferId) -> Option<ClientId> {
        self.expected.remove(&(host, buffer))
    }

    /// Returns whether a command must wait for a buffer that its host expects.
    pub fn delay(&self, host: HostId, command: &Command) -> bool {
        if self.expected.is_empty() {
            return false;
        }
        let is_expected = |buffer: &BufferId| self.expected.contains_key(&(host, *buffer));
        match command {
            Command::Launch { args, .. } | Command::RunExchange { args, .. } => {
                args.iter().any(is_expected)
            }
            // A thread of its own waits for the arguments of a Python function.
            Command::RunColocated { .. } => false,
            Command::RunProgram { args, .. } => args.iter().any(is_expected),
            Command::CheckReady { buffers, .. } => buffers.iter().any(is_expected),
            Command::AssembleShards { shards, .. } => {
                shards.iter().any(|shard| is_expected(&shard.source))
            }
            Command::Copy { source, .. }
            | Command::Bitcast { source, .. }
            | Command::Send { source, .. }
            | Command::Read { buffer: source, .. } => is_expected(source),
            _ => false,
        }
    }

    /// A client has disconnected.
    pub fn drop_client(&mut self, client: ClientId) {
        self.expected.retain(|_, of| *of != client);
        for users in self.users.values_mut() {
            users.retain(|user| *user != client);
        }
    }

    /// A host is lost: it expects nothing any more.
    pub fn lose(&mut self, host: HostId) {
        self.expected.retain(|(at, _), _| *at != host);
    }
}
