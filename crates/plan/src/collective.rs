//! What a program asks for: collectives of ranks on vectors of elements.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most ranks of one collective.
const RANKS_MAX: u32 = 1 << 16;
/// Most elements of one rank.
const ELEMENTS_MAX: u64 = 1 << 48;

/// What cannot be a collective.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum CollectiveError {
    /// Nobody, or too many.
    #[error("a collective is of {found} ranks; expected 1 to {most}", most = RANKS_MAX)]
    Ranks {
        /// How many.
        found: u64,
    },
    /// More than can be counted.
    #[error("a rank of a collective has {found} elements; expected at most {most}", most = ELEMENTS_MAX)]
    Elements {
        /// How many.
        found: u64,
    },
    /// A rank that is not there.
    #[error("rank {found} takes part in a collective of {ranks}")]
    Rank {
        /// Which.
        found: u32,
        /// How many there are.
        ranks: u32,
    },
    /// Sizes that are not one for each pair of ranks.
    #[error("{found} sizes are given for {ranks} ranks; expected one for each pair")]
    Sizes {
        /// How many.
        found: usize,
        /// Of how many ranks.
        ranks: u32,
    },
}

/// What is done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Every rank gets the sum of all vectors.
    AllReduce,
    /// Rank `i` gets block `i` of the sum.
    ReduceScatter,
    /// Rank `i` has block `i`; all get all.
    AllGather,
    /// All get what one rank has.
    Broadcast {
        /// That rank.
        root: u32,
    },
    /// One rank gets the sum of all vectors.
    Reduce {
        /// That rank.
        root: u32,
    },
    /// Rank `i` has a block for each rank, and gets one of each.
    AllToAll {
        /// Elements from rank `i` to rank `j`, at `i * ranks + j`.
        sizes: Arc<[u64]>,
    },
}

/// One collective.
///
/// Every rank works on one vector. But for an all-to-all it is the vector that is reduced, gathered
/// or broadcast, in its place. For an all-to-all, blocks for each rank, in their order, come first in
/// it, and blocks of each rank behind them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Written")]
pub struct Collective {
    kind: Kind,
    ranks: u32,
    elements: u64,
}

/// A collective as it is written down, which somebody may have changed.
#[derive(Deserialize)]
struct Written {
    kind: Kind,
    ranks: u32,
    elements: u64,
}

impl TryFrom<Written> for Collective {
    type Error = CollectiveError;

    fn try_from(written: Written) -> Result<Self, CollectiveError> {
        match written.kind {
            Kind::AllToAll { sizes } => Self::all_to_all_of(written.ranks, sizes),
            kind => Self::new(kind, written.ranks, written.elements),
        }
    }
}

impl Collective {
    /// A sum of vectors of so many elements, for all.
    ///
    /// # Errors
    /// There are no ranks, or too many, or too many elements; so for all others.
    pub fn all_reduce(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        Self::new(Kind::AllReduce, ranks, elements)
    }

    /// A sum of vectors of so many elements, a block for each.
    pub fn reduce_scatter(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        Self::new(Kind::ReduceScatter, ranks, elements)
    }

    /// Blocks that become a vector of so many elements.
    pub fn all_gather(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        Self::new(Kind::AllGather, ranks, elements)
    }

    /// What one has, for all.
    pub fn broadcast(ranks: u32, elements: u64, root: u32) -> Result<Self, CollectiveError> {
        Self::new(Kind::Broadcast { root }, ranks, elements)
    }

    /// A sum of vectors of so many elements, for one.
    pub fn reduce(ranks: u32, elements: u64, root: u32) -> Result<Self, CollectiveError> {
        Self::new(Kind::Reduce { root }, ranks, elements)
    }

    /// Blocks of one size; a rank has so many elements in all of them.
    pub fn all_to_all(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        let count = u64::from(ranks.clamp(1, RANKS_MAX));
        let sizes = (0..count * count).map(|pair| {
            let block = cut(elements, count, pair % count);
            block.end - block.start
        });
        Self::all_to_all_of(ranks, sizes.collect())
    }

    /// Blocks of these sizes: from rank `i` to rank `j` at `i * ranks + j`.
    pub fn all_to_all_of(ranks: u32, sizes: Arc<[u64]>) -> Result<Self, CollectiveError> {
        let found = sizes.len();
        if found as u64 != u64::from(ranks) * u64::from(ranks) {
            return Err(CollectiveError::Sizes { found, ranks });
        }
        let most = sizes.iter().try_fold(0, |sum: u64, &size| sum.checked_add(size));
        Self::new(Kind::AllToAll { sizes }, ranks, most.unwrap_or(u64::MAX))
    }

