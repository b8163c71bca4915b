//! Collectives as transfers between neighbours: all-gather, broadcast, reduce-scatter, all-reduce.
//!
//! Where links are alike, all derive from an all-gather that fills links step by step until every chip
//! has every piece ([`crate::fill`]); elsewhere pieces are sent along spanning trees
//! ([`crate::forest`]). Reversed in time and in the direction of links, an all-gather is a
//! reduce-scatter: where a piece went to several chips, their partial sums are combined.
//!
//! Source: the multi-TSP system §5.3 and §5.6. Differs from the paper: it does not say how it schedules
//! a collective beyond one vector.

use std::collections::BTreeMap;

use base::{Address, Bytes, LinkId, Ticks, VertexId};
use smallvec::smallvec;
use topology::{Dragonfly, Link, Network, RotationalSymmetry};

use crate::fill::{ChipMove, ChipPiece, Filled, Lead, fill, leads};
use crate::forest::{self, Along};
use crate::layout::{Layout, RoutedCollective};
use crate::planner::{RouteError, check_memory, check_planning};
use crate::schedule::{Hop, RoutePlan, Schedule, Timing, Train, part};
use crate::staged::staged;
use crate::task::{RouteTransfer, Task, Tasks};

/// Numbers of pieces per shard that are tried, in multiples of a chip's links; more if fewer leave
/// links idle.
const PIECES: [u64; 8] = [1, 2, 4, 8, 16, 32, 128, 256];
/// Maximum number of piece transfers in all; beyond it, shards are divided more coarsely.
const MOVES_MAX: u64 = 1 << 21;
/// Ratio to the lower bound at which the search stops.
const GOOD_ENOUGH: f64 = 1.012;

/// Plans an all-gather: every endpoint's shard is copied to every endpoint.
///
/// # Errors
/// The tensor is larger than a chip's memory, planning needs too much memory, or links differ and there
/// are too many endpoints to search for trees.
pub fn all_gather(
    network: &Network,
    shard: Bytes,
    timing: Timing,
) -> Result<RoutedCollective, RouteError> {
    match Spread::new(network, shard, None, timing) {
        Ok(spread) => Ok(spread.collective(|filled| vec![Phase::gather(filled)])),
        Err(RouteError::Uneven) => forest::collective(network, Along::Gather, shard, timing),
        Err(error) => Err(error),
    }
}

/// Plans a broadcast: one endpoint's tensor is copied to every endpoint.
///
/// # Errors
/// As for [`all_gather`], or `root` is not an endpoint.
pub fn broadcast(
    network: &Network,
    root: VertexId,
    tensor: Bytes,
    timing: Timing,
) -> Result<RoutedCollective, RouteError> {
    let vertices = network.vertices();
    if root.0 >= network.endpoints() {
        return Err(RouteError::Vertex { task: 0, from: root, to: root, vertices });
    }
    match Spread::new(network, tensor, Some(root), timing) {
        Ok(spread) => Ok(spread.collective(|filled| vec![Phase::gather(filled)])),
        Err(RouteError::Uneven) => forest::collective(network, Along::From(root), tensor, timing),
        Err(error) => Err(error),
    }
}

/// Plans a reduce-scatter: every endpoint has a tensor, and gets one shard of the sum of all.
///
/// # Errors
/// As for [`all_gather`], or some link has no equal reverse link.
pub fn reduce_scatter(
    network: &Network,
    shard: Bytes,
    timing: Timing,
) -> Result<RoutedCollective, RouteError> {
    match Spread::new(network, shard, None, timing) {
        Ok(spread) => Ok(spread.collective(|filled| vec![spread.reduce(filled)])),
        Err(RouteError::Uneven) => forest::collective(network, Along::Reduce, shard, timing),
        Err(error) => Err(error),
    }
}

/// Plans an all-reduce: every endpoint has a tensor, and gets the sum of all, by a reduce-scatter and
/// an all-gather.
///
/// # Errors
/// As for [`reduce_scatter`].
pub fn all_reduce(
    network: &Network,
    tensor: Bytes,
    timing: Timing,
) -> Result<RoutedCollective, RouteError> {
    let shard = Bytes(tensor.0.div_ceil(u64::from(network.endpoints())));
    match Spread::new(network, shard, None, timing) {
        Ok(spread) => {
            Ok(spread.collective(|filled| vec![spread.reduce(filled), Phase::gather(filled)]))
        }
        Err(RouteError::Uneven) => forest::collective(network, Along::Both, shard, timing),
        Err(error) => Err(error),
    }
}

/// Plans an all-reduce on a Dragonfly, hierarchically over its nodes if that has the smaller makespan,
/// as it has for small tensors.
///
/// # Errors
/// As for [`all_reduce`].
pub fn all_reduce_on(
    dragonfly: &Dragonfly,
    tensor: Bytes,
    timing: Timing,
) -> Result<RoutedCollective, RouteError> {
    let scattered = all_reduce(dragonfly.network(), tensor, timing)?;
    let staged = staged(dragonfly, tensor, timing);
    Ok(match staged {
        Some(staged) if staged.plan.end() < scattered.plan.end() => staged,
        _ => scattered,
    })
}

