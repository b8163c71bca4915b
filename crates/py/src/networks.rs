//! Fabrics, plans and what they come to, for Python.

use std::collections::HashMap;

use base::{Address, BitsPerSecond, Bytes, Nanos, Ticks, VertexId};
use fabric::{Cable, Circle, Dragonfly, Fabric, Link, LinkModel, Network, named};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use route::{
    Collective, Computation, Plan, Task, Timing, Transfer, all_gather, all_reduce, all_reduce_on,
    all_to_all, broadcast, busiest, lower_bound, reduce_scatter, route, verify,
};
use sim::network::{
    ClockModel, Clocks, Compute, ENCODED, Machine, Memory, Mishap, Noise, Provision, Random,
    Results, RingAllReduce, Routed, Routing, Slack, Spares, Sum, Uniform, VECTOR, decode, encode,
    keep_slots, measurements,
};

fn wrong(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// `(source, target, bits per second, latency in ns)`.
type LinkArguments = (u32, u32, f64, u64);
/// Cycles a second, bytes of a vector and on a link, ns to pass a vector on, vectors of a memory.
type TimingArguments = (f64, u64, u64, u64, u64);

fn timing(given: Option<TimingArguments>) -> PyResult<Timing> {
    let Some((clock_hz, vector, encoded, forward, buffer)) = given else {
        return Ok(Timing::default());
    };
    let is_right = (1e3..=1e11).contains(&clock_hz)
        && (1..=1 << 20).contains(&vector)
        && (vector..=2 << 20).contains(&encoded)
        && forward <= 60_000_000_000
        && (1..=u64::from(u32::MAX)).contains(&buffer);
    if !is_right {
        let text = format!("cannot be the timing of a chip: {given:?}");
        return Err(PyValueError::new_err(text));
    }
    let (vector, encoded, forward) = (Bytes(vector), Bytes(encoded), Nanos(forward));
    Ok(Timing { clock_hz, vector, encoded, forward, buffer })
}

/// Chips and links.
#[pyclass(frozen, name = "Fabric", module = "fairway._native")]
pub(crate) struct PyFabric {
    fabric: Fabric,
}

#[pymethods]
impl PyFabric {
    /// The fabric of this name, with links of this rate and latency. Raises `ValueError`.
    #[staticmethod]
    #[pyo3(signature = (name, bits_per_s=None, latency_ns=None))]
    fn named(name: &str, bits_per_s: Option<f64>, latency_ns: Option<u64>) -> PyResult<Self> {
        let known = LinkModel::default();
        let rate = bits_per_s.map_or(known.rate, BitsPerSecond);
        let model = LinkModel { rate, latency: latency_ns.map_or(known.latency, Nanos) };
        Ok(Self { fabric: named(name, model).map_err(wrong)? })
    }

    /// So many endpoints and switches with these links. Raises `ValueError`.
    #[staticmethod]
    fn of_links(endpoints: u32, switches: u32, links: Vec<LinkArguments>) -> PyResult<Self> {
        let links = links.into_iter().map(|(source, target, rate, latency)| Link {
            source: VertexId(source),
            target: VertexId(target),
            rate: BitsPerSecond(rate),
            latency: Nanos(latency),
            cable: Cable::Rack,
        });
        let network = Network::new(endpoints, switches, links.collect()).map_err(wrong)?;
        Ok(Self { fabric: Fabric::Network(network) })
    }

    #[getter]
    fn endpoints(&self) -> u32 {
        self.fabric.network().endpoints()
    }

    #[getter]
    fn vertices(&self) -> u32 {
        self.fabric.network().vertices()
    }

    /// Each with its source, its target, its bits per second and its latency.
    fn links(&self) -> Vec<LinkArguments> {
        let links = self.fabric.network().links().iter();
        links.map(|link| (link.source.0, link.target.0, link.rate.0, link.latency.0)).collect()
    }

    /// Most hops between two chips.
    fn diameter(&self, py: Python<'_>) -> u32 {
        let network = self.fabric.network();
        // Parts of a circle are alike, so one tells of all.
        py.detach(|| network.eccentricity(Circle::of(network).first().map(VertexId)))
    }

    /// Between the two halves of all chips, in both directions.
    fn bisection_bits_per_s(&self) -> f64 {
        self.fabric.bisection().0
    }

    /// What each chip can send when all send equally much to all; of a Dragonfly only.
    fn uniform_bits_per_s(&self, py: Python<'_>) -> Option<f64> {
        match &self.fabric {
            Fabric::Dragonfly(dragonfly) => Some(py.detach(|| dragonfly.uniform_throughput().0)),
            Fabric::Network(_) => None,
        }
    }

    /// How many cables there are: in a chassis, in a rack, between racks.
    fn cables(&self) -> (u32, u32, u32) {
        let counts = self.fabric.network().cables();
        let count = |cable| counts.get(&cable).copied().unwrap_or(0);
        (count(Cable::Chassis), count(Cable::Rack), count(Cable::Optical))
    }

    /// How many parts around a circle are alike.
    fn turns(&self) -> u32 {
        Circle::of(self.fabric.network()).turns()
    }

    /// Schedules tasks, verified: `(source, target, bytes, after, read, write, sums)` for a transfer,
    /// `(chip, ticks, after)` for a computation. Raises `ValueError`.
    #[pyo3(signature = (tasks, timing=None))]
    fn route(
        &self,
        py: Python<'_>,
        tasks: Vec<TaskArguments>,
        timing: Option<TimingArguments>,
    ) -> PyResult<PyPlan> {
        let timing = self::timing(timing)?;
        let network = self.fabric.network();
        let tasks = tasks.into_iter().map(Task::from);
        let plan = py.detach(|| route(network, tasks, timing)).map_err(wrong)?;
        PyPlan::new(py, self.fabric.clone(), plan, None)
    }

    /// Schedules a collective, verified: `all-gather`, `reduce-scatter`, `all-reduce`,
    /// `all-reduce-direct` (never by stages), `all-to-all` or `broadcast`. The size is that of the
    /// whole tensor; of an all-to-all what each chip sends in all. Raises `ValueError`.
    #[pyo3(signature = (kind, size, timing=None))]
    fn collective(
        &self,
        py: Python<'_>,
        kind: &str,
        size: u64,
        timing: Option<TimingArguments>,
    ) -> PyResult<PyPlan> {
        let timing = self::timing(timing)?;
        let network = self.fabric.network();
        let part = Bytes(size.div_ceil(u64::from(network.endpoints())));
        let found = py.detach(|| match (kind, &self.fabric) {
            ("all-gather", _) => Ok(all_gather(network, part, timing)),
            ("reduce-scatter", _) => Ok(reduce_scatter(network, part, timing)),
            ("all-reduce", Fabric::Dragonfly(dragonfly)) => {
                Ok(all_reduce_on(dragonfly, Bytes(size), timing))
            }
            ("all-reduce" | "all-reduce-direct", _) => Ok(all_reduce(network, Bytes(size), timing)),
            ("all-to-all", _) => Ok(all_to_all(&self.fabric, part, timing)),
            ("broadcast", _) => Ok(broadcast(network, VertexId(0), Bytes(size), timing)),
            _ => Err(PyValueError::new_err(format!("there is no collective {kind:?}"))),
        })?;
        let Collective { plan, layout } = found.map_err(wrong)?;
        PyPlan::new(py, self.fabric.clone(), plan, Some(layout))
    }

    /// Messages without a schedule, `count` from each chip to others at random, sent within so many
    /// ticks: when the last has come, and how long each took, in ticks.
    #[pyo3(signature = (count, vectors, within_ticks, routing, seed))]
    fn uniform_messages(
        &self,
        py: Python<'_>,
        count: u32,
        vectors: u32,
        within_ticks: u64,
        routing: &str,
        seed: u64,
    ) -> PyResult<(u64, Vec<u64>)> {
        let routing = match routing {
            "minimal" => Routing::Minimal,
            "adaptive" => Routing::Adaptive,
            _ => return Err(PyValueError::new_err(format!("there is no routing {routing:?}"))),
        };
        let chips = self.fabric.network().endpoints();
        if chips < 2 || u64::from(chips) * u64::from(count) > u64::from(u32::MAX) {
            return Err(PyValueError::new_err("expected 2 chips, and at most 2^32 messages"));
        }
        let mut uniform = Uniform::new(chips, count, vectors, Ticks(within_ticks), seed);
        let timing = Timing::default();
        let found =
            py.detach(|| Routed::new(&self.fabric, timing, routing, seed).run(&mut uniform));
        Ok((found.end.0, uniform.latencies.iter().map(|latency| latency.0).collect()))
    }

    /// An all-reduce around a ring, message by message without a schedule: when it is done, and how
    /// many messages it took. Raises `ValueError`.
    fn ring_all_reduce(
        &self,
        py: Python<'_>,
        vectors: u32,
        chunks: u32,
        timing: Option<TimingArguments>,
    ) -> PyResult<(u64, u64)> {
        let timing = self::timing(timing)?;
        let chips = self.fabric.network().endpoints();
        let mut ring = RingAllReduce::new(chips, vectors, chunks);
        let found =
            py.detach(|| Routed::new(&self.fabric, timing, Routing::Minimal, 0).run(&mut ring));
        Ok((found.end.0, found.messages))
    }

    /// How far counters are apart, in cycles, from the root's and from their parents', so often in so
    /// much time. Raises `ValueError`.
    ///
    /// `progress` is told which part of the time is over.
    #[pyo3(signature = (seconds, drift_ppm, seed, samples, progress))]
    fn clocks(
        &self,
        py: Python<'_>,
        seconds: f64,
        drift_ppm: f64,
        seed: u64,
        samples: u32,
        progress: Py<PyAny>,
    ) -> PyResult<Vec<(f64, f64, f64)>> {
        let model = ClockModel { drift_ppm, seed, ..ClockModel::default() };
        let network = self.fabric.network();
        let mut clocks = Clocks::new(network, VertexId(0), model).map_err(wrong)?;
        clocks.advance(SETTLED, |_| true);
        let each = (seconds * HZ / f64::from(samples.max(1))) as u64;
        let mut found = Vec::new();
        for sample in 0..samples {
            let mut most = (0.0_f64, 0.0_f64);
            py.detach(|| {
                clocks.advance(each, |clocks| {
                    most.0 = most.0.max(clocks.spread());
                    most.1 = most.1.max(clocks.spread_over_links());
                    true
                });
            });
            found.push((f64::from(sample + 1) / f64::from(samples) * seconds, most.0, most.1));
            py.check_signals()?;
            progress.call1(py, (f64::from(sample + 1) / f64::from(samples),))?;
        }
        Ok(found)
    }

    /// Cycles until a program starts on all chips. Raises `ValueError`.
    fn start_up_cycles(&self) -> PyResult<u64> {
        let model = ClockModel { measurements: 1, ..ClockModel::default() };
        let clocks = Clocks::new(self.fabric.network(), VertexId(0), model).map_err(wrong)?;
        Ok(clocks.start_up())
    }

    /// Reduces a vector for each chip that works while `dead` nodes are: the number of attempts, the
    /// nodes that were replaced, which part of all stood by, and whether every sum was right. Of a
    /// Dragonfly only. Raises `ValueError`, and `RuntimeError` if it cannot be saved.
    fn survive(
        &self,
        py: Python<'_>,
        dead: Vec<u32>,
        per_rack: bool,
    ) -> PyResult<(u32, Vec<u32>, f64, bool)> {
        let Fabric::Dragonfly(dragonfly) = &self.fabric else {
            return Err(PyValueError::new_err("expected a dragonfly, whose nodes can stand by"));
        };
        py.detach(|| survive(dragonfly, &dead, per_rack))
    }
}

const HZ: f64 = 900e6;
/// Cycles after which clocks that begin anywhere have come together.
const SETTLED: u64 = 4_000_000;

fn survive(
    dragonfly: &Dragonfly,
    dead: &[u32],
    per_rack: bool,
) -> PyResult<(u32, Vec<u32>, f64, bool)> {
    let provision = if per_rack { Provision::PerRack } else { Provision::PerSystem };
    let lost = |error: sim::network::SpareError| PyRuntimeError::new_err(error.to_string());
    let mut spares = Spares::new(dragonfly, provision).map_err(lost)?;
    let overhead = spares.overhead();
    let chips = spares.chips().len();
    let memory = |value: i32| Memory(value.to_le_bytes().repeat(chips * VECTOR / 4));
    let inputs: Vec<Memory> = (1..=chips).map(|chip| memory(chip as i32)).collect();
    let each = dragonfly.chips_per_node();
    let dead = dead.iter().flat_map(|node| node * each..(node + 1) * each).map(VertexId);
    let noise = Noise { dead: dead.collect(), ..Noise::none() };
    let plan = |network: &Network| {
        let tensor = Bytes(u64::from(network.endpoints()) * VECTOR as u64);
        Ok(all_reduce(network, tensor, Timing::default())?.plan)
    };
    let (saved, found) =
        spares.run(plan, &inputs, &sim::network::Nothing, Sum::I32, &noise).map_err(lost)?;
    let sum = memory((chips * (chips + 1) / 2) as i32);
    Ok((saved.attempts, saved.replaced, overhead, found.iter().all(|memory| *memory == sum)))
}

/// A transfer or a computation.
#[derive(FromPyObject)]
pub(crate) enum TaskArguments {
    Transfer((u32, u32, u64, Vec<u32>, u32, u32, bool)),
    Computation((u32, u64, Vec<u32>)),
}

impl From<TaskArguments> for Task {
    fn from(given: TaskArguments) -> Self {
        match given {
            TaskArguments::Transfer((source, target, size, after, read, write, sums)) => {
                Task::Transfer(Transfer {
                    after: after.into(),
                    read: Address(read),
                    write: Address(write),
                    sums,
                    ..Transfer::new(VertexId(source), VertexId(target), Bytes(size))
                })
            }
            TaskArguments::Computation((chip, length, after)) => Task::Computation(Computation {
                chip: VertexId(chip),
                length: Ticks(length),
                after: after.into(),
            }),
        }
    }
}

/// A plan that was verified.
#[pyclass(frozen, name = "Plan", module = "fairway._native")]
pub(crate) struct PyPlan {
    fabric: Fabric,
    plan: Plan,
    layout: Option<route::Layout>,
}

impl PyPlan {
    fn new(
        py: Python<'_>,
        fabric: Fabric,
        plan: Plan,
        layout: Option<route::Layout>,
    ) -> PyResult<Self> {
        py.detach(|| verify(fabric.network(), &plan)).map_err(wrong)?;
        Ok(Self { fabric, plan, layout })
    }
}

/// Where errors come from: seed, probability, wrong bits.
type NoiseArguments = (u64, f64, u32);

#[pymethods]
impl PyPlan {
    #[getter]
    fn clock_hz(&self) -> f64 {
        self.plan.schedule.timing.clock_hz
    }

    #[getter]
    fn vector_bytes(&self) -> u64 {
        self.plan.schedule.timing.vector.0
    }

    /// When all is done.
    #[getter]
    fn end_ticks(&self) -> u64 {
        self.plan.end().0
    }

    /// When each task is done; those of one part of the circle.
    #[getter]
    fn ends_ticks(&self) -> Vec<u64> {
        self.plan.schedule.ends.iter().map(|end| end.0).collect()
    }

    /// How many parts do what is planned.
    #[getter]
    fn turns(&self) -> u32 {
        self.plan.circle.turns()
    }

    #[getter]
    fn tasks(&self) -> usize {
        self.plan.tasks.len()
    }

    /// Before when it cannot end, given what each chip must send and get; of transfers alone.
    fn bound_ticks(&self) -> u64 {
        let network = self.fabric.network();
        let timing = &self.plan.schedule.timing;
        lower_bound(network, &self.plan.whole(network).tasks, timing).0
    }

    /// The link that is busy longest: from, to, for how many ticks.
    fn busiest(&self) -> Option<(u32, u32, u64)> {
        let network = self.fabric.network();
        busiest(network, &self.plan).map(|(link, busy)| {
            let link = network.link(link);
            (link.source.0, link.target.0, busy.0)
        })
    }

    /// For how many ticks each link is busy, by its number.
    fn busy_ticks(&self) -> Vec<u64> {
        let Plan { circle, schedule, .. } = &self.plan;
        let network = self.fabric.network();
        let mut kinds = vec![0; circle.kinds() as usize];
        for train in &schedule.trains {
            let length = train.count * schedule.timing.pace(network, train.links()).0;
            for link in train.links() {
                kinds[circle.kind(link).0 as usize] += length;
            }
        }
        let links = (0..network.links().len() as u32).map(base::LinkId);
        links.map(|link| kinds[circle.kind(link).0 as usize]).collect()
    }

    /// Each with its task, its first vector, how many, the chips of its way, its starts in ticks and
    /// the ticks between its vectors: those of one part of the circle, at most so many.
    #[pyo3(signature = (most=None))]
    fn trains<'py>(&self, py: Python<'py>, most: Option<usize>) -> PyResult<Bound<'py, PyList>> {
        let network = self.fabric.network();
        let schedule = &self.plan.schedule;
        let list = PyList::empty(py);
        for train in schedule.trains.iter().take(most.unwrap_or(usize::MAX)) {
            let links = train.hops.iter().map(|hop| network.link(hop.link));
            let way = links.clone().take(1).map(|link| link.source.0);
            let way: Vec<u32> = way.chain(links.map(|link| link.target.0)).collect();
            let starts: Vec<u64> = train.hops.iter().map(|hop| hop.start.0).collect();
            let pace = schedule.timing.pace(network, train.links()).0;
            list.append((train.task, train.first, train.count, way, starts, pace))?;
        }
        Ok(list)
    }

    /// Where a collective's tensor lies: vectors of a shard, how many shards, where the inputs begin,
    /// where the results do, and for each chip where it has each shard behind that.
    fn layout(&self) -> Option<(u64, u32, Vec<u32>, Vec<u32>, Vec<Vec<u64>>)> {
        let layout = self.layout.as_ref()?;
        let starts = |starts: &[Address]| starts.iter().map(|start| start.0).collect();
        let places = (0..self.fabric.network().endpoints()).map(|chip| {
            let place = |of| layout.place(&self.plan.circle, VertexId(chip), VertexId(of));
            (0..layout.shards).map(place).collect()
        });
        let (inputs, results) = (starts(&layout.inputs), starts(&layout.results));
        Some((layout.shard, layout.shards, inputs, results, places.collect()))
    }

    /// Carries it out on memories, one for each chip: when it ended, how many vectors went over links,
    /// how many were corrected, what went wrong, and the memories then.
    ///
    /// `reads` are addresses and lengths in bytes for each computation by its task; `compute` is called
    /// with the task and what lies there when it begins, and returns `(address, bytes)` that are there
    /// when it is done. Raises `ValueError` if it cannot be carried out, and whatever they raise.
    #[pyo3(signature = (
        memories, compute=None, reads=None, sums="float32", noise=None, threads=0, progress=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn carry_out<'py>(
        &self,
        py: Python<'py>,
        memories: Vec<Vec<u8>>,
        compute: Option<Py<PyAny>>,
        reads: Option<Reads>,
        sums: &str,
        noise: Option<NoiseArguments>,
        threads: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let network = self.fabric.network();
        let whole = self.plan.whole(network);
        let reads = reads.unwrap_or_default();
        let chips = PyCompute { function: compute, reads, raised: Default::default() };
        let (seed, probability, bits) = noise.unwrap_or((0, 0.0, 1));
        let noise = Noise { seed, probability, bits, ..Noise::none() };
        let sum = match sums {
            "float32" => Sum::F32,
            "float16" => Sum::F16,
            "int32" => Sum::I32,
            _ => return Err(PyValueError::new_err(format!("vectors are not added as {sums:?}"))),
        };
        let mut memories: Vec<Memory> = memories.into_iter().map(Memory).collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let mut raised = None;
        let told = parking_lot::Mutex::new((0.0, &mut raised));
        let go_on = |part: f64| {
            let mut told = told.lock();
            if part - told.0 < 0.002 {
                return true;
            }
            told.0 = part;
            let result = Python::attach(|py| {
                py.check_signals()?;
                let call = |progress: &Py<PyAny>| progress.call1(py, (part.min(1.0),));
                progress.as_ref().map_or(Ok(()), |progress| call(progress).map(drop))
            });
            result.map_err(|error| *told.1 = Some(error)).is_ok()
        };
        let outcome = py.detach(|| {
            let machine = Machine::new(network, &whole, &chips)?.adding(sum).with_noise(noise);
            pool.install(|| machine.run(&mut memories, go_on))
        });
        if let Some(error) = raised.or(chips.raised.into_inner()) {
            return Err(error);
        }
        let outcome = outcome.map_err(wrong)?;
        let found = PyDict::new(py);
        found.set_item("end_ticks", outcome.end.0)?;
        found.set_item("vectors", outcome.vectors)?;
        found.set_item("corrected", outcome.corrected)?;
        let incidents = outcome.incidents.iter().map(|one| {
            let mishap = if one.mishap == Mishap::Missing { "missing" } else { "damaged" };
            (one.when.0, one.link.0, one.task, one.vector, mishap)
        });
        found.set_item("incidents", incidents.collect::<Vec<_>>())?;
        let memories = memories.iter().map(|memory| PyBytes::new(py, &memory.0));
        found.set_item("memories", PyList::new(py, memories)?)?;
        Ok(found)
    }

    /// Runs it again and again for so many cycles while clocks drift: how far two ends of a link were
    /// apart at most, and how often chips resynchronised. Raises `RuntimeError` with the first vector
    /// that came too late or too early.
    #[pyo3(signature = (seconds, drift_ppm, seed, deskew_cycles=None))]
    fn keep_slots(
        &self,
        py: Python<'_>,
        seconds: f64,
        drift_ppm: f64,
        seed: u64,
        deskew_cycles: Option<u64>,
    ) -> PyResult<(f64, u64)> {
        let network = self.fabric.network();
        let model = ClockModel { drift_ppm, seed, ..ClockModel::default() };
        let mut clocks = Clocks::new(network, VertexId(0), model).map_err(wrong)?;
        let slack = Slack { deskew: deskew_cycles, seed, ..Slack::default() };
        let kept = py.detach(|| {
            clocks.advance(SETTLED, |_| true);
            let whole = self.plan.whole(network);
            keep_slots(network, &whole, &mut clocks, slack, (seconds * HZ) as u64)
        });
        let kept = kept.map_err(|violation| PyRuntimeError::new_err(violation.to_string()))?;
        Ok((kept.apart, kept.deskews))
    }
}

