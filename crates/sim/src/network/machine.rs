//! Executes a routing plan on modelled chips and links, vector by vector, cycle-accurate, with data.
//!
//! Parallel discrete-event simulation in conservative time windows as long as the shortest hop (the
//! lookahead): a vector that departs in one window arrives at the next chip in a later one, so chips
//! are independent within a window and are divided among threads. Within a window, each chip processes
//! its events in time order. So the outcome does not depend on the number of threads.
//!
//! Only departure times are taken from the plan: a vector's payload is read at departure and arrives a
//! hop later. A vector that has not arrived when its next hop is due is a fault, not a wait.
//!
//! Source: the multi-TSP system §4.

use std::collections::VecDeque;

use base::{LinkId, Ticks, VertexId};
use rayon::prelude::*;
use route::{Computation, RoutePlan, Task};
use rustc_hash::FxHashMap;
use thiserror::Error;
use topology::Network;

use super::code::{VECTOR, decode, encode};
use super::memory::{ChipMemory, Compute, Results, SumType};
use super::noise::Noise;

/// Why a plan cannot be executed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MachineError {
    /// The plan covers only one part of a rotational symmetry.
    #[error("the plan is of one of {parts} parts; expected a whole one, from `Plan::whole`")]
    Part {
        /// Number of parts.
        parts: u32,
    },
    /// The plan's vectors have another size.
    #[error("vectors are of {found} bytes; this machine's are of {VECTOR}")]
    Vector {
        /// Vector size of the plan, in bytes.
        found: u64,
    },
    /// A chip's memory is missing, or too small for a task's tensor.
    #[error("chip {chip} has a memory of {found} vectors; task {task} needs {needed}")]
    Memory {
        /// The chip.
        chip: VertexId,
        /// The task that needs it.
        task: u32,
        /// Vectors needed.
        needed: u64,
        /// Vectors available.
        found: u64,
    },
    /// The caller's computation failed.
    #[error("task {task} on chip {chip} failed: {cause}")]
    Computation {
        /// The task.
        task: u32,
        /// The chip.
        chip: VertexId,
        /// The caller's error message.
        cause: String,
    },
    /// A hop with latency 0, which leaves no lookahead.
    #[error("a link takes no time; nothing can be simulated over it")]
    Instant,
    /// The `progress` callback stopped the run.
    #[error("the simulation was stopped")]
    Stopped,
}

/// A failure of one vector.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mishap {
    /// It was not there when its hop was due, or its sender is dead.
    Missing,
    /// It arrived with uncorrectable bit errors.
    Damaged,
}

/// A vector that was lost or damaged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Incident {
    /// Arrival time.
    pub when: Ticks,
    /// The link.
    pub link: LinkId,
    /// Task number.
    pub task: u32,
    /// The vector's index within the task.
    pub vector: u64,
    /// The failure.
    pub mishap: Mishap,
}

/// Outcome and metrics of a run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineReport {
    /// Makespan: when the last vector arrived or the last computation was done.
    pub end: Ticks,
    /// Number of vectors received, counted once per hop.
    pub vectors: u64,
    /// Number of vectors received with a corrected error.
    pub corrected: u64,
    /// Failures, in time order.
    pub incidents: Vec<Incident>,
}

/// A plan bound to a network, ready to simulate.
pub struct Machine<'a> {
    network: &'a Network,
    plan: &'a RoutePlan,
    sum: SumType,
    noise: Noise,
    compute: &'a dyn Compute,
    /// For each train, the time between its vectors.
    paces: Vec<u64>,
    window: u64,
}

