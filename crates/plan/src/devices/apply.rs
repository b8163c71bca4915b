//! Carrying out a plan of an MPMD step: the step with its communication in pieces, in the plan's order.

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::{Dependency, StepGraph, StepGraphError, StepNode, StepOp};
use thiserror::Error;

use crate::devices::problem::{CommStrategy, communication_kinds, kind_count};
use crate::devices::search::DevicePlan;

/// Most nodes of a step in pieces.
const NODES_MAX: u64 = 1 << 20;

/// Why a plan cannot be applied to a step.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    /// The step is invalid, or the plan's order contradicts its dependencies.
    #[error(transparent)]
    Graph(#[from] StepGraphError),
    /// The plan is of another number of kinds of communication.
    #[error("the plan has strategies of {found} kinds of communication; the step has {expected}")]
    Kinds {
        /// Number of strategies.
        found: usize,
        /// Number of kinds.
        expected: usize,
    },
    /// Communication is split into no pieces, or into too many.
    #[error("the step would be in {found} nodes; expected 1 piece or more of each, and at most {most} nodes",
            most = NODES_MAX)]
    Pieces {
        /// Number of nodes.
        found: u64,
    },
    /// An order does not have each piece once.
    #[error("the order has piece {piece} of node {node}, which is not there or comes twice")]
    Order {
        /// The node.
        node: u32,
        /// The piece.
        piece: u32,
    },
    /// An order lacks pieces.
    #[error("the order has {found} pieces of communication; the step has {expected}")]
    Short {
        /// Number of pieces in the order.
        found: usize,
        /// Number of pieces of the step.
        expected: usize,
    },
}

/// A step whose communication follows a plan.
///
/// Pieces are nodes of their own. A piece waits for the pieces that precede it in the plan's order on a
/// channel of one of its devices, so whatever executes the graph keeps to the order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedStep {
    /// The step in pieces.
    pub graph: StepGraph,
    /// By node of the graph, the node of the step that it is (a piece) of.
    pub origins: Vec<u32>,
    /// By node of the graph, the algorithm of its collective, if it is one and one was planned.
    pub algorithms: Vec<Option<Arc<str>>>,
}

impl PlannedStep {
    /// A step as it is: its communication whole, in the order in which it becomes ready.
    pub fn unplanned(graph: StepGraph) -> Self {
        let (origins, algorithms) = ((0..graph.len() as u32).collect(), vec![None; graph.len()]);
        Self { graph, origins, algorithms }
    }
}

impl DevicePlan {
    /// Applies the plan to the step that it is of, on any devices. An empty order leaves pieces in the
    /// order in which they become ready. O(pieces · devices).
    ///
    /// # Errors
    /// The plan is of another step, or its order contradicts the step's dependencies.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use base::{BitsPerSecond, Bytes, Nanos};
    /// use cost::ChannelCost;
    /// use ir::{Dependency, StepGraph, StepOp};
    /// use plan::{DeviceProblem, QueuePolicy, SearchLimits};
    /// let mut step = StepGraph::new("train", 3);
    /// // Device 2 computes for long with the second of two transfers.
    /// step.add("", StepOp::Transfer { source: 0, target: 1, size: Bytes(100) }, &[]);
    /// let first = step.add("", StepOp::Transfer { source: 0, target: 2, size: Bytes(100) }, &[]);
    /// step.add("", StepOp::compute(2, Nanos(500)), &[Dependency::on(first)]);
    /// let channel = Arc::new(ChannelCost::of(BitsPerSecond(8e9), Nanos(0)));
    /// let problem = DeviceProblem::new(step.clone(), vec![channel], 1).unwrap();
    /// let limits = SearchLimits { evaluations: 1, chains: 1, seed: 0 };
    /// let plan = problem.search(QueuePolicy::CriticalPath, &limits);
    /// assert_eq!(plan.order, [(1, 0), (0, 0)]);
    /// let planned = plan.apply(&step).unwrap();
    /// assert_eq!(planned.graph.dependencies(0), [Dependency::on(1)]);
    /// ```
    pub fn apply(&self, step: &StepGraph) -> Result<PlannedStep, PlanError> {
        step.verify()?;
        let kinds = communication_kinds(step);
        let expected = kind_count(&kinds);
        if [self.strategies.len(), self.algorithms.len()] != [expected; 2] {
            return Err(PlanError::Kinds { found: self.strategies.len(), expected });
        }
        let (firsts, total) = self.firsts(step, &kinds)?;
        let order = self.order_edges(step, &kinds, &firsts)?;
        let mut planned = PlannedStep {
            graph: StepGraph::of_parts(step.name.clone(), step.devices, step.parts),
            origins: Vec::with_capacity(total as usize),
            algorithms: Vec::with_capacity(total as usize),
        };
        for (node, stepped) in (0..).zip(step.nodes()) {
            let mut after = Vec::new();
            for &Dependency { node: on, steps_before } in step.dependencies(node) {
                let pieces = firsts[on as usize]..firsts[on as usize + 1];
                after.extend(pieces.map(|node| Dependency { node, steps_before }));
            }
            let kind = kinds[node as usize].map(|kind| kind as usize);
            let algorithm = kind.and_then(|kind| self.algorithms[kind].as_deref());
            let pieces = stepped.op.split(firsts[node as usize + 1] - firsts[node as usize]);
            for (number, op) in (firsts[node as usize]..).zip(pieces) {
                let mut after = after.clone();
                after.extend(order.get(&number).into_iter().flatten().copied().map(Dependency::on));
                let (name, priority) = (Arc::clone(&stepped.name), stepped.priority);
                planned.graph.add_node(StepNode { name, op, priority }, &after);
                planned.origins.push(node);
                planned.algorithms.push(algorithm.map(Into::into));
            }
        }
        planned.graph.verify()?;
        Ok(planned)
    }

