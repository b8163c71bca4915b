//! All-gather: every chip's shard comes to every chip.
//!
//! Each shard is cut into pieces of a few vectors, and time into steps in which a link moves one.
//! In each step every link is given a piece that its source has and its target lacks, looked for
//! from another place each time, so that what chips have differs and every link has something to
//! bring until near the end. On a Dragonfly that keeps links within 2 % of full.
//!
//! Source: the multi-TSP system §4.3 spreads vectors deterministically and does not say how it
//! schedules collectives; filling links step by step is TACOS (MICRO'24), there for each chunk and
//! with random choices.

use std::collections::VecDeque;

use base::{Bytes, LinkId, Ticks};
use fabric::{Link, Network};
use smallvec::smallvec;

use crate::planner::RouteError;
use crate::schedule::{Hop, Schedule, Timing, Train, Transfer, part};

/// Pieces of a shard that are tried, in links of a chip; more if these leave links idle.
const PIECES: [u64; 6] = [1, 2, 4, 8, 16, 32];
/// Most pieces that go over links in all; for more, shards are cut coarser.
const MOVES_MAX: u64 = 1 << 21;
/// How much longer than the bound is good enough to try no more.
const GOOD_ENOUGH: f64 = 1.012;

/// A collective as transfers between neighbours, and their schedule.
#[derive(Clone, PartialEq, Debug)]
pub struct Collective {
    /// Each over one link.
    pub transfers: Vec<Transfer>,
    /// Which piece each transfer brings: that of chip `piece / pieces`.
    pub pieces_of: Vec<u32>,
    /// Pieces of a shard.
    pub pieces: u32,
    /// When each leaves.
    pub schedule: Schedule,
}

impl Collective {
    /// Whether every chip gets every piece of the others once, and has what it sends; given that
    /// its transfers are as they are scheduled, for which there is [`crate::verify`].
    ///
    /// O(chips² · pieces).
    pub fn gathers(&self, chips: u32) -> bool {
        let all = (chips * self.pieces) as usize;
        let mut has = vec![false; chips as usize * all];
        let place = |chip: u32, piece: u32| chip as usize * all + piece as usize;
        for piece in 0..all as u32 {
            has[place(piece / self.pieces, piece)] = true;
        }
        let moves = self.transfers.iter().zip(&self.pieces_of);
        for (transfer, &piece) in moves {
            let is_own = piece / self.pieces == transfer.source.0;
            let is_brought = transfer.from.is_some_and(|from| {
                let brings = &self.transfers[from as usize];
                brings.target == transfer.source && self.pieces_of[from as usize] == piece
            });
            let known = &mut has[place(transfer.target.0, piece)];
            if !(is_own || is_brought) || std::mem::replace(known, true) {
                return false;
            }
        }
        has.into_iter().all(|known| known)
    }
}

/// Schedules an all-gather of a shard from each endpoint of a fabric whose links are all alike.
///
/// # Errors
/// A shard is larger than a chip's memory allows, links differ, or there are switches.
pub fn all_gather(
    network: &Network,
    shard: Bytes,
    timing: Timing,
) -> Result<Collective, RouteError> {
    let chips = u64::from(network.endpoints());
    let most = Bytes(timing.buffer * timing.vector.0 / chips.max(1));
    if shard > most {
        return Err(RouteError::Size { transfer: 0, size: shard, most });
    }
    let alike = |link: &Link| (timing.slot(link), timing.hop(link));
    let Some(first) = network.links().first() else {
        return Ok(empty(timing));
    };
    let is_even = network.links().iter().all(|link| alike(link) == alike(first));
    if !is_even || network.vertices() > network.endpoints() {
        return Err(RouteError::Uneven);
    }
    let vectors = timing.vectors(shard);
    if vectors == 0 {
        return Ok(empty(timing));
    }
    let links = network.links().len() as u64;
    let each = links.div_ceil(chips);
    let finest = (MOVES_MAX / (chips * (chips - 1)).max(1)).clamp(1, vectors);
    let counts = PIECES.map(|factor| (factor * each).min(finest));
    let mut best: Option<(u64, Filled)> = None;
    for (number, &pieces) in counts.iter().enumerate() {
        if counts[..number].contains(&pieces) {
            continue;
        }
        let step = vectors.div_ceil(pieces) * timing.slot(first).0;
        let lag = timing.hop(first).0.div_ceil(step).saturating_sub(1);
        let filled = fill(network, pieces as u32, lag as usize);
        let end = u64::from(filled.steps) * step;
        if best.as_ref().is_none_or(|(known, _)| end < *known) {
            best = Some((end, filled));
        }
        let bound = (vectors * timing.slot(first).0 * (chips - 1)) as f64 / each as f64;
        if end as f64 <= GOOD_ENOUGH * bound {
            break;
        }
    }
    let (_, filled) = best.expect("some number of pieces was tried");
    Ok(scheduled(network, vectors, &timing, filled))
}