/// An all-gather or broadcast on links that are alike.
struct Spread<'a> {
    network: &'a Network,
    circle: RotationalSymmetry,
    leads: Vec<Lead>,
    /// For each kind of link, the kind of its reverse link.
    back: Vec<u32>,
    holders: Vec<VertexId>,
    vectors: u64,
    timing: Timing,
}

/// One phase of a collective: a step-by-step schedule of piece transfers.
struct Phase {
    moves: Vec<ChipMove>,
    steps: u32,
    /// Whether pieces are added to the target's (a reduction).
    sums: bool,
}

impl Phase {
    fn gather(filled: &Filled) -> Self {
        Self { moves: filled.moves.clone(), steps: filled.steps, sums: false }
    }
}

impl<'a> Spread<'a> {
    /// # Arguments
    /// - `root`: the only endpoint that has data initially; `None` if all have a shard.
    fn new(
        network: &'a Network,
        size: Bytes,
        root: Option<VertexId>,
        timing: Timing,
    ) -> Result<Self, RouteError> {
        let shards = if root.is_some() { 1 } else { u64::from(network.endpoints()) };
        check_memory(size, shards, &timing)?;
        let circle = match root {
            Some(_) => RotationalSymmetry::trivial(network),
            None => RotationalSymmetry::of(network),
        };
        let alike = |link: &Link| (timing.slot(link), timing.hop(link));
        let is_even = network.links().windows(2).all(|two| alike(&two[0]) == alike(&two[1]));
        if !is_even || network.vertices() > network.endpoints() {
            return Err(RouteError::Uneven);
        }
        let leads = leads(network, &circle);
        let back = back(&circle, &leads).ok_or(RouteError::Uneven)?;
        let holders = match root {
            Some(root) => vec![root],
            None => circle.first().map(VertexId).collect(),
        };
        let vectors = timing.vectors(size);
        // Three bit sets for each chip of a part, with at least one word per part; and the tasks.
        let [part, turns] = [circle.part(), circle.turns()].map(u128::from);
        let pieces = u128::from(shards) * part;
        let words = turns * (u128::from(shards) / turns).div_ceil(64).max(1);
        check_planning(part * words * 24 + pieces * 256)?;
        Ok(Self { network, circle, leads, back, holders, vectors, timing })
    }

    /// Returns the number of shards.
    fn shards(&self) -> u32 {
        self.holders.len() as u32 * self.circle.turns()
    }

    fn layout(&self) -> Layout {
        let start = vec![Address(0)];
        let shards = self.shards();
        Layout { shard: self.vectors, shards, inputs: start.clone(), results: start }
    }

    /// Tries several numbers of pieces and keeps the smallest makespan.
    fn collective(&self, phases: impl Fn(&Filled) -> Vec<Phase>) -> RoutedCollective {
        let Some(link) = self.network.links().first().filter(|_| self.vectors > 0) else {
            let schedule = Schedule { timing: self.timing, trains: vec![], ends: vec![] };
            let plan = RoutePlan { circle: self.circle.clone(), tasks: vec![], schedule };
            return RoutedCollective { plan, layout: self.layout() };
        };
        let (slot, hop) = (self.timing.slot(link), self.timing.hop(link));
        let chips = u64::from(self.network.endpoints());
        let each = (self.network.links().len() as u64).div_ceil(chips);
        let shards = u64::from(self.shards());
        let part = u64::from(self.circle.part());
        let finest = (MOVES_MAX / (part * shards).max(1)).clamp(1, self.vectors);
        let counts = PIECES.map(|factor| (factor * each).min(finest));
        let bound = self.vectors * slot.0 * shards;
        let bound = (bound - bound / chips) as f64 / each as f64;
        let mut best: Option<(u64, u64, Filled)> = None;
        for (number, &pieces) in counts.iter().enumerate() {
            if counts[..number].contains(&pieces) {
                continue;
            }
            let step = self.vectors.div_ceil(pieces) * slot.0;
            let lag = hop.0.div_ceil(step).saturating_sub(1);
            let filled =
                fill(&self.circle, &self.leads, &self.holders, pieces as u32, lag as usize);
            let end = u64::from(filled.steps) * step;
            if best.as_ref().is_none_or(|(known, ..)| end < *known) {
                best = Some((end, pieces, filled));
            }
            if end as f64 <= GOOD_ENOUGH * bound {
                break;
            }
        }
        let (_, pieces, filled) = best.expect("some number of pieces was tried");
        let plan = self.plan(pieces, &phases(&filled), slot, hop);
        RoutedCollective { plan, layout: self.layout() }
    }

