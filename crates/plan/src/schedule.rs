//! Simulates steps in which each collective uses a given execution option, by list scheduling.
//!
//! The step is SPMD, so one rank stands for all: it has devices that compute task after task, and
//! channels that carry one motif at a time. Whenever a channel is free, it issues the ready motif that
//! a policy puts first. Where channels share a resource, a motif that begins while others run is slowed
//! down by them, for all of them.
//!
//! Source: SYNDICATE §4.3, `optSched`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::Nanos;
use ir::StepOp;
use serde::{Deserialize, Serialize};

use crate::options::Execution;
use crate::problem::{Problem, computes};

/// A motif in the order of a channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// Number of steps that it is ahead of the others: 0, or more if it is prefetched.
    pub ahead: u32,
    /// Index of the task.
    pub task: u32,
    /// Index of the motif in its execution.
    pub motif: u32,
}

/// Priority among the motifs that are ready.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Policy {
    /// The longest chain of work to the end first (critical path).
    CriticalPath,
    /// Program order: of the ready motifs, those of the earliest collective first, with head-of-line
    /// blocking across all channels.
    Fifo,
    /// Of the latest collective in program order.
    Lifo,
    /// A hand-written order: by task its position in a step, the lowest first; a position lower by the
    /// number of tasks is in the step before.
    Hand(Vec<i32>),
    /// By channel, a fixed order that is that of every step; a channel waits for the next motif until
    /// it is ready.
    Fixed(Vec<Vec<Slot>>),
}

/// When a task or a motif runs in a schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScheduledSpan {
    /// Index of the step.
    pub step: u32,
    /// Index of the task.
    pub task: u32,
    /// Index of the motif in its execution; none for computation.
    pub motif: Option<u32>,
    /// Channel of the motif; none for computation.
    pub channel: Option<u32>,
    /// Start time.
    pub start: Nanos,
    /// End time.
    pub end: Nanos,
}

/// A motif, for scheduling.
#[derive(Clone, Debug)]
struct Timed {
    channel: u32,
    time: u64,
    /// Motifs of the same task that depend on it.
    next: Vec<u32>,
    /// Number of motifs that it depends on.
    waits: u32,
    /// Longest chain from its beginning to the end of the task.
    tail: u64,
}

/// An execution option of a task, for scheduling.
#[derive(Clone, Debug)]
struct OptionTimes {
    motifs: Vec<Timed>,
    span: u64,
}

impl OptionTimes {
    fn new(execution: &Execution) -> Self {
        let mut motifs: Vec<Timed> = execution
            .motifs
            .iter()
            .map(|motif| Timed {
                channel: motif.channel,
                time: motif.time.0,
                next: Vec::new(),
                waits: motif.after.len() as u32,
                tail: 0,
            })
            .collect();
        for (number, motif) in (0..).zip(&execution.motifs) {
            for &after in &motif.after {
                motifs[after as usize].next.push(number);
            }
        }
        for number in (0..motifs.len()).rev() {
            let next = motifs[number].next.iter().map(|&next| motifs[next as usize].tail).max();
            motifs[number].tail = motifs[number].time + next.unwrap_or(0);
        }
        let span = motifs.iter().map(|motif| motif.tail).max().unwrap_or(0);
        Self { motifs, span }
    }
}

/// Several unrolled steps, and all execution options of their communication.
#[derive(Clone, Debug)]
pub struct Unrolled {
    tasks: usize,
    steps: usize,
    channels: usize,
    /// By task, its compute time; none if it communicates.
    computes: Vec<Option<u64>>,
    /// By task, its execution options; empty if it computes.
    options: Vec<Vec<OptionTimes>>,
    /// By node, the nodes that depend on it.
    next: Vec<Vec<u32>>,
    /// By node, the number of nodes that it depends on.
    waits: Vec<u32>,
    /// By pair of channels, the slowdown of both together when they overlap, in millionths; empty if
    /// there is none.
    overlap: Vec<u32>,
}

