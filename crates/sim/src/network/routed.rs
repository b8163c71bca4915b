//! The same network without a schedule: a dynamically routed baseline with queueing at links.
//!
//! Links serve messages first-come first-served, and a message is forwarded as soon as its head has
//! arrived (virtual cut-through). Queues are unbounded, so there is no back-pressure, deadlock or loss.
//! What the multi-TSP system avoids: a message's latency depends on all others (contention).
//!
//! Source: the multi-TSP system §4.2-4.3, of conventional networks.

use std::collections::BTreeMap;

use base::{LinkId, Random, Ticks, VertexId};
use route::Timing;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use topology::Fabric;

/// Routing policy of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Routing {
    /// A random minimal path.
    Minimal,
    /// A random minimal path, or a path through a random intermediate chip, whichever promises less
    /// delay on its first link (UGAL with the source's local queue lengths).
    Adaptive,
}

/// A message to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// Sender.
    pub source: VertexId,
    /// Receiver.
    pub target: VertexId,
    /// Length in vectors.
    pub vectors: u32,
    /// Tag chosen by the sender.
    pub tag: u32,
}

/// A traffic pattern: which messages are sent when.
pub trait Traffic {
    /// Sends the initial messages, each at its time.
    fn begin(&mut self, send: &mut dyn FnMut(Ticks, Message));

    /// Handles the complete arrival of a message; messages pushed to `send` are sent at once.
    fn came(&mut self, message: &Message, sent: Ticks, now: Ticks, send: &mut Vec<Message>);
}

/// Metrics of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Delivered {
    /// When the last message had arrived completely.
    pub end: Ticks,
    /// Number of messages delivered.
    pub messages: u64,
    /// Number of vectors transmitted, counted once per link.
    pub hops: u64,
}

/// A path as links in order.
type LinkPath = SmallVec<[LinkId; 4]>;

/// Path of a message that has not departed yet.
const UNKNOWN: u32 = u32::MAX;

struct Flight {
    message: Message,
    sent: u64,
    /// Indices in `Routed::paths` of its path, and of the path that follows, if any.
    path: u32,
    then: Option<u32>,
    /// Number of links of the path already traversed.
    hop: u32,
}

/// A dynamically routed network whose links are first-come first-served queues.
pub struct Routed<'a> {
    fabric: &'a Fabric,
    routing: Routing,
    random: Random,
    /// For each link: slot time of a vector, hop latency, and when it is free.
    links: Vec<(u64, u64, u64)>,
    /// Cached minimal paths, and for each pair of chips the range of its paths.
    paths: Vec<LinkPath>,
    known: FxHashMap<(VertexId, VertexId), (u32, u32)>,
    /// For each chip, the target it last sent to, and the range of those paths.
    last: Vec<(VertexId, (u32, u32))>,
    flights: Vec<Flight>,
    spare: Vec<u32>,
    events: Queue,
    now: u64,
}

impl<'a> Routed<'a> {
    /// # Arguments
    /// - `seed`: random seed of the choice among minimal paths and of intermediate chips.
    pub fn new(fabric: &'a Fabric, timing: Timing, routing: Routing, seed: u64) -> Self {
        let links = fabric.network().links().iter();
        let links = links.map(|link| (timing.slot(link).0, timing.hop(link).0, 0)).collect();
        Self {
            fabric,
            routing,
            random: Random::of(&[seed]),
            links,
            paths: vec![LinkPath::new()],
            known: FxHashMap::default(),
            last: vec![(VertexId(u32::MAX), (0, 0)); fabric.network().vertices() as usize],
            flights: Vec::new(),
            spare: Vec::new(),
            events: Queue::default(),
            now: 0,
        }
    }

