//! The Dragonfly topology of tensor streaming processors: chips, nodes of 8, racks of 9 nodes.
//!
//! A chip has 7 links to the others of its node and 4 global ones; a node's 32 global ports make it one
//! high-radix router. Up to 33 nodes are joined directly. Beyond that a rack is the group: half of its
//! ports join its nodes, each pair twice, and half lead to other racks.
//!
//! Source: the multi-TSP system §2. Differs from the paper: 1. it does not say which port goes where;
//! here ports are assigned to peers in the order of their cyclic distance, parallel ones to different
//! chips. 2. it counts 5 hops across 10,440 chips, which holds between racks' nodes; between chips it
//! is 7.

use std::collections::BTreeMap;

use base::{BitsPerSecond, LinkId, VertexId};
use smallvec::{SmallVec, smallvec};
use thiserror::Error;

use crate::network::{Cable, Link, Network, NetworkError};
use crate::wiring::{LinkModel, Wiring};

/// Chips per node.
const CHIPS_PER_NODE: u32 = 8;
/// Nodes per rack.
const NODES_PER_RACK: u32 = 9;
/// Global links per chip, which leave its node.
const GLOBAL_LINKS: u32 = 4;
/// Maximum number of nodes joined directly, without racks as groups.
const NODES_DIRECT_MAX: u32 = NODE_PORTS + 1;
/// Maximum number of racks.
const RACKS_MAX: u32 = NODES_PER_RACK * NODE_PORTS / 2 + 1;

const NODE_PORTS: u32 = CHIPS_PER_NODE * GLOBAL_LINKS;
const CHIPS_PER_RACK: u32 = CHIPS_PER_NODE * NODES_PER_RACK;

/// Why a Dragonfly cannot be built.
#[derive(Debug, Error, PartialEq)]
pub enum DragonflyError {
    /// A size that cannot be wired.
    #[error(
        "a Dragonfly cannot have {found} chips; expected 8, a multiple of 8 up to {direct}, or a \
         multiple of {rack} up to {most}"
    )]
    Size {
        /// Number of chips asked for.
        found: u32,
        /// Maximum number of chips whose nodes are joined directly.
        direct: u32,
        /// Chips per rack.
        rack: u32,
        /// Maximum number of chips.
        most: u32,
    },
    /// The links do not form a valid network.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

/// A path as links in order.
type LinkPath = SmallVec<[LinkId; 3]>;
/// Links from one node or group to another.
type Between = BTreeMap<(u32, u32), Vec<LinkId>>;

/// A Dragonfly network, with its links indexed by where they lead.
#[derive(Clone, Debug)]
pub struct Dragonfly {
    network: Network,
    nodes: u32,
    /// Nodes of a group, which are joined directly.
    nodes_per_group: u32,
    /// Link from a chip to another of its node.
    local: BTreeMap<(VertexId, VertexId), LinkId>,
    /// Links from a node to another of its group, by (source, target).
    between_nodes: Between,
    /// Links from a group to another, by (source, target).
    between_groups: Between,
}

