//! Which device holds which shard of a model, and how long a step takes then.

mod assign;
mod balance;
mod estimate;
mod hybrid;
mod links;
mod neighbours;
mod ops;
mod transformer;

pub use assign::{Assigned, Limits, Rule, assign, placed_by, placements};
pub use balance::{Balanced, Meeting, Shard};
pub use estimate::{Room, Servers};
pub use hybrid::{Carried, Cut, Spread, Wanted, step_of};
pub use links::{Links, ReduceTimes};
pub use neighbours::cheapest_stretch;
pub use ops::{Cost, Costed, Edge, Op, OpError, OpGraph, Split, Sum};
pub use transformer::{
    Accelerator, Parallelism, StepTime, Transformer, TransformerError, step_time,
};
