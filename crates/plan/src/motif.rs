//! Motifs: groups of transfers that are scheduled as a unit.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use ir::{Collective, CollectiveKind, cut};

/// Most elements of a transfer that a one-shot motif may stage.
pub(crate) const ASIDE_MAX: u64 = 16 << 10;

/// Elements that are sent from one rank to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankTransfer {
    /// The sending rank.
    pub source: u32,
    /// The receiving rank.
    pub target: u32,
    /// First element in the sender's vector.
    pub read: u64,
    /// First element in the receiver's vector.
    pub write: u64,
    /// Number of elements.
    pub count: u64,
    /// Whether the receiver adds them to its elements rather than overwriting these.
    pub sums: bool,
}

/// One of several equal parts of a payload.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct PayloadSegment {
    /// Index of the part.
    pub number: u64,
    /// Number of parts.
    pub of: u64,
}

impl PayloadSegment {
    /// The whole payload.
    pub const WHOLE: Self = Self { number: 0, of: 1 };

    /// Part `number` of `of` parts of this part.
    pub(crate) fn part(self, number: u64, of: u64) -> Self {
        Self { number: self.number * of + number, of: self.of * of }
    }

    /// The range of this part in a payload of `elements` elements.
    fn range(self, elements: u64) -> Range<u64> {
        cut(elements, self.of, self.number)
    }

    /// The range of this part within a range.
    fn within(self, range: &Range<u64>) -> Range<u64> {
        let part = self.range(range.end - range.start);
        range.start + part.start..range.start + part.end
    }
}

/// Communication pattern: which members send to which. Members of a group are numbered from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Ring reduce-scatter: partial sums of blocks travel around the ring until each is with its owner.
    ReduceScatter,
    /// Ring all-gather: blocks travel around the ring until all members have all of them.
    AllGather,
    /// Ring reduce-scatter, then ring all-gather.
    AllReduce,
    /// Direct reduce-scatter: every block straight to its owner, which adds them up, in one round.
    ScatterDirect,
    /// Direct all-gather: every block straight from its owner to all members, in one round.
    GatherDirect,
    /// Every member sends all its elements to all others in one round; each adds them up in the order
    /// of ranks.
    OneShot,
    /// All others send to the first member, in one round.
    Reduce,
    /// The first member sends to all others, in one round.
    Broadcast,
    /// Member `i` sends to members `i + first`, `i + first + 1`, ... modulo the group size.
    Exchange {
        /// Distance to the first target.
        first: u32,
        /// Number of targets.
        count: u32,
    },
    /// Explicit transfers, see [`Motif::written`].
    Written,
}

/// Transfers that are scheduled as a unit.
///
/// Source: SYNDICATE §4.2.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Motif {
    /// Communication pattern.
    pub pattern: Pattern,
    /// Participating ranks, in ring order, the root first.
    pub group: Arc<[u32]>,
    /// Part of the vector that it covers. In ring and direct patterns each member owns a block of it.
    pub area: PayloadSegment,
    /// Part of each block that it covers.
    pub part: PayloadSegment,
    /// Explicit transfers by round, for [`Pattern::Written`].
    #[serde(default = "nothing", skip_serializing_if = "is_nothing")]
    pub written: Arc<[Vec<RankTransfer>]>,
}

fn nothing() -> Arc<[Vec<RankTransfer>]> {
    Arc::new([])
}

fn is_nothing(written: &Arc<[Vec<RankTransfer>]>) -> bool {
    written.is_empty()
}

impl Motif {
    /// A whole collective as one motif.
    pub fn of(collective: &Collective) -> Self {
        let all = || (0..collective.ranks()).collect::<Vec<u32>>();
        let from = |root: u32| {
            std::iter::once(root).chain((0..collective.ranks()).filter(move |&rank| rank != root))
        };
        let (pattern, group) = match *collective.kind() {
            CollectiveKind::AllReduce => (Pattern::AllReduce, all()),
            CollectiveKind::ReduceScatter => (Pattern::ReduceScatter, all()),
            CollectiveKind::AllGather => (Pattern::AllGather, all()),
            CollectiveKind::Broadcast { root } => (Pattern::Broadcast, from(root).collect()),
            CollectiveKind::Reduce { root } => (Pattern::Reduce, from(root).collect()),
            CollectiveKind::AllToAll { .. } => {
                let count = collective.ranks() - 1;
                (Pattern::Exchange { first: 1, count }, all())
            }
        };
        let group = group.into();
        let written = nothing();
        Self { pattern, group, area: PayloadSegment::WHOLE, part: PayloadSegment::WHOLE, written }
    }

    /// A motif of explicit transfers, round by round; no operator changes it.
    pub fn written(collective: &Collective, rounds: Vec<Vec<RankTransfer>>) -> Self {
        Self { pattern: Pattern::Written, written: rounds.into(), ..Self::of(collective) }
    }

