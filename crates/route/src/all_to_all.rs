//! All-to-all: every chip has a block for every other chip.
//!
//! Time is divided into steps in which a link transfers a piece of a block. Every piece takes a minimal
//! path, through all its links one right after another if they are free, else as early as they are. The
//! order matters: first to all nodes, then to the next chip of each, so that at any time all chips send
//! in all directions. With 264 chips the links between nodes are then within 3 % of full.
//!
//! Source: the multi-TSP system §2.2 and §4.2. Differs from the paper: it schedules no all-to-all.

use base::{Address, Bytes, Ticks, VertexId};
use smallvec::SmallVec;
use topology::{Fabric, RotationalSymmetry};

use crate::layout::{Layout, RoutedCollective};
use crate::paths::Path;
use crate::planner::{RouteError, check_memory, check_planning};
use crate::schedule::{Hop, RoutePlan, Schedule, Timing, Train, part};
use crate::task::{RouteTransfer, Task};

/// Numbers of pieces per block that are tried.
const PIECES: [u64; 3] = [1, 5, 15];
/// Maximum number of pieces in all; beyond it, blocks are divided more coarsely.
const PIECES_MAX: u64 = 1 << 20;

/// Plans an all-to-all of a block from each chip to each other chip.
///
/// A block to send is at the layout's place for its target's shard; a received block is in the results
/// region behind all inputs, at the place for its source's shard.
///
/// O(pairs of one part of the symmetry · pieces · paths), with up to 15 pieces.
///
/// # Errors
/// The blocks of a chip are larger than half its memory, planning needs too much memory, links differ,
/// or a pair of chips has no path.
pub fn all_to_all(
    fabric: &Fabric,
    block: Bytes,
    timing: Timing,
) -> Result<RoutedCollective, RouteError> {
    let network = fabric.network();
    check_memory(block, 2 * u64::from(network.endpoints()), &timing)?;
    let slots = network.links().iter().map(|link| timing.slot(link));
    if slots.clone().max() != slots.min() {
        return Err(RouteError::Uneven);
    }
    let exchange = Exchange::new(fabric, timing.vectors(block), timing)?;
    let pairs = exchange.pairs.len() as u64;
    let finest = (PIECES_MAX / pairs.max(1)).clamp(1, exchange.vectors.max(1));
    let plans = PIECES.into_iter().filter(|pieces| *pieces <= finest);
    let plans = plans.map(|pieces| exchange.schedule(pieces));
    let schedule = plans.min_by_key(Schedule::end).expect("one piece is always tried");
    let layout = exchange.layout();
    let tasks = exchange.pairs.iter().map(|pair| exchange.task(pair, &layout)).collect();
    Ok(RoutedCollective { plan: RoutePlan { circle: exchange.circle, tasks, schedule }, layout })
}

/// A pair of chips and the minimal paths between them.
struct Pair {
    source: VertexId,
    target: VertexId,
    paths: SmallVec<[Path; 1]>,
}

struct Exchange<'a> {
    fabric: &'a Fabric,
    circle: RotationalSymmetry,
    /// Pairs with sources in the first part, in scheduling order.
    pairs: Vec<Pair>,
    vectors: u64,
    timing: Timing,
}

impl<'a> Exchange<'a> {
    fn new(fabric: &'a Fabric, vectors: u64, timing: Timing) -> Result<Self, RouteError> {
        let network = fabric.network();
        let circle = RotationalSymmetry::of(network);
        // Memory estimate: each pair has its paths, a task, and its trains.
        let chips = network.endpoints();
        check_planning(u128::from(circle.part()) * u128::from(chips) * 1024)?;
        // The chips of a node share links, so the traffic to a node is spread over time.
        let node = fabric.chips_per_node();
        let nodes = chips / node;
        let turns = (0..node).flat_map(|chip| (0..nodes).map(move |node| (node, chip))).skip(1);
        let mut pairs = Vec::new();
        for (ahead, aside) in turns {
            for source in circle.first() {
                let target = (source / node + ahead) % nodes * node + (source + aside) % node;
                let (source, target) = (VertexId(source), VertexId(target));
                let paths = fabric.paths(source, target);
                if paths.is_empty() {
                    return Err(RouteError::NoPath { task: 0, from: source, to: target });
                }
                pairs.push(Pair { source, target, paths });
            }
        }
        Ok(Self { fabric, circle, pairs, vectors, timing })
    }

