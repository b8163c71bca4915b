//! Semantic check: do motifs together implement their collective?
//!
//! Every rank's vector begins as a random number of its own; transfers copy and add these numbers as
//! they would elements. At the end each place must hold the sum of the ranks whose elements belong
//! there, so anything omitted, added twice or misplaced shows. Conflicting accesses of two motifs to
//! one place must be ordered by dependencies (no data race), however the motifs are timed; only
//! additions on one channel may be in any order.

use std::collections::BTreeSet;

use base::Random;

use crate::motif::{Pattern, RankTransfer};
use crate::options::Placed;
use ir::{Collective, CollectiveKind};

/// Content of a place that is not an input of the collective.
const UNKNOWN: u128 = 0x5EED;

/// Returns why motifs do not implement a collective, if they do not.
///
/// O(pieces · (motifs + log pieces) + dependencies · motifs / 64 + ranks² · places), where `places` are
/// the intervals into which transfers cut a vector, and `pieces` counts every place of every transfer.
///
/// # Arguments
/// - `motifs`: each depends on earlier motifs only.
pub(crate) fn fault(collective: &Collective, motifs: &[Placed]) -> Option<String> {
    let rounds: Vec<Vec<Vec<RankTransfer>>> =
        motifs.iter().map(|placed| placed.motif.rounds(collective)).collect();
    if let CollectiveKind::AllToAll { .. } = collective.kind() {
        return exchange_fault(collective, rounds.iter().flatten().flatten());
    }
    let mut vectors = Vectors::new(collective, rounds.iter().flatten().flatten());
    let order = Order { before: closure(motifs), motifs };
    for (number, rounds) in rounds.iter().enumerate() {
        for round in rounds {
            if let Some(other) = vectors.carry(number, round, &order) {
                return Some(format!(
                    "has motifs {other} and {number} that change one place in no order"
                ));
            }
            // A one-shot motif stages its receives until all sends are done.
            let is_aside = motifs[number].motif.pattern == Pattern::OneShot;
            if !is_aside && vectors.is_torn(round) {
                return Some(format!("lets motif {number} send and receive one place at a time"));
            }
        }
    }
    vectors.fault(collective)
}

/// The partial order of motifs.
struct Order<'a> {
    before: Vec<Vec<u64>>,
    motifs: &'a [Placed],
}

impl Order<'_> {
    /// Returns whether motif `one` is done before motif `other`, or is the same.
    fn is_before(&self, one: usize, other: usize) -> bool {
        one == other || self.before[other][one / 64] >> (one % 64) & 1 == 1
    }

    /// Returns whether the two never run concurrently, so that both may add to one place.
    fn is_apart(&self, one: usize, other: usize) -> bool {
        self.is_before(one, other) || self.motifs[one].channel == self.motifs[other].channel
    }
}

/// Transitive closure: of each motif, the motifs that are done before it, as a bit set.
fn closure(motifs: &[Placed]) -> Vec<Vec<u64>> {
    let words = motifs.len().div_ceil(64);
    let mut before: Vec<Vec<u64>> = Vec::with_capacity(motifs.len());
    for placed in motifs {
        let mut own = vec![0; words];
        for &after in &placed.after {
            for (word, other) in own.iter_mut().zip(&before[after as usize]) {
                *word |= other;
            }
            own[after as usize / 64] |= 1 << (after % 64);
        }
        before.push(own);
    }
    before
}

/// Checks that every block is sent exactly once, from and to where it belongs.
fn exchange_fault<'a>(
    collective: &Collective,
    transfers: impl Iterator<Item = &'a RankTransfer>,
) -> Option<String> {
    let ranks = collective.ranks();
    let mut moved: Vec<Vec<(u64, u64)>> = vec![Vec::new(); (ranks * ranks) as usize];
    for transfer in transfers {
        let &RankTransfer { source, target, read, write, count, sums } = transfer;
        let (from, to, size) = collective.pair(source, target);
        let inside = read >= from && read + count <= from + size;
        if sums || !inside || write != to + (read - from) {
            return Some(format!("moves what is not from rank {source} to rank {target}"));
        }
        moved[(source * ranks + target) as usize].push((read - from, count));
    }
    for source in 0..ranks {
        for target in (0..ranks).filter(|&target| target != source) {
            let parts = &mut moved[(source * ranks + target) as usize];
            parts.sort_unstable();
            let mut end = 0;
            for &(start, count) in parts.iter() {
                if start != end {
                    break;
                }
                end = start + count;
            }
            let total: u64 = parts.iter().map(|part| part.1).sum();
            let size = collective.pair(source, target).2;
            if end != size || total != size {
                return Some(format!(
                    "moves {total} of the {size} elements from rank {source} to rank {target}"
                ));
            }
        }
    }
    None
}

/// An interval of one rank's vector.
#[derive(Clone, Default)]
struct Interval {
    holds: u128,
    /// The last motif that has overwritten it; and since then, the motifs that have added to it, and
    /// those that have read it.
    replaced: Option<usize>,
    added: Vec<usize>,
    read: Vec<usize>,
}

