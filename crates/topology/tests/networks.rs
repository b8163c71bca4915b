//! Networks of all topologies: which vertices are joined, and which inputs are rejected.

use base::{BitsPerSecond, Nanos, VertexId};
use proptest::prelude::*;
use topology::{
    Cable, Link, LinkModel, Network, NetworkError, Topology, clusters, fat_tree, ring, switch,
    torus,
};

fn model() -> LinkModel {
    LinkModel::default()
}

fn link(source: u32, target: u32) -> Link {
    Link {
        source: VertexId(source),
        target: VertexId(target),
        rate: BitsPerSecond(1e9),
        latency: Nanos(1),
        cable: Cable::Rack,
    }
}

/// Returns the number of outgoing links of each endpoint, if it is the same for all.
fn degree(network: &Network) -> usize {
    let degrees = (0..network.endpoints()).map(|chip| network.out_of(VertexId(chip)).len());
    let degrees: Vec<usize> = degrees.collect();
    assert!(degrees.iter().all(|degree| *degree == degrees[0]), "{degrees:?}");
    degrees[0]
}

/// Source: the multi-TSP system §4.4: neighbours in a node of 8 have three links.
#[test]
fn a_ring_may_have_several_cables() {
    let node: Topology = "ring:8x3".parse().expect("it can be");
    let network = node.links().expect("it is of links").network();
    assert_eq!((network.endpoints(), network.links().len(), network.diameter()), (8, 48, 4));
    assert_eq!(network.cut(4).gigabytes(), 2.0 * 3.0 * 12.5);
}

#[test]
fn shapes_are_as_their_names_say() {
    let cases = [
        (ring(8, 3, model()), 8, 6, 4),
        (ring(2, 1, model()), 2, 1, 1),
        (torus(&[8, 8], model()), 64, 4, 8),
        (torus(&[2, 2, 2], model()), 8, 3, 3),
        (torus(&[3, 4, 5], model()), 60, 6, 1 + 2 + 2),
        (torus(&[5, 1], model()), 5, 2, 2),
        (switch(16, 2, model()), 16, 2, 2),
        (fat_tree(8, model()), 128, 1, 6),
        (clusters(4, 8, model(), model()), 32, 2, 2),
    ];
    for (number, (network, endpoints, links, diameter)) in cases.into_iter().enumerate() {
        let network = network.expect("the shape can be");
        let found = (network.endpoints(), degree(&network), network.diameter());
        assert_eq!(found, (endpoints, links, diameter), "case {number}");
    }
}

#[test]
fn what_makes_no_network_is_refused() {
    let refused = |endpoints, links| Network::new(endpoints, 0, links).expect_err("it is none");
    assert_eq!(refused(0, vec![]), NetworkError::Empty);
    let found = VertexId(2);
    assert_eq!(refused(2, vec![link(0, 2)]), NetworkError::Vertex { found, last: 1 });
    assert_eq!(refused(2, vec![link(1, 1)]), NetworkError::Loop { vertex: VertexId(1) });
    let (from, to) = (VertexId(0), VertexId(1));
    assert_eq!(refused(2, vec![]), NetworkError::Disconnected { from, to });
    // One direction without its reverse.
    let (from, to) = (VertexId(1), VertexId(0));
    assert_eq!(refused(2, vec![link(0, 1)]), NetworkError::Disconnected { from, to });
    assert_eq!(torus(&[4, 0], model()).expect_err("it has no vertices"), NetworkError::Empty);
}

proptest! {
    #[test]
    fn hops_are_the_shortest_there_are(
        extents in prop::collection::vec(1_u32..6, 1..4),
        source: prop::sample::Index,
    ) {
        // In a torus distances are known: the shorter path around each ring.
        let torus = torus(&extents, model()).expect("extents are positive");
        let source = source.index(torus.endpoints() as usize) as u32;
        let hops = torus.hops_from(VertexId(source));
        for target in 0..torus.endpoints() {
            let (mut one, mut other, mut expected) = (source, target, 0);
            for extent in extents.iter().rev() {
                let apart = (one % extent).abs_diff(other % extent);
                expected += apart.min(extent - apart);
                (one, other) = (one / extent, other / extent);
            }
            prop_assert_eq!(hops[target as usize], Some(expected));
        }
    }
}
