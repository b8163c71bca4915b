//! Collectives on networks whose links differ, or that have switches: pieces are sent along packed
//! spanning trees.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use base::{Address, Bytes, LinkId, Ticks, VertexId};
use smallvec::SmallVec;
use topology::{Link, Network, RotationalSymmetry};

use crate::bound::busiest;
use crate::layout::{Layout, RoutedCollective};
use crate::paths::Path;
use crate::planner::{RouteError, check_memory};
use crate::schedule::{Hop, RoutePlan, Schedule, Timing, Train, part};
use crate::task::{RouteTransfer, Task, Tasks};
use crate::trees::{Tree, trees};

/// Maximum number of endpoints: the search for trees takes about the fifth power of their number.
const ENDPOINTS_MAX: u32 = 64;
/// Numbers of pieces per shard that are tried.
const PIECES: [u64; 5] = [4, 16, 64, 256, 1024];
/// Ratio to the lower bound at which the search stops.
const GOOD_ENOUGH: f64 = 1.015;
/// Maximum number of piece transfers in all.
const MOVES_MAX: u64 = 1 << 20;

/// The collective to run along trees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Along {
    /// All-gather: every endpoint's shard is copied to every endpoint.
    Gather,
    /// Broadcast: one endpoint's tensor is copied to every endpoint.
    From(VertexId),
    /// Reduce-scatter: a reversed all-gather.
    Reduce,
    /// All-reduce: a reduce-scatter, then an all-gather.
    Both,
}

/// Plans a collective on shards of a given size.
///
/// # Errors
/// The tensor is larger than a chip's memory, there are too many endpoints, or a reduction is asked for
/// and some link has no equal reverse link.
pub(crate) fn collective(
    network: &Network,
    along: Along,
    shard: Bytes,
    timing: Timing,
) -> Result<RoutedCollective, RouteError> {
    let count = network.endpoints();
    let roots = match along {
        Along::From(root) => vec![root.0],
        Along::Gather | Along::Reduce | Along::Both => (0..count).collect(),
    };
    check_memory(shard, roots.len() as u64, &timing)?;
    if count > ENDPOINTS_MAX {
        return Err(RouteError::Many { found: count, most: ENDPOINTS_MAX });
    }
    let grown = trees(network, &roots).ok_or(RouteError::Uneven)?;
    let vectors = timing.vectors(shard);
    let mut done = vec![0; roots.len()];
    let mut parts = Vec::new();
    for tree in &grown.trees {
        let shard = roots.iter().position(|&root| root == tree.root).expect("trees have roots");
        let done = &mut done[shard];
        let first = vectors * *done / grown.units;
        *done += tree.units;
        let count = vectors * *done / grown.units - first;
        let (first, share) =
            (shard as u64 * vectors + first, tree.units as f64 / grown.units as f64);
        parts.push(Part { tree, first, count, share });
    }
    let moves = roots.len() as u64 * u64::from(count);
    let most = (MOVES_MAX / moves).clamp(1, vectors.max(1));
    // A schedule that must also hold in reverse counts every hop as long as the longest.
    let hops = network.links().iter().map(|link| timing.hop(link));
    let hop = hops.max().unwrap_or_default();
    let least = match along {
        Along::Gather | Along::From(_) => Ticks(0),
        Along::Reduce | Along::Both => hop,
    };
    let mut best: Option<RoutePlan> = None;
    for pieces in PIECES.map(|pieces| pieces.min(most)) {
        let plan = Flowing::new(network, &parts, pieces, (timing, hop, least)).plan();
        // The load of the busiest link does not depend on the number of pieces.
        let bound = busiest(network, &plan).map_or(Ticks(0), |(_, busy)| busy);
        let is_good = plan.end().0 as f64 <= GOOD_ENOUGH * bound.0 as f64;
        if best.as_ref().is_none_or(|known| plan.end() < known.end()) {
            best = Some(plan);
        }
        if pieces == most || is_good {
            break;
        }
    }
    let gather = best.expect("some number of pieces was tried");
    let plan = match along {
        Along::Gather | Along::From(_) => gather,
        Along::Reduce => backwards(network, &gather).ok_or(RouteError::Uneven)?,
        Along::Both => {
            let reduce = backwards(network, &gather).ok_or(RouteError::Uneven)?;
            after(reduce, gather)
        }
    };
    let start = vec![Address(0)];
    let shards = roots.len() as u32;
    let layout = Layout { shard: vectors, shards, inputs: start.clone(), results: start };
    Ok(RoutedCollective { plan, layout })
}

