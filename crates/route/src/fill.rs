//! Greedy all-gather synthesis: fills links step by step until every chip has every piece.
//!
//! Time is divided into steps in which a link transfers one piece. In each step, every link is assigned
//! a piece that its source has and its target lacks; the search starts at another place each time, so
//! that chips hold different pieces and every link has something useful to send until near the end. On
//! a Dragonfly that keeps links within 2 % of full. All parts of a rotational symmetry do the same, so
//! only one is planned, and pieces are numbered relative to its chips: by how many parts ahead they
//! come from.
//!
//! Source: filling links step by step is TACOS (MICRO'24), there for each chunk of all chips and with
//! random choices; the multi-TSP system §4.3 spreads vectors deterministically and does not say how.

use std::collections::VecDeque;

use base::VertexId;
use topology::{Network, RotationalSymmetry};

/// The transfer of a piece over the links of a kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChipMove {
    /// Step number.
    pub step: u32,
    /// Kind of link.
    pub kind: u32,
    /// The piece, relative to the source.
    pub piece: ChipPiece,
}

/// A piece of a chip's initial data, relative to another chip.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChipPiece {
    /// How many parts ahead its original holder is.
    pub ahead: u32,
    /// Index of the holder within that part.
    pub holder: u32,
    /// Index of the piece.
    pub number: u32,
}

/// The ends of a kind of link, relative to the first part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lead {
    /// Source chip.
    pub source: u32,
    /// Target chip, by its index within its own part.
    pub target: u32,
    /// How many parts ahead the target is.
    pub ahead: u32,
}

/// Returns the ends of each kind of link.
pub(crate) fn leads(network: &Network, circle: &RotationalSymmetry) -> Vec<Lead> {
    let lead = |kind| {
        let link = network.link(circle.link(kind, 0));
        let (target, ahead) = (circle.kind_of(link.target), circle.turn_of(link.target));
        Lead { source: link.source.0, target, ahead }
    };
    (0..circle.kinds()).map(lead).collect()
}

/// A step-by-step schedule.
pub(crate) struct Filled {
    /// Number of steps.
    pub steps: u32,
    /// Transfers, in the order of steps.
    pub moves: Vec<ChipMove>,
}

/// Schedules an all-gather: assigns every link a piece in every step, while it has a useful one.
///
/// O(moves · words of pieces, mostly few).
///
/// # Arguments
/// - `leads`: ends of each kind of link.
/// - `holders`: chips of the first part that have pieces initially.
/// - `pieces`: number of pieces of each holder.
/// - `lag`: steps between the one in which a piece arrives and the first in which it can be forwarded.
pub(crate) fn fill(
    circle: &RotationalSymmetry,
    leads: &[Lead],
    holders: &[VertexId],
    pieces: u32,
    lag: usize,
) -> Filled {
    let mut held = Held::new(circle, holders, pieces);
    let all = held.missing();
    let mut moves: Vec<ChipMove> = Vec::with_capacity(all);
    // Where each link's search starts; large odd strides keep links apart from each other.
    let words = held.words();
    let mut looked: Vec<usize> = (0..leads.len()).map(|kind| kind * 7919 % words).collect();
    let mut coming: VecDeque<Vec<(usize, u64)>> = VecDeque::from(vec![Vec::new(); lag]);
    let mut step: u32 = 0;
    while moves.len() < all {
        let mut came = Vec::new();
        for turn in 0..leads.len() {
            let kind = (turn + step as usize + 1) % leads.len();
            let lead = leads[kind];
            let from = looked[kind];
            let Some((word, useful)) = held.useful(&lead, from) else { continue };
            let turned = (step as usize * 31 + kind * 17) % 64;
            let place = useful.rotate_right(turned as u32).trailing_zeros() as usize;
            let mask = 1 << ((place + turned) % 64);
            came.push(held.send(&lead, word, mask));
            looked[kind] = (word + 1) % words;
            let piece = held.piece(word, mask);
            moves.push(ChipMove { step, kind: kind as u32, piece });
        }
        coming.push_back(came);
        for (word, mask) in coming.pop_front().expect("one was put there") {
            held.has[word] |= mask;
        }
        step += 1;
    }
    Filled { steps: step, moves }
}

