//! What each client is entitled to, and what it has had.
//!
//! Start-time fair queueing: a client's virtual time on an island grows by the device time it is
//! given, divided by its weight, and whoever has the least goes next. One that was idle starts
//! where the others are, so that it cannot save up; and when all were idle, all start there, so that
//! nobody pays for time that no other wanted.

use std::collections::BTreeMap;

use base::{Bytes, ClientId, IslandId, Nanos};

/// What a client is entitled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Its part of the device time among clients of one priority that want more than they get.
    pub weight: u32,
    /// Clients of a higher priority always go first.
    pub priority: i32,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 1, priority: 0 }
    }
}

/// One client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Account {
    pub share: Share,
    /// Nanoseconds per unit of weight, on each island.
    virtual_time: BTreeMap<IslandId, f64>,
    /// Device time it has had: the sum over devices.
    pub device_time: Nanos,
    /// What was moved for it, between hosts and between them and it.
    pub moved: Bytes,
}

/// All clients.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    accounts: BTreeMap<ClientId, Account>,
    /// Virtual time of the launch that was last given to each island.
    now: BTreeMap<IslandId, f64>,
}

/// The order of clients that want to launch: the least goes first.
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

    /// A client that wanted nothing of an island wants something now.
    pub fn wake(&mut self, client: ClientId, island: IslandId) {
        let now = self.now.get(&island).copied().unwrap_or_default();
        if let Some(account) = self.accounts.get_mut(&client) {
            let time = account.virtual_time.entry(island).or_default();
            *time = time.max(now);
        }
    }

    /// Where a client stands that wants to launch on these islands at once.
    pub fn rank(&self, client: ClientId, islands: &[IslandId]) -> Rank {
        let Some(account) = self.accounts.get(&client) else {
            return Rank { priority: i32::MAX, virtual_time: 0.0 };
        };
        let times = islands.iter().filter_map(|island| account.virtual_time.get(island));
        Rank { priority: account.share.priority, virtual_time: times.copied().fold(0.0, f64::max) }
    }

    /// A client is given a launch; `cost` is its estimated device time on the island.
    pub fn charge(&mut self, client: ClientId, island: IslandId, cost: Nanos) {
        let Some(account) = self.accounts.get_mut(&client) else { return };
        let time = account.virtual_time.entry(island).or_default();
        let now = self.now.entry(island).or_default();
        *now = now.max(*time);
        *time += cost.0 as f64 / f64::from(account.share.weight.max(1));
    }

    /// Nobody wants anything of an island any more.
    pub fn rest(&mut self, island: IslandId) {
        let times = self.accounts.values().filter_map(|account| account.virtual_time.get(&island));
        let now = self.now.entry(island).or_default();
        *now = times.copied().fold(*now, f64::max);
    }

    /// A client has had so much device time, summed over devices.
    pub fn note_use(&mut self, client: ClientId, time: Nanos) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.device_time += time;
        }
    }

    /// So much is moved for a client.
    pub fn note_moved(&mut self, client: ClientId, bytes: Bytes) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.moved += bytes;
        }
    }

    /// What was guessed has been measured.
    pub fn settle(&mut self, client: ClientId, island: IslandId, estimate: Nanos, actual: Nanos) {
        let Some(account) = self.accounts.get_mut(&client) else { return };
        let time = account.virtual_time.entry(island).or_default();
        let off = actual.0 as f64 - estimate.0 as f64;
        *time += off / f64::from(account.share.weight.max(1));
    }
}
