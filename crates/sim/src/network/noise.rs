//! Fault injection on links, by seed.

use std::collections::BTreeSet;

use base::{LinkId, Random, VertexId};
use smallvec::SmallVec;

use super::code::ENCODED;

/// Faults of links and chips. The same seed gives the same errors, in whatever order they are queried.
#[derive(Clone, PartialEq, Debug)]
pub struct Noise {
    /// Random seed.
    pub seed: u64,
    /// Probability that a vector has bit errors on a link.
    pub probability: f64,
    /// Number of bit errors in such a vector.
    pub bits: u32,
    /// Links on which every vector has `bits` bit errors.
    pub broken: BTreeSet<LinkId>,
    /// Chips that send nothing.
    pub dead: BTreeSet<VertexId>,
}

impl Noise {
    /// Returns the absence of faults.
    pub fn none() -> Self {
        let (broken, dead) = (BTreeSet::new(), BTreeSet::new());
        Self { seed: 0, probability: 0.0, bits: 1, broken, dead }
    }

    /// Returns whether a chip is dead, that is, sends nothing.
    pub fn is_dead(&self, chip: VertexId) -> bool {
        self.dead.contains(&chip)
    }

    /// Returns the positions of the bit errors of a vector on a link.
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
