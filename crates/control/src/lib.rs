//! The single controller as a state machine without input or output of its own.
//!
//! [`Controller::handle`] takes an [`Event`] (what a client asked, what a host reported, what
//! arrived) and the time, and appends [`Effect`]s: commands to hosts, replies to clients. It
//! owns no socket, thread or clock, so the same code serves real hosts and simulated ones.
//!
//! Source: PATHWAYS §4.1-4.6. Differs from the paper: 1. One scheduler for all islands, whose
//! decisions travel as numbers that every host checks, instead of one for each island that talks
//! to executors over a dataflow engine. 2. A host blocks its launches, in order, on an input still
//! in flight; the order is one over all islands, so no cycle of waits can form.

mod accounts;
mod arrays;
mod arrivals;
mod capture;
mod checks;
mod clients;
mod collective_deps;
mod command;
mod controller;
mod dataflow;
mod executables;
mod hosts;
mod inputs;
mod islands;
mod lower;
mod memory;
mod migration;
mod objects;
mod overview;
mod plans;
mod programs;
mod protocol;
mod renewal;
mod reshard;
mod scheduler;
mod segments;
mod slices;
mod sparse;
mod stripes;
pub mod switch;
mod transfer;
mod watchdog;

pub use accounts::Share;
pub use checks::RANK_LIMIT;
pub use command::{
    Acknowledge, Command, CommandTicket, CompileRole, Group, PutSource, RelayHop, ShardPiece,
    ShardSend, SparsePart,
};
pub use controller::{Config, Controller, Dispatch};
pub use islands::IslandState;
pub use overview::{ClientOverview, HostOverview, IslandOverview, Overview};
pub use plans::PlanOverview;
pub use protocol::{
    Compiled, CompiledSharding, CopySemantics, CostAnalysis, Effect, Event, FunctionCode, Handle,
    HostInfo, HostReply, MemoryStats, OutputSpec, PutShard, Reply, Report, Request, RequestId,
    ShardSource,
};
pub use slices::{Slice, SliceRequest};
