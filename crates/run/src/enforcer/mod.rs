//! The enforcer: carries collectives out as a plan says, in its order, on every rank alike.
//!
//! A program submits its collectives as it comes to them. Each channel has a thread that carries motifs
//! out in the order of the plan, and waits for the next one in it if that is not ready, whatever else
//! is. So all ranks carry the same motif on a channel at a time, whenever each of them came to it, and
//! nobody is asked anything meanwhile. Whoever has nothing else to do carries a channel's motifs out in
//! place of its thread.
//!
//! Source: SYNDICATE §4.4, pseudocode 2. Differs from the paper: each channel has an order of its own;
//! waiting is not a busy loop.

mod agree;
mod carry;
mod error;
mod ground;
mod join;
mod lane;
mod mend;
mod pull;
mod sums;
mod work;

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::TransferTag;
use parking_lot::{Condvar, Mutex, MutexGuard};
use plan::{Collective, Course, Round, Script, Stop};
use rustix::event::{EventfdFlags, eventfd};

pub use error::EnforcerError;
pub use join::{Team, Way};
pub use sums::{Elements, Reduction};
pub use work::Work;

use crate::channel::{DataPlane, Memory, Opened};
use agree::Plans;
use carry::{Errand, Line};
use ground::Ground;
use lane::Subject;
use pull::Pull;

/// Motifs that are remembered for whoever asks what was done when.
const SPANS_MAX: usize = 1 << 16;
/// Steps that some channel need not have heard of.
const UNHEARD_MAX: usize = 1024;
/// Steps that may have begun and not ended.
const STEPS_MAX: usize = 64;

/// When a motif was carried out, in nanoseconds since the enforcer began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carried {
    /// What it was.
    pub stop: Stop,
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
pub struct Part {
    script: Arc<Script>,
    /// Of each operation, of each motif.
    rounds: Vec<Vec<Vec<Round>>>,
    /// Of each operation, what tells it from others.
    digests: Vec<u32>,
}

