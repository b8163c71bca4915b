//! A step graph: what devices compute and communicate in one training step, and in what order.
//!
//! It is what [`lower`](crate::lower) makes of a captured [`Program`](crate::Program), what `place`
//! makes of a placed model, what `plan` gives algorithms and an order to, and what `sim` carries out.
//! Devices are numbers from 0 on that mean nothing until a topology gives them places.
//!
//! Source: SYNDICATE §3.1.1, Figure 13 (dependencies within a step and on the step before).

use std::ops::Deref;
use std::sync::Arc;

use base::{Bytes, Nanos};
use thiserror::Error;

use crate::collective::{Collective, CollectiveError};

/// Most devices of a step, of all parts.
const DEVICES_MAX: u64 = 1 << 24;

/// Devices in an order, which for a collective is that of its ranks.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Devices(Listed);

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Listed {
    One(u32),
    Many(Arc<[u32]>),
}

impl Deref for Devices {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match &self.0 {
            Listed::One(device) => std::slice::from_ref(device),
            Listed::Many(devices) => devices,
        }
    }
}

impl From<u32> for Devices {
    fn from(device: u32) -> Self {
        Self(Listed::One(device))
    }
}

impl From<Arc<[u32]>> for Devices {
    fn from(devices: Arc<[u32]>) -> Self {
        Self(match devices[..] {
            [device] => Listed::One(device),
            _ => Listed::Many(devices),
        })
    }
}

impl From<Vec<u32>> for Devices {
    fn from(devices: Vec<u32>) -> Self {
        Arc::<[u32]>::from(devices).into()
    }
}

impl FromIterator<u32> for Devices {
    fn from_iter<T: IntoIterator<Item = u32>>(devices: T) -> Self {
        devices.into_iter().collect::<Arc<[u32]>>().into()
    }
}

/// A collective as a node of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CollectiveOp {
    /// What it computes.
    pub collective: Collective,
    /// Its ranks, in order. Rings go around in this order.
    pub devices: Devices,
    /// Bytes of one element.
    pub element_bytes: u32,
}

impl CollectiveOp {
    /// Bytes of the vector that a rank works on; of an all-to-all, of all blocks of all ranks.
    pub fn size(&self) -> Bytes {
        Bytes(self.collective.elements() * u64::from(self.element_bytes))
    }
}

/// What a node of a step does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepOp {
    /// Keeps each of the devices busy for a time.
    Compute {
        /// Which devices.
        devices: Devices,
        /// How long each computes.
        time: Nanos,
    },
    /// Sends bytes from one device to another.
    Transfer {
        /// The sending device.
        source: u32,
        /// The receiving device.
        target: u32,
        /// How much.
        size: Bytes,
    },
    /// Carries a collective out.
    Collective(Box<CollectiveOp>),
}

impl StepOp {
    /// A computation of one or several devices.
    pub fn compute(devices: impl Into<Devices>, time: Nanos) -> Self {
        Self::Compute { devices: devices.into(), time }
    }

    /// A collective of `devices`, one rank each, on vectors of `size` bytes.
    ///
    /// # Arguments
    /// - `make`: the collective of this many ranks and elements, as [`Collective::all_reduce`].
    ///
    /// # Errors
    /// There can be no such collective.
    pub fn collective(
        make: impl FnOnce(u32, u64) -> Result<Collective, CollectiveError>,
        devices: impl Into<Devices>,
        size: Bytes,
    ) -> Result<Self, CollectiveError> {
        let devices = devices.into();
        let collective = make(devices.len() as u32, size.0)?;
        Ok(Self::Collective(Box::new(CollectiveOp { collective, devices, element_bytes: 1 })))
    }

    /// A collective of devices 0, 1 and so on, one for each rank.
    pub fn of_ranks(collective: Collective, element_bytes: u32) -> Self {
        let devices = (0..collective.ranks()).collect();
        Self::Collective(Box::new(CollectiveOp { collective, devices, element_bytes }))
    }

    /// Devices that it names.
    pub fn devices(&self) -> impl Iterator<Item = u32> {
        let (pair, listed) = match self {
            Self::Compute { devices, .. } => (None, &devices[..]),
            Self::Transfer { source, target, .. } => (Some([*source, *target]), &[][..]),
            Self::Collective(op) => (None, &op.devices[..]),
        };
        pair.into_iter().flatten().chain(listed.iter().copied())
    }
}

/// A node that must end before another begins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Dependency {
    /// Its number.
    pub node: u32,
    /// In which step: 0 is the same one, 1 the one before.
    pub steps_before: u32,
}