    /// Reverses an all-gather into a reduce-scatter: what went to a chip is sent by it, to be summed.
    fn reduce(&self, filled: &Filled) -> Phase {
        let backwards = |one: &ChipMove| {
            // The piece relative to its former target, which now sends it.
            let piece = self.seen(one.piece, self.leads[one.kind as usize].ahead);
            let step = filled.steps - 1 - one.step;
            ChipMove { step, kind: self.back[one.kind as usize], piece }
        };
        let mut moves: Vec<ChipMove> = filled.moves.iter().map(backwards).collect();
        moves.sort_by_key(|one| one.step);
        Phase { moves, steps: filled.steps, sums: true }
    }

    /// Converts phases to tasks with times, one phase after another, each as early as possible.
    fn plan(&self, pieces: u64, phases: &[Phase], slot: Ticks, hop: Ticks) -> RoutePlan {
        let all: usize = phases.iter().map(|phase| phase.moves.len()).sum();
        let turns = u64::from(self.circle.turns());
        let largest = self.vectors.div_ceil(pieces);
        let mut tasks: Vec<Task> = Vec::with_capacity(all);
        let mut trains = Vec::with_capacity(all);
        let mut ends = Vec::with_capacity(all);
        let shards = self.shards() as usize;
        // For each chip and piece, the tasks that bring it.
        let mut brings: Vec<Tasks> =
            vec![Tasks::new(); self.circle.part() as usize * shards * pieces as usize];
        let place = |chip: u32, piece: ChipPiece| {
            let shard = chip as usize * shards + self.shard(piece);
            shard * pieces as usize + piece.number as usize
        };
        let mut begin = Ticks(0);
        for phase in phases {
            for one in &phase.moves {
                let number = tasks.len() as u32;
                let lead = self.leads[one.kind as usize];
                let link = self.circle.link(one.kind, 0);
                let seen = self.seen(one.piece, lead.ahead);
                let from = brings[place(lead.source, one.piece)].clone();
                let vectors = part(self.vectors, pieces, one.piece.number.into());
                let count = vectors.end - vectors.start;
                let address = |piece| {
                    Address((self.shard(piece) as u64 * self.vectors + vectors.start) as u32)
                };
                let target = self.network.link(link).target;
                tasks.push(Task::Transfer(RouteTransfer {
                    from,
                    read: address(one.piece),
                    write: address(seen),
                    sums: phase.sums,
                    ..RouteTransfer::new(
                        VertexId(lead.source),
                        target,
                        Bytes(count * self.timing.vector.0),
                    )
                }));
                // Relative to the target's own part, this task belongs to a part `ahead` parts behind.
                let turn = (turns - u64::from(lead.ahead)) % turns;
                let known = &mut brings[place(lead.target, seen)];
                if !phase.sums {
                    known.clear();
                }
                known.push((turn * all as u64) as u32 + number);
                let start = begin + Ticks(u64::from(one.step) * largest * slot.0);
                trains.push(train(number, count, link, start));
                ends.push(start + hop + Ticks(count * slot.0));
            }
            // The next phase uses links once this one has left them, and pieces after their last hop.
            let last = begin + Ticks(u64::from(phase.steps.max(1) - 1) * largest * slot.0);
            begin = last + hop.max(Ticks(largest * slot.0));
        }
        let schedule = Schedule { timing: self.timing, trains, ends };
        RoutePlan { circle: self.circle.clone(), tasks, schedule }
    }

    /// Returns a piece relative to the part `ahead` parts ahead.
    fn seen(&self, piece: ChipPiece, ahead: u32) -> ChipPiece {
        let turns = self.circle.turns();
        ChipPiece { ahead: (piece.ahead + turns - ahead) % turns, ..piece }
    }

    /// Returns the number of a piece's shard, relative to a chip.
    fn shard(&self, piece: ChipPiece) -> usize {
        piece.ahead as usize * self.holders.len() + piece.holder as usize
    }
}

fn train(task: u32, count: u64, link: LinkId, start: Ticks) -> Train {
    Train { task, first: 0, count, hops: smallvec![Hop { link, start }] }
}

/// Matches each kind of link with a reverse kind, each used once; `None` if some has none.
fn back(circle: &RotationalSymmetry, leads: &[Lead]) -> Option<Vec<u32>> {
    let turns = circle.turns();
    let mut open: BTreeMap<(u32, u32, u32), Vec<u32>> = BTreeMap::new();
    for (kind, lead) in leads.iter().enumerate().rev() {
        open.entry((lead.source, lead.target, lead.ahead)).or_default().push(kind as u32);
    }
    let each = leads.iter().map(|lead| {
        let ahead = (turns - lead.ahead) % turns;
        open.get_mut(&(lead.target, lead.source, ahead)).and_then(Vec::pop)
    });
    each.collect()
}
