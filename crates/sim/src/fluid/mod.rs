//! Fluid-flow simulation of a placed step over an interconnect, in virtual time: devices compute one
//! task at a time, transfers are flows at max-min fair rates over shared resources, and circuits are
//! reconfigured meanwhile.
//!
//! Source: SiP-ML §4.2. Differs from the paper's simulator: 1. discrete-event, not in fixed time steps;
//! 2. rates are max-min fair at both ends and in between, not at the sender alone; 3. ring all-reduces
//! transfer 2 (n - 1) / n of each member's data, between real neighbours, and half of it each way where
//! each direction has wavelengths of its own.

mod circuits;
mod rates;
mod resources;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use base::{Bytes, Nanos};
use ir::{CollectiveKind, StepGraph, StepGraphError, StepOp, Successors};
use place::OpError;
use thiserror::Error;
use topology::{Around, Interconnect, InterconnectKind};

use rates::{SharePath, bytes_per_ns};
use resources::FlowResources;

/// Why a step cannot be simulated.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum FluidError {
    /// The step graph is invalid.
    #[error(transparent)]
    Graph(#[from] StepGraphError),
    /// The model that it is a step of cannot be placed.
    #[error(transparent)]
    Model(#[from] OpError),
    /// The step is for another number of devices.
    #[error("the step is of {found} devices; the topology has {devices}")]
    Devices {
        /// Devices of the step, in all parts.
        found: u64,
        /// Devices of the topology.
        devices: u32,
    },
    /// One part cannot represent all parts.
    #[error("a part has {found} devices; expected a multiple of {of}, which stand together")]
    Part {
        /// Devices of the part.
        found: u32,
        /// Devices of a server, row or leaf.
        of: u32,
    },
    /// Deadlock: some transfer never gets a circuit.
    #[error("{left} tasks never end: no circuit is ever given to what they move")]
    Stuck {
        /// Number of tasks left.
        left: usize,
    },
}

/// Report of a simulated step.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct FluidReport {
    /// Makespan: when all tasks were done.
    pub end: Nanos,
    /// Compute time of each device.
    pub busy: Vec<Nanos>,
    /// Start and end time of each task.
    pub times: Vec<(Nanos, Nanos)>,
    /// Bytes sent by the devices of a part.
    pub moved: Bytes,
    /// Number of circuit reconfigurations.
    pub changes: u64,
    /// Number of simulation events processed.
    pub events: u64,
}

/// A simulation event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// A device has finished computing a task.
    Computed { device: u32, task: u32 },
    /// The latency of a communication task is over, and its flows start.
    Begins { task: u32 },
    /// A flow has completed, unless its rate has changed since.
    Ends { flow: u32, version: u32 },
}

#[derive(Clone, Debug, Default)]
struct Flow {
    task: u32,
    left: f64,
    began: u64,
    since: u64,
    rate: f64,
    version: u32,
    path: SharePath,
    is_open: bool,
}

impl Flow {
    /// Accounts for the bytes transferred since the last call, and returns them.
    fn settle(&mut self, now: u64) -> f64 {
        let gone = (self.rate * (now - self.since) as f64).min(self.left);
        self.left -= gone;
        self.since = now;
        gone
    }
}

/// Rate updates may be late by 1 / `PATIENCE` of the usual flow duration, so that a thousand flows that
/// end one after another do not cause a thousand rate computations.
const PATIENCE: u64 = 1024;
/// The usual flow duration is a moving average over about this many updates.
const USUAL: u64 = 15;

/// Priority of a ready task: the most urgent first, then the one with the lowest number.
type Place = Reverse<(u64, Reverse<u32>)>;