fn empty(timing: Timing) -> Collective {
    let schedule = Schedule { timing, trains: Vec::new(), ends: Vec::new() };
    Collective { transfers: Vec::new(), pieces_of: Vec::new(), pieces: 1, schedule }
}

/// What goes over which link in which step.
struct Filled {
    pieces: u32,
    steps: u32,
    /// Step, link and piece, in the order of steps.
    moves: Vec<(u32, u32, u32)>,
}

/// Gives every link a piece in every step, as long as there is one.
///
/// # Arguments
/// - `lag`: steps between the one in which a piece comes and the first in which it can go on.
fn fill(network: &Network, pieces: u32, lag: usize) -> Filled {
    let chips = network.endpoints() as usize;
    let all = chips * pieces as usize;
    let words = all.div_ceil(64);
    let mut has = vec![0_u64; chips * words];
    let mut lacks = vec![!0_u64; chips * words];
    let bit = |chip: usize, piece: usize| (chip * words + piece / 64, 1_u64 << (piece % 64));
    for chip in 0..chips {
        if !all.is_multiple_of(64) {
            lacks[chip * words + words - 1] = (1 << (all % 64)) - 1;
        }
        for piece in chip * pieces as usize..(chip + 1) * pieces as usize {
            let (word, mask) = bit(chip, piece);
            has[word] |= mask;
            lacks[word] &= !mask;
        }
    }
    let links = network.links();
    let mut moves = Vec::with_capacity(all * (chips - 1));
    // Where each link looked last; large odd strides keep links apart from each other.
    let mut looked: Vec<usize> = (0..links.len()).map(|link| link * 7919 % words).collect();
    let mut coming: VecDeque<Vec<(usize, u64)>> = VecDeque::from(vec![Vec::new(); lag]);
    let mut steps = 0;
    while moves.len() < all * (chips - 1) {
        let mut came = Vec::new();
        for turn in 0..links.len() {
            let number = (turn + steps as usize + 1) % links.len();
            let (source, target) = (links[number].source.0, links[number].target.0);
            let (source, target) = (source as usize * words, target as usize * words);
            let useful = |word: usize| has[source + word] & lacks[target + word];
            let from = looked[number];
            let Some(word) = (from..words).chain(0..from).find(|&word| useful(word) != 0) else {
                continue;
            };
            let turned = (steps as usize * 31 + number * 17) % 64;
            let place = useful(word).rotate_right(turned as u32).trailing_zeros() as usize;
            let place = (place + turned) % 64;
            lacks[target + word] &= !(1 << place);
            looked[number] = (word + 1) % words;
            came.push((target + word, 1 << place));
            moves.push((steps, number as u32, (word * 64 + place) as u32));
        }
        coming.push_back(came);
        for (word, mask) in coming.pop_front().expect("one was put there") {
            has[word] |= mask;
        }
        steps += 1;
    }
    Filled { pieces, steps, moves }
}

/// The same with vectors and times.
fn scheduled(network: &Network, vectors: u64, timing: &Timing, filled: Filled) -> Collective {
    let Filled { pieces, moves, .. } = filled;
    let chips = network.endpoints() as usize;
    let all = chips * pieces as usize;
    let largest = vectors.div_ceil(u64::from(pieces));
    // The transfer that brings a piece to a chip.
    let mut brings: Vec<u32> = vec![u32::MAX; chips * all];
    let count = moves.len();
    let mut transfers = Vec::with_capacity(count);
    let mut pieces_of = Vec::with_capacity(count);
    let mut trains = Vec::with_capacity(count);
    let mut ends = Vec::with_capacity(count);
    for (number, (step, link, piece)) in (0..).zip(moves) {
        let Link { source, target, .. } = network.links()[link as usize];
        let link = LinkId(link);
        let (slot, hop) = (timing.slot(network.link(link)), timing.hop(network.link(link)));
        let part = part(vectors, pieces.into(), (piece % pieces).into());
        let count = part.end - part.start;
        let start = Ticks(u64::from(step) * largest * slot.0);
        let from = brings[source.0 as usize * all + piece as usize];
        brings[target.0 as usize * all + piece as usize] = number;
        let size = Bytes(count * timing.vector.0);
        let from = (from != u32::MAX).then_some(from);
        transfers.push(Transfer { source, target, size, after: smallvec![], from });
        pieces_of.push(piece);
        trains.push(Train {
            transfer: number,
            first: 0,
            count,
            hops: smallvec![Hop { link, start }],
        });
        ends.push(start + hop + Ticks(count * slot.0));
    }
    let schedule = Schedule { timing: *timing, trains, ends };
    Collective { transfers, pieces_of, pieces, schedule }
}
