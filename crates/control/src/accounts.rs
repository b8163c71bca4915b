//! Fair sharing of device time: what each client is entitled to, and what it has used.
//!
//! Start-time fair queueing: a client's virtual time on an island grows by the device time of its
//! launches divided by its weight, and the client with the least virtual time is scheduled next. A
//! client that was idle restarts at the island's virtual time, so that it cannot accumulate credit;
//! when an island becomes idle, its virtual time advances to the maximum of its clients', so that
//! no client is penalised for time that no other client wanted.

use std::collections::BTreeMap;

use base::{Bytes, ClientId, IslandId, Nanos};

/// A client's weight and priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Its relative share of device time among backlogged clients of the same priority.
    pub weight: u32,
    /// Clients of a higher priority are always scheduled first.
    pub priority: i32,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 1, priority: 0 }
    }
}

/// Account of one client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Account {
    pub share: Share,
    /// Virtual time on each island, in nanoseconds per unit of weight.
    virtual_time: BTreeMap<IslandId, f64>,
    /// Device time used, summed over devices.
    pub device_time: Nanos,
    /// Bytes transferred for it, between hosts and between hosts and the client.
    pub moved: Bytes,
}

/// Accounts of all clients.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    accounts: BTreeMap<ClientId, Account>,
    /// Virtual time of each island: that of the last launch issued to it.
    now: BTreeMap<IslandId, f64>,
}

/// Scheduling rank of a client: the least comes first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rank {
    priority: i32,
    virtual_time: f64,
}

impl Rank {
    pub fn compare(&self, other: &Self) -> std::cmp::Ordering {
        let first = other.priority.cmp(&self.priority);
        first.then(self.virtual_time.total_cmp(&other.virtual_time))
    }
}

impl Accounts {
    pub fn open(&mut self, client: ClientId, share: Share) {
        self.accounts.insert(client, Account { share, ..Account::default() });
    }

    pub fn close(&mut self, client: ClientId) {
        self.accounts.remove(&client);
    }

    pub fn get(&self, client: ClientId) -> Option<&Account> {
        self.accounts.get(&client)
    }

    /// A client that was idle on an island is backlogged again.
    pub fn reactivate(&mut self, client: ClientId, island: IslandId) {
        let now = self.now.get(&island).copied().unwrap_or_default();
        if let Some(account) = self.accounts.get_mut(&client) {
            let time = account.virtual_time.entry(island).or_default();
            *time = time.max(now);
        }
    }

    /// Returns the rank of a client that wants to launch on these islands at once.
    pub fn rank(&self, client: ClientId, islands: &[IslandId]) -> Rank {
        let Some(account) = self.accounts.get(&client) else {
            return Rank { priority: i32::MAX, virtual_time: 0.0 };
        };
        let times = islands.iter().filter_map(|island| account.virtual_time.get(island));
        Rank { priority: account.share.priority, virtual_time: times.copied().fold(0.0, f64::max) }
    }

    /// Charges a client for a launch; `cost` is its estimated device time on the island.
    pub fn charge(&mut self, client: ClientId, island: IslandId, cost: Nanos) {
        let Some(account) = self.accounts.get_mut(&client) else { return };
        let time = account.virtual_time.entry(island).or_default();
        let now = self.now.entry(island).or_default();
        *now = now.max(*time);
        *time += cost.0 as f64 / f64::from(account.share.weight.max(1));
    }

    /// An island is idle: its virtual time advances to the maximum of its clients'.
    pub fn sync_virtual_time(&mut self, island: IslandId) {
        let times = self.accounts.values().filter_map(|account| account.virtual_time.get(&island));
        let now = self.now.entry(island).or_default();
        *now = times.copied().fold(*now, f64::max);
    }

    /// Adds device time, summed over devices, to what a client has used.
    pub fn note_use(&mut self, client: ClientId, time: Nanos) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.device_time += time;
        }
    }

    /// Adds bytes transferred for a client.
    pub fn note_moved(&mut self, client: ClientId, bytes: Bytes) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.moved += bytes;
        }
    }

    /// Corrects a charge by the measured device time.
    pub fn settle(&mut self, client: ClientId, island: IslandId, estimate: Nanos, actual: Nanos) {
        let Some(account) = self.accounts.get_mut(&client) else { return };
        let time = account.virtual_time.entry(island).or_default();
        let off = actual.0 as f64 - estimate.0 as f64;
        *time += off / f64::from(account.share.weight.max(1));
    }
}