/// Reverses an all-gather in time and link direction: what went to several endpoints comes from them
/// and is reduced. `None` if some link has no equal reverse link.
fn backwards(network: &Network, gather: &RoutePlan) -> Option<RoutePlan> {
    let timing = &gather.schedule.timing;
    let back = back(network, timing)?;
    let end = gather.end();
    let count = gather.tasks.len();
    let reversed = |number: usize| (count - 1 - number) as u32;
    let mut from: Vec<Tasks> = vec![Tasks::new(); count];
    for (number, task) in gather.tasks.iter().enumerate() {
        for before in task.waits_for() {
            from[before as usize].push(reversed(number));
        }
    }
    let mut plan = RoutePlan {
        circle: gather.circle.clone(),
        tasks: Vec::with_capacity(count),
        schedule: Schedule { timing: *timing, trains: Vec::new(), ends: Vec::new() },
    };
    for (number, train) in gather.schedule.trains.iter().enumerate().rev() {
        let transfer = gather.tasks[number].transfer().expect("nothing computes");
        plan.tasks.push(Task::Transfer(RouteTransfer {
            source: transfer.target,
            target: transfer.source,
            from: std::mem::take(&mut from[number]),
            sums: true,
            ..transfer.clone()
        }));
        let pace = timing.pace(network, train.links());
        let length = Ticks(train.count * pace.0);
        let hop = |hop: &Hop| Hop {
            link: back[hop.link.0 as usize],
            start: Ticks(end.0 - hop.start.0 - length.0),
        };
        let hops: SmallVec<[Hop; 3]> = train.hops.iter().rev().map(hop).collect();
        let arrives = hops
            .last()
            .map_or(Ticks(0), |last| last.start + timing.hop(network.link(last.link)) + length);
        plan.schedule.ends.push(arrives);
        plan.schedule.trains.push(Train { task: reversed(number), hops, ..*train });
    }
    Some(plan)
}

/// Appends an all-gather to a reduce-scatter: each root's pieces are sent once they are summed.
fn after(mut reduce: RoutePlan, gather: RoutePlan) -> RoutePlan {
    let (begin, count) = (reduce.end(), reduce.tasks.len() as u32);
    let mut summed: BTreeMap<(VertexId, u32), Tasks> = BTreeMap::new();
    for (number, task) in (0..).zip(&gather.tasks) {
        let transfer = task.transfer().expect("nothing computes");
        if transfer.from.is_empty() {
            let of = summed.entry((transfer.source, transfer.read.0)).or_default();
            of.push(count - 1 - number);
        }
    }
    for mut task in gather.tasks {
        task.renumber(|number| number + count);
        if let Task::Transfer(transfer) = &mut task
            && transfer.from.is_empty()
        {
            transfer.from = summed[&(transfer.source, transfer.read.0)].clone();
        }
        reduce.tasks.push(task);
    }
    let Schedule { trains, ends, .. } = gather.schedule;
    reduce.schedule.trains.extend(trains.into_iter().map(|mut train| {
        train.task += count;
        train.hops.iter_mut().for_each(|hop| hop.start += begin);
        train
    }));
    reduce.schedule.ends.extend(ends.into_iter().map(|end| end + begin));
    reduce
}

