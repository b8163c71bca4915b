//! Collectives on vectors of elements: the single definition of all kinds and their layouts.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Maximum number of ranks of a collective.
const RANKS_MAX: u32 = 1 << 16;
/// Maximum number of elements of a collective's vector; for an all-to-all, of all blocks of all ranks.
const ELEMENTS_MAX: u64 = 1 << 48;

/// Why a collective is not valid.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum CollectiveError {
    /// There are no ranks, or too many.
    #[error("a collective is of {found} ranks; expected 1 to {most}", most = RANKS_MAX)]
    Ranks {
        /// Number of ranks.
        found: u64,
    },
    /// There are too many elements.
    #[error("a rank of a collective has {found} elements; expected at most {most}", most = ELEMENTS_MAX)]
    Elements {
        /// Number of elements.
        found: u64,
    },
    /// A rank is out of range.
    #[error("rank {found} takes part in a collective of {ranks}")]
    Rank {
        /// The rank.
        found: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// The number of sizes is not the number of pairs of ranks.
    #[error("{found} sizes are given for {ranks} ranks; expected one for each pair")]
    Sizes {
        /// Number of sizes.
        found: usize,
        /// Number of ranks.
        ranks: u32,
    },
}

/// The kind of a collective.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Each rank receives the sum of all vectors.
    AllReduce,
    /// Rank `i` receives block `i` of the sum.
    ReduceScatter,
    /// Rank `i` has block `i`; each rank receives all blocks.
    AllGather,
    /// Each rank receives the vector of one rank.
    Broadcast {
        /// The sending rank.
        root: u32,
    },
    /// One rank receives the sum of all vectors.
    Reduce {
        /// The receiving rank.
        root: u32,
    },
    /// Rank `i` has a block for each rank, and receives one from each.
    AllToAll {
        /// Elements from rank `i` to rank `j`, at `i * ranks + j`.
        sizes: Arc<[u64]>,
    },
}

impl CollectiveKind {
    /// Returns the name, such as `all_reduce`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::AllToAll { .. } => "all_to_all",
        }
    }

    /// Returns the number of passes of the vector around a ring of the ranks.
    pub fn passes(&self) -> u32 {
        match self {
            Self::AllReduce => 2,
            _ => 1,
        }
    }

    /// Returns how many times its vector each link of a ring of the ranks carries (bandwidth term). A
    /// broadcast or a reduction sends it whole from rank to rank, in pieces one behind the other.
    pub fn ring_load(&self, ranks: u32) -> f64 {
        let others = f64::from(ranks.max(1) - 1) / f64::from(ranks.max(1));
        match self {
            Self::Broadcast { .. } | Self::Reduce { .. } => others.ceil(),
            _ => f64::from(self.passes()) * others,
        }
    }

    /// Returns the depth of binary trees of `ranks`.
    pub fn tree_levels(ranks: u32) -> u32 {
        ranks.max(1).next_power_of_two().ilog2()
    }

    /// Returns the number of sequential messages over binary trees of `ranks` (latency term).
    pub fn rounds(&self, ranks: u32) -> u32 {
        self.passes() * Self::tree_levels(ranks)
    }
}

/// A collective communication operation.
///
/// Each rank has one vector. Except for an all-to-all, that is the vector which is reduced, gathered or
/// broadcast, in place. In an all-to-all, the blocks for each rank come first, in rank order, followed
/// by the blocks from each rank.
///
/// ```
/// use ir::Collective;
/// let all_reduce = Collective::all_reduce(8, 1 << 20).unwrap();
/// assert_eq!(all_reduce.to_string(), "all-reduce of 1048576 over 8");
/// assert_eq!(all_reduce.kind().passes(), 2);
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Written")]
pub struct Collective {
    kind: CollectiveKind,
    ranks: u32,
    elements: u64,
}

/// The serialized form, which is validated when it is read.
#[derive(Deserialize)]
struct Written {
    kind: CollectiveKind,
    ranks: u32,
    elements: u64,
}

impl TryFrom<Written> for Collective {
    type Error = CollectiveError;

    fn try_from(written: Written) -> Result<Self, CollectiveError> {
        Self::of_kind(written.kind, written.ranks, written.elements)
    }
}

impl Collective {
    /// Creates an all-reduce: the sum of vectors of `elements`, at each rank.
    ///
    /// # Errors
    /// There are no ranks, too many ranks, or too many elements; the same for all other kinds.
    pub fn all_reduce(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        Self::new(CollectiveKind::AllReduce, ranks, elements)
    }

    /// Creates a reduce-scatter: the sum of vectors of `elements`, one block at each rank.
    pub fn reduce_scatter(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        Self::new(CollectiveKind::ReduceScatter, ranks, elements)
    }

    /// Creates an all-gather: a vector of `elements`, gathered from one block at each rank.
    pub fn all_gather(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        Self::new(CollectiveKind::AllGather, ranks, elements)
    }

    /// Creates a broadcast of the root's vector to each rank.
    pub fn broadcast(ranks: u32, elements: u64, root: u32) -> Result<Self, CollectiveError> {
        Self::new(CollectiveKind::Broadcast { root }, ranks, elements)
    }

    /// Creates a reduce: the sum of vectors of `elements`, at the root.
    pub fn reduce(ranks: u32, elements: u64, root: u32) -> Result<Self, CollectiveError> {
        Self::new(CollectiveKind::Reduce { root }, ranks, elements)
    }

