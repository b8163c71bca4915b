//! Executes motifs, on a channel's thread or on a program thread that waits.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ir::Collective;
use parking_lot::{Mutex, MutexGuard};
use plan::QueueEntry;

use super::steps::{MotifSpan, PreparedSchedule, Ready, State};
use super::sums::Elements;
use super::transport::ChannelTransport;
use super::work::CollectiveBuffer;
use super::{EnforcerError, Inner, Track, ring};

/// Maximum number of motif spans that are kept for the trace; the oldest are dropped.
const SPANS_MAX: usize = 1 << 16;
/// Maximum number of steps that may be unannounced to some channel before the channels are notified.
const UNHEARD_MAX: usize = 1024;

impl Inner {
    /// Prepares a vector for a collective: copies it to memory that all ranks share, if a channel needs
    /// that, and copies this rank's own contribution to its place. Returns the prepared vector, and the
    /// submitted one if that is another.
    pub(super) fn take_in(
        &self,
        work: CollectiveBuffer,
        operation: &plan::ScheduledCollective,
        elements: Elements,
    ) -> Result<(CollectiveBuffer, Option<CollectiveBuffer>), EnforcerError> {
        let collective = &operation.collective;
        let expected = collective.work(self.rank) * elements.size() as u64;
        if work.length() as u64 != expected {
            let (name, found) = (operation.name.clone(), work.length());
            return Err(EnforcerError::Size { name, found, expected });
        }
        let is_pulled = |placed: &plan::Placed| self.is_pulled[placed.channel as usize];
        let ground = self.ground.as_ref().filter(|ground| {
            ground.place_of(&work).is_none() && operation.motifs.iter().any(is_pulled)
        });
        let (work, origin) = match ground {
            None => (work, None),
            Some(ground) => {
                let memory = ground.memory(work.length()).map_err(|error| {
                    let (name, reason) = (operation.name.clone(), error.to_string());
                    EnforcerError::Memory { name, bytes: work.length(), reason }
                })?;
                let seen = CollectiveBuffer::of(memory);
                // SAFETY: the caller has just passed one, and the other is new.
                unsafe { work.copy_to(&seen, 0..work.length()) };
                (seen, Some(work))
            }
        };
        if let Some((from, to, count)) = collective.own(self.rank) {
            let [from, to, count] = [from, to, count].map(|at| at as usize * elements.size());
            // SAFETY: the vector was just submitted, and elements of other ranks lie elsewhere.
            unsafe { work.copy(from, to, count) };
        }
        Ok((work, origin))
    }

    /// Copies the result of a collective to the submitted vector, if it was computed elsewhere.
    ///
    /// # Safety
    /// The collective must have completed.
    pub(super) unsafe fn give_out(
        &self,
        work: &CollectiveBuffer,
        origin: Option<&CollectiveBuffer>,
        collective: &Collective,
        elements: Elements,
    ) {
        let Some(origin) = origin else { return };
        let result = collective.result(self.rank);
        let [start, end] = [result.start, result.end].map(|at| at as usize * elements.size());
        // SAFETY: the collective has completed, so neither is accessed any more.
        unsafe { work.copy_to(origin, start..end) };
    }

    /// Executes the only collective of a schedule as a step of its own on the calling thread, if no
    /// other step is in flight; otherwise returns the vector.
    pub(super) fn carry_alone(
        &self,
        channel: usize,
        part: &Arc<PreparedSchedule>,
        elements: Elements,
        work: CollectiveBuffer,
    ) -> Result<Option<CollectiveBuffer>, EnforcerError> {
        let Some(mut track) = self.tracks[channel].try_lock() else { return Ok(Some(work)) };
        let operation = &part.script.operations[0];
        let (work, origin) = self.take_in(work, operation, elements)?;
        let Some(step) = self.begin_alone(part)? else { return Ok(Some(origin.unwrap_or(work))) };
        let mut state = self.state.lock();
        state.announce(channel as u32, &mut track.course);
        if state.announced.len() > UNHEARD_MAX {
            self.notify(state);
        } else {
            drop(state);
        }
        let poison = Mutex::new(None);
        let Track { course, line } = &mut *track;
        while let Some(stop) = course.peek().filter(|stop| stop.step == step) {
            course.next();
            let vector = (elements, &work, &poison);
            if let Err(error) = line.carry(&part.errand(stop, vector)) {
                drop(track);
                self.fail(error);
                self.state.lock().check()?;
                return Err(EnforcerError::Closed);
            }
        }
        if let Some(reason) = poison.into_inner() {
            return Err(EnforcerError::Poisoned(reason));
        }
        // SAFETY: the collective has completed.
        unsafe { self.give_out(&work, origin.as_ref(), &operation.collective, elements) };
        Ok(None)
    }

