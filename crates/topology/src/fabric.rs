//! A network with topology-specific routing.

use base::{BitsPerSecond, LinkId, VertexId};
use smallvec::SmallVec;

use crate::dragonfly::Dragonfly;
use crate::network::Network;

/// Maximum number of shortest paths per pair of chips.
const PATHS_MAX: usize = 4;

/// A fabric of any topology.
#[derive(Clone, Debug)]
pub enum Fabric {
    /// Chips in nodes and groups.
    Dragonfly(Box<Dragonfly>),
    /// Any other.
    Network(Network),
}

impl Fabric {
    /// Returns its network of chips and links.
    pub fn network(&self) -> &Network {
        match self {
            Fabric::Dragonfly(dragonfly) => dragonfly.network(),
            Fabric::Network(network) => network,
        }
    }

    /// Returns the number of chips of a node, which share links to other nodes.
    pub fn chips_per_node(&self) -> u32 {
        match self {
            Fabric::Dragonfly(dragonfly) => dragonfly.chips_per_node(),
            Fabric::Network(_) => 1,
        }
    }

    /// Returns the bisection bandwidth, in both directions together; where the number of chips is odd,
    /// or a node or group would be split, the halves differ by one of them.
    pub fn bisection(&self) -> BitsPerSecond {
        let part = match self {
            Fabric::Dragonfly(dragonfly) if dragonfly.groups() > 1 => {
                dragonfly.network().endpoints() / dragonfly.groups()
            }
            _ => self.chips_per_node(),
        };
        let chips = self.network().endpoints();
        let half = if part < chips { chips / part / 2 * part } else { chips / 2 };
        BitsPerSecond(2.0 * self.network().cut(half).0)
    }

    /// Returns minimal paths from one chip to another, as links in order: in a Dragonfly over any link
    /// between their nodes or groups, else some of the shortest. None from a chip to itself.
    pub fn paths(
        &self,
        source: VertexId,
        target: VertexId,
    ) -> SmallVec<[SmallVec<[LinkId; 3]>; 1]> {
        if source == target {
            return SmallVec::new();
        }
        match self {
            Fabric::Dragonfly(dragonfly) => dragonfly.paths(source, target),
            Fabric::Network(network) => {
                let paths = network.shortest_paths(source, target, PATHS_MAX);
                paths.into_iter().map(SmallVec::from_vec).collect()
            }
        }
    }
}