/// Matches each link with an equal reverse link, each used once; `None` if some has none.
fn back(network: &Network, timing: &Timing) -> Option<Vec<LinkId>> {
    let like = |link: &Link| (timing.slot(link), timing.hop(link));
    let mut open: BTreeMap<_, Vec<LinkId>> = BTreeMap::new();
    for (number, link) in (0..).zip(network.links()) {
        open.entry((link.source, link.target, like(link))).or_default().push(LinkId(number));
    }
    let links = network.links().iter();
    links.map(|link| open.get_mut(&(link.target, link.source, like(link)))?.pop()).collect()
}

/// A part of a root's shard, and the tree that carries it.
#[derive(Clone, Debug)]
struct Part<'a> {
    tree: &'a Tree,
    /// Its vectors, counted over all shards, and its fraction of the shard.
    first: u64,
    count: u64,
    share: f64,
}

/// A piece of a part, and the tree edge that it waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Sending {
    piece: u64,
    part: usize,
    edge: usize,
}

/// A simulation event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// A link becomes free.
    Free(usize),
    /// All of a piece has arrived at the source of an edge.
    There(Sending),
}

/// Discrete-event list scheduling of pieces along trees: whenever the first link of a path is free, a
/// piece that waits for it is sent; switches buffer arriving pieces until their next link is free.
struct Flowing<'a> {
    network: &'a Network,
    parts: &'a [Part<'a>],
    timing: Timing,
    /// Time of the longest hop, and the minimum that each hop counts as.
    hop: Ticks,
    least: Ticks,
    /// Number of pieces of each part.
    pieces: Vec<u64>,
    /// All paths, paths of the edges of each part, paths that begin with each link, and pieces that
    /// wait for each path.
    paths: Vec<Path>,
    path_of: Vec<Vec<usize>>,
    first: Vec<Vec<usize>>,
    waiting: Vec<BinaryHeap<Reverse<Sending>>>,
    free: Vec<Ticks>,
    /// The task that brought each forwarded piece.
    brought: BTreeMap<Sending, u32>,
    events: BinaryHeap<Reverse<(Ticks, Event)>>,
    tasks: Vec<Task>,
    trains: Vec<Train>,
    ends: Vec<Ticks>,
}

