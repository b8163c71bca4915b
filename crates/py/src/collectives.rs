//! Python bindings of collectives, step plans, and the enforcer.

use std::sync::Arc;
use std::time::Duration;

use base::{BitsPerSecond, Channel, HostId, Nanos, TransferTag};
use ir::{Collective, DType, StepNode, StepOp};
use parking_lot::Mutex;
use plan::{
    ChannelCost, Execution, HandOrders, Planned, Policy, Problem, RankSchedule, SearchLimits,
    SearchSpace, StepScheduler, StopReason, System, Unrolled, compare, executions, least_period,
};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use run::enforcer::{
    CollectiveTicket, Elements, Enforcer, EnforcerError, PreparedSchedule, Reduction, Team,
    TeamChannel,
};

use crate::data::{PyDataPlane, PyMemory};
use crate::steps::PyStepGraph;
use crate::wrong;

pyo3::create_exception!(
    fairway._native,
    TeamError,
    pyo3::exceptions::PyRuntimeError,
    "Ranks of a team do not go on together: `args` is the kind of failure, the message, and the other \
     rank that it is about or None."
);

fn team_error(error: &EnforcerError) -> PyErr {
    let debug = format!("{error:?}");
    let kind = debug.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
    TeamError::new_err((kind, error.to_string(), error.rank()))
}

/// One collective of ranks on vectors of elements.
#[pyclass(frozen, eq, name = "Collective", module = "fairway._native")]
#[derive(PartialEq)]
pub(crate) struct PyCollective(pub Collective);