impl Part {
    /// A motif of it, on a vector.
    fn errand<'a>(
        &'a self,
        stop: Stop,
        (elements, work, poison): (Elements, &'a Work, &'a Mutex<Option<String>>),
    ) -> Errand<'a> {
        let Stop { step, operation, motif } = stop;
        let number = operation as usize;
        // Types and reductions are compared as well.
        let typed = (elements.dtype() as u32) << 8 | elements.reduction() as u32;
        let digest = self.digests[number] ^ typed;
        Errand {
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
struct Running {
    work: Arc<Work>,
    /// What was submitted, if others do not see that: the result is copied there.
    origin: Option<Work>,
    elements: Elements,
    submitted_ns: u64,
    poison: Arc<Mutex<Option<String>>>,
    /// When each motif was done, if it was.
    done: Vec<Option<u64>>,
}

impl Running {
    fn is_done(&self) -> bool {
        self.done.iter().all(Option::is_some)
    }
}

/// One step that has begun.
#[derive(Debug)]
struct StepRun {
    part: Arc<Part>,
    running: Vec<Option<Running>>,
    /// Operations whose end nobody has waited for.
    untaken: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Those that are not over, the first of which has this number.
    steps: VecDeque<StepRun>,
    first: u64,
    /// What was announced of each step that some channel has not heard of, and of how many it is.
    announced: VecDeque<(Arc<Part>, u32)>,
    heard: Vec<u64>,
    /// How many more steps of the last script are promised.
    promised: u32,
    failed: Option<EnforcerError>,
    is_closing: bool,
    spans: VecDeque<Carried>,
    /// How often something has changed that channels wait for.
    news: u64,
}

/// One channel: what it carries, and by what.
#[derive(Debug)]
struct Track {
    course: Course,
    line: Line,
}

#[derive(Debug)]
struct Inner {
    rank: u32,
    ranks: u32,
    began: Instant,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// Steps are over, so that others may begin.
    ended: Condvar,
    tracks: Vec<Mutex<Track>>,
    /// What all ranks see, if they are on one machine, and the channels by which they use it.
    ground: Option<Arc<Ground>>,
    is_pulled: Vec<bool>,
    /// Of each line, what wakes it, and what others have opened for it; the last one is that on which
    /// ranks agree on plans, all others are channels.
    wakes: Vec<OwnedFd>,
    offers: Vec<Arc<Mutex<Vec<Opened>>>>,
    is_stopped: Arc<AtomicBool>,
    plans: Plans,
}

/// One rank's end of a team.
#[derive(Debug)]
pub struct Enforcer {
    inner: Arc<Inner>,
    plane: DataPlane,
    team: TransferTag,
    threads: Vec<std::thread::JoinHandle<()>>,
}

/// A collective that was submitted.
#[derive(Debug)]
pub struct Ticket {
    step: u64,
    operation: u32,
    work: Arc<Work>,
}

impl Enforcer {
    /// Joins a team, and waits for all others to do so.
    ///
    /// # Errors
    /// They do not, in time.
    pub fn join(team: &Team<'_>) -> Result<Self, EnforcerError> {
        let mut lines = team.lines()?;
        let (ground, is_pulled) = team.ground(&mut lines)?;
        let wakes =
            lines.iter().map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK));
        let wakes: Vec<OwnedFd> =
            wakes.collect::<Result<_, _>>().map_err(|error| team.no(&error))?;
        let names = team.names();
        let offers: Vec<Arc<Mutex<Vec<Opened>>>> = lines.iter().map(|_| Arc::default()).collect();
        let is_stopped = Arc::<AtomicBool>::default();
        let mut made = Vec::with_capacity(lines.len());
        for (number, lanes) in lines.into_iter().enumerate() {
            let wake = wakes[number].try_clone().map_err(|error| team.no(&error))?;
            let mender = team.mender(names[number], offers[number].clone());
            let pull = ground.as_ref().filter(|_| is_pulled.get(number) == Some(&true));
            let ranks = (team.rank as usize, team.hosts.len());
            let pull = pull.map(|ground| Pull::new(ground.clone(), number, ranks));
            let waiting = (team.timeout, names[number].1.queue());
            made.push(Line::new(lanes, (wake, is_stopped.clone()), mender, waiting, pull));
        }
        let agreement = made.pop().expect("ranks agree on a line of their own");
        let track = |(channel, line)| Mutex::new(Track { course: Course::new(channel), line });
        let state = State { heard: vec![0; team.ways.len()], ..State::default() };
        let inner = Arc::new(Inner {
            rank: team.rank,
            ranks: team.hosts.len() as u32,
            began: Instant::now(),
            timeout: team.timeout,
            state: Mutex::new(state),
            changed: Condvar::new(),
            ended: Condvar::new(),
            tracks: made.into_iter().enumerate().map(track).collect(),
            ground,
            is_pulled,
            wakes,
            offers,
            is_stopped,
            plans: Plans::new(team.rank, team.hosts.len() as u32),
        });
        let watch = {
            let inner = Arc::downgrade(&inner);
            move |opened: Opened| {
                let line = names.iter().position(|(name, _)| *name == opened.lane.channel);
                let (Some(line), Some(inner)) = (line, inner.upgrade()) else { return };
                inner.offers[line].lock().push(opened);
                inner.wake_all();
            }
        };
        team.plane.lanes().watch(team.name, Arc::new(watch));
        let (plane, name) = (team.plane.clone(), team.name);
        let mut enforcer = Self { inner, plane, team: name, threads: Vec::new() };
        for channel in 0..team.ways.len() {
            let inner = enforcer.inner.clone();
            let thread = std::thread::Builder::new().name(format!("fairway-channel-{channel}"));
            let thread = thread.spawn(move || inner.serve(channel as u32));
            enforcer.threads.push(thread.map_err(|error| team.no(&error))?);
        }
        let inner = enforcer.inner.clone();
        let thread = std::thread::Builder::new().name("fairway-plans".to_owned());
        let thread = thread.spawn(move || inner.serve_agreement(agreement));
        enforcer.threads.push(thread.map_err(|error| team.no(&error))?);
        Ok(enforcer)
    }

    /// Which rank this is.
    pub fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// Of how many.
    pub fn ranks(&self) -> u32 {
        self.inner.ranks
    }

    /// This rank's part of a script.
    ///
    /// # Errors
    /// It cannot be kept to, or is of other ranks or channels.
    pub fn prepare(&self, script: Arc<Script>) -> Result<Arc<Part>, EnforcerError> {
        self.inner.prepare(script)
    }

    /// Keeps to a plan from the next step on, until another one is agreed on; all ranks do so at the
    /// same step.
    ///
    /// # Errors
    /// Another plan is being agreed on.
    pub fn follow(&self, part: &Arc<Part>) -> Result<(), EnforcerError> {
        self.inner.follow(part)
    }

    /// Begins a step of the plan that is followed, after which at least so many more will surely begin,
    /// at most 4; all ranks say the same. Returns its number, and that of the plan: 0, and one more for
    /// each that was proposed.
    ///
    /// # Errors
    /// It is not decided in time which plan it has, there is none, or the team has failed.
    pub fn begin_planned(&self, following: u32) -> Result<(u64, u64), EnforcerError> {
        self.inner.begin_planned(following)
    }

    /// How many steps have begun.
    pub fn steps_begun(&self) -> u64 {
        let state = self.inner.state.lock();
        state.first + state.steps.len() as u64
    }

    /// Proposes a plan of the same collectives to all ranks; returns the step from which all keep to
    /// it. Steps go on meanwhile. Rank 0 proposes, one plan at a time.
    ///
    /// # Errors
    /// A rank cannot keep to it, is lost, or does not answer in time: then none does.
    pub fn propose(&self, script: &Script) -> Result<u64, EnforcerError> {
        self.inner.propose(script)
    }

    /// Begins a step, and says how many more of the same will surely follow; all ranks say the same.
    /// Returns its number.
    ///
    /// # Errors
    /// More was promised before, or the team has failed.
    pub fn begin(&self, part: &Arc<Part>, following: u32) -> Result<u64, EnforcerError> {
        self.inner.begin(part, following)
    }

    /// Memory for vectors: such as all ranks see, if they are on one machine.
    ///
    /// # Errors
    /// There is none.
    pub fn memory(&self, length: usize) -> std::io::Result<Memory> {
        match &self.inner.ground {
            Some(ground) => ground.memory(length),
            None => self.plane.memory(length),
        }
    }

    /// Carries the one collective of a script out as a step of its own, and waits for its end; returns
    /// where in the vector the result lies. Where one channel carries it and nothing else is under way,
    /// that is done here; then it is not among what [`Self::take_spans`] tells of.
    ///
    /// # Errors
    /// As for beginning, submitting and waiting.
    pub fn call(
        &self,
        part: &Arc<Part>,
        elements: Elements,
        work: Work,
    ) -> Result<Range<u64>, EnforcerError> {
        let found = part.script.operations.len();
        let [operation] = &part.script.operations[..] else {
            return Err(EnforcerError::Operation { operation: 0, operations: found });
        };
        let result = operation.collective.result(self.inner.rank);
        let mut orders = part.script.order.iter().enumerate().filter(|(_, line)| !line.is_empty());
        let mut work = work;
        if let (Some((channel, _)), None) = (orders.next(), orders.next()) {
            match self.inner.carry_alone(channel, part, elements, work)? {
                None => return Ok(result),
                Some(back) => work = back,
            }
        }
        let step = self.inner.begin(part, 0)?;
        let ticket = self.submit((step, 0), (&operation.collective, elements), work, None)?;
        self.wait(ticket)?;
        Ok(result)
    }

    /// Submits a collective of a step. What it works on is laid out as [`Collective`] says; it may not be
    /// touched before the end.
    ///
    /// # Arguments
    /// - `poison`: why the elements mean nothing, if they do; all others learn it.
    ///
    /// # Errors
    /// The step has no such operation, it is another collective, or the vector has another size.
    pub fn submit(
        &self,
        (step, operation): (u64, u32),
        asked: (&Collective, Elements),
        work: Work,
        poison: Option<String>,
    ) -> Result<Ticket, EnforcerError> {
        let ticket = self.inner.submit((step, operation), asked, work, poison)?;
        self.inner.tell(self.inner.state.lock());
        Ok(ticket)
    }

    /// Waits for the end of a collective; the result is where [`Collective::result`] says.
    ///
    /// # Errors
    /// A rank had nothing to give, is gone, stuck, or does something else.
    pub fn wait(&self, ticket: Ticket) -> Result<Arc<Work>, EnforcerError> {
        let Ticket { step, operation, work } = ticket;
        let mut state = self.inner.state.lock();
        let mut is_told = false;
        loop {
            state.check()?;
            let run = state.step(step)?;
            let running = run.running[operation as usize].as_mut().expect("it was submitted");
            if running.is_done() {
                let (poison, origin) = (running.poison.lock().take(), running.origin.take());
                let elements = running.elements;
                let part = run.part.clone();
                run.untaken -= 1;
                state.forget_ended();
                drop(state);
                self.inner.ended.notify_all();
                if let Some(reason) = poison {
                    return Err(EnforcerError::Poisoned(reason));
                }
                let collective = &part.script.operations[operation as usize].collective;
                // SAFETY: it is over.
                unsafe { self.inner.give_out(&work, origin.as_ref(), collective, elements) };
                return Ok(origin.map_or(work, Arc::new));
            }
            if !std::mem::replace(&mut is_told, true) {
                self.inner.tell(state);
                state = self.inner.state.lock();
                continue;
            }
            // What it waits for is bounded: by the program, or by the timeout of a motif.
            self.inner.changed.wait(&mut state);
        }
    }

    /// Has a collective ended, well or not?
    pub fn is_done(&self, ticket: &Ticket) -> bool {
        let mut state = self.inner.state.lock();
        if state.failed.is_some() {
            return true;
        }
        let Ok(run) = state.step(ticket.step) else { return true };
        run.running[ticket.operation as usize].as_ref().is_some_and(Running::is_done)
    }

    /// What was carried out since the last call.
    pub fn take_spans(&self) -> Vec<Carried> {
        std::mem::take(&mut self.inner.state.lock().spans).into()
    }

    /// Nanoseconds since this began, as in spans.
    pub fn now_ns(&self) -> u64 {
        self.inner.now()
    }

    /// Gives up: whoever waits for this rank learns that it is closed.
    pub fn close(&self) {
        self.inner.state.lock().is_closing = true;
        self.inner.is_stopped.store(true, Ordering::Relaxed);
        self.inner.wake_all();
    }
}

