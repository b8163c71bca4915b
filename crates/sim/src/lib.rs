//! Discrete-event simulation of the production controller in virtual time, over modelled hosts, devices
//! and networks.
//!
//! [`control`] runs unchanged: models supply its events in place of sockets, and its effects go to
//! models. So it takes the same decisions at thousands of devices as it would in production, and a run
//! is deterministic for a given input.

mod binding;
mod client;
mod costs;
pub mod faults;
pub mod fluid;
mod host;
#[cfg(test)]
mod island_tests;
pub mod jobs;
mod modelled;
pub mod network;
mod queue;
mod world;

pub use client::{ClientWork, SimClient};
pub use costs::SimCosts;
pub use world::{DispatchReport, SimSpan, Simulation};
