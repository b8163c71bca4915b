//! Values of the buffers of a modelled host.

use std::collections::{BTreeMap, BTreeSet};

use base::{BufferId, HostId, Status, TransferTag};

/// Number of a value in its store.
pub(super) type Cell = usize;

/// State of a buffer: a number a shard that the host has, or how it will come to be.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Ready(Vec<i64>),
    Failed(Failure),
    /// Made of messages; some for each shard.
    Incoming(Vec<Vec<TransferTag>>),
    /// Shares shards of other buffers.
    Shared(Vec<(Cell, usize)>),
    /// The result of a computation over several hosts, named by its first result.
    Result(BufferId),
}

#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub error: Status,
    /// The controller has made errors of all that derives from it.
    pub is_noted: bool,
}

/// What is known of a value.
#[derive(Debug, Clone)]
pub(super) enum Known {
    /// Messages are missing.
    Missing,
    /// It is being computed.
    Computing,
    Ready(Vec<i64>),
    Failed(Failure),
}

/// Buffers and messages of one host process.
#[derive(Debug, Default)]
pub(super) struct Store {
    values: Vec<Value>,
    buffers: BTreeMap<BufferId, Cell>,
    freed: BTreeSet<BufferId>,
    /// Messages that arrived and were not taken.
    messages: BTreeMap<TransferTag, Result<i64, Status>>,
    /// Messages that are expected, and from where.
    expected: BTreeMap<TransferTag, HostId>,
    /// Smaller tags are of messages to an earlier process.
    first_tag: Option<TransferTag>,
    /// Messages that are dropped on arrival.
    discarded: BTreeSet<TransferTag>,
    /// Peers that were lost, messages that cannot come, and whether they are there again.
    lost: BTreeMap<HostId, (Status, TransferTag, bool)>,
    /// Results of computations that have ended.
    pub results: BTreeMap<BufferId, Vec<i64>>,
}

impl Store {
    /// Makes a buffer.
    ///
    /// # Errors
    /// There is such a buffer.
    pub fn make(&mut self, buffer: BufferId, value: Value) -> Result<Cell, String> {
        self.values.push(value);
        let cell = self.values.len() - 1;
        match self.buffers.insert(buffer, cell) {
            Some(_) => Err(format!("buffer {buffer} is made twice")),
            None => Ok(cell),
        }
    }

    /// Returns the value of a buffer.
    ///
    /// # Errors
    /// There is no such buffer.
    pub fn cell(&self, buffer: BufferId) -> Result<Cell, String> {
        let found = self.buffers.get(&buffer).copied();
        found.ok_or_else(|| format!("buffer {buffer} is used and is not there"))
    }

    /// Frees a buffer. One that is not there was to be made by a command that was dropped, since its
    /// client is gone.
    ///
    /// # Errors
    /// It is freed twice, or was made by an earlier process.
    pub fn free(&mut self, buffer: BufferId) -> Result<(), String> {
        self.buffers.remove(&buffer);
        if !self.freed.insert(buffer) {
            return Err(format!("buffer {buffer} is freed twice"));
        }
        match self.first_tag {
            Some(first) if buffer.0 < first.0 => {
                Err(format!("buffer {buffer} of an earlier process is freed"))
            }
            _ => Ok(()),
        }
    }

    /// Expects a message.
    pub fn expect(&mut self, tag: TransferTag, from: HostId) {
        if self.messages.contains_key(&tag) {
            return;
        }
        match self.lost.get(&from) {
            Some((error, first, is_back)) if !is_back || tag < *first => {
                self.messages.insert(tag, Err(error.clone()));
            }
            _ => drop(self.expected.insert(tag, from)),
        }
    }

    /// Drops a message, now or on arrival.
    pub fn discard(&mut self, tag: TransferTag) {
        self.expected.remove(&tag);
        if self.messages.remove(&tag).is_none() {
            self.discarded.insert(tag);
        }
    }

    /// Drops messages with smaller tags, now and on arrival.
    pub fn drop_before(&mut self, tag: TransferTag) {
        self.first_tag = Some(tag);
        self.messages.retain(|&known, _| known >= tag);
    }

    /// Delivers a message.
    pub fn arrive(&mut self, tag: TransferTag, content: Result<i64, Status>) {
        if self.first_tag.is_some_and(|first| tag < first) {
            return;
        }
        self.expected.remove(&tag);
        if !self.discarded.remove(&tag) {
            self.messages.entry(tag).or_insert(content);
        }
    }

    /// Returns a message that has arrived.
    pub fn message(&self, tag: TransferTag) -> Option<&Result<i64, Status>> {
        self.messages.get(&tag)
    }

