//! Python bindings of plans of MPMD steps, and of what they make of a step.

use std::sync::Arc;

use base::Nanos;
use cost::NetworkModel;
use plan::{
    CommStrategy, DevicePlan, DeviceProblem, PlannedStep, QueuePolicy, SearchLimits, StopReason,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::costs::{CostArguments, channel_costs, name_of};
use crate::steps::PyStepGraph;
use crate::topologies::PyTopology;
use crate::wrong;

/// How one kind of communication is carried out: number of pieces, channel (None is all channels, round
/// robin), and the algorithm of a collective.
type StrategyArguments = (u32, Option<u32>, Option<String>);

/// A plan of the communication of an MPMD step.
#[pyclass(frozen, get_all, name = "DevicePlan", module = "fairway._native")]
pub(crate) struct PyDevicePlan {
    /// Makespan with the greedy strategy for each kind, in strict order of arrival.
    strict_ns: u64,
    /// The same in order of arrival, where entries soon after the head of a queue may overtake it.
    fifo_ns: u64,
    /// Likewise, ordered by critical path.
    ordered_ns: u64,
    /// Makespan as planned.
    planned_ns: u64,
    /// Plans that were evaluated, and why the search stopped.
    evaluations: u64,
    reason: &'static str,
    /// By kind of communication, how it is carried out.
    strategies: Vec<StrategyArguments>,
    /// The pieces of all communication of one step, as nodes and numbers, in order.
    order: Vec<(u32, u32)>,
}

/// The channels that each device has: measured, or the one of a topology.
#[derive(FromPyObject)]
pub(crate) enum ChannelsArgument<'py> {
    Topology(PyRef<'py, PyTopology>),
    Measured(Vec<CostArguments>),
}

impl ChannelsArgument<'_> {
    fn models(self) -> PyResult<Vec<Arc<dyn NetworkModel>>> {
        Ok(match self {
            Self::Topology(topology) => vec![Arc::new(topology.0.interconnect().clone())],
            Self::Measured(costs) => {
                channel_costs(costs)?.into_iter().map(|cost| Arc::new(cost) as _).collect()
            }
        })
    }
}

/// Plans an MPMD step, repeated `steps` times. Raises `ValueError`.
///
/// # Arguments
/// - `limits`: evaluations, seed.
#[pyfunction]
pub(crate) fn plan_devices(
    py: Python<'_>,
    graph: &PyStepGraph,
    channels: ChannelsArgument<'_>,
    steps: u32,
    limits: (u64, u64),
) -> PyResult<PyDevicePlan> {
    if steps == 0 {
        return Err(PyValueError::new_err("0 steps are to be planned; expected one or more"));
    }
    let problem = DeviceProblem::new(graph.0.clone(), channels.models()?, steps).map_err(wrong)?;
    Ok(py.detach(|| {
        let greedy = problem.greedy();
        let end = |policy| problem.end(&greedy, policy).0;
        let (evaluations, seed) = limits;
        let limits = SearchLimits { evaluations, chains: 1, seed };
        let plan = problem.search(QueuePolicy::CriticalPath, &limits);
        let strategies = plan.strategies.iter().zip(plan.algorithms);
        PyDevicePlan {
            strict_ns: end(QueuePolicy::Strict),
            fifo_ns: end(QueuePolicy::Fifo),
            ordered_ns: end(QueuePolicy::CriticalPath),
            planned_ns: plan.end.0,
            evaluations: plan.evaluations,
            reason: name_of(plan.reason),
            strategies: strategies.map(|(one, name)| (one.pieces, one.channel, name)).collect(),
            order: plan.order,
        }
    }))
}

/// A step whose communication is in pieces, in the order of a plan; see `plan::PlannedStep`.
#[pyclass(frozen, name = "PlannedStep", module = "fairway._native")]
pub(crate) struct PyPlannedStep(pub PlannedStep);

#[pymethods]
impl PyPlannedStep {
    /// Applies a plan to a step. Raises `ValueError`.
    ///
    /// # Arguments
    /// - `channels`: number of channels that the plan is of.
    /// - `strategies`: by kind of communication.
    /// - `order`: of all pieces; empty for the order in which they become ready.
    #[staticmethod]
    fn of_plan(
        graph: &PyStepGraph,
        channels: u32,
        strategies: Vec<StrategyArguments>,
        order: Vec<(u32, u32)>,
    ) -> PyResult<Self> {
        let of = |one: &StrategyArguments| CommStrategy { pieces: one.0, channel: one.1 };
        let plan = DevicePlan {
            channels,
            strategies: strategies.iter().map(of).collect(),
            algorithms: strategies.into_iter().map(|(_, _, algorithm)| algorithm).collect(),
            order,
            end: Nanos(0),
            evaluations: 0,
            reason: StopReason::Exhausted,
        };
        Ok(Self(plan.apply(&graph.0).map_err(wrong)?))
    }

    /// The step in pieces.
    #[getter]
    fn graph(&self) -> PyStepGraph {
        PyStepGraph(self.0.graph.clone())
    }

    /// By node of the graph, the node of the step that it is a piece of.
    #[getter]
    fn origins(&self) -> Vec<u32> {
        self.0.origins.clone()
    }

    fn __repr__(&self) -> String {
        format!("PlannedStep({:?}, {} nodes)", self.0.graph.name, self.0.graph.len())
    }
}
