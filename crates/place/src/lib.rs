//! Which device holds which shard of a model, and how long a step takes then.

mod assign;
mod balance;
mod estimate;
mod hybrid;
mod links;
mod ops;
mod tasks;
mod transformer;

pub use assign::{Assigned, Limits, Rule, assign, placed_by};
pub use balance::{Balanced, Shard};
pub use estimate::Room;
pub use hybrid::{Spread, Wanted, tasks};
pub use links::{Links, ReduceTimes};
pub use ops::{Cost, Costed, Edge, Op, OpError, OpGraph, Sum};
pub use tasks::{Job, Next, TaskError, TaskGraph};
pub use transformer::{
    Accelerator, Parallelism, StepTime, Transformer, TransformerError, step_time,
};