    /// Notes that a host is lost; returns the messages that it owes.
    pub fn lose(&mut self, host: HostId, tag: TransferTag, error: &Status) -> Vec<TransferTag> {
        self.lost.insert(host, (error.clone(), tag, false));
        self.expected.iter().filter(|(_, from)| **from == host).map(|(tag, _)| *tag).collect()
    }

    /// A host is there, or there again; an older process than the one that was lost is not.
    pub fn find(&mut self, host: HostId, first_tag: TransferTag) {
        if let Some((_, first, is_back)) = self.lost.get_mut(&host)
            && first_tag >= *first
        {
            (*first, *is_back) = (first_tag, true);
        }
    }

    /// Whether the process that a message is from was lost: its receiver has an error.
    pub fn is_late(&self, tag: TransferTag, from: HostId) -> bool {
        self.lost.get(&from).is_some_and(|(_, first, _)| tag < *first)
    }

    /// Whether a host is lost.
    pub fn is_lost(&self, host: HostId) -> bool {
        self.lost.get(&host).is_some_and(|(_, _, is_back)| !is_back)
    }

    /// Returns what is known of a value; takes its messages if all have arrived or one has failed.
    pub fn know(&mut self, cell: Cell) -> Known {
        let known = match self.values[cell].clone() {
            Value::Ready(values) => return Known::Ready(values),
            Value::Failed(failure) => return Known::Failed(failure),
            Value::Result(gang) => match self.results.get(&gang) {
                Some(values) => return Known::Ready(values.clone()),
                None => return Known::Computing,
            },
            Value::Incoming(shards) => self.put_together(&shards),
            Value::Shared(sources) => self.share(&sources),
        };
        match &known {
            Known::Ready(values) => self.values[cell] = Value::Ready(values.clone()),
            Known::Failed(failure) => self.values[cell] = Value::Failed(failure.clone()),
            Known::Missing | Known::Computing => {}
        }
        known
    }

    fn put_together(&mut self, shards: &[Vec<TransferTag>]) -> Known {
        let tags = || shards.iter().flatten().copied();
        let failed = tags().find_map(|tag| match self.messages.get(&tag) {
            Some(Err(error)) => Some(error.clone()),
            _ => None,
        });
        if let Some(error) = failed {
            tags().for_each(|tag| self.discard(tag));
            return Known::Failed(Failure { error, is_noted: false });
        }
        if tags().any(|tag| !self.messages.contains_key(&tag)) {
            return Known::Missing;
        }
        let values = shards.iter().map(|tags| {
            let taken = tags.iter().map(|tag| self.messages.remove(tag).expect("seen above"));
            let numbers: BTreeSet<i64> = taken.map(|taken| taken.expect("seen above")).collect();
            // Pieces of one shard are of one number.
            if numbers.len() == 1 { *numbers.first().expect("there is one") } else { i64::MIN }
        });
        Known::Ready(values.collect())
    }

    fn share(&mut self, sources: &[(Cell, usize)]) -> Known {
        let mut values = Vec::new();
        let mut worst = None;
        for &(cell, shard) in sources {
            match self.know(cell) {
                Known::Ready(found) => values.push(found[shard]),
                Known::Failed(failure) => return Known::Failed(failure),
                Known::Missing => worst = Some(Known::Missing),
                Known::Computing => worst = worst.or(Some(Known::Computing)),
            }
        }
        worst.unwrap_or(Known::Ready(values))
    }

    /// Notes that the controller has made errors of all that derives from a value.
    pub fn note(&mut self, cell: Cell) {
        if let Value::Failed(failure) = &mut self.values[cell] {
            failure.is_noted = true;
        }
    }

    /// Discards the messages of buffers that were dropped before they were made.
    pub fn collect(&mut self) {
        let mut live: BTreeSet<Cell> = self.buffers.values().copied().collect();
        for cell in (0..self.values.len()).rev() {
            if let (true, Value::Shared(sources)) = (live.contains(&cell), &self.values[cell]) {
                live.extend(sources.iter().map(|source| source.0));
            }
        }
        for cell in 0..self.values.len() {
            let Value::Incoming(shards) = &self.values[cell] else { continue };
            if !live.contains(&cell) {
                let tags: Vec<TransferTag> = shards.iter().flatten().copied().collect();
                tags.into_iter().for_each(|tag| self.discard(tag));
                self.values[cell] = Value::Ready(Vec::new());
            }
        }
    }

    /// Returns what is left, if anything.
    pub fn left(&self) -> Option<String> {
        let (buffers, messages): (Vec<_>, Vec<_>) =
            (self.buffers.keys().collect(), self.messages.keys().collect());
        if buffers.is_empty() && messages.is_empty() {
            return None;
        }
        Some(format!("buffers {buffers:?} and messages {messages:?}"))
    }
}
