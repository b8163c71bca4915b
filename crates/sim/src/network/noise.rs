//! What goes wrong on links, by seed.

use std::collections::BTreeSet;

use base::{LinkId, Random, VertexId};
use smallvec::SmallVec;

use super::code::ENCODED;

/// Errors on links. The same seed gives the same ones, in whatever order they are asked for.
#[derive(Clone, PartialEq, Debug)]
pub struct Noise {
    /// Which errors.
    pub seed: u64,
    /// How probable it is that a vector has some on a link.
    pub probability: f64,
    /// How many of its bits are then wrong.
    pub bits: u32,
    /// Links on which every vector has that many wrong bits.
    pub broken: BTreeSet<LinkId>,
    /// Chips that send nothing.
    pub dead: BTreeSet<VertexId>,
}

impl Noise {
    /// No errors.
    pub fn none() -> Self {
        let (broken, dead) = (BTreeSet::new(), BTreeSet::new());
        Self { seed: 0, probability: 0.0, bits: 1, broken, dead }
    }

    /// Whether a chip sends nothing.
    pub fn is_dead(&self, chip: VertexId) -> bool {
        self.dead.contains(&chip)
    }

    /// Which bits of a vector are wrong after a link.
    pub(super) fn wrong_bits(
        &self,
        link: LinkId,
        train: u32,
        hop: u32,
        vector: u64,
    ) -> SmallVec<[u32; 2]> {
        let is_broken = self.broken.contains(&link);
        if self.probability <= 0.0 && !is_broken {
            return SmallVec::new();
        }
        let mut random = Random::of(&[self.seed, link.0.into(), train.into(), hop.into(), vector]);
        if random.fraction() >= self.probability && !is_broken {
            return SmallVec::new();
        }
        random.distinct(self.bits, 8 * ENCODED as u32)
    }
}
