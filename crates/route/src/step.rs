//! Step graphs as tasks: each collective becomes the rounds of its motifs, each round the transfers
//! between neighbours in it.
//!
//! A device waits for what concerns it: an operation on a device begins once those tasks of the
//! operations before it are done that compute on the device, send from it or write to it; if there are
//! none, once all are done.
//!
//! Source: SYNDICATE §4.2 for motifs, the multi-TSP system §4 for the schedule.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BitsPerSecond, Bytes, VertexId};
use cost::ChannelCost;
use ir::{CollectiveOp, StepGraph, StepGraphError, StepOp};
use plan::{Execution, PlannedStep, algorithm, fastest_algorithm};
use thiserror::Error;
use topology::Network;

use crate::planner::{RouteError, route};
use crate::schedule::{RoutePlan, Timing};
use crate::task::{Computation, RouteTransfer, Task, Tasks};

/// Most tasks of a step.
const TASKS_MAX: usize = 1 << 20;

/// Why a step cannot be scheduled on a network.
#[derive(Debug, Error, PartialEq)]
pub enum StepRouteError {
    /// The step graph is invalid.
    #[error(transparent)]
    Graph(#[from] StepGraphError),
    /// The step is of more devices than the network has.
    #[error("the step is of {found} devices; the topology has {endpoints}")]
    Devices {
        /// Devices of the step, in all parts.
        found: u64,
        /// Endpoints of the network.
        endpoints: u32,
    },
    /// The graph describes one of several parts.
    #[error("the step stands for {parts} parts; expected a step of all devices")]
    Parts {
        /// Number of parts.
        parts: u32,
    },
    /// A collective has no algorithm of the planned name.
    #[error("node {node} is planned as {name:?}, which is no algorithm of a {kind}")]
    Algorithm {
        /// The node.
        node: u32,
        /// The name.
        name: Arc<str>,
        /// The kind of its collective.
        kind: &'static str,
    },
    /// Too many transfers.
    #[error("the step has more than {most} transfers and computations; a smaller step or fabric can be \
             scheduled, and any can be simulated as flows", most = TASKS_MAX)]
    Tasks,
    /// The tasks cannot be scheduled.
    #[error(transparent)]
    Route(#[from] RouteError),
}

/// A scheduled step.
#[derive(Clone, PartialEq, Debug)]
pub struct StepSchedule {
    /// The tasks, and the links and start times of every vector.
    pub plan: RoutePlan,
    /// By node of the step graph, its tasks.
    pub tasks: Vec<std::ops::Range<u32>>,
    /// By node, the algorithm of its collective, if it is one.
    pub algorithms: Vec<Option<Arc<str>>>,
}

/// Schedules a planned step on a network, with device `i` at endpoint `i`: the pieces of its communication,
/// in the plan's order, by the plan's algorithms. Where none was planned, a kind of collective gets the
/// algorithm that is fastest alone at the rate and latency of the network's first link.
///
/// # Errors
/// The graph is invalid, is too large, or has more devices than the network; an algorithm is unknown; or a
/// transfer cannot be scheduled.
///
/// ```
/// use base::{Bytes, Nanos};
/// use topology::Topology;
/// use ir::{Collective, Dependency, Devices, StepGraph, StepOp};
/// let all: Devices = (0..8).collect();
/// let mut graph = StepGraph::new("train", 8);
/// let backward = graph.add("backward", StepOp::compute(all.clone(), Nanos(10_000)), &[]);
/// let reduce = StepOp::collective(Collective::all_reduce, all, Bytes(1 << 20)).unwrap();
/// graph.add("gradients", reduce, &[Dependency::on(backward)]);
/// let torus: Topology = "torus:2x4".parse().unwrap();
/// let network = torus.links().unwrap().network();
/// let planned = plan::PlannedStep::unplanned(graph);
/// let step = route::route_step(network, &planned, route::Timing::default()).unwrap();
/// assert_eq!(step.tasks[0], 0..8, "one computation on each device");
/// ```
pub fn route_step(
    network: &Network,
    planned: &PlannedStep,
    timing: Timing,
) -> Result<StepSchedule, StepRouteError> {
    let graph = &planned.graph;
    let order = graph.order()?;
    if graph.parts != 1 {
        return Err(StepRouteError::Parts { parts: graph.parts });
    }
    if graph.devices > network.endpoints() {
        let (found, endpoints) = (u64::from(graph.devices), network.endpoints());
        return Err(StepRouteError::Devices { found, endpoints });
    }
    let mut lowering = Lowering::new(network, planned, timing);
    for node in order {
        lowering.add(node)?;
    }
    let Lowering { tasks, of_node, algorithms, .. } = lowering;
    let mut plan = route(network, tasks, timing)?;
    plan.schedule.trains.sort_by_key(|train| train.task);
    Ok(StepSchedule { plan, tasks: of_node, algorithms })
}

/// Tasks that concern a device.
type Concerns = BTreeMap<u32, Tasks>;

struct Lowering<'a> {
    graph: &'a StepGraph,
    /// By node, the algorithm that was planned.
    planned: &'a [Option<Arc<str>>],
    timing: Timing,
    channel: ChannelCost,
    /// By kind of communication and name, its algorithm.
    algorithm_of: BTreeMap<(u32, Option<Arc<str>>), Arc<Execution>>,
    kinds: Vec<Option<u32>>,
    tasks: Vec<Task>,
    of_node: Vec<std::ops::Range<u32>>,
    algorithms: Vec<Option<Arc<str>>>,
    /// By node, its last tasks at each device.
    done: Vec<Concerns>,
}

impl<'a> Lowering<'a> {
    fn new(network: &Network, planned: &'a PlannedStep, timing: Timing) -> Self {
        let link = network.links().first();
        let channel = ChannelCost::of(
            link.map_or(BitsPerSecond(1e9), |link| link.rate),
            link.map_or(timing.forward, |link| link.latency + timing.forward),
        );
        let graph = &planned.graph;
        Self {
            graph,
            planned: &planned.algorithms,
            timing,
            channel,
            algorithm_of: BTreeMap::new(),
            kinds: plan::communication_kinds(graph),
            tasks: Vec::new(),
            of_node: vec![0..0; graph.len()],
            algorithms: vec![None; graph.len()],
            done: vec![Concerns::new(); graph.len()],
        }
    }