    /// Creates an all-to-all of `elements` per rank, divided into blocks as equal as possible.
    pub fn all_to_all(ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        let count = u64::from(ranks.clamp(1, RANKS_MAX));
        let sizes = (0..count * count).map(|pair| {
            let block = cut(elements, count, pair % count);
            block.end - block.start
        });
        Self::all_to_all_of(ranks, sizes.collect())
    }

    /// Creates an all-to-all with these block sizes: from rank `i` to rank `j` at `i * ranks + j`.
    pub fn all_to_all_of(ranks: u32, sizes: Arc<[u64]>) -> Result<Self, CollectiveError> {
        let found = sizes.len();
        if found as u64 != u64::from(ranks) * u64::from(ranks) {
            return Err(CollectiveError::Sizes { found, ranks });
        }
        let most = sizes.iter().try_fold(0, |sum: u64, &size| sum.checked_add(size));
        Self::new(CollectiveKind::AllToAll { sizes }, ranks, most.unwrap_or(u64::MAX))
    }

    /// Creates a permutation: `elements` from the first rank of each pair to the second.
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

    /// Creates a collective of any kind; for an all-to-all, `elements` is computed from its sizes.
    pub fn of_kind(
        kind: CollectiveKind,
        ranks: u32,
        elements: u64,
    ) -> Result<Self, CollectiveError> {
        match kind {
            CollectiveKind::AllToAll { sizes } => Self::all_to_all_of(ranks, sizes),
            kind => Self::new(kind, ranks, elements),
        }
    }

    fn new(kind: CollectiveKind, ranks: u32, elements: u64) -> Result<Self, CollectiveError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(CollectiveError::Ranks { found: u64::from(ranks) });
        }
        if elements > ELEMENTS_MAX {
            return Err(CollectiveError::Elements { found: elements });
        }
        match kind {
            CollectiveKind::Broadcast { root } | CollectiveKind::Reduce { root }
                if root >= ranks =>
            {
                Err(CollectiveError::Rank { found: root, ranks })
            }
            _ => Ok(Self { kind, ranks, elements }),
        }
    }

    /// Returns the kind.
    pub fn kind(&self) -> &CollectiveKind {
        &self.kind
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns the elements of each rank's vector; for an all-to-all, those of all blocks of all ranks.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Returns the number of elements of a rank's buffer.
    pub fn work(&self, rank: u32) -> u64 {
        match &self.kind {
            CollectiveKind::AllToAll { .. } => self.given(rank) + self.received(rank),
            _ => self.elements,
        }
    }

    /// Returns the range of a rank's buffer that holds its result.
    pub fn result(&self, rank: u32) -> Range<u64> {
        match &self.kind {
            CollectiveKind::AllReduce
            | CollectiveKind::AllGather
            | CollectiveKind::Broadcast { .. } => 0..self.elements,
            CollectiveKind::ReduceScatter => self.block(rank),
            CollectiveKind::Reduce { root } if *root == rank => 0..self.elements,
            CollectiveKind::Reduce { .. } => 0..0,
            CollectiveKind::AllToAll { .. } => {
                let given = self.given(rank);
                given..given + self.received(rank)
            }
        }
    }

    /// Returns the block of the vector that belongs to a rank.
    pub fn block(&self, rank: u32) -> Range<u64> {
        cut(self.elements, u64::from(self.ranks), u64::from(rank))
    }

    /// Returns the block from one rank to another: its offset in the source's buffer, its offset in the
    /// target's buffer, and its size.
    ///
    /// # Panics
    /// The collective is not an all-to-all.
    pub fn pair(&self, source: u32, target: u32) -> (u64, u64, u64) {
        let read = (0..target).map(|rank| self.size(source, rank)).sum();
        let before: u64 = (0..source).map(|rank| self.size(rank, target)).sum();
        (read, self.given(target) + before, self.size(source, target))
    }

    /// Returns the block of an all-to-all that stays on its rank: its offset when read and when written
    /// in the rank's buffer, and its size; `None` for other collectives.
    pub fn own(&self, rank: u32) -> Option<(u64, u64, u64)> {
        match self.kind {
            CollectiveKind::AllToAll { .. } => Some(self.pair(rank, rank)),
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
        let CollectiveKind::AllToAll { sizes } = &self.kind else {
            panic!("only an all-to-all has blocks")
        };
        sizes[(source * self.ranks + target) as usize]
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, elements) = (self.ranks, self.elements);
        let kind = match &self.kind {
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::Broadcast { root } => {
                return write!(f, "broadcast of {elements} from {root} to {ranks}");
            }
            CollectiveKind::Reduce { root } => {
                return write!(f, "reduce of {elements} from {ranks} to {root}");
            }
            CollectiveKind::AllToAll { .. } => "all-to-all",
        };
        write!(f, "{kind} of {elements} over {ranks}")
    }
}

/// Returns part `number` of `elements` divided into `parts`. Parts nest: dividing each of `k` parts
/// into `n` gives the parts of `k * n`.
pub fn cut(elements: u64, parts: u64, number: u64) -> Range<u64> {
    let at = |number: u64| (u128::from(elements) * u128::from(number) / u128::from(parts)) as u64;
    at(number)..at(number + 1)
}
