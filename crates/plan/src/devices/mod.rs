//! Planning of MPMD steps, whose devices differ: how each kind of communication is executed, and when.
//!
//! A device computes one node at a time. Each device has channels: a transfer occupies a channel at
//! both of its ends, and a collective one at each of its devices. A piece of communication is issued
//! when all of its resources are free. Entries have the same order in all queues, so the first of all
//! can always be issued (no deadlock).
//!
//! Source: SYNDICATE §4.3; the graphs are those of FlexFlow's task simulator.

pub(crate) mod apply;
pub(crate) mod problem;
pub(crate) mod run;
pub(crate) mod search;
