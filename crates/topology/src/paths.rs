//! The fluid view of a fabric of links: one minimal path for each pair of chips, and what rings of
//! neighbours get of the links that they share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use base::{BitsPerSecond, LinkId, Nanos, VertexId};

use crate::fabric::Fabric;

/// The links of paths, by source and target.
type Paths = BTreeMap<(u32, u32), Arc<[LinkId]>>;

/// A fabric, and the paths and rates that were asked for.
#[derive(Debug)]
pub struct LinkPaths {
    fabric: Fabric,
    paths: Mutex<Paths>,
    rates: Mutex<BTreeMap<(u32, u32), f64>>,
}

impl LinkPaths {
    /// Paths over the links of a fabric.
    pub fn new(fabric: Fabric) -> Self {
        Self { fabric, paths: Mutex::default(), rates: Mutex::default() }
    }

    /// The fabric.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Highest rate at which a chip can send over all of its links.
    pub fn injection_rate(&self) -> BitsPerSecond {
        let network = self.fabric.network();
        let of = |chip| {
            let links = network.out_of(VertexId(chip)).iter();
            links.map(|&link| network.link(link).rate.0).sum::<f64>()
        };
        BitsPerSecond((0..network.endpoints()).map(of).fold(0.0, f64::max))
    }

    /// Latency to the farthest chip from the first: its hops, each with the longest latency of a link.
    /// O(vertices + links).
    pub fn latency(&self) -> Nanos {
        let network = self.fabric.network();
        let hops = network.hops_from(VertexId(0)).into_iter().flatten();
        let longest = network.links().iter().map(|link| link.latency).max().unwrap_or_default();
        Nanos(u64::from(hops.max().unwrap_or(0)) * longest.0)
    }

    /// Returns the links of a minimal path; none from a chip to itself. Where there are several paths,
    /// pairs are spread over them (static equal-cost multi-path).
    pub fn path(&self, source: u32, target: u32) -> Arc<[LinkId]> {
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        let made = || {
            let all = self.fabric.paths(VertexId(source), VertexId(target));
            let chosen = (source as usize + target as usize) % all.len().max(1);
            all.get(chosen).map_or(Arc::from([]), |path| Arc::from(path.as_slice()))
        };
        paths.entry((source, target)).or_insert_with(made).clone()
    }

    /// Returns the bandwidth and the latency of the path from one chip to another.
    pub fn along_path(&self, source: u32, target: u32) -> (BitsPerSecond, Nanos) {
        let (network, path) = (self.fabric.network(), self.path(source, target));
        let links = || path.iter().map(|&link| network.link(link));
        let rate = links().map(|link| link.rate.0).fold(f64::INFINITY, f64::min);
        (BitsPerSecond(rate), links().map(|link| link.latency).sum())
    }

    /// Rate of each chip to the chip `stride` further on, when all of the first `stride * count` chips
    /// send around rings of `count` chips. O(chips · hops) when first asked for.
    pub fn ring_rate(&self, stride: u32, count: u32) -> BitsPerSecond {
        let chips = self.fabric.network().endpoints();
        let known = |rates: &BTreeMap<_, f64>| rates.get(&(stride, count)).copied();
        let lock = || self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rate) = known(&lock()) {
            return BitsPerSecond(rate);
        }
        let members = stride.saturating_mul(count).min(chips);
        let mut load: BTreeMap<LinkId, u32> = BTreeMap::new();
        for chip in 0..members {
            let next = if chip + stride < members { chip + stride } else { chip % stride };
            self.path(chip, next).iter().for_each(|&link| *load.entry(link).or_default() += 1);
        }
        let share = |(&link, &flows): (&LinkId, &u32)| {
            self.fabric.network().link(link).rate.0 / f64::from(flows)
        };
        let rate = load.iter().map(share).fold(f64::INFINITY, f64::min);
        let rate = if rate.is_finite() { rate } else { self.injection_rate().0 };
        lock().insert((stride, count), rate);
        BitsPerSecond(rate)
    }
}

/// Two views are equal if they are of one fabric in memory.
impl PartialEq for LinkPaths {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LinkModel, ring, torus};

    fn paths(network: crate::Network) -> LinkPaths {
        LinkPaths::new(Fabric::Network(network))
    }

    #[test]
    fn neighbours_on_a_ring_have_a_link_each() {
        let ring = paths(ring(8, 1, LinkModel::default()).unwrap());
        assert_eq!(ring.path(2, 3).len(), 1);
        assert_eq!(ring.path(2, 2).len(), 0);
        assert_eq!(ring.ring_rate(1, 8).0, 100e9);
        // Two interleaved rings share each link: hops of two, and all eight chips send.
        assert_eq!(ring.ring_rate(2, 4).0, 50e9);
        assert_eq!(ring.injection_rate().0, 200e9);
        assert_eq!(ring.latency(), Nanos(4 * 241));
    }

    #[test]
    fn rows_of_a_torus_do_not_share_links() {
        let torus = paths(torus(&[4, 4], LinkModel::default()).unwrap());
        assert_eq!(torus.ring_rate(1, 4).0, 100e9);
        assert_eq!(torus.ring_rate(4, 4).0, 100e9);
    }
}
