//! What is asked for, and the schedule that does it.

use std::ops::Range;

use base::{Bytes, LinkId, Nanos, Ticks, VertexId};
use fabric::{Link, Network};
use smallvec::SmallVec;

/// A tensor that goes from one vertex to another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Who has it.
    pub source: VertexId,
    /// Who gets it.
    pub target: VertexId,
    /// How much it is.
    pub size: Bytes,
    /// Transfers, by their places, that must have come before it begins.
    pub after: SmallVec<[u32; 2]>,
    /// The transfer that brings it to its source; each vector may go on as soon as it is there.
    pub from: Option<u32>,
}

impl Transfer {
    /// One that may begin at once.
    pub fn new(source: VertexId, target: VertexId, size: Bytes) -> Self {
        Self { source, target, size, after: SmallVec::new(), from: None }
    }

    /// All transfers that something of it waits for.
    pub fn waits_for(&self) -> impl Iterator<Item = u32> + '_ {
        self.after.iter().copied().chain(self.from)
    }
}

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
    /// Of which transfer.
    pub transfer: u32,
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
    /// When each transfer has come.
    pub ends: Vec<Ticks>,
}

impl Schedule {
    /// When all have come.
    pub fn end(&self) -> Ticks {
        self.ends.iter().copied().max().unwrap_or_default()
    }
}

/// The vectors of one of so many parts that are as alike as they can be.
pub(crate) fn part(vectors: u64, parts: u64, number: u64) -> Range<u64> {
    let first = |number: u64| number * (vectors / parts) + number.min(vectors % parts);
    first(number)..first(number + 1)
}
