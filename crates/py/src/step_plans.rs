//! Python bindings of plans of training steps.

use std::sync::Arc;

use base::{BitsPerSecond, Nanos};
use ir::{StepNode, StepOp};
use plan::{
    Execution, HandOrders, Planned, Policy, Problem, RankSchedule, SearchLimits, StepScheduler,
    System, Unrolled, compare, executions, least_period,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::collectives::PyCollective;
use crate::costs::{CostArguments, channels_of, name_of};
use crate::scripts::PyScript;
use crate::steps::PyStepGraph;
use crate::wrong;

/// A system's plan of a step.
#[pyclass(frozen, name = "StepPlan", module = "fairway._native")]
pub(crate) struct PyStepPlan {
    problem: Arc<Problem>,
    options: Arc<Vec<Vec<Execution>>>,
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
        let nodes = self.problem.nodes().iter().zip(&*self.options).zip(&self.planned.plan.chosen);
        let communicates = nodes.filter(|((_, options), _)| !options.is_empty());
        communicates
            .map(|((node, options), &chosen)| {
                (node.name.to_string(), options[chosen as usize].to_string())
            })
            .collect()
    }

    #[getter]
    fn script(&self) -> PyScript {
        PyScript(Arc::new(RankSchedule::of(&self.problem, &self.options, &self.planned.plan)))
    }

    /// Spans of a schedule of `steps` steps: step, task, motif, channel, start, end (ns).
    #[allow(clippy::type_complexity)]
    fn spans(&self, steps: u32) -> Vec<(u32, u32, Option<u32>, Option<u32>, u64, u64)> {
        let unrolled = Unrolled::new(&self.problem, &self.options, steps.max(1));
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
        let options = |node: &StepNode| match &node.op {
            StepOp::Collective(op) => {
                executions(&op.collective, op.element_bytes, &costs, &variety)
            }
            _ => Vec::new(),
        };
        let options: Vec<Vec<Execution>> = problem.nodes().iter().map(options).collect();
        let problem = problem.on(&costs);
        let planned = compare(&problem, &options, &hand, &limits);
        let rates: Vec<BitsPerSecond> = costs.iter().map(|cost| cost.rate).collect();
        let least = least_period(&problem, &options, &rates);
        let (problem, options) = (Arc::new(problem), Arc::new(options));
        let of = |planned| PyStepPlan {
            problem: problem.clone(),
            options: options.clone(),
            least,
            planned,
        };
        Ok(planned.into_iter().map(of).collect())
    })
}

/// All execution options of a collective: form, and predicted time alone (ns).
#[pyfunction]
pub(crate) fn collective_options(
    collective: &PyCollective,
    element: u32,
    costs: Vec<CostArguments>,
    segments: Vec<u64>,
) -> PyResult<Vec<(String, u64)>> {
    let (costs, variety) = channels_of(costs, segments)?;
    let options = executions(&collective.0, element, &costs, &variety);
    Ok(options.iter().map(|option| (option.form.clone(), option.alone().0)).collect())
}
