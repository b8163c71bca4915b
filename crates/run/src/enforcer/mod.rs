//! The enforcer: executes collectives in the order of a plan (static schedule), the same on every rank.
//!
//! A program submits its collectives as it reaches them. Each channel has a thread that executes motifs
//! in the planned order; if the next motif is not ready, the channel waits for it, even if later ones
//! are. So all ranks execute the same motif on a channel at a time, whenever each of them submitted it,
//! without a handshake per collective. A program thread that would otherwise block can execute a
//! channel's motifs in place of its thread.
//!
//! Source: SYNDICATE §4.4, pseudocode 2. Differs from the paper: each channel has an order of its own;
//! waiting is not a busy loop.

mod agree;
mod agreed;
mod arena;
mod error;
mod join;
mod motif_task;
mod reconnect;
mod serve;
mod shm;
mod steps;
mod stream;
mod sums;
mod team;
mod transport;
mod work;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::TransferTag;
use ir::Collective;
use parking_lot::{Condvar, Mutex};
use plan::{ChannelQueue, RankSchedule};
use rustix::event::{EventfdFlags, eventfd};

pub use error::EnforcerError;
pub use steps::{MotifSpan, PreparedSchedule};
pub use sums::{Elements, Reduction};
pub use team::{Team, TeamChannel};
pub use work::CollectiveBuffer;

use crate::channel::{DataPlane, Opened, SharedMemory};
use agreed::AgreedPlans;
use arena::SharedArena;
use shm::ShmTransport;
use steps::{RunningStep, State, StepRun, digest};
use stream::ReliableStream;
use transport::ChannelTransport;

/// Maximum number of steps in flight (begun and not ended); the back-pressure limit on `begin`.
const STEPS_MAX: usize = 64;

/// One channel: its queue of motifs and its transport.
#[derive(Debug)]
struct Track {
    course: ChannelQueue,
    line: ChannelTransport,
}

#[derive(Debug)]
struct Inner {
    rank: u32,
    ranks: u32,
    began: Instant,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// Signalled when steps have ended, so that further steps are admitted.
    ended: Condvar,
    tracks: Vec<Mutex<Track>>,
    /// Shared memory of all ranks, if they are on one machine, and which channels use it.
    ground: Option<Arc<SharedArena>>,
    is_pulled: Vec<bool>,
    /// For each transport, its wake-up event and the connections that peers have opened for it. The
    /// last transport is that on which ranks agree on plans; all others are channels.
    wakes: Vec<OwnedFd>,
    offers: Vec<Arc<Mutex<Vec<Opened>>>>,
    is_stopped: Arc<AtomicBool>,
    plans: AgreedPlans,
    /// Display name of each rank, if that is not its number.
    names: Vec<u32>,
    notices: Arc<Mutex<Vec<String>>>,
}

/// One rank's endpoint of a team.
#[derive(Debug)]
pub struct Enforcer {
    inner: Arc<Inner>,
    plane: DataPlane,
    team: TransferTag,
    threads: Vec<std::thread::JoinHandle<()>>,
}

/// A handle to a submitted collective.
#[derive(Debug)]
pub struct CollectiveTicket {
    step: u64,
    operation: u32,
    work: Arc<CollectiveBuffer>,
}

