//! The planning problem of an MPMD step: nodes, channels, and how long each piece takes.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use base::Bytes;
use cost::NetworkModel;
use ir::{StepGraph, StepGraphError, StepOp};
use thiserror::Error;

/// Most nodes of all steps that are planned together.
const NODES_MAX: u64 = 1 << 22;

/// Why a step graph cannot be planned.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeviceProblemError {
    /// The graph is invalid.
    #[error(transparent)]
    Graph(#[from] StepGraphError),
    /// The graph has several parts, of which one represents the others.
    #[error("the step stands for {parts} parts; expected a step of all devices")]
    Parts {
        /// Number of parts.
        parts: u32,
    },
    /// There are too many nodes in all steps.
    #[error("{steps} steps of {nodes} nodes are planned together; expected at most {most} nodes in all",
            most = NODES_MAX)]
    Steps {
        /// Number of steps.
        steps: u32,
        /// Nodes of one step.
        nodes: usize,
    },
    /// There are no channels.
    #[error("there are no channels; expected one or more")]
    NoChannels,
    /// A channel does not join all devices.
    #[error("the step is of {found} devices; the topology has {devices}")]
    Devices {
        /// Devices of the step.
        found: u32,
        /// Devices that the channel joins.
        devices: u32,
    },
}

/// A step of several devices, repeated, over channels that every device has.
#[derive(Clone)]
pub struct DeviceProblem {
    pub(crate) step: StepGraph,
    pub(crate) channels: Vec<Arc<dyn NetworkModel>>,
    pub(crate) steps: usize,
    /// Nodes of one step in topological order.
    pub(crate) order: Vec<u32>,
    /// By node of all steps: the nodes that depend on it, and the number of nodes that it depends on.
    pub(crate) next: Vec<Vec<u32>>,
    pub(crate) waits: Vec<u32>,
    /// By node, its kind of communication: nodes of one kind share a strategy.
    pub(crate) kinds: Vec<Option<u32>>,
    /// By kind, one of its nodes.
    pub(crate) examples: Vec<u32>,
}

impl fmt::Debug for DeviceProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nodes, channels) = (self.step.len(), self.channels.len());
        write!(f, "DeviceProblem({nodes} nodes, {channels} channels, {} steps)", self.steps)
    }
}

/// The strategy of all communication of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommStrategy {
    /// Number of pieces into which it is split.
    pub pieces: u32,
    /// Its channel; none is all channels, round robin.
    pub channel: Option<u32>,
}

/// The order in which queues issue entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueuePolicy {
    /// In order of arrival, with head-of-line blocking.
    Strict,
    /// In order of arrival; while the head waits for other resources, entries soon after it may
    /// overtake.
    Fifo,
    /// By longest chain of work to the end (critical path); likewise.
    CriticalPath,
}

impl DeviceProblem {
    /// A step repeated `steps` times.
    ///
    /// # Errors
    /// The graph is invalid or has several parts, or there is no channel.
    pub fn new(
        step: StepGraph,
        channels: Vec<Arc<dyn NetworkModel>>,
        steps: u32,
    ) -> Result<Self, DeviceProblemError> {
        let order = step.order()?;
        if step.parts != 1 {
            return Err(DeviceProblemError::Parts { parts: step.parts });
        }
        if step.len() as u64 * u64::from(steps) > NODES_MAX {
            return Err(DeviceProblemError::Steps { steps, nodes: step.len() });
        }
        if channels.is_empty() {
            return Err(DeviceProblemError::NoChannels);
        }
        if let Some(channel) = channels.iter().find(|one| one.devices() < step.devices) {
            let (found, devices) = (step.devices, channel.devices());
            return Err(DeviceProblemError::Devices { found, devices });
        }
        let (count, steps) = (step.len(), steps as usize);
        let mut next = vec![Vec::new(); count * steps];
        let mut waits = vec![0; count * steps];
        for turn in 0..steps {
            for number in 0..count {
                for on in step.dependencies(number as u32) {
                    let Some(other) = turn.checked_sub(on.steps_before as usize) else { continue };
                    next[other * count + on.node as usize].push((turn * count + number) as u32);
                    waits[turn * count + number] += 1;
                }
            }
        }
        let kinds = communication_kinds(&step);
        let mut examples = vec![0; kind_count(&kinds)];
        for (node, kind) in (0..).zip(&kinds) {
            if let Some(kind) = kind {
                examples[*kind as usize] = node;
            }
        }
        Ok(Self { step, channels, steps, order, next, waits, kinds, examples })
    }

    /// Number of kinds of communication.
    pub fn kinds(&self) -> usize {
        self.examples.len()
    }

    /// Predicted time of a piece of a node on a channel.
    pub(crate) fn time(&self, node: u32, pieces: u32, channel: usize) -> u64 {
        let network = &self.channels[channel];
        let piece = |size: Bytes| Bytes(size.0.div_ceil(u64::from(pieces)));
        match self.step.op(node) {
            StepOp::Compute { time, .. } => time.0,
            &StepOp::Transfer { source, target, size } => {
                network.transfer_time(source, target, piece(size)).0
            }
            StepOp::Collective(op) => {
                network.collective_time(op.collective.kind(), &op.devices, piece(op.size())).0
            }
        }
    }
}

/// Returns the kind of communication of each node, by its index in a plan's strategies; none of a
/// computation.
pub fn communication_kinds(step: &StepGraph) -> Vec<Option<u32>> {
    let kinds: Vec<_> = step.nodes().iter().map(|node| kind(&node.op)).collect();
    let known: BTreeSet<_> = kinds.iter().flatten().collect();
    let known: Vec<_> = known.into_iter().collect();
    let number = |kind: &Option<_>| {
        let found = known.binary_search(&kind.as_ref()?);
        found.ok().map(|at| at as u32)
    };
    kinds.iter().map(number).collect()
}

/// Number of kinds among those of all nodes.
pub(crate) fn kind_count(kinds: &[Option<u32>]) -> usize {
    kinds.iter().flatten().max().map_or(0, |&last| last as usize + 1)
}

/// The kind of a communication node: what it is, its size, and its number of devices.
fn kind(op: &StepOp) -> Option<(&'static str, u64, usize)> {
    match op {
        StepOp::Compute { .. } => None,
        StepOp::Transfer { size, .. } => Some(("", size.0, 2)),
        StepOp::Collective(op) => {
            Some((op.collective.kind().name(), op.size().0, op.devices.len()))
        }
    }
}