impl<'a> Machine<'a> {
    /// # Errors
    /// The plan covers only one part of a rotational symmetry, its vectors have another size than
    /// chips', or a hop takes no time.
    pub fn new(
        network: &'a Network,
        plan: &'a RoutePlan,
        compute: &'a dyn Compute,
    ) -> Result<Self, MachineError> {
        if plan.circle.turns() != 1 {
            return Err(MachineError::Part { parts: plan.circle.turns() });
        }
        let timing = &plan.schedule.timing;
        if timing.vector.0 != VECTOR as u64 {
            return Err(MachineError::Vector { found: timing.vector.0 });
        }
        let hops = network.links().iter().map(|link| timing.hop(link).0);
        let window = hops.min().unwrap_or(1);
        if window == 0 {
            return Err(MachineError::Instant);
        }
        let trains = plan.schedule.trains.iter();
        let paces = trains.map(|train| timing.pace(network, train.links()).0).collect();
        Ok(Self {
            network,
            plan,
            sum: SumType::default(),
            noise: Noise::none(),
            compute,
            paces,
            window,
        })
    }

    /// Sets the element type in which vectors are summed.
    pub fn adding(mut self, sum: SumType) -> Self {
        self.sum = sum;
        self
    }

    /// Sets the link errors to inject.
    pub fn with_noise(mut self, noise: Noise) -> Self {
        self.noise = noise;
        self
    }

    /// Executes the plan on the threads of the current rayon pool.
    ///
    /// # Arguments
    /// - `memories`: one per endpoint; empty to simulate times only.
    /// - `progress`: called with the elapsed fraction of the planned time; returns `false` to stop.
    ///
    /// # Errors
    /// Memory is missing or too small, a computation fails, or `progress` stopped the run.
    pub fn run(
        &self,
        memories: &mut [ChipMemory],
        progress: impl Fn(f64) -> bool,
    ) -> Result<MachineReport, MachineError> {
        self.check(memories)?;
        let mut chips = self.chips(memories);
        let mut out: Vec<Vec<Flights>> = (0..self.network.vertices())
            .map(|vertex| self.network.out_of(VertexId(vertex)).iter().map(|_| Flights::default()))
            .map(Iterator::collect)
            .collect();
        let end = self.plan.end().0;
        let mut from = 0;
        loop {
            let until = from + self.window;
            chips.par_iter_mut().zip(&mut out).for_each(|(chip, out)| {
                out.iter_mut().for_each(Flights::clear);
                chip.step(self, until, out);
            });
            if let Some(error) = chips.iter_mut().find_map(|chip| chip.error.take()) {
                return Err(error);
            }
            chips.par_iter_mut().for_each(|chip| chip.collect(&out));
            let Some(next) = chips.iter().filter_map(Chip::next).min() else { break };
            from = next.max(until);
            if !progress(from as f64 / end.max(1) as f64) {
                return Err(MachineError::Stopped);
            }
        }
        let mut outcome = MachineReport::default();
        for chip in chips {
            outcome.end = outcome.end.max(Ticks(chip.end));
            outcome.vectors += chip.vectors;
            outcome.corrected += chip.corrected;
            outcome.incidents.extend(chip.incidents);
        }
        outcome.incidents.sort_unstable();
        Ok(outcome)
    }

    /// Creates all vertices with their computations and departures.
    fn chips<'m>(&self, memories: &'m mut [ChipMemory]) -> Vec<Chip<'m>> {
        let Machine { network, plan, .. } = self;
        let carries = !memories.is_empty();
        let mut memories = memories.iter_mut();
        let vertices = (0..network.vertices()).map(VertexId);
        let mut chips: Vec<Chip> =
            vertices.map(|vertex| Chip::new(self, vertex, memories.next(), carries)).collect();
        for (task, asked) in (0..).zip(&plan.tasks) {
            if let Task::Computation(Computation { chip, length, .. }) = asked {
                let end = plan.schedule.ends[task as usize].0;
                let job = Job { begin: end - length.0, end, task, results: None };
                chips[chip.0 as usize].jobs.push(job);
            }
        }
        for (number, train) in (0..).zip(&plan.schedule.trains) {
            for (hop, taken) in (0..).zip(&train.hops) {
                let (link, start) = (taken.link, taken.start.0);
                let run =
                    Run { train: number, hop, lane: self.place(link), link, start, vector: 0 };
                chips[network.link(link).source.0 as usize].runs.push(run);
            }
        }
        for chip in &mut chips {
            chip.jobs.sort_by_key(|job| (job.begin, job.task));
            chip.runs.sort_by_key(|run| (run.start, run.train, run.hop));
        }
        chips
    }

    /// Returns a link's index among the outgoing links of its source.
    fn place(&self, link: LinkId) -> usize {
        let out = self.network.out_of(self.network.link(link).source);
        out.iter().position(|other| *other == link).expect("a link leaves its source")
    }

    /// Checks that every transfer fits in memory at both ends.
    fn check(&self, memories: &[ChipMemory]) -> Result<(), MachineError> {
        if memories.is_empty() {
            return Ok(());
        }
        for (task, asked) in (0..).zip(&self.plan.tasks) {
            let Some(transfer) = asked.transfer() else { continue };
            let vectors = self.plan.schedule.timing.vectors(transfer.size);
            let ends = [(transfer.source, transfer.read), (transfer.target, transfer.write)];
            for (chip, start) in ends {
                let needed = u64::from(start.0) + vectors;
                let found = memories.get(chip.0 as usize).map_or(0, ChipMemory::vectors);
                if found < needed {
                    return Err(MachineError::Memory { chip, task, needed, found });
                }
            }
        }
        Ok(())
    }
}