impl Dependency {
    /// A node of the same step.
    pub fn on(node: u32) -> Self {
        Self { node, steps_before: 0 }
    }
}

/// A node of a step graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepNode {
    /// What reports call it; may be empty.
    pub name: Arc<str>,
    /// What it does.
    pub op: StepOp,
    /// A device that could compute several nodes computes the one of the highest priority; none where
    /// whoever carries the graph out decides.
    pub priority: Option<u64>,
}

/// Why a step graph makes no sense.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StepGraphError {
    /// A node names a device that is not there.
    #[error("node {node} is of device {found}; expected one of {devices} devices")]
    Device {
        /// Which node.
        node: u32,
        /// The device it names.
        found: u32,
        /// How many devices there are.
        devices: u32,
    },
    /// There are too many devices.
    #[error("a step is of {found} devices; expected at most {most}", most = DEVICES_MAX)]
    Devices {
        /// How many, of all parts.
        found: u64,
    },
    /// A node names a device twice.
    #[error("node {node} names device {found} twice; expected each of its devices once")]
    Twice {
        /// Which node.
        node: u32,
        /// The device.
        found: u32,
    },
    /// A node depends on a node that is not there, or on itself in the same step.
    #[error("node {node} depends on node {found}; expected another one of {nodes} nodes")]
    Dependency {
        /// Which node.
        node: u32,
        /// What it depends on.
        found: u32,
        /// How many nodes there are.
        nodes: u32,
    },
    /// Nodes of one step that depend on each other.
    #[error("node {node} depends on itself through others; a step must have an order")]
    Cycle {
        /// One of them.
        node: u32,
    },
    /// A collective has not one device for each rank.
    #[error(
        "the collective of node {node} has {found} devices; expected {ranks}, one for each rank"
    )]
    Ranks {
        /// Which node.
        node: u32,
        /// How many devices it has.
        found: u32,
        /// How many ranks.
        ranks: u32,
    },
}

/// What devices do in one step.
///
/// Where a machine consists of parts that all do the same, one part stands for all: `devices` counts
/// those of one part, and transfers to devices from there on go to the parts that follow.
///
/// ```
/// use base::{Bytes, Nanos};
/// use ir::{Collective, Dependency, Devices, StepGraph, StepOp};
/// let mut step = StepGraph::new("train", 4);
/// let all: Devices = (0..4).collect();
/// let backward = step.add("backward", StepOp::compute(all.clone(), Nanos(1_000)), &[]);
/// let reduce = StepOp::collective(Collective::all_reduce, all.clone(), Bytes(1 << 20)).unwrap();
/// let reduce = step.add("gradients", reduce, &[Dependency::on(backward)]);
/// step.add("update", StepOp::compute(all, Nanos(100)), &[Dependency::on(reduce)]);
/// assert_eq!(step.order().unwrap(), [0, 1, 2]);
/// assert_eq!(StepGraph::parse(&step.to_string()).unwrap(), step);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepGraph {
    /// Its name.
    pub name: String,
    /// Devices of one part.
    pub devices: u32,
    /// How many parts there are; 1 where each device does something of its own.
    pub parts: u32,
    nodes: Vec<StepNode>,
    /// What each depends on: `dependencies[starts[node]..starts[node + 1]]`.
    dependencies: Vec<Dependency>,
    starts: Vec<u32>,
}

impl StepGraph {
    /// A step of `devices` without nodes.
    pub fn new(name: impl Into<String>, devices: u32) -> Self {
        Self::of_parts(name, devices, 1)
    }

    /// A step of `parts` that all do the same, of `devices` each, without nodes.
    pub fn of_parts(name: impl Into<String>, devices: u32, parts: u32) -> Self {
        let (name, nodes, dependencies) = (name.into(), Vec::new(), Vec::new());
        Self { name, devices, parts, nodes, dependencies, starts: vec![0] }
    }

    /// Adds a node that begins when all that it depends on has ended; returns its number.
    pub fn add(&mut self, name: impl Into<Arc<str>>, op: StepOp, after: &[Dependency]) -> u32 {
        self.add_node(StepNode { name: name.into(), op, priority: None }, after)
    }

