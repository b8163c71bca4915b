//! Commands and launches of a client that are not dispatched yet: one FIFO queue per host.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::{BufferId, HostId};
use protocol::Command;
use smallvec::{SmallVec, smallvec};

use super::gangs::{Gang, Gangs};
use crate::submissions::TransferRole;

/// What waits in a queue.
#[derive(Debug)]
pub(super) enum Item {
    /// A command to the host alone.
    Command(Box<Command>, TransferRole),
    /// The launch of the gang with this number.
    Member(u64),
}

/// The queues of one client.
#[derive(Debug, Default)]
pub(super) struct ClientQueues {
    pub hosts: BTreeMap<HostId, VecDeque<Item>>,
    /// Gangs at the front of all their queues, in the client's order.
    pub ready: BTreeSet<u64>,
    /// Buffers on each host that were gathered ahead of the launches queued there.
    early: BTreeMap<HostId, BTreeSet<BufferId>>,
    /// Buffers of queued gathers that were inserted ahead of items queued before them.
    placed: BTreeSet<(HostId, BufferId)>,
    /// Number of items in all queues.
    pub length: usize,
}

impl ClientQueues {
    /// Returns the first item queued for a host.
    pub fn front(&self, host: HostId) -> Option<&Item> {
        self.hosts.get(&host).and_then(VecDeque::front)
    }

    /// Returns whether nothing is queued for a host.
    pub fn is_empty_at(&self, host: HostId) -> bool {
        self.hosts.get(&host).is_none_or(VecDeque::is_empty)
    }

    /// Returns the number of items queued for a host.
    pub fn length_at(&self, host: HostId) -> usize {
        self.hosts.get(&host).map_or(0, VecDeque::len)
    }

    /// Returns the hosts whose first item is a command.
    pub fn commands_in_front(&self) -> impl Iterator<Item = HostId> {
        let hosts = self.hosts.iter();
        let waiting = hosts.filter(|(_, queue)| matches!(queue.front(), Some(Item::Command(..))));
        waiting.map(|(&host, _)| host)
    }

    /// Returns the hosts whose first item is a receive of this transfer.
    pub fn receives_in_front(&self, transfer: u64) -> impl Iterator<Item = HostId> {
        let receives = TransferRole::Receives(transfer);
        let hosts = self.hosts.iter().filter(move |(_, queue)| {
            matches!(queue.front(), Some(Item::Command(_, link)) if *link == receives)
        });
        hosts.map(|(&host, _)| host)
    }

    /// Queues a command for a host: at the end, or behind what it must not overtake.
    pub fn insert(&mut self, host: HostId, command: Command, link: TransferRole, gangs: &Gangs) {
        let place = self.place(host, &command, gangs);
        self.length += 1;
        if let Command::AssembleShards { buffer, .. } = command {
            self.placed.insert((host, buffer));
        }
        let item = Item::Command(Box::new(command), link);
        self.hosts.entry(host).or_default().insert(place, item);
    }

    /// Appends a gang to the queue of each of its hosts.
    pub fn push_gang(&mut self, id: u64, gang: &mut Gang) {
        for member in &gang.members {
            let queue = self.hosts.entry(member.host).or_default();
            gang.first += usize::from(queue.is_empty());
            queue.push_back(Item::Member(id));
            self.length += 1;
        }
        if gang.is_in_front() {
            self.ready.insert(id);
        }
    }

    /// Removes a gang that is dispatched from the front of the queue of one of its hosts.
    pub fn pop_gang(&mut self, id: u64, host: HostId) {
        self.ready.remove(&id);
        let popped = self.hosts.get_mut(&host).and_then(VecDeque::pop_front);
        debug_assert!(matches!(popped, Some(Item::Member(first)) if first == id));
        self.length -= 1;
    }

    /// Removes the command at the front of the queue of a host.
    pub fn pop_command(&mut self, host: HostId, gangs: &Gangs) -> Command {
        let queue = self.hosts.get_mut(&host).expect("the caller has seen it");
        let Some(Item::Command(command, _)) = queue.pop_front() else {
            unreachable!("the caller has seen it")
        };
        self.length -= 1;
        if let Command::AssembleShards { buffer, .. } = *command
            && self.placed.remove(&(host, buffer))
        {
            let early = self.early.entry(host).or_default();
            if let Some(Item::Member(id)) = queue.front()
                && let Some(first) = gangs[id].first_buffer()
            {
                *early = early.split_off(&first);
            }
            early.insert(buffer);
        }
        *command
    }

    /// Removes all that is queued for a lost host.
    pub fn lose(&mut self, host: HostId) -> VecDeque<Item> {
        let Some(queue) = self.hosts.remove(&host) else { return VecDeque::new() };
        self.length -= queue.len();
        self.placed.retain(|placed| placed.0 != host);
        queue
    }

    /// Returns whether a command is independent of the launches queued for a host.
    pub fn overtakes(&mut self, host: HostId, command: &Command, gangs: &Gangs) -> bool {
        let Some(Item::Member(id)) = self.front(host) else { return false };
        let first = gangs[id].first_buffer();
        first.is_some_and(|first| self.may_overtake(host, first, command))
    }

    /// Returns whether a command may overtake the launches queued for a host, the first of which
    /// makes buffer `first`. Buffers are numbered in the order of requests, so those before `first`
    /// are made; the host still has them, since a client cannot ask for a buffer that a queued
    /// command frees or donates.
    fn may_overtake(&mut self, host: HostId, first: BufferId, command: &Command) -> bool {
        let early = self.early.entry(host).or_default();
        let is_made = |buffer: &BufferId| *buffer < first || early.contains(buffer);
        match command {
            Command::CheckReady { buffers, .. } => buffers.iter().all(is_made),
            Command::Read { buffer, .. } => is_made(buffer),
            Command::AssembleShards { buffer, shards, .. }
                if shards.iter().all(|s| is_made(&s.source)) =>
            {
                *early = early.split_off(&first);
                early.insert(*buffer);
                true
            }
            _ => false,
        }
    }

    /// Returns the position at which a command enters the queue for a host. A query, or a gather,
    /// which makes shards of an array to be queried, is inserted right behind the items that make
    /// its buffers; otherwise a client waiting for a result would wait for everything requested
    /// since. All else goes to the end. O(items overtaken).
    fn place(&self, host: HostId, command: &Command, gangs: &Gangs) -> usize {
        let Some(queue) = self.hosts.get(&host) else { return 0 };
        let asked: SmallVec<[BufferId; 4]> = match command {
            Command::CheckReady { buffers, .. } => buffers[..].into(),
            Command::Read { buffer, .. } => smallvec![*buffer],
            Command::AssembleShards { shards, .. } => {
                shards.iter().map(|shard| shard.source).collect()
            }
            _ => return queue.len(),
        };
        let is_early = |buffer| self.early.get(&host).is_some_and(|early| early.contains(buffer));
        let is_ahead = |buffer| is_early(buffer) || self.placed.contains(&(host, *buffer));
        let makes_others = |first: BufferId| asked.iter().all(|b| *b < first || is_ahead(b));
        let may_be_behind = |item: &&Item| match item {
            Item::Member(id) => gangs[id].first_buffer().is_some_and(makes_others),
            Item::Command(other, _) => {
                use Command::{CheckReady, Free, Read};
                matches!(**other, Free { .. } | CheckReady { .. } | Read { .. })
            }
        };
        // Never ahead of the front item: a gang counts its members at the front of their queues.
        queue.len() - queue.iter().skip(1).rev().take_while(may_be_behind).count()
    }
}
