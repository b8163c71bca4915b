//! Builder of a network's links.

use base::{BitsPerSecond, LinkId, Nanos, VertexId};

use crate::network::{Cable, Link};

/// Parameters of links.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkModel {
    /// Bandwidth in each direction, encoding overhead included.
    pub rate: BitsPerSecond,
    /// From the first bit sent to the first bit received.
    pub latency: Nanos,
}

impl Default for LinkModel {
    /// 4 lanes of 25 Gbit/s; the mean of the measured latencies, 216.67 cycles of 900 MHz.
    ///
    /// Source: the multi-TSP system §2.3 and Table 2.
    fn default() -> Self {
        Self { rate: BitsPerSecond(100e9), latency: Nanos(241) }
    }
}

/// Links laid so far.
pub(crate) struct Wiring {
    model: LinkModel,
    links: Vec<Link>,
}

impl Wiring {
    /// Starts with links of this model.
    pub fn new(model: LinkModel) -> Self {
        Self { model, links: Vec::new() }
    }

    /// Changes the model of the links added from now on.
    pub fn change(&mut self, model: LinkModel) {
        self.model = model;
    }

    /// Adds a cable; returns the link numbers of its two directions.
    pub fn join(&mut self, one: VertexId, other: VertexId, cable: Cable) -> (LinkId, LinkId) {
        let LinkModel { rate, latency } = self.model;
        let first = self.links.len() as u32;
        self.links.push(Link { source: one, target: other, rate, latency, cable });
        self.links.push(Link { source: other, target: one, rate, latency, cable });
        (LinkId(first), LinkId(first + 1))
    }

    /// Returns all links.
    pub fn finish(self) -> Vec<Link> {
        self.links
    }
}
