//! The event queue of a discrete-event simulation.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use base::Nanos;

/// Events in the order of their times; those of one time in the order in which they were added.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    added: u64,
    /// Number of the event that was removed last.
    popped: u64,
}

#[derive(Debug)]
struct Entry<E> {
    key: (Nanos, u64),
    event: E,
}

impl<E> EventQueue<E> {
    pub fn new() -> Self {
        Self { heap: BinaryHeap::new(), added: 0, popped: 0 }
    }

    /// Adds an event.
    pub fn push(&mut self, when: Nanos, event: E) {
        self.added += 1;
        self.heap.push(Reverse(Entry { key: (when, self.added), event }));
    }

    /// Removes the next event.
    pub fn pop(&mut self) -> Option<(Nanos, E)> {
        let Reverse(entry) = self.heap.pop()?;
        self.popped = entry.key.1;
        Some((entry.key.0, entry.event))
    }

    /// Puts the event that was removed last off; it stays ahead of those that were added later.
    pub fn postpone(&mut self, when: Nanos, event: E) {
        self.heap.push(Reverse(Entry { key: (when, self.popped), event }));
    }

    /// Returns the time of the next event.
    pub fn next_time(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse(entry)| entry.key.0)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key.cmp(&other.key)
    }
}
