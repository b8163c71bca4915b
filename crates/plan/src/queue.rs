//! The queue of one channel at run time, when steps are announced one by one.
//!
//! A slot that is ahead is for a later step, which may never come. The caller that begins a step
//! announces how many more steps are certain to follow, the same number on all ranks; a slot whose step
//! is farther ahead is deferred to the first turn that knows of it, before everything else. So all
//! ranks carry motifs in one order, and none waits for a step that does not come.

use std::collections::VecDeque;

use crate::schedule::Slot;

/// A motif to be issued on a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueEntry {
    /// Number of the step.
    pub step: u64,
    /// Index of the operation.
    pub operation: u32,
    /// Index of the motif within the operation.
    pub motif: u32,
}

/// The order of one channel over steps that are announced one by one.
///
/// ```
/// # use std::sync::Arc;
/// use ir::Collective;
/// use plan::{ChannelQueue, RankSchedule};
/// let script = Arc::new(RankSchedule::single(&Collective::broadcast(2, 8, 0).unwrap(), 0));
/// let mut course = ChannelQueue::new();
/// course.announce(script.slots(0), 0);
/// assert_eq!(course.next().unwrap().step, 0);
/// assert_eq!(course.next(), None, "nothing more is known of");
/// ```
#[derive(Debug, Default)]
pub struct ChannelQueue {
    /// Number of announced steps.
    steps: u64,
    /// The first step that no turn has known of yet.
    known: u64,
    stops: VecDeque<QueueEntry>,
}

impl ChannelQueue {
    /// The queue of a channel before any step.
    pub fn new() -> Self {
        Self::default()
    }

    /// Announces the next step, with the channel's slots in its schedule; `following` more steps of the same are certain to
    /// follow.
    ///
    /// # Panics
    /// An earlier call announced more steps than this one.
    pub fn announce(&mut self, slots: &[Slot], following: u32) {
        let turn = self.steps;
        self.steps += 1;
        let until = turn + u64::from(following) + 1;
        assert!(until >= self.known, "a step that was promised does not come");
        // Slots that earlier turns would have carried, had they known of these steps.
        let mut late: Vec<(u64, usize, QueueEntry)> = Vec::new();
        for step in self.known..until {
            for (place, slot) in slots.iter().enumerate() {
                if u64::from(slot.ahead) > step - turn {
                    // The turn it was meant for, offset so that it is never negative.
                    let meant = step + u64::from(u32::MAX - slot.ahead);
                    late.push((meant, place, stop(step, slot)));
                }
            }
        }
        late.sort_by_key(|&(meant, place, _)| (meant, place));
        self.stops.extend(late.into_iter().map(|(_, _, stop)| stop));
        let due = slots.iter().filter(|slot| turn + u64::from(slot.ahead) < until);
        self.stops.extend(due.map(|slot| stop(turn + u64::from(slot.ahead), slot)));
        self.known = until;
    }

    /// Returns the next motif without taking it; none if no more are known.
    pub fn peek(&self) -> Option<QueueEntry> {
        self.stops.front().copied()
    }

    /// Takes the next motif; none if no more are known.
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

    fn slots(aheads: &[u32]) -> Vec<Slot> {
        let slot = |(task, &ahead): (u32, &u32)| Slot { ahead, task, motif: 0 };
        (0..).zip(aheads).map(slot).collect()
    }

    proptest! {
        /// However steps are announced, each slot of each step comes once, those of one slot in the
        /// order of steps, and none before its step is known.
        #[test]
        fn every_slot_of_every_step_comes_once(
            aheads in prop::collection::vec(0..3_u32, 1..6),
            promises in prop::collection::vec(0..4_u32, 1..12),
        ) {
            let slots = slots(&aheads);
            let mut course = ChannelQueue::new();
            let steps = promises.len() as u64;
            let (mut known, mut seen) = (0, vec![0_u64; aheads.len()]);
            for (turn, promise) in (0..).zip(promises) {
                known = (turn + u64::from(promise) + 1).max(known).min(steps);
                course.announce(&slots, (known - turn - 1) as u32);
                while let Some(stop) = course.next() {
                    prop_assert!(stop.step < known);
                    prop_assert_eq!(seen[stop.operation as usize], stop.step);
                    seen[stop.operation as usize] += 1;
                }
                // All slots of this step and of earlier ones have come.
                prop_assert!(seen.iter().all(|&seen| seen > turn));
            }
            prop_assert!(seen.iter().all(|&seen| seen == steps));
        }
    }

    #[test]
    fn with_all_known_the_order_is_that_of_the_plan() {
        let mut course = ChannelQueue::new();
        let slots = slots(&[1, 0]);
        let mut order = Vec::new();
        for turn in 0..3 {
            course.announce(&slots, 2 - turn);
            while let Some(stop) = course.next() {
                order.push((stop.step, stop.operation));
            }
        }
        assert_eq!(order, [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]);
    }
}