/// A vector in flight.
#[derive(Clone, Copy)]
struct Flight {
    arrives: u64,
    train: u32,
    hop: u32,
    /// Index within the train.
    vector: u64,
    is_lost: bool,
}

/// Vectors in flight over one link in order, with their payload if there are memories.
#[derive(Default)]
struct Flights {
    flights: Vec<Flight>,
    bytes: Vec<u8>,
}

impl Flights {
    fn clear(&mut self) {
        self.flights.clear();
        self.bytes.clear();
    }
}

/// The incoming vectors of one link of a chip.
struct Lane {
    link: LinkId,
    /// The sender, and the index of the link among its outgoing links.
    source: VertexId,
    place: usize,
    flights: Flights,
    /// How many of them have arrived.
    taken: usize,
}

/// The departures of a train on one hop.
struct Run {
    train: u32,
    hop: u32,
    /// Index among the chip's outgoing links.
    lane: usize,
    link: LinkId,
    start: u64,
    /// The next vector to depart.
    vector: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The lane, and the index of its flight.
    Arrival(usize, usize),
    /// The computation.
    Done(usize),
    Begun(usize),
    /// The run, and the index of its vector.
    Departure(usize, u64),
}

struct Job {
    begin: u64,
    end: u64,
    task: u32,
    results: Option<Results>,
}

/// One vertex with its state and its events.
struct Chip<'m> {
    vertex: VertexId,
    memory: Option<&'m mut ChipMemory>,
    /// Sorted by start; those before `begun` have begun.
    runs: Vec<Run>,
    begun: usize,
    active: Vec<usize>,
    jobs: Vec<Job>,
    jobs_begun: usize,
    /// Jobs that have begun and are not done.
    computing: Vec<usize>,
    lanes: Vec<Lane>,
    /// Buffered vectors that wait for their next hop, by train and hop.
    held: FxHashMap<(u32, u32), VecDeque<Held>>,
    events: Vec<(u64, Event)>,
    end: u64,
    vectors: u64,
    corrected: u64,
    incidents: Vec<Incident>,
    error: Option<MachineError>,
    /// Whether vectors carry payload.
    carries: bool,
}

/// A buffered vector: its index and its payload.
type Held = (u64, Option<[u8; VECTOR]>);

impl<'m> Chip<'m> {
    fn new(
        machine: &Machine,
        vertex: VertexId,
        memory: Option<&'m mut ChipMemory>,
        carries: bool,
    ) -> Self {
        let network = machine.network;
        let lanes = network.into(vertex).iter().map(|&link| {
            let source = network.link(link).source;
            let place = machine.place(link);
            Lane { link, source, place, flights: Flights::default(), taken: 0 }
        });
        Self {
            vertex,
            memory,
            runs: Vec::new(),
            begun: 0,
            active: Vec::new(),
            jobs: Vec::new(),
            jobs_begun: 0,
            computing: Vec::new(),
            lanes: lanes.collect(),
            held: FxHashMap::default(),
            events: Vec::new(),
            end: 0,
            vectors: 0,
            corrected: 0,
            incidents: Vec::new(),
            error: None,
            carries,
        }
    }

