//! Fault injection by seed: the production controller, with its liveness, over modelled hosts that
//! execute commands on values.
//!
//! Hosts are killed, stopped for a while and cut off, clients leave, islands come back, at times that
//! the seed decides, while clients make, move, compute and read arrays. Every run checks that
//! - the hosts of an island launch in one order;
//! - every request is answered, within a second if nothing is wrong with the client's islands;
//! - what is read has the right value, or an error that a loss explains;
//! - nothing is freed twice, and nothing is left on the hosts once all clients have gone.
//!
//! Modelled: each shard of an array is one number; a computation mixes all shards of its argument, so
//! that a wrong input of one host is seen on all. Messages take random times, and wait while an end is
//! stopped or cut off. Not modelled: memory limits, inputs of hosts, collectives between islands.

mod checks;
mod event;
mod host;
mod network;
mod system;
mod user;
mod values;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use base::Nanos;

/// Faults that were injected, and what happened in a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Host processes that were killed.
    pub kills: u64,
    /// Host processes that were stopped for a while.
    pub stalls: u64,
    /// Hosts that were cut off from all others for a while.
    pub partitions: u64,
    /// Clients that left at once.
    pub departures: u64,
    /// Islands that were removed while clients used them.
    pub removals: u64,
    /// Times at which the controller's machine was frozen.
    pub freezes: u64,
    /// Islands that the controller lost.
    pub losses: u64,
    /// Inputs that some hosts of a computation had lost.
    pub lost_inputs: u64,
    /// Requests of clients.
    pub requests: u64,
    /// Requests that were answered by an error.
    pub errors: u64,
    /// Arrays whose values were read and right.
    pub reads: u64,
}

impl FaultCounts {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        let sums = [
            &mut self.kills,
            &mut self.stalls,
            &mut self.partitions,
            &mut self.departures,
            &mut self.removals,
            &mut self.freezes,
            &mut self.losses,
            &mut self.lost_inputs,
            &mut self.requests,
            &mut self.errors,
            &mut self.reads,
        ];
        for (sum, (_, more)) in sums.into_iter().zip(other.by_name()) {
            *sum += more;
        }
    }

    /// Returns each count with what it counts.
    pub fn by_name(&self) -> [(&'static str, u64); 11] {
        [
            ("processes killed", self.kills),
            ("processes stopped for a while", self.stalls),
            ("hosts cut off for a while", self.partitions),
            ("clients that left", self.departures),
            ("islands removed", self.removals),
            ("freezes of the controller", self.freezes),
            ("islands lost", self.losses),
            ("inputs lost by some hosts of a computation", self.lost_inputs),
            ("requests", self.requests),
            ("requests answered by an error", self.errors),
            ("values read and right", self.reads),
        ]
    }
}

/// An invariant that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenInvariant {
    /// Seed of the run.
    pub seed: u64,
    /// Time in the run.
    pub at: Nanos,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for BrokenInvariant {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "seed {} at {:.6} s: {}", self.seed, self.at.0 as f64 / 1e9, self.what)
    }
}

/// The result of one run.
#[derive(Debug)]
pub struct FaultRun {
    /// What was injected and what happened.
    pub counts: FaultCounts,
    /// What happened in order, if it was asked for.
    pub log: Vec<String>,
    /// The first invariant that did not hold.
    pub violation: Option<BrokenInvariant>,
    /// Longest wait of a client on whose islands nothing was wrong.
    pub longest_wait: Nanos,
}

/// Runs one seed.
///
/// ```
/// let run = sim::faults::run(7, true);
/// assert!(run.violation.is_none(), "{:?}", run.violation);
/// assert!(run.log.iter().any(|line| line.contains("client 1 requests")));
/// assert_eq!(run.log, sim::faults::run(7, true).log);
/// ```
pub fn run(seed: u64, with_log: bool) -> FaultRun {
    let mut system = system::FaultySystem::new(seed, with_log);
    let ended = catch_unwind(AssertUnwindSafe(|| system.run()));
    if let Err(panic) = ended {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        system.violate(format!("panic: {}", text.unwrap_or_default()));
    }
    system.finish()
}