    /// Simulates traffic until no message is in flight. Of messages that reach a link at the same time,
    /// the one sent to it first is served first.
    pub fn run<T: Traffic>(mut self, traffic: &mut T) -> Delivered {
        let mut delivered = Delivered::default();
        traffic.begin(&mut |when, message| self.send(when.0, message));
        let mut wanted: Vec<Message> = Vec::new();
        while let Some((now, number)) = self.events.pop() {
            self.now = now;
            if self.flights[number as usize].path == UNKNOWN {
                // Routed on departure, by the queue lengths at this time.
                let (path, then) = self.route(self.flights[number as usize].message);
                let flight = &mut self.flights[number as usize];
                (flight.path, flight.then) = (path, then);
            }
            let flight = &mut self.flights[number as usize];
            let mut path = &self.paths[flight.path as usize];
            if flight.hop as usize == path.len()
                && let Some(then) = flight.then.take()
            {
                (flight.path, flight.hop) = (then, 0);
                path = &self.paths[then as usize];
            }
            let Some(&link) = path.get(flight.hop as usize) else {
                delivered.messages += 1;
                delivered.end = Ticks(now);
                let (message, sent) = (flight.message, Ticks(flight.sent));
                self.spare.push(number);
                traffic.came(&message, sent, Ticks(now), &mut wanted);
                for message in wanted.drain(..) {
                    self.send(now, message);
                }
                continue;
            };
            flight.hop += 1;
            let is_last = flight.hop as usize == path.len() && flight.then.is_none();
            let vectors = u64::from(flight.message.vectors);
            delivered.hops += vectors;
            let (slot, hop, free) = &mut self.links[link.0 as usize];
            let start = (*free).max(now);
            *free = start + vectors * *slot;
            // The head proceeds (cut-through); at the target the tail counts.
            let next = if is_last { *free + *hop } else { start + *hop };
            self.events.push(next, number);
        }
        delivered
    }

    fn send(&mut self, when: u64, message: Message) {
        let flight = Flight { message, sent: when, path: UNKNOWN, then: None, hop: 0 };
        let number = match self.spare.pop() {
            Some(number) => {
                self.flights[number as usize] = flight;
                number
            }
            None => {
                self.flights.push(flight);
                self.flights.len() as u32 - 1
            }
        };
        self.events.push(when, number);
    }

    /// Routes a message: returns its path, and the second path of a non-minimal route.
    fn route(&mut self, message: Message) -> (u32, Option<u32>) {
        let Message { source, target, .. } = message;
        let minimal = self.minimal(source, target);
        if self.routing == Routing::Minimal || self.paths[minimal as usize].is_empty() {
            return (minimal, None);
        }
        let chips = u64::from(self.fabric.network().endpoints());
        let between = VertexId(self.random.below(chips) as u32);
        if between == source || between == target {
            return (minimal, None);
        }
        let longer = (self.minimal(source, between), self.minimal(between, target));
        let hops = |path: u32| self.paths[path as usize].len() as u64;
        let cost = |path: u32, hops: u64| {
            let (slot, _, free) = self.links[self.paths[path as usize][0].0 as usize];
            (free.saturating_sub(self.now) + slot) * hops
        };
        if cost(longer.0, hops(longer.0) + hops(longer.1)) < cost(minimal, hops(minimal)) {
            (longer.0, Some(longer.1))
        } else {
            (minimal, None)
        }
    }

    /// Returns a random minimal path; the empty path if there is none.
    fn minimal(&mut self, source: VertexId, target: VertexId) -> u32 {
        let last = &mut self.last[source.0 as usize];
        if last.0 != target {
            let known = *self.known.entry((source, target)).or_insert_with(|| {
                let first = self.paths.len() as u32;
                let paths = self.fabric.paths(source, target);
                self.paths.extend(paths.into_iter().map(|path| LinkPath::from_slice(&path)));
                (first, self.paths.len() as u32)
            });
            *last = (target, known);
        }
        let (first, end) = last.1;
        match end - first {
            0 => 0,
            1 => first,
            several => first + self.random.below(u64::from(several)) as u32,
        }
    }
}

/// A calendar event queue, ordered by time, then by insertion.
#[derive(Default)]
struct Queue {
    later: BTreeMap<u64, Vec<u32>>,
    now: u64,
    /// Events of the current time, and the number already processed.
    current: Vec<u32>,
    taken: usize,
    spare: Vec<Vec<u32>>,
}

