//! Connections whose peers have not proved anything yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::AbortHandle;

/// Maximum number of connections of a listener whose peers have not proved anything. All hosts of the
/// largest cluster may come at once, and those that came first are the next to be done.
pub const STRANGERS_MAX: usize = 2048;

/// What becomes of a connection: its task keeps it, or its listener evicts it, whichever comes first.
#[derive(Clone, Default)]
pub struct Decision(Arc<AtomicBool>);

impl Decision {
    /// Decides; returns whether nothing had been decided before.
    pub fn decide(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }

    fn is_made(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Connections without a proof, of which the oldest are evicted for others: honest peers take
/// milliseconds, so silent ones take no place of theirs.
pub struct Strangers<T> {
    waiting: VecDeque<(T, AbortHandle, Decision)>,
}

impl<T> Default for Strangers<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new() }
    }
}

impl<T> Strangers<T> {
    /// Adds the connection of a peer, which a task serves.
    pub fn add(&mut self, peer: T, task: AbortHandle, decision: Decision) {
        self.waiting.push_back((peer, task, decision));
    }

    /// Evicts the oldest, so that one more can be added; returns whose connections were closed.
    pub fn make_room(&mut self) -> Vec<T> {
        self.waiting.retain(|(_, task, decision)| !decision.is_made() && !task.is_finished());
        let mut evicted = Vec::new();
        while self.waiting.len() >= STRANGERS_MAX
            && let Some((peer, task, decision)) = self.waiting.pop_front()
        {
            if decision.decide() {
                task.abort();
                evicted.push(peer);
            }
        }
        evicted
    }
}
