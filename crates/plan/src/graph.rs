//! Training steps whose devices differ: what each computes, and what goes between which of them.
//!
//! Every device computes one task at a time. Every device has channels; what goes from one to another
//! takes a channel of both, and an all-reduce one of each of its members. A piece of communication
//! begins when all that it takes is free, in one order over all lines, so that the first of all can
//! always begin.
//!
//! Source: SYNDICATE §4.3; the graphs are those of FlexFlow's task simulator.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use base::{Nanos, Random};
use place::Job;

use crate::cost::ChannelCost;
use crate::search::{Limits, StopReason};
use crate::step::Dependency;

/// One thing that is done in a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// What.
    pub job: Job,
    /// What must be done before it begins.
    pub after: Vec<Dependency>,
}

/// A step of several devices, done so many times in a row, over channels that every device has.
#[derive(Clone, Debug)]
pub struct Graph {
    nodes: Vec<Node>,
    channels: Vec<ChannelCost>,
    steps: usize,
    devices: usize,
    /// Of each node of each step, which wait for it, and how many it waits for.
    next: Vec<Vec<u32>>,
    waits: Vec<u32>,
    /// Of each node, which kind of communication it is: those alike are carried out alike.
    kinds: Vec<Option<u32>>,
    kind_count: usize,
}

/// How all communication of one kind is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Manner {
    /// Into how many pieces it is cut.
    pub pieces: u32,
    /// By which channel; none is by all, in turn.
    pub channel: Option<u32>,
}

/// What goes first at every line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Whatever was there first, and nothing before it.
    Strict,
    /// Whatever was there first; while that waits for others, what comes soon after it.
    Fifo,
    /// That from which the longest chain of work leads to the end; likewise.
    CriticalPath,
}

/// A way to do a graph, and how long it takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Of each kind of communication.
    pub manners: Vec<Manner>,
    /// When all steps are done.
    pub end: Nanos,
    /// Plans that were looked at.
    pub evaluations: u64,
    /// Why no more were.
    pub reason: StopReason,
}

impl Graph {
    /// So many steps of these nodes, each of which waits for earlier ones of its own step only, or for
    /// any of the step before.
    ///
    /// # Panics
    /// A node waits for what is not there, or there is no channel.
    pub fn new(nodes: Vec<Node>, channels: Vec<ChannelCost>, steps: u32) -> Self {
        assert!(!channels.is_empty(), "there is a channel");
        let (count, steps) = (nodes.len(), steps as usize);
        let mut next = vec![Vec::new(); count * steps];
        let mut waits = vec![0; count * steps];
        for step in 0..steps {
            for (number, node) in nodes.iter().enumerate() {
                for after in &node.after {
                    let is_earlier = after.before > 0 || (after.task as usize) < number;
                    assert!(is_earlier && (after.task as usize) < count, "nodes wait for others");
                    let Some(other) = step.checked_sub(after.before as usize) else { continue };
                    next[other * count + after.task as usize].push((step * count + number) as u32);
                    waits[step * count + number] += 1;
                }
            }
        }
        let devices = nodes.iter().map(|node| node.job.devices() as usize).max().unwrap_or(0);
        let names: BTreeSet<_> = nodes.iter().filter_map(|node| kind(&node.job)).collect();
        let names: Vec<_> = names.into_iter().collect();
        let number =
            |node: &Node| names.binary_search(&kind(&node.job)?).ok().map(|number| number as u32);
        let kinds = nodes.iter().map(number).collect();
        let kind_count = names.len();
        Self { nodes, channels, steps, devices, next, waits, kinds, kind_count }
    }

    /// How many kinds of communication there are.
    pub fn kinds(&self) -> usize {
        self.kind_count
    }

    /// Each kind as it takes least alone: whole, by the channel that is fastest.
    pub fn greedy(&self) -> Vec<Manner> {
        let fastest = (0..self.channels.len())
            .max_by(|&a, &b| self.channels[a].rate.0.total_cmp(&self.channels[b].rate.0));
        let channel = fastest.map(|channel| channel as u32);
        vec![Manner { pieces: 1, channel }; self.kind_count]
    }

    /// When all steps are done, if each kind is carried out in its manner.
    /// O(pieces · (log pieces + members)).
    pub fn end(&self, manners: &[Manner], line: Line) -> Nanos {
        Run::new(self, manners, line).end()
    }

