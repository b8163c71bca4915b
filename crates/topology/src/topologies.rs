//! Topologies besides the Dragonfly: ring, torus, switch, fat tree, clusters of nodes with a switch
//! each.

use base::VertexId;

use crate::network::{Cable, Network, NetworkError};
use crate::wiring::{LinkModel, Wiring};

/// Builds a ring of chips with `cables` cables between neighbours: the alternative wiring of a node,
/// which gives neighbours in a pipeline more bandwidth.
///
/// Source: the multi-TSP system §4.4, where a node of 8 has 3.
///
/// # Errors
/// There is no chip, or the link model is invalid.
pub fn ring(chips: u32, cables: u32, model: LinkModel) -> Result<Network, NetworkError> {
    let mut wiring = Wiring::new(model);
    for (one, other) in neighbours(chips) {
        for _ in 0..cables {
            wiring.join(VertexId(one), VertexId(other), Cable::Chassis);
        }
    }
    Network::new(chips, 0, wiring.finish())
}

/// Builds a torus of these extents; the last one varies fastest. Extents of 2 have a single cable.
///
/// # Errors
/// An extent is 0, or the link model is invalid.
///
/// ```
/// use topology::{LinkModel, torus};
/// let torus = torus(&[4, 8], LinkModel::default()).unwrap();
/// assert_eq!((torus.endpoints(), torus.diameter()), (32, 2 + 4));
/// ```
pub fn torus(extents: &[u32], model: LinkModel) -> Result<Network, NetworkError> {
    let chips = extents.iter().product();
    let mut wiring = Wiring::new(model);
    let mut stride = chips;
    for &extent in extents {
        let whole = stride;
        stride /= extent.max(1);
        for chip in 0..chips {
            let place = chip % whole / stride.max(1);
            // Each cable is added at its first end; the last one closes the ring.
            let next = neighbours(extent).filter(|(one, _)| *one == place);
            for (one, other) in next {
                let other = chip + other * stride - one * stride;
                wiring.join(VertexId(chip), VertexId(other), Cable::Rack);
            }
        }
    }
    Network::new(chips, 0, wiring.finish())
}

/// Builds one switch to which every chip has `links` cables.
///
/// # Errors
/// There is no chip, or the link model is invalid.
pub fn switch(chips: u32, links: u32, model: LinkModel) -> Result<Network, NetworkError> {
    let mut wiring = Wiring::new(model);
    for chip in 0..chips {
        for _ in 0..links {
            wiring.join(VertexId(chip), VertexId(chips), Cable::Rack);
        }
    }
    Network::new(chips, 1, wiring.finish())
}

/// Builds a fat tree (folded Clos): three levels of switches of this many ports, as many pods, ports³ /
/// 4 chips, and full bisection bandwidth: as many links up as down at every level.
///
/// # Errors
/// The number of ports is odd, there are none, or the link model is invalid.
///
/// ```
/// use topology::{LinkModel, fat_tree};
/// let tree = fat_tree(4, LinkModel::default()).unwrap();
/// assert_eq!((tree.endpoints(), tree.vertices(), tree.diameter()), (16, 16 + 8 + 8 + 4, 6));
/// ```
pub fn fat_tree(ports: u32, model: LinkModel) -> Result<Network, NetworkError> {
    if ports % 2 == 1 {
        return Err(NetworkError::OddPorts { ports });
    }
    let half = ports / 2;
    let chips = half * half * ports;
    let (edges, roots) = (chips, chips + ports * ports);
    let mut wiring = Wiring::new(model);
    for pod in 0..ports {
        let edge = |place| VertexId(edges + ports * pod + place);
        let middle = |place| VertexId(edges + ports * pod + half + place);
        for place in 0..half {
            for other in 0..half {
                let chip = VertexId((pod * half + place) * half + other);
                wiring.join(chip, edge(place), Cable::Rack);
                wiring.join(edge(place), middle(other), Cable::Rack);
                wiring.join(middle(place), VertexId(roots + place * half + other), Cable::Optical);
            }
        }
    }
    Network::new(chips, ports * ports + half * half, wiring.finish())
}

/// Builds nodes of chips that share a switch, such as a DGX, with a link from each chip to the switch
/// that joins the nodes.
///
/// # Errors
/// There is no chip, or the link model is invalid.
pub fn clusters(
    nodes: u32,
    chips_per_node: u32,
    inside: LinkModel,
    between: LinkModel,
) -> Result<Network, NetworkError> {
    let chips = nodes * chips_per_node;
    let mut wiring = Wiring::new(inside);
    for chip in 0..chips {
        wiring.join(VertexId(chip), VertexId(chips + chip / chips_per_node), Cable::Chassis);
    }
    wiring.change(between);
    for chip in 0..chips {
        wiring.join(VertexId(chip), VertexId(chips + nodes), Cable::Optical);
    }
    Network::new(chips, nodes + 1, wiring.finish())
}

/// Returns the pairs of neighbours in a ring, each once.
fn neighbours(count: u32) -> impl Iterator<Item = (u32, u32)> {
    let closes = u32::from(count > 2);
    (0..(count + closes).saturating_sub(1)).map(move |one| (one, (one + 1) % count))
}