    /// Executes motifs on one channel until the enforcer is closed.
    pub(super) fn serve(&self, channel: u32) {
        let track = &self.tracks[channel as usize];
        let outcome = loop {
            let done = self.go_on(channel, &mut track.lock());
            if let Err(error) = done.and_then(|seen| self.wait_for_news(seen)) {
                break error;
            }
        };
        let reason = self.fail(outcome);
        track.lock().line.give_up(&reason);
    }

    /// Records that this rank has failed; returns the reason.
    pub(super) fn fail(&self, error: EnforcerError) -> String {
        let mut state = self.state.lock();
        if error != EnforcerError::Closed && state.failed.is_none() {
            state.failed = Some(error.called(&self.names));
        }
        let reason = state.failed.as_ref().map_or("it has ended".to_owned(), ToString::to_string);
        drop(state);
        self.is_stopped.store(true, Ordering::Relaxed);
        self.wake_all();
        reason
    }

    /// Notifies waiting threads of a change, by a new generation of the state.
    pub(super) fn notify(&self, mut state: MutexGuard<'_, State>) {
        state.news += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Notifies all waiting threads: channels, callers, and the agreement on plans.
    pub(super) fn wake_all(&self) {
        self.notify(self.state.lock());
        self.ended.notify_all();
        self.plans.wake();
        self.wakes.iter().for_each(ring);
    }

    /// Waits until the generation of the state differs from `seen`.
    pub(super) fn wait_for_news(&self, seen: u64) -> Result<(), EnforcerError> {
        let mut state = self.state.lock();
        while state.news == seen {
            // No timeout: this rank's own program decides how long the wait takes.
            self.changed.wait(&mut state);
        }
        state.check()
    }

    /// Executes a channel's motifs until the next one is not ready; returns the generation of the state
    /// then.
    pub(super) fn go_on(&self, channel: u32, track: &mut Track) -> Result<u64, EnforcerError> {
        loop {
            let mut state = self.state.lock();
            state.check()?;
            state.announce(channel, &mut track.course);
            let next = track.course.peek();
            if let Some((stop, ready)) = next.and_then(|stop| Some((stop, state.ready(stop)?))) {
                drop(state);
                track.course.next();
                self.carry(channel, &mut track.line, stop, &ready)?;
                continue;
            }
            if self.offers[channel as usize].lock().is_empty() {
                return Ok(state.news);
            }
            drop(state);
            track.line.tend()?;
        }
    }

    pub(super) fn carry(
        &self,
        channel: u32,
        line: &mut ChannelTransport,
        stop: QueueEntry,
        ready: &Ready,
    ) -> Result<(), EnforcerError> {
        let QueueEntry { step, operation, motif } = stop;
        let vector = (ready.elements, &*ready.work, &*ready.poison);
        let errand = ready.part.errand(stop, vector);
        let start_ns = self.now();
        line.carry(&errand)?;
        let end_ns = self.now();
        let mut state = self.state.lock();
        let running = state.step(step)?.running[operation as usize].as_mut().expect("it was ready");
        running.done[motif as usize] = Some(end_ns);
        if state.spans.len() == SPANS_MAX {
            state.spans.pop_front();
        }
        state.spans.push_back(MotifSpan {
            stop,
            channel,
            ready_ns: ready.since_ns,
            start_ns,
            end_ns,
        });
        self.notify(state);
        Ok(())
    }
}