    /// Looks for the manners that together take least; no worse than the greedy ones.
    pub fn search(&self, line: Line, limits: &Limits) -> Answer {
        let most = self.channels.len() as u32;
        let mut options: Vec<Manner> = Vec::new();
        for pieces in [1, 2, 4, 8, 16] {
            options.extend((0..most).map(|channel| Manner { pieces, channel: Some(channel) }));
            if most > 1 && pieces > 1 {
                options.push(Manner { pieces, channel: None });
            }
        }
        let mut random = Random::of(&[limits.seed]);
        let mut best = self.greedy();
        let mut end = self.end(&best, line);
        let (mut tried, mut found_at) = (1, 1);
        let mut reason = StopReason::Evaluations;
        while tried < limits.evaluations && self.kind_count > 0 {
            if tried > limits.evaluations / 4 && found_at < tried / 2 {
                reason = StopReason::Stale;
                break;
            }
            let mut manners = best.clone();
            let kind = random.below(self.kind_count as u64) as usize;
            manners[kind] = options[random.below(options.len() as u64) as usize];
            tried += 1;
            let changed = self.end(&manners, line);
            if changed < end {
                (best, end, found_at) = (manners, changed, tried);
            }
        }
        Answer { manners: best, end, evaluations: tried, reason }
    }

    /// What a piece of a job takes by a channel.
    fn time(&self, job: &Job, pieces: u32, channel: usize) -> u64 {
        let cost = &self.channels[channel];
        let moved = |bytes: f64| bytes / f64::from(pieces) * 8e9 / cost.rate.0;
        let (bytes, rounds) = match job {
            Job::Compute { time, .. } => return time.0,
            Job::Transfer { size, .. } => (size.0 as f64, 1.0),
            Job::Collective { kind, members, size } => {
                let count = members.len() as f64;
                let passes = f64::from(kind.passes());
                (passes * (count - 1.0) / count * size.0 as f64, passes * (count - 1.0))
            }
        };
        (moved(bytes) + rounds * cost.latency.0 as f64).round() as u64
    }
}

/// Communication of one kind is carried out in one manner: of the same size, among as many.
fn kind(job: &Job) -> Option<(u32, u64, usize)> {
    match job {
        Job::Compute { .. } => None,
        Job::Transfer { size, .. } => Some((0, size.0, 2)),
        Job::Collective { kind, members, size } => Some((kind.passes(), size.0, members.len())),
    }
}

/// How far behind the first in line something is looked for that can begin.
const DEPTH: usize = 8;

/// What is in line: what goes first is greatest.
type Place = (u64, Reverse<u32>);

/// One schedule of a graph.
struct Run<'a> {
    graph: &'a Graph,
    manners: &'a [Manner],
    line: Line,
    levels: Vec<u64>,
    waits: Vec<u32>,
    /// Pieces of each node that are not done, and the first piece of each.
    left: Vec<u32>,
    first: Vec<u32>,
    node_of: Vec<u32>,
    /// Of each resource: a device, or a channel of one for sending or receiving.
    lines: Vec<BTreeSet<Reverse<Place>>>,
    is_busy: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, u32)>>,
    arrivals: u64,
}

impl<'a> Run<'a> {
    fn new(graph: &'a Graph, manners: &'a [Manner], line: Line) -> Self {
        let count = graph.nodes.len();
        let total = count * graph.steps;
        let (mut first, mut left) = (Vec::with_capacity(total), Vec::with_capacity(total));
        let mut node_of = Vec::new();
        for node in 0..total {
            let pieces = graph.kinds[node % count].map_or(1, |kind| manners[kind as usize].pieces);
            first.push(node_of.len() as u32);
            left.push(pieces);
            node_of.extend((0..pieces).map(|_| node as u32));
        }
        let resources = graph.devices * (1 + 2 * graph.channels.len());
        let mut run = Self {
            graph,
            manners,
            line,
            levels: vec![0; total],
            waits: graph.waits.clone(),
            left,
            first,
            node_of,
            lines: vec![BTreeSet::new(); resources],
            is_busy: vec![false; resources],
            events: BinaryHeap::new(),
            arrivals: 0,
        };
        for node in (0..total).rev() {
            let after = graph.next[node].iter().map(|&next| run.levels[next as usize]).max();
            let pieces: u64 = (0..run.left[node]).map(|piece| run.time(node, piece)).sum();
            run.levels[node] = pieces + after.unwrap_or(0);
        }
        run
    }

