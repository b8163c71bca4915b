//! Nodes that fail, links that break and transient errors: the result is correct all the same.

use base::{LinkId, VertexId};
use sim::network::{Noise, Provision, SpareError, Spares};
use topology::{Dragonfly, LinkModel};

fn dragonfly(chips: u32) -> Dragonfly {
    Dragonfly::new(chips, LinkModel::default()).expect("it can be")
}

fn dead(node: u32) -> Noise {
    Noise { dead: (node * 8..node * 8 + 8).map(VertexId).collect(), ..Noise::none() }
}

/// Source: the multi-TSP system §4.5.
#[test]
fn each_of_33_nodes_dies_and_is_replaced() {
    let dragonfly = dragonfly(264);
    for node in 0..33 {
        let mut spares = Spares::new(&dragonfly, Provision::PerSystem).expect("one stands by");
        assert_eq!(spares.chips().len(), 256);
        assert!((spares.overhead() - 1.0 / 33.0).abs() < 1e-12);
        let (saved, is_right) = spares.try_all_reduce(&dead(node)).expect("it is saved");
        assert!(is_right, "without node {node}");
        let stood_by = node == 32;
        assert_eq!(saved.replaced, if stood_by { vec![] } else { vec![node] });
        assert_eq!(saved.attempts, if stood_by { 1 } else { 3 }, "one replay, and one without it");
    }
}

#[test]
fn a_spare_per_rack_is_one_in_nine() {
    let dragonfly = dragonfly(144);
    let mut spares = Spares::new(&dragonfly, Provision::PerRack).expect("two stand by");
    assert!((spares.overhead() - 1.0 / 9.0).abs() < 1e-12);
    let (saved, is_right) = spares.try_all_reduce(&dead(4)).expect("it is saved");
    assert!(is_right && saved.replaced == [4]);
    assert!((spares.overhead() - 1.0 / 9.0).abs() < 1e-12, "it stays what it was");
}

#[test]
fn errors_that_pass_are_replayed_and_those_that_stay_cost_a_node() {
    let dragonfly = dragonfly(24);
    let network = dragonfly.network();
    // Two bit errors somewhere in some runs, and none in others.
    let attempts = (0..8).map(|seed| {
        let passing = Noise { seed, probability: 5e-4, bits: 2, ..Noise::none() };
        let mut spares = Spares::new(&dragonfly, Provision::PerSystem).expect("one stands by");
        let (saved, is_right) = spares.try_all_reduce(&passing).expect("it is saved");
        assert!(is_right, "with seed {seed}");
        saved.attempts
    });
    let attempts: Vec<u32> = attempts.collect();
    assert!(attempts.contains(&1) && attempts.iter().any(|&count| count > 1), "{attempts:?}");
    let between = network.links().iter().position(|link| link.source.0 < 8 && link.target.0 >= 8);
    let link = LinkId(between.expect("nodes are joined") as u32);
    let broken = Noise { broken: [link].into(), bits: 2, ..Noise::none() };
    let mut spares = Spares::new(&dragonfly, Provision::PerSystem).expect("one stands by");
    let (saved, is_right) = spares.try_all_reduce(&broken).expect("it is saved");
    assert!(is_right && saved.replaced == [0], "{saved:?}");
}

#[test]
fn what_cannot_be_saved_is_said() {
    let one = dragonfly(8);
    let none = Spares::new(&one, Provision::PerSystem).err();
    assert!(matches!(none, Some(SpareError::Nodes { nodes: 1 })), "{none:?}");
    let dragonfly = dragonfly(24);
    let mut spares = Spares::new(&dragonfly, Provision::PerSystem).expect("one stands by");
    let both = Noise { dead: (0..16).map(VertexId).collect(), ..Noise::none() };
    let lost = spares.try_all_reduce(&both).expect_err("one spare for two");
    assert!(matches!(lost, SpareError::Exhausted { .. }), "{lost}");
    let mut spares = Spares::new(&dragonfly, Provision::PerSystem).expect("one stands by");
    let everywhere = Noise { probability: 1.0, bits: 2, ..Noise::none() };
    let lost = spares.try_all_reduce(&everywhere).expect_err("nothing comes right");
    assert!(matches!(lost, SpareError::Exhausted { .. } | SpareError::Attempts { .. }), "{lost}");
}