impl Dragonfly {
    /// Builds a Dragonfly of `chips` chips.
    ///
    /// # Errors
    /// The size cannot be wired, or the link model is invalid.
    ///
    /// ```
    /// use topology::{Dragonfly, LinkModel};
    /// let dragonfly = Dragonfly::new(264, LinkModel::default()).unwrap();
    /// assert_eq!(dragonfly.network().diameter(), 3);
    /// assert!(Dragonfly::new(265, LinkModel::default()).is_err());
    /// ```
    pub fn new(chips: u32, model: LinkModel) -> Result<Self, DragonflyError> {
        let nodes = chips / CHIPS_PER_NODE;
        let is_whole = nodes > 0 && chips.is_multiple_of(CHIPS_PER_NODE);
        let is_direct = nodes <= NODES_DIRECT_MAX;
        let racks = chips / CHIPS_PER_RACK;
        let are_racks = chips.is_multiple_of(CHIPS_PER_RACK) && racks <= RACKS_MAX;
        if !is_whole || !(is_direct || are_racks) {
            return Err(DragonflyError::Size {
                found: chips,
                direct: NODES_DIRECT_MAX * CHIPS_PER_NODE,
                rack: CHIPS_PER_RACK,
                most: RACKS_MAX * CHIPS_PER_RACK,
            });
        }
        let nodes_per_group = if is_direct { nodes } else { NODES_PER_RACK };
        let mut wiring = Wiring::new(model);
        let local = wiring.join_chips(nodes);
        let ports = if is_direct { NODE_PORTS } else { NODE_PORTS / 2 };
        let between_nodes = wiring.join_nodes(nodes, nodes_per_group, ports);
        let groups = nodes / nodes_per_group;
        let between_groups = wiring.join_groups(groups, nodes_per_group, ports);
        let network = Network::new(chips, 0, wiring.finish())?;
        Ok(Self { network, nodes, nodes_per_group, local, between_nodes, between_groups })
    }

    /// Returns its network of chips and links.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the network without the index of links.
    pub fn into_network(self) -> Network {
        self.network
    }

