//! How a whole program is cut for the scheduler.
//!
//! A run whose work is short is one launch in its islands' order. A longer one is cut between
//! nodes, so that what others want can come in between; and what hosts do that have nothing to do
//! with each other meanwhile is cut apart, so that none of them waits for room on another.
//!
//! Source: PATHWAYS §4.5: one message describes a whole subgraph, which does not require that its
//! computations are enqueued as one batch.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use base::{HostId, InputId, Nanos};
use smallvec::SmallVec;

use crate::lower::Lowered;

/// Estimated run time of a segment.
const SEGMENT: Nanos = Nanos(5_000_000);

/// Consecutive nodes that are launched together.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Segment {
    /// Hosts that do something for it, and which of their steps.
    pub steps: Vec<(HostId, Range<u32>)>,
    /// Run time that the costs of its nodes amount to.
    pub expected: Nanos,
    /// Inputs whose next batches it takes, each as often as it takes one.
    pub inputs: SmallVec<[InputId; 1]>,
}

impl Segment {
    fn shares_a_host(&self, other: &Self) -> bool {
        self.steps.iter().any(|(host, _)| other.steps.iter().any(|(same, _)| same == host))
    }

    /// Both, of which the other is later where they share a host.
    fn then(self, other: Self) -> Self {
        let mut steps: BTreeMap<HostId, Range<u32>> = self.steps.into_iter().collect();
        for (host, range) in other.steps {
            steps.entry(host).or_insert(range.start..range.end).end = range.end;
        }
        let mut inputs = self.inputs;
        inputs.extend(other.inputs);
        Self {
            steps: steps.into_iter().collect(),
            expected: self.expected + other.expected,
            inputs,
        }
    }
}

/// All segments of a program.
#[derive(Debug)]
pub(crate) struct Segments {
    segments: Arc<[Segment]>,
    /// What the costs of its nodes amount to.
    total: Nanos,
    nodes: usize,
}

impl Segments {
    /// Cuts a program.
    ///
    /// # Arguments
    /// - `factor`: how much longer its nodes take than their costs say.
    /// - `one_by_one`: each node on its own.
    pub fn cut(lowered: &Lowered, factor: f64, one_by_one: bool) -> Self {
        let mut segments: Vec<Segment> = Vec::new();
        let mut done: BTreeMap<HostId, u32> = BTreeMap::new();
        let mut open: Vec<Segment> = Vec::new();
        for (node, (ends, time)) in lowered.ends.iter().zip(&lowered.times).enumerate() {
            let steps = ends.iter().map(|&(host, end)| {
                let begin = done.insert(host, end).unwrap_or(0);
                (host, begin..end)
            });
            let inputs = lowered.inputs[node].iter().copied().collect();
            let segment = Segment { steps: steps.collect(), expected: *time, inputs };
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
        segments.extend(open.into_iter().reduce(Segment::then));
        let total = lowered.times.iter().copied().sum();
        Self { segments: segments.into(), total, nodes: lowered.ends.len() }
    }

    /// All segments of a program as one.
    pub fn whole(lowered: &Lowered, segments: &[Segment]) -> Arc<[Segment]> {
        let steps = lowered.steps.iter();
        let steps = steps.map(|(&host, steps)| (host, 0..steps.len() as u32)).collect();
        let expected = segments.iter().map(|segment| segment.expected).sum();
        let inputs = segments.iter().flat_map(|segment| segment.inputs.iter().copied()).collect();
        Arc::new([Segment { steps, expected, inputs }])
    }

    pub fn segments(&self) -> Arc<[Segment]> {
        self.segments.clone()
    }

    /// Should it be cut anew, now that its nodes are known to take `factor` of what they cost?
    pub fn is_stale(&self, factor: f64) -> bool {
        let count = self.segments.len();
        let each = self.total.times(factor / count.max(1) as f64);
        (each.0 > 2 * SEGMENT.0 && count < self.nodes) || (count > 1 && each.0 < SEGMENT.0 / 4)
    }
}
