//! Python bindings of interconnects, placement, and parallelism strategies.

use std::collections::BTreeMap;
use std::time::Instant;

use base::{BitsPerSecond, Bytes, Nanos};
use cost::{ClosedForm, ReduceTimes};
use ir::StepGraph;
use place::{
    Accelerator, Assigned, Balanced, Cost, DeviceModel, Edge, Op, OpError, OpGraph, OpSum,
    Parallelism, ParallelismCut, ParallelismSearch, PlacementLimits, Rule, Servers,
    SimulatedPlacement, Split, Spread, Transformer, parallel_step, step_time,
};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sim::fluid::{FluidError, FluidReport, flow};
use sim::jobs::{Arrival, DevicePool as Devices, share};
use topology::circuits::{Demand, Wavelengths};
use topology::{Interconnect, InterconnectKind};

use crate::steps::PyStepGraph;
use crate::wrong;

/// Devices and their interconnect.
#[pyclass(frozen, name = "Interconnect", module = "fairway._native")]
pub(crate) struct PyInterconnect {
    interconnect: Interconnect,
}

impl PyInterconnect {
    pub(crate) fn new(interconnect: Interconnect) -> Self {
        Self { interconnect }
    }
}

#[pymethods]
impl PyInterconnect {
    #[getter]
    fn devices(&self) -> u32 {
        self.interconnect.devices
    }

    /// From the first bit sent to the first bit received.
    #[getter]
    fn latency_ns(&self) -> u64 {
        self.interconnect.latency.0
    }

    #[getter]
    fn bits_per_s(&self) -> f64 {
        self.interconnect.rate.0
    }

    /// Simulates a step (discrete-event, fluid flow): seconds, compute seconds by device, start and end
    /// of each node, bytes transferred, reconfigurations, events. Raises `ValueError`.
    fn flow<'py>(&self, py: Python<'py>, graph: &PyStepGraph) -> PyResult<Bound<'py, PyDict>> {
        let flowed = py.detach(|| flow(&self.interconnect, &graph.0)).map_err(wrong)?;
        report_of(py, &flowed)
    }

    /// Parallelism strategies for a model over all devices, with simulated step times. Raises
    /// `ValueError`.
    ///
    /// `curve` is batch sizes, each with the number of steps to train; `spread_max` is most devices per
    /// copy; `progress` is called with the number of strategies done and of all.
    fn search_strategies(
        &self,
        py: Python<'_>,
        graph: &PyOpGraph,
        curve: Vec<(u32, u64)>,
        bounds: SearchBounds,
        spread_max: u32,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<SpreadResults>> {
        let wanted = self.wanted(&graph.graph, &curve, &bounds, spread_max);
        let found = py.detach(|| {
            let mut raised = None;
            let judge = |step: &StepGraph| flow(&self.interconnect, step).map(|flowed| flowed.end);
            let found = wanted.all(judge, |done, of| {
                let call = |py: Python<'_>| {
                    py.check_signals()?;
                    progress.as_ref().map_or(Ok(()), |call| call.call1(py, (done, of)).map(drop))
                };
                if raised.is_none() {
                    raised = Python::attach(call).err();
                }
                raised.is_none()
            });
            (found, raised)
        });
        match found {
            (_, Some(raised)) => Err(raised),
            (found, None) => Ok(found.map_err(refused)?.iter().map(spread_results).collect()),
        }
    }

    /// Places a model by one strategy and simulates its step. The step graph is of all devices if
    /// `whole`. Raises `ValueError`.
    fn evaluate_strategy<'py>(
        &self,
        py: Python<'py>,
        graph: &PyOpGraph,
        strategy: Replication,
        bounds: SearchBounds,
        whole: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let Replication { batch, copies, width, rule } = strategy;
        let curve = [];
        let mut wanted = self.wanted(&graph.graph, &curve, &bounds, u32::MAX);
        let devices = self.interconnect.devices;
        if copies == 0 || !devices.is_multiple_of(copies) || !batch.is_multiple_of(copies) {
            let text = format!(
                "there are {copies} copies; expected a divisor of {devices} devices and of a batch \
                 of {batch}"
            );
            return Err(PyValueError::new_err(text));
        }
        if whole {
            wanted.part = devices;
        }
        let rule = rule.as_deref().map(rule_of).transpose()?;
        let of_copy = devices / copies;
        let cut = ParallelismCut { copies, devices: of_copy, width: width.clamp(1, of_copy) };
        let judge =
            |step: &StepGraph| flow(&self.interconnect, step).map(|flowed| (flowed.end, flowed));
        let carried = py.detach(|| wanted.carried(batch / copies, cut, rule, judge));
        let SimulatedPlacement { balanced, assigned, estimate, graph, came: flowed, .. } =
            carried.map_err(refused)?;
        let found = report_of(py, &flowed)?;
        found.set_item("places", places(&balanced, &assigned))?;
        found.set_item("estimate_s", estimate.0 as f64 / 1e9)?;
        found.set_item("bound_s", assigned.bound.0 as f64 / 1e9)?;
        found.set_item("rule", name_of(assigned.rule))?;
        found.set_item("graph", PyStepGraph(graph))?;
        Ok(found)
    }
}