/// The content of all vectors, in intervals that no transfer cuts.
struct Vectors {
    /// Where intervals begin, and the end of the last one.
    cuts: Vec<u64>,
    /// Intervals by rank.
    intervals: Vec<Vec<Interval>>,
    marks: Vec<u128>,
}

impl Vectors {
    fn new<'a>(collective: &Collective, transfers: impl Iterator<Item = &'a RankTransfer>) -> Self {
        let ranks = collective.ranks();
        let mut cuts = BTreeSet::from([0, collective.elements()]);
        cuts.extend((0..ranks).map(|rank| collective.block(rank).start));
        for transfer in transfers {
            cuts.extend([transfer.read, transfer.read + transfer.count]);
        }
        let cuts: Vec<u64> = cuts.into_iter().collect();
        let mut random = Random::of(&[u64::from(ranks), cuts.len() as u64]);
        let mut mark = || u128::from(random.word()) << 64 | u128::from(random.word());
        let marks: Vec<u128> = (0..ranks).map(|_| mark()).collect();
        let gathers = matches!(collective.kind(), CollectiveKind::AllGather);
        let has = |rank: u32, at: u64| !gathers || collective.block(rank).contains(&at);
        let of = |rank: u32| -> Vec<Interval> {
            let holds = |&at: &u64| if has(rank, at) { marks[rank as usize] } else { UNKNOWN };
            let starts = cuts[..cuts.len() - 1].iter();
            starts.map(|at| Interval { holds: holds(at), ..Interval::default() }).collect()
        };
        Self { intervals: (0..ranks).map(of).collect(), cuts, marks }
    }

    fn range(&self, start: u64, count: u64) -> std::ops::Range<usize> {
        let at = |place: u64| self.cuts.partition_point(|&cut| cut < place);
        at(start)..at(start + count)
    }

    /// Executes a round of a motif; returns a motif that conflicts with it and is not ordered with it,
    /// if any.
    fn carry(&mut self, motif: usize, round: &[RankTransfer], order: &Order<'_>) -> Option<usize> {
        let is_free = |&other: &usize| !order.is_before(other, motif);
        let mut moved: Vec<(usize, usize, u128, bool)> = Vec::new();
        for transfer in round {
            let (source, target) = (transfer.source as usize, transfer.target as usize);
            for at in self.range(transfer.read, transfer.count) {
                let interval = &mut self.intervals[source][at];
                let mut others = interval.replaced.iter().chain(&interval.added);
                if let Some(&other) = others.find(|other| is_free(other)) {
                    return Some(other);
                }
                if interval.read.last() != Some(&motif) {
                    interval.read.push(motif);
                }
                moved.push((target, at, interval.holds, transfer.sums));
            }
        }
        for (target, at, value, sums) in moved {
            let interval = &mut self.intervals[target][at];
            let mut others = interval.replaced.iter().chain(&interval.read);
            if let Some(&other) = others.find(|other| is_free(other)) {
                return Some(other);
            }
            if !sums {
                if let Some(&other) = interval.added.iter().find(|other| is_free(other)) {
                    return Some(other);
                }
                *interval = Interval { holds: value, replaced: Some(motif), ..Interval::default() };
                continue;
            }
            let mut others = interval.added.iter();
            if let Some(&other) = others.find(|&&other| !order.is_apart(other, motif)) {
                return Some(other);
            }
            if interval.added.last() != Some(&motif) {
                interval.added.push(motif);
            }
            interval.holds = interval.holds.wrapping_add(value);
        }
        None
    }

    /// Returns whether a rank sends and receives the same place in a round, or receives a place twice
    /// other than to add.
    fn is_torn(&self, round: &[RankTransfer]) -> bool {
        let places =
            |rank: u32, start: u64, count: u64| self.range(start, count).map(move |at| (rank, at));
        let reads = round.iter().flat_map(|one| places(one.source, one.read, one.count));
        let mut once: BTreeSet<(u32, usize)> = reads.collect();
        let mut added = BTreeSet::new();
        for transfer in round {
            for place in places(transfer.target, transfer.write, transfer.count) {
                let is_more = transfer.sums && added.contains(&place);
                if !is_more && !once.insert(place) {
                    return true;
                }
                if transfer.sums {
                    added.insert(place);
                }
            }
        }
        false
    }

    fn fault(&self, collective: &Collective) -> Option<String> {
        let all = self.marks.iter().fold(0_u128, |all, mark| all.wrapping_add(*mark));
        for rank in 0..collective.ranks() {
            let result = collective.result(rank);
            for interval in self.range(result.start, result.end - result.start) {
                let at = self.cuts[interval];
                let expected = match collective.kind() {
                    CollectiveKind::AllReduce
                    | CollectiveKind::ReduceScatter
                    | CollectiveKind::Reduce { .. } => all,
                    CollectiveKind::Broadcast { root } => self.marks[*root as usize],
                    CollectiveKind::AllGather => {
                        let owns = |&owner: &u32| collective.block(owner).contains(&at);
                        let owner = (0..collective.ranks()).find(owns)?;
                        self.marks[owner as usize]
                    }
                    CollectiveKind::AllToAll { .. } => return None,
                };
                if self.intervals[rank as usize][interval].holds != expected {
                    return Some(format!("leaves something else in element {at} of rank {rank}"));
                }
            }
        }
        None
    }
}
