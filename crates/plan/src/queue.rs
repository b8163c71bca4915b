//! What a channel carries, step after step, when steps come one by one.
//!
//! A slot that is ahead is for a later step, which may never come. Whoever begins a step says how many
//! more will surely follow it, to all ranks alike; a slot whose step is farther than that is left for
//! the first turn that knows of it, where it comes before everything else. So all ranks carry motifs in
//! one order, and nobody waits for a step that is not there.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::schedule::Slot;
use crate::script::RankSchedule;

/// What a channel carries next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueEntry {
    /// For which step.
    pub step: u64,
    /// Of which operation.
    pub operation: u32,
    /// Which motif.
    pub motif: u32,
}

/// The order of one channel over steps that are announced one by one.
///
/// ```
/// # use std::sync::Arc;
/// use ir::Collective;
/// use plan::{ChannelQueue, RankSchedule};
/// let script = Arc::new(RankSchedule::single(&Collective::broadcast(2, 8, 0).unwrap(), 0));
/// let mut course = ChannelQueue::new(0);
/// course.announce(&script, 0);
/// assert_eq!(course.next().unwrap().step, 0);
/// assert_eq!(course.next(), None, "nothing more is known of");
/// ```
#[derive(Debug)]
pub struct ChannelQueue {
    channel: usize,
    /// Steps that have been announced.
    steps: u64,
    /// The first step that no turn has known of yet.
    known: u64,
    stops: VecDeque<QueueEntry>,
}

impl ChannelQueue {
    /// That of a channel before any step.
    pub fn new(channel: usize) -> Self {
        Self { channel, steps: 0, known: 0, stops: VecDeque::new() }
    }

    /// The next step has this script, and so many of the same follow it for sure.
    ///
    /// # Panics
    /// A step before has said that more would follow, and this one knows of fewer.
    pub fn announce(&mut self, script: &Arc<RankSchedule>, following: u32) {
        let turn = self.steps;
        self.steps += 1;
        let line = script.order.get(self.channel).map_or(&[][..], Vec::as_slice);
        let until = turn + u64::from(following) + 1;
        assert!(until >= self.known, "a step that was promised does not come");
        // What earlier turns would have carried, had they known.
        let mut late: Vec<(u64, usize, QueueEntry)> = Vec::new();
        for step in self.known..until {
            for (place, slot) in line.iter().enumerate() {
                if u64::from(slot.ahead) > step - turn {
                    // The turn it was meant for, counted so that none is negative.
                    let meant = step + u64::from(u32::MAX - slot.ahead);
                    late.push((meant, place, stop(step, slot)));
                }
            }
        }
        late.sort_by_key(|&(meant, place, _)| (meant, place));
        self.stops.extend(late.into_iter().map(|(_, _, stop)| stop));
        let due = line.iter().filter(|slot| turn + u64::from(slot.ahead) < until);
        self.stops.extend(due.map(|slot| stop(turn + u64::from(slot.ahead), slot)));
        self.known = until;
    }

    /// What comes next, if it is known.
    pub fn peek(&self) -> Option<QueueEntry> {
        self.stops.front().copied()
    }

    /// What comes next, if it is known; it comes once.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<QueueEntry> {
        self.stops.pop_front()
    }
}

fn stop(step: u64, slot: &Slot) -> QueueEntry {
    QueueEntry { step, operation: slot.task, motif: slot.motif }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn script(aheads: &[u32]) -> Arc<RankSchedule> {
        let slot = |(task, &ahead): (u32, &u32)| Slot { ahead, task, motif: 0 };
        let line = (0..).zip(aheads).map(slot).collect();
        Arc::new(RankSchedule { operations: Vec::new(), order: vec![line] })
    }

    proptest! {
        /// However steps are announced, each slot of each comes once, those of one slot in the order of
        /// steps, and none before its step is known of.
        #[test]
        fn every_slot_of_every_step_comes_once(
            aheads in prop::collection::vec(0..3_u32, 1..6),
            promises in prop::collection::vec(0..4_u32, 1..12),
        ) {
            let script = script(&aheads);
            let mut course = ChannelQueue::new(0);
            let steps = promises.len() as u64;
            let (mut known, mut seen) = (0, vec![0_u64; aheads.len()]);
            for (turn, promise) in (0..).zip(promises) {
                known = (turn + u64::from(promise) + 1).max(known).min(steps);
                course.announce(&script, (known - turn - 1) as u32);
                while let Some(stop) = course.next() {
                    prop_assert!(stop.step < known);
                    prop_assert_eq!(seen[stop.operation as usize], stop.step);
                    seen[stop.operation as usize] += 1;
                }
                // What belongs to this step or earlier ones has come.
                prop_assert!(seen.iter().all(|&seen| seen > turn));
            }
            prop_assert!(seen.iter().all(|&seen| seen == steps));
        }
    }

    #[test]
    fn with_all_known_the_order_is_that_of_the_plan() {
        let mut course = ChannelQueue::new(0);
        let script = script(&[1, 0]);
        let mut order = Vec::new();
        for turn in 0..3 {
            course.announce(&script, 2 - turn);
            while let Some(stop) = course.next() {
                order.push((stop.step, stop.operation));
            }
        }
        assert_eq!(order, [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]);
    }
}
