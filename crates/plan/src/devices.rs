//! Planning of MPMD steps, whose devices differ: how each kind of communication is executed, and when.
//!
//! A device computes one node at a time. Each device has channels: a transfer occupies a channel at
//! both of its ends, and a collective one at each of its devices. A piece of communication is issued
//! when all of its resources are free. Entries have the same order in all queues, so the first of all
//! can always be issued (no deadlock).
//!
//! Source: SYNDICATE §4.3; the graphs are those of FlexFlow's task simulator.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use base::{Nanos, Random};
use ir::{StepGraph, StepGraphError, StepOp};
use thiserror::Error;

use crate::cost::ChannelCost;
use crate::search::{SearchLimits, StopReason};

/// Why a step graph cannot be planned.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeviceProblemError {
    /// The graph is invalid.
    #[error(transparent)]
    Graph(#[from] StepGraphError),
    /// The graph has several parts, of which one represents the others.
    #[error("the step stands for {parts} parts; expected a step of all devices")]
    Parts {
        /// Number of parts.
        parts: u32,
    },
    /// There are no channels.
    #[error("there are no channels; expected one or more")]
    NoChannels,
}

/// A step of several devices, repeated, over channels that every device has.
#[derive(Clone, Debug)]
pub struct DeviceProblem {
    step: StepGraph,
    channels: Vec<ChannelCost>,
    steps: usize,
    /// Nodes of one step in topological order.
    order: Vec<u32>,
    /// By node of all steps: the nodes that depend on it, and the number of nodes that it depends on.
    next: Vec<Vec<u32>>,
    waits: Vec<u32>,
    /// By node, its kind of communication: nodes of one kind share a strategy.
    kinds: Vec<Option<u32>>,
    kind_count: usize,
}

/// The strategy of all communication of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommStrategy {
    /// Number of pieces into which it is split.
    pub pieces: u32,
    /// Its channel; none is all channels, round robin.
    pub channel: Option<u32>,
}

/// The order in which queues issue entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueuePolicy {
    /// In order of arrival, with head-of-line blocking.
    Strict,
    /// In order of arrival; while the head waits for other resources, entries soon after it may
    /// overtake.
    Fifo,
    /// By longest chain of work to the end (critical path); likewise.
    CriticalPath,
}

/// A plan of a step, and its predicted makespan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DevicePlan {
    /// Strategy of each kind of communication.
    pub strategies: Vec<CommStrategy>,
    /// When all steps are done (makespan).
    pub end: Nanos,
    /// Number of plans that were evaluated.
    pub evaluations: u64,
    /// Why the search stopped.
    pub reason: StopReason,
}

impl DeviceProblem {
    /// A step repeated `steps` times.
    ///
    /// # Errors
    /// The graph is invalid or has several parts, or there is no channel.
    pub fn new(
        step: StepGraph,
        channels: Vec<ChannelCost>,
        steps: u32,
    ) -> Result<Self, DeviceProblemError> {
        let order = step.order()?;
        if step.parts != 1 {
            return Err(DeviceProblemError::Parts { parts: step.parts });
        }
        if channels.is_empty() {
            return Err(DeviceProblemError::NoChannels);
        }
        let (count, steps) = (step.len(), steps as usize);
        let mut next = vec![Vec::new(); count * steps];
        let mut waits = vec![0; count * steps];
        for turn in 0..steps {
            for number in 0..count {
                for on in step.dependencies(number as u32) {
                    let Some(other) = turn.checked_sub(on.steps_before as usize) else { continue };
                    next[other * count + on.node as usize].push((turn * count + number) as u32);
                    waits[turn * count + number] += 1;
                }
            }
        }
        let kinds = communication_kinds(&step);
        let kind_count = kinds.iter().flatten().max().map_or(0, |&last| last as usize + 1);
        Ok(Self { step, channels, steps, order, next, waits, kinds, kind_count })
    }

