//! A step graph: what devices compute and communicate in one training step, and their dependencies.
//!
//! [`lower`](crate::lower) derives it from a captured [`Program`](crate::Program), and `place` from a
//! placed model; `plan` assigns algorithms and an order to its collectives, and `sim` simulates it.
//! Devices are numbers from 0 on, which a topology maps to places.
//!
//! Source: SYNDICATE §3.1.1, Figure 13 (dependencies within a step and on the step before).

use std::ops::Deref;
use std::sync::Arc;

use base::{Bytes, Nanos};
use thiserror::Error;

use crate::collective::{Collective, CollectiveError, CollectiveKind, cut};

/// Maximum number of devices of a step, over all parts.
const DEVICES_MAX: u64 = 1 << 24;
/// Maximum size of a transfer.
const SIZE_MAX: Bytes = Bytes(1 << 48);
/// Maximum time of a computation: about 13 days.
const TIME_MAX: Nanos = Nanos(1 << 50);

/// An ordered list of devices; for a collective, in rank order.
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

/// The collective of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CollectiveOp {
    /// The collective.
    pub collective: Collective,
    /// Its ranks, in order. Rings follow this order.
    pub devices: Devices,
    /// Size of an element in bytes.
    pub element_bytes: u32,
}

impl CollectiveOp {
    /// Returns the size of the vector of each rank; for an all-to-all, that of all blocks of all ranks.
    pub fn size(&self) -> Bytes {
        Bytes(self.collective.elements() * u64::from(self.element_bytes))
    }

    /// Splits the vectors of all ranks into pieces; of an all-to-all, each block.
    pub fn split(&self, pieces: u32) -> Vec<Self> {
        let part = |elements: u64, number: u64| {
            let part = cut(elements, u64::from(pieces), number);
            part.end - part.start
        };
        let piece = |number: u64| {
            let (ranks, elements) = (self.collective.ranks(), self.collective.elements());
            let kind = match self.collective.kind() {
                CollectiveKind::AllToAll { sizes } => CollectiveKind::AllToAll {
                    sizes: sizes.iter().map(|&size| part(size, number)).collect(),
                },
                kind => kind.clone(),
            };
            let collective = Collective::of_kind(kind, ranks, part(elements, number))
                .expect("a piece of a collective is of as many ranks, and of fewer elements");
            Self { collective, ..self.clone() }
        };
        (0..u64::from(pieces)).map(piece).collect()
    }
}

/// The operation of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepOp {
    /// Keeps each device busy for a time.
    Compute {
        /// The devices.
        devices: Devices,
        /// The time on each device.
        time: Nanos,
    },
    /// Sends bytes from one device to another (point-to-point).
    Transfer {
        /// The sending device.
        source: u32,
        /// The receiving device.
        target: u32,
        /// Number of bytes.
        size: Bytes,
    },
    /// Executes a collective.
    Collective(Box<CollectiveOp>),
}

impl StepOp {
    /// Creates a computation on one or several devices.
    pub fn compute(devices: impl Into<Devices>, time: Nanos) -> Self {
        Self::Compute { devices: devices.into(), time }
    }

    /// Creates a collective of `devices`, one rank each, on vectors of `size` bytes.
    ///
    /// # Arguments
    /// - `make`: constructor of the collective, given ranks and elements, such as
    ///   [`Collective::all_reduce`].
    ///
    /// # Errors
    /// The collective is not valid.
    pub fn collective(
        make: impl FnOnce(u32, u64) -> Result<Collective, CollectiveError>,
        devices: impl Into<Devices>,
        size: Bytes,
    ) -> Result<Self, CollectiveError> {
        let devices = devices.into();
        let collective = make(devices.len() as u32, size.0)?;
        Ok(Self::Collective(Box::new(CollectiveOp { collective, devices, element_bytes: 1 })))
    }

    /// Creates a collective on devices 0, 1 and so on, one for each rank.
    pub fn of_ranks(collective: Collective, element_bytes: u32) -> Self {
        let devices = (0..collective.ranks()).collect();
        Self::Collective(Box::new(CollectiveOp { collective, devices, element_bytes }))
    }