/// Analytical cost model of collectives on an interconnect.
#[pyclass(frozen, name = "Links", module = "fairway._native")]
pub(crate) struct PyLinks {
    links: ClosedForm,
}

#[pymethods]
impl PyLinks {
    /// Costs on an interconnect, with measured all-reduces inside a server: by number of devices, bytes
    /// and seconds, in ascending order of bytes. Raises `ValueError`.
    #[new]
    fn new(joined: &PyInterconnect, measured: BTreeMap<u32, ReduceTimes>) -> PyResult<Self> {
        let rises = |times: &ReduceTimes| times.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if let Some((count, _)) =
            measured.iter().find(|(_, times)| times.is_empty() || !rises(times))
        {
            let text = format!("all-reduces of {count} devices have no sizes, or not in order");
            return Err(PyValueError::new_err(text));
        }
        let interconnect = joined.interconnect.clone();
        Ok(Self { links: ClosedForm { interconnect, measured } })
    }

    /// Predicted seconds of a training step: total, one microbatch through a layer, its communication,
    /// pipeline bubble, gradients, updates; and the bytes that each device needs. Raises `ValueError`.
    fn transformer_step(
        &self,
        model: ModelArguments,
        accelerator: AcceleratorArguments,
        cut: CutArguments,
        reaches: f64,
    ) -> PyResult<([f64; 6], u64)> {
        let time = step_time(&model.into(), &accelerator.into(), &self.links, reaches, &cut.into());
        let time = time.map_err(wrong)?;
        let parts =
            [time.total, time.layer, time.communication, time.bubble, time.gradients, time.updates];
        Ok((parts.map(|part| part.0 as f64 / 1e9), time.memory.0))
    }

    /// The step of a strategy as a graph on all devices. Raises `ValueError`.
    fn transformer_graph(
        &self,
        model: ModelArguments,
        accelerator: AcceleratorArguments,
        cut: CutArguments,
        reaches: f64,
    ) -> PyResult<PyStepGraph> {
        let (model, accelerator, cut) = (model.into(), accelerator.into(), cut.into());
        let step = parallel_step(&model, &accelerator, &self.links, reaches, &cut);
        step.map(PyStepGraph).map_err(wrong)
    }
}

/// Bounds of a search for placements; `fairway.placement.search.SearchBounds`.
#[derive(FromPyObject)]
struct SearchBounds {
    memory_bytes: u64,
    quantum_ns: u64,
    evaluations: u64,
    seed: u64,
}

/// One strategy; `fairway.placement.search.Replication`.
#[derive(FromPyObject)]
struct Replication {
    batch: u32,
    copies: u32,
    width: u32,
    rule: Option<String>,
}