    fn layout(&self) -> Layout {
        let chips = self.fabric.network().endpoints();
        let behind = self.vectors * u64::from(chips);
        let results = vec![Address(behind as u32)];
        Layout { shard: self.vectors, shards: chips, inputs: vec![Address(0)], results }
    }

    fn task(&self, pair: &Pair, layout: &Layout) -> Task {
        let Pair { source, target, .. } = *pair;
        let read = layout.place(&self.circle, source, target);
        let write = u64::from(layout.results[0].0) + layout.place(&self.circle, target, source);
        let [read, write] = [read, write].map(|place| Address(place as u32));
        let size = Bytes(self.vectors * self.timing.vector.0);
        Task::Transfer(RouteTransfer { read, write, ..RouteTransfer::new(source, target, size) })
    }

    /// Makes the schedule with blocks divided into `pieces` pieces.
    fn schedule(&self, pieces: u64) -> Schedule {
        let network = self.fabric.network();
        let ends = vec![Ticks(0); self.pairs.len()];
        let mut schedule = Schedule { timing: self.timing, trains: Vec::new(), ends };
        let Some(link) = network.links().first().filter(|_| self.vectors > 0) else {
            return schedule;
        };
        let slot = self.timing.slot(link);
        let step = self.vectors.div_ceil(pieces) * slot.0;
        // Steps from one link of a path to the next, which a vector reaches after a hop.
        let hop = network.links().iter().map(|link| self.timing.hop(link)).max();
        let lag = hop.unwrap_or_default().0.div_ceil(step).max(1);
        let mut steps = Steps::new(self.circle.kinds() as usize);
        for piece in 0..pieces {
            let part = part(self.vectors, pieces, piece);
            let (first, count) = (part.start, part.end - part.start);
            for (task, pair) in (0..).zip(&self.pairs) {
                let paths =
                    pair.paths.iter().map(|path| (steps.fit(&self.circle, path, lag), path));
                let best = paths.min_by_key(|(at, _)| at.last().copied());
                let (at, path) = best.expect("every pair has a path");
                let mut taken = SmallVec::new();
                for (&link, &at) in path.iter().zip(&at) {
                    steps.take(self.circle.kind(link).0, at);
                    taken.push(Hop { link, start: Ticks(at * step) });
                }
                let last: &Hop = taken.last().expect("a path has links");
                let came = last.start + self.timing.hop(network.link(last.link));
                let end = &mut schedule.ends[task as usize];
                *end = (*end).max(came + Ticks(count * slot.0));
                schedule.trains.push(Train { task, first, count, hops: taken });
            }
        }
        schedule
    }
}

/// Bit set of the booked steps of each kind of link.
struct Steps {
    taken: Vec<Vec<u64>>,
}

impl Steps {
    fn new(kinds: usize) -> Self {
        Self { taken: vec![Vec::new(); kinds] }
    }

    /// Returns the earliest free steps for a path's links, each at least `lag` after the one before.
    fn fit(&self, circle: &RotationalSymmetry, path: &Path, lag: u64) -> SmallVec<[u64; 4]> {
        let mut steps: SmallVec<[u64; 4]> = SmallVec::new();
        for (place, &link) in path.iter().enumerate() {
            let kind = circle.kind(link).0;
            let mut at = self.free(kind, steps.last().map_or(0, |before| before + lag));
            // A path may use several links of one kind, each in a different part.
            while path[..place]
                .iter()
                .zip(&steps)
                .any(|(&link, &before)| circle.kind(link).0 == kind && before == at)
            {
                at = self.free(kind, at + 1);
            }
            steps.push(at);
        }
        steps
    }

    fn free(&self, kind: u32, from: u64) -> u64 {
        let taken = &self.taken[kind as usize];
        let mut mask = !0 << (from % 64);
        for (word, taken) in taken.iter().enumerate().skip(from as usize / 64) {
            let free = !taken & mask;
            if free != 0 {
                return word as u64 * 64 + u64::from(free.trailing_zeros());
            }
            mask = !0;
        }
        from.max(taken.len() as u64 * 64)
    }

    fn take(&mut self, kind: u32, at: u64) {
        let taken = &mut self.taken[kind as usize];
        let word = at as usize / 64;
        if taken.len() <= word {
            taken.resize(word + 1, 0);
        }
        taken[word] |= 1 << (at % 64);
    }
}
