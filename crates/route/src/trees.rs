//! Spanning tree packing: trees from every root to all endpoints that together ask no link for more
//! than its bandwidth, and reach the optimal throughput.
//!
//! Links are counted in units of the bandwidth of one tree. Switches are removed first (edge
//! splitting): a link into a switch and a link out of it become a direct link, as long as no endpoint's
//! max-flow drops for it. Then trees grow, edge by edge, each as many at a time as leaves enough
//! capacity for all others. That trees can be packed up to the minimum cut is Edmonds' theorem on
//! branchings.
//!
//! Source: ForestColl (Zhao et al., 2024): optimality, removal of switches, packing of trees (after
//! Bérczi and Frank). Differs from the paper: the unit is searched for among small numbers of trees.

use std::collections::BTreeMap;

use base::LinkId;
use petgraph::algo::dinics;
use petgraph::graph::{DiGraph, NodeIndex};
use smallvec::SmallVec;
use topology::Network;

use crate::paths::Path;

/// Maximum number of trees per root.
const TREES_MAX: u64 = 24;
/// Fraction of the optimal throughput at which the search stops.
const GOOD_ENOUGH: f64 = 0.995;
/// Bisection steps.
const HALVINGS: u32 = 30;
/// Units of the fastest link in the initial fine-grained search.
const FINE: f64 = 1e7;

/// Capacity from one vertex to another over one path, in units.
#[derive(Clone, Debug)]
struct Lane {
    units: u64,
    path: Path,
}

/// A spanning tree that carries a part of a root's shard to all endpoints.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    /// The root, whose shard it carries.
    pub root: u32,
    /// Units of the shard.
    pub units: u64,
    /// Edges as (source, target, path), each after the edge that reaches its source.
    pub edges: Vec<(u32, u32, Path)>,
}

/// The packed trees.
#[derive(Clone, Debug)]
pub(crate) struct Trees {
    /// Trees of all roots.
    pub trees: Vec<Tree>,
    /// Number of units per shard.
    pub units: u64,
}

/// Packs trees from these endpoints to all; `None` if the network does not admit them.
pub(crate) fn trees(network: &Network, roots: &[u32]) -> Option<Trees> {
    if network.endpoints() < 2 {
        return Some(Trees { trees: Vec::new(), units: 1 });
    }
    let (units, unit) = unit(network, roots)?;
    let mut lanes = Lanes::new(network, roots, |rate| (rate / unit) as u64);
    lanes.take_switches_out(units);
    let mut trees = Vec::new();
    for batch in Packing::new(&lanes, units).pack()? {
        trees.extend(lanes.ways_of(batch));
    }
    Some(Trees { trees, units })
}

/// Returns the number of trees per root, and the bandwidth of one in bits per second.
fn unit(network: &Network, roots: &[u32]) -> Option<(u64, f64)> {
    let fastest = network.links().iter().map(|link| link.rate.0).fold(0.0, f64::max);
    let scale = fastest / FINE;
    let fine = Lanes::new(network, roots, |rate| (rate / scale) as u64);
    // The optimal throughput: bandwidth from each root to all endpoints at once, by bisection.
    let (mut low, mut high) = (0, FINE as u64 * network.links().len() as u64);
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        if fine.feeds(middle) { low = middle } else { high = middle }
    }
    let best = low as f64 * scale;
    let mut found: Option<(f64, u64, f64)> = None;
    for count in 1..=TREES_MAX {
        let most = best / count as f64;
        let is_fit =
            |unit: f64| Lanes::new(network, roots, |rate| (rate / unit) as u64).feeds(count);
        // Searches near the optimum, so that little is lost by rounding links to whole units.
        let (mut low, mut high) = (most * 0.5, most * (1.0 + 1e-9));
        if !is_fit(low) {
            continue;
        }
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            if is_fit(middle) { low = middle } else { high = middle }
        }
        let total = low * count as f64;
        if found.is_none_or(|(known, ..)| total > known * 1.001) {
            found = Some((total, count, low));
        }
        if total >= GOOD_ENOUGH * best {
            break;
        }
    }
    found.map(|(_, count, unit)| (count, unit))
}

/// The capacity between vertices in units, and its paths.
#[derive(Clone, Debug)]
struct Lanes {
    endpoints: usize,
    vertices: usize,
    roots: Vec<u32>,
    by_ends: BTreeMap<(u32, u32), Vec<Lane>>,
}

