//! Collectives on networks whose links differ, or that have switches: pieces go along trees.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use base::{Address, Bytes, LinkId, Ticks, VertexId};
use fabric::{Circle, Link, Network};
use smallvec::SmallVec;

use crate::layout::{Collective, Layout};
use crate::planner::{RouteError, check_memory};
use crate::schedule::{Hop, Plan, Schedule, Timing, Train, part};
use crate::task::{Task, Tasks, Transfer};
use crate::trees::{Tree, Way, trees};

/// Pieces of a shard that are tried.
const PIECES: [u64; 5] = [4, 16, 64, 256, 1024];
/// Most pieces that go over links in all.
const MOVES_MAX: u64 = 1 << 20;

/// What is done along trees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Along {
    /// Every endpoint's shard comes to every endpoint.
    Gather,
    /// The sum of all comes to lie in shards: the same backwards.
    Reduce,
    /// The one after the other, piece by piece.
    Both,
}

/// A collective of so large a shard.
///
/// # Errors
/// The tensor is larger than a chip's memory, there is no way, or sums are to be made and some link has
/// none like it that leads back.
pub(crate) fn collective(
    network: &Network,
    along: Along,
    shard: Bytes,
    timing: Timing,
) -> Result<Collective, RouteError> {
    let count = network.endpoints();
    check_memory(shard, u64::from(count), &timing)?;
    let grown = trees(network).ok_or(RouteError::Uneven)?;
    let back = match along {
        Along::Gather => Vec::new(),
        Along::Reduce | Along::Both => back(network, &timing).ok_or(RouteError::Uneven)?,
    };
    let vectors = timing.vectors(shard);
    let mut done = vec![0; count as usize];
    let mut parts = Vec::new();
    for tree in &grown.trees {
        let done = &mut done[tree.root as usize];
        let first = vectors * *done / grown.units;
        *done += tree.units;
        let count = vectors * *done / grown.units - first;
        let share = tree.units as f64 / grown.units as f64;
        parts.push(Part { root: tree.root, first, count, share, flows: flows(tree, along, &back) });
    }
    let moves = parts.iter().map(|part| part.flows.len() as u64).sum::<u64>().max(1);
    let most = (MOVES_MAX * u64::from(count) / moves).clamp(1, vectors.max(1));
    let mut best: Option<Plan> = None;
    for pieces in PIECES.map(|pieces| pieces.min(most)) {
        let plan = Flowing::new(network, &parts, (vectors, pieces), timing).plan();
        if best.as_ref().is_none_or(|known| plan.end() < known.end()) {
            best = Some(plan);
        }
        if pieces == most {
            break;
        }
    }
    let start = vec![Address(0)];
    let layout = Layout { shard: vectors, shards: count, inputs: start.clone(), results: start };
    Ok(Collective { plan: best.expect("some number of pieces was tried"), layout })
}

/// For each link one like it that leads back, each only once; `None` if some has none.
fn back(network: &Network, timing: &Timing) -> Option<Vec<LinkId>> {
    let like = |link: &Link| (timing.slot(link), timing.hop(link));
    let mut open: BTreeMap<_, Vec<LinkId>> = BTreeMap::new();
    for (number, link) in (0..).zip(network.links()) {
        open.entry((link.source, link.target, like(link))).or_default().push(LinkId(number));
    }
    let links = network.links().iter();
    links.map(|link| open.get_mut(&(link.target, link.source, like(link)))?.pop()).collect()
}

/// What goes along one edge of a tree.
#[derive(Clone, Debug)]
struct Flow {
    from: u32,
    to: u32,
    way: Way,
    sums: bool,
    /// Flows of the same tree that bring what it sends on, and those that send on what it brings.
    needs: usize,
    next: Vec<usize>,
}

/// A part of a root's shard, and how it goes.
#[derive(Clone, Debug)]
struct Part {
    root: u32,
    /// Its vectors, and which part of the shard they are.
    first: u64,
    count: u64,
    share: f64,
    flows: Vec<Flow>,
}

/// All that goes along a tree.
fn flows(tree: &Tree, along: Along, back: &[LinkId]) -> Vec<Flow> {
    let mut flows: Vec<Flow> = Vec::new();
    let flow = |from, to, way, sums| Flow { from, to, way, sums, needs: 0, next: Vec::new() };
    if along != Along::Gather {
        flows.extend(tree.edges.iter().rev().map(|(from, to, way)| {
            let way = way.iter().rev().map(|link| back[link.0 as usize]).collect();
            flow(*to, *from, way, true)
        }));
    }
    if along != Along::Reduce {
        flows.extend(tree.edges.iter().map(|(from, to, way)| flow(*from, *to, way.clone(), false)));
    }
    // What a vertex sends on is what came to it before.
    for later in 0..flows.len() {
        for earlier in 0..later {
            if flows[earlier].to == flows[later].from {
                flows[earlier].next.push(later);
                flows[later].needs += 1;
            }
        }
    }
    flows
}

/// A piece of a part, and the flow that it waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Sending {
    piece: u64,
    part: usize,
    flow: usize,
}

/// What happens at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// A link is free.
    Free(usize),
    /// All of a piece is where it is sent on from.
    There(Sending),
}