/// Simulates one step.
///
/// # Errors
/// The step graph is invalid, the device count does not fit the fabric, or a transfer never gets a
/// circuit.
pub fn flow(interconnect: &Interconnect, graph: &StepGraph) -> Result<FluidReport, FluidError> {
    let order = graph.order()?;
    // A step for the whole fabric may leave some devices idle.
    let devices = interconnect.devices;
    let found = u64::from(graph.devices) * u64::from(graph.parts);
    if found > devices.into() || graph.parts > 1 && found != u64::from(devices) {
        return Err(FluidError::Devices { found, devices });
    }
    let (found, of) = (graph.devices, interconnect.together());
    if graph.parts > 1 && !found.is_multiple_of(of) {
        return Err(FluidError::Part { found, of });
    }
    let InterconnectKind::Circuits { every, .. } = interconnect.kind else {
        return Fluid::new(interconnect, graph, &order, 1.0).run();
    };
    // Circuits may be configured once for this step, also where reconfiguration is possible: all
    // options are simulated in parallel and the one with the smallest makespan is kept.
    let mut stays = interconnect.clone();
    if let InterconnectKind::Circuits { every, .. } = &mut stays.kind {
        *every = None;
    }
    let changes = every.map(|_| interconnect);
    let options: Vec<(&Interconnect, f64)> = [&stays]
        .into_iter()
        .chain(changes)
        .flat_map(|interconnect| POWERS.map(|power| (interconnect, power)))
        .collect();
    let order = &order;
    let runs: Vec<Result<FluidReport, FluidError>> = std::thread::scope(|scope| {
        let run = |(interconnect, power)| {
            scope.spawn(move || Fluid::new(interconnect, graph, order, power).run())
        };
        let started: Vec<_> = options.into_iter().map(run).collect();
        let ended = started.into_iter().map(|run| run.join());
        ended.map(|run| run.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let runs = runs.into_iter().collect::<Result<Vec<FluidReport>, FluidError>>()?;
    Ok(runs.into_iter().min_by_key(|run| run.end).unwrap_or_default())
}

/// Exponents applied to demands when switch circuits are allocated. With 1, concurrent demands all
/// finish at the same time; with 0.5, demands served one after another finish soonest.
const POWERS: [f64; 2] = [1.0, 0.5];

struct Fluid<'a> {
    graph: &'a StepGraph,
    interconnect: &'a Interconnect,
    /// Devices of one part.
    devices: u32,
    resources: FlowResources,
    next: Successors,
    waits: Vec<u32>,
    /// Number of unfinished flows of each task, or of devices that have not computed it.
    open: Vec<u32>,
    levels: Vec<u64>,
    /// Ready queue of each device, by priority (by default the critical-path level), highest first.
    ready: Vec<BTreeSet<Place>>,
    is_busy: Vec<bool>,
    flows: Vec<Flow>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    now: u64,
    /// Rates are not recomputed before this time, so that flows that end at about the same time cause
    /// one update.
    settles: u64,
    /// Moving average of flow durations, and the shortest duration of the flows that ended at the
    /// current time.
    usual: u64,
    shortest: Option<u64>,
    left: usize,
    under_way: usize,
    came: FluidReport,
}

impl<'a> Fluid<'a> {
    /// # Arguments
    /// - `power`: exponent of demands when switch circuits are allocated.
    fn new(
        interconnect: &'a Interconnect,
        graph: &'a StepGraph,
        order: &[u32],
        power: f64,
    ) -> Self {
        let next = graph.successors();
        let devices = if graph.parts == 1 { interconnect.devices } else { graph.devices };
        let rate = bytes_per_ns(interconnect.rate);
        let mut levels = vec![0; graph.len()];
        for &task in order.iter().rev() {
            let after = next.of(task).iter().map(|&other| levels[other as usize]).max();
            let own = match graph.op(task) {
                StepOp::Compute { time, .. } => time.0,
                op => flows_of(op, devices, interconnect)
                    .map(|flow| flow.2 / rate)
                    .fold(0.0, f64::max) as u64,
            };
            levels[task as usize] = own + after.unwrap_or(0);
        }
        let wanted = graph.nodes().iter();
        let wanted = wanted.flat_map(|node| flows_of(&node.op, devices, interconnect));
        let resources = FlowResources::new(interconnect, devices, wanted, power);
        Self {
            graph,
            interconnect,
            devices,
            resources,
            next,
            waits: (0..graph.len() as u32)
                .map(|task| graph.predecessors(task).count() as u32)
                .collect(),
            open: vec![0; graph.len()],
            levels,
            ready: vec![BTreeSet::new(); devices as usize],
            is_busy: vec![false; devices as usize],
            flows: Vec::new(),
            events: BinaryHeap::new(),
            now: 0,
            settles: 0,
            usual: 0,
            shortest: None,
            left: graph.len(),
            under_way: 0,
            came: FluidReport {
                busy: vec![Nanos(0); devices as usize],
                times: vec![(Nanos(0), Nanos(0)); graph.len()],
                ..FluidReport::default()
            },
        }
    }

    fn run(mut self) -> Result<FluidReport, FluidError> {
        for task in 0..self.graph.len() as u32 {
            if self.waits[task as usize] == 0 {
                self.arrive(task);
            }
        }
        self.settle_rates();
        while self.left > 0 {
            let event = self.events.peek().map(|Reverse((time, _))| *time);
            let turn = if self.under_way > 0 { self.resources.next(self.now) } else { None };
            let settles = self.resources.shares.has_changed().then_some(self.settles);
            let Some(time) = event.into_iter().chain(turn).chain(settles).min() else {
                return Err(FluidError::Stuck { left: self.left });
            };
            self.now = time;
            while let Some(&Reverse((same, event))) = self.events.peek()
                && same == time
            {
                self.events.pop();
                self.happen(event);
            }
            if let Some(lasted) = self.shortest.take() {
                self.usual = (USUAL * self.usual + lasted) / (USUAL + 1);
            }
            if turn == Some(time) {
                self.settle_rates();
                self.settle_flows();
                self.resources.turn(time);
                self.settle_rates();
            } else if time >= self.settles && self.resources.shares.has_changed() {
                self.settle_rates();
                self.settles = time + self.usual / PATIENCE;
            }
        }
        self.came.end = Nanos(self.now);
        self.came.changes = self.resources.changes();
        Ok(self.came)
    }

    fn happen(&mut self, event: Event) {
        self.came.events += 1;
        match event {
            Event::Computed { device, task } => {
                self.is_busy[device as usize] = false;
                self.close(task);
                self.compute(device);
            }
            Event::Begins { task } => self.begin(task),
            Event::Ends { flow, version } => {
                let known = &mut self.flows[flow as usize];
                if known.version != version || !known.is_open {
                    return;
                }
                known.is_open = false;
                let lasted = self.now - known.began;
                self.shortest = Some(self.shortest.map_or(lasted, |known| known.min(lasted)));
                let (task, left) = (known.task, known.left);
                let path = std::mem::take(&mut known.path);
                self.resources.done(&path, left);
                self.resources.close(&path);
                self.resources.shares.remove(flow);
                self.under_way -= 1;
                self.close(task);
            }
        }
    }

    /// Handles the end of one flow of a task, or of its computation on one device.
    fn close(&mut self, task: u32) {
        self.open[task as usize] -= 1;
        if self.open[task as usize] == 0 {
            self.done(task);
        }
    }

    /// Starts a task whose dependencies are all done.
    fn arrive(&mut self, task: u32) {
        let graph = self.graph;
        let op = graph.op(task);
        if let StepOp::Compute { devices, .. } = op {
            let given = graph.nodes()[task as usize].priority;
            let priority = given.unwrap_or(self.levels[task as usize]);
            self.open[task as usize] = devices.len() as u32;
            self.came.times[task as usize].0 = Nanos(u64::MAX);
            for &device in devices.iter() {
                self.ready[device as usize].insert(Reverse((priority, Reverse(task))));
                self.compute(device);
            }
            if devices.is_empty() {
                self.came.times[task as usize].0 = Nanos(self.now);
                self.done(task);
            }
            return;
        }
        self.came.times[task as usize].0 = Nanos(self.now);
        let latency = latency_of(op, self.interconnect);
        self.events.push(Reverse((self.now + latency.0, Event::Begins { task })));
    }

    /// Starts a device's most urgent ready task, if the device is idle.
    fn compute(&mut self, device: u32) {
        let at = device as usize;
        if self.is_busy[at] {
            return;
        }
        let Some(Reverse((_, Reverse(task)))) = self.ready[at].pop_first() else { return };
        let StepOp::Compute { time, .. } = *self.graph.op(task) else { return };
        self.is_busy[at] = true;
        self.came.busy[at] += time;
        let begun = &mut self.came.times[task as usize].0;
        *begun = (*begun).min(Nanos(self.now));
        self.events.push(Reverse((self.now + time.0, Event::Computed { device, task })));
    }

    fn begin(&mut self, task: u32) {
        let graph = self.graph;
        // A guard of one, so that the task does not end before all of its flows have started.
        self.open[task as usize] = 1;
        for (source, target, bytes) in flows_of(graph.op(task), self.devices, self.interconnect) {
            let path = self.resources.path(source, target);
            if path.is_empty() || bytes <= 0.0 {
                continue;
            }
            self.resources.offer(&path, bytes);
            self.came.moved += Bytes(bytes as u64);
            let flow = self.resources.shares.add(path.clone());
            if self.flows.len() <= flow as usize {
                self.flows.resize(flow as usize + 1, Flow::default());
            }
            let version = self.flows[flow as usize].version + 1;
            let since = self.now;
            self.flows[flow as usize] = Flow {
                task,
                left: bytes,
                since,
                began: since,
                rate: 0.0,
                version,
                path,
                is_open: true,
            };
            self.under_way += 1;
            self.open[task as usize] += 1;
        }
        self.close(task);
    }

    fn done(&mut self, task: u32) {
        self.left -= 1;
        self.came.times[task as usize].1 = Nanos(self.now);
        for at in 0..self.next.of(task).len() {
            let other = self.next.of(task)[at];
            self.waits[other as usize] -= 1;
            if self.waits[other as usize] == 0 {
                self.arrive(other);
            }
        }
    }

    /// Accounts for the progress of all open flows.
    fn settle_flows(&mut self) {
        for flow in self.flows.iter_mut().filter(|flow| flow.is_open) {
            let gone = flow.settle(self.now);
            self.resources.done(&flow.path, gone);
        }
    }

    /// Recomputes rates, and reschedules the ends of flows whose rate changed.
    fn settle_rates(&mut self) {
        let (flows, events, now) = (&mut self.flows, &mut self.events, self.now);
        let mut gone: Vec<(u32, f64)> = Vec::new();
        self.resources.shares.solve(|number, rate| {
            let flow = &mut flows[number as usize];
            gone.push((number, flow.settle(now)));
            flow.rate = rate;
            flow.version += 1;
            if rate > 0.0 {
                let ends = Event::Ends { flow: number, version: flow.version };
                let time = (flow.left / rate).ceil() as u64;
                events.push(Reverse((now + time, ends)));
            }
        });
        for (number, moved) in gone {
            self.resources.done(&self.flows[number as usize].path, moved);
        }
    }
}

/// Time until the first byte arrives: of a transfer its path's latency, of a collective that of a tree
/// algorithm, as for small messages, whose distances double.
fn latency_of(op: &StepOp, interconnect: &Interconnect) -> Nanos {
    match op {
        StepOp::Compute { .. } => Nanos(0),
        StepOp::Transfer { source, target, .. } => interconnect.latency_between(*source, *target),
        StepOp::Collective(op) => {
            let levels = CollectiveKind::tree_levels(op.devices.len() as u32);
            let others = (0..levels).map(|level| op.devices[1 << level]);
            let latency: Nanos =
                others.map(|other| interconnect.latency_between(op.devices[0], other)).sum();
            Nanos(u64::from(op.collective.kind().passes()) * latency.0)
        }
    }
}

/// Returns the flows of an operation as (source in the part, target anywhere, bytes).
///
/// Collectives use a ring of their devices, 1 / n of each vector at a time, or both sides of a row of
/// devices, where data from both ends are reduced and sent back at the same time. Blocks of an
/// all-to-all go from each device directly to each other device.
fn flows_of<'a>(
    op: &'a StepOp,
    devices: u32,
    interconnect: &Interconnect,
) -> impl Iterator<Item = (u32, u32, f64)> + 'a {
    let mut blocks = None;
    let (one, members, around, each) = match op {
        StepOp::Compute { .. } => (None, &[][..], Around::OneWay, 0.0),
        StepOp::Transfer { source, target, size } => {
            (Some((*source, *target, size.0 as f64)), &[][..], Around::OneWay, 0.0)
        }
        StepOp::Collective(op) => {
            let (kind, members) = (op.collective.kind(), &op.devices[..]);
            if let CollectiveKind::AllToAll { sizes } = kind {
                blocks = Some((members, sizes, f64::from(op.element_bytes)));
            }
            let (size, count) = (op.size().0 as f64, members.len());
            let load = kind.ring_load(count as u32) * size;
            let is_row = members.is_sorted() && count > 2;
            let (first, last) = (members.first().copied(), members.last().copied());
            match interconnect.around(first.unwrap_or(0), last.unwrap_or(0)) {
                _ if blocks.is_some() => (None, &[][..], Around::OneWay, 0.0),
                // An all-reduce sends whole sums both ways; other collectives send the data of one side
                // to the other.
                Around::Row if is_row => {
                    let each = if *kind == CollectiveKind::AllReduce { size } else { load };
                    (None, members, Around::Row, each)
                }
                Around::OneWay => (None, members, Around::OneWay, load),
                _ if count <= 2 => (None, members, Around::OneWay, load),
                _ => (None, members, Around::BothWays, load / 2.0),
            }
        }
    };
    let pairs = blocks.into_iter().flat_map(move |(members, sizes, element)| {
        let sources = members.iter().zip(sizes.chunks(members.len().max(1)));
        sources.filter(move |&(&source, _)| source < devices).flat_map(move |(&source, sizes)| {
            let targets = members.iter().zip(sizes);
            let others = targets.filter(move |&(&target, &size)| target != source && size > 0);
            others.map(move |(&target, &size)| (source, target, size as f64 * element))
        })
    });
    let count = members.len();
    // Parts are alike: flows that leave the representative part continue as if there were no end.
    let is_whole = members.last().is_some_and(|&last| last >= devices);
    let sides = members.iter().enumerate().flat_map(move |(at, &source)| {
        let next = (source, members[(at + 1) % count], each);
        let last = (source, members[(at + count - 1) % count], each);
        let is_end = around == Around::Row && !is_whole;
        let up = !(is_end && at + 1 == count);
        let down = around != Around::OneWay && !(is_end && at == 0);
        [up.then_some(next), down.then_some(last)].into_iter().flatten()
    });
    let sides = sides.filter(move |&(source, ..)| source < devices && count > 1);
    one.into_iter().chain(sides).chain(pairs)
}
