//! Python bindings of route plans, and of their execution in simulation.

use std::collections::HashMap;

use base::{Address, Bytes, Ticks, VertexId};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use route::{Computation, RoutePlan, RouteTransfer, Task, busiest, busy, lower_bound, verify};
use sim::network::{
    ChipMemory, ClockModel, Clocks, Compute, Machine, Mishap, Noise, Results, Slack, SumType,
    VECTOR, keep_slots,
};
use topology::Fabric;

use crate::wrong;

/// Clock rate of chips in clock simulations, in Hz.
pub(crate) const HZ: f64 = 900e6;
/// Cycles after which clocks with any initial skew have converged.
pub(crate) const SETTLED: u64 = 4_000_000;

/// Vectors of a shard, number of shards, first addresses of inputs, and of results.
type Layout = (u64, u32, Vec<u32>, Vec<u32>);

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
                Task::Transfer(RouteTransfer {
                    after: after.into(),
                    read: Address(read),
                    write: Address(write),
                    sums,
                    ..RouteTransfer::new(VertexId(source), VertexId(target), Bytes(size))
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

/// A verified plan.
#[pyclass(frozen, name = "Plan", module = "fairway._native")]
pub(crate) struct PyPlan {
    fabric: Fabric,
    plan: RoutePlan,
    layout: Option<route::Layout>,
}

impl PyPlan {
    pub(crate) fn new(
        py: Python<'_>,
        fabric: Fabric,
        plan: RoutePlan,
        layout: Option<route::Layout>,
    ) -> PyResult<Self> {
        py.detach(|| verify(fabric.network(), &plan)).map_err(wrong)?;
        Ok(Self { fabric, plan, layout })
    }
}

/// Noise: seed, probability of an error, bit errors.
type NoiseArguments = (u64, f64, u32);

/// How a plan is simulated; `fairway.execution.ExecutionOptions`.
#[derive(FromPyObject)]
struct ExecutionOptions {
    compute: Option<Py<PyAny>>,
    reads: Option<Reads>,
    sums: String,
    noise: Option<NoiseArguments>,
    threads: usize,
    progress: Option<Py<PyAny>>,
}

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

    /// When all tasks are done (makespan).
    #[getter]
    fn end_ticks(&self) -> u64 {
        self.plan.end().0
    }

    /// When each task is done, for one part of the rotational symmetry.
    #[getter]
    fn ends_ticks(&self) -> Vec<u64> {
        self.plan.schedule.ends.iter().map(|end| end.0).collect()
    }

    /// Order of the rotational symmetry: the number of parts that execute the plan.
    #[getter]
    fn turns(&self) -> u32 {
        self.plan.circle.turns()
    }

    #[getter]
    fn tasks(&self) -> usize {
        self.plan.tasks.len()
    }

    /// Lower bound on the makespan, from what each chip must send, receive and compute.
    fn bound_ticks(&self, py: Python<'_>) -> u64 {
        py.detach(|| lower_bound(self.fabric.network(), &self.plan).0)
    }

    /// The busiest link: source, target, busy ticks.
    fn busiest(&self) -> Option<(u32, u32, u64)> {
        let network = self.fabric.network();
        busiest(network, &self.plan).map(|(link, busy)| {
            let link = network.link(link);
            (link.source.0, link.target.0, busy.0)
        })
    }

    /// Busy ticks of each link, by its number.
    fn busy_ticks(&self) -> Vec<u64> {
        let network = self.fabric.network();
        let busy = busy(network, &self.plan);
        let links = (0..network.links().len() as u32).map(base::LinkId);
        links.map(|link| busy[self.plan.circle.kind(link).0 as usize].0).collect()
    }

    /// Trains of vectors: task, first vector, number of vectors, route as chips, start ticks by hop and
    /// ticks between vectors; for one part of the rotational symmetry, at most `most`.
    #[pyo3(signature = (most=None))]
    fn trains<'py>(&self, py: Python<'py>, most: Option<usize>) -> PyResult<Bound<'py, PyList>> {
        let network = self.fabric.network();
        let schedule = &self.plan.schedule;
        let list = PyList::empty(py);
        for train in schedule.trains.iter().take(most.unwrap_or(usize::MAX)) {
            let links = train.hops.iter().map(|hop| network.link(hop.link));
            let vertices = links.clone().take(1).map(|link| link.source.0);
            let vertices: Vec<u32> = vertices.chain(links.map(|link| link.target.0)).collect();
            let starts: Vec<u64> = train.hops.iter().map(|hop| hop.start.0).collect();
            let pace = schedule.timing.pace(network, train.links()).0;
            list.append((train.task, train.first, train.count, vertices, starts, pace))?;
        }
        Ok(list)
    }

    /// Memory layout of a collective's tensor.
    fn layout(&self) -> Option<Layout> {
        let layout = self.layout.as_ref()?;
        let starts = |starts: &[Address]| starts.iter().map(|start| start.0).collect();
        let (inputs, results) = (starts(&layout.inputs), starts(&layout.results));
        Some((layout.shard, layout.shards, inputs, results))
    }

    /// Offset of each shard of a collective on a chip, in vectors from where inputs or results begin.
    fn places(&self, chip: u32) -> Vec<u64> {
        let Some(layout) = &self.layout else { return Vec::new() };
        let place = |of| layout.place(&self.plan.circle, VertexId(chip), VertexId(of));
        (0..layout.shards).map(place).collect()
    }

    #[getter]
    fn chips(&self) -> u32 {
        self.fabric.network().endpoints()
    }

    /// Executes the plan in simulation on memories, one per chip: returns when it ended, the number of
    /// vectors sent over links and of corrected ones, incidents, and the final memories.
    ///
    /// In `options`, `reads` are addresses and lengths in bytes, by task of a computation; `compute` is
    /// called with the task and the bytes there when it begins, and returns `(address, bytes)` to be
    /// written when it is done. Raises `ValueError` if the plan cannot be executed, and exceptions of the callbacks.
    fn simulate<'py>(
        &self,
        py: Python<'py>,
        memories: Vec<Vec<u8>>,
        options: ExecutionOptions,
    ) -> PyResult<Bound<'py, PyDict>> {
        let ExecutionOptions { compute, reads, sums, noise, threads, progress } = options;
        let network = self.fabric.network();
        let whole = self.plan.whole(network);
        let reads = reads.unwrap_or_default();
        let chips = PyCompute { function: compute, reads, raised: Default::default() };
        let (seed, probability, bits) = noise.unwrap_or((0, 0.0, 1));
        let noise = Noise { seed, probability, bits, ..Noise::none() };
        let sum = match sums.as_str() {
            "float32" => SumType::F32,
            "float16" => SumType::F16,
            "int32" => SumType::I32,
            _ => return Err(PyValueError::new_err(format!("vectors are not added as {sums:?}"))),
        };
        let mut memories: Vec<ChipMemory> = memories.into_iter().map(ChipMemory).collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let mut raised = None;
        let shown = parking_lot::Mutex::new((0.0, &mut raised));
        let go_on = |part: f64| {
            let mut shown = shown.lock();
            if part - shown.0 < 0.002 {
                return true;
            }
            shown.0 = part;
            let result = Python::attach(|py| {
                py.check_signals()?;
                let call = |progress: &Py<PyAny>| progress.call1(py, (part.min(1.0),));
                progress.as_ref().map_or(Ok(()), |progress| call(progress).map(drop))
            });
            result.map_err(|error| *shown.1 = Some(error)).is_ok()
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

    /// Repeats the plan for `seconds` while clocks drift: returns the largest skew over a link, and the
    /// number of resynchronizations. Raises `RuntimeError` with the first vector that came too late or
    /// too early.
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

/// By task, the ranges that it reads: first address and number of bytes.
type Reads = HashMap<u32, Vec<(u32, usize)>>;

/// Computations of chips, by a Python callback.
struct PyCompute {
    function: Option<Py<PyAny>>,
    reads: Reads,
    raised: parking_lot::Mutex<Option<PyErr>>,
}

impl PyCompute {
    fn call(
        &self,
        py: Python<'_>,
        task: u32,
        memory: &ChipMemory,
    ) -> PyResult<Vec<(u32, Vec<u8>)>> {
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
    fn compute(&self, task: u32, _: VertexId, memory: &ChipMemory) -> Result<Results, String> {
        let results = Python::attach(|py| self.call(py, task, memory));
        let results = results.map_err(|error| {
            let text = error.to_string();
            self.raised.lock().get_or_insert(error);
            text
        })?;
        Ok(results.into_iter().map(|(start, bytes)| (Address(start), bytes)).collect())
    }
}
