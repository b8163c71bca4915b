//! What a rank knows of plans that are agreed on, and the messages of the agreement.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use control::switch::{Participant, PlanId, Proposer};
use parking_lot::{Condvar, Mutex};

use super::steps::PreparedSchedule;
use super::stream::Subject;

/// Maximum lookahead: the number of further steps for which the plan of a step is guaranteed.
pub(super) const AHEAD: u32 = 4;
/// Longest schedule that is sent, in bytes of text.
pub(super) const SCRIPT_MAX: usize = 32 << 20;

/// A message between two ranks.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) subject: Subject,
    pub(super) text: Vec<u8>,
    /// Number of bytes that have been put onto the lane, or received.
    pub(super) done: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Says {
    Prepare = 1,
    Commit,
    Abort,
    Ready,
    Refused,
}

impl Letter {
    pub(super) fn new(says: Says, plan: PlanId, step: u64, text: &[u8]) -> Self {
        // The text ends with a newline, so that it is never empty.
        let text = [text, b"\n"].concat();
        let (operation, motif, digest) = (says as u32, plan.0 as u32, text.len() as u32);
        Self { subject: Subject { step, operation, motif, digest }, text, done: 0 }
    }

    /// Allocates a message that is to be received.
    pub(super) fn of(subject: Subject) -> io::Result<Self> {
        let length = subject.digest as usize;
        if length == 0 || length > SCRIPT_MAX + 1 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a letter over the limit came"));
        }
        Ok(Self { subject, text: vec![0; length], done: 0 })
    }

    pub(super) fn is_done(&self) -> bool {
        self.done == self.text.len()
    }
}

/// The plans that a rank knows.
#[derive(Debug)]
pub(super) struct AgreedPlans {
    pub(super) state: Mutex<AgreementState>,
    pub(super) changed: Condvar,
}

#[derive(Debug)]
pub(super) struct AgreementState {
    pub(super) rank: u32,
    pub(super) keeper: Participant,
    /// This rank's part of each plan that is in force or may come into force.
    pub(super) parts: BTreeMap<PlanId, Arc<PreparedSchedule>>,
    /// The coordinator's state; on rank 0 only.
    pub(super) proposer: Option<Proposer>,
    /// Text of the proposed schedule, and why a rank refuses it.
    pub(super) proposed: Arc<[u8]>,
    pub(super) refusal: Option<String>,
    /// Outcome of the last proposal: the first step to which it applies, if it was committed.
    pub(super) outcome: Option<(PlanId, Option<u64>)>,
    /// Messages to be sent, each with its target rank.
    pub(super) letters: Vec<(u32, Letter)>,
}

impl AgreedPlans {
    pub(super) fn new(rank: u32, ranks: u32) -> Self {
        let state = AgreementState {
            rank,
            keeper: Participant::new(AHEAD),
            parts: BTreeMap::new(),
            proposer: (rank == 0).then(|| Proposer::new(0..ranks)),
            proposed: Arc::new([]),
            refusal: None,
            outcome: None,
            letters: Vec::new(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Wakes waiting threads, so that they check for failure.
    pub(super) fn wake(&self) {
        drop(self.state.lock());
        self.changed.notify_all();
    }
}
