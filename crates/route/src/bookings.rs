//! Reservation tables of links and chips.

use std::collections::BTreeMap;

use base::Ticks;

/// Disjoint booked spans of each of several resources.
#[derive(Clone, Debug)]
pub(crate) struct Bookings {
    /// For each resource, the ends of spans, keyed by start.
    taken: Vec<BTreeMap<u64, u64>>,
}

impl Bookings {
    /// Creates `count` resources, all free.
    pub fn new(count: usize) -> Self {
        Self { taken: vec![BTreeMap::new(); count] }
    }

    /// Returns the first time from `from` on at which a resource is free for `length`. O(spans after
    /// it).
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

    /// Books a free span of a resource.
    pub fn take(&mut self, which: usize, start: Ticks, length: u64) {
        let taken = &mut self.taken[which];
        let (mut begin, mut end) = (start.0, start.0 + length);
        // Adjacent spans are merged, so that searches of a long schedule stay short.
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