impl Enforcer {
    /// Joins a team, and waits until all other ranks have joined.
    ///
    /// # Errors
    /// Other ranks do not join within [`Team::meeting`], or this rank cannot.
    pub fn join(team: &Team<'_>) -> Result<Self, EnforcerError> {
        let mut lines = team.lines()?;
        let (ground, is_pulled) = team.ground(&mut lines)?;
        let wakes =
            lines.iter().map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK));
        let wakes: Vec<OwnedFd> =
            wakes.collect::<Result<_, _>>().map_err(|error| team.no(&error))?;
        let mut inner = Inner {
            rank: team.rank,
            ranks: team.hosts.len() as u32,
            began: Instant::now(),
            timeout: team.timeout,
            state: Mutex::new(State { heard: vec![0; team.channels.len()], ..State::default() }),
            changed: Condvar::new(),
            ended: Condvar::new(),
            tracks: Vec::new(),
            ground,
            is_pulled,
            offers: lines.iter().map(|_| Arc::default()).collect(),
            wakes,
            is_stopped: Arc::default(),
            plans: AgreedPlans::new(team.rank, team.hosts.len() as u32),
            names: team.names.unwrap_or_default().to_vec(),
            notices: Arc::default(),
        };
        let mut made = inner.transports(team, lines)?;
        let agreement = made.pop().expect("ranks agree on a line of their own");
        let track = |line| Mutex::new(Track { course: ChannelQueue::new(), line });
        inner.tracks = made.into_iter().map(track).collect();
        let (inner, plane, name) = (Arc::new(inner), team.plane.clone(), team.name);
        inner.watch(team);
        let mut enforcer = Self { inner, plane, team: name, threads: Vec::new() };
        for channel in 0..team.channels.len() {
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

    /// Returns this rank's number.
    pub fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.inner.ranks
    }

    /// Extracts this rank's part of a schedule.
    ///
    /// # Errors
    /// The schedule is invalid, or is for other ranks or more channels.
    pub fn prepare(
        &self,
        script: Arc<RankSchedule>,
    ) -> Result<Arc<PreparedSchedule>, EnforcerError> {
        self.inner.prepare(script)
    }

    /// Follows a plan from the next step on, until another one is agreed on. All ranks must call this
    /// at the same step.
    ///
    /// # Errors
    /// Another plan is being agreed on.
    pub fn follow(&self, part: &Arc<PreparedSchedule>) -> Result<(), EnforcerError> {
        self.inner.follow(part)
    }

    /// Begins a step of the plan in force, and guarantees `following` more steps (a number above 4 counts
    /// as 4); all ranks must pass the same number. Returns the number of the step and that of its plan:
    /// 0 for the first plan, and one more for each that was proposed.
    ///
    /// # Errors
    /// The plan of the step is not decided before the timeout, there is none, or the team has failed.
    pub fn begin_planned(&self, following: u32) -> Result<(u64, u64), EnforcerError> {
        self.inner.begin_planned(following)
    }

    /// Returns the number of steps that have begun.
    pub fn steps_begun(&self) -> u64 {
        let state = self.inner.state.lock();
        state.first + state.steps.len() as u64
    }

    /// Proposes a plan of the same collectives to all ranks; returns the first step to which it applies
    /// on every rank. Steps continue meanwhile. Only rank 0 proposes, one plan at a time.
    ///
    /// # Errors
    /// A rank cannot follow it, is lost, or does not answer before the deadline: then no rank adopts
    /// it.
    pub fn propose(&self, script: &RankSchedule) -> Result<u64, EnforcerError> {
        self.inner.propose(script)
    }

    /// Begins a step, and guarantees `following` more steps of the same schedule; all ranks must pass
    /// the same number. Returns the number of the step.
    ///
    /// # Errors
    /// The call breaks an earlier guarantee, or the team has failed.
    pub fn begin(
        &self,
        part: &Arc<PreparedSchedule>,
        following: u32,
    ) -> Result<u64, EnforcerError> {
        self.inner.begin(part, following)
    }

    /// Allocates memory for vectors: shared memory of all ranks, if they are on one machine.
    ///
    /// # Errors
    /// No memory is available.
    pub fn memory(&self, length: usize) -> std::io::Result<SharedMemory> {
        match &self.inner.ground {
            Some(ground) => ground.memory(length),
            None => self.plane.memory(length),
        }
    }

    /// Executes the only collective of a schedule as a step of its own and waits until it completes;
    /// returns the range of the vector that holds the result. If a single channel carries it and no
    /// other step is in flight, the calling thread executes it; then [`Self::take_spans`] does not
    /// report it.
    ///
    /// # Errors
    /// As for [`Self::begin`], [`Self::submit`] and [`Self::wait`].
    pub fn call(
        &self,
        part: &Arc<PreparedSchedule>,
        elements: Elements,
        work: CollectiveBuffer,
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

    /// Submits a collective of a step. The buffer is laid out as [`Collective`] defines; it must not be
    /// accessed until the collective completes.
    ///
    /// # Arguments
    /// - `poison`: why the elements are invalid, if they are; the reason propagates to the other ranks.
    ///
    /// # Errors
    /// The step has no such operation, the operation is another collective, was already submitted, or
    /// the vector has another size.
    pub fn submit(
        &self,
        (step, operation): (u64, u32),
        asked: (&Collective, Elements),
        work: CollectiveBuffer,
        poison: Option<String>,
    ) -> Result<CollectiveTicket, EnforcerError> {
        let ticket = self.inner.submit((step, operation), asked, work, poison)?;
        self.inner.notify(self.inner.state.lock());
        Ok(ticket)
    }

    /// Waits until a collective completes; the result is where [`Collective::result`] defines.
    ///
    /// # Errors
    /// A rank poisoned its elements, is lost, times out, or executes something else.
    pub fn wait(&self, ticket: CollectiveTicket) -> Result<Arc<CollectiveBuffer>, EnforcerError> {
        let CollectiveTicket { step, operation, work } = ticket;
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
                // SAFETY: the collective has completed.
                unsafe { self.inner.give_out(&work, origin.as_ref(), collective, elements) };
                return Ok(origin.map_or(work, Arc::new));
            }
            if !std::mem::replace(&mut is_told, true) {
                self.inner.notify(state);
                state = self.inner.state.lock();
                continue;
            }
            // The wait is bounded: by the program, or by the timeout of a motif.
            self.inner.changed.wait(&mut state);
        }
    }

    /// Has a collective completed or failed?
    pub fn is_done(&self, ticket: &CollectiveTicket) -> bool {
        let mut state = self.inner.state.lock();
        if state.failed.is_some() {
            return true;
        }
        let Ok(run) = state.step(ticket.step) else { return true };
        run.running[ticket.operation as usize].as_ref().is_some_and(RunningStep::is_done)
    }

    /// Takes the spans of motifs that were executed since the last call (a trace).
    pub fn take_spans(&self) -> Vec<MotifSpan> {
        std::mem::take(&mut self.inner.state.lock().spans).into()
    }

    /// Takes the warnings since the last call about events that caused no failure: which channels no
    /// longer reach a rank, and which channels replace them (failover).
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut *self.inner.notices.lock())
    }

    /// Returns nanoseconds since this enforcer started: the clock of spans.
    pub fn now_ns(&self) -> u64 {
        self.inner.now()
    }

    /// Closes this rank; ranks that wait for it fail with an error that says so.
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
            // A panic of the thread has already been reported.
            let _ = thread.join();
        }
    }
}

