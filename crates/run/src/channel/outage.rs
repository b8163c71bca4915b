//! A time in which nothing reaches a peer.

use std::io;
use std::time::{Duration, Instant};

/// Time for which delivery to a peer is tried while nothing reaches it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time after an attempt within which its failure stands for others.
const FRESH: Duration = Duration::from_secs(1);

/// Whether, and since when, a peer is not reached, from the outcomes of all that is sent to it.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    reached: Option<Instant>,
    current: Option<Current>,
}

#[derive(Debug)]
struct Current {
    since: Instant,
    tried: Instant,
    why: (io::ErrorKind, String),
}

/// Whether a peer may be reached again after such an error.
pub(crate) fn is_outage(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut, WouldBlock};
    let kinds = [HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut, WouldBlock];
    kinds.contains(&error.kind())
}

impl Outage {
    /// Notes that the peer was reached.
    pub fn end(&mut self, now: Instant) {
        self.reached = Some(now);
        self.current = None;
    }

    /// Notes that an attempt has failed, in which the peer did not answer for `silent`; returns whether
    /// it is worth another one.
    pub fn note(&mut self, now: Instant, silent: Duration, error: &io::Error) -> bool {
        let begun = now.checked_sub(silent).max(self.reached).unwrap_or(now);
        // An outage that was long ago may have ended since.
        let before =
            self.current.as_ref().filter(|current| now - current.tried < PATIENCE + silent);
        let since = before.map_or(begun, |current| current.since.min(begun));
        self.current = Some(Current { since, tried: now, why: (error.kind(), error.to_string()) });
        now - since < PATIENCE
    }

    /// Returns the error of an attempt if it stands for others: always if they would not insist, and
    /// otherwise if it is of this moment, and the outage has lasted too long.
    pub fn verdict(&self, now: Instant, insists: bool) -> Option<io::Error> {
        let current = self.current.as_ref()?;
        let tried = now - current.tried;
        let is_final = tried < FRESH && now - current.since >= PATIENCE;
        let stands = is_final || (!insists && tried < PATIENCE);
        stands.then(|| io::Error::new(current.why.0, current.why.1.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_waits_fails_once_nothing_has_come_through_for_a_minute() {
        let (mut outage, start) = (Outage::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let silent = io::Error::from(io::ErrorKind::TimedOut);
        assert!(outage.verdict(at(0), false).is_none());
        assert!(outage.note(at(10), Duration::from_secs(5), &silent), "since 5 s");
        assert!(outage.verdict(at(10), true).is_none(), "others try as well");
        assert!(outage.verdict(at(10), false).is_some(), "unless they need not");
        assert!(outage.note(at(64), Duration::from_secs(2), &silent));
        assert!(!outage.note(at(65), Duration::from_secs(1), &silent));
        let error = outage.verdict(at(65), true).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(outage.verdict(at(67), true).is_none(), "one has to try");
        assert!(!outage.note(at(68), Duration::from_secs(1), &silent), "and does so once");
        outage.end(at(70));
        assert!(outage.verdict(at(70), false).is_none());
        assert!(outage.note(at(90), Duration::from_secs(80), &silent), "since 70 s");
        assert!(outage.note(at(300), Duration::from_secs(1), &silent), "another outage");
    }
}
