//! How long messages take, and what stands in their way.

use base::{Nanos, Random};

use super::host::Process;

/// A machine of one host.
#[derive(Debug, Default)]
pub(super) struct HostMachine {
    pub process: Option<Process>,
    /// Number of processes so far.
    pub incarnation: u64,
    /// Whether the controller has a connection to the process.
    pub is_connected: bool,
    /// End of a stop of its process.
    pub stopped_until: Nanos,
    /// End of a cut of its network.
    pub cut_until: Nanos,
    /// When the last message on the control connection arrives, to and from the host.
    pub to_host: Nanos,
    pub to_controller: Nanos,
}

impl HostMachine {
    /// Whether this process is there.
    pub fn is_running(&self, incarnation: u64) -> bool {
        self.process.as_ref().is_some_and(|process| process.incarnation == incarnation)
    }
}

/// Returns the time that a message takes.
pub(super) fn latency(random: &mut Random) -> Nanos {
    let micros = match random.below(40) {
        0 => 1_000 + random.below(5_000),
        1..=4 => 200 + random.below(800),
        _ => 5 + random.below(100),
    };
    Nanos(micros * 1000)
}
