//! What was wrong with each island and when, by which errors and waits are judged.

use std::collections::BTreeMap;

use base::Nanos;

/// Longest wait of a client on whose islands nothing is wrong.
pub(super) const WAIT_LIMIT: Nanos = Nanos::from_millis(1000);
/// Time after which an island's clients have caught up.
const RECOVERY: Nanos = Nanos::from_millis(1000);

/// Since when a value depends on each island.
pub(super) type IslandsSince = BTreeMap<usize, Nanos>;

/// Merges what two values depend on.
pub(super) fn joined(one: &IslandsSince, other: &IslandsSince) -> IslandsSince {
    let mut all = one.clone();
    for (&island, &since) in other {
        let known = all.entry(island).or_insert(since);
        *known = since.min(*known);
    }
    all
}

#[derive(Debug)]
struct Span {
    island: usize,
    until: Option<Nanos>,
}

/// Spans in which something was wrong with islands.
#[derive(Debug, Default)]
pub(super) struct Troubles {
    /// Hosts stopped or cut off, and islands lost.
    slow: Vec<Span>,
    /// Islands lost, until they are up again.
    down: Vec<Span>,
}

impl Troubles {
    /// Hosts of an island do not answer within this span.
    pub fn slow(&mut self, island: usize, until: Nanos) {
        self.slow.push(Span { island, until: Some(until) });
    }

    /// An island is lost.
    pub fn lost(&mut self, island: usize) {
        if !self.is_down(island) {
            self.slow.push(Span { island, until: None });
            self.down.push(Span { island, until: None });
        }
    }

    /// An island is up again.
    pub fn restored(&mut self, island: usize, now: Nanos) {
        for span in self.slow.iter_mut().chain(&mut self.down) {
            if span.island == island && span.until.is_none() {
                span.until = Some(now);
            }
        }
    }

    fn is_down(&self, island: usize) -> bool {
        self.down.iter().any(|span| span.island == island && span.until.is_none())
    }

    /// Whether a loss explains that a value is an error.
    pub fn explain_error(&self, lineage: &IslandsSince) -> bool {
        self.down.iter().any(|span| {
            lineage
                .get(&span.island)
                .is_some_and(|&since| span.until.is_none_or(|end| end >= since))
        })
    }

    /// Whether something explains that a client of these islands has waited since then.
    pub fn explain_wait(&self, islands: &[usize], since: Nanos) -> bool {
        self.slow.iter().any(|span| {
            let end = span.until.map(|end| Nanos(end.0 + RECOVERY.0));
            islands.contains(&span.island) && end.is_none_or(|end| end >= since)
        })
    }
}