#[pymethods]
impl PyCollective {
    #[staticmethod]
    fn all_reduce(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::all_reduce(ranks, elements).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn reduce_scatter(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::reduce_scatter(ranks, elements).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn all_gather(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::all_gather(ranks, elements).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn broadcast(ranks: u32, elements: u64, root: u32) -> PyResult<Self> {
        Collective::broadcast(ranks, elements, root).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn reduce(ranks: u32, elements: u64, root: u32) -> PyResult<Self> {
        Collective::reduce(ranks, elements, root).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn all_to_all(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::all_to_all(ranks, elements).map(Self).map_err(wrong)
    }

    /// An all-to-all with blocks of these sizes: from rank `i` to rank `j` at `i * ranks + j`.
    #[staticmethod]
    fn all_to_all_of(ranks: u32, sizes: Vec<u64>) -> PyResult<Self> {
        Collective::all_to_all_of(ranks, sizes.into()).map(Self).map_err(wrong)
    }

    #[staticmethod]
    #[allow(clippy::needless_pass_by_value)]
    fn permute(ranks: u32, elements: u64, pairs: Vec<(u32, u32)>) -> PyResult<Self> {
        Collective::permute(ranks, elements, &pairs).map(Self).map_err(wrong)
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.0.ranks()
    }

    #[getter]
    fn elements(&self) -> u64 {
        self.0.elements()
    }

    /// Number of elements of the vector that a rank works on.
    fn work(&self, rank: u32) -> PyResult<u64> {
        self.check(rank)?;
        Ok(self.0.work(rank))
    }

    /// Start and end of a rank's result in its vector.
    fn result(&self, rank: u32) -> PyResult<(u64, u64)> {
        self.check(rank)?;
        let range = self.0.result(rank);
        Ok((range.start, range.end))
    }

    /// Start and end of the block of a vector that a rank owns.
    fn block(&self, rank: u32) -> PyResult<(u64, u64)> {
        self.check(rank)?;
        let range = self.0.block(rank);
        Ok((range.start, range.end))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }
}

impl PyCollective {
    fn check(&self, rank: u32) -> PyResult<()> {
        let ranks = self.0.ranks();
        if rank < ranks {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("rank {rank} was asked for; there are {ranks}")))
    }
}

/// The schedule of all collectives of a step: motifs and their order.
#[pyclass(frozen, name = "Script", module = "fairway._native")]
pub(crate) struct PyScript(Arc<RankSchedule>);

#[pymethods]
impl PyScript {
    /// Parses and verifies `text`. Raises `ValueError`.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        RankSchedule::parse(text).map(|script| Self(Arc::new(script))).map_err(wrong)
    }

    /// The same collective `count` times, one after another on one channel.
    #[staticmethod]
    #[pyo3(signature = (collective, channel, count = 1))]
    fn series(collective: &PyCollective, channel: u32, count: u32) -> PyResult<Self> {
        let script = RankSchedule::series(&collective.0, channel, count);
        script.verify().map_err(wrong)?;
        Ok(Self(Arc::new(script)))
    }

    /// One collective, by the option that is fastest alone on channels of these costs.
    #[staticmethod]
    fn alone(
        py: Python<'_>,
        collective: &PyCollective,
        element: u32,
        costs: Vec<CostArguments>,
        segments: Vec<u64>,
    ) -> PyResult<Self> {
        let (costs, variety) = channels_of(costs, segments)?;
        let script = py.detach(|| RankSchedule::alone(&collective.0, element, &costs, &variety));
        Ok(Self(Arc::new(script)))
    }

    #[getter]
    fn text(&self) -> String {
        self.0.print()
    }

    /// Transfers of an operation: motif, round, source rank, target rank, first element in the source's
    /// vector, first element in the target's, number of elements, and whether they are added.
    #[allow(clippy::type_complexity)]
    fn transfers(
        &self,
        operation: usize,
    ) -> PyResult<Vec<(usize, usize, u32, u32, u64, u64, u64, bool)>> {
        let count = self.0.operations.len();
        let one = self.0.operations.get(operation).ok_or_else(|| {
            PyValueError::new_err(format!("there is no operation {operation}; there are {count}"))
        })?;
        let mut found = Vec::new();
        for (motif, placed) in one.motifs.iter().enumerate() {
            for (round, transfers) in placed.motif.rounds(&one.collective).iter().enumerate() {
                found.extend(transfers.iter().map(|one| {
                    let &plan::RankTransfer { source, target, read, write, count, sums } = one;
                    (motif, round, source, target, read, write, count, sums)
                }));
            }
        }
        Ok(found)
    }

    /// By operation: name, collective, and number of motifs.
    #[getter]
    fn operations(&self) -> Vec<(String, PyCollective, usize)> {
        let of = |one: &plan::ScheduledCollective| {
            (one.name.clone(), PyCollective(one.collective.clone()), one.motifs.len())
        };
        self.0.operations.iter().map(of).collect()
    }
}

/// Rate, latency in nanoseconds, rate of sums, incast, and contention with each other channel.
pub(crate) type CostArguments = (f64, u64, f64, f64, Vec<f64>);

/// A system's plan of a step.
#[pyclass(frozen, name = "StepPlan", module = "fairway._native")]
pub(crate) struct PyStepPlan {
    problem: Arc<Problem>,
    ways: Arc<Vec<Vec<Execution>>>,
    least: Nanos,
    planned: Planned,
}

#[pymethods]
impl PyStepPlan {
    #[getter]
    fn system(&self) -> &'static str {
        match self.planned.system {
            System::Fifo => "fifo",
            System::Lifo => "lifo",
            System::Hand => "hand",
            System::HandPrefetch => "hand+prefetch",
            System::Executions => "exec-only",
            System::Order => "sched-only",
            System::Joint => "joint",
            System::Striped => "joint+striping",
        }
    }

    /// Steady-state time of a step.
    #[getter]
    fn period_ns(&self) -> u64 {
        self.planned.plan.period.0
    }

    /// Lower bound on the time of a step under any plan.
    #[getter]
    fn least_ns(&self) -> u64 {
        self.least.0
    }

    #[getter]
    fn evaluations(&self) -> u64 {
        self.planned.evaluations
    }

    #[getter]
    fn reason(&self) -> &'static str {
        name_of(self.planned.reason)
    }

    /// By task that communicates: its name and its execution option.
    #[getter]
    fn choices(&self) -> Vec<(String, String)> {
        let nodes = self.problem.nodes().iter().zip(&*self.ways).zip(&self.planned.plan.chosen);
        let communicates = nodes.filter(|((_, ways), _)| !ways.is_empty());
        communicates
            .map(|((node, ways), &chosen)| {
                (node.name.to_string(), ways[chosen as usize].to_string())
            })
            .collect()
    }

    #[getter]
    fn script(&self) -> PyScript {
        PyScript(Arc::new(RankSchedule::of(&self.problem, &self.ways, &self.planned.plan)))
    }

    /// Spans of a schedule of `steps` steps: step, task, motif, channel, start, end (ns).
    #[allow(clippy::type_complexity)]
    fn spans(&self, steps: u32) -> Vec<(u32, u32, Option<u32>, Option<u32>, u64, u64)> {
        let unrolled = Unrolled::new(&self.problem, &self.ways, steps.max(1));
        let policy = Policy::Fixed(self.planned.plan.order.clone());
        let (_, spans) = StepScheduler::new(&unrolled, policy).spans(&self.planned.plan.chosen);
        let of = |span: &plan::ScheduledSpan| {
            (span.step, span.task, span.motif, span.channel, span.start.0, span.end.0)
        };
        spans.iter().map(of).collect()
    }
}

/// Plans a step by all systems.
///
/// # Arguments
/// - `hand`: hand-written orders, without and with prefetching.
/// - `limits`: evaluations per chain, chains, seed.
#[pyfunction]
pub(crate) fn plan_step(
    py: Python<'_>,
    graph: &PyStepGraph,
    costs: Vec<CostArguments>,
    segments: Vec<u64>,
    hand: (Option<Vec<i32>>, Option<Vec<i32>>),
    limits: (u64, u32, u64),
) -> PyResult<Vec<PyStepPlan>> {
    let problem = Problem::new(graph.0.clone()).map_err(wrong)?;
    for order in [&hand.0, &hand.1].into_iter().flatten() {
        if order.len() != problem.nodes().len() {
            let (found, expected) = (order.len(), problem.nodes().len());
            return Err(PyValueError::new_err(format!(
                "an order by hand has {found} places; expected {expected}, one for each node"
            )));
        }
    }
    let (costs, variety) = channels_of(costs, segments)?;
    let hand = HandOrders { plain: hand.0, prefetch: hand.1 };
    let (evaluations, chains, seed) = limits;
    let limits = SearchLimits { evaluations, chains, seed };
    py.detach(|| {
        let ways = |node: &StepNode| match &node.op {
            StepOp::Collective(op) => {
                executions(&op.collective, op.element_bytes, &costs, &variety)
            }
            _ => Vec::new(),
        };
        let ways: Vec<Vec<Execution>> = problem.nodes().iter().map(ways).collect();
        let problem = problem.on(&costs);
        let planned = compare(&problem, &ways, &hand, &limits);
        let rates: Vec<BitsPerSecond> = costs.iter().map(|cost| cost.rate).collect();
        let least = least_period(&problem, &ways, &rates);
        let (problem, ways) = (Arc::new(problem), Arc::new(ways));
        let of =
            |planned| PyStepPlan { problem: problem.clone(), ways: ways.clone(), least, planned };
        Ok(planned.into_iter().map(of).collect())
    })
}

/// All execution options of a collective: name, and predicted time alone (ns).
#[pyfunction]
pub(crate) fn collective_ways(
    collective: &PyCollective,
    element: u32,
    costs: Vec<CostArguments>,
    segments: Vec<u64>,
) -> PyResult<Vec<(String, u64)>> {
    let (costs, variety) = channels_of(costs, segments)?;
    let ways = executions(&collective.0, element, &costs, &variety);
    Ok(ways.iter().map(|way| (way.to_string(), way.alone().0)).collect())
}

fn channels_of(
    costs: Vec<CostArguments>,
    segments: Vec<u64>,
) -> PyResult<(Vec<ChannelCost>, SearchSpace)> {
    let costs = channel_costs(costs)?;
    if costs.is_empty() || segments.is_empty() || segments.contains(&0) {
        return Err(PyValueError::new_err("expected channels, and numbers of segments from 1 on"));
    }
    Ok((costs, SearchSpace { segments, ..SearchSpace::default() }))
}

pub(crate) fn channel_costs(costs: Vec<CostArguments>) -> PyResult<Vec<ChannelCost>> {
    costs.into_iter().map(cost).collect()
}

fn cost((rate, latency, sums, incast, overlap): CostArguments) -> PyResult<ChannelCost> {
    let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
    let is_part = |part: &f64| (0.0..=100.0).contains(part);
    if !is_rate(rate) || !is_rate(sums) || !is_part(&incast) || !overlap.iter().all(is_part) {
        return Err(PyValueError::new_err(format!(
            "a channel of {rate} bit/s, {sums} bit/s of sums and an incast of {incast} that \
             overlaps others by {overlap:?} cannot be"
        )));
    }
    let (rate, sums) = (BitsPerSecond(rate), BitsPerSecond(sums));
    Ok(ChannelCost { rate, latency: Nanos(latency), sums, incast, overlap })
}

pub(crate) fn name_of(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Exhausted => "exhausted",
        StopReason::Evaluations => "evaluations",
        StopReason::Stale => "stale",
    }
}