    /// Splits what is communicated into pieces; a computation is whole.
    pub fn split(&self, pieces: u32) -> Vec<Self> {
        match self {
            Self::Compute { .. } => vec![self.clone()],
            Self::Transfer { source, target, size } => {
                let piece = |number| {
                    let part = cut(size.0, u64::from(pieces), number);
                    let size = Bytes(part.end - part.start);
                    Self::Transfer { source: *source, target: *target, size }
                };
                (0..u64::from(pieces)).map(piece).collect()
            }
            Self::Collective(op) => op
                .split(pieces)
                .into_iter()
                .map(|piece| Self::Collective(Box::new(piece)))
                .collect(),
        }
    }

    /// Returns the devices of the operation.
    pub fn devices(&self) -> impl Iterator<Item = u32> {
        let (pair, listed) = match self {
            Self::Compute { devices, .. } => (None, &devices[..]),
            Self::Transfer { source, target, .. } => (Some([*source, *target]), &[][..]),
            Self::Collective(op) => (None, &op.devices[..]),
        };
        pair.into_iter().flatten().chain(listed.iter().copied())
    }
}

/// A dependency on a node, which must end before the dependent node begins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Dependency {
    /// Number of the node.
    pub node: u32,
    /// How many steps earlier: 0 is the same step, 1 the previous one.
    pub steps_before: u32,
}

impl Dependency {
    /// Creates a dependency on a node of the same step.
    pub fn on(node: u32) -> Self {
        Self { node, steps_before: 0 }
    }
}

/// A node of a step graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepNode {
    /// Name in reports; may be empty.
    pub name: Arc<str>,
    /// What it does.
    pub op: StepOp,
    /// Priority on a device: of several ready nodes, the one of the highest priority runs first; `None`
    /// leaves the choice to the executor.
    pub priority: Option<u64>,
}

/// Why a step graph is not valid.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StepGraphError {
    /// A device of a node is out of range.
    #[error("node {node} is of device {found}; expected one of {devices} devices")]
    Device {
        /// The node.
        node: u32,
        /// The device.
        found: u32,
        /// Number of devices.
        devices: u32,
    },
    /// There are too many devices.
    #[error("a step is of {found} devices; expected at most {most}", most = DEVICES_MAX)]
    Devices {
        /// Number of devices over all parts.
        found: u64,
    },
    /// A node lists a device twice.
    #[error("node {node} names device {found} twice; expected each of its devices once")]
    Twice {
        /// The node.
        node: u32,
        /// The device.
        found: u32,
    },
    /// A dependency is out of range, or of a node on itself in the same step.
    #[error("node {node} depends on node {found}; expected another one of {nodes} nodes")]
    Dependency {
        /// The node.
        node: u32,
        /// The node that it depends on.
        found: u32,
        /// Number of nodes.
        nodes: u32,
    },
    /// A transfer is too large, or a computation too long.
    #[error("node {node} is of {found}; expected at most {most}")]
    Size {
        /// The node.
        node: u32,
        /// Its size or time.
        found: String,
        /// The maximum.
        most: String,
    },
    /// The dependencies within a step form a cycle.
    #[error("node {node} waits for a cycle of dependencies; a step must have an order")]
    Cycle {
        /// A node that cannot run because of the cycle.
        node: u32,
    },
    /// A collective does not have one device for each rank.
    #[error(
        "the collective of node {node} has {found} devices; expected {ranks}, one for each rank"
    )]
    Ranks {
        /// The node.
        node: u32,
        /// Number of its devices.
        found: u32,
        /// Number of its ranks.
        ranks: u32,
    },
}

/// The dependency graph of one step.
///
/// If a machine consists of parts that all do the same (symmetry), the graph describes one part:
/// `devices` counts the devices of one part, and a transfer to a device number beyond it goes to one of
/// the parts that follow.
///
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
    /// Number of devices of one part.
    pub devices: u32,
    /// Number of parts; 1 without symmetry.
    pub parts: u32,
    nodes: Vec<StepNode>,
    /// Dependencies of each node: `dependencies[starts[node]..starts[node + 1]]`.
    dependencies: Vec<Dependency>,
    starts: Vec<u32>,
}