    /// Returns the node of a chip.
    pub fn node_of(&self, chip: VertexId) -> u32 {
        chip.0 / CHIPS_PER_NODE
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Returns the number of groups; one where all nodes are joined directly.
    pub fn groups(&self) -> u32 {
        self.nodes / self.nodes_per_group
    }

    /// Returns the link from a chip to another of its node.
    pub fn local(&self, source: VertexId, target: VertexId) -> Option<LinkId> {
        self.local.get(&(source, target)).copied()
    }

    /// Returns the links from a node to another of its group.
    pub fn between_nodes(&self, source: u32, target: u32) -> &[LinkId] {
        self.between_nodes.get(&(source, target)).map_or(&[], Vec::as_slice)
    }

    /// Returns the links from a group to another.
    pub fn between_groups(&self, source: u32, target: u32) -> &[LinkId] {
        self.between_groups.get(&(source, target)).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of chips per node.
    pub fn chips_per_node(&self) -> u32 {
        CHIPS_PER_NODE
    }

    /// Returns the group of a chip.
    fn group_of(&self, chip: VertexId) -> u32 {
        self.node_of(chip) / self.nodes_per_group
    }

    /// Returns the minimal paths from a chip to another: over any link between their nodes or groups,
    /// with the local hops to and from it. None from a chip to itself.
    pub fn paths(&self, source: VertexId, target: VertexId) -> SmallVec<[LinkPath; 1]> {
        let groups = (self.group_of(source), self.group_of(target));
        if groups.0 == groups.1 {
            return self.paths_inside(source, target);
        }
        let mut paths = SmallVec::new();
        for &link in self.between_groups(groups.0, groups.1) {
            let Link { source: gate, target: entry, .. } = *self.network.link(link);
            let here = |from, to| {
                if from == to { smallvec![LinkPath::new()] } else { self.paths_inside(from, to) }
            };
            let there = here(entry, target);
            for before in here(source, gate) {
                for behind in &there {
                    paths.push(before.iter().chain([&link]).chain(behind).copied().collect());
                }
            }
        }
        paths
    }

    /// Returns the minimal paths inside a group.
    fn paths_inside(&self, source: VertexId, target: VertexId) -> SmallVec<[LinkPath; 1]> {
        let nodes = (self.node_of(source), self.node_of(target));
        let direct = self.local(source, target).map(|link| [None, Some(link), None]);
        let between = self.between_nodes(nodes.0, nodes.1).iter().map(|&link| {
            let Link { source: gate, target: entry, .. } = *self.network.link(link);
            [self.local(source, gate), Some(link), self.local(entry, target)]
        });
        direct.into_iter().chain(between).map(|path| path.into_iter().flatten().collect()).collect()
    }

    /// Returns the load of each link under uniform traffic, where every chip sends equally much to
    /// every chip, itself included, by minimal routes spread evenly over parallel links; as a multiple
    /// of what one chip sends in total.
    ///
    /// O(groups² · links between two groups + groups · (chips of a group)² · links between two nodes).
    pub fn uniform_load(&self) -> Vec<f64> {
        let chips = self.network.endpoints();
        let mut load = vec![0.0; self.network.links().len()];
        let per_group = chips / self.groups();
        let each = 1.0 / f64::from(chips);
        for group in 0..self.groups() {
            let first = group * per_group;
            // Traffic between chips of a group, including what passes through to other groups.
            let mut demand = Demand::new(VertexId(first), per_group, each);
            for other in (0..self.groups()).filter(|other| *other != group) {
                let away = self.between_groups(group, other);
                let all = f64::from(per_group) * f64::from(per_group) * each;
                for &link in away {
                    load[link.0 as usize] += all / away.len() as f64;
                    let gate = self.network.link(link).source;
                    demand.to(gate, f64::from(per_group) * each / away.len() as f64);
                }
                let back = self.between_groups(other, group);
                for &link in back {
                    let gate = self.network.link(link).target;
                    demand.from(gate, f64::from(per_group) * each / back.len() as f64);
                }
            }
            self.load_group(&demand, &mut load);
        }
        load
    }

    /// Adds the load of one group's traffic.
    fn load_group(&self, demand: &Demand, load: &mut [f64]) {
        let chips = || (0..demand.count).map(|chip| VertexId(demand.first.0 + chip));
        let mut inside: BTreeMap<(VertexId, VertexId), f64> = BTreeMap::new();
        for source in chips() {
            for target in chips() {
                let much = demand.between(source, target);
                let nodes = (self.node_of(source), self.node_of(target));
                if nodes.0 == nodes.1 {
                    *inside.entry((source, target)).or_default() += much;
                    continue;
                }
                let links = self.between_nodes(nodes.0, nodes.1);
                let part = much / links.len() as f64;
                for &link in links {
                    load[link.0 as usize] += part;
                    let Link { source: gate, target: entry, .. } = *self.network.link(link);
                    *inside.entry((source, gate)).or_default() += part;
                    *inside.entry((entry, target)).or_default() += part;
                }
            }
        }
        for ((source, target), much) in inside {
            if let Some(link) = self.local(source, target) {
                load[link.0 as usize] += much;
            }
        }
    }

    /// Returns the throughput per chip under uniform traffic: the rate at which the first link
    /// saturates.
    pub fn uniform_throughput(&self) -> BitsPerSecond {
        let load = self.uniform_load();
        let links = self.network.links().iter().zip(load).filter(|(_, load)| *load > 0.0);
        let rates = links.map(|(link, load)| link.rate.0 / load);
        BitsPerSecond(rates.fold(f64::INFINITY, f64::min))
    }
}

/// Traffic between the chips of one group: uniform, plus what passes through gates to other groups.
struct Demand {
    first: VertexId,
    count: u32,
    each: f64,
    /// For each chip: additional traffic from every chip to it, and from it to every chip.
    gates: Vec<(f64, f64)>,
}

impl Demand {
    fn new(first: VertexId, count: u32, each: f64) -> Self {
        Self { first, count, each, gates: vec![(0.0, 0.0); count as usize] }
    }

    fn to(&mut self, gate: VertexId, much: f64) {
        self.gates[(gate.0 - self.first.0) as usize].0 += much;
    }

    fn from(&mut self, gate: VertexId, much: f64) {
        self.gates[(gate.0 - self.first.0) as usize].1 += much;
    }

    fn between(&self, source: VertexId, target: VertexId) -> f64 {
        let gate = |chip: VertexId| self.gates[(chip.0 - self.first.0) as usize];
        self.each + gate(target).0 + gate(source).1
    }
}

impl Wiring {
    fn join_chips(&mut self, nodes: u32) -> BTreeMap<(VertexId, VertexId), LinkId> {
        let mut local = BTreeMap::new();
        for node in 0..nodes {
            let chips = (node * CHIPS_PER_NODE..(node + 1) * CHIPS_PER_NODE).map(VertexId);
            for (place, one) in chips.clone().enumerate() {
                for other in chips.clone().skip(place + 1) {
                    let (there, back) = self.join(one, other, Cable::Chassis);
                    local.extend([((one, other), there), ((other, one), back)]);
                }
            }
        }
        local
    }

    fn join_nodes(&mut self, nodes: u32, per_group: u32, ports: u32) -> Between {
        let mut between = Between::new();
        for group in 0..nodes / per_group {
            let first = group * per_group;
            for (one, other) in dealt(per_group, ports) {
                let ends = [one, other].map(|(node, port)| {
                    let node = first + node;
                    (node, VertexId(node * CHIPS_PER_NODE + chip_of(port, ports)))
                });
                let [one, other] = ends.map(|(node, _)| node / NODES_PER_RACK);
                let cable = if one == other { Cable::Rack } else { Cable::Optical };
                self.lay(&mut between, ends, cable);
            }
        }
        between
    }

    fn join_groups(&mut self, groups: u32, nodes: u32, ports_inside: u32) -> Between {
        let mut between = Between::new();
        let ports = nodes * (NODE_PORTS - ports_inside);
        for (one, other) in dealt(groups, ports) {
            // A rack's ports are assigned round-robin to its nodes first, then to the chips of each.
            let ends = [one, other].map(|(group, port)| {
                let (node, chip) = (port % nodes, port / nodes % CHIPS_PER_NODE);
                (group, VertexId((group * nodes + node) * CHIPS_PER_NODE + chip))
            });
            self.lay(&mut between, ends, Cable::Optical);
        }
        between
    }

    /// Adds a cable between two chips of different nodes or groups.
    fn lay(&mut self, between: &mut Between, ends: [(u32, VertexId); 2], cable: Cable) {
        let [(one, first), (other, second)] = ends;
        let (there, back) = self.join(first, second, cable);
        between.entry((one, other)).or_default().push(there);
        between.entry((other, one)).or_default().push(back);
    }
}

/// Returns the chip of a node that has a given port.
///
/// Consecutive ports lead to one peer. Their chips are a few steps apart, by distances that all differ,
/// and rotate with the peer: if the same chips were always used together, all traffic between two
/// halves of a node would take the same local links.
fn chip_of(port: u32, ports: u32) -> u32 {
    const APART: [u32; GLOBAL_LINKS as usize] = [0, 1, 3, 7];
    let each = ports / CHIPS_PER_NODE;
    (port / each + APART[(port % each) as usize]) % CHIPS_PER_NODE
}

/// A member of a group, and one of its ports.
type End = (u32, u32);

/// Joins every pair of members with as many links as their ports allow, as evenly as possible.
///
/// Members are ordered cyclically, and each assigns its ports to peers by their cyclic distance;
/// leftover ports go to distances in pairs, so that every member has the same number. Where an odd
/// number is left over and no distance is its own opposite, one port stays free.
fn dealt(members: u32, ports: u32) -> Vec<(End, End)> {
    if members == 1 {
        return Vec::new();
    }
    let distances = members - 1;
    let (each, mut over) = (ports / distances, ports % distances);
    let mut counts = vec![each; members as usize];
    if members.is_multiple_of(2) && !over.is_multiple_of(2) {
        counts[members as usize / 2] += 1;
        over -= 1;
    }
    for distance in 1..=over / 2 {
        counts[distance as usize] += 1;
        counts[(members - distance) as usize] += 1;
    }
    // First port of each distance; a link takes one at each end.
    let mut first = vec![0; members as usize];
    for distance in 1..distances as usize {
        first[distance + 1] = first[distance] + counts[distance];
    }
    let mut links = Vec::new();
    for one in 0..members {
        for other in one + 1..members {
            let there = (other - one) as usize;
            let back = members as usize - there;
            for copy in 0..counts[there] {
                links.push(((one, first[there] + copy), (other, first[back] + copy)));
            }
        }
    }
    links
}
