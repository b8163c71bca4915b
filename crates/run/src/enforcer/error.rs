//! What can go wrong between ranks.

use ir::CollectiveError;
use plan::RankScheduleError;
use thiserror::Error;

/// Why a rank's collectives do not end well.
#[derive(Debug, Clone, Error, PartialEq)]
pub enum EnforcerError {
    /// No type that is exchanged or combined.
    #[error(
        "elements of type {dtype} cannot be combined; expected a boolean, integer or floating-point type"
    )]
    Elements {
        /// The type.
        dtype: &'static str,
    },
    /// Elements that are no sets of bits.
    #[error(
        "elements of type {dtype} cannot be combined bit by bit; expected a boolean or integer type"
    )]
    Bits {
        /// The type.
        dtype: &'static str,
    },
    /// No such rank, or too few hosts.
    #[error(
        "rank {rank} of {ranks} was asked for; expected a rank below their number, and one host each"
    )]
    Rank {
        /// Which.
        rank: u32,
        /// Of how many.
        ranks: usize,
    },
    /// Another rank does not come.
    #[error("rank {rank} cannot be joined{}: {reason}", within(*seconds))]
    Join {
        /// Which.
        rank: u32,
        /// How long was waited, if that is why.
        seconds: Option<f64>,
        /// Why not.
        reason: String,
    },
    /// There is no memory that others see.
    #[error("no memory for the {bytes} bytes of {name}: {reason}")]
    Memory {
        /// Of which collective.
        name: String,
        /// How many.
        bytes: usize,
        /// Why not.
        reason: String,
    },
    /// Another rank is gone.
    #[error("rank {rank} is lost while {doing}: {reason}")]
    Lost {
        /// Which.
        rank: u32,
        /// What was being done.
        doing: String,
        /// How it shows.
        reason: String,
    },
    /// Another rank does nothing.
    #[error(
        "{doing} has waited {seconds:.1} s for rank {rank}; it may be stuck, or has asked for \
         something else"
    )]
    Late {
        /// Which.
        rank: u32,
        /// What was being done.
        doing: String,
        /// How long was waited.
        seconds: f64,
    },
    /// Another rank does something else.
    #[error(
        "rank {rank} sent {found}, but this rank expected {expected}; all ranks must ask for the same \
         collectives, of the same sizes and types, under the same plan"
    )]
    Diverged {
        /// Which.
        rank: u32,
        /// What it sent.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// Another rank has given up.
    #[error("rank {rank} has given up: {reason}")]
    Told {
        /// Which.
        rank: u32,
        /// What it says.
        reason: String,
    },
    /// A rank could not make what it was to send.
    #[error("{0}")]
    Poisoned(String),
    /// The step has no such collective.
    #[error(
        "operation {operation} of a step of {operations} was asked for; the plan is of another program"
    )]
    Operation {
        /// Which.
        operation: u32,
        /// How many there are.
        operations: usize,
    },
    /// The plan is of another collective.
    #[error(
        "operation {operation} ({name}) is planned as {expected}, and asked for as {found}; the plan is of another program"
    )]
    Different {
        /// Which.
        operation: u32,
        /// What the plan calls it.
        name: String,
        /// What is planned.
        expected: String,
        /// What is asked for.
        found: String,
    },
    /// The vector is too small or too large.
    #[error("a vector of {found} bytes was given for {name}; expected {expected}")]
    Size {
        /// For what.
        name: String,
        /// Its size.
        found: usize,
        /// What it should be.
        expected: u64,
    },
    /// It was asked for before.
    #[error("operation {operation} was asked for twice in step {step}")]
    Twice {
        /// Which.
        operation: u32,
        /// In which step.
        step: u64,
    },
    /// No such step now.
    #[error("step {step} has not begun, or is over")]
    Step {
        /// Which.
        step: u64,
    },
    /// A step was promised.
    #[error("{promised} more steps of the same plan were promised; this one breaks the promise")]
    Promise {
        /// How many.
        promised: u32,
    },
    /// The plan cannot be kept.
    #[error(transparent)]
    Script(#[from] RankScheduleError),
    /// No collective.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// More channels than there are.
    #[error("the plan orders {found} channels, and hosts have {channels}")]
    Channels {
        /// In the plan.
        found: usize,
        /// There are.
        channels: usize,
    },
    /// Somebody else proposes plans.
    #[error("rank {rank} proposes a plan; only rank 0 does")]
    Proposer {
        /// Who tried to.
        rank: u32,
    },
    /// A plan was proposed, and is not kept to.
    #[error("the plan is not agreed on: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// Nobody knows yet whether a plan is kept to.
    #[error("it is not decided which plan the next step has; {seconds:.1} s were waited")]
    Undecided {
        /// How long was waited.
        seconds: f64,
    },
    /// There is no plan to keep to.
    #[error("a step of the plan was to begin, and there is none; expected one to follow first")]
    NoPlan,
    /// Nobody will do it.
    #[error("the enforcer is closed")]
    Closed,
}

fn within(seconds: Option<f64>) -> String {
    seconds.map_or_else(String::new, |seconds| format!(" within {seconds:.1} s"))
}

impl EnforcerError {
    /// The other rank that it is about, if there is one.
    pub fn rank(&self) -> Option<u32> {
        match *self {
            Self::Join { rank, .. }
            | Self::Lost { rank, .. }
            | Self::Late { rank, .. }
            | Self::Diverged { rank, .. }
            | Self::Told { rank, .. } => Some(rank),
            _ => None,
        }
    }

    /// The same with what people call that rank.
    pub(super) fn called(mut self, names: &[u32]) -> Self {
        if let Self::Join { rank, .. }
        | Self::Lost { rank, .. }
        | Self::Late { rank, .. }
        | Self::Diverged { rank, .. }
        | Self::Told { rank, .. } = &mut self
        {
            *rank = names.get(*rank as usize).copied().unwrap_or(*rank);
        }
        self
    }
}
