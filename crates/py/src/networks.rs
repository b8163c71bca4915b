//! Fabrics for Python, and what happens on them without a plan.

use base::{BitsPerSecond, Bytes, Nanos, Ticks, VertexId};
use fabric::{Cable, Dragonfly, Fabric, Link, LinkModel, Network, RotationalSymmetry, named};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use route::{
    RoutedCollective, Task, Timing, all_gather, all_reduce, all_reduce_on, all_to_all, broadcast,
    reduce_scatter, route,
};
use sim::network::{
    ClockModel, Clocks, Noise, Provision, RingAllReduce, Routed, Routing, Spares, Uniform,
    measurements,
};

use crate::plans::{HZ, PyPlan, SETTLED, TaskArguments};
use crate::wrong;

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

/// Most messages that are sent without a schedule; each takes some 60 bytes.
const MESSAGES_MAX: u64 = 20_000_000;

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
        py.detach(|| network.eccentricity(RotationalSymmetry::of(network).first().map(VertexId)))
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
        RotationalSymmetry::of(self.fabric.network()).turns()
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
        let RoutedCollective { plan, layout } = found.map_err(wrong)?;
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
        let messages = u64::from(chips) * u64::from(count);
        if chips < 2 || messages > MESSAGES_MAX {
            let text = format!(
                "{messages} messages between {chips} chips; expected 2 chips at least, and \
                 {MESSAGES_MAX} messages at most"
            );
            return Err(PyValueError::new_err(text));
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

    /// When a program starts on chips whose counters are aligned, in cycles after the root's first word
    /// of it: when it should, when the first chip does, and the last. Raises `ValueError`.
    fn start_up_cycles(&self, py: Python<'_>, seed: u64) -> PyResult<(u64, f64, f64)> {
        let model = ClockModel { measurements: 1000, seed, ..ClockModel::default() };
        let mut clocks = Clocks::new(self.fabric.network(), VertexId(0), model).map_err(wrong)?;
        let start = py.detach(|| {
            clocks.advance(SETTLED, |_| true);
            clocks.start()
        });
        Ok((start.cycles, start.first, start.last))
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
        if let Some(node) = dead.iter().find(|node| **node >= dragonfly.nodes()) {
            let text = format!("there is no node {node}; there are {}", dragonfly.nodes());
            return Err(PyValueError::new_err(text));
        }
        py.detach(|| survive(dragonfly, &dead, per_rack))
    }
}

fn survive(
    dragonfly: &Dragonfly,
    dead: &[u32],
    per_rack: bool,
) -> PyResult<(u32, Vec<u32>, f64, bool)> {
    let provision = if per_rack { Provision::PerRack } else { Provision::PerSystem };
    let lost = |error: sim::network::SpareError| PyRuntimeError::new_err(error.to_string());
    let mut spares = Spares::new(dragonfly, provision).map_err(lost)?;
    let overhead = spares.overhead();
    let each = dragonfly.chips_per_node();
    let dead = dead.iter().flat_map(|node| node * each..(node + 1) * each).map(VertexId);
    let noise = Noise { dead: dead.collect(), ..Noise::none() };
    let (saved, is_right) = spares.try_all_reduce(&noise).map_err(lost)?;
    Ok((saved.attempts, saved.replaced, overhead, is_right))
}

/// Sends vectors with so many wrong bits each: how many came right, how many were noticed to be wrong.
#[pyfunction]
pub(crate) fn send_with_errors(py: Python<'_>, vectors: u32, bits: u32, seed: u64) -> (u32, u32) {
    py.detach(|| sim::network::send_with_errors(vectors, bits, seed))
}

/// Measures the seven links of Table 2: least, mean, greatest, standard deviation, in cycles.
#[pyfunction]
pub(crate) fn measure_links(times: u32, seed: u64) -> Vec<(u32, f64, u32, f64)> {
    let found = measurements(times, seed);
    found.iter().map(|one| (one.min, one.mean, one.max, one.deviation)).collect()
}
