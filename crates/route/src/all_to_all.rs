//! All-to-all: every chip has a block for every other chip.
//!
//! Time is cut into steps in which a link moves a piece of a block. Every piece goes a minimal way,
//! at once through all its links if they are free one after another, else as early as they are. The
//! order matters: first to all nodes, then to the next chip of each, so that at any time all chips
//! send in all directions. With 264 chips the links between nodes are then full to 3 %.
//!
//! Source: the multi-TSP system §2.2 and §4.2. Differs from the paper: it schedules no all-to-all.

use base::{Bytes, LinkId, Ticks, VertexId};
use fabric::Dragonfly;
use smallvec::SmallVec;

use crate::planner::RouteError;
use crate::schedule::{Hop, Schedule, Timing, Train, Transfer, part};

/// Pieces of a block that are tried.
const PIECES: [u64; 3] = [1, 5, 15];
/// Most pieces in all; for more, blocks are cut coarser.
const PIECES_MAX: u64 = 1 << 20;

/// Schedules an all-to-all of a block from each chip to each other chip: a transfer for each pair,
/// in the order of sources and then of targets.
///
/// O(pairs · pieces · ways), with up to 15 pieces.
///
/// # Errors
/// The blocks of a chip are larger than its memory, or nodes are not all joined directly.
pub fn all_to_all(
    dragonfly: &Dragonfly,
    block: Bytes,
    timing: Timing,
) -> Result<(Vec<Transfer>, Schedule), RouteError> {
    let chips = dragonfly.network().endpoints();
    let most = Bytes(timing.buffer * timing.vector.0 / u64::from(chips));
    if block > most {
        return Err(RouteError::Size { transfer: 0, size: block, most });
    }
    let pairs = (0..chips).flat_map(|one| (0..chips).map(move |other| (one, other)));
    let pairs = pairs.filter(|(source, target)| source != target);
    let transfers: Vec<Transfer> = pairs
        .map(|(source, target)| Transfer::new(VertexId(source), VertexId(target), block))
        .collect();
    if dragonfly.groups() > 1 {
        let [from, to] = [0, chips - 1].map(VertexId);
        return Err(RouteError::NoWay { transfer: chips - 2, from, to });
    }
    let vectors = timing.vectors(block);
    let finest = (PIECES_MAX / transfers.len().max(1) as u64).clamp(1, vectors.max(1));
    let plans = PIECES.into_iter().filter(|pieces| *pieces <= finest);
    let plans = plans.map(|pieces| plan(dragonfly, &transfers, vectors, pieces, timing));
    let best = plans.min_by_key(Schedule::end).expect("one piece is always tried");
    Ok((transfers, best))
}

/// The same with so many pieces of a block.
fn plan(
    dragonfly: &Dragonfly,
    transfers: &[Transfer],
    vectors: u64,
    pieces: u64,
    timing: Timing,
) -> Schedule {
    let network = dragonfly.network();
    let chips = network.endpoints();
    let mut schedule =
        Schedule { timing, trains: Vec::new(), ends: vec![Ticks(0); transfers.len()] };
    let Some(link) = network.links().first().filter(|_| vectors > 0) else { return schedule };
    let (slot, hop) = (timing.slot(link), timing.hop(link));
    let step = vectors.div_ceil(pieces) * slot.0;
    // Steps from one link of a way to the next, which a vector reaches after a hop.
    let lag = hop.0.div_ceil(step).max(1);
    let mut steps = Steps::new(network.links().len());
    for piece in 0..pieces {
        let part = part(vectors, pieces, piece);
        let (first, count) = (part.start, part.end - part.start);
        for (source, target) in in_turn(dragonfly) {
            let ways = dragonfly.ways(source, target);
            let way =
                ways.map(|way| steps.fit(way, lag)).min_by_key(|way| way.last().map(|end| end.1));
            let way = way.expect("chips of a group are joined");
            let place = source.0 * (chips - 1) + target.0 - u32::from(target > source);
            let hops = way.iter().map(|&(link, at)| {
                steps.take(link, at);
                Hop { link, start: Ticks(at * step) }
            });
            let hops: SmallVec<[Hop; 3]> = hops.collect();
            let last = hops.last().expect("a way has links").start;
            let end = &mut schedule.ends[place as usize];
            *end = (*end).max(last + hop + Ticks(count * slot.0));
            schedule.trains.push(Train { transfer: place, first, count, hops });
        }
    }
    schedule
}

/// Pairs of chips in the order in which their blocks are given their ways.
fn in_turn(dragonfly: &Dragonfly) -> impl Iterator<Item = (VertexId, VertexId)> {
    let chips = dragonfly.network().endpoints();
    let nodes = dragonfly.nodes();
    let per_node = chips / nodes;
    let turns = (0..per_node).flat_map(move |chip| (0..nodes).map(move |node| (node, chip)));
    turns.skip(1).flat_map(move |(node, chip)| {
        (0..chips).map(move |source| {
            let target_node = (source / per_node + node) % nodes;
            let target = target_node * per_node + (source + chip) % per_node;
            (VertexId(source), VertexId(target))
        })
    })
}

/// The steps in which each link is taken, a bit for each.
struct Steps {
    taken: Vec<Vec<u64>>,
}

impl Steps {
    fn new(links: usize) -> Self {
        Self { taken: vec![Vec::new(); links] }
    }

    /// The earliest steps for a way, each at least `lag` behind the one before.
    fn fit(&self, way: impl Iterator<Item = LinkId>, lag: u64) -> SmallVec<[(LinkId, u64); 3]> {
        let mut from = 0;
        let each = way.map(|link| {
            let at = self.free(link, from);
            from = at + lag;
            (link, at)
        });
        each.collect()
    }

    fn free(&self, link: LinkId, from: u64) -> u64 {
        let taken = &self.taken[link.0 as usize];
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

    fn take(&mut self, link: LinkId, at: u64) {
        let taken = &mut self.taken[link.0 as usize];
        let word = at as usize / 64;
        if taken.len() <= word {
            taken.resize(word + 1, 0);
        }
        taken[word] |= 1 << (at % 64);
    }
}
