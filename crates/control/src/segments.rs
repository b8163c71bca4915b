//! Segments: how a whole program is split for the scheduler.
//!
//! A run with little work is one launch in the launch order of its islands. A longer one is split
//! between nodes, so that launches of other clients can be interleaved; and concurrent work of
//! hosts that are independent of each other is split too, so that no host waits for window space on
//! another.
//!
//! Source: PATHWAYS §4.5: one message describes a whole subgraph, which does not require that its
//! computations are enqueued as one batch.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use base::{HostId, InputId, Nanos};
use smallvec::SmallVec;

use crate::programs::Lowered;

/// Estimated run time at which a segment is complete.
const SEGMENT: Nanos = Nanos(5_000_000);

/// Nodes that are launched together; consecutive on each of their hosts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProgramSegment {
    /// The hosts that have steps in it, and the range of those steps.
    pub steps: BTreeMap<HostId, Range<u32>>,
    /// Estimated run time: the sum of the costs of its nodes.
    pub expected: Nanos,
    /// Inputs that it takes batches from, named once per batch.
    pub inputs: SmallVec<[InputId; 1]>,
}

impl ProgramSegment {
    fn shares_a_host(&self, other: &Self) -> bool {
        self.steps.keys().any(|host| other.steps.contains_key(host))
    }

    /// Concatenates two segments; `other` comes second on hosts that both use.
    fn then(mut self, other: Self) -> Self {
        for (host, range) in other.steps {
            let end = range.end;
            self.steps.entry(host).or_insert(range).end = end;
        }
        self.expected += other.expected;
        self.inputs.extend(other.inputs);
        self
    }
}

/// All segments of a program.
#[derive(Debug)]
pub(crate) struct Segments {
    segments: Arc<[ProgramSegment]>,
    /// Sum of the costs of its nodes.
    total: Nanos,
    nodes: usize,
}

impl Segments {
    /// Splits a program into segments.
    ///
    /// # Arguments
    /// - `factor`: measured over estimated run time of its nodes.
    /// - `one_by_one`: make each node with a cost a segment of its own.
    pub fn cut(lowered: &Lowered, factor: f64, one_by_one: bool) -> Self {
        let mut segments: Vec<ProgramSegment> = Vec::new();
        let mut done: BTreeMap<HostId, u32> = BTreeMap::new();
        let mut open: Vec<ProgramSegment> = Vec::new();
        for (node, (ends, time)) in lowered.ends.iter().zip(&lowered.times).enumerate() {
            let steps = ends.iter().map(|&(host, end)| {
                let begin = done.insert(host, end).unwrap_or(0);
                (host, begin..end)
            });
            let inputs = lowered.inputs[node].iter().copied().collect();
            let segment = ProgramSegment { steps: steps.collect(), expected: *time, inputs };
            let (before, apart): (Vec<_>, Vec<_>) =
                open.into_iter().partition(|other| other.shares_a_host(&segment));
            open = apart;
            let segment = before.into_iter().rev().fold(segment, |later, one| one.then(later));
            let expected = segment.expected;
            if (one_by_one && expected.0 > 0) || expected.times(factor) >= SEGMENT {
                segments.push(segment);
            } else if !segment.steps.is_empty() {
                open.push(segment);
            }
        }
        segments.extend(open.into_iter().reduce(ProgramSegment::then));
        let total = lowered.times.iter().copied().sum();
        Self { segments: segments.into(), total, nodes: lowered.ends.len() }
    }

    /// Returns a single segment with all steps of a program.
    pub fn whole(lowered: &Lowered, segments: &[ProgramSegment]) -> Arc<[ProgramSegment]> {
        let steps = lowered.steps.iter();
        let steps = steps.map(|(&host, steps)| (host, 0..steps.len() as u32)).collect();
        let expected = segments.iter().map(|segment| segment.expected).sum();
        let inputs = segments.iter().flat_map(|segment| segment.inputs.iter().copied()).collect();
        Arc::new([ProgramSegment { steps, expected, inputs }])
    }

    pub fn segments(&self) -> Arc<[ProgramSegment]> {
        self.segments.clone()
    }

    /// Returns whether to split anew, given the measured `factor` of run time over cost.
    pub fn is_stale(&self, factor: f64) -> bool {
        let count = self.segments.len();
        let each = self.total.times(factor / count.max(1) as f64);
        (each.0 > 2 * SEGMENT.0 && count < self.nodes) || (count > 1 && each.0 < SEGMENT.0 / 4)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MILLISECOND: u64 = 1_000_000;

    /// A program whose nodes have one step on each of these hosts, and take these milliseconds.
    fn program(nodes: &[(Vec<u32>, u64)]) -> Lowered {
        let mut steps: BTreeMap<u32, u32> = BTreeMap::new();
        let ends = nodes.iter().map(|(hosts, _)| {
            let mut one_more = |&host: &u32| {
                let count = steps.entry(host).or_default();
                *count += 1;
                (HostId(host), *count)
            };
            hosts.iter().map(&mut one_more).collect()
        });
        Lowered {
            ends: ends.collect(),
            times: nodes.iter().map(|(_, time)| Nanos(time * MILLISECOND)).collect(),
            inputs: vec![None; nodes.len()],
            ..Lowered::default()
        }
    }

    #[test]
    fn hosts_that_have_nothing_to_do_with_each_other_do_not_wait_for_each_other() {
        let node = |host: u32, time| (vec![host], time);
        let first = [node(0, 6), node(0, 6), node(0, 1)];
        let second = [node(1, 6), node(1, 6), node(1, 1)];
        let lowered = program(&[first, second].concat());
        let segments = Segments::cut(&lowered, 1.0, false).segments();
        let hosts: Vec<usize> = segments.iter().map(|segment| segment.steps.len()).collect();
        assert_eq!(hosts, [1, 1, 1, 1, 2], "only what is left goes together");
    }

    proptest! {
        #[test]
        fn every_step_goes_once_and_in_order(
            nodes in prop::collection::vec(
                (prop::collection::btree_set(0_u32..5, 0..3), 0_u64..8), 1..30,
            ),
            one_by_one: bool,
        ) {
            let nodes: Vec<(Vec<u32>, u64)> =
                nodes.into_iter().map(|(hosts, time)| (hosts.into_iter().collect(), time)).collect();
            let lowered = program(&nodes);
            let segments = Segments::cut(&lowered, 1.0, one_by_one).segments();
            let mut gone: BTreeMap<HostId, u32> = BTreeMap::new();
            for segment in segments.iter() {
                for (&host, steps) in &segment.steps {
                    prop_assert!(steps.start < steps.end);
                    prop_assert_eq!(gone.insert(host, steps.end).unwrap_or(0), steps.start);
                }
            }
            for (ends, _) in lowered.ends.iter().zip(&nodes) {
                for (host, end) in ends {
                    prop_assert!(gone[host] >= *end);
                    // A node's steps are dispatched to all its hosts at once.
                    let together = segments.iter().find(|segment| {
                        segment.steps.get(host).is_some_and(|steps| steps.contains(&(end - 1)))
                    });
                    let together = together.expect("every step is in a segment");
                    for (other, end) in ends {
                        prop_assert!(together.steps[other].contains(&(end - 1)));
                    }
                }
            }
        }
    }
}
