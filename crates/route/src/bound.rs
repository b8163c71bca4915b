//! Lower bound on the makespan, and the bottleneck of a schedule.

use std::collections::BTreeMap;

use base::{LinkId, Ticks, VertexId};
use topology::Network;

use crate::schedule::RoutePlan;
use crate::task::{Computation, Task};

/// Returns a lower bound on the makespan of any plan for these tasks: every chip sends and receives its
/// data over all its links at once and computes one task at a time, and every transfer takes the hops
/// of its shortest path. Cuts between sets of chips and dependencies are not considered. O(tasks +
/// sources · (vertices + links)).
pub fn lower_bound(network: &Network, plan: &RoutePlan) -> Ticks {
    let (circle, timing) = (&plan.circle, &plan.schedule.timing);
    // Vectors per tick that the links of a vertex transfer, out and in; vertices of other parts are
    // like those of the first.
    let mut speed = vec![[0.0; 2]; network.vertices() as usize];
    for link in network.links() {
        let rate = 1.0 / timing.slot(link).0 as f64;
        speed[link.source.0 as usize][0] += rate;
        speed[link.target.0 as usize][1] += rate;
    }
    let kind = |vertex: VertexId| circle.kind_of(vertex) as usize;
    let mut vectors = vec![[0; 2]; speed.len()];
    let mut computes = vec![0; speed.len()];
    let mut hops: BTreeMap<VertexId, Vec<Option<u32>>> = BTreeMap::new();
    let mut bound = 0.0_f64;
    let hop = network.links().iter().map(|link| timing.hop(link).0).min().unwrap_or(0) as f64;
    for task in &plan.tasks {
        let transfer = match task {
            Task::Transfer(transfer) => transfer,
            Task::Computation(Computation { chip, length, .. }) => {
                computes[kind(*chip)] += length.0;
                continue;
            }
        };
        let count = timing.vectors(transfer.size);
        if count == 0 {
            continue;
        }
        let (source, target) = (kind(transfer.source), kind(transfer.target));
        vectors[source][0] += count;
        vectors[target][1] += count;
        let away = hops
            .entry(transfer.source)
            .or_insert_with(|| network.hops_from(transfer.source))
            .get(transfer.target.0 as usize);
        let away = away.copied().flatten().unwrap_or(0);
        let narrow = speed[source][0].min(speed[target][1]);
        bound = bound.max(f64::from(away) * hop + 1.0 / narrow);
    }
    for (count, speed) in vectors.iter().zip(&speed) {
        for (&count, speed) in count.iter().zip(speed).filter(|(count, _)| **count > 0) {
            bound = bound.max(hop + count as f64 / speed);
        }
    }
    let computes = computes.into_iter().max().unwrap_or(0);
    Ticks((bound as u64).max(computes))
}

/// Returns the busy time of each kind of link. O(trains · hops).
pub fn busy(network: &Network, plan: &RoutePlan) -> Vec<Ticks> {
    let mut busy = vec![Ticks(0); plan.circle.kinds() as usize];
    for train in &plan.schedule.trains {
        let length = Ticks(train.count * plan.schedule.timing.pace(network, train.links()).0);
        for link in train.links() {
            busy[plan.circle.kind(link).0 as usize] += length;
        }
    }
    busy
}

/// Returns the bottleneck link, or the equivalent one in the first part of the symmetry, and its busy
/// time. O(trains · hops).
pub fn busiest(network: &Network, plan: &RoutePlan) -> Option<(LinkId, Ticks)> {
    let busy = busy(network, plan);
    let longest = busy.iter().copied().max().filter(|length| length.0 > 0)?;
    let kind = busy.iter().position(|&length| length == longest)?;
    Some((plan.circle.link(kind as u32, 0), longest))
}