impl Unrolled {
    /// Unrolls `steps` steps.
    ///
    /// # Arguments
    /// - `executions`: of each task, its options; empty for tasks that compute.
    ///
    /// # Panics
    /// There is not one list for each task, or a task that communicates has no option.
    pub fn new(problem: &Problem, executions: &[Vec<Execution>], steps: u32) -> Self {
        let tasks = problem.nodes().len();
        assert_eq!(executions.len(), tasks, "each task has its options");
        let steps = steps as usize;
        let mut next = vec![Vec::new(); tasks * steps];
        let mut waits = vec![0; tasks * steps];
        let mut join = |before: usize, after: usize| {
            next[before].push(after as u32);
            waits[after] += 1;
        };
        let mut computed = None;
        let last = problem.nodes().iter().rposition(computes);
        for turn in 0..steps {
            for (number, task) in problem.nodes().iter().enumerate() {
                let dependencies = problem.graph().dependencies(number as u32);
                let node = turn * tasks + number;
                // Communication without dependencies is prefetched by at most one step.
                if let (Some(turn), Some(last), true) =
                    (turn.checked_sub(2), last, dependencies.is_empty() && !computes(task))
                {
                    join(turn * tasks + last, node);
                }
                for on in dependencies {
                    if let Some(turn) = turn.checked_sub(on.steps_before as usize) {
                        join(turn * tasks + on.node as usize, node);
                    }
                }
                // Devices compute in program order.
                if computes(task)
                    && let Some(before) = computed.replace(node)
                {
                    join(before, node);
                }
            }
        }
        let computes = problem.nodes().iter().map(|task| match task.op {
            StepOp::Compute { time, .. } => Some(time.0),
            _ => None,
        });
        let computes: Vec<Option<u64>> = computes.collect();
        for (task, options) in computes.iter().zip(executions) {
            assert!(task.is_some() || !options.is_empty(), "what communicates has a option");
        }
        let motifs = executions.iter().flatten().flat_map(|execution| &execution.motifs);
        let channels = motifs.map(|motif| motif.channel as usize + 1).max().unwrap_or(0);
        let options = executions
            .iter()
            .map(|options| options.iter().map(OptionTimes::new).collect())
            .collect();
        let pairs = (0..channels).flat_map(|one| (0..channels).map(move |other| (one, other)));
        let both = |(one, other)| match one == other {
            true => 0,
            false => problem.overlap(one, other) + problem.overlap(other, one),
        };
        let mut overlap: Vec<u32> = pairs.map(both).collect();
        if overlap.iter().all(|&longer| longer == 0) {
            overlap.clear();
        }
        Self { tasks, steps, channels, computes, options, next, waits, overlap }
    }

    /// Contention: added time of a motif that begins while others run, for itself and for them.
    fn longer(&self, channel: usize, now: u64, time: u64, until: &[u64]) -> u64 {
        if self.overlap.is_empty() {
            return 0;
        }
        let with = &self.overlap[channel * self.channels..][..self.channels];
        let beside = |(&part, &until): (&u32, &u64)| {
            u128::from(until.saturating_sub(now).min(time)) * u128::from(part) / 1_000_000
        };
        with.iter().zip(until).map(beside).sum::<u128>() as u64
    }

    /// Number of tasks of a step.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Number of nodes: tasks of all steps, those of the second after those of the first.
    pub(crate) fn nodes(&self) -> usize {
        self.next.len()
    }

    /// Nodes that depend on a node.
    pub(crate) fn next(&self, node: usize) -> impl Iterator<Item = usize> {
        self.next[node].iter().map(|&next| next as usize)
    }

    /// Number of spans of a schedule if each task uses its option in `chosen`.
    pub fn spans(&self, chosen: &[u32]) -> usize {
        let of = |task: usize| match self.computes[task] {
            Some(_) => 1,
            None => self.options[task][chosen[task] as usize].motifs.len(),
        };
        self.steps * (0..self.tasks).map(of).sum::<usize>()
    }
}

/// Schedules steps repeatedly, and reuses its memory.
#[derive(Debug)]
pub struct StepScheduler<'a> {
    steps: &'a Unrolled,
    policy: Policy,
    /// Longest chain from each node's beginning to the end.
    levels: Vec<u64>,
    /// Number of unfinished dependencies of each node.
    waits: Vec<u32>,
    /// Number of unfinished motifs of each node.
    left: Vec<u32>,
    /// Index of the first motif of each node, over all nodes.
    first: Vec<u32>,
    /// Number of unfinished dependencies of each motif.
    motif_waits: Vec<u32>,
    /// Event queue: time, and index of the motif, or of the node after all motifs.
    events: BinaryHeap<Reverse<(u64, u32)>>,
    /// Ready queues by channel, or a single one, the first, in program order: priority, and motif.
    ready: Vec<BinaryHeap<(u64, Reverse<u32>, u32)>>,
    is_busy: Vec<bool>,
    /// Until when each channel is, or was, busy.
    until: Vec<u64>,
    done: Vec<u32>,
    /// By channel, the motifs that it has still to carry in a fixed order, the last first.
    fixed: Vec<Vec<u32>>,
    /// Which motifs are ready, for fixed orders.
    is_ready: Vec<bool>,
}

