//! Settings of the controller, and the times that derive from its one timeout.

use base::Nanos;

/// Settings of the controller.
#[derive(Debug, Clone)]
pub struct Config {
    /// Launch window: at most this many launches in flight to one host.
    pub launch_window: u32,
    /// Back-pressure limit: queued commands of a client above which its requests are no longer
    /// read.
    pub queue_limit: usize,
    /// When a client's next launch may be dispatched.
    pub dispatch: Dispatch,
    /// Records what clients do, so that their last step can be captured as a program.
    pub capture: bool,
    /// Lets hosts plan the schedules of the collectives of whole programs.
    pub plan: bool,
    /// Time after which a host that does not answer is lost; all other times derive from it.
    pub timeout: Nanos,
}

impl Config {
    /// How often [`crate::Event::Tick`] is expected.
    pub fn tick_interval(&self) -> Nanos {
        Nanos(self.timeout.0 / 20).min(Nanos::from_millis(500))
    }

    /// How long a host may leave heartbeats unanswered; within the rest of the timeout the error
    /// reaches its clients.
    pub fn heartbeat_limit(&self) -> Nanos {
        Nanos(self.timeout.0 / 5 * 4)
    }

    /// How long a host may complete no launch while it runs one of a disconnected client; then its
    /// island is restarted. Counted from the last progress, not from the disconnect.
    pub(crate) fn grace(&self) -> Nanos {
        Nanos(self.timeout.0 * 3)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            launch_window: 256,
            queue_limit: 4096,
            dispatch: Dispatch::Parallel,
            capture: false,
            plan: false,
            timeout: Nanos(10_000_000_000),
        }
    }
}

/// Dispatch policy: when a client's next launch may be dispatched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dispatch {
    /// As soon as there is capacity for it: its resource requirements are known in advance.
    #[default]
    Parallel,
    /// When the previous launch is enqueued on its devices, as in systems that learn only then what
    /// the next one requires. Source: PATHWAYS §4.5, Figure 4a.
    Sequential,
}