impl Queue {
    fn push(&mut self, when: u64, what: u32) {
        if when == self.now && !self.current.is_empty() {
            self.current.push(what);
            return;
        }
        let spare = &mut self.spare;
        self.later.entry(when).or_insert_with(|| spare.pop().unwrap_or_default()).push(what);
    }

    fn pop(&mut self) -> Option<(u64, u32)> {
        if self.taken == self.current.len() {
            let (when, next) = self.later.pop_first()?;
            let mut done = std::mem::replace(&mut self.current, next);
            done.clear();
            self.spare.push(done);
            (self.now, self.taken) = (when, 0);
        }
        self.taken += 1;
        Some((self.now, self.current[self.taken - 1]))
    }
}

/// Uniform random traffic: every chip sends `count` messages to random other chips, at random times
/// within a span.
pub struct Uniform {
    chips: u32,
    count: u32,
    vectors: u32,
    /// Span in which all are sent, in ticks.
    within: u64,
    random: Random,
    /// Latency of each message, by tag.
    pub latencies: Vec<Ticks>,
}

impl Uniform {
    /// # Arguments
    /// - `count`: messages per chip, each of `vectors` vectors.
    /// - `within`: span in which they are sent, uniformly at random.
    pub fn new(chips: u32, count: u32, vectors: u32, within: Ticks, seed: u64) -> Self {
        let latencies = vec![Ticks(0); (chips * count) as usize];
        Self { chips, count, vectors, within: within.0, random: Random::of(&[seed]), latencies }
    }

    /// Generates the messages and their send times.
    pub fn messages(&mut self) -> Vec<(Ticks, Message)> {
        let (chips, vectors) = (u64::from(self.chips), self.vectors);
        let all = self.chips * self.count;
        let each = (0..all).map(|tag| {
            let source = tag % self.chips;
            let target = (u64::from(source) + 1 + self.random.below(chips - 1)) % chips;
            let (source, target) = (VertexId(source), VertexId(target as u32));
            let when = Ticks(self.random.below(self.within.max(1)));
            (when, Message { source, target, vectors, tag })
        });
        each.collect()
    }
}

impl Traffic for Uniform {
    fn begin(&mut self, send: &mut dyn FnMut(Ticks, Message)) {
        for (when, message) in self.messages() {
            send(when, message);
        }
    }

    fn came(&mut self, message: &Message, sent: Ticks, now: Ticks, _: &mut Vec<Message>) {
        self.latencies[message.tag as usize] = now - sent;
    }
}

/// A ring all-reduce: each chip sends a part on as soon as it has received one, until every part has
/// been around the ring twice.
pub struct RingAllReduce {
    chips: u32,
    vectors: u32,
    steps: u32,
    sent: Vec<u32>,
}

impl RingAllReduce {
    /// # Arguments
    /// - `vectors`: length of a chip's part in vectors.
    /// - `chunks`: number of tensors reduced one after another.
    pub fn new(chips: u32, vectors: u32, chunks: u32) -> Self {
        let steps = chunks * 2 * (chips - 1);
        Self { chips, vectors, steps, sent: vec![0; chips as usize] }
    }

    fn next(&mut self, chip: u32) -> Option<Message> {
        let sent = &mut self.sent[chip as usize];
        (*sent < self.steps).then(|| {
            *sent += 1;
            let target = VertexId((chip + 1) % self.chips);
            Message { source: VertexId(chip), target, vectors: self.vectors, tag: *sent }
        })
    }
}

impl Traffic for RingAllReduce {
    fn begin(&mut self, send: &mut dyn FnMut(Ticks, Message)) {
        for chip in 0..self.chips {
            if let Some(message) = self.next(chip) {
                send(Ticks(0), message);
            }
        }
    }

    fn came(&mut self, message: &Message, _: Ticks, _: Ticks, send: &mut Vec<Message>) {
        send.extend(self.next(message.target.0));
    }
}