    fn add(&mut self, node: u32) -> Result<(), StepRouteError> {
        let first = self.tasks.len() as u32;
        let graph = self.graph;
        let done = match graph.op(node) {
            StepOp::Compute { devices, time } => {
                let length = self.timing.ticks(*time);
                let compute = |this: &mut Self, device: u32| {
                    let after = this.before(node, device);
                    let chip = VertexId(device);
                    (device, this.push(Computation { chip, length, after }.into()))
                };
                devices.iter().map(|&device| compute(self, device)).collect()
            }
            StepOp::Transfer { source, target, size } if source != target && size.0 > 0 => {
                let after = self.before(node, *source);
                let task = self.send((*source, *target), *size, after);
                [(*source, task.clone()), (*target, task)].into()
            }
            StepOp::Transfer { target, .. } => {
                [(*target, self.before(node, *target))].into_iter().collect()
            }
            StepOp::Collective(op) => self.collective(node, op)?,
        };
        self.done[node as usize] = done;
        self.of_node[node as usize] = first..self.tasks.len() as u32;
        if self.tasks.len() > TASKS_MAX { Err(StepRouteError::Tasks) } else { Ok(()) }
    }

    fn push(&mut self, task: Task) -> Tasks {
        self.tasks.push(task);
        Tasks::from_slice(&[self.tasks.len() as u32 - 1])
    }

    fn send(&mut self, (source, target): (u32, u32), size: Bytes, after: Tasks) -> Tasks {
        let transfer = RouteTransfer::new(VertexId(source), VertexId(target), size);
        self.push(RouteTransfer { after, ..transfer }.into())
    }

    /// Tasks of a node's predecessors that concern a device.
    fn before(&self, node: u32, device: u32) -> Tasks {
        let of = |on: u32| {
            let done = &self.done[on as usize];
            match done.get(&device) {
                Some(tasks) => tasks.clone(),
                None => done.values().flatten().copied().collect(),
            }
        };
        let mut tasks: Tasks = self.graph.predecessors(node).flat_map(of).collect();
        tasks.sort_unstable();
        tasks.dedup();
        tasks
    }

    /// The algorithm of a collective: as planned, or else the fastest.
    fn algorithm(
        &mut self,
        node: u32,
        op: &CollectiveOp,
    ) -> Result<Arc<Execution>, StepRouteError> {
        let name = self.planned[node as usize].clone();
        let key = (self.kinds[node as usize].unwrap_or(u32::MAX), name);
        if let Some(known) = self.algorithm_of.get(&key) {
            return Ok(Arc::clone(known));
        }
        let made = match &key.1 {
            None => fastest_algorithm(op, &self.channel),
            Some(name) => algorithm(op, &self.channel, name).ok_or_else(|| {
                let (name, kind) = (Arc::clone(name), op.collective.kind().name());
                StepRouteError::Algorithm { node, name, kind }
            })?,
        };
        let made = Arc::new(made);
        self.algorithm_of.insert(key, Arc::clone(&made));
        Ok(made)
    }

    fn collective(&mut self, node: u32, op: &CollectiveOp) -> Result<Concerns, StepRouteError> {
        let execution = self.algorithm(node, op)?;
        self.algorithms[node as usize] = Some(execution.form.replace(' ', "-").into());
        let ranks = op.devices.len();
        let begin: Vec<Tasks> =
            op.devices.iter().map(|&device| self.before(node, device)).collect();
        // By motif and rank: the tasks that a rank must wait for after the motif.
        let mut ends: Vec<Vec<Tasks>> = Vec::with_capacity(execution.motifs.len());
        for placed in &execution.motifs {
            let mut ready: Vec<Tasks> = (0..ranks)
                .map(|rank| match placed.after.is_empty() {
                    true => begin[rank].clone(),
                    false => placed
                        .after
                        .iter()
                        .flat_map(|&on| ends[on as usize][rank].clone())
                        .collect(),
                })
                .collect();
            for round in placed.motif.rounds(&op.collective) {
                let mut concerns: BTreeMap<u32, Tasks> = BTreeMap::new();
                for transfer in round.iter().filter(|one| one.count > 0 && one.source != one.target)
                {
                    let size = Bytes(transfer.count * u64::from(op.element_bytes));
                    let ends =
                        [transfer.source, transfer.target].map(|rank| op.devices[rank as usize]);
                    let after = ready[transfer.source as usize].clone();
                    let task = self.send((ends[0], ends[1]), size, after);
                    concerns.entry(transfer.source).or_default().extend_from_slice(&task);
                    concerns.entry(transfer.target).or_default().extend_from_slice(&task);
                }
                for (rank, tasks) in concerns {
                    ready[rank as usize] = tasks;
                }
                if self.tasks.len() > TASKS_MAX {
                    return Err(StepRouteError::Tasks);
                }
            }
            ends.push(ready);
        }
        let of = |rank: usize| {
            let mut tasks: Tasks = ends.iter().flat_map(|end| end[rank].clone()).collect();
            tasks.sort_unstable();
            tasks.dedup();
            (op.devices[rank], tasks)
        };
        Ok((0..ranks).map(of).collect())
    }
}
