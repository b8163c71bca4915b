//! The controller's state of each host, and its flow control: how much work it may have in flight.
//!
//! Launches sent to a host cannot be cancelled or reordered, so it has just enough in flight to
//! hide the dispatch latency: `AHEAD` of estimated run time, and at most as many launches as the
//! window. Some launches request an acknowledgement when they finish; the time since the last
//! acknowledgement corrects the estimates. Short launches that nothing follows are acknowledged at
//! the next tick.

use std::collections::VecDeque;

use base::{ClientId, ExecutableId, IslandId, Nanos, Status, TransferTag};
use protocol::HostInfo;
use smallvec::SmallVec;

use protocol::{Acknowledge, Command};

/// Estimated work that a host may have in flight.
const AHEAD: Nanos = Nanos(20_000_000);
/// Estimated work after which a host must send an acknowledgement.
const ASK_AFTER: Nanos = Nanos(1_000_000);
/// The same for launches of one program by an island's only client with at least `BACKLOG` of work
/// in flight: no client's share has to be measured, no pause between launches is mistaken for work,
/// and each acknowledgement costs host and controller 40 us, which the threads of CPU devices need.
const ASK_AFTER_ALIKE: Nanos = Nanos(5_000_000);
const BACKLOG: Nanos = Nanos(10_000_000);
/// Launches that a host may have in flight however long they are: one running, one ready.
const LEAST_LAUNCHES: u32 = 2;

/// Launches of one program by one client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchShare {
    pub client: ClientId,
    pub executable: ExecutableId,
    /// Number of the host's devices that it runs on.
    pub devices: u32,
    pub launches: u32,
    /// Run time of all of them as expected without measurements.
    pub expected: Nanos,
    /// Run time of all of them as estimated with measurements.
    pub estimate: Nanos,
    /// Whether a run of the program was ever measured.
    pub is_measured: bool,
}

/// A batch of launches, the last of which the host acknowledges.
#[derive(Debug, Clone, Default)]
pub(crate) struct Batch {
    pub launches: u32,
    pub estimate: Nanos,
    pub parts: SmallVec<[LaunchShare; 2]>,
}

impl Batch {
    fn add(&mut self, part: LaunchShare) {
        self.launches += part.launches;
        self.estimate += part.estimate;
        let same = |known: &&mut LaunchShare| {
            known.client == part.client && known.executable == part.executable
        };
        match self.parts.iter_mut().find(same) {
            Some(known) => {
                known.launches += part.launches;
                known.expected += part.expected;
                known.estimate += part.estimate;
            }
            None => self.parts.push(part),
        }
    }
}

/// How often a host acknowledges launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reporting {
    /// Every launch, once it is enqueued on the devices; its client's next launch waits for that.
    Each,
    /// Often, as several clients share the island.
    Often,
    /// Seldom while much work is in flight, as the island has one client.
    Seldom,
}

/// State of one host.
#[derive(Debug)]
pub(crate) struct HostState {
    pub info: Option<HostInfo>,
    pub lost: Option<Status>,
    pub island: IslandId,
    /// Messages with smaller tags are for an earlier process of it.
    pub first_tag: TransferTag,
    /// Sequence number of the last launch issued to it.
    last_launch: u64,
    /// Launches in flight: issued and not yet acknowledged.
    before: Batch,
    /// Launches issued since the last one that must be acknowledged.
    unasked: Batch,
    /// Batches that await an acknowledgement, the oldest first.
    asked: VecDeque<Batch>,
    /// Number of acknowledgements received.
    reports: u64,
    /// Whether a gang waits for window space here.
    pub wanted: bool,
}

impl HostState {
    pub fn new(island: IslandId) -> Self {
        Self {
            info: None,
            first_tag: TransferTag(0),
            lost: None,
            island,
            last_launch: 0,
            before: Batch::default(),
            unasked: Batch::default(),
            asked: VecDeque::new(),
            reports: 0,
            wanted: false,
        }
    }

    /// Returns whether another launch may be issued to it.
    pub fn has_window(&self, window: u32) -> bool {
        let Batch { launches, estimate, .. } = &self.before;
        *launches < LEAST_LAUNCHES.min(window) || (*launches < window && *estimate < AHEAD)
    }

    /// Returns the number of acknowledgements received.
    pub fn reports(&self) -> u64 {
        self.reports
    }

    /// Returns the last launch of the oldest unacknowledged batch; those before it in the batch are
    /// short.
    pub fn first_unfinished(&self) -> Option<&LaunchShare> {
        self.asked.front()?.parts.last()
    }

    /// Returns whether to request an acknowledgement of short launches that nothing follows, and
    /// registers them as a batch.
    pub fn ask_about_rest(&mut self) -> bool {
        let asks = self.asked.is_empty() && self.unasked.launches > 0;
        if asks {
            self.asked.push_back(std::mem::take(&mut self.unasked));
        }
        asks
    }

    /// Returns the number of launches issued and not yet acknowledged.
    pub fn in_flight(&self) -> u32 {
        self.before.launches
    }

    /// Prepares a launch for dispatch: fills in its sequence number, its predecessor, and whether
    /// to acknowledge it. Returns whether the command is a launch; hosts acknowledge nothing else.
    ///
    /// # Arguments
    /// - `number`: sequence number in the launch order of its island.
    /// - `reporting`: how often to acknowledge.
    pub fn issue(
        &mut self,
        command: &mut Command,
        number: u64,
        part: LaunchShare,
        window: u32,
        reporting: Reporting,
    ) -> bool {
        let (Command::Launch { sequence, previous, acknowledge, .. }
        | Command::RunProgram { sequence, previous, acknowledge, .. }) = command
        else {
            return false;
        };
        *sequence = number;
        *previous = std::mem::replace(&mut self.last_launch, number);
        self.before.launches += part.launches;
        self.before.estimate += part.estimate;
        self.unasked.add(part);
        let is_alike = self.unasked.parts.len() == 1 && self.before.estimate >= BACKLOG;
        let seldom = reporting == Reporting::Seldom && is_alike;
        let ask_after = if seldom { ASK_AFTER_ALIKE } else { ASK_AFTER };
        // A full window without an outstanding acknowledgement would never open again.
        let asks = reporting == Reporting::Each
            || !part.is_measured
            || self.unasked.estimate >= ask_after
            || self.unasked.launches >= (window / 4).max(1)
            || !self.has_window(window);
        if asks {
            self.asked.push_back(std::mem::take(&mut self.unasked));
        }
        *acknowledge = match (asks, reporting) {
            (false, _) => Acknowledge::No,
            (true, Reporting::Each) => Acknowledge::Enqueued,
            (true, Reporting::Often | Reporting::Seldom) => Acknowledge::Finished,
        };
        true
    }

    /// Receives the acknowledgement of the oldest batch and returns it.
    pub fn finished(&mut self) -> Option<Batch> {
        let batch = self.asked.pop_front()?;
        self.reports += 1;
        self.before.launches -= batch.launches;
        self.before.estimate = self.before.estimate.since(batch.estimate);
        if self.before.launches == 0 {
            self.before.estimate = Nanos(0);
        }
        Some(batch)
    }
}