    /// The same motif with another pattern, in another group.
    pub(crate) fn with(&self, pattern: Pattern, group: impl IntoIterator<Item = u32>) -> Self {
        Self { pattern, group: group.into_iter().collect(), ..self.clone() }
    }

    /// Returns whether ranks send staged copies of their elements, as one-shot motifs do.
    pub(crate) fn keeps_aside(&self) -> bool {
        self.pattern == Pattern::OneShot
    }

    // Transfers of a motif

    /// Returns its transfers by round: a rank has what it sends in a round before the round begins.
    /// O(transfers).
    pub fn rounds(&self, collective: &Collective) -> Vec<Vec<RankTransfer>> {
        let members = self.group.len();
        let mut rounds = match self.pattern {
            Pattern::ReduceScatter => self.around(collective, true),
            Pattern::AllGather => self.around(collective, false),
            Pattern::AllReduce => {
                let mut rounds = self.around(collective, true);
                rounds.extend(self.around(collective, false));
                rounds
            }
            Pattern::ScatterDirect | Pattern::GatherDirect => vec![self.straight(collective)],
            Pattern::OneShot => {
                let range = self.area.range(collective.elements());
                let (start, count) = (range.start, range.end - range.start);
                let transfer = |(&source, &target): (&u32, &u32)| RankTransfer {
                    source,
                    target,
                    read: start,
                    write: start,
                    count,
                    sums: true,
                };
                vec![self.pairs().map(transfer).collect()]
            }
            Pattern::Reduce | Pattern::Broadcast => {
                let range = self.area.range(collective.elements());
                let (root, count) = (self.group[0], range.end - range.start);
                let is_sum = self.pattern == Pattern::Reduce;
                let transfer = |&other: &u32| {
                    let (source, target) = if is_sum { (other, root) } else { (root, other) };
                    let (read, write) = (range.start, range.start);
                    RankTransfer { source, target, read, write, count, sums: is_sum }
                };
                vec![self.group[1..].iter().map(transfer).collect()]
            }
            Pattern::Written => self.written.to_vec(),
            Pattern::Exchange { first, count } => {
                let targets = (first..first + count).map(|apart| apart as usize % members);
                let pairs = targets.flat_map(|apart| {
                    (0..members).map(move |place| (place, (place + apart) % members))
                });
                let transfer = |(place, other): (usize, usize)| {
                    let (source, target) = (self.group[place], self.group[other]);
                    let (read, write, size) = collective.pair(source, target);
                    let part = self.part.range(size);
                    let count = part.end - part.start;
                    let (read, write) = (read + part.start, write + part.start);
                    RankTransfer { source, target, read, write, count, sums: false }
                };
                vec![pairs.filter(|(one, other)| one != other).map(transfer).collect()]
            }
        };
        for round in &mut rounds {
            round.retain(|transfer| transfer.count > 0);
        }
        rounds.retain(|round| !round.is_empty());
        rounds
    }

    /// Blocks around a ring. Reductions end at the owners of blocks, and all-gathers begin there.
    fn around(&self, collective: &Collective, sums: bool) -> Vec<Vec<RankTransfer>> {
        let members = self.group.len();
        let round = |turn: usize| {
            let step = |place: usize| {
                // In the last turn of a reduction the next member receives the block that it owns.
                let behind = if sums { turn + 1 } else { turn };
                let owner = (place + members - behind) % members;
                let block = self.block(collective, owner);
                let count = block.end - block.start;
                let (source, target) = (self.group[place], self.group[(place + 1) % members]);
                RankTransfer { source, target, read: block.start, write: block.start, count, sums }
            };
            (0..members).map(step).collect()
        };
        (0..members.saturating_sub(1)).map(round).collect()
    }

    /// All ordered pairs of different members.
    fn pairs(&self) -> impl Iterator<Item = (&u32, &u32)> {
        let from = |source| self.group.iter().map(move |target| (source, target));
        self.group.iter().flat_map(from).filter(|(source, target)| source != target)
    }

    /// Direct exchange: blocks from all members to their owners, or from the owners to all.
    fn straight(&self, collective: &Collective) -> Vec<RankTransfer> {
        let sums = self.pattern == Pattern::ScatterDirect;
        let members = self.group.len();
        let blocks: Vec<Range<u64>> =
            (0..members).map(|place| self.block(collective, place)).collect();
        let apart = (1..members).flat_map(|apart| (0..members).map(move |place| (place, apart)));
        let transfer = |(place, apart): (usize, usize)| {
            let other = (place + apart) % members;
            let block = &blocks[if sums { other } else { place }];
            let (source, target) = (self.group[place], self.group[other]);
            let (read, count) = (block.start, block.end - block.start);
            RankTransfer { source, target, read, write: read, count, sums }
        };
        apart.map(transfer).collect()
    }

    /// The part of a member's block that the motif covers.
    fn block(&self, collective: &Collective, place: usize) -> Range<u64> {
        let block = self.area.part(place as u64, self.group.len() as u64);
        self.part.within(&block.range(collective.elements()))
    }
}