impl Lanes {
    fn new(network: &Network, roots: &[u32], units: impl Fn(f64) -> u64) -> Self {
        let mut by_ends: BTreeMap<(u32, u32), Vec<Lane>> = BTreeMap::new();
        for (number, link) in (0..).zip(network.links()) {
            let units = units(link.rate.0);
            if units > 0 {
                let lane = Lane { units, path: SmallVec::from_slice(&[LinkId(number)]) };
                by_ends.entry((link.source.0, link.target.0)).or_default().push(lane);
            }
        }
        let (endpoints, vertices) = (network.endpoints() as usize, network.vertices() as usize);
        Self { endpoints, vertices, roots: roots.to_vec(), by_ends }
    }

    fn units(&self, from: u32, to: u32) -> u64 {
        self.by_ends.get(&(from, to)).map_or(0, |lanes| lanes.iter().map(|lane| lane.units).sum())
    }

    /// Returns whether every root can send `each` units to all endpoints at once, by max-flow: then no
    /// set of vertices has less incoming capacity than it needs.
    fn feeds(&self, each: u64) -> bool {
        let needed = each * self.roots.len() as u64;
        let mut into = vec![0; self.vertices];
        for &root in &self.roots {
            into[root as usize] += each;
        }
        for (&(_, to), lanes) in &self.by_ends {
            into[to as usize] += lanes.iter().map(|lane| lane.units).sum::<u64>();
        }
        if into[..self.endpoints].iter().any(|&units| units < needed) {
            return false;
        }
        let mut graph = DiGraph::<(), u64>::with_capacity(self.vertices + 1, self.by_ends.len());
        let nodes: Vec<NodeIndex> = (0..=self.vertices).map(|_| graph.add_node(())).collect();
        for &(from, to) in self.by_ends.keys() {
            graph.add_edge(nodes[from as usize], nodes[to as usize], self.units(from, to));
        }
        let source = nodes[self.vertices];
        for &root in &self.roots {
            graph.add_edge(source, nodes[root as usize], each);
        }
        nodes[..self.endpoints].iter().all(|&to| dinics(&graph, source, to).0 >= needed)
    }

    /// Takes at most `most` units, at least one, off one lane; returns what was taken.
    fn take(&mut self, ends: (u32, u32), most: u64) -> Lane {
        let lanes = self.by_ends.get_mut(&ends).expect("there are units");
        let lane = lanes.last_mut().expect("there are units");
        let taken = Lane { units: lane.units.min(most), path: lane.path.clone() };
        lane.units -= taken.units;
        if lane.units == 0 {
            lanes.pop();
        }
        if lanes.is_empty() {
            self.by_ends.remove(&ends);
        }
        taken
    }

    /// Splits `units` units off a switch into a direct lane.
    fn split(&mut self, (from, switch, to): (u32, u32, u32), mut units: u64) {
        while units > 0 {
            let first = self.take((from, switch), units);
            let mut left = first.units;
            units -= left;
            while left > 0 {
                let second = self.take((switch, to), left);
                left -= second.units;
                if from != to {
                    let path = first.path.iter().chain(&second.path).copied().collect();
                    let lane = Lane { units: second.units, path };
                    self.by_ends.entry((from, to)).or_default().push(lane);
                }
            }
        }
    }

    /// Removes all switches by edge splitting, as long as every root can still send `each` units to all
    /// endpoints.
    fn take_switches_out(&mut self, each: u64) {
        for switch in (self.endpoints..self.vertices).rev().map(|switch| switch as u32) {
            let ends = |lanes: &Self, out: bool| -> Vec<u32> {
                let of = lanes.by_ends.keys().filter_map(|&(from, to)| match out {
                    true => (from == switch).then_some(to),
                    false => (to == switch).then_some(from),
                });
                of.collect()
            };
            // Evenly first, which gives trees of lower height.
            for is_even in [true, false] {
                let (into, out) = (ends(self, false), ends(self, true));
                for (turn, &from) in into.iter().enumerate() {
                    for step in 0..out.len() {
                        let to = out[(turn + step) % out.len()];
                        self.split_most((from, switch, to), each, is_even.then_some(out.len()));
                    }
                }
            }
            self.by_ends.retain(|&(from, to), _| from != switch && to != switch);
        }
    }

    /// Splits off as many units as possible, at most a part of them if `parts` is given.
    fn split_most(&mut self, (from, switch, to): (u32, u32, u32), each: u64, parts: Option<usize>) {
        let mut most = self.units(from, switch).min(self.units(switch, to));
        if let Some(parts) = parts {
            most = most.min(self.units(from, switch).div_ceil(parts as u64));
        }
        let mut least = 0;
        let mut try_next = most;
        while least < most {
            let mut tried = self.clone();
            tried.split((from, switch, to), try_next);
            if tried.feeds(each) {
                least = try_next;
            } else {
                most = try_next - 1;
            }
            try_next = least + (most - least).div_ceil(2);
        }
        if least > 0 {
            self.split((from, switch, to), least);
        }
    }