/// Pieces on their way. Whenever the first link of a way is free, a piece that waits for it goes;
/// switches hold what comes until its next link is free.
struct Flowing<'a> {
    network: &'a Network,
    parts: &'a [Part],
    timing: Timing,
    /// Vectors of a shard, and into how many pieces each part is cut.
    vectors: u64,
    pieces: Vec<u64>,
    /// All ways, those of the flows of each part, those that begin with each link, and who waits.
    ways: Vec<Way>,
    way_of: Vec<Vec<usize>>,
    first: Vec<Vec<usize>>,
    waiting: Vec<BinaryHeap<Reverse<Sending>>>,
    free: Vec<Ticks>,
    /// Who has brought what is sent on, and since when it is there.
    brought: BTreeMap<Sending, (Tasks, Ticks)>,
    events: BinaryHeap<Reverse<(Ticks, Event)>>,
    tasks: Vec<Task>,
    trains: Vec<Train>,
    ends: Vec<Ticks>,
}

impl<'a> Flowing<'a> {
    fn new(
        network: &'a Network,
        parts: &'a [Part],
        (vectors, pieces): (u64, u64),
        timing: Timing,
    ) -> Self {
        let mut numbers: BTreeMap<&Way, usize> = BTreeMap::new();
        for flow in parts.iter().flat_map(|part| &part.flows) {
            let next = numbers.len();
            numbers.entry(&flow.way).or_insert(next);
        }
        let way_of = |part: &Part| part.flows.iter().map(|flow| numbers[&flow.way]).collect();
        let way_of: Vec<Vec<usize>> = parts.iter().map(way_of).collect();
        let mut ways = vec![Way::new(); numbers.len()];
        let mut first = vec![Vec::new(); network.links().len()];
        for (way, number) in numbers {
            ways[number] = way.clone();
            first[way[0].0 as usize].push(number);
        }
        let cut = |part: &Part| part.count.min((pieces as f64 * part.share).ceil() as u64);
        let mut this = Self {
            network,
            parts,
            timing,
            vectors,
            pieces: parts.iter().map(cut).collect(),
            waiting: ways.iter().map(|_| BinaryHeap::new()).collect(),
            free: vec![Ticks(0); network.links().len()],
            brought: BTreeMap::new(),
            events: BinaryHeap::new(),
            tasks: Vec::new(),
            trains: Vec::new(),
            ends: Vec::new(),
            ways,
            way_of,
            first,
        };
        for (number, part) in parts.iter().enumerate() {
            let begin = part.flows.iter().enumerate().filter(|(_, flow)| flow.needs == 0);
            for (flow, _) in begin {
                for piece in 0..this.pieces[number] {
                    let sending = Sending { piece, part: number, flow };
                    this.events.push(Reverse((Ticks(0), Event::There(sending))));
                }
            }
        }
        this
    }

    fn plan(mut self) -> Plan {
        while let Some(&Reverse((now, _))) = self.events.peek() {
            let mut ways: Vec<usize> = Vec::new();
            while let Some(&Reverse((time, event))) = self.events.peek()
                && time == now
            {
                self.events.pop();
                match event {
                    Event::Free(link) => ways.extend(&self.first[link]),
                    Event::There(sending) => {
                        let way = self.way_of[sending.part][sending.flow];
                        self.waiting[way].push(Reverse(sending));
                        ways.push(way);
                    }
                }
            }
            ways.sort_unstable();
            ways.dedup();
            // All parts of a shard keep abreast, and nobody waits behind a queue that others are not in.
            ways.sort_by_cached_key(|&way| {
                let head = self.waiting[way].peek().map(|sending| sending.0.piece);
                let free = self.ways[way][1..].iter().map(|link| self.free[link.0 as usize]);
                (head, free.max())
            });
            for way in ways {
                self.begin(way, now);
            }
        }
        let schedule = Schedule { timing: self.timing, trains: self.trains, ends: self.ends };
        Plan { circle: Circle::trivial(self.network), tasks: self.tasks, schedule }
    }

    /// Lets the next piece that waits for a way go, if its first link is free.
    fn begin(&mut self, way: usize, now: Ticks) {
        if self.free[self.ways[way][0].0 as usize] > now {
            return;
        }
        let Some(Reverse(sending)) = self.waiting[way].pop() else { return };
        let way = &self.ways[way];
        let pace = self.timing.pace(self.network, way.iter().copied());
        let whole = &self.parts[sending.part];
        let flow = &whole.flows[sending.flow];
        let range = part(whole.count, self.pieces[sending.part], sending.piece);
        let (first, count) = (whole.first + range.start, range.end - range.start);
        let length = Ticks(count * pace.0);
        let mut at = now;
        let mut hops: SmallVec<[Hop; 3]> = SmallVec::new();
        for &link in way {
            at = at.max(self.free[link.0 as usize]);
            hops.push(Hop { link, start: at });
            self.free[link.0 as usize] = at + length;
            self.events.push(Reverse((at + length, Event::Free(link.0 as usize))));
            at += self.timing.hop(self.network.link(link));
        }
        let task = self.tasks.len() as u32;
        let address = Address((u64::from(whole.root) * self.vectors + first) as u32);
        let (source, target) = (VertexId(flow.from), VertexId(flow.to));
        self.tasks.push(Task::Transfer(Transfer {
            from: self.brought.remove(&sending).map(|brought| brought.0).unwrap_or_default(),
            read: address,
            write: address,
            sums: flow.sums,
            ..Transfer::new(source, target, Bytes(count * self.timing.vector.0))
        }));
        self.trains.push(Train { task, first: 0, count, hops });
        // Links differ: it goes on when all of it is there.
        let there = at + length;
        self.ends.push(there);
        for &next in &flow.next {
            let next = Sending { flow: next, ..sending };
            let (tasks, since) = self.brought.entry(next).or_default();
            tasks.push(task);
            *since = (*since).max(there);
            if tasks.len() == whole.flows[next.flow].needs {
                self.events.push(Reverse((*since, Event::There(next))));
            }
        }
    }
}
