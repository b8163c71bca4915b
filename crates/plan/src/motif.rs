//! A motif: transfers that are scheduled as one.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::algebra::Form;
use ir::{Collective, CollectiveKind, cut};

/// Elements that may be kept aside.
pub(crate) const ASIDE_MAX: u64 = 16 << 10;

/// Elements that go from one rank to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankTransfer {
    /// Who sends.
    pub source: u32,
    /// Who receives.
    pub target: u32,
    /// Where they lie in the vector of the former.
    pub read: u64,
    /// Where they come to lie in that of the latter.
    pub write: u64,
    /// How many.
    pub count: u64,
    /// Whether they are added to what lies there, in place of replacing it.
    pub sums: bool,
}

/// One of so many parts of a payload.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct PayloadSegment {
    /// Which.
    pub number: u64,
    /// Of how many.
    pub of: u64,
}

impl PayloadSegment {
    /// All of it.
    pub const WHOLE: Self = Self { number: 0, of: 1 };

    /// One of so many parts of it.
    fn part(self, number: u64, of: u64) -> Self {
        Self { number: self.number * of + number, of: self.of * of }
    }

    /// That part of so many elements.
    fn range(self, elements: u64) -> Range<u64> {
        cut(elements, self.of, self.number)
    }

    /// That part of a range.
    fn within(self, range: &Range<u64>) -> Range<u64> {
        let part = self.range(range.end - range.start);
        range.start + part.start..range.start + part.end
    }
}

/// Who sends to whom. Members of a group are counted from its first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Around a ring, member by member: sums of blocks, until each is with its owner.
    ReduceScatter,
    /// Around a ring: blocks of each, until all have all.
    AllGather,
    /// The one after the other.
    AllReduce,
    /// Blocks straight to their owners, who add them up, all at once.
    ScatterDirect,
    /// Blocks straight from their owners to all, all at once.
    GatherDirect,
    /// Everything from each to all others at once; each adds all of it up, in the order of ranks.
    OneShot,
    /// All others to the first at once.
    Reduce,
    /// The first to all others at once.
    Broadcast,
    /// Each member `i` to members `i + first`, `i + first + 1`, ... modulo their number.
    Exchange {
        /// To whom first.
        first: u32,
        /// To how many.
        count: u32,
    },
    /// As somebody wrote it down.
    Written,
}

/// Transfers that are scheduled as one.
///
/// Source: SYNDICATE §4.2.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Motif {
    /// Who sends to whom.
    pub pattern: Pattern,
    /// Who takes part, in the order around rings, the root first.
    pub group: Arc<[u32]>,
    /// What part of the vector it is about. Around rings each member has a block of that.
    pub area: PayloadSegment,
    /// What part of each block.
    pub part: PayloadSegment,
    /// What is written down, round by round, of [`Pattern::Written`].
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
    /// All of a collective.
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

    /// Transfers that somebody thought of, round by round; no operator changes them.
    pub fn written(collective: &Collective, rounds: Vec<Vec<RankTransfer>>) -> Self {
        Self { pattern: Pattern::Written, written: rounds.into(), ..Self::of(collective) }
    }

    fn with(&self, pattern: Pattern, group: impl IntoIterator<Item = u32>) -> Self {
        Self { pattern, group: group.into_iter().collect(), ..self.clone() }
    }

    // Operators. What does not suit a motif leaves it as it is.

    /// The same on so many parts of the payload, beside each other.
    pub fn segment(&self, parts: u64) -> Form {
        let one = |number: u64| {
            let mut motif = self.clone();
            match self.pattern {
                // Whoever comes before or after counts on who has which block.
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

    /// An all-to-all, broadcast or reduction to at most so many at a time, beside each other.
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

    /// An all-reduce as a reduction around the ring, and then a gathering.
    pub fn ring(&self) -> Form {
        if self.pattern != Pattern::AllReduce {
            return self.clone().into();
        }
        let halves = [Pattern::ReduceScatter, Pattern::AllGather];
        Form::Then(halves.map(|pattern| Self { pattern, ..self.clone() }.into()).into())
    }

    /// A reduction or gathering with every block straight to whoever it is for; an all-reduce as the one
    /// after the other.
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

    /// An all-reduce in one round. Ranks keep what comes aside meanwhile, so hosts refuse it if it is of
    /// many elements.
    pub fn one_shot(&self) -> Form {
        if self.pattern != Pattern::AllReduce {
            return self.clone().into();
        }
        Self { pattern: Pattern::OneShot, ..self.clone() }.into()
    }

    /// Whether all of it goes in one shot, of copies that ranks have put aside.
    pub(crate) fn keeps_aside(&self) -> bool {
        self.pattern == Pattern::OneShot
    }

    /// An all-reduce as reductions in groups of so many, an all-reduce among their firsts, and
    /// broadcasts in the groups.
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

    /// An all-reduce as reductions around rings of so many neighbours, all-reduces of each block
    /// across these rings, and gatherings around them. Leaves alone what does not divide.
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

    // What it does

    /// Its transfers, round by round: what a rank sends in a round it has before the round.
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

    /// Blocks around a ring. Sums end with the owners of blocks, and gatherings begin there.
    fn around(&self, collective: &Collective, sums: bool) -> Vec<Vec<RankTransfer>> {
        let members = self.group.len();
        let round = |turn: usize| {
            let step = |place: usize| {
                // In the last turn of a sum the next one gets its own block.
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

    /// Every two members, each way.
    fn pairs(&self) -> impl Iterator<Item = (&u32, &u32)> {
        let from = |source| self.group.iter().map(move |target| (source, target));
        self.group.iter().flat_map(from).filter(|(source, target)| source != target)
    }

    /// Blocks from all to their owners, or from these to all.
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

    /// What it is about of the block of a member.
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