    /// Number of kinds of communication.
    pub fn kinds(&self) -> usize {
        self.kind_count
    }

    /// Greedy strategies: each kind whole, on the channel of the highest rate.
    pub fn greedy(&self) -> Vec<CommStrategy> {
        let fastest = (0..self.channels.len())
            .max_by(|&a, &b| self.channels[a].rate.0.total_cmp(&self.channels[b].rate.0));
        let channel = fastest.map(|channel| channel as u32);
        vec![CommStrategy { pieces: 1, channel }; self.kind_count]
    }

    /// Simulates all steps under these strategies; returns when they are done (makespan). O(pieces ·
    /// devices · (devices + log pieces)).
    pub fn end(&self, strategies: &[CommStrategy], policy: QueuePolicy) -> Nanos {
        Run::new(self, strategies, policy).end()
    }

    /// Searches for strategies that minimize the makespan, by hill climbing in one chain; the result is
    /// no worse than the greedy strategies. `limits.chains` is ignored.
    pub fn search(&self, policy: QueuePolicy, limits: &SearchLimits) -> DevicePlan {
        let most = self.channels.len() as u32;
        let mut options: Vec<CommStrategy> = Vec::new();
        for pieces in [1, 2, 4, 8, 16] {
            options
                .extend((0..most).map(|channel| CommStrategy { pieces, channel: Some(channel) }));
            if most > 1 && pieces > 1 {
                options.push(CommStrategy { pieces, channel: None });
            }
        }
        let mut random = Random::of(&[limits.seed]);
        let mut best = self.greedy();
        let mut end = self.end(&best, policy);
        let (mut tried, mut found_at) = (1, 1);
        let mut reason = StopReason::Evaluations;
        while tried < limits.evaluations && self.kind_count > 0 {
            if tried > limits.evaluations / 4 && found_at < tried / 2 {
                reason = StopReason::Stale;
                break;
            }
            let mut strategies = best.clone();
            let kind = random.below(self.kind_count as u64) as usize;
            strategies[kind] = options[random.below(options.len() as u64) as usize];
            tried += 1;
            let changed = self.end(&strategies, policy);
            if changed < end {
                (best, end, found_at) = (strategies, changed, tried);
            }
        }
        DevicePlan { strategies: best, end, evaluations: tried, reason }
    }

    /// Predicted time of a piece of a node on a channel.
    fn time(&self, op: &StepOp, pieces: u32, channel: usize) -> u64 {
        let cost = &self.channels[channel];
        let sent = |bytes: f64| bytes / f64::from(pieces) * 8e9 / cost.rate.0;
        let (bytes, rounds) = match op {
            StepOp::Compute { time, .. } => return time.0,
            StepOp::Transfer { size, .. } => (size.0 as f64, 1.0),
            StepOp::Collective(op) => {
                let count = op.devices.len().max(1) as f64;
                let passes = f64::from(op.collective.kind().passes());
                (passes * (count - 1.0) / count * op.size().0 as f64, passes * (count - 1.0))
            }
        };
        (sent(bytes) + rounds * cost.latency.0 as f64).round() as u64
    }
}

/// Returns the kind of communication of each node, by its index in a plan's strategies; none of a
/// computation.
pub fn communication_kinds(step: &StepGraph) -> Vec<Option<u32>> {
    let kinds: Vec<_> = step.nodes().iter().map(|node| kind(&node.op)).collect();
    let known: BTreeSet<_> = kinds.iter().flatten().collect();
    let known: Vec<_> = known.into_iter().collect();
    let number = |kind: &Option<_>| {
        let found = known.binary_search(&kind.as_ref()?);
        found.ok().map(|at| at as u32)
    };
    kinds.iter().map(number).collect()
}

