//! Schedules: every vector's links and start times.

use std::ops::Range;

use base::{Bytes, LinkId, Nanos, Ticks};
use smallvec::SmallVec;
use topology::{Link, Network, RotationalSymmetry};

use crate::task::Task;

/// Timing parameters of a chip's links and memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timing {
    /// Clock frequency in Hz.
    pub clock_hz: f64,
    /// Payload of a vector.
    pub vector: Bytes,
    /// Size of an encoded vector on a link.
    pub encoded: Bytes,
    /// Forwarding latency: from the arrival of a vector to its next hop, besides the link's latency.
    pub forward: Nanos,
    /// Buffer capacity of a chip for forwarded vectors.
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
    /// Returns the memory of a chip.
    pub fn memory(&self) -> Bytes {
        Bytes(self.buffer * self.vector.0)
    }

    /// Returns the number of vectors of a tensor.
    pub fn vectors(&self, size: Bytes) -> u64 {
        size.0.div_ceil(self.vector.0)
    }

    /// Returns how long a vector occupies a link, rounded up.
    pub fn slot(&self, link: &Link) -> Ticks {
        Ticks((self.encoded.0 as f64 * 8.0 / link.rate.0 * self.clock_hz * 1e3).ceil() as u64)
    }

    /// Returns the time between consecutive vectors over these links: the slot of the slowest.
    pub fn pace(&self, network: &Network, links: impl IntoIterator<Item = LinkId>) -> Ticks {
        let slots = links.into_iter().map(|link| self.slot(network.link(link)));
        slots.max().unwrap_or_default()
    }

    /// Returns the hop latency: from the start of a vector on a link to its earliest start on the next.
    pub fn hop(&self, link: &Link) -> Ticks {
        self.ticks(link.latency + self.forward)
    }

    /// Converts nanoseconds to ticks (1/1000 cycle), rounded up.
    pub fn ticks(&self, time: Nanos) -> Ticks {
        Ticks((time.0 as f64 * self.clock_hz / 1e6).ceil() as u64)
    }

    /// Converts ticks to nanoseconds.
    pub fn nanos(&self, time: Ticks) -> f64 {
        time.0 as f64 / self.clock_hz * 1e6
    }
}

/// One hop of a train: a link, and when the train's first vector starts on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hop {
    /// The link.
    pub link: LinkId,
    /// Start time of the first vector.
    pub start: Ticks,
}

/// Consecutive vectors of a transfer that are sent back to back over the same links.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Train {
    /// Task number of the transfer.
    pub task: u32,
    /// Index of the first vector within the transfer.
    pub first: u64,
    /// Number of vectors.
    pub count: u64,
    /// Their path.
    pub hops: SmallVec<[Hop; 3]>,
}

impl Train {
    /// Returns its links, in order.
    pub fn links(&self) -> impl Iterator<Item = LinkId> + '_ {
        self.hops.iter().map(|hop| hop.link)
    }
}

/// The links and start times of every vector.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    /// Timing that it assumes.
    pub timing: Timing,
    /// All vectors, as trains.
    pub trains: Vec<Train>,
    /// End of each task; a transfer ends when all of it has arrived.
    pub ends: Vec<Ticks>,
}

impl Schedule {
    /// Returns the makespan: when all tasks are done.
    pub fn end(&self) -> Ticks {
        self.ends.iter().copied().max().unwrap_or_default()
    }
}

/// Tasks and their schedule: of all chips, or of one part of a rotational symmetry whose other parts do
/// the same.
///
/// Task `i` of part `turn` has the number `turn * tasks.len() + i` in dependencies. The tasks of other
/// parts are implicit: rotated by a part, links map to links.
#[derive(Clone, PartialEq, Debug)]
pub struct RoutePlan {
    /// Rotational symmetry of the network.
    pub circle: RotationalSymmetry,
    /// Tasks of the first part's chips.
    pub tasks: Vec<Task>,
    /// Schedule of these tasks.
    pub schedule: Schedule,
}

impl RoutePlan {
    /// Returns the makespan: when all tasks are done.
    pub fn end(&self) -> Ticks {
        self.schedule.end()
    }

    /// Returns the plan with the tasks of all chips made explicit. O(turns · (tasks + trains)).
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

    /// Returns a task of the first part rotated to another part.
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

/// Returns the vectors of part `number` when divided as evenly as possible into `parts`.
pub(crate) fn part(vectors: u64, parts: u64, number: u64) -> Range<u64> {
    let first = |number: u64| number * (vectors / parts) + number.min(vectors % parts);
    first(number)..first(number + 1)
}