impl PyInterconnect {
    fn wanted<'a>(
        &self,
        graph: &'a OpGraph,
        curve: &'a [(u32, u64)],
        bounds: &SearchBounds,
        spread_max: u32,
    ) -> ParallelismSearch<'a> {
        let Interconnect { devices, rate, latency, .. } = self.interconnect;
        let reach = match self.interconnect.kind {
            InterconnectKind::Ring(ring) | InterconnectKind::Rings { ring, .. } => ring.reach,
            _ => devices,
        };
        let part = self.interconnect.together();
        let servers = match self.interconnect.kind {
            InterconnectKind::Cluster { per_server, server, .. } => {
                Some(Servers { devices: per_server, rate: server })
            }
            _ => None,
        };
        let memory = Bytes(bounds.memory_bytes);
        let room = DeviceModel { devices, reach, rate, servers, latency, memory };
        let limits = PlacementLimits { evaluations: bounds.evaluations, seed: bounds.seed };
        let quantum = Nanos(bounds.quantum_ns);
        ParallelismSearch { graph, room, quantum, curve, spread_max, part, limits }
    }
}

/// Maps models that do not fit in memory to `MemoryError`, other errors to `ValueError`.
fn refused(error: FluidError) -> PyErr {
    match error {
        FluidError::Model(OpError::Large { .. } | OpError::Full { .. }) => {
            PyMemoryError::new_err(error.to_string())
        }
        error => wrong(error),
    }
}

/// Batch size, steps, copies and most shards per operation; seconds of a step as simulated, estimated
/// and bounded from below; bytes of a device, shards, the rule of the initial placement.
type SpreadResults = (u32, u64, (u32, u32), (f64, f64, f64), u64, u32, &'static str);

fn spread_results(spread: &Spread) -> SpreadResults {
    let assigned = &spread.assigned;
    let seconds = |time: Nanos| time.0 as f64 / 1e9;
    let times = (seconds(spread.step), seconds(assigned.end), seconds(assigned.bound));
    let memory = spread.memory.0;
    let rule = name_of(assigned.rule);
    let cut = (spread.cut.copies, spread.cut.width);
    (spread.batch, spread.steps, cut, times, memory, spread.shards, rule)
}

const RULES: [(&str, Rule); 7] = [
    ("range", Rule::Range),
    ("relocate", Rule::Relocate),
    ("earliest", Rule::Earliest),
    ("blocks", Rule::Blocks),
    ("stages", Rule::Stages),
    ("together", Rule::Together),
    ("given", Rule::Given),
];

fn name_of(rule: Rule) -> &'static str {
    RULES.iter().find(|(_, known)| *known == rule).map_or("", |(name, _)| name)
}

fn rule_of(name: &str) -> PyResult<Rule> {
    let found = RULES.iter().find(|(known, _)| *known == name).map(|(_, rule)| *rule);
    let names = RULES.map(|(name, _)| name).join(", ");
    found.ok_or_else(|| {
        PyValueError::new_err(format!("there is no rule {name:?}; there are {names}"))
    })
}

fn split_of(name: &str) -> PyResult<Split> {
    match name {
        "blocks" => Ok(Split::Blocks),
        "samples" => Ok(Split::Samples),
        "outputs" => Ok(Split::Outputs),
        "inputs" => Ok(Split::Inputs),
        _ => Err(PyValueError::new_err(format!(
            "an operation is cut along {name:?}; expected blocks, samples, outputs or inputs"
        ))),
    }
}

/// By operation, the devices of its shards.
fn places(balanced: &Balanced, assigned: &Assigned) -> Vec<Vec<u32>> {
    let of = |&(first, count): &(u32, u32)| {
        assigned.devices[first as usize..(first + count) as usize].to_vec()
    };
    balanced.of.iter().map(of).collect()
}

fn report_of<'py>(py: Python<'py>, flowed: &FluidReport) -> PyResult<Bound<'py, PyDict>> {
    let seconds = |time: Nanos| time.0 as f64 / 1e9;
    let found = PyDict::new(py);
    found.set_item("seconds", seconds(flowed.end))?;
    let busy: Vec<f64> = flowed.busy.iter().map(|&time| seconds(time)).collect();
    found.set_item("busy_s", busy)?;
    let times = flowed.times.iter().map(|&(start, end)| (seconds(start), seconds(end)));
    found.set_item("times_s", times.collect::<Vec<_>>())?;
    found.set_item("moved_bytes", flowed.moved.0)?;
    found.set_item("changes", flowed.changes)?;
    found.set_item("events", flowed.events)?;
    Ok(found)
}