/// This rank's part of a schedule.
#[pyclass(frozen, name = "ScriptPart", module = "fairway._native")]
pub(crate) struct PyPart(Arc<PreparedSchedule>);

/// A handle to a submitted collective.
#[pyclass(frozen, name = "Ticket", module = "fairway._native")]
pub(crate) struct PyTicket(Mutex<Option<CollectiveTicket>>);

/// One rank's endpoint of a team (communicator).
#[pyclass(frozen, name = "Enforcer", module = "fairway._native")]
pub(crate) struct PyEnforcer(Option<Enforcer>);

impl PyEnforcer {
    fn inner(&self) -> &Enforcer {
        self.0.as_ref().expect("only drop takes it")
    }
}

impl Drop for PyEnforcer {
    fn drop(&mut self) {
        let enforcer = self.0.take();
        // Its threads may release buffers, for which they need the interpreter.
        Python::attach(|py| py.detach(|| drop(enforcer)));
    }
}

fn elements_of((dtype, reduction): (&str, &str)) -> PyResult<Elements> {
    let found = DType::from_name(dtype);
    let dtype = found.ok_or_else(|| unknown("element type of numpy", dtype))?;
    Elements::new(dtype, reduction_of(reduction)?).map_err(|error| team_error(&error))
}

fn reduction_of(name: &str) -> PyResult<Reduction> {
    match name {
        "sum" => Ok(Reduction::Sum),
        "product" => Ok(Reduction::Product),
        "max" => Ok(Reduction::Max),
        "min" => Ok(Reduction::Min),
        "and" => Ok(Reduction::And),
        "or" => Ok(Reduction::Or),
        "xor" => Ok(Reduction::Xor),
        other => Err(unknown("reduction; expected sum, product, max, min, and, or, xor", other)),
    }
}

