//! When everything is: every vector's links and starts.

use std::ops::Range;

use base::{Bytes, LinkId, Nanos, Ticks};
use fabric::{Link, Network, RotationalSymmetry};
use smallvec::SmallVec;

use crate::task::Task;

/// What chips take to move a vector.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timing {
    /// Cycles a second.
    pub clock_hz: f64,
    /// What a vector holds.
    pub vector: Bytes,
    /// What of it goes over a link.
    pub encoded: Bytes,
    /// From the arrival of a vector to its next hop, besides the link's latency.
    pub forward: Nanos,
    /// Vectors that a chip can hold for others.
    pub buffer: u64,
}

impl Default for Timing {
    /// 900 MHz; vectors of 320 bytes, 328 on a link; a hop of 722 ns with a link of 241; all of a
    /// chip's 220 MiB.
    ///
    /// Source: the multi-TSP system §2, §4.4, §5.6.
    fn default() -> Self {
        let vector = Bytes(320);
        let buffer = (220 << 20) / vector.0;
        Self { clock_hz: 900e6, vector, encoded: Bytes(328), forward: Nanos(481), buffer }
    }
}

impl Timing {
    /// What a chip can hold.
    pub fn memory(&self) -> Bytes {
        Bytes(self.buffer * self.vector.0)
    }

    /// Vectors of a tensor.
    pub fn vectors(&self, size: Bytes) -> u64 {
        size.0.div_ceil(self.vector.0)
    }

    /// How long a vector keeps a link busy, rounded up.
    pub fn slot(&self, link: &Link) -> Ticks {
        Ticks((self.encoded.0 as f64 * 8.0 / link.rate.0 * self.clock_hz * 1e3).ceil() as u64)
    }

    /// Time between two vectors that follow one another over these links: what the slowest takes.
    pub fn pace(&self, network: &Network, links: impl IntoIterator<Item = LinkId>) -> Ticks {
        let slots = links.into_iter().map(|link| self.slot(network.link(link)));
        slots.max().unwrap_or_default()
    }

    /// From when a vector begins on a link to when it may begin on the next one.
    pub fn hop(&self, link: &Link) -> Ticks {
        self.ticks(link.latency + self.forward)
    }

    /// A span in ticks, rounded up.
    pub fn ticks(&self, time: Nanos) -> Ticks {
        Ticks((time.0 as f64 * self.clock_hz / 1e6).ceil() as u64)
    }

    /// A span in nanoseconds.
    pub fn nanos(&self, time: Ticks) -> f64 {
        time.0 as f64 / self.clock_hz * 1e6
    }
}

/// A link, and when the first vector of a train begins on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hop {
    /// Which link.
    pub link: LinkId,
    /// When.
    pub start: Ticks,
}

/// Vectors of a transfer that go one right behind another over the same links.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Train {
    /// Of which transfer, by its number among the tasks.
    pub task: u32,
    /// The first of them, counted over the transfer.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Their way.
    pub hops: SmallVec<[Hop; 3]>,
}

impl Train {
    /// Its links, in order.
    pub fn links(&self) -> impl Iterator<Item = LinkId> + '_ {
        self.hops.iter().map(|hop| hop.link)
    }
}

/// Every vector's links and starts.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    /// What it counts on.
    pub timing: Timing,
    /// All vectors.
    pub trains: Vec<Train>,
    /// When each task is done: a transfer when all of it has come.
    pub ends: Vec<Ticks>,
}

impl Schedule {
    /// When all are done.
    pub fn end(&self) -> Ticks {
        self.ends.iter().copied().max().unwrap_or_default()
    }
}

/// Tasks and their schedule: of all chips, or of one part of a circle whose other parts do the same.
///
/// Task `i` of part `turn` has the number `turn * tasks.len() + i` when tasks wait for each other.
/// Nobody needs to write down what the others do: turned by a part, links come to lie on links.
#[derive(Clone, PartialEq, Debug)]
pub struct RoutePlan {
    /// How chips lie.
    pub circle: RotationalSymmetry,
    /// What the first part's chips send and compute.
    pub tasks: Vec<Task>,
    /// When.
    pub schedule: Schedule,
}

impl RoutePlan {
    /// When all are done.
    pub fn end(&self) -> Ticks {
        self.schedule.end()
    }

    /// The same with all tasks of all chips written down. O(turns · (tasks + trains)).
    pub fn whole(&self, network: &Network) -> RoutePlan {
        let turns = self.circle.turns();
        let count = self.tasks.len() as u32;
        let mut whole = RoutePlan {
            circle: RotationalSymmetry::trivial(network),
            tasks: Vec::with_capacity(self.tasks.len() * turns as usize),
            schedule: Schedule {
                timing: self.schedule.timing,
                trains: Vec::with_capacity(self.schedule.trains.len() * turns as usize),
                ends: self.schedule.ends.repeat(turns as usize),
            },
        };
        for turn in 0..turns {
            whole.tasks.extend(self.tasks.iter().map(|task| self.turned(task, turn)));
            whole.schedule.trains.extend(self.schedule.trains.iter().map(|train| {
                Train {
                    task: train.task + turn * count,
                    hops: train
                        .hops
                        .iter()
                        .map(|hop| Hop { link: self.circle.turn_link(hop.link, turn), ..*hop })
                        .collect(),
                    ..*train
                }
            }));
        }
        whole
    }

    /// What a task of the first part is in another.
    fn turned(&self, task: &Task, turn: u32) -> Task {
        let all = self.circle.turns() * self.tasks.len() as u32;
        let mut task = task.clone();
        task.renumber(|number| (number + turn * self.tasks.len() as u32) % all);
        match &mut task {
            Task::Transfer(transfer) => {
                transfer.source = self.circle.turn(transfer.source, turn);
                transfer.target = self.circle.turn(transfer.target, turn);
            }
            Task::Computation(computation) => {
                computation.chip = self.circle.turn(computation.chip, turn);
            }
        }
        task
    }
}

/// The vectors of one of so many parts that are as alike as they can be.
pub(crate) fn part(vectors: u64, parts: u64, number: u64) -> Range<u64> {
    let first = |number: u64| number * (vectors / parts) + number.min(vectors % parts);
    first(number)..first(number + 1)
}
