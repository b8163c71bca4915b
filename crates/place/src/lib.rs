//! Placement and parallelism strategies: assigns shards of a model to devices, and predicts step times.

mod assign;
mod balance;
mod devices;
mod estimate;
mod hybrid;
mod neighbours;
mod ops;
mod pipelined;
mod transformer;

pub use assign::{Assigned, PlacementLimits, Rule, assign, placed_by, placements};
pub use balance::{Balanced, OpShard, ShardCollective};
pub use devices::{PlacedStep, place_devices};
pub use estimate::{DeviceModel, Servers};
pub use hybrid::{ParallelismCut, ParallelismSearch, SimulatedPlacement, Spread, step_of};
pub use neighbours::min_cost_contiguous_range;
pub use ops::{Cost, Costed, Edge, Op, OpError, OpGraph, OpSum, Split};
pub use pipelined::parallel_step;
pub use transformer::{
    Accelerator, Parallelism, StepTime, Transformer, TransformerError, step_time,
};
