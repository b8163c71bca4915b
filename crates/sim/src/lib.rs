//! The production controller in virtual time, over modelled hosts, devices and networks.
//!
//! Nothing of [`control`] is replaced: the events it is given come from models instead of sockets,
//! and its effects go to models. So what it decides at thousands of devices is what it would
//! decide there, and every run is the same for the same input.

mod client;
mod costs;
pub mod fluid;
mod host;
pub mod jobs;
pub mod network;
mod world;

pub use client::{ClientWork, SimClient};
pub use costs::SimCosts;
pub use world::{DispatchReport, SimSpan, Simulation};