impl<'a> StepScheduler<'a> {
    /// A scheduler of these steps under a policy.
    pub fn new(steps: &'a Unrolled, policy: Policy) -> Self {
        let nodes = steps.tasks * steps.steps;
        Self {
            steps,
            policy,
            levels: vec![0; nodes],
            waits: vec![0; nodes],
            left: vec![0; nodes],
            first: vec![0; nodes],
            motif_waits: Vec::new(),
            events: BinaryHeap::new(),
            ready: vec![BinaryHeap::new(); steps.channels],
            is_busy: vec![false; steps.channels],
            until: vec![0; steps.channels],
            done: Vec::new(),
            fixed: vec![Vec::new(); steps.channels],
            is_ready: Vec::new(),
        }
    }

    /// Replaces the policy by a fixed order.
    pub fn order(&mut self, order: &[Vec<Slot>]) {
        self.policy = Policy::Fixed(order.to_vec());
    }

    /// Returns when all steps are done (makespan), if each task uses its option in `chosen`. O(motifs ·
    /// (log motifs + channels) + dependencies).
    pub fn end(&mut self, chosen: &[u32]) -> Nanos {
        self.run(chosen, &mut |_| {})
    }

    /// Returns the makespan, and all spans in the order of their start times.
    pub fn spans(&mut self, chosen: &[u32]) -> (Nanos, Vec<ScheduledSpan>) {
        let mut spans = Vec::new();
        let end = self.run(chosen, &mut |span| spans.push(span));
        (end, spans)
    }

    fn run(&mut self, chosen: &[u32], note: &mut dyn FnMut(ScheduledSpan)) -> Nanos {
        let steps = self.steps;
        self.begin(chosen);
        for (node, _) in steps.waits.iter().enumerate().filter(|(_, waits)| **waits == 0) {
            self.start(node, chosen, 0, note);
        }
        let mut now = 0;
        loop {
            for line in 0..self.ready.len() {
                while let Some(motif) = self.next(line) {
                    let node = self.node_of(motif);
                    let number = motif - self.first[node];
                    let option =
                        &steps.options[node % steps.tasks][chosen[node % steps.tasks] as usize];
                    let Timed { channel, time, .. } = option.motifs[number as usize];
                    if std::mem::replace(&mut self.is_busy[channel as usize], true) {
                        break;
                    }
                    self.ready[line].pop();
                    self.fixed[line].pop();
                    let time = time + steps.longer(channel as usize, now, time, &self.until);
                    self.until[channel as usize] = now + time;
                    self.events.push(Reverse((now + time, motif)));
                    note(self.span(node, Some((number, channel)), (now, now + time)));
                }
            }
            let Some(Reverse((time, first))) = self.events.pop() else { break };
            now = time;
            self.done.push(first);
            while let Some(&Reverse((same, other))) = self.events.peek()
                && same == time
            {
                self.events.pop();
                self.done.push(other);
            }
            while let Some(event) = self.done.pop() {
                self.finish(event, chosen, now, note);
            }
        }
        Nanos(now)
    }

    fn begin(&mut self, chosen: &[u32]) {
        let steps = self.steps;
        self.waits.copy_from_slice(&steps.waits);
        self.motif_waits.clear();
        self.is_busy.fill(false);
        self.until.fill(0);
        for (node, first) in self.first.iter_mut().enumerate() {
            *first = self.motif_waits.len() as u32;
            let task = node % steps.tasks;
            if steps.computes[task].is_none() {
                let option = &steps.options[task][chosen[task] as usize];
                self.left[node] = option.motifs.len() as u32;
                self.motif_waits.extend(option.motifs.iter().map(|motif| motif.waits));
            }
        }
        self.fix();
        for node in (0..self.levels.len()).rev() {
            let task = node % steps.tasks;
            let time = match steps.computes[task] {
                Some(time) => time,
                None => steps.options[task][chosen[task] as usize].span,
            };
            let after = steps.next[node].iter().map(|&next| self.levels[next as usize]).max();
            self.levels[node] = time + after.unwrap_or(0);
        }
    }

    /// The next motif of a queue, if it is ready.
    fn next(&self, line: usize) -> Option<u32> {
        match &self.policy {
            Policy::Fixed(_) => {
                self.fixed[line].last().copied().filter(|&motif| self.is_ready[motif as usize])
            }
            _ => self.ready[line].peek().map(|&(_, _, motif)| motif),
        }
    }