impl StepGraph {
    /// Creates a step of `devices` without nodes.
    pub fn new(name: impl Into<String>, devices: u32) -> Self {
        Self::of_parts(name, devices, 1)
    }

    /// Creates a step of `parts` symmetric parts, of `devices` each, without nodes.
    pub fn of_parts(name: impl Into<String>, devices: u32, parts: u32) -> Self {
        let (name, nodes, dependencies) = (name.into(), Vec::new(), Vec::new());
        Self { name, devices, parts, nodes, dependencies, starts: vec![0] }
    }

    /// Adds a node that begins once its dependencies have ended; returns its number.
    pub fn add(&mut self, name: impl Into<Arc<str>>, op: StepOp, after: &[Dependency]) -> u32 {
        self.add_node(StepNode { name: name.into(), op, priority: None }, after)
    }

    /// Adds a node with a priority; returns its number.
    pub fn add_node(&mut self, node: StepNode, after: &[Dependency]) -> u32 {
        self.nodes.push(node);
        self.dependencies.extend_from_slice(after);
        self.starts.push(self.dependencies.len() as u32);
        self.nodes.len() as u32 - 1
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> &[StepNode] {
        &self.nodes
    }

    /// Returns the operation of a node.
    pub fn op(&self, node: u32) -> &StepOp {
        &self.nodes[node as usize].op
    }

    /// Returns the dependencies of a node.
    pub fn dependencies(&self, node: u32) -> &[Dependency] {
        let node = node as usize;
        &self.dependencies[self.starts[node] as usize..self.starts[node + 1] as usize]
    }

    /// Returns the nodes of the same step that a node depends on.
    pub fn predecessors(&self, node: u32) -> impl Iterator<Item = u32> {
        let same = |dependency: &&Dependency| dependency.steps_before == 0;
        self.dependencies(node).iter().filter(same).map(|dependency| dependency.node)
    }

    /// Returns the step with all compute times multiplied by a factor: 0.5 for devices that are twice
    /// as fast.
    ///
    /// # Panics
    /// Panics if the factor is not positive and finite.
    pub fn scaled(&self, factor: f64) -> Self {
        assert!(factor > 0.0 && factor.is_finite(), "compute times are scaled by {factor}");
        let mut scaled = self.clone();
        for node in &mut scaled.nodes {
            if let StepOp::Compute { time, .. } = &mut node.op {
                *time = Nanos((time.0 as f64 * factor).round() as u64);
            }
        }
        scaled
    }

    /// Checks that devices, dependencies and ranks are valid, and that there are no cycles.
    ///
    /// # Errors
    /// The first violation found.
    pub fn verify(&self) -> Result<(), StepGraphError> {
        self.order().map(drop)
    }

    /// Returns the nodes in a topological order of the step. O(nodes with their devices + dependencies +
    /// devices of all parts).
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
        // The last node that uses each device, to detect duplicates.
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
        let amount = match *op {
            StepOp::Compute { time, .. } if time > TIME_MAX => {
                Some((format!("{} ns", time.0), format!("{} ns", TIME_MAX.0)))
            }
            StepOp::Transfer { size, .. } if size > SIZE_MAX => {
                Some((size.to_string(), SIZE_MAX.to_string()))
            }
            _ => None,
        };
        if let Some((found, most)) = amount {
            return Err(StepGraphError::Size { node, found, most });
        }
        let is_wrong = |on: &&Dependency| on.node >= nodes || (**on == Dependency::on(node));
        match self.dependencies(node).iter().find(is_wrong) {
            Some(on) => Err(StepGraphError::Dependency { node, found: on.node, nodes }),
            None => Ok(()),
        }
    }

    /// Returns, for each node, the nodes of the same step that depend on it.
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

/// The successors of each node within a step.
#[derive(Clone, Debug)]
pub struct Successors {
    nodes: Vec<u32>,
    starts: Vec<u32>,
}

impl Successors {
    /// Returns the nodes that depend on this node.
    pub fn of(&self, node: u32) -> &[u32] {
        let node = node as usize;
        &self.nodes[self.starts[node] as usize..self.starts[node + 1] as usize]
    }
}
