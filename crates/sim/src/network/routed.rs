//! The same network without a schedule: messages take the next link when it is their turn.
//!
//! Links serve messages in the order in which they come, and a message goes on as soon as its head
//! has arrived (virtual cut-through). Queues have no end, so nothing deadlocks or is lost. What the
//! multi-TSP system does away with: the time that a message takes depends on all others.
//!
//! Source: the multi-TSP system §4.2-4.3, of conventional networks.

use std::collections::BTreeMap;

use base::{LinkId, Random, Ticks, VertexId};
use fabric::Fabric;
use route::Timing;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// How a message finds its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Routing {
    /// One of the minimal ways, at random.
    Minimal,
    /// The minimal way, or one over a chip between, whose first link promises to be sooner (UGAL with
    /// what the source sees of its own queues).
    Adaptive,
}

/// What somebody wants to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// Who sends.
    pub source: VertexId,
    /// Who gets it.
    pub target: VertexId,
    /// Vectors in it.
    pub vectors: u32,
    /// The sender's name for it.
    pub tag: u32,
}

/// Who sends what when.
pub trait Traffic {
    /// What is sent without anything having come, and when.
    fn begin(&mut self, send: &mut dyn FnMut(Ticks, Message));

    /// A message has come, all of it; what is put into `send` follows at once.
    fn came(&mut self, message: &Message, sent: Ticks, now: Ticks, send: &mut Vec<Message>);
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Delivered {
    /// When the last message had come.
    pub end: Ticks,
    /// How many came.
    pub messages: u64,
    /// Vectors over links.
    pub hops: u64,
}

/// Links in order.
type Way = SmallVec<[LinkId; 4]>;

/// The way of what has not left.
const UNKNOWN: u32 = u32::MAX;

struct Flight {
    message: Message,
    sent: u64,
    /// Its way, and the one that follows: places among those that are known.
    way: u32,
    then: Option<u32>,
    /// Links of the way that are behind it.
    hop: u32,
}

/// A network whose links serve who comes first.
pub struct Routed<'a> {
    fabric: &'a Fabric,
    routing: Routing,
    random: Random,
    /// For each link its slot, its hop, and when it is free.
    links: Vec<(u64, u64, u64)>,
    /// Minimal ways that were asked for, and for each pair of chips where its own begin and end.
    ways: Vec<Way>,
    known: FxHashMap<(VertexId, VertexId), (u32, u32)>,
    /// For each chip, to whom it sent last, and where those ways are.
    last: Vec<(VertexId, (u32, u32))>,
    flights: Vec<Flight>,
    spare: Vec<u32>,
    events: Queue,
    now: u64,
}

impl<'a> Routed<'a> {
    /// # Arguments
    /// - `seed`: which ways are taken where several are as good.
    pub fn new(fabric: &'a Fabric, timing: Timing, routing: Routing, seed: u64) -> Self {
        let links = fabric.network().links().iter();
        let links = links.map(|link| (timing.slot(link).0, timing.hop(link).0, 0)).collect();
        Self {
            fabric,
            routing,
            random: Random::of(&[seed]),
            links,
            ways: vec![Way::new()],
            known: FxHashMap::default(),
            last: vec![(VertexId(u32::MAX), (0, 0)); fabric.network().vertices() as usize],
            flights: Vec::new(),
            spare: Vec::new(),
            events: Queue::default(),
            now: 0,
        }
    }