    /// A vector of so many elements from one rank to another, for each of these pairs.
    pub fn permute(
        ranks: u32,
        elements: u64,
        pairs: &[(u32, u32)],
    ) -> Result<Self, CollectiveError> {
        let count = ranks.min(RANKS_MAX) as usize;
        let mut sizes = vec![0; count * count];
        for &(source, target) in pairs {
            if let Some(found) = [source, target].into_iter().find(|&rank| rank >= ranks) {
                return Err(CollectiveError::Rank { found, ranks });
            }
            sizes[source as usize * count + target as usize] = elements;
        }
        Self::all_to_all_of(ranks, sizes.into())
    }

    fn new(kind: Kind, ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(CollectiveError::Ranks { found: u64::from(ranks) });
        }
        if elements > ELEMENTS_MAX {
            return Err(CollectiveError::Elements { found: elements });
        }
        match kind {
            Kind::Broadcast { root } | Kind::Reduce { root } if root >= ranks => {
                Err(CollectiveError::Rank { found: root, ranks })
            }
            _ => Ok(Self { kind, ranks, elements }),
        }
    }

    /// What is done.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// How many take part.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Elements of the vector of each rank; of an all-to-all, of all blocks of all ranks.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Elements of the vector that a rank works on.
    pub fn work(&self, rank: u32) -> u64 {
        match &self.kind {
            Kind::AllToAll { .. } => self.given(rank) + self.received(rank),
            _ => self.elements,
        }
    }

    /// Where in a rank's vector its result lies.
    pub fn result(&self, rank: u32) -> Range<u64> {
        match &self.kind {
            Kind::AllReduce | Kind::AllGather | Kind::Broadcast { .. } => 0..self.elements,
            Kind::ReduceScatter => self.block(rank),
            Kind::Reduce { root } if *root == rank => 0..self.elements,
            Kind::Reduce { .. } => 0..0,
            Kind::AllToAll { .. } => {
                let given = self.given(rank);
                given..given + self.received(rank)
            }
        }
    }

    /// The block of a vector that is a rank's.
    pub fn block(&self, rank: u32) -> Range<u64> {
        cut(self.elements, u64::from(self.ranks), u64::from(rank))
    }

    /// Where the block from one rank to another begins in the vector of the former, where in that of
    /// the latter, and its size.
    ///
    /// # Panics
    /// It is no all-to-all.
    pub fn pair(&self, source: u32, target: u32) -> (u64, u64, u64) {
        let read = (0..target).map(|rank| self.size(source, rank)).sum();
        let before: u64 = (0..source).map(|rank| self.size(rank, target)).sum();
        (read, self.given(target) + before, self.size(source, target))
    }

    /// What of an all-to-all stays with its rank: from where to where in its vector, and how much.
    pub fn own(&self, rank: u32) -> Option<(u64, u64, u64)> {
        match self.kind {
            Kind::AllToAll { .. } => Some(self.pair(rank, rank)),
            _ => None,
        }
    }

    fn given(&self, rank: u32) -> u64 {
        (0..self.ranks).map(|target| self.size(rank, target)).sum()
    }

    fn received(&self, rank: u32) -> u64 {
        (0..self.ranks).map(|source| self.size(source, rank)).sum()
    }

    fn size(&self, source: u32, target: u32) -> u64 {
        let Kind::AllToAll { sizes } = &self.kind else { panic!("only an all-to-all has blocks") };
        sizes[(source * self.ranks + target) as usize]
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, elements) = (self.ranks, self.elements);
        let kind = match &self.kind {
            Kind::AllReduce => "all-reduce",
            Kind::ReduceScatter => "reduce-scatter",
            Kind::AllGather => "all-gather",
            Kind::Broadcast { root } => {
                return write!(f, "broadcast of {elements} from {root} to {ranks}");
            }
            Kind::Reduce { root } => {
                return write!(f, "reduce of {elements} from {ranks} to {root}");
            }
            Kind::AllToAll { .. } => "all-to-all",
        };
        write!(f, "{kind} of {elements} over {ranks}")
    }
}

/// One of so many parts of a range of so many elements. Parts of parts are parts: those of `k` parts
/// cut into `n` each are the parts of `k * n`.
pub(crate) fn cut(elements: u64, parts: u64, number: u64) -> Range<u64> {
    let at = |number: u64| (u128::from(elements) * u128::from(number) / u128::from(parts)) as u64;
    at(number)..at(number + 1)
}