impl Drop for Enforcer {
    fn drop(&mut self) {
        self.close();
        self.plane.lanes().unwatch(self.team);
        for thread in self.threads.drain(..) {
            // One that has panicked has said so.
            let _ = thread.join();
        }
    }
}

impl State {
    fn check(&self) -> Result<(), EnforcerError> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None if self.is_closing => Err(EnforcerError::Closed),
            None => Ok(()),
        }
    }

    fn step(&mut self, step: u64) -> Result<&mut StepRun, EnforcerError> {
        let at = step.checked_sub(self.first).ok_or(EnforcerError::Step { step })?;
        self.steps.get_mut(at as usize).ok_or(EnforcerError::Step { step })
    }

    /// Forgets steps that are over, and what every channel has heard of.
    fn forget_ended(&mut self) {
        while self.steps.front().is_some_and(|run| run.untaken == 0) {
            self.steps.pop_front();
            self.first += 1;
        }
    }

    /// Tells a channel of the steps that it has not heard of.
    fn announce(&mut self, channel: u32, course: &mut Course) {
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
}

/// What a channel is to carry now.
struct Ready {
    part: Arc<Part>,
    work: Arc<Work>,
    elements: Elements,
    poison: Arc<Mutex<Option<String>>>,
    since_ns: u64,
}

