//! What the controller knows of each host, and how much work it may have before it.
//!
//! What a host has been given cannot be taken back or reordered, so it is given just enough to
//! hide the way there: `AHEAD` of estimated run time, and never more launches than the window.
//! Every so often a launch asks its host to say when it has finished; how long the work since the
//! last such word took corrects the estimates. Short launches that nothing follows are asked about
//! at the next tick.

use std::collections::VecDeque;

use base::{ClientId, ExecutableId, IslandId, Nanos, Status};
use smallvec::SmallVec;

use crate::command::{Acknowledge, Command};
use crate::protocol::HostInfo;

/// Estimated work that a host may have before it.
const AHEAD: Nanos = Nanos(20_000_000);
/// Estimated work after which a host is asked to say that it has finished it.
const ASK_AFTER: Nanos = Nanos(1_000_000);
/// The same for launches of one program by an island's only client that follow `BACKLOG` of work:
/// no client's share has to be measured, no pause between them is taken for work, and each report
/// costs a host and the controller 40 us that the threads of CPU devices need.
const ASK_AFTER_ALIKE: Nanos = Nanos(5_000_000);
const BACKLOG: Nanos = Nanos(10_000_000);
/// Launches that a host may have before it however long they are; one runs, one is ready.
const LEAST_LAUNCHES: u32 = 2;

/// Launches of one program by one client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchShare {
    pub client: ClientId,
    pub executable: ExecutableId,
    /// Devices of the host that it runs on.
    pub devices: u32,
    pub launches: u32,
    /// Run time of all of them as it was expected without measuring.
    pub expected: Nanos,
    /// The same as it is estimated.
    pub estimate: Nanos,
    /// Has a run of the program ever been measured?
    pub is_measured: bool,
}

/// Launches that end with one whose end the host reports.
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

/// How often a host reports the end of launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reporting {
    /// Each launch, and already when the devices have been given it: nothing more leaves before.
    Each,
    /// Often: clients share the island.
    Often,
    /// Seldom, while it has much before it: the island has one client.
    Seldom,
}

/// One host.
#[derive(Debug)]
pub(crate) struct HostState {
    pub info: Option<HostInfo>,
    pub lost: Option<Status>,
    pub island: IslandId,
    /// Sequence number of the last launch given to it.
    last_launch: u64,
    /// What it has been given and not yet reported as finished.
    before: Batch,
    /// What it was given since it was last asked.
    unasked: Batch,
    /// What it was asked about, the earliest first.
    asked: VecDeque<Batch>,
    /// Reports of ends that have come.
    reports: u64,
    /// Does a gang wait for room here?
    pub wanted: bool,
}

impl HostState {
    pub fn new(island: IslandId) -> Self {
        Self {
            info: None,
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

    /// May it be given another launch?
    pub fn has_room(&self, window: u32) -> bool {
        let Batch { launches, estimate, .. } = &self.before;
        *launches < LEAST_LAUNCHES.min(window) || (*launches < window && *estimate < AHEAD)
    }

    /// Reports of ends that have come.
    pub fn reports(&self) -> u64 {
        self.reports
    }

    /// The last of the launches whose end it will report next; the ones before it are short.
    pub fn first_unfinished(&self) -> Option<&LaunchShare> {
        self.asked.front()?.parts.last()
    }

    /// Is it time to ask about launches too short to be asked about one by one? From here on their
    /// end will be reported.
    pub fn ask_about_rest(&mut self) -> bool {
        let asks = self.asked.is_empty() && self.unasked.launches > 0;
        if asks {
            self.asked.push_back(std::mem::take(&mut self.unasked));
        }
        asks
    }

    /// Launches it has been given and not yet reported as finished.
    pub fn in_flight(&self) -> u32 {
        self.before.launches
    }

    /// Makes a launch ready to leave: it learns its number, what it follows, and whether to report
    /// its end. Says whether the command is a launch; hosts report nothing else.
    ///
    /// # Arguments
    /// - `number`: its place among the launches of its island.
    /// - `reporting`: how often to report ends.
    pub fn give(
        &mut self,
        command: &mut Command,
        number: u64,
        part: LaunchShare,
        window: u32,
        reporting: Reporting,
    ) -> bool {
        let (Command::Launch { sequence, previous, acknowledge, .. }
        | Command::Run { sequence, previous, acknowledge, .. }) = command
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
        // Without a report to come nothing would ever make room again.
        let asks = reporting == Reporting::Each
            || !part.is_measured
            || self.unasked.estimate >= ask_after
            || self.unasked.launches >= (window / 4).max(1)
            || !self.has_room(window);
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

    /// It has finished what it was first asked about.
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
