//! The simulation that plans of MPMD steps are judged by: list scheduling over devices and channels.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use base::Nanos;
use ir::StepOp;

use crate::devices::problem::{CommStrategy, DeviceProblem, QueuePolicy};

/// Number of entries at the front of a queue among which one that can begin is looked for.
const DEPTH: usize = 8;

/// An entry of a queue: the head is the greatest.
type Entry = (u64, Reverse<u32>);

/// A discrete-event simulation of a step by list scheduling.
pub(crate) struct DeviceRun<'a> {
    problem: &'a DeviceProblem,
    strategies: &'a [CommStrategy],
    policy: QueuePolicy,
    levels: Vec<u64>,
    /// By node of a step and channel, the time of a piece; of channels that its strategy uses.
    times: Vec<u64>,
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
    /// By piece, when it began.
    begins: Vec<u64>,
}

impl<'a> DeviceRun<'a> {
    pub(crate) fn new(
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
        let begins = vec![0; node_of.len()];
        let mut run = Self {
            problem,
            strategies,
            policy,
            levels: vec![0; total],
            times: times(problem, strategies),
            waits: problem.waits.clone(),
            left,
            first,
            node_of,
            queues: vec![BTreeSet::new(); resources],
            is_busy: vec![false; resources],
            events: BinaryHeap::new(),
            arrivals: 0,
            begins,
        };
        let nodes = (0..problem.steps).rev().flat_map(|turn| {
            problem.order.iter().rev().map(move |&node| turn * count + node as usize)
        });
        for node in nodes {
            let after = problem.next[node].iter().map(|&next| run.levels[next as usize]).max();
            let pieces = (0..run.left[node]).map(|piece| run.time(node, piece));
            run.levels[node] = pieces.fold(after.unwrap_or(0), u64::saturating_add);
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
        let of_step = node % self.problem.step.len();
        self.times[of_step * self.problem.channels.len() + self.channel(node, piece)]
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

    /// Runs all steps; returns when they are done (makespan).
    pub(crate) fn end(mut self) -> Nanos {
        self.run()
    }

    /// Runs all steps; returns the pieces of all communication of one of them, each as a node and a
    /// number, in the order in which they begin. Of those that begin together, dependencies first.
    pub(crate) fn order(mut self, turn: usize) -> Vec<(u32, u32)> {
        self.run();
        let count = self.problem.step.len();
        let communicates = |node: &&u32| self.problem.kinds[**node as usize].is_some();
        let mut order: Vec<(u64, (u32, u32))> = Vec::new();
        for &node in self.problem.order.iter().filter(communicates) {
            let at = turn * count + node as usize;
            let pieces = self.first[at]
                ..self.first.get(at + 1).map_or(self.node_of.len() as u32, |&end| end);
            let pieces =
                pieces.map(|piece| (self.begins[piece as usize], (node, piece - self.first[at])));
            order.extend(pieces);
        }
        order.sort_by_key(|&(begin, _)| begin);
        order.into_iter().map(|(_, piece)| piece).collect()
    }

    fn run(&mut self) -> Nanos {
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
            self.begins[piece as usize] = now;
            self.events.push(Reverse((now.saturating_add(time), piece)));
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
                None => {
                    self.begins[piece as usize] = now;
                    self.events.push(Reverse((now, piece)));
                }
            }
        }
    }
}

/// By node of a step and channel, the predicted time of a piece; of channels that its strategy uses.
fn times(problem: &DeviceProblem, strategies: &[CommStrategy]) -> Vec<u64> {
    let channels = problem.channels.len();
    let mut times = vec![0; problem.step.len() * channels];
    for (node, of_node) in (0..).zip(times.chunks_mut(channels)) {
        let strategy = problem.kinds[node as usize].map(|kind| strategies[kind as usize]);
        let (pieces, used) = match strategy {
            Some(CommStrategy { pieces, channel: None }) => (pieces, 0..channels),
            Some(CommStrategy { pieces, channel: Some(only) }) => {
                (pieces, only as usize..only as usize + 1)
            }
            None => (1, 0..1),
        };
        used.for_each(|channel| of_node[channel] = problem.time(node, pieces, channel));
    }
    times
}