/// Name, ns and bytes kept by batch, inputs as operation and bytes by batch, resident bytes, bytes of
/// gradients, the operation that it is placed with, the device of an existing placement, most shards,
/// the dimension of the split, launch ns of each shard.
type OpArguments = (
    String,
    Vec<(u64, u64)>,
    Vec<(u32, Vec<u64>)>,
    u64,
    u64,
    Option<u32>,
    Option<u32>,
    u32,
    String,
    u64,
);

/// A model as a graph of operations.
#[pyclass(frozen, name = "OpGraph", module = "fairway._native")]
pub(crate) struct PyOpGraph {
    graph: OpGraph,
}

#[pymethods]
impl PyOpGraph {
    /// Raises `ValueError` if the graph is invalid.
    #[new]
    fn new(batches: Vec<u32>, ops: Vec<OpArguments>, sums: Vec<(Vec<u32>, u64)>) -> PyResult<Self> {
        let ops = ops.into_iter().map(|given| {
            let (name, costs, after, resident, gradients, with, device, shards_max, split, launch) =
                given;
            let split = split_of(&split)?;
            let cost = |(time, kept)| Cost { time: Nanos(time), kept: Bytes(kept) };
            let edge = |(from, sizes): (u32, Vec<u64>)| Edge {
                from,
                sizes: sizes.into_iter().map(Bytes).collect(),
            };
            Ok(Op {
                name,
                costs: costs.into_iter().map(cost).collect(),
                after: after.into_iter().map(edge).collect(),
                resident: Bytes(resident),
                gradients: Bytes(gradients),
                with,
                device,
                shards_max,
                split,
                launch: Nanos(launch),
            })
        });
        let ops: Vec<Op> = ops.collect::<PyResult<_>>()?;
        let sums = sums.into_iter().map(|(after, size)| OpSum { after, size: Bytes(size) });
        let graph = OpGraph { batches, ops, sums: sums.collect() };
        graph.at(graph.batches.first().copied().unwrap_or(1)).map_err(wrong)?;
        Ok(Self { graph })
    }

    #[getter]
    fn ops(&self) -> usize {
        self.graph.ops.len()
    }
}

/// Allocates wavelengths of a ring `decisions` times: returns the average number for each demand (from,
/// to, size), and the seconds that each decision took. Raises `ValueError`.
#[pyfunction]
pub(crate) fn decide_wavelengths(
    py: Python<'_>,
    devices: u32,
    count: u32,
    reach: u32,
    demands: Vec<(u32, u32, f64)>,
    decisions: u32,
) -> PyResult<(Vec<f64>, Vec<f64>)> {
    let is_right = |&(source, target, size): &(u32, u32, f64)| {
        source < devices && target < devices && source != target && size > 0.0 && size.is_finite()
    };
    if devices < 2 || count == 0 || reach == 0 || !demands.iter().all(is_right) {
        let text = "expected two devices, a wavelength, and demands between different devices";
        return Err(PyValueError::new_err(text));
    }
    let demands: Vec<Demand> =
        demands.into_iter().map(|(source, target, size)| Demand { source, target, size }).collect();
    Ok(py.detach(|| {
        let mut wavelengths = Wavelengths::new(devices, count, reach, false);
        let mut given = vec![0.0; demands.len()];
        let mut times = Vec::with_capacity(decisions as usize);
        for _ in 0..decisions {
            let begin = Instant::now();
            let circuits = wavelengths.decide(&demands);
            times.push(begin.elapsed().as_secs_f64());
            for circuit in circuits {
                given[circuit.demand as usize] += f64::from(circuit.count);
            }
        }
        given.iter_mut().for_each(|sum| *sum /= f64::from(decisions.max(1)));
        (given, times)
    }))
}

