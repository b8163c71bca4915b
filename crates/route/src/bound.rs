//! How soon transfers could come at best, and what holds a schedule up.

use base::{LinkId, Ticks};
use fabric::Network;

use crate::schedule::{Plan, Timing};
use crate::task::Task;

/// No schedule ends sooner: every chip sends and gets what it must with all its links at once, and
/// every transfer takes the hops of its shortest way. What follows from cuts between many chips is
/// not looked at, nor what waits for what. O(transfers · (vertices + links)).
pub fn lower_bound(network: &Network, tasks: &[Task], timing: &Timing) -> Ticks {
    let vertices = network.vertices() as usize;
    // Vectors a tick that links of a vertex move, out and in.
    let mut speed = vec![[0.0; 2]; vertices];
    for link in network.links() {
        let rate = 1.0 / timing.slot(link).0 as f64;
        speed[link.source.0 as usize][0] += rate;
        speed[link.target.0 as usize][1] += rate;
    }
    let mut vectors = vec![[0; 2]; vertices];
    let mut bound = 0.0_f64;
    let hop = network.links().iter().map(|link| timing.hop(link).0).min().unwrap_or(0) as f64;
    for transfer in tasks.iter().filter_map(Task::transfer) {
        let count = timing.vectors(transfer.size);
        if count == 0 {
            continue;
        }
        vectors[transfer.source.0 as usize][0] += count;
        vectors[transfer.target.0 as usize][1] += count;
        let hops = network.hops_from(transfer.source)[transfer.target.0 as usize].unwrap_or(0);
        let narrow = speed[transfer.source.0 as usize][0].min(speed[transfer.target.0 as usize][1]);
        bound = bound.max(f64::from(hops) * hop + 1.0 / narrow);
    }
    for (count, speed) in vectors.iter().zip(&speed) {
        for (&count, speed) in count.iter().zip(speed).filter(|(count, _)| **count > 0) {
            bound = bound.max(hop + count as f64 / speed);
        }
    }
    Ticks(bound as u64)
}

/// The link that is busy longest, or one like it in the first part of the circle, and for how long.
/// O(trains · hops).
pub fn busiest(network: &Network, plan: &Plan) -> Option<(LinkId, Ticks)> {
    let mut busy = vec![0; plan.circle.kinds() as usize];
    for train in &plan.schedule.trains {
        let length = train.count * plan.schedule.timing.pace(network, train.links()).0;
        for link in train.links() {
            busy[plan.circle.kind(link).0 as usize] += length;
        }
    }
    let longest = busy.iter().copied().max().filter(|&length| length > 0)?;
    let kind = busy.iter().position(|&length| length == longest)?;
    Some((plan.circle.link(kind as u32, 0), Ticks(longest)))
}