/// The kind of a communication node: number of passes, size, and number of devices.
fn kind(op: &StepOp) -> Option<(u32, u64, usize)> {
    match op {
        StepOp::Compute { .. } => None,
        StepOp::Transfer { size, .. } => Some((0, size.0, 2)),
        StepOp::Collective(op) => {
            Some((op.collective.kind().passes(), op.size().0, op.devices.len()))
        }
    }
}

/// Number of entries at the front of a queue among which one that can begin is looked for.
const DEPTH: usize = 8;

/// An entry of a queue: the head is the greatest.
type Entry = (u64, Reverse<u32>);

/// A discrete-event simulation of a step by list scheduling.
struct Run<'a> {
    problem: &'a DeviceProblem,
    strategies: &'a [CommStrategy],
    policy: QueuePolicy,
    levels: Vec<u64>,
    waits: Vec<u32>,
    /// By node, the number of pieces that are not done, and the first piece.
    left: Vec<u32>,
    first: Vec<u32>,
    node_of: Vec<u32>,
    /// By resource: a device, or a channel of a device for sending or receiving.
    queues: Vec<BTreeSet<Reverse<Entry>>>,
    is_busy: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, u32)>>,
    arrivals: u64,
}

impl<'a> Run<'a> {
    fn new(
        problem: &'a DeviceProblem,
        strategies: &'a [CommStrategy],
        policy: QueuePolicy,
    ) -> Self {
        let count = problem.step.len();
        let total = count * problem.steps;
        let (mut first, mut left) = (Vec::with_capacity(total), Vec::with_capacity(total));
        let mut node_of = Vec::new();
        for node in 0..total {
            let pieces =
                problem.kinds[node % count].map_or(1, |kind| strategies[kind as usize].pieces);
            first.push(node_of.len() as u32);
            left.push(pieces);
            node_of.extend((0..pieces).map(|_| node as u32));
        }
        let resources = problem.step.devices as usize * (1 + 2 * problem.channels.len());
        let mut run = Self {
            problem,
            strategies,
            policy,
            levels: vec![0; total],
            waits: problem.waits.clone(),
            left,
            first,
            node_of,
            queues: vec![BTreeSet::new(); resources],
            is_busy: vec![false; resources],
            events: BinaryHeap::new(),
            arrivals: 0,
        };
        let nodes = (0..problem.steps).rev().flat_map(|turn| {
            problem.order.iter().rev().map(move |&node| turn * count + node as usize)
        });
        for node in nodes {
            let after = problem.next[node].iter().map(|&next| run.levels[next as usize]).max();
            let pieces: u64 = (0..run.left[node]).map(|piece| run.time(node, piece)).sum();
            run.levels[node] = pieces + after.unwrap_or(0);
        }
        run
    }