    /// Processes all of this chip's events before `until`.
    fn step(&mut self, machine: &Machine, until: u64, out: &mut [Flights]) {
        let mut events = std::mem::take(&mut self.events);
        self.gather(machine, until, &mut events);
        events.sort_unstable();
        for (when, event) in events.drain(..) {
            self.end = self.end.max(when);
            match event {
                Event::Arrival(lane, place) => self.arrive(machine, lane, place),
                Event::Begun(job) => self.begin(machine, job),
                Event::Done(job) => {
                    self.begin(machine, job);
                    self.finish(job);
                }
                Event::Departure(run, vector) => self.depart(machine, when, run, vector, out),
            }
        }
        self.events = events;
    }

    fn gather(&mut self, machine: &Machine, until: u64, events: &mut Vec<(u64, Event)>) {
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            let flights = &lane.flights.flights;
            let come = flights.partition_point(|one| one.arrives < until);
            let arrival = |at: usize| (flights[at].arrives, Event::Arrival(number, at));
            events.extend((lane.taken..come).map(arrival));
            lane.taken = come;
        }
        while self.runs.get(self.begun).is_some_and(|run| run.start < until) {
            self.active.push(self.begun);
            self.begun += 1;
        }
        let runs = &mut self.runs;
        self.active.retain(|&number| {
            let run = &mut runs[number];
            let pace = machine.paces[run.train as usize];
            let count = machine.plan.schedule.trains[run.train as usize].count;
            while run.vector < count && run.start + run.vector * pace < until {
                let when = run.start + run.vector * pace;
                events.push((when, Event::Departure(number, run.vector)));
                run.vector += 1;
            }
            run.vector < count
        });
        while self.jobs.get(self.jobs_begun).is_some_and(|job| job.begin < until) {
            events.push((self.jobs[self.jobs_begun].begin, Event::Begun(self.jobs_begun)));
            self.computing.push(self.jobs_begun);
            self.jobs_begun += 1;
        }
        let jobs = &self.jobs;
        self.computing.retain(|&number| {
            let is_done = jobs[number].end < until;
            if is_done {
                events.push((jobs[number].end, Event::Done(number)));
            }
            !is_done
        });
    }

    fn arrive(&mut self, machine: &Machine, lane: usize, place: usize) {
        let Lane { link, flights, .. } = &self.lanes[lane];
        let link = *link;
        let flight = flights.flights[place];
        let train = &machine.plan.schedule.trains[flight.train as usize];
        let number = train.first + flight.vector;
        self.vectors += 1;
        let sent = flights.bytes.get(place * VECTOR..(place + 1) * VECTOR);
        let mut bytes: Option<[u8; VECTOR]> =
            sent.map(|sent| sent.try_into().expect("it is as long as a vector"));
        let mut mishap = flight.is_lost.then_some(Mishap::Missing);
        let wrong = machine.noise.wrong_bits(link, flight.train, flight.hop, flight.vector);
        if mishap.is_none() && !wrong.is_empty() {
            let mut on_link = encode(&bytes.unwrap_or([0; VECTOR]), number as u16);
            for bit in wrong {
                on_link.flip(bit);
            }
            match decode(&on_link, number as u16) {
                Ok((vector, was_corrected)) => {
                    self.corrected += u64::from(was_corrected);
                    bytes = bytes.map(|_| vector);
                }
                Err(_) => {
                    mishap = Some(Mishap::Damaged);
                    bytes = bytes.map(|_| on_link.vector());
                }
            }
        }
        if let Some(mishap) = mishap {
            let when = Ticks(flight.arrives);
            let task = train.task;
            self.incidents.push(Incident { when, link, task, vector: number, mishap });
        }
        let is_last = flight.hop as usize + 1 == train.hops.len();
        if !is_last {
            let next = self.held.entry((flight.train, flight.hop + 1)).or_default();
            next.push_back((flight.vector, bytes));
            return;
        }
        let transfer = machine.plan.tasks[train.task as usize].transfer();
        let transfer = transfer.expect("trains are of transfers");
        if let (Some(memory), Some(bytes)) = (self.memory.as_deref_mut(), bytes) {
            let sum = transfer.sums.then_some(machine.sum);
            memory.write(u64::from(transfer.write.0) + number, &bytes, sum);
        }
    }

    fn depart(
        &mut self,
        machine: &Machine,
        when: u64,
        run: usize,
        vector: u64,
        out: &mut [Flights],
    ) {
        let Run { train: number, hop, lane, link, .. } = self.runs[run];
        let train = &machine.plan.schedule.trains[number as usize];
        let mut is_lost = machine.noise.is_dead(self.vertex);
        let out = &mut out[lane];
        if hop == 0 {
            let transfer = machine.plan.tasks[train.task as usize].transfer();
            let from = transfer.map_or(0, |transfer| u64::from(transfer.read.0));
            if let Some(memory) = self.memory.as_deref() {
                out.bytes.extend_from_slice(memory.read(from + train.first + vector));
            }
        } else {
            let held = self.held.get_mut(&(number, hop));
            let there = held.filter(|held| held.front().is_some_and(|(next, _)| *next == vector));
            let bytes = there.and_then(VecDeque::pop_front);
            if bytes.is_none() {
                is_lost = true;
            }
            if self.carries {
                let bytes = bytes.and_then(|(_, bytes)| bytes).unwrap_or([0; VECTOR]);
                out.bytes.extend_from_slice(&bytes);
            }
        }
        let arrives = when + machine.plan.schedule.timing.hop(machine.network.link(link)).0;
        out.flights.push(Flight { arrives, train: number, hop, vector, is_lost });
    }

    fn begin(&mut self, machine: &Machine, job: usize) {
        let job = &mut self.jobs[job];
        let Some(memory) = self.memory.as_deref().filter(|_| job.results.is_none()) else { return };
        match machine.compute.compute(job.task, self.vertex, memory) {
            Ok(results) => job.results = Some(results),
            Err(cause) => {
                let (task, chip) = (job.task, self.vertex);
                self.error.get_or_insert(MachineError::Computation { task, chip, cause });
            }
        }
    }

    fn finish(&mut self, job: usize) {
        let (task, results) = (self.jobs[job].task, self.jobs[job].results.take());
        let Some(memory) = self.memory.as_deref_mut() else { return };
        for (start, bytes) in results.unwrap_or_default() {
            if !memory.put(start, &bytes) {
                let needed = u64::from(start.0) + (bytes.len() as u64).div_ceil(VECTOR as u64);
                let (chip, found) = (self.vertex, memory.vectors());
                self.error.get_or_insert(MachineError::Memory { chip, task, needed, found });
            }
        }
    }

    /// Receives the vectors that other chips sent in this window, and drops those already processed.
    fn collect(&mut self, out: &[Vec<Flights>]) {
        for lane in &mut self.lanes {
            let sent = &out[lane.source.0 as usize][lane.place];
            let kept = &mut lane.flights;
            kept.flights.drain(..lane.taken);
            kept.bytes.drain(..(lane.taken * VECTOR).min(kept.bytes.len()));
            lane.taken = 0;
            kept.flights.extend_from_slice(&sent.flights);
            kept.bytes.extend_from_slice(&sent.bytes);
        }
    }

    /// Returns the time of this chip's next event.
    fn next(&self) -> Option<u64> {
        let flights = self.lanes.iter().filter_map(|lane| lane.flights.flights.get(lane.taken));
        let arrivals = flights.map(|flight| flight.arrives);
        let begins = self.runs.get(self.begun).map(|run| run.start);
        let jobs = self.jobs.get(self.jobs_begun).map(|job| job.begin);
        let dones = self.computing.iter().map(|&job| self.jobs[job].end);
        // A run in progress continues in the next window.
        let active = self.active.first().map(|_| 0);
        arrivals.chain(begins).chain(jobs).chain(dones).chain(active).min()
    }
}
