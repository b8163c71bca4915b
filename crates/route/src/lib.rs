//! Transfers that are known in advance, and a fabric, become a schedule: every vector has its links
//! and its start before anything runs, so nothing is arbitrated, queued or blocked.
//!
//! ```
//! use base::{Bytes, VertexId};
//! use fabric::{Dragonfly, LinkModel};
//! use route::{Timing, Transfer, route};
//!
//! let node = Dragonfly::new(8, LinkModel::default()).unwrap();
//! let transfer = Transfer::new(VertexId(0), VertexId(5), Bytes(1 << 20));
//! let schedule = route(node.network(), &[transfer], Timing::default()).unwrap();
//! assert_eq!(schedule.trains.len(), 7, "one link there, and six chips between");
//! ```
//!
//! Source: the multi-TSP system §4.

mod all_to_all;
mod bound;
mod gather;
mod links;
mod paths;
mod planner;
mod schedule;
mod verify;

pub use all_to_all::all_to_all;
pub use bound::{busiest, lower_bound};
pub use gather::{Collective, all_gather};
pub use planner::{RouteError, route};
pub use schedule::{Hop, Schedule, Timing, Train, Transfer};
pub use verify::{Fault, verify};
