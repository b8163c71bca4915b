//! Modelled clients, each of which repeats one call.

use base::Nanos;
use control::Share;

/// The work of one call of a client.
#[derive(Debug, Clone, PartialEq)]
pub enum ClientWork {
    /// One computation, which depends on the previous call's. Source: PATHWAYS §5.1, OpByOp.
    OpByOp,
    /// A program of N computations, each depending on the one before: Chained.
    Chained(u32),
    /// One computation with the work of N: Fused.
    Fused(u32),
    /// A pipeline program of N computations, each on the next host, with a transfer between: PATHWAYS
    /// Figure 7.
    Pipeline(u32),
}

/// A modelled client.
#[derive(Debug, Clone, PartialEq)]
pub struct SimClient {
    /// Its share of device time.
    pub share: Share,
    /// Work of each call.
    pub work: ClientWork,
    /// Device time of one computation, without its collective.
    pub computation: Nanos,
}

impl ClientWork {
    /// Returns the number of computations of one call.
    pub fn computations(&self) -> u32 {
        match self {
            ClientWork::OpByOp => 1,
            ClientWork::Chained(count) | ClientWork::Fused(count) | ClientWork::Pipeline(count) => {
                *count
            }
        }
    }
}