    /// Unrolls the fixed order over all steps: slots ahead of the first step come first, and slots
    /// beyond the last step are omitted.
    fn fix(&mut self) {
        let Policy::Fixed(order) = &self.policy else { return };
        self.is_ready.clear();
        self.is_ready.resize(self.motif_waits.len(), false);
        let steps = self.steps.steps as i64;
        for (line, slots) in self.fixed.iter_mut().zip(order) {
            line.clear();
            let most = slots.iter().map(|slot| i64::from(slot.ahead)).max().unwrap_or(0);
            for turn in (-most..steps).rev() {
                for slot in slots.iter().rev() {
                    let step = turn + i64::from(slot.ahead);
                    if (0..steps).contains(&step) {
                        let node = step as usize * self.steps.tasks + slot.task as usize;
                        line.push(self.first[node] + slot.motif);
                    }
                }
            }
        }
    }

    fn node_of(&self, motif: u32) -> usize {
        // Nodes that compute have no motifs and share their first index with the next node, so take the
        // last.
        self.first.partition_point(|&first| first <= motif) - 1
    }

    fn span(
        &self,
        node: usize,
        motif: Option<(u32, u32)>,
        (start, end): (u64, u64),
    ) -> ScheduledSpan {
        ScheduledSpan {
            step: (node / self.steps.tasks) as u32,
            task: (node % self.steps.tasks) as u32,
            motif: motif.map(|motif| motif.0),
            channel: motif.map(|motif| motif.1),
            start: Nanos(start),
            end: Nanos(end),
        }
    }

    /// All dependencies of a node are done.
    fn start(
        &mut self,
        node: usize,
        chosen: &[u32],
        now: u64,
        note: &mut dyn FnMut(ScheduledSpan),
    ) {
        let task = node % self.steps.tasks;
        if let Some(time) = self.steps.computes[task] {
            let motifs = self.motif_waits.len() as u32;
            self.events.push(Reverse((now + time, motifs + node as u32)));
            return note(self.span(node, None, (now, now + time)));
        }
        let option = &self.steps.options[task][chosen[task] as usize];
        if option.motifs.is_empty() {
            return self.finish_node(node, chosen, now, note);
        }
        for (number, motif) in (0..).zip(&option.motifs) {
            if motif.waits == 0 {
                self.offer(node, number, motif, option.span);
            }
        }
    }

    /// A motif is ready: it enters its queue.
    fn offer(&mut self, node: usize, number: u32, motif: &Timed, span: u64) {
        let tasks = self.steps.tasks;
        let order = match &self.policy {
            Policy::CriticalPath => self.levels[node] - span + motif.tail,
            Policy::Fifo => u64::MAX - node as u64,
            Policy::Lifo => node as u64,
            Policy::Fixed(_) => {
                self.is_ready[(self.first[node] + number) as usize] = true;
                return;
            }
            Policy::Hand(order) => {
                let place = (node / tasks * tasks) as i64 + i64::from(order[node % tasks]);
                ((1 << 62) - place) as u64
            }
        };
        let id = self.first[node] + number;
        let line = if self.policy == Policy::Fifo { 0 } else { motif.channel as usize };
        self.ready[line].push((order, Reverse(id), id));
    }

    fn finish(
        &mut self,
        event: u32,
        chosen: &[u32],
        now: u64,
        note: &mut dyn FnMut(ScheduledSpan),
    ) {
        let steps = self.steps;
        if let Some(node) = event.checked_sub(self.motif_waits.len() as u32) {
            return self.finish_node(node as usize, chosen, now, note);
        }
        let node = self.node_of(event);
        let option = &steps.options[node % steps.tasks][chosen[node % steps.tasks] as usize];
        let motif = &option.motifs[(event - self.first[node]) as usize];
        self.is_busy[motif.channel as usize] = false;
        for &next in &motif.next {
            let id = (self.first[node] + next) as usize;
            self.motif_waits[id] -= 1;
            if self.motif_waits[id] == 0 {
                self.offer(node, next, &option.motifs[next as usize], option.span);
            }
        }
        self.left[node] -= 1;
        if self.left[node] == 0 {
            self.finish_node(node, chosen, now, note);
        }
    }

    fn finish_node(
        &mut self,
        node: usize,
        chosen: &[u32],
        now: u64,
        note: &mut dyn FnMut(ScheduledSpan),
    ) {
        let steps = self.steps;
        for &next in &steps.next[node] {
            self.waits[next as usize] -= 1;
            if self.waits[next as usize] == 0 {
                self.start(next as usize, chosen, now, note);
            }
        }
    }
}