/// For each task the addresses that it reads, and how many bytes from there on.
type Reads = HashMap<u32, Vec<(u32, usize)>>;

/// Python that computes what chips do.
struct PyCompute {
    function: Option<Py<PyAny>>,
    reads: Reads,
    raised: parking_lot::Mutex<Option<PyErr>>,
}

impl PyCompute {
    fn call(&self, py: Python<'_>, task: u32, memory: &Memory) -> PyResult<Vec<(u32, Vec<u8>)>> {
        let Some(function) = &self.function else { return Ok(Vec::new()) };
        let reads = self.reads.get(&task).map_or([].as_slice(), Vec::as_slice);
        let read = reads.iter().map(|&(start, length)| {
            let start = start as usize * VECTOR;
            let there = memory.0.get(start..start + length);
            let there = there.ok_or_else(|| {
                let text = format!("task {task} reads behind the end of its chip's memory");
                PyValueError::new_err(text)
            });
            there.map(|there| PyBytes::new(py, there))
        });
        let read = PyList::new(py, read.collect::<PyResult<Vec<_>>>()?)?;
        function.call1(py, (task, read))?.extract(py)
    }
}

impl Compute for PyCompute {
    fn compute(&self, task: u32, _: VertexId, memory: &Memory) -> Result<Results, String> {
        let results = Python::attach(|py| self.call(py, task, memory));
        let results = results.map_err(|error| {
            let text = error.to_string();
            self.raised.lock().get_or_insert(error);
            text
        })?;
        Ok(results.into_iter().map(|(start, bytes)| (Address(start), bytes)).collect())
    }
}

