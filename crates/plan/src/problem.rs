//! The planning problem: an SPMD step that all devices execute alike, on channels that all of them
//! have.

use std::sync::Arc;

use cost::ChannelCost;
use ir::{Dependency, StepGraph, StepGraphError, StepNode, StepOp};
use thiserror::Error;

/// Most nodes of a step.
const NODES_MAX: usize = 1 << 20;

/// Why a step graph cannot be planned as an SPMD step.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ProblemError {
    /// The graph is invalid.
    #[error(transparent)]
    Graph(#[from] StepGraphError),
    /// A node depends on a node of the same step that is not listed before it.
    #[error(
        "node {node} ({name}) depends on node {on} of the same step, which comes after it; list nodes in \
         the order of the program"
    )]
    Order {
        /// Index of the node.
        node: u32,
        /// Its name.
        name: Arc<str>,
        /// Index of the node that it depends on.
        on: u32,
    },
    /// A node depends on a node more than one step back.
    #[error(
        "node {node} ({name}) depends on a node of {steps_before} steps before; expected 0 or 1"
    )]
    StepsBefore {
        /// Index of the node.
        node: u32,
        /// Its name.
        name: Arc<str>,
        /// How many steps before.
        steps_before: u32,
    },
    /// A node is not on all devices in order, with device `i` as rank `i`.
    #[error(
        "node {node} ({name}) is not of all {devices} devices in order, as ranks that all do the same are"
    )]
    NotAlike {
        /// Index of the node.
        node: u32,
        /// Its name.
        name: Arc<str>,
        /// Number of devices.
        devices: u32,
    },
    /// There are no nodes, or too many.
    #[error("a step has {found} nodes; expected 1 to {most}", most = NODES_MAX)]
    Nodes {
        /// Number of nodes.
        found: usize,
    },
}

/// A step that every device repeats; devices compute in the order of its nodes.
///
/// ```
/// use base::{Bytes, Nanos};
/// use ir::{Collective, Dependency, Devices, StepGraph, StepOp};
/// let ranks: Devices = (0..4).collect();
/// let mut graph = StepGraph::new("train", 4);
/// let backward = graph.add("backward", StepOp::compute(ranks.clone(), Nanos(1_000)), &[]);
/// let reduce = StepOp::collective(Collective::all_reduce, ranks, Bytes(1 << 20)).unwrap();
/// graph.add("gradients", reduce, &[Dependency::on(backward)]);
/// assert_eq!(plan::Problem::new(graph).unwrap().nodes().len(), 2);
/// ```
///
/// Source: SYNDICATE §3.1.1, Figure 13.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    graph: StepGraph,
    /// By channel and other channel: the slowdown of motifs on the first while the other is busy too,
    /// in millionths.
    overlap: Vec<Vec<u32>>,
}

impl Problem {
    /// A problem on channels that do not slow each other down.
    ///
    /// # Errors
    /// The graph is invalid, its devices do not all do the same, a dependency is on a later node or
    /// more than one step back, or the number of nodes is out of range.
    pub fn new(graph: StepGraph) -> Result<Self, ProblemError> {
        if !(1..=NODES_MAX).contains(&graph.len()) {
            return Err(ProblemError::Nodes { found: graph.len() });
        }
        let devices = graph.devices;
        for (number, node) in (0..).zip(graph.nodes()) {
            let name = || node.name.clone();
            let is_alike = match &node.op {
                StepOp::Transfer { .. } => false,
                StepOp::Compute { devices: of, .. } => of.iter().copied().eq(0..devices),
                StepOp::Collective(op) => op.devices.iter().copied().eq(0..devices),
            };
            if !is_alike {
                return Err(ProblemError::NotAlike { node: number, name: name(), devices });
            }
            for &Dependency { node: on, steps_before } in graph.dependencies(number) {
                if steps_before > 1 {
                    let (node, name) = (number, name());
                    return Err(ProblemError::StepsBefore { node, name, steps_before });
                }
                if steps_before == 0 && (number + 1..graph.len() as u32).contains(&on) {
                    return Err(ProblemError::Order { node: number, name: name(), on });
                }
            }
        }
        graph.verify()?;
        Ok(Self { graph, overlap: Vec::new() })
    }

    /// Returns the same step on these channels, which may contend for shared resources.
    #[must_use]
    pub fn on(mut self, channels: &[ChannelCost]) -> Self {
        let millionths = |part: &f64| (part * 1e6).round() as u32;
        let of = |channel: &ChannelCost| channel.overlap.iter().map(millionths).collect();
        self.overlap = channels.iter().map(of).collect();
        self
    }

    /// The slowdown of motifs on a channel while another channel is busy, in millionths.
    pub(crate) fn overlap(&self, channel: usize, other: usize) -> u32 {
        self.overlap.get(channel).and_then(|of| of.get(other)).copied().unwrap_or(0)
    }

    /// The step graph.
    pub fn graph(&self) -> &StepGraph {
        &self.graph
    }

    /// Nodes of the step, in program order.
    pub fn nodes(&self) -> &[StepNode] {
        self.graph.nodes()
    }
}

/// Returns whether a node computes rather than communicates.
pub(crate) fn computes(node: &StepNode) -> bool {
    matches!(node.op, StepOp::Compute { .. })
}