impl Inner {
    /// Makes a transport of each line: those of the channels, and last the one for agreement.
    fn transports(
        &self,
        team: &Team<'_>,
        lines: Vec<Vec<Option<ReliableStream>>>,
    ) -> Result<Vec<ChannelTransport>, EnforcerError> {
        let ranks = (team.rank as usize, team.hosts.len());
        let mut made = Vec::with_capacity(lines.len());
        for (number, (lanes, name)) in lines.into_iter().zip(team.names()).enumerate() {
            let wake = self.wakes[number].try_clone().map_err(|error| team.no(&error))?;
            let mender = team.mender(name, self.offers[number].clone(), self.notices.clone());
            let ground = self.ground.as_ref();
            let pull = ground.filter(|_| self.is_pulled.get(number) == Some(&true));
            made.push(ChannelTransport::new(
                lanes,
                (wake, self.is_stopped.clone()),
                mender,
                (team.timeout, name.1.queue()),
                pull.map(|ground| ShmTransport::new(ground.clone(), number, ranks)),
            ));
        }
        Ok(made)
    }

    /// Takes the connections that peers open later, to replace broken ones.
    fn watch(self: &Arc<Self>, team: &Team<'_>) {
        let inner = Arc::downgrade(self);
        let names = team.names();
        let watch = move |opened: Opened| {
            let line = names.iter().position(|(name, _)| *name == opened.lane.channel);
            let (Some(line), Some(inner)) = (line, inner.upgrade()) else { return };
            inner.offers[line].lock().push(opened);
            inner.wake_all();
        };
        team.plane.lanes().watch(team.name, Arc::new(watch));
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn prepare(&self, script: Arc<RankSchedule>) -> Result<Arc<PreparedSchedule>, EnforcerError> {
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
        Ok(Arc::new(PreparedSchedule { script, rounds, digests }))
    }

    /// Blocks while [`STEPS_MAX`] steps are in flight (back-pressure).
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

    /// Starts a step, and guarantees `following` more of the same schedule.
    fn start(&self, part: &Arc<PreparedSchedule>, following: u32) -> Result<u64, EnforcerError> {
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

    /// Records a submitted collective without notifying the channels.
    fn submit(
        &self,
        (step, operation): (u64, u32),
        (collective, elements): (&Collective, Elements),
        work: CollectiveBuffer,
        poison: Option<String>,
    ) -> Result<CollectiveTicket, EnforcerError> {
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
        *slot = Some(RunningStep {
            work: work.clone(),
            origin,
            elements,
            submitted_ns: self.now(),
            poison: Arc::new(Mutex::new(poison)),
            done: vec![None; planned.motifs.len()],
        });
        Ok(CollectiveTicket { step, operation, work })
    }
}

/// Wakes the thread that polls this event.
fn ring(wake: &OwnedFd) {
    // Ignored: if the counter is full, the event is already readable.
    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
}
