//! Carries a plan out on modelled chips and links, vector by vector, to the cycle, with data.
//!
//! Time goes in windows as long as the shortest hop: whatever leaves a chip in one arrives in another
//! one later, so within a window chips have nothing to do with each other and threads share them out.
//! Within a window a chip's events come in the order of their times. So the outcome is the same
//! whatever the number of threads.
//!
//! Nothing is taken from the plan but when each vector leaves: what it carries is read then, and
//! comes a hop later. If it is not there when it should leave again, that is a fault, not a wait.
//!
//! Source: the multi-TSP system §4.

use std::collections::VecDeque;

use base::{Address, LinkId, Ticks, VertexId};
use fabric::Network;
use half::f16;
use rayon::prelude::*;
use route::{Computation, RoutePlan, Task};
use rustc_hash::FxHashMap;
use thiserror::Error;

use super::code::{VECTOR, decode, encode};
use super::noise::Noise;

/// What cannot be carried out.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MachineError {
    /// A plan of one part of a circle.
    #[error("the plan is of one of {parts} parts; expected a whole one, from `Plan::whole`")]
    Part {
        /// How many there are.
        parts: u32,
    },
    /// Vectors of another size.
    #[error("vectors are of {found} bytes; this machine's are of {VECTOR}")]
    Vector {
        /// As planned.
        found: u64,
    },
    /// Memory that is missing, or ends before what is to lie there.
    #[error("chip {chip} has a memory of {found} vectors; task {task} needs {needed}")]
    Memory {
        /// Which chip.
        chip: VertexId,
        /// What for.
        task: u32,
        /// How much is needed.
        needed: u64,
        /// How much there is.
        found: u64,
    },
    /// A computation that the caller could not do.
    #[error("task {task} on chip {chip} failed: {cause}")]
    Computation {
        /// Which task.
        task: u32,
        /// Where.
        chip: VertexId,
        /// Why.
        cause: String,
    },
    /// A hop that takes no time.
    #[error("a link takes no time; nothing can be simulated over it")]
    Instant,
    /// It was told to stop.
    #[error("the simulation was stopped")]
    Stopped,
}

/// What goes wrong with one vector.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mishap {
    /// It was not there when it should have left again.
    Missing,
    /// It came with more errors than can be corrected.
    Damaged,
}

/// A vector with which something went wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Incident {
    /// When.
    pub when: Ticks,
    /// On which link.
    pub link: LinkId,
    /// Of which task.
    pub task: u32,
    /// Which of its vectors.
    pub vector: u64,
    /// What.
    pub mishap: Mishap,
}

/// How vectors are added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SumType {
    /// As 32-bit floating-point numbers.
    #[default]
    F32,
    /// As 16-bit floating-point numbers.
    F16,
    /// As 32-bit integers, which wrap.
    I32,
}

impl SumType {
    fn add(self, there: &mut [u8], vector: &[u8; VECTOR]) {
        match self {
            SumType::F32 => add(there, vector, |one, other| {
                (f32::from_le_bytes(one) + f32::from_le_bytes(other)).to_le_bytes()
            }),
            SumType::F16 => add(there, vector, |one, other| {
                (f16::from_le_bytes(one) + f16::from_le_bytes(other)).to_le_bytes()
            }),
            SumType::I32 => add(there, vector, |one, other| {
                i32::from_le_bytes(one).wrapping_add(i32::from_le_bytes(other)).to_le_bytes()
            }),
        }
    }
}

/// Adds numbers of so many bytes.
fn add<const N: usize>(there: &mut [u8], vector: &[u8], sum: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (there, came) in there.chunks_exact_mut(N).zip(vector.chunks_exact(N)) {
        let number = |bytes: &[u8]| bytes.try_into().expect("chunks are of a number");
        there.copy_from_slice(&sum(number(there), number(came)));
    }
}

/// A chip's memory: bytes, by vectors.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ChipMemory(pub Vec<u8>);

impl ChipMemory {
    /// So many vectors of zeros.
    pub fn new(vectors: u64) -> Self {
        Self(vec![0; vectors as usize * VECTOR])
    }

    /// How many vectors it has.
    pub fn vectors(&self) -> u64 {
        (self.0.len() / VECTOR) as u64
    }

    fn read(&self, at: u64) -> &[u8; VECTOR] {
        let at = at as usize * VECTOR;
        self.0[at..at + VECTOR].try_into().expect("it is as long as a vector")
    }

    fn write(&mut self, at: u64, vector: &[u8; VECTOR], sum: Option<SumType>) {
        let at = at as usize * VECTOR;
        let there = &mut self.0[at..at + VECTOR];
        match sum {
            Some(sum) => sum.add(there, vector),
            None => there.copy_from_slice(vector),
        }
    }

    /// Replaces what lies from an address on; `false` if it does not fit.
    pub fn put(&mut self, at: Address, bytes: &[u8]) -> bool {
        let at = at.0 as usize * VECTOR;
        let there = self.0.get_mut(at..at + bytes.len());
        there.map(|there| there.copy_from_slice(bytes)).is_some()
    }
}

