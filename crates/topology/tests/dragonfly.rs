//! The Dragonfly compared with the paper's description, and with what follows from it.
//!
//! Source: the multi-TSP system §2, Figure 2.

use base::{BitsPerSecond, LinkId, VertexId};
use topology::{Cable, Dragonfly, DragonflyError, Fabric, LinkModel, RotationalSymmetry};

fn dragonfly(chips: u32) -> Dragonfly {
    Dragonfly::new(chips, LinkModel::default()).expect("the size is one of the paper's")
}

fn cables(chips: u32) -> [u32; 3] {
    let counts = dragonfly(chips).network().cables();
    [Cable::Chassis, Cable::Rack, Cable::Optical]
        .map(|cable| counts.get(&cable).copied().unwrap_or(0))
}

#[test]
fn a_node_is_fully_connected() {
    let node = dragonfly(8);
    assert_eq!(cables(8), [28, 0, 0]);
    assert_eq!(node.network().diameter(), 1);
}

#[test]
fn chips_have_seven_local_and_four_global_links() {
    for chips in [16, 72, 264, 288, 576, 10_440] {
        let dragonfly = dragonfly(chips);
        let network = dragonfly.network();
        let rate: f64 = network
            .out_of(VertexId(0))
            .iter()
            .map(|&link| network.link(link).rate.gigabytes())
            .sum();
        assert_eq!(rate, 137.5, "of {chips} chips");
        for chip in (0..chips).map(VertexId) {
            let links = network.out_of(chip).iter().map(|&link| network.link(link));
            let near = links.filter(|l| dragonfly.node_of(l.source) == dragonfly.node_of(l.target));
            assert_eq!(near.count(), 7, "of chip {chip} of {chips}");
            assert_eq!(network.out_of(chip).len(), 11, "of chip {chip} of {chips}");
        }
    }
}

#[test]
fn most_cables_are_short() {
    // Of the 60 cables at a node in a rack, 28 are inside the node and 16 inside the rack.
    let [chassis, rack, optical] = cables(10_440);
    let nodes = 10_440 / 8;
    assert_eq!((chassis, rack), (28 * nodes, 144 / 2 * 145));
    assert_eq!(optical, 145 * 144 / 2, "every two racks are joined by one");
    let ends = [28 * nodes, 16 * nodes, 16 * nodes];
    let short = f64::from(ends[0] + ends[1]) / f64::from(ends.iter().sum::<u32>());
    assert!((short - 0.733).abs() < 0.001, "{short}");
}

#[test]
fn hops_across() {
    assert_eq!(dragonfly(264).network().diameter(), 3);
    // The paper counts 5, between nodes; between chips there are two more.
    let largest = dragonfly(10_440);
    let sampled = (0..10_440).step_by(174).map(VertexId);
    assert_eq!(largest.network().eccentricity(sampled), 7);
}

#[test]
fn bandwidth_falls_off_where_packaging_ends() {
    let expected = [
        (8, 100.0),
        (16, 66.67),
        (72, 52.94),
        (264, 50.77),
        (288, 16.07),
        (576, 15.0),
        (10_440, 14.11),
    ];
    for (chips, gigabytes) in expected {
        let found = dragonfly(chips).uniform_throughput().gigabytes();
        assert!((found - gigabytes).abs() < 0.01 * gigabytes, "{chips}: {found} for {gigabytes}");
    }
}

#[test]
fn sizes_that_cannot_be_wired_are_refused() {
    for chips in [0, 7, 12, 272, 10_440 + 72, u32::MAX] {
        let error = Dragonfly::new(chips, LinkModel::default()).expect_err("it cannot be wired");
        assert!(matches!(error, DragonflyError::Size { found, .. } if found == chips), "{error}");
    }
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let model = LinkModel { rate: BitsPerSecond(rate), ..LinkModel::default() };
        let error = Dragonfly::new(16, model).expect_err("it moves nothing");
        assert!(matches!(error, DragonflyError::Network(_)), "{error}");
    }
}

/// Source: recomputed from the wiring; half of all chips are 16 of 33 nodes, or 72 of 145 racks.
#[test]
fn bisections_follow_from_the_links_between_halves() {
    for (chips, expected) in [(8, 100.0), (264, 51.5), (10_440, 25.2)] {
        let fabric = Fabric::Dragonfly(Box::new(dragonfly(chips)));
        let per_chip = fabric.bisection().gigabytes() / f64::from(chips / 2);
        assert!((per_chip - expected).abs() < 0.06, "{per_chip} GB/s a chip of {chips}");
    }
}

#[test]
fn what_is_left_without_a_node_is_a_network_in_any_order() {
    let dragonfly = dragonfly(24);
    let kept: Vec<VertexId> = (8..24).rev().map(VertexId).collect();
    let (left, were) = dragonfly.network().of(&kept).expect("two nodes are joined");
    assert_eq!(left.endpoints(), 16);
    for (link, &was) in left.links().iter().zip(&were) {
        let known = dragonfly.network().link(was);
        let ends = [link.source, link.target].map(|end| kept[end.0 as usize]);
        assert_eq!(ends, [known.source, known.target]);
    }
    let wrong = [vec![], vec![VertexId(24)], vec![VertexId(3), VertexId(3)]];
    assert!(wrong.iter().all(|chips| dragonfly.network().of(chips).is_err()));
}

#[test]
fn turned_by_a_part_links_lie_on_links() {
    for (chips, turns) in [(8, 8), (16, 2), (72, 9), (264, 33), (288, 4), (10_440, 145)] {
        let dragonfly = dragonfly(chips);
        let network = dragonfly.network();
        let circle = RotationalSymmetry::of(network);
        assert_eq!(circle.turns(), turns, "of {chips} chips");
        for link in (0..network.links().len() as u32).map(LinkId) {
            let here = network.link(link);
            let there = network.link(circle.turn_link(link, 1));
            let ends = [here.source, here.target].map(|end| circle.turn(end, 1));
            assert_eq!(ends, [there.source, there.target], "of {chips} chips");
        }
    }
}
