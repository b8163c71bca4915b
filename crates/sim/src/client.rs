//! Modelled clients: what they run, again and again.

use base::Nanos;
use control::Share;

/// What one call of a client does.
#[derive(Debug, Clone, PartialEq)]
pub enum ClientWork {
    /// One computation, which follows the last one. Source: PATHWAYS §5.1, OpByOp.
    OpByOp,
    /// A program of so many computations, each of which follows the one before: Chained.
    Chained(u32),
    /// One computation that is as much work as so many: Fused.
    Fused(u32),
    /// A program of so many computations, each on the next host, with a transfer between:
    /// PATHWAYS Figure 7.
    Pipeline(u32),
}

/// A client.
#[derive(Debug, Clone, PartialEq)]
pub struct SimClient {
    /// What it is entitled to.
    pub share: Share,
    /// What it runs.
    pub work: ClientWork,
    /// Time of one computation on its devices, without its collective.
    pub computation: Nanos,
}

impl ClientWork {
    /// Computations of one call.
    pub fn computations(&self) -> u32 {
        match self {
            ClientWork::OpByOp => 1,
            ClientWork::Chained(count) | ClientWork::Fused(count) | ClientWork::Pipeline(count) => {
                *count
            }
        }
    }
}