/// A transformer.
#[derive(FromPyObject)]
struct ModelArguments {
    layers: u32,
    hidden: u32,
    heads: u32,
    sequence: u32,
    vocabulary: u32,
    experts: u32,
    active: u32,
}

impl From<ModelArguments> for Transformer {
    fn from(given: ModelArguments) -> Self {
        let ModelArguments { layers, hidden, heads, sequence, vocabulary, experts, active } = given;
        Self { layers, hidden, heads, sequence, vocabulary, experts, active }
    }
}

/// A parallelism strategy.
#[derive(FromPyObject)]
struct CutArguments {
    data: u32,
    tensor: u32,
    pipeline: u32,
    expert: u32,
    micro_batch: u32,
    batch: u32,
    recomputes: bool,
}

impl From<CutArguments> for Parallelism {
    fn from(given: CutArguments) -> Self {
        let CutArguments { data, tensor, pipeline, expert, micro_batch, batch, recomputes } = given;
        Self { data, tensor, pipeline, expert, micro_batch, batch, recomputes }
    }
}

/// Constants of a device.
#[derive(FromPyObject)]
struct AcceleratorArguments {
    flops: f64,
    memory_bytes_per_s: f64,
    memory_bytes: u64,
    efficiency: f64,
    narrow: f64,
    passes: f64,
    weights_passes: f64,
    launch_s: f64,
    straggle: f64,
    unfused_s: f64,
    reduces: f64,
    head: f64,
    update: f64,
    overhead_s: f64,
    sharpness: f64,
}

impl From<AcceleratorArguments> for Accelerator {
    fn from(given: AcceleratorArguments) -> Self {
        let seconds = |value: f64| Nanos((value * 1e9) as u64);
        Self {
            flops: given.flops,
            memory_rate: BitsPerSecond(8.0 * given.memory_bytes_per_s),
            memory: Bytes(given.memory_bytes),
            efficiency: given.efficiency,
            narrow: given.narrow,
            passes: given.passes,
            weights_passes: given.weights_passes,
            launch: seconds(given.launch_s),
            straggle: given.straggle,
            unfused: seconds(given.unfused_s),
            reduces: given.reduces,
            head: given.head,
            update: given.update,
            overhead: seconds(given.overhead_s),
            sharpness: given.sharpness,
        }
    }
}

/// Simulates jobs that share devices: each with its arrival, number of devices, and duration, in ns.
/// Returns when each begins and ends, its allocations (job, first device, count, ns, ns), the number of
/// migrations, and for how long a job waited although enough devices were free (fragmentation).
///
/// With `neighbours`, a job needs contiguous devices of a ring; with `delay_ns`, a switch can remap
/// devices, in that time. Raises `ValueError`.
#[pyfunction]
#[pyo3(signature = (devices, jobs, neighbours, delay_ns=None))]
pub(crate) fn share_devices(
    devices: u32,
    jobs: Vec<(u64, u32, u64)>,
    neighbours: bool,
    delay_ns: Option<u64>,
) -> PyResult<Sharing> {
    let arrival =
        |(time, devices, takes)| Arrival { time: Nanos(time), devices, takes: Nanos(takes) };
    let arrivals: Vec<Arrival> = jobs.into_iter().map(arrival).collect();
    let room = match (neighbours, delay_ns) {
        (false, _) => Devices::Any,
        (true, None) => Devices::Neighbours,
        (true, Some(delay)) => Devices::Remapped(Nanos(delay)),
    };
    let came = share(devices, room, &arrivals).map_err(wrong)?;
    let times = came.times.into_iter().map(|(from, to)| (from.0, to.0)).collect();
    let stays = came.stays.into_iter();
    let stays = stays.map(|s| (s.job, s.first, s.count, s.from.0, s.to.0)).collect();
    Ok((times, stays, came.moves, came.apart.0))
}

/// Result of [`share_devices`].
type Sharing = (Vec<(u64, u64)>, Vec<(u32, u32, u32, u64, u64)>, u32, u64);