    /// The number of the first piece of each node, and that of all pieces at the end.
    fn firsts(
        &self,
        step: &StepGraph,
        kinds: &[Option<u32>],
    ) -> Result<(Vec<u32>, u64), PlanError> {
        let mut firsts = Vec::with_capacity(step.len() + 1);
        let mut total = 0;
        for kind in kinds {
            firsts.push(total as u32);
            let pieces = kind.map_or(1, |kind| self.strategies[kind as usize].pieces);
            total += u64::from(pieces);
            if pieces == 0 || total > NODES_MAX {
                return Err(PlanError::Pieces { found: total });
            }
        }
        firsts.push(total as u32);
        Ok((firsts, total))
    }

    /// By piece, the pieces that it waits for to keep to the plan's order.
    fn order_edges(
        &self,
        step: &StepGraph,
        kinds: &[Option<u32>],
        firsts: &[u32],
    ) -> Result<BTreeMap<u32, Vec<u32>>, PlanError> {
        let mut edges = BTreeMap::new();
        // By device, channel and direction, the piece before.
        let mut last: BTreeMap<(u32, u32, bool), u32> = BTreeMap::new();
        for &(node, piece) in &self.order {
            let kind = kinds.get(node as usize).copied().flatten();
            let strategy = kind.map(|kind| self.strategies[kind as usize]);
            let (number, channel) = match strategy {
                Some(CommStrategy { pieces, channel }) if piece < pieces => {
                    let channel = channel.unwrap_or(piece % self.channels.max(1));
                    (firsts[node as usize] + piece, channel)
                }
                _ => return Err(PlanError::Order { node, piece }),
            };
            let mut after: Vec<u32> = Vec::new();
            for (device, sends) in ends(step.op(node)) {
                let before = last.insert((device, channel, sends), number);
                after.extend(before);
            }
            after.sort_unstable();
            after.dedup();
            if after.contains(&number) || edges.insert(number, after).is_some() {
                return Err(PlanError::Order { node, piece });
            }
        }
        let pieces = |kind: &u32| self.strategies[*kind as usize].pieces as usize;
        let expected = kinds.iter().flatten().map(pieces).sum();
        match self.order.len() {
            0 => Ok(edges),
            found if found == expected => Ok(edges),
            found => Err(PlanError::Short { found, expected }),
        }
    }
}

/// The devices that send or receive, and whether they send.
fn ends(op: &StepOp) -> Vec<(u32, bool)> {
    match op {
        StepOp::Compute { .. } => Vec::new(),
        StepOp::Transfer { source, target, .. } => vec![(*source, true), (*target, false)],
        StepOp::Collective(op) => {
            op.devices.iter().flat_map(|&device| [(device, true), (device, false)]).collect()
        }
    }
}