fn unknown(what: &str, name: &str) -> PyErr {
    PyValueError::new_err(format!("{name:?} is no {what}"))
}

/// The element type of a buffer, if it is numeric.
fn dtype_of(vector: &PyUntypedBuffer) -> Option<DType> {
    let found = match (vector.format().to_bytes(), vector.item_size()) {
        (b"f", _) => DType::F32,
        (b"d", _) => DType::F64,
        (b"e", _) => DType::F16,
        (b"?", _) => DType::Bool,
        (b"b" | b"h" | b"i" | b"l" | b"q", 1) => DType::S8,
        (b"b" | b"h" | b"i" | b"l" | b"q", 2) => DType::S16,
        (b"b" | b"h" | b"i" | b"l" | b"q", 4) => DType::S32,
        (b"b" | b"h" | b"i" | b"l" | b"q", 8) => DType::S64,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 1) => DType::U8,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 2) => DType::U16,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 4) => DType::U32,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 8) => DType::U64,
        _ => return None,
    };
    Some(found)
}

/// The memory of a vector, kept alive by its buffer.
fn work_of(
    vector: PyUntypedBuffer,
    elements: Elements,
) -> PyResult<run::enforcer::CollectiveBuffer> {
    let (start, length) = (vector.buf_ptr().cast::<u8>(), vector.len_bytes());
    let is_aligned = start.align_offset(elements.size()) == 0;
    if vector.readonly() || !vector.is_c_contiguous() || !is_aligned {
        return Err(PyBufferError::new_err(
            "the vector of a collective must be writable, contiguous and aligned",
        ));
    }
    // SAFETY: the buffer keeps the range alive, which was just checked to be writable and aligned; that
    // no other thread accesses it before the end is the caller's duty, as the docstrings say.
    Ok(unsafe { run::enforcer::CollectiveBuffer::borrowed(start, length, Box::new(vector)) })
}

