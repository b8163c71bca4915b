//! Static routing and scheduling: transfers that are known in advance, and a fabric, become a schedule
//! in which every vector has its links and its start before anything runs, so nothing is arbitrated,
//! queued or blocked.
//!
//! ```
//! use base::{Bytes, VertexId};
//! use topology::{Dragonfly, LinkModel};
//! use route::{Timing, RouteTransfer, route};
//!
//! let node = Dragonfly::new(8, LinkModel::default()).unwrap();
//! let transfer = RouteTransfer::new(VertexId(0), VertexId(5), Bytes(1 << 20));
//! let plan = route(node.network(), [transfer], Timing::default()).unwrap();
//! assert_eq!(plan.schedule.trains.len(), 7, "one link there, and six chips between");
//! ```
//!
//! Source: the multi-TSP system §4.

mod all_to_all;
mod bookings;
mod bound;
mod collectives;
mod earliest;
mod fill;
mod forest;
mod layout;
mod paths;
mod planner;
mod schedule;
mod staged;
mod step;
mod task;
mod text;
mod trees;
mod verify;

pub use all_to_all::all_to_all;
pub use bound::{busiest, busy, lower_bound};
pub use collectives::{all_gather, all_reduce, all_reduce_on, broadcast, reduce_scatter};
pub use layout::{Layout, RoutedCollective};
pub use planner::{RouteError, route};
pub use schedule::{Hop, RoutePlan, Schedule, Timing, Train};
pub use step::{StepRouteError, StepSchedule, route_step};
pub use task::{Computation, RouteTransfer, Task, Tasks};
pub use text::ScheduleTextError;
pub use verify::{Fault, verify};