    /// Lets traffic go until nothing is under way. Of messages that come to a link at the same time
    /// the one that was sent to it first is served first.
    pub fn run<T: Traffic>(mut self, traffic: &mut T) -> Delivered {
        let mut delivered = Delivered::default();
        traffic.begin(&mut |when, message| self.send(when.0, message));
        let mut wanted: Vec<Message> = Vec::new();
        while let Some((now, number)) = self.events.pop() {
            self.now = now;
            if self.flights[number as usize].way == UNKNOWN {
                // By what queues are like now that it leaves.
                let (way, then) = self.way(self.flights[number as usize].message);
                let flight = &mut self.flights[number as usize];
                (flight.way, flight.then) = (way, then);
            }
            let flight = &mut self.flights[number as usize];
            let mut way = &self.ways[flight.way as usize];
            if flight.hop as usize == way.len()
                && let Some(then) = flight.then.take()
            {
                (flight.way, flight.hop) = (then, 0);
                way = &self.ways[then as usize];
            }
            let Some(&link) = way.get(flight.hop as usize) else {
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
            let is_last = flight.hop as usize == way.len() && flight.then.is_none();
            let vectors = u64::from(flight.message.vectors);
            delivered.hops += vectors;
            let (slot, hop, free) = &mut self.links[link.0 as usize];
            let start = (*free).max(now);
            *free = start + vectors * *slot;
            // The head goes on; at the target the tail counts.
            let next = if is_last { *free + *hop } else { start + *hop };
            self.events.push(next, number);
        }
        delivered
    }

    fn send(&mut self, when: u64, message: Message) {
        let flight = Flight { message, sent: when, way: UNKNOWN, then: None, hop: 0 };
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

    /// The way of a message, and another one that follows.
    fn way(&mut self, message: Message) -> (u32, Option<u32>) {
        let Message { source, target, .. } = message;
        let minimal = self.minimal(source, target);
        if self.routing == Routing::Minimal || self.ways[minimal as usize].is_empty() {
            return (minimal, None);
        }
        let chips = u64::from(self.fabric.network().endpoints());
        let between = VertexId(self.random.below(chips) as u32);
        if between == source || between == target {
            return (minimal, None);
        }
        let longer = (self.minimal(source, between), self.minimal(between, target));
        let hops = |way: u32| self.ways[way as usize].len() as u64;
        let cost = |way: u32, hops: u64| {
            let (slot, _, free) = self.links[self.ways[way as usize][0].0 as usize];
            (free.saturating_sub(self.now) + slot) * hops
        };
        if cost(longer.0, hops(longer.0) + hops(longer.1)) < cost(minimal, hops(minimal)) {
            (longer.0, Some(longer.1))
        } else {
            (minimal, None)
        }
    }

    /// One of the minimal ways, at random; that of no links if there is none.
    fn minimal(&mut self, source: VertexId, target: VertexId) -> u32 {
        let last = &mut self.last[source.0 as usize];
        if last.0 != target {
            let known = *self.known.entry((source, target)).or_insert_with(|| {
                let first = self.ways.len() as u32;
                let ways = self.fabric.ways(source, target);
                self.ways.extend(ways.into_iter().map(|way| Way::from_slice(&way)));
                (first, self.ways.len() as u32)
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

/// What happens next: first by time, then in the order in which it was put in.
#[derive(Default)]
struct Queue {
    later: BTreeMap<u64, Vec<u32>>,
    now: u64,
    /// What happens now, and how much of it is over.
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

/// Every chip sends so many messages to others at random, all at once, as far as its links allow.
pub struct Uniform {
    chips: u32,
    count: u32,
    vectors: u32,
    /// Ticks within which all are sent.
    within: u64,
    random: Random,
    /// How long each took, by its tag.
    pub latencies: Vec<Ticks>,
}

impl Uniform {
    /// # Arguments
    /// - `count`: messages of each chip, each of so many vectors.
    /// - `within`: the time in which they are sent, evenly at random.
    pub fn new(chips: u32, count: u32, vectors: u32, within: Ticks, seed: u64) -> Self {
        let latencies = vec![Ticks(0); (chips * count) as usize];
        Self { chips, count, vectors, within: within.0, random: Random::of(&[seed]), latencies }
    }

    /// What is sent, and when it would be.
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

/// An all-reduce around a ring: each chip sends a part on as soon as it has got one, until every part
/// has been around twice.
pub struct RingAllReduce {
    chips: u32,
    vectors: u32,
    steps: u32,
    sent: Vec<u32>,
}

impl RingAllReduce {
    /// # Arguments
    /// - `vectors`: of a chip's part.
    /// - `chunks`: tensors that follow one another.
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