impl Inner {
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn prepare(&self, script: Arc<Script>) -> Result<Arc<Part>, EnforcerError> {
        script.verify()?;
        let (found, channels) = (script.order.len(), self.wakes.len() - 1);
        if found > channels {
            return Err(EnforcerError::Channels { found, channels });
        }
        for operation in &script.operations {
            let rank = operation.collective.ranks();
            if rank != self.ranks {
                return Err(EnforcerError::Rank { rank, ranks: self.ranks as usize });
            }
        }
        let rounds = script.part(self.rank);
        let digests = script.operations.iter().map(digest).collect();
        Ok(Arc::new(Part { script, rounds, digests }))
    }

    /// Waits until not too many steps have begun.
    fn wait_for_room(&self) -> Result<(), EnforcerError> {
        let mut state = self.state.lock();
        while state.steps.len() >= STEPS_MAX {
            let late = self.ended.wait_for(&mut state, self.timeout).timed_out();
            state.check()?;
            if late {
                let step = state.first;
                return Err(EnforcerError::Step { step });
            }
        }
        Ok(())
    }

    /// Starts a step, after which so many more of the same will surely start.
    fn start(&self, part: &Arc<Part>, following: u32) -> Result<u64, EnforcerError> {
        let mut state = self.state.lock();
        state.check()?;
        let promised = state.promised;
        let is_other = state.announced.back().is_some_and(|(last, _)| !Arc::ptr_eq(last, part));
        if promised > following + 1 || (promised > 0 && is_other) {
            return Err(EnforcerError::Promise { promised });
        }
        let step = state.first + state.steps.len() as u64;
        let operations = part.script.operations.len();
        let running = (0..operations).map(|_| None).collect();
        state.steps.push_back(StepRun { part: part.clone(), running, untaken: operations });
        state.announced.push_back((part.clone(), following));
        state.promised = following;
        state.forget_ended();
        Ok(step)
    }