#[pymethods]
impl PyEnforcer {
    /// Joins a team, and waits for all other ranks to join (rendezvous). `ways` are channels of the
    /// data plane, with their rates in bits per second if known. Other ranks time out after
    /// `timeout_s`, and when joining after `meeting_s` if given. Errors name ranks by `names`, if
    /// given.
    #[new]
    #[pyo3(signature = (plane, name, rank, hosts, ways, timeout_s, meeting_s = None, names = None))]
    #[allow(clippy::needless_pass_by_value, clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        plane: &PyDataPlane,
        name: u64,
        rank: u32,
        hosts: Vec<u32>,
        ways: Vec<(u32, Option<f64>)>,
        timeout_s: f64,
        meeting_s: Option<f64>,
        names: Option<Vec<u32>>,
    ) -> PyResult<Self> {
        let hosts: Vec<HostId> = hosts.into_iter().map(HostId).collect();
        let way = |(channel, rate): (u32, Option<f64>)| TeamChannel {
            channel: Channel(channel),
            rate: rate.map(BitsPerSecond),
        };
        let ways: Vec<TeamChannel> = ways.into_iter().map(way).collect();
        let timeout = Duration::try_from_secs_f64(timeout_s).map_err(wrong)?;
        let meeting = Duration::try_from_secs_f64(meeting_s.unwrap_or(timeout_s)).map_err(wrong)?;
        let (name, hosts, ways) = (TransferTag(name), &hosts, &ways);
        let (plane, names) = (plane.inner(), names.as_deref());
        let team = Team { plane, name, rank, hosts, names, ways, timeout, meeting };
        let enforcer = py.detach(|| Enforcer::join(&team));
        enforcer.map(|enforcer| Self(Some(enforcer))).map_err(|error| team_error(&error))
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.inner().rank()
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.inner().ranks()
    }

    /// Prepares this rank's part of a schedule.
    fn prepare(&self, py: Python<'_>, script: &PyScript) -> PyResult<PyPart> {
        let script = script.0.clone();
        let part = py.detach(|| self.inner().prepare(script));
        part.map(PyPart).map_err(|error| team_error(&error))
    }

    /// Begins a step, after which at least `following` more of the same follow; returns its number.
    fn begin(&self, py: Python<'_>, part: &PyPart, following: u32) -> PyResult<u64> {
        py.detach(|| self.inner().begin(&part.0, following)).map_err(|error| team_error(&error))
    }

    /// Executes a schedule from the next step on, until another one is agreed on.
    fn follow(&self, part: &PyPart) -> PyResult<()> {
        self.inner().follow(&part.0).map_err(|error| team_error(&error))
    }

    /// Begins a step of the plan in force; returns its number, and that of the plan.
    fn begin_planned(&self, py: Python<'_>, following: u32) -> PyResult<(u64, u64)> {
        py.detach(|| self.inner().begin_planned(following)).map_err(|error| team_error(&error))
    }

    /// Proposes a schedule to all ranks; returns the step from which on all execute it.
    fn propose(&self, py: Python<'_>, script: &PyScript) -> PyResult<u64> {
        py.detach(|| self.inner().propose(&script.0)).map_err(|error| team_error(&error))
    }

    /// Allocates memory for vectors; shared by all ranks if they are on one machine.
    fn memory(&self, length: usize) -> PyResult<PyMemory> {
        self.inner().memory(length).map(PyMemory::of).map_err(Into::into)
    }

    /// Executes the one collective of a schedule as a step of its own, and waits for its end; returns
    /// the range of the vector that holds the result, or None if that is all of it. Without `dtype` the
    /// element type is that of the buffer.
    #[pyo3(signature = (part, vector, reduction, dtype = None))]
    fn call(
        &self,
        py: Python<'_>,
        part: &PyPart,
        vector: &Bound<'_, PyAny>,
        reduction: &str,
        dtype: Option<&str>,
    ) -> PyResult<Option<(u64, u64)>> {
        let vector = PyUntypedBuffer::get(vector)?;
        let elements = match dtype {
            Some(dtype) => elements_of((dtype, reduction))?,
            None => {
                let dtype = dtype_of(&vector).ok_or_else(|| {
                    PyValueError::new_err("elements that are no numbers cannot be combined")
                })?;
                Elements::new(dtype, reduction_of(reduction)?)
                    .map_err(|error| team_error(&error))?
            }
        };
        let size = elements.size();
        let work = work_of(vector, elements)?;
        let length = (work.length() / size) as u64;
        let done = py.detach(|| self.inner().call(&part.0, elements, work));
        let result = done.map_err(|error| team_error(&error))?;
        Ok((result != (0..length)).then_some((result.start, result.end)))
    }

    /// Submits a collective of a step. Its vector is the buffer, which may not be accessed before the
    /// end.
    #[pyo3(signature = (at, collective, elements, vector, poison = None))]
    #[allow(clippy::needless_pass_by_value)]
    fn submit(
        &self,
        py: Python<'_>,
        at: (u64, u32),
        collective: &PyCollective,
        elements: (&str, &str),
        vector: &Bound<'_, PyAny>,
        poison: Option<String>,
    ) -> PyResult<PyTicket> {
        let elements = elements_of(elements)?;
        let work = work_of(PyUntypedBuffer::get(vector)?, elements)?;
        let ticket = py.detach(|| self.inner().submit(at, (&collective.0, elements), work, poison));
        let ticket = ticket.map_err(|error| team_error(&error))?;
        Ok(PyTicket(Mutex::new(Some(ticket))))
    }

    /// Waits for the end of a collective; its result is in the submitted vector.
    fn wait(&self, py: Python<'_>, ticket: &PyTicket) -> PyResult<()> {
        let Some(ticket) = ticket.0.lock().take() else {
            return Err(PyValueError::new_err("a collective is waited for twice"));
        };
        let work = py.detach(|| self.inner().wait(ticket)).map_err(|error| team_error(&error))?;
        drop(work);
        Ok(())
    }

    /// Returns whether a collective has ended, with success or failure.
    fn is_done(&self, ticket: &PyTicket) -> bool {
        ticket.0.lock().as_ref().is_none_or(|ticket| self.inner().is_done(ticket))
    }

    /// Motifs executed since the last call: step, operation, motif, channel, and when it was ready,
    /// started and ended (ns).
    #[allow(clippy::type_complexity)]
    fn take_spans(&self) -> Vec<(u64, u32, u32, u32, u64, u64, u64)> {
        let of = |one: run::enforcer::MotifSpan| {
            let plan::QueueEntry { step, operation, motif } = one.stop;
            (step, operation, motif, one.channel, one.ready_ns, one.start_ns, one.end_ns)
        };
        self.inner().take_spans().into_iter().map(of).collect()
    }

    /// Non-fatal notices since the last call.
    fn take_notices(&self) -> Vec<String> {
        self.inner().take_notices()
    }

    /// Nanoseconds since the enforcer began, as in spans.
    fn now_ns(&self) -> u64 {
        self.inner().now_ns()
    }

    /// Closes this endpoint: ranks that wait for this one fail with an error.
    fn close(&self) {
        self.inner().close();
    }
}