    /// The same, of a whole node.
    pub fn add_node(&mut self, node: StepNode, after: &[Dependency]) -> u32 {
        self.nodes.push(node);
        self.dependencies.extend_from_slice(after);
        self.starts.push(self.dependencies.len() as u32);
        self.nodes.len() as u32 - 1
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Has it no nodes?
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Its nodes.
    pub fn nodes(&self) -> &[StepNode] {
        &self.nodes
    }

    /// What a node does.
    pub fn op(&self, node: u32) -> &StepOp {
        &self.nodes[node as usize].op
    }

    /// What a node depends on.
    pub fn dependencies(&self, node: u32) -> &[Dependency] {
        let node = node as usize;
        &self.dependencies[self.starts[node] as usize..self.starts[node + 1] as usize]
    }

    /// Nodes of the same step that a node depends on.
    pub fn predecessors(&self, node: u32) -> impl Iterator<Item = u32> {
        let same = |dependency: &&Dependency| dependency.steps_before == 0;
        self.dependencies(node).iter().filter(same).map(|dependency| dependency.node)
    }

    /// Checks that devices, dependencies and ranks are there, and that a step has an order.
    ///
    /// # Errors
    /// The first thing found that is not so.
    pub fn verify(&self) -> Result<(), StepGraphError> {
        self.order().map(drop)
    }

    /// Nodes in an order in which each follows all of its step that it depends on.
    /// O(nodes + dependencies).
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn order(&self) -> Result<Vec<u32>, StepGraphError> {
        let nodes = self.nodes.len() as u32;
        let mut waits = Vec::with_capacity(self.nodes.len());
        let found = u64::from(self.devices) * u64::from(self.parts);
        if found > DEVICES_MAX {
            return Err(StepGraphError::Devices { found });
        }
        // The last node that names each device.
        let mut named = vec![u32::MAX; found as usize];
        for node in 0..nodes {
            self.check_node(node, &mut named)?;
            waits.push(self.predecessors(node).count() as u32);
        }
        let successors = self.successors();
        let mut order: Vec<u32> = (0..nodes).filter(|&node| waits[node as usize] == 0).collect();
        let mut at = 0;
        while let Some(&node) = order.get(at) {
            at += 1;
            for &next in successors.of(node) {
                waits[next as usize] -= 1;
                if waits[next as usize] == 0 {
                    order.push(next);
                }
            }
        }
        match waits.iter().position(|&count| count > 0) {
            Some(node) => Err(StepGraphError::Cycle { node: node as u32 }),
            None => Ok(order),
        }
    }

    fn check_node(&self, node: u32, named: &mut [u32]) -> Result<(), StepGraphError> {
        let (nodes, devices) = (self.nodes.len() as u32, named.len() as u32);
        let op = self.op(node);
        for found in op.devices() {
            let Some(last) = named.get_mut(found as usize) else {
                return Err(StepGraphError::Device { node, found, devices });
            };
            if *last == node && !matches!(op, StepOp::Transfer { .. }) {
                return Err(StepGraphError::Twice { node, found });
            }
            *last = node;
        }
        if let StepOp::Compute { devices, .. } = op
            && let Some(&found) = devices.iter().find(|&&device| device >= self.devices)
        {
            return Err(StepGraphError::Device { node, found, devices: self.devices });
        }
        if let StepOp::Collective(op) = op
            && op.devices.len() as u32 != op.collective.ranks()
        {
            let (found, ranks) = (op.devices.len() as u32, op.collective.ranks());
            return Err(StepGraphError::Ranks { node, found, ranks });
        }
        let is_wrong = |on: &&Dependency| on.node >= nodes || (**on == Dependency::on(node));
        match self.dependencies(node).iter().find(is_wrong) {
            Some(on) => Err(StepGraphError::Dependency { node, found: on.node, nodes }),
            None => Ok(()),
        }
    }

    /// Which nodes of the same step depend on each.
    pub fn successors(&self) -> Successors {
        let nodes = self.nodes.len();
        let mut starts = vec![0; nodes + 1];
        let same =
            || (0..nodes as u32).flat_map(|node| self.predecessors(node).map(move |on| (on, node)));
        for (on, _) in same() {
            starts[on as usize + 1] += 1;
        }
        for node in 0..nodes {
            starts[node + 1] += starts[node];
        }
        let mut filled = starts.clone();
        let mut successors = vec![0; starts[nodes] as usize];
        for (on, node) in same() {
            successors[filled[on as usize] as usize] = node;
            filled[on as usize] += 1;
        }
        Successors { nodes: successors, starts }
    }
}

/// Of each node, those of the same step that depend on it.
#[derive(Clone, Debug)]
pub struct Successors {
    nodes: Vec<u32>,
    starts: Vec<u32>,
}

impl Successors {
    /// Those that depend on this one.
    pub fn of(&self, node: u32) -> &[u32] {
        let node = node as usize;
        &self.nodes[self.starts[node] as usize..self.starts[node + 1] as usize]
    }
}