    /// Submits a collective, and tells nobody yet.
    fn submit(
        &self,
        (step, operation): (u64, u32),
        (collective, elements): (&Collective, Elements),
        work: Work,
        poison: Option<String>,
    ) -> Result<Ticket, EnforcerError> {
        let mut state = self.state.lock();
        state.check()?;
        let run = state.step(step)?;
        let part = run.part.clone();
        let operations = &part.script.operations;
        let Some(planned) = operations.get(operation as usize) else {
            let operations = operations.len();
            return Err(EnforcerError::Operation { operation, operations });
        };
        let name = || planned.name.clone();
        if planned.collective != *collective {
            let [expected, found] = [&planned.collective, collective].map(ToString::to_string);
            return Err(EnforcerError::Different { operation, name: name(), expected, found });
        }
        let slot = &mut run.running[operation as usize];
        if slot.is_some() {
            return Err(EnforcerError::Twice { operation, step });
        }
        let (work, origin) = self.take_in(work, planned, elements)?;
        let work = Arc::new(work);
        *slot = Some(Running {
            work: work.clone(),
            origin,
            elements,
            submitted_ns: self.now(),
            poison: Arc::new(Mutex::new(poison)),
            done: vec![None; planned.motifs.len()],
        });
        Ok(Ticket { step, operation, work })
    }

