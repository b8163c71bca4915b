//! When links and chips are taken.

use std::collections::BTreeMap;

use base::Ticks;

/// Spans in which each of several things is taken, apart from each other.
#[derive(Clone, Debug)]
pub(crate) struct Bookings {
    /// For each, the end of each span by its start.
    taken: Vec<BTreeMap<u64, u64>>,
}

impl Bookings {
    /// So many, all free.
    pub fn new(count: usize) -> Self {
        Self { taken: vec![BTreeMap::new(); count] }
    }

    /// The first time from `from` on at which one is free for so long. O(spans after it).
    pub fn free(&self, which: usize, from: Ticks, length: u64) -> Ticks {
        let taken = &self.taken[which];
        let mut start = from.0;
        if let Some((_, &end)) = taken.range(..=start).next_back() {
            start = start.max(end);
        }
        for (&begin, &end) in taken.range(start..) {
            if begin - start >= length {
                break;
            }
            start = end;
        }
        Ticks(start)
    }

    /// Takes one that is free then.
    pub fn take(&mut self, which: usize, start: Ticks, length: u64) {
        let taken = &mut self.taken[which];
        let (mut begin, mut end) = (start.0, start.0 + length);
        // Spans that touch become one, or a long schedule would be looked through piece by piece.
        if let Some((&before, &until)) = taken.range(..=begin).next_back() {
            debug_assert!(until <= begin, "it is taken twice");
            if until == begin {
                begin = before;
            }
        }
        if let Some(until) = taken.remove(&end) {
            end = until;
        }
        taken.insert(begin, end);
    }
}
