//! Motifs: groups of transfers that are scheduled as a unit.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::algebra::Form;
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
    fn part(self, number: u64, of: u64) -> Self {
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

    fn with(&self, pattern: Pattern, group: impl IntoIterator<Item = u32>) -> Self {
        Self { pattern, group: group.into_iter().collect(), ..self.clone() }
    }

    // Operators. A motif to which an operator does not apply is returned unchanged.

    /// Splits the payload into `parts` segments, composed in parallel.
    pub fn segment(&self, parts: u64) -> Form {
        let one = |number: u64| {
            let mut motif = self.clone();
            match self.pattern {
                // Dependent motifs rely on which rank owns which block, so segment within blocks.
                Pattern::ReduceScatter
                | Pattern::AllGather
                | Pattern::ScatterDirect
                | Pattern::GatherDirect
                | Pattern::Exchange { .. } => motif.part = motif.part.part(number, parts),
                Pattern::AllReduce | Pattern::OneShot | Pattern::Reduce | Pattern::Broadcast => {
                    motif.area = motif.area.part(number, parts);
                }
                Pattern::Written => {}
            }
            Form::Motif(motif)
        };
        if parts <= 1 || self.pattern == Pattern::Written {
            return self.clone().into();
        }
        Form::Beside((0..parts).map(one).collect())
    }

    /// Splits an all-to-all, broadcast or reduction into splines of at most `most` peers, composed in
    /// parallel.
    pub fn spline(&self, most: u32) -> Form {
        let most = most.max(1);
        let parts: Vec<Form> = match self.pattern {
            Pattern::Exchange { first, count } if count > most => (0..count.div_ceil(most))
                .map(|part| {
                    let begin = part * most;
                    let count = most.min(count - begin);
                    let pattern = Pattern::Exchange { first: first + begin, count };
                    Form::Motif(Self { pattern, ..self.clone() })
                })
                .collect(),
            Pattern::Broadcast | Pattern::Reduce if self.group.len() - 1 > most as usize => {
                let root = self.group[0];
                let parts = self.group[1..].chunks(most as usize);
                parts
                    .map(|part| {
                        let group = std::iter::once(root).chain(part.iter().copied()).collect();
                        Form::Motif(Self { group, ..self.clone() })
                    })
                    .collect()
            }
            _ => return self.clone().into(),
        };
        Form::Beside(parts)
    }

    /// An all-reduce as a ring reduce-scatter, then a ring all-gather.
    pub fn ring(&self) -> Form {
        if self.pattern != Pattern::AllReduce {
            return self.clone().into();
        }
        let halves = [Pattern::ReduceScatter, Pattern::AllGather];
        Form::Then(halves.map(|pattern| Self { pattern, ..self.clone() }.into()).into())
    }

    /// A reduce-scatter or all-gather with every block sent straight to its target (direct exchange);
    /// an all-reduce as the one after the other (two-shot).
    pub fn direct(&self) -> Form {
        let halves: &[Pattern] = match self.pattern {
            Pattern::AllReduce => &[Pattern::ScatterDirect, Pattern::GatherDirect],
            Pattern::ReduceScatter => &[Pattern::ScatterDirect],
            Pattern::AllGather => &[Pattern::GatherDirect],
            _ => return self.clone().into(),
        };
        let forms = halves.iter().map(|&pattern| Self { pattern, ..self.clone() }.into());
        Form::Then(forms.collect())
    }

    /// An all-reduce in one round (one-shot). Ranks stage what they receive, so schedules reject
    /// transfers of more than `ASIDE_MAX` elements.
    pub fn one_shot(&self) -> Form {
        if self.pattern != Pattern::AllReduce {
            return self.clone().into();
        }
        Self { pattern: Pattern::OneShot, ..self.clone() }.into()
    }

    /// Returns whether ranks send staged copies of their elements, as one-shot motifs do.
    pub(crate) fn keeps_aside(&self) -> bool {
        self.pattern == Pattern::OneShot
    }

    /// An all-reduce as reductions in groups of `width`, an all-reduce among the first members of
    /// groups, and broadcasts in the groups (tree).
    pub fn tree(&self, width: u32) -> Form {
        let width = width as usize;
        if self.pattern != Pattern::AllReduce || width < 2 || self.group.len() < 2 {
            return self.clone().into();
        }
        let groups = || self.group.chunks(width);
        let each = |pattern| {
            let of = |group: &[u32]| Form::from(self.with(pattern, group.iter().copied()));
            let several = groups().filter(|group| group.len() > 1);
            Form::Beside(several.map(of).collect())
        };
        let mut forms = vec![each(Pattern::Reduce)];
        if groups().len() > 1 {
            forms.push(self.with(Pattern::AllReduce, groups().map(|group| group[0])).into());
        }
        forms.push(each(Pattern::Broadcast));
        Form::Then(forms)
    }

    /// Hierarchical all-reduce: ring reduce-scatters among `width` adjacent members, all-reduces of
    /// each block across these rings, and ring all-gathers. Unchanged if `width` does not divide the
    /// group.
    pub fn hierarchical(&self, width: u32) -> Form {
        let width = width as usize;
        let count = self.group.len();
        let fits = width > 1 && width < count && count.is_multiple_of(width);
        if self.pattern != Pattern::AllReduce || !fits {
            return self.clone().into();
        }
        let each = |pattern| {
            let of = |group: &[u32]| Form::from(self.with(pattern, group.iter().copied()));
            Form::Beside(self.group.chunks(width).map(of).collect())
        };
        let across = (0..width).map(|place| {
            let group = self.group.iter().copied().skip(place).step_by(width);
            let area = self.area.part(place as u64, width as u64);
            Form::from(Self { area, ..self.with(Pattern::AllReduce, group) })
        });
        let across = Form::Beside(across.collect());
        Form::Then(vec![each(Pattern::ReduceScatter), across, each(Pattern::AllGather)])
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

impl From<Motif> for Form {
    fn from(motif: Motif) -> Self {
        Form::Motif(motif)
    }
}