    /// Expands a batch into trees, each with its own paths.
    fn ways_of(&mut self, batch: Batch) -> Vec<Tree> {
        let mut trees = Vec::new();
        let first = Tree { root: batch.root, units: batch.units, edges: Vec::new() };
        let mut open = vec![first];
        while let Some(mut tree) = open.pop() {
            let Some(&(from, to)) = batch.edges.get(tree.edges.len()) else {
                trees.push(tree);
                continue;
            };
            let lane = self.take((from, to), tree.units);
            if lane.units < tree.units {
                open.push(Tree { units: tree.units - lane.units, ..tree.clone() });
            }
            tree.units = lane.units;
            tree.edges.push((from, to, lane.path));
            open.push(tree);
        }
        trees
    }
}

/// A number of trees that are identical as far as they have grown.
#[derive(Clone, Debug)]
struct Batch {
    root: u32,
    units: u64,
    /// Distance of each reached vertex from the root.
    depth: Vec<Option<u32>>,
    edges: Vec<(u32, u32)>,
}

impl Batch {
    fn is_whole(&self) -> bool {
        self.edges.len() + 1 == self.depth.len()
    }
}

/// State of the packing.
struct Packing {
    /// Remaining units between vertices.
    left: BTreeMap<(u32, u32), u64>,
    /// Batches that do not span all endpoints yet.
    open: Vec<Batch>,
    count: usize,
}

impl Packing {
    fn new(lanes: &Lanes, units: u64) -> Self {
        let count = lanes.endpoints;
        let left = lanes.by_ends.keys().map(|&(from, to)| ((from, to), lanes.units(from, to)));
        let batch = |root: u32| {
            let mut depth = vec![None; count];
            depth[root as usize] = Some(0);
            Batch { root, units, depth, edges: Vec::new() }
        };
        let open = lanes.roots.iter().map(|&root| batch(root)).collect();
        Self { left: left.collect(), open, count }
    }

    /// Grows all trees; `None` if it cannot, which does not happen where `feeds` holds.
    fn pack(mut self) -> Option<Vec<Batch>> {
        let mut done = Vec::new();
        while let Some(mut batch) = self.open.pop() {
            while !batch.is_whole() {
                let (from, to, units) = self.next(&batch)?;
                if units < batch.units {
                    self.open.push(Batch { units: batch.units - units, ..batch.clone() });
                    batch.units = units;
                }
                let left = self.left.get_mut(&(from, to)).expect("it was just there");
                *left -= units;
                if *left == 0 {
                    self.left.remove(&(from, to));
                }
                batch.depth[to as usize] = batch.depth[from as usize].map(|depth| depth + 1);
                batch.edges.push((from, to));
            }
            done.push(batch);
        }
        Some(done)
    }

    /// Returns the edge by which a batch grows next, nearest to the root, and how many of its trees
    /// may.
    fn next(&self, batch: &Batch) -> Option<(u32, u32, u64)> {
        let depth = |vertex: u32| batch.depth[vertex as usize];
        let mut edges: Vec<(u32, u64, u32, u32)> = self
            .left
            .iter()
            .filter(|&(&(_, to), _)| depth(to).is_none())
            .filter_map(|(&(from, to), &units)| Some((depth(from)?, u64::MAX - units, from, to)))
            .collect();
        edges.sort_unstable();
        edges.into_iter().find_map(|(_, _, from, to)| {
            let units = self.most(batch, from, to);
            (units > 0).then_some((from, to, units))
        })
    }

    /// Returns how many of these trees may grow by an edge and leave enough capacity for all others.
    fn most(&self, batch: &Batch, from: u32, to: u32) -> u64 {
        let most = self.left[&(from, to)].min(batch.units);
        let mut graph =
            DiGraph::<(), u64>::with_capacity(self.count + self.open.len(), self.left.len());
        let nodes: Vec<NodeIndex> = (0..self.count).map(|_| graph.add_node(())).collect();
        for (&(one, other), &units) in &self.left {
            graph.add_edge(nodes[one as usize], nodes[other as usize], units);
        }
        let mut asked = 0;
        for other in &self.open {
            let node = graph.add_node(());
            graph.add_edge(nodes[from as usize], node, other.units);
            asked += other.units;
            for (vertex, _) in other.depth.iter().enumerate().filter(|(_, depth)| depth.is_some()) {
                graph.add_edge(node, nodes[vertex], u64::MAX / 4);
            }
        }
        let flow = dinics(&graph, nodes[from as usize], nodes[to as usize]).0;
        most.min(flow.saturating_sub(asked))
    }
}