    fn op(&self, node: usize) -> &'a StepOp {
        self.problem.step.op((node % self.problem.step.len()) as u32)
    }

    fn channel(&self, node: usize, piece: u32) -> usize {
        let kind = self.problem.kinds[node % self.problem.step.len()];
        let Some(kind) = kind else { return 0 };
        match self.strategies[kind as usize].channel {
            Some(channel) => channel as usize,
            None => piece as usize % self.problem.channels.len(),
        }
    }

    fn time(&self, node: usize, piece: u32) -> u64 {
        let op = self.op(node);
        let pieces = match self.problem.kinds[node % self.problem.step.len()] {
            Some(kind) => self.strategies[kind as usize].pieces,
            None => 1,
        };
        self.problem.time(op, pieces, self.channel(node, piece))
    }

    /// The resources that a piece occupies while it runs.
    fn resources(&self, piece: u32) -> impl Iterator<Item = usize> + use<'a> {
        let node = self.node_of[piece as usize] as usize;
        let channel = self.channel(node, piece - self.first[node]);
        let (devices, channels) = (self.problem.step.devices as usize, self.problem.channels.len());
        let sends = move |device: u32| devices + (device as usize * channels + channel) * 2;
        let (pair, computing, communicating) = match self.op(node) {
            StepOp::Compute { devices, .. } => (None, &devices[..], &[][..]),
            StepOp::Transfer { source, target, .. } => {
                (Some([sends(*source), sends(*target) + 1]), &[][..], &[][..])
            }
            StepOp::Collective(op) => (None, &[][..], &op.devices[..]),
        };
        let computing = computing.iter().map(|&device| device as usize);
        let both = move |&device: &u32| [sends(device), sends(device) + 1];
        computing.chain(pair.into_iter().flatten()).chain(communicating.iter().flat_map(both))
    }

    fn end(mut self) -> Nanos {
        let total = self.waits.len();
        let (mut now, mut done) = (0, Vec::new());
        // Queues at which something has changed.
        let mut open: Vec<usize> = Vec::new();
        for node in 0..total {
            if self.waits[node] == 0 {
                self.arrive(node, now, &mut open);
            }
        }
        self.begin(&mut open, now);
        while let Some(Reverse((time, piece))) = self.events.pop() {
            now = time;
            done.push(piece);
            while let Some(&Reverse((same, other))) = self.events.peek()
                && same == now
            {
                self.events.pop();
                done.push(other);
            }
            for piece in done.drain(..) {
                for resource in self.resources(piece) {
                    self.is_busy[resource] = false;
                    open.push(resource);
                }
                let node = self.node_of[piece as usize] as usize;
                self.left[node] -= 1;
                if self.left[node] == 0 {
                    let problem = self.problem;
                    for &next in &problem.next[node] {
                        self.waits[next as usize] -= 1;
                        if self.waits[next as usize] == 0 {
                            self.arrive(next as usize, now, &mut open);
                        }
                    }
                }
            }
            self.begin(&mut open, now);
        }
        Nanos(now)
    }

    /// Issues what can begin once all events of a time are handled: the entries that are at the head of
    /// all of their queues, if their resources are free. Unless the policy is strict, entries soon
    /// after the head may begin instead, so that a head that waits for other resources does not block
    /// its queue.
    fn begin(&mut self, open: &mut Vec<usize>, now: u64) {
        let depth = match self.policy {
            QueuePolicy::Strict => 1,
            QueuePolicy::Fifo | QueuePolicy::CriticalPath => DEPTH,
        };
        let free = open.drain(..).filter(|&queue| !self.is_busy[queue]);
        let mut next: Vec<Entry> = free
            .flat_map(|queue| self.queues[queue].iter().take(depth).map(|entry| entry.0))
            .collect();
        next.sort_unstable_by_key(|&entry| Reverse(entry));
        next.dedup();
        for entry in next {
            let piece = entry.1.0;
            let can_begin = |at: usize| {
                let is_first = || self.queues[at].first() == Some(&Reverse(entry));
                !self.is_busy[at] && (depth > 1 || is_first())
            };
            if !self.resources(piece).all(can_begin) {
                continue;
            }
            let node = self.node_of[piece as usize] as usize;
            let time = self.time(node, piece - self.first[node]);
            for at in self.resources(piece) {
                self.queues[at].remove(&Reverse(entry));
                self.is_busy[at] = true;
            }
            self.events.push(Reverse((now + time, piece)));
        }
    }

    /// All dependencies of a node are done: its pieces enter their queues.
    fn arrive(&mut self, node: usize, now: u64, open: &mut Vec<usize>) {
        self.arrivals += 1;
        for number in 0..self.left[node] {
            let piece = self.first[node] + number;
            let rank = match self.policy {
                QueuePolicy::Strict | QueuePolicy::Fifo => u64::MAX - self.arrivals,
                QueuePolicy::CriticalPath => self.levels[node],
            };
            let mut last = None;
            for resource in self.resources(piece) {
                self.queues[resource].insert(Reverse((rank, Reverse(piece))));
                last = Some(resource);
            }
            match last {
                Some(resource) => open.push(resource),
                // It is on no device.
                None => self.events.push(Reverse((now, piece))),
            }
        }
    }
}