/// What a computation leaves in memory.
pub type Results = Vec<(Address, Vec<u8>)>;

/// What chips compute.
pub trait Compute: Sync {
    /// Does one task: reads memory when it begins; what it returns is there when the task is done.
    ///
    /// # Errors
    /// A text that says what failed.
    fn compute(&self, task: u32, chip: VertexId, memory: &ChipMemory) -> Result<Results, String>;
}

/// Nothing: for plans that only move things.
pub struct Nothing;

impl Compute for Nothing {
    fn compute(&self, _: u32, _: VertexId, _: &ChipMemory) -> Result<Results, String> {
        Ok(Vec::new())
    }
}

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineReport {
    /// When the last vector came, or the last computation was done.
    pub end: Ticks,
    /// Vectors over links.
    pub vectors: u64,
    /// Vectors that came with an error that was corrected.
    pub corrected: u64,
    /// What went wrong, in the order of time.
    pub incidents: Vec<Incident>,
}

/// A plan on a network.
pub struct Machine<'a> {
    network: &'a Network,
    plan: &'a RoutePlan,
    sum: SumType,
    noise: Noise,
    compute: &'a dyn Compute,
    /// For each train the time between its vectors.
    paces: Vec<u64>,
    window: u64,
}

impl<'a> Machine<'a> {
    /// # Errors
    /// The plan is of one part of a circle, or of other vectors than chips have.
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

    /// How vectors are added.
    pub fn adding(mut self, sum: SumType) -> Self {
        self.sum = sum;
        self
    }

    /// With errors on links.
    pub fn with_noise(mut self, noise: Noise) -> Self {
        self.noise = noise;
        self
    }

    /// Carries the plan out, on as many threads as the current pool of rayon has.
    ///
    /// # Arguments
    /// - `memories`: of each endpoint; of none to look at times alone.
    /// - `progress`: is told which part of the planned time is over; `false` stops it.
    ///
    /// # Errors
    /// Memory is missing, a computation fails, or it was stopped.
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

    /// All vertices with what they are to do.
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

    /// A link's place among those of its source.
    fn place(&self, link: LinkId) -> usize {
        let out = self.network.out_of(self.network.link(link).source);
        out.iter().position(|other| *other == link).expect("a link leaves its source")
    }

    /// Whether everything has a place in memory.
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

/// A vector under way.
#[derive(Clone, Copy)]
struct Flight {
    arrives: u64,
    train: u32,
    hop: u32,
    /// Counted over the train.
    vector: u64,
    is_lost: bool,
}

/// Vectors that follow one another over a link, with what they carry if there are memories.
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

/// What is on its way to a chip over one link.
struct Lane {
    link: LinkId,
    /// Who sends, and at which place among its links.
    source: VertexId,
    place: usize,
    flights: Flights,
    /// How many of them have come.
    taken: usize,
}

/// A train over one hop.
struct Run {
    train: u32,
    hop: u32,
    /// The place among the chip's links.
    lane: usize,
    link: LinkId,
    start: u64,
    /// The vector that leaves next.
    vector: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The lane, and which of its flights.
    Arrival(usize, usize),
    /// Which computation.
    Done(usize),
    Begun(usize),
    /// The run, and which of its vectors.
    Departure(usize, u64),
}

struct Job {
    begin: u64,
    end: u64,
    task: u32,
    results: Option<Results>,
}

/// One vertex, and everything that it does.
struct Chip<'m> {
    vertex: VertexId,
    memory: Option<&'m mut ChipMemory>,
    /// In the order of their starts; those before `begun` have begun.
    runs: Vec<Run>,
    begun: usize,
    active: Vec<usize>,
    jobs: Vec<Job>,
    jobs_begun: usize,
    /// Jobs that have begun and are not done.
    computing: Vec<usize>,
    lanes: Vec<Lane>,
    /// Vectors that wait here for their next hop, by train and hop.
    held: FxHashMap<(u32, u32), VecDeque<Held>>,
    events: Vec<(u64, Event)>,
    end: u64,
    vectors: u64,
    corrected: u64,
    incidents: Vec<Incident>,
    error: Option<MachineError>,
    /// Whether vectors carry anything.
    carries: bool,
}

/// Which vector waits, and what it carries.
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

    /// Does everything that happens here before `until`.
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

    /// Takes over what others have sent here, and forgets what has come.
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

    /// When something happens here next.
    fn next(&self) -> Option<u64> {
        let flights = self.lanes.iter().filter_map(|lane| lane.flights.flights.get(lane.taken));
        let arrivals = flights.map(|flight| flight.arrives);
        let begins = self.runs.get(self.begun).map(|run| run.start);
        let jobs = self.jobs.get(self.jobs_begun).map(|job| job.begin);
        let dones = self.computing.iter().map(|&job| self.jobs[job].end);
        // What goes on goes on in the next window.
        let active = self.active.first().map(|_| 0);
        arrivals.chain(begins).chain(jobs).chain(dones).chain(active).min()
    }
}
