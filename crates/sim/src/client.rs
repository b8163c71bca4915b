//! Modelled clients: what they run, again and again.

use base::Nanos;
use control::Share;

/// What one call of a client does.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
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
pub struct Client {
    /// What it is entitled to.
    pub share: Share,
    /// What it runs.
    pub work: Work,
    /// Time of one computation on its devices, without its collective.
    pub computation: Nanos,
}

impl Work {
    /// Computations of one call.
    pub fn computations(&self) -> u32 {
        match self {
            Work::OpByOp => 1,
            Work::Chained(count) | Work::Fused(count) | Work::Pipeline(count) => *count,
        }
    }
}
