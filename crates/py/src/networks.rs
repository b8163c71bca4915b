//! Python bindings of fabrics, and of their simulation without a schedule.

use base::{Bytes, Nanos, Ticks, VertexId};
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
use topology::{Cable, Dragonfly, Fabric, RotationalSymmetry};

use crate::plans::{HZ, PyPlan, SETTLED, TaskArguments};
use crate::wrong;

/// Clock in Hz, bytes of a vector, its bytes on a link, ns to forward a vector, vectors of a memory.
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

/// `(source, target, bits per second, latency in ns)`.
pub(crate) type LinkArguments = (u32, u32, f64, u64);
/// Most messages without a schedule; each takes some 60 bytes.
const MESSAGES_MAX: u64 = 20_000_000;

/// A fabric of chips and links.
#[pyclass(frozen, name = "Fabric", module = "fairway._native")]
pub(crate) struct PyFabric {
    fabric: Fabric,
}

impl PyFabric {
    pub(crate) fn new(fabric: Fabric) -> Self {
        Self { fabric }
    }

    pub(crate) fn network(&self) -> &topology::Network {
        self.fabric.network()
    }
}

#[pymethods]
impl PyFabric {
    #[getter]
    fn endpoints(&self) -> u32 {
        self.fabric.network().endpoints()
    }

    #[getter]
    fn vertices(&self) -> u32 {
        self.fabric.network().vertices()
    }

    /// By link: source, target, bits per second and latency in ns.
    fn links(&self) -> Vec<LinkArguments> {
        let links = self.fabric.network().links().iter();
        links.map(|link| (link.source.0, link.target.0, link.rate.0, link.latency.0)).collect()
    }

    /// Most hops between two chips.
    fn diameter(&self, py: Python<'_>) -> u32 {
        let network = self.fabric.network();
        // Parts are alike by rotational symmetry, so the first represents all.
        py.detach(|| network.eccentricity(RotationalSymmetry::of(network).first().map(VertexId)))
    }

    /// Bandwidth between the two halves of all chips, in both directions.
    fn bisection_bits_per_s(&self) -> f64 {
        self.fabric.bisection().0
    }

    /// Rate that each chip can send under uniform all-to-all traffic; of a Dragonfly only.
    fn uniform_bits_per_s(&self, py: Python<'_>) -> Option<f64> {
        match &self.fabric {
            Fabric::Dragonfly(dragonfly) => Some(py.detach(|| dragonfly.uniform_throughput().0)),
            Fabric::Network(_) => None,
        }
    }

    /// Number of cables in a chassis, in a rack, and between racks.
    fn cables(&self) -> (u32, u32, u32) {
        let counts = self.fabric.network().cables();
        let count = |cable| counts.get(&cable).copied().unwrap_or(0);
        (count(Cable::Chassis), count(Cable::Rack), count(Cable::Optical))
    }

    /// Order of the rotational symmetry: the number of parts that are alike.
    fn turns(&self) -> u32 {
        RotationalSymmetry::of(self.fabric.network()).turns()
    }

    /// Schedules tasks, and verifies the plan: `(source, target, bytes, after, read, write, sums)` for
    /// a transfer, `(chip, ticks, after)` for a computation. Raises `ValueError`.
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

    /// Schedules a collective, and verifies the plan: `all-gather`, `reduce-scatter`, `all-reduce`,
    /// `all-reduce-direct` (never by stages), `all-to-all` or `broadcast`. `size` is that of the whole
    /// tensor in bytes; of an all-to-all what each chip sends in all. Raises `ValueError`.
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

    /// Simulates dynamically routed messages, `count` from each chip to random others, sent within
    /// `within_ticks`: returns when the last arrives, and the latency of each, in ticks.
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

    /// Simulates a ring all-reduce without a schedule, message by message: returns when it is done, in
    /// ticks, and the number of messages. Raises `ValueError`.
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

    /// Simulates clock drift for `seconds`: returns `samples` samples of the time, and the largest skew
    /// of counters to the root's and to their parents', in cycles. Raises `ValueError`.
    ///
    /// `progress` is called with the fraction of the time that is over.
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

    /// Simulates the start of a program on chips with aligned counters: returns when it is due, when
    /// the first chip starts, and the last, in cycles after the root's first word of it. Raises
    /// `ValueError`.
    fn start_up_cycles(&self, py: Python<'_>, seed: u64) -> PyResult<(u64, f64, f64)> {
        let model = ClockModel { measurements: 1000, seed, ..ClockModel::default() };
        let mut clocks = Clocks::new(self.fabric.network(), VertexId(0), model).map_err(wrong)?;
        let start = py.detach(|| {
            clocks.advance(SETTLED, |_| true);
            clocks.start()
        });
        Ok((start.cycles, start.first, start.last))
    }

    /// All-reduces a vector of each working chip while the nodes in `dead` fail: returns the number of
    /// attempts, the nodes that were replaced by spares, the fraction of spare nodes, and whether every
    /// sum was correct. Of a Dragonfly only. Raises `ValueError`, and `RuntimeError` if no recovery is
    /// possible.
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

/// Sends vectors with `bits` bit errors each: how many arrived correctly, how many were detected as
/// wrong.
#[pyfunction]
pub(crate) fn send_with_errors(py: Python<'_>, vectors: u32, bits: u32, seed: u64) -> (u32, u32) {
    py.detach(|| sim::network::send_with_errors(vectors, bits, seed))
}

/// Measures the seven links of Table 2: minimum, mean, maximum, standard deviation, in cycles.
#[pyfunction]
pub(crate) fn measure_links(times: u32, seed: u64) -> Vec<(u32, f64, u32, f64)> {
    let found = measurements(times, seed);
    found.iter().map(|one| (one.min, one.mean, one.max, one.deviation)).collect()
}