/// Bit sets of the pieces that chips of the first part have and lack. Each part has words of its own,
/// so that one chip's view is another's shifted by whole words.
struct Held {
    turns: usize,
    /// Words for the pieces of one part.
    words_per_part: usize,
    holders: usize,
    pieces: usize,
    has: Vec<u64>,
    lacks: Vec<u64>,
    /// Pieces that each chip has already sent.
    sent: Vec<u64>,
}

impl Held {
    fn new(circle: &RotationalSymmetry, holders: &[VertexId], pieces: u32) -> Self {
        let (turns, part) = (circle.turns() as usize, circle.part() as usize);
        let (holders_count, pieces) = (holders.len(), pieces as usize);
        let bits = holders_count * pieces;
        let words_per_part = bits.div_ceil(64);
        let words = turns * words_per_part;
        let mut held = Self {
            turns,
            words_per_part,
            holders: holders_count,
            pieces,
            has: vec![0; part * words],
            lacks: vec![!0; part * words],
            sent: vec![0; part * words],
        };
        if !bits.is_multiple_of(64) {
            for last in held.lacks.iter_mut().skip(words_per_part - 1).step_by(words_per_part) {
                *last = (1 << (bits % 64)) - 1;
            }
        }
        for (number, holder) in holders.iter().enumerate() {
            for bit in number * pieces..(number + 1) * pieces {
                let (word, mask) = (holder.0 as usize * words + bit / 64, 1 << (bit % 64));
                held.has[word] |= mask;
                held.lacks[word] &= !mask;
            }
        }
        held
    }

    /// Number of words of one chip.
    fn words(&self) -> usize {
        self.turns * self.words_per_part
    }

    fn missing(&self) -> usize {
        self.lacks.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the first word from `from` on with pieces that the source has and the target lacks.
    fn useful(&self, lead: &Lead, from: usize) -> Option<(usize, u64)> {
        let words = self.words();
        let has = &self.has[lead.source as usize * words..][..words];
        let lacks = &self.lacks[lead.target as usize * words..][..words];
        // The target sees the same pieces this many words earlier.
        let shift = lead.ahead as usize * self.words_per_part;
        let seen = |word: usize| if word < shift { word + words - shift } else { word - shift };
        let pairs = (from..words).chain(0..from).map(|word| (word, has[word] & lacks[seen(word)]));
        // Pieces not sent yet take precedence; otherwise a chip's own pieces would be sent last.
        let sent = &self.sent[lead.source as usize * words..][..words];
        let mut fresh = pairs.clone().map(|(word, useful)| (word, useful & !sent[word]));
        let is_useful = |(_, useful): &(usize, u64)| *useful != 0;
        fresh.find(is_useful).or_else(|| pairs.into_iter().find(is_useful))
    }

    /// Marks a piece as sent; returns its word and bit at the target.
    fn send(&mut self, lead: &Lead, word: usize, mask: u64) -> (usize, u64) {
        let words = self.words();
        let shift = lead.ahead as usize * self.words_per_part;
        self.sent[lead.source as usize * words + word] |= mask;
        let at = lead.target as usize * words + (word + words - shift) % words;
        self.lacks[at] &= !mask;
        (at, mask)
    }

    fn piece(&self, word: usize, mask: u64) -> ChipPiece {
        let ahead = word / self.words_per_part;
        let bit = word % self.words_per_part * 64 + mask.trailing_zeros() as usize;
        debug_assert!(bit < self.holders * self.pieces);
        let (holder, number) = (bit / self.pieces, bit % self.pieces);
        ChipPiece { ahead: ahead as u32, holder: holder as u32, number: number as u32 }
    }
}
