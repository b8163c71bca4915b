//! Fills links step by step until every chip has every piece.
//!
//! Time is cut into steps in which a link moves one piece. In each step every link is given a piece
//! that its source has and its target lacks, looked for from another place each time, so that what
//! chips have differs and every link has something to bring until near the end. On a Dragonfly that
//! keeps links within 2 % of full. All parts of a circle do the same, so only one is looked at, and
//! pieces are numbered as its chips see them: by how far around the circle they come from.
//!
//! Source: filling links step by step is TACOS (MICRO'24), there for each chunk of all chips and with
//! random choices; the multi-TSP system §4.3 spreads vectors deterministically and does not say how.

use std::collections::VecDeque;

use base::VertexId;
use fabric::{Network, RotationalSymmetry};

/// A piece goes over the links of a kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChipMove {
    /// In which step.
    pub step: u32,
    /// Over which kind of link.
    pub kind: u32,
    /// Which piece, as the source sees it.
    pub piece: ChipPiece,
}

/// A piece of what a chip has at first, as another chip sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChipPiece {
    /// How many parts ahead on the circle that chip is.
    pub ahead: u32,
    /// Which of the holders in that part.
    pub holder: u32,
    /// Which of its pieces.
    pub number: u32,
}

/// Where links lead, as chips of the first part see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lead {
    /// Who sends.
    pub source: u32,
    /// Who gets it, as its own part sees it.
    pub target: u32,
    /// How many parts ahead on the circle that is.
    pub ahead: u32,
}

/// Where each kind of link leads.
pub(crate) fn leads(network: &Network, circle: &RotationalSymmetry) -> Vec<Lead> {
    let lead = |kind| {
        let link = network.link(circle.link(kind, 0));
        let (target, ahead) = (circle.kind_of(link.target), circle.turn_of(link.target));
        Lead { source: link.source.0, target, ahead }
    };
    (0..circle.kinds()).map(lead).collect()
}

/// What goes when.
pub(crate) struct Filled {
    /// How many steps it takes.
    pub steps: u32,
    /// In the order of steps.
    pub moves: Vec<ChipMove>,
}

/// Gives every link a piece in every step, as long as there is one.
///
/// O(moves · words of pieces, mostly few).
///
/// # Arguments
/// - `leads`: where links lead.
/// - `holders`: chips of each part that have pieces at first.
/// - `pieces`: how many each of them has.
/// - `lag`: steps between the one in which a piece comes and the first in which it can go on.
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
    // Where each link looked last; large odd strides keep links apart from each other.
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

/// What chips of the first part have and lack, as bits. Each part on the circle has words of its own,
/// so that what one chip sees is what another sees some words further on.
struct Held {
    turns: usize,
    /// Words for the pieces of one part.
    words_per_part: usize,
    holders: usize,
    pieces: usize,
    has: Vec<u64>,
    lacks: Vec<u64>,
    /// What each chip has sent to any other.
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

    /// Words of one chip.
    fn words(&self) -> usize {
        self.turns * self.words_per_part
    }

    fn missing(&self) -> usize {
        self.lacks.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The first word from `from` on in which the source has something that the target lacks.
    fn useful(&self, lead: &Lead, from: usize) -> Option<(usize, u64)> {
        let words = self.words();
        let has = &self.has[lead.source as usize * words..][..words];
        let lacks = &self.lacks[lead.target as usize * words..][..words];
        // The target sees what is here so many words earlier.
        let shift = lead.ahead as usize * self.words_per_part;
        let seen = |word: usize| if word < shift { word + words - shift } else { word - shift };
        let pairs = (from..words).chain(0..from).map(|word| (word, has[word] & lacks[seen(word)]));
        // What a chip has not sent yet comes first, or what only it has would leave it last.
        let sent = &self.sent[lead.source as usize * words..][..words];
        let mut fresh = pairs.clone().map(|(word, useful)| (word, useful & !sent[word]));
        let is_useful = |(_, useful): &(usize, u64)| *useful != 0;
        fresh.find(is_useful).or_else(|| pairs.into_iter().find(is_useful))
    }

    /// Takes a piece off what the target lacks; where it will have it.
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
