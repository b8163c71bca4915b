//! The single controller as a deterministic state machine that performs no I/O of its own.
//!
//! [`Controller::handle`] takes an [`Event`] (a client's request, a host's report, an arrived
//! upload) and the current time, and returns [`Effect`]s: commands to hosts, replies to clients. It
//! owns no socket, thread or clock, so the same code serves real hosts and the simulator.
//!
//! Source: PATHWAYS §4.1-4.6. Differs from the paper: 1. One scheduler for all islands, whose
//! decisions are sent as sequence numbers that every host checks, instead of one scheduler per
//! island that talks to executors over a dataflow engine. 2. A host blocks its launches, in order,
//! on an input still in flight; the launch order is total over all islands, so no cyclic wait
//! (deadlock) can form.

mod accounts;
mod arrivals;
mod capture;
mod checks;
mod clients;
mod collective_deps;
mod colocated;
mod config;
mod controller;
mod dataflow;
mod events;
mod hosts;
mod incarnations;
mod inputs;
mod islands;
mod lineage;
mod liveness;
mod lower;
mod memory;
mod migration;
mod objects;
mod overview;
mod partition;
mod pending;
mod plans;
mod programs;
mod reshard;
mod resharding;
mod scheduler;
mod segments;
mod slices;
mod sources;
mod sparse;
mod stripes;
mod submissions;
pub mod switch;
mod transfer;
mod watchdog;

pub use accounts::Share;
pub use checks::RANK_LIMIT;
pub use colocated::Colocated;
pub use config::{Config, Dispatch};
pub use controller::Controller;
pub use events::{
    CopySemantics, Effect, Event, Handle, PutShard, Reply, Request, RequestId, ShardSource,
};
pub use islands::IslandState;
pub use overview::{ClientOverview, HostOverview, IslandOverview, Overview};
pub use plans::PlanOverview;
pub use resharding::Resharding;
pub use slices::{Slice, SliceRequest};
