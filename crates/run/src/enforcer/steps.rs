//! The state of steps in flight: submitted collectives, and which of their motifs are done.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use plan::{ChannelQueue, QueueEntry, RankSchedule, Round};

use super::EnforcerError;
use super::motif_task::MotifTask;
use super::stream::Subject;
use super::sums::Elements;
use super::work::CollectiveBuffer;

/// The time span in which a motif was executed, in nanoseconds since the enforcer started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MotifSpan {
    /// Step, operation and motif.
    pub stop: QueueEntry,
    /// Number of the channel.
    pub channel: u32,
    /// When its dependencies were satisfied.
    pub ready_ns: u64,
    /// When its execution started.
    pub start_ns: u64,
    /// When its execution ended.
    pub end_ns: u64,
}

/// A schedule, prepared for one rank.
#[derive(Debug)]
pub struct PreparedSchedule {
    pub(super) script: Arc<RankSchedule>,
    /// Rounds by operation and motif.
    pub(super) rounds: Vec<Vec<Vec<Round>>>,
    /// Digest of each operation, by which ranks detect that they diverge.
    pub(super) digests: Vec<u32>,
}

impl PreparedSchedule {
    /// Binds a motif of the schedule to a vector.
    pub(super) fn errand<'a>(
        &'a self,
        stop: QueueEntry,
        (elements, work, poison): (Elements, &'a CollectiveBuffer, &'a Mutex<Option<String>>),
    ) -> MotifTask<'a> {
        let QueueEntry { step, operation, motif } = stop;
        let number = operation as usize;
        // The digest covers the element type and the reduction as well.
        let typed = (elements.dtype() as u32) << 8 | elements.reduction() as u32;
        let digest = self.digests[number] ^ typed;
        MotifTask {
            rounds: &self.rounds[number][motif as usize],
            subject: Subject { step, operation, motif, digest },
            name: &self.script.operations[number].name,
            elements,
            work,
            poison,
        }
    }
}

/// One submitted collective.
#[derive(Debug)]
pub(super) struct RunningStep {
    pub(super) work: Arc<CollectiveBuffer>,
    /// The submitted vector, if it is not in shared memory: the result is copied there.
    pub(super) origin: Option<CollectiveBuffer>,
    pub(super) elements: Elements,
    pub(super) submitted_ns: u64,
    pub(super) poison: Arc<Mutex<Option<String>>>,
    /// Completion time of each motif, if it is done.
    pub(super) done: Vec<Option<u64>>,
}

impl RunningStep {
    pub(super) fn is_done(&self) -> bool {
        self.done.iter().all(Option::is_some)
    }
}

/// One step that has begun.
#[derive(Debug)]
pub(super) struct StepRun {
    pub(super) part: Arc<PreparedSchedule>,
    pub(super) running: Vec<Option<RunningStep>>,
    /// Number of operations that have not been waited for.
    pub(super) untaken: usize,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Steps in flight, in order; `first` is the number of the first of them.
    pub(super) steps: VecDeque<StepRun>,
    pub(super) first: u64,
    /// Announcements (schedule, and number of steps that surely follow) of the steps that some channel
    /// has not queued; `heard` is, by channel, the number of steps that it has queued.
    pub(super) announced: VecDeque<(Arc<PreparedSchedule>, u32)>,
    pub(super) heard: Vec<u64>,
    /// Number of further steps of the last schedule that are guaranteed.
    pub(super) promised: u32,
    pub(super) failed: Option<EnforcerError>,
    pub(super) is_closing: bool,
    pub(super) spans: VecDeque<MotifSpan>,
    /// Generation of the state: the number of changes that channels wait for.
    pub(super) news: u64,
}

impl State {
    pub(super) fn check(&self) -> Result<(), EnforcerError> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None if self.is_closing => Err(EnforcerError::Closed),
            None => Ok(()),
        }
    }

    pub(super) fn step(&mut self, step: u64) -> Result<&mut StepRun, EnforcerError> {
        let at = step.checked_sub(self.first).ok_or(EnforcerError::Step { step })?;
        self.steps.get_mut(at as usize).ok_or(EnforcerError::Step { step })
    }

    /// Drops steps at the front whose operations have all been waited for.
    pub(super) fn forget_ended(&mut self) {
        while self.steps.front().is_some_and(|run| run.untaken == 0) {
            self.steps.pop_front();
            self.first += 1;
        }
    }

    /// Announces to a channel's queue the steps that it has not queued.
    pub(super) fn announce(&mut self, channel: u32, course: &mut ChannelQueue) {
        let total = self.first + self.steps.len() as u64;
        let gone = total - self.announced.len() as u64;
        let heard = &mut self.heard[channel as usize];
        for (part, following) in self.announced.iter().skip((*heard - gone) as usize) {
            course.announce(part.script.slots(channel as usize), *following);
        }
        *heard = total;
        let least = self.heard.iter().min().copied().unwrap_or(total);
        // The last announcement is kept: guarantees refer to it.
        let keep = (total - least).max(1) as usize;
        while self.announced.len() > keep {
            self.announced.pop_front();
        }
    }

    /// Returns what is needed to execute a motif, if all its dependencies are satisfied.
    pub(super) fn ready(&mut self, stop: QueueEntry) -> Option<Ready> {
        let run = self.step(stop.step).ok()?;
        let running = run.running[stop.operation as usize].as_ref()?;
        let placed =
            &run.part.script.operations[stop.operation as usize].motifs[stop.motif as usize];
        let mut since_ns = running.submitted_ns;
        for &after in &placed.after {
            since_ns = since_ns.max(running.done[after as usize]?);
        }
        Some(Ready {
            part: run.part.clone(),
            work: running.work.clone(),
            elements: running.elements,
            poison: running.poison.clone(),
            since_ns,
        })
    }
}

/// A motif that is ready: its schedule, vector and elements.
pub(super) struct Ready {
    pub(super) part: Arc<PreparedSchedule>,
    pub(super) work: Arc<CollectiveBuffer>,
    pub(super) elements: Elements,
    pub(super) poison: Arc<Mutex<Option<String>>>,
    pub(super) since_ns: u64,
}

/// Hashes an operation and how it is executed.
pub(super) fn digest(operation: &plan::ScheduledCollective) -> u32 {
    crc32fast::hash(format!("{operation:?}").as_bytes())
}
