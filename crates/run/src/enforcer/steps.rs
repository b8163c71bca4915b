//! Steps that have begun, and what is known of each: what is asked for, and what is done of it.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use plan::{ChannelQueue, QueueEntry, RankSchedule, Round};

use super::EnforcerError;
use super::motif_task::MotifTask;
use super::stream::Subject;
use super::sums::Elements;
use super::work::CollectiveBuffer;

/// When a motif was carried out, in nanoseconds since the enforcer began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MotifSpan {
    /// What it was.
    pub stop: QueueEntry,
    /// By which channel.
    pub channel: u32,
    /// From when it could have been.
    pub ready_ns: u64,
    /// From when it was.
    pub start_ns: u64,
    /// Until when.
    pub end_ns: u64,
}

/// A script as one rank keeps to it.
#[derive(Debug)]
pub struct PreparedSchedule {
    pub(super) script: Arc<RankSchedule>,
    /// Of each operation, of each motif.
    pub(super) rounds: Vec<Vec<Vec<Round>>>,
    /// Of each operation, what tells it from others.
    pub(super) digests: Vec<u32>,
}

impl PreparedSchedule {
    /// A motif of it, on a vector.
    pub(super) fn errand<'a>(
        &'a self,
        stop: QueueEntry,
        (elements, work, poison): (Elements, &'a CollectiveBuffer, &'a Mutex<Option<String>>),
    ) -> MotifTask<'a> {
        let QueueEntry { step, operation, motif } = stop;
        let number = operation as usize;
        // Types and reductions are compared as well.
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

/// One collective that is to be carried out.
#[derive(Debug)]
pub(super) struct RunningStep {
    pub(super) work: Arc<CollectiveBuffer>,
    /// What was submitted, if others do not see that: the result is copied there.
    pub(super) origin: Option<CollectiveBuffer>,
    pub(super) elements: Elements,
    pub(super) submitted_ns: u64,
    pub(super) poison: Arc<Mutex<Option<String>>>,
    /// When each motif was done, if it was.
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
    /// Operations whose end nobody has waited for.
    pub(super) untaken: usize,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Those that are not over, the first of which has this number.
    pub(super) steps: VecDeque<StepRun>,
    pub(super) first: u64,
    /// What was announced of each step that some channel has not heard of, and of how many it is.
    pub(super) announced: VecDeque<(Arc<PreparedSchedule>, u32)>,
    pub(super) heard: Vec<u64>,
    /// How many more steps of the last script are promised.
    pub(super) promised: u32,
    pub(super) failed: Option<EnforcerError>,
    pub(super) is_closing: bool,
    pub(super) spans: VecDeque<MotifSpan>,
    /// How often something has changed that channels wait for.
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

    /// Forgets steps that are over, and what every channel has heard of.
    pub(super) fn forget_ended(&mut self) {
        while self.steps.front().is_some_and(|run| run.untaken == 0) {
            self.steps.pop_front();
            self.first += 1;
        }
    }

    /// Tells a channel of the steps that it has not heard of.
    pub(super) fn announce(&mut self, channel: u32, course: &mut ChannelQueue) {
        let total = self.first + self.steps.len() as u64;
        let gone = total - self.announced.len() as u64;
        let heard = &mut self.heard[channel as usize];
        for (part, following) in self.announced.iter().skip((*heard - gone) as usize) {
            course.announce(&part.script, *following);
        }
        *heard = total;
        let least = self.heard.iter().min().copied().unwrap_or(total);
        // The last one stays: promises are about it.
        let keep = (total - least).max(1) as usize;
        while self.announced.len() > keep {
            self.announced.pop_front();
        }
    }

    /// What it takes to carry a motif out, if all that it waits for is done.
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

/// What a channel is to carry now.
pub(super) struct Ready {
    pub(super) part: Arc<PreparedSchedule>,
    pub(super) work: Arc<CollectiveBuffer>,
    pub(super) elements: Elements,
    pub(super) poison: Arc<Mutex<Option<String>>>,
    pub(super) since_ns: u64,
}

/// What tells an operation, and how it is carried out, from others.
pub(super) fn digest(operation: &plan::ScheduledCollective) -> u32 {
    crc32fast::hash(format!("{operation:?}").as_bytes())
}