    fn channel(&self, node: usize, piece: u32) -> usize {
        let kind = self.graph.kinds[node % self.graph.nodes.len()];
        let Some(kind) = kind else { return 0 };
        match self.manners[kind as usize].channel {
            Some(channel) => channel as usize,
            None => piece as usize % self.graph.channels.len(),
        }
    }

    fn time(&self, node: usize, piece: u32) -> u64 {
        let job = &self.graph.nodes[node % self.graph.nodes.len()].job;
        let pieces = match self.graph.kinds[node % self.graph.nodes.len()] {
            Some(kind) => self.manners[kind as usize].pieces,
            None => 1,
        };
        self.graph.time(job, pieces, self.channel(node, piece))
    }

    /// What a piece takes while it is under way.
    fn resources(&self, piece: u32) -> impl Iterator<Item = usize> + use<'a> {
        let node = self.node_of[piece as usize] as usize;
        let channel = self.channel(node, piece - self.first[node]);
        let (devices, channels) = (self.graph.devices, self.graph.channels.len());
        let sends = move |device: u32| devices + (device as usize * channels + channel) * 2;
        let job = &self.graph.nodes[node % self.graph.nodes.len()].job;
        let (own, pair, members) = match job {
            Job::Compute { device, .. } => (Some(*device as usize), None, None),
            Job::Transfer { source, target, .. } => {
                (None, Some([sends(*source), sends(*target) + 1]), None)
            }
            Job::Collective { members, .. } => (None, None, Some(members)),
        };
        let all = members.into_iter().flat_map(|members| members.iter());
        let all = all.flat_map(move |&member| [sends(member), sends(member) + 1]);
        own.into_iter().chain(pair.into_iter().flatten()).chain(all)
    }

    fn end(mut self) -> Nanos {
        let total = self.waits.len();
        let (mut now, mut done) = (0, Vec::new());
        // Lines at which something has changed.
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
                    let graph = self.graph;
                    for &next in &graph.next[node] {
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

    /// Begins what can begin once all that happens at a time has happened: what is first in all of its
    /// lines, all of which are free. In the order of the critical path what comes soon after it may
    /// begin instead: a line does not stand still for what others keep waiting.
    fn begin(&mut self, open: &mut Vec<usize>, now: u64) {
        let depth = match self.line {
            Line::Strict => 1,
            Line::Fifo | Line::CriticalPath => DEPTH,
        };
        let lines = open.drain(..).filter(|&line| !self.is_busy[line]);
        let mut next: Vec<Place> = lines
            .flat_map(|line| self.lines[line].iter().take(depth).map(|place| place.0))
            .collect();
        next.sort_unstable_by_key(|&place| Reverse(place));
        next.dedup();
        for place in next {
            let piece = place.1.0;
            let can_begin = |at: usize| {
                let is_first = || self.lines[at].first() == Some(&Reverse(place));
                !self.is_busy[at] && (depth > 1 || is_first())
            };
            if !self.resources(piece).all(can_begin) {
                continue;
            }
            let node = self.node_of[piece as usize] as usize;
            let time = self.time(node, piece - self.first[node]);
            for at in self.resources(piece) {
                self.lines[at].remove(&Reverse(place));
                self.is_busy[at] = true;
            }
            self.events.push(Reverse((now + time, piece)));
        }
    }

    /// A node waits for nothing any more: its pieces stand in line.
    fn arrive(&mut self, node: usize, now: u64, open: &mut Vec<usize>) {
        self.arrivals += 1;
        for number in 0..self.left[node] {
            let piece = self.first[node] + number;
            let rank = match self.line {
                Line::Strict | Line::Fifo => u64::MAX - self.arrivals,
                Line::CriticalPath => self.levels[node],
            };
            let mut last = None;
            for resource in self.resources(piece) {
                self.lines[resource].insert(Reverse((rank, Reverse(piece))));
                last = Some(resource);
            }
            match last {
                Some(resource) => open.push(resource),
                // An all-reduce of nobody.
                None => self.events.push(Reverse((now, piece))),
            }
        }
    }
}
