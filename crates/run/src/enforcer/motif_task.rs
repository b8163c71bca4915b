//! One motif as one rank executes it, and its name in errors.

use std::time::Duration;

use parking_lot::Mutex;
use plan::{Round, RoundPart};

use super::EnforcerError;
use super::stream::Subject;
use super::sums::Elements;
use super::work::CollectiveBuffer;

/// Grace period that a rank adds to its timeout for each round that it has completed.
///
/// The rank that waits for the stuck rank itself must time out first: it names the culprit, and ends
/// the waits of all others. Only if it is lost too do the others wait this long, so the grace period
/// may be longer than a thread is preempted on busy processors.
pub(super) const ROUND_GRACE: Duration = Duration::from_secs(1);

/// One motif of one operation of one step, on one rank.
#[derive(Debug)]
pub(super) struct MotifTask<'a> {
    pub rounds: &'a [Round],
    pub subject: Subject,
    /// Display name of the operation.
    pub name: &'a str,
    pub elements: Elements,
    pub work: &'a CollectiveBuffer,
    /// Why the elements are invalid (poisoned), if they are.
    pub poison: &'a Mutex<Option<String>>,
}

impl MotifTask<'_> {
    pub fn start(&self, part: &RoundPart) -> usize {
        part.start as usize * self.elements.size()
    }

    pub fn bytes(&self, part: &RoundPart) -> usize {
        part.count as usize * self.elements.size()
    }
}

impl std::fmt::Display for MotifTask<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Subject { step, motif, .. } = self.subject;
        write!(f, "{} in step {step} (motif {motif})", self.name)
    }
}

/// Builds the error for a rank that executes something else than this one.
pub(super) fn diverged(
    rank: u32,
    (found, name): (&Subject, Option<String>),
    errand: &MotifTask<'_>,
) -> EnforcerError {
    let same = Subject { digest: errand.subject.digest, ..*found } == errand.subject;
    let Subject { step, operation, motif, .. } = *found;
    let found = match name {
        Some(name) if name == errand.name && same => format!("another size or plan of {name}"),
        Some(name) => format!("{name} in step {step} (motif {motif})"),
        None if same => "another collective or plan of it".to_owned(),
        None => format!("motif {motif} of operation {operation} in step {step}"),
    };
    EnforcerError::Diverged {
        rank,
        found,
        expected: format!("operation {} ({errand})", errand.subject.operation),
    }
}