impl<'a> Flowing<'a> {
    fn new(
        network: &'a Network,
        parts: &'a [Part<'a>],
        pieces: u64,
        (timing, hop, least): (Timing, Ticks, Ticks),
    ) -> Self {
        let mut numbers: BTreeMap<&Path, usize> = BTreeMap::new();
        for (_, _, path) in parts.iter().flat_map(|part| &part.tree.edges) {
            let next = numbers.len();
            numbers.entry(path).or_insert(next);
        }
        let path_of =
            |part: &Part<'_>| part.tree.edges.iter().map(|edge| numbers[&edge.2]).collect();
        let path_of: Vec<Vec<usize>> = parts.iter().map(path_of).collect();
        let mut paths = vec![Path::new(); numbers.len()];
        let mut first = vec![Vec::new(); network.links().len()];
        for (path, number) in numbers {
            paths[number] = path.clone();
            first[path[0].0 as usize].push(number);
        }
        let cut = |part: &Part<'_>| part.count.min((pieces as f64 * part.share).ceil() as u64);
        let mut this = Self {
            network,
            parts,
            timing,
            hop,
            least,
            pieces: parts.iter().map(cut).collect(),
            waiting: paths.iter().map(|_| BinaryHeap::new()).collect(),
            free: vec![Ticks(0); network.links().len()],
            brought: BTreeMap::new(),
            events: BinaryHeap::new(),
            tasks: Vec::new(),
            trains: Vec::new(),
            ends: Vec::new(),
            paths,
            path_of,
            first,
        };
        for (number, part) in parts.iter().enumerate() {
            for piece in 0..this.pieces[number] {
                this.send_on((piece, number), part.tree.root, (Ticks(0), None));
            }
        }
        this
    }

    /// Enqueues a piece that has arrived at a vertex for all outgoing edges of its tree.
    fn send_on(
        &mut self,
        (piece, part): (u64, usize),
        vertex: u32,
        (there, task): (Ticks, Option<u32>),
    ) {
        let edges = self.parts[part].tree.edges.iter().enumerate();
        for (edge, _) in edges.filter(|(_, edge)| edge.0 == vertex) {
            let sending = Sending { piece, part, edge };
            self.brought.extend(task.map(|task| (sending, task)));
            self.events.push(Reverse((there, Event::There(sending))));
        }
    }

    fn plan(mut self) -> RoutePlan {
        while let Some(&Reverse((now, _))) = self.events.peek() {
            let mut paths: Vec<usize> = Vec::new();
            while let Some(&Reverse((time, event))) = self.events.peek()
                && time == now
            {
                self.events.pop();
                match event {
                    Event::Free(link) => paths.extend(&self.first[link]),
                    Event::There(sending) => {
                        let path = self.path_of[sending.part][sending.edge];
                        self.waiting[path].push(Reverse(sending));
                        paths.push(path);
                    }
                }
            }
            paths.sort_unstable();
            paths.dedup();
            // Paths with the shortest queue on later links first, in units of a hop, to avoid
            // head-of-line blocking; then by piece, so that all parts of a shard progress together.
            paths.sort_by_cached_key(|&path| {
                let free = self.paths[path][1..].iter().map(|link| self.free[link.0 as usize]);
                let queue = free.max().map_or(0, |free| free.0.saturating_sub(now.0));
                let head = self.waiting[path].peek().map(|sending| sending.0.piece);
                (queue / self.hop.0.max(1), head)
            });
            for path in paths {
                self.begin(path, now);
            }
        }
        let schedule = Schedule { timing: self.timing, trains: self.trains, ends: self.ends };
        RoutePlan { circle: RotationalSymmetry::trivial(self.network), tasks: self.tasks, schedule }
    }

    /// Sends the next piece that waits for a path, if its first link is free.
    fn begin(&mut self, path: usize, now: Ticks) {
        if self.free[self.paths[path][0].0 as usize] > now {
            return;
        }
        let Some(Reverse(sending)) = self.waiting[path].pop() else { return };
        let path = &self.paths[path];
        let pace = self.timing.pace(self.network, path.iter().copied());
        let whole = &self.parts[sending.part];
        let &(source, target, _) = &whole.tree.edges[sending.edge];
        let range = part(whole.count, self.pieces[sending.part], sending.piece);
        let (first, count) = (whole.first + range.start, range.end - range.start);
        let length = Ticks(count * pace.0);
        let mut at = now;
        let mut hops: SmallVec<[Hop; 3]> = SmallVec::new();
        for &link in path {
            at = at.max(self.free[link.0 as usize]);
            hops.push(Hop { link, start: at });
            self.free[link.0 as usize] = at + length;
            self.events.push(Reverse((at + length, Event::Free(link.0 as usize))));
            at += self.timing.hop(self.network.link(link)).max(self.least);
        }
        let task = self.tasks.len() as u32;
        let address = Address(first as u32);
        let size = Bytes(count * self.timing.vector.0);
        self.tasks.push(Task::Transfer(RouteTransfer {
            from: self.brought.remove(&sending).into_iter().collect(),
            read: address,
            write: address,
            ..RouteTransfer::new(VertexId(source), VertexId(target), size)
        }));
        let last = hops[hops.len() - 1];
        self.trains.push(Train { task, first: 0, count, hops });
        self.ends.push(last.start + self.timing.hop(self.network.link(last.link)) + length);
        // Store-and-forward, since links differ: a piece is forwarded when all of it has arrived.
        self.send_on((sending.piece, sending.part), target, (at + length, Some(task)));
    }
}