    /// A vector as it is worked on: where all ranks see it, if that is needed, with what is this rank's
    /// own in its place; and then the one that was given.
    fn take_in(
        &self,
        work: Work,
        operation: &plan::Operation,
        elements: Elements,
    ) -> Result<(Work, Option<Work>), EnforcerError> {
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
                let seen = Work::of(memory);
                // SAFETY: the one was just given for this, and the other was just made.
                unsafe { work.copy_to(&seen, 0..work.length()) };
                (seen, Some(work))
            }
        };
        if let Some((from, to, count)) = collective.own(self.rank) {
            let [from, to, count] = [from, to, count].map(|at| at as usize * elements.size());
            // SAFETY: the vector was just given, and what comes of others lies elsewhere.
            unsafe { work.copy(from, to, count) };
        }
        Ok((work, origin))
    }

    /// Brings the result of a collective to where it was submitted, if it is somewhere else.
    ///
    /// # Safety
    /// The collective is over.
    unsafe fn give_out(
        &self,
        work: &Work,
        origin: Option<&Work>,
        collective: &Collective,
        elements: Elements,
    ) {
        let Some(origin) = origin else { return };
        let result = collective.result(self.rank);
        let [start, end] = [result.start, result.end].map(|at| at as usize * elements.size());
        // SAFETY: nobody works on either any more.
        unsafe { work.copy_to(origin, start..end) };
    }

    /// Carries the one collective of a script out as a step of its own, if nothing else is under way;
    /// gives the vector back if something is.
    fn carry_alone(
        &self,
        channel: usize,
        part: &Arc<Part>,
        elements: Elements,
        work: Work,
    ) -> Result<Option<Work>, EnforcerError> {
        let Some(mut track) = self.tracks[channel].try_lock() else { return Ok(Some(work)) };
        let operation = &part.script.operations[0];
        let (work, origin) = self.take_in(work, operation, elements)?;
        let Some(step) = self.begin_alone(part)? else { return Ok(Some(origin.unwrap_or(work))) };
        let mut state = self.state.lock();
        state.announce(channel as u32, &mut track.course);
        if state.announced.len() > UNHEARD_MAX {
            self.tell(state);
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
        // SAFETY: it is over.
        unsafe { self.give_out(&work, origin.as_ref(), &operation.collective, elements) };
        Ok(None)
    }

    /// Carries motifs out on one channel until the enforcer is closed.
    fn serve(&self, channel: u32) {
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

    /// Notes that this rank cannot go on; returns why.
    fn fail(&self, error: EnforcerError) -> String {
        let mut state = self.state.lock();
        if error != EnforcerError::Closed && state.failed.is_none() {
            state.failed = Some(error);
        }
        let reason = state.failed.as_ref().map_or("it has ended".to_owned(), ToString::to_string);
        drop(state);
        self.is_stopped.store(true, Ordering::Relaxed);
        self.wake_all();
        reason
    }

    /// Lets channels look whether there is something new.
    fn tell(&self, mut state: MutexGuard<'_, State>) {
        state.news += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Lets everybody look whether there is something new.
    fn wake_all(&self) {
        self.tell(self.state.lock());
        self.ended.notify_all();
        self.plans.wake();
        self.wakes.iter().for_each(ring);
    }

    /// Waits until more is new than somebody has seen.
    fn wait_for_news(&self, seen: u64) -> Result<(), EnforcerError> {
        let mut state = self.state.lock();
        while state.news == seen {
            // This rank's own program decides how long.
            self.changed.wait(&mut state);
        }
        state.check()
    }

    /// Carries out what a channel carries next, until that is not ready; returns what was new then.
    fn go_on(&self, channel: u32, track: &mut Track) -> Result<u64, EnforcerError> {
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

    fn carry(
        &self,
        channel: u32,
        line: &mut Line,
        stop: Stop,
        ready: &Ready,
    ) -> Result<(), EnforcerError> {
        let Stop { step, operation, motif } = stop;
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
        state.spans.push_back(Carried {
            stop,
            channel,
            ready_ns: ready.since_ns,
            start_ns,
            end_ns,
        });
        self.tell(state);
        Ok(())
    }
}

impl State {
    /// What it takes to carry a motif out, if all that it waits for is done.
    fn ready(&mut self, stop: Stop) -> Option<Ready> {
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

/// Wakes whoever waits for this to be written.
fn ring(wake: &OwnedFd) {
    // A counter that is full is as good as one that is written.
    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
}

/// What tells an operation, and how it is carried out, from others.
fn digest(operation: &plan::Operation) -> u32 {
    crc32fast::hash(format!("{operation:?}").as_bytes())
}
