//! Exchanges between groups of devices: rows that go to the shards that the data choose, and back (as
//! for mixture-of-experts routing or embedding lookups); and collectives over groups, of which the same
//! shard of each group is one member.
//!
//! Source: PATHWAYS §4.3 (sparse data exchanges along sharded edges).
//!
//! Rows come from groups of arrays and go to groups of arrays; a group is one array (or several of one
//! partition) on the devices of one mesh. Shards are numbered over all groups of a side, and hold equal
//! parts of the first axis. Each shard of the target side has *bins*; a choice is the number of a bin
//! over all shards, or negative for none.

use std::fmt::{self, Display};

/// A sparse exchange in one direction, or a collective over groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sparse {
    /// Sends each row to the bins that are chosen for it.
    ///
    /// Arguments, by group: rows `[n, ...]`, or `[n, k, ...]` with one for each choice; choices
    /// `int32[n, k]`. Results, by group: rows `[shards * capacity, ...]`, ordered by bin, then source
    /// shard, then choice, padded with zeros; origins `int32[shards * capacity]`, for each row the
    /// number of its choice over all groups, or -1; counts `int32[shards * bins]` of the rows in each
    /// bin.
    Dispatch {
        /// Bins of each target shard.
        bins: u32,
        /// Maximum number of rows that a source shard may send to a target shard in a round (flow
        /// control).
        credit: u32,
        /// Which rows for a target shard are sent: the `round`-th lot of `credit`.
        round: u32,
    },
    /// Sends each row back to the choice that it comes from.
    ///
    /// Arguments, by group: rows and origins, as a dispatch produces them. Results, by group: rows
    /// `[n, k, ...]`, zeros for choices to which no row returns.
    Collect,
    /// All-reduce over groups: each group receives the sum over all groups.
    ///
    /// Arguments, by group: one array, of equal shape, type and partition. Results, by group: the same.
    Reduce,
    /// All-gather over groups: each group receives the arrays of all groups.
    ///
    /// Arguments, by group: one array, of equal shape, type and partition. Results, by group: all of
    /// them stacked along a new first axis, partitioned as before.
    Gather,
    /// Reduce-scatter over groups: each group receives the sum of what all groups have for it.
    ///
    /// Arguments and results are those of a [`Sparse::Gather`], exchanged.
    Scatter,
}

/// The shards of all groups of one side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Side {
    /// Number of shards.
    pub shards: u32,
    /// Rows of each shard.
    pub rows: u32,
}

/// The shapes of a sparse exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ends {
    /// The side that rows come from, and return to.
    pub source: Side,
    /// The side that rows go to.
    pub target: Side,
    /// Choices of each row.
    pub choices: u32,
    /// Size of each row in bytes.
    pub row_bytes: u64,
    /// Whether there is a row for each choice.
    pub is_each: bool,
}

impl Display for Sparse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dispatch { .. } => write!(f, "dispatch"),
            Self::Collect => write!(f, "collect"),
            Self::Reduce => write!(f, "reduce"),
            Self::Gather => write!(f, "gather"),
            Self::Scatter => write!(f, "scatter"),
        }
    }
}

impl Sparse {
    /// Returns the number of arguments and the number of results of each group.
    pub fn widths(&self) -> (usize, usize) {
        match self {
            Self::Dispatch { .. } => (2, 3),
            Self::Collect => (2, 1),
            Self::Reduce | Self::Gather | Self::Scatter => (1, 1),
        }
    }
}