/// Sends vectors with so many wrong bits each: how many came right, how many were noticed to be wrong.
/// The rest would be wrong without anybody's notice.
#[pyfunction]
pub(crate) fn send_with_errors(py: Python<'_>, vectors: u32, bits: u32, seed: u64) -> (u32, u32) {
    py.detach(|| {
        let mut random = Random::of(&[seed]);
        let mut vector = [0; VECTOR];
        let (mut right, mut noticed) = (0, 0);
        for number in 0..vectors {
            if number % 1024 == 0 {
                vector.fill_with(|| random.word() as u8);
            }
            let mut sent = encode(&vector, number as u16);
            let mut flipped = Vec::new();
            while flipped.len() < bits as usize {
                let bit = random.below(8 * ENCODED as u64) as usize;
                if !flipped.contains(&bit) {
                    sent.0[bit / 8] ^= 1 << (bit % 8);
                    flipped.push(bit);
                }
            }
            match decode(&sent, number as u16) {
                Ok((found, _)) => right += u32::from(found == vector),
                Err(_) => noticed += 1,
            }
        }
        (right, noticed)
    })
}

/// Measures the seven links of Table 2: least, mean, greatest, standard deviation, in cycles.
#[pyfunction]
pub(crate) fn measure_links(times: u32, seed: u64) -> Vec<(u32, f64, u32, f64)> {
    let found = measurements(times, seed);
    found.iter().map(|one| (one.min, one.mean, one.max, one.deviation)).collect()
}
