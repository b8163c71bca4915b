//! Errors of the enforcer.

use ir::CollectiveError;
use plan::RankScheduleError;
use thiserror::Error;

/// Why a collective, or a team, has failed.
#[derive(Debug, Clone, Error, PartialEq)]
pub enum EnforcerError {
    /// The element type cannot be exchanged or reduced.
    #[error(
        "elements of type {dtype} cannot be combined; expected a boolean, integer or floating-point type"
    )]
    Elements {
        /// The element type.
        dtype: &'static str,
    },
    /// A bitwise reduction of floating-point elements.
    #[error(
        "elements of type {dtype} cannot be combined bit by bit; expected a boolean or integer type"
    )]
    Bits {
        /// The element type.
        dtype: &'static str,
    },
    /// The rank is out of range, or the number of hosts does not match.
    #[error(
        "rank {rank} of {ranks} was asked for; expected a rank below their number, and one host each"
    )]
    Rank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        ranks: usize,
    },
    /// Another rank did not join (handshake), or this one cannot.
    #[error("rank {rank} cannot be joined{}: {reason}", within(*seconds))]
    Join {
        /// The rank.
        rank: u32,
        /// The timeout in seconds, if it expired.
        seconds: Option<f64>,
        /// The reason.
        reason: String,
    },
    /// No shared memory is left for a vector.
    #[error("no memory for the {bytes} bytes of {name}: {reason}")]
    Memory {
        /// Name of the collective.
        name: String,
        /// Size of the vector in bytes.
        bytes: usize,
        /// The reason.
        reason: String,
    },
    /// Another rank is lost.
    #[error("rank {rank} is lost while {doing}: {reason}")]
    Lost {
        /// The rank.
        rank: u32,
        /// The operation in progress.
        doing: String,
        /// The symptom.
        reason: String,
    },
    /// Another rank made no progress before the timeout.
    #[error(
        "{doing} has waited {seconds:.1} s for rank {rank}; it may be stuck, or has asked for \
         something else"
    )]
    Late {
        /// The rank.
        rank: u32,
        /// The operation in progress.
        doing: String,
        /// The time waited, in seconds.
        seconds: f64,
    },
    /// Another rank executes something else.
    #[error(
        "rank {rank} sent {found}, but this rank expected {expected}; all ranks must ask for the same \
         collectives, of the same sizes and types, under the same plan"
    )]
    Diverged {
        /// The rank.
        rank: u32,
        /// What it sent.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// Another rank has given up and reported why.
    #[error("rank {rank} has given up: {reason}")]
    Reported {
        /// The rank.
        rank: u32,
        /// The reason that it reported.
        reason: String,
    },
    /// A rank could not produce its elements; the text is the reason.
    #[error("{0}")]
    Poisoned(String),
    /// The step has no such operation.
    #[error(
        "operation {operation} of a step of {operations} was asked for; the plan is of another program"
    )]
    Operation {
        /// The operation.
        operation: u32,
        /// The number of operations of the step.
        operations: usize,
    },
    /// The planned collective differs from the submitted one.
    #[error(
        "operation {operation} ({name}) is planned as {expected}, and asked for as {found}; the plan is of another program"
    )]
    Different {
        /// The operation.
        operation: u32,
        /// Its name in the plan.
        name: String,
        /// The planned collective.
        expected: String,
        /// The submitted collective.
        found: String,
    },
    /// The vector has the wrong size.
    #[error("a vector of {found} bytes was given for {name}; expected {expected}")]
    Size {
        /// Name of the collective.
        name: String,
        /// Size of the vector in bytes.
        found: usize,
        /// Expected size in bytes.
        expected: u64,
    },
    /// The operation was already submitted.
    #[error("operation {operation} was asked for twice in step {step}")]
    Twice {
        /// The operation.
        operation: u32,
        /// The step.
        step: u64,
    },
    /// The step is not in flight.
    #[error("step {step} has not begun, or is over")]
    Step {
        /// The step.
        step: u64,
    },
    /// The call breaks a guarantee about the next steps.
    #[error("{promised} more steps of the same plan were promised; this one breaks the promise")]
    Promise {
        /// The number of steps that are still guaranteed.
        promised: u32,
    },
    /// The schedule is invalid.
    #[error(transparent)]
    Script(#[from] RankScheduleError),
    /// The collective is invalid.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The plan has more channels than the team.
    #[error("the plan orders {found} channels, and hosts have {channels}")]
    Channels {
        /// Channels of the plan.
        found: usize,
        /// Channels of the team.
        channels: usize,
    },
    /// A rank other than 0 proposed a plan.
    #[error("rank {rank} proposes a plan; only rank 0 does")]
    Proposer {
        /// The rank.
        rank: u32,
    },
    /// A proposed plan was not adopted.
    #[error("the plan is not agreed on: {reason}")]
    Refused {
        /// The reason.
        reason: String,
    },
    /// The plan of the next step was not decided before the timeout.
    #[error("it is not decided which plan the next step has; {seconds:.1} s were waited")]
    Undecided {
        /// The time waited, in seconds.
        seconds: f64,
    },
    /// No plan is in force.
    #[error("a step of the plan was to begin, and there is none; expected one to follow first")]
    NoPlan,
    /// The enforcer is closed.
    #[error("the enforcer is closed")]
    Closed,
}

fn within(seconds: Option<f64>) -> String {
    seconds.map_or_else(String::new, |seconds| format!(" within {seconds:.1} s"))
}

impl EnforcerError {
    /// Returns the rank that the error is about, if there is one.
    pub fn rank(&self) -> Option<u32> {
        match *self {
            Self::Join { rank, .. }
            | Self::Lost { rank, .. }
            | Self::Late { rank, .. }
            | Self::Diverged { rank, .. }
            | Self::Reported { rank, .. } => Some(rank),
            _ => None,
        }
    }

    /// Replaces that rank by its display name.
    pub(super) fn called(mut self, names: &[u32]) -> Self {
        if let Self::Join { rank, .. }
        | Self::Lost { rank, .. }
        | Self::Late { rank, .. }
        | Self::Diverged { rank, .. }
        | Self::Reported { rank, .. } = &mut self
        {
            *rank = names.get(*rank as usize).copied().unwrap_or(*rank);
        }
        self
    }
}
