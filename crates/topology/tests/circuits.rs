//! Circuits: wavelengths lit at the same time never collide, and all demands get their share.

use std::collections::BTreeSet;

use base::Random;
use proptest::prelude::*;
use topology::circuits::{Circuit, Demand, Direction, Leaves, Wavelengths, circuits, permutations};

/// Checks that every wavelength of every segment serves at most one circuit, and stays the same on a
/// circuit's whole path.
fn check_light(devices: u32, count: u32, demands: &[Demand], lit: &[Circuit]) {
    let mut used = BTreeSet::new();
    for circuit in lit {
        let Demand { source, target, .. } = demands[circuit.demand as usize];
        assert!(circuit.count > 0 && circuit.first + circuit.count <= count);
        let mut at = source;
        while at != target {
            let (next, segment) = match circuit.direction {
                Direction::Up => ((at + 1) % devices, at),
                Direction::Down => ((at + devices - 1) % devices, (at + devices - 1) % devices),
            };
            for wavelength in circuit.first..circuit.first + circuit.count {
                let is_up = circuit.direction == Direction::Up;
                assert!(used.insert((is_up, segment, wavelength)), "light meets on {segment}");
            }
            at = next;
        }
    }
}

fn random_demands(devices: u32, part: f64, seed: u64) -> Vec<Demand> {
    let mut random = Random::of(&[seed]);
    let pairs = (0..devices).flat_map(|source| (0..devices).map(move |target| (source, target)));
    pairs
        .filter(|(source, target)| source != target)
        .filter_map(|(source, target)| {
            let is_one = random.fraction() < part;
            let size = 0.01 + random.fraction();
            is_one.then_some(Demand { source, target, size })
        })
        .collect()
}

proptest! {
    #[test]
    fn light_never_meets(
        devices in 2_u32..40, count in 1_u32..60, reach in 1_u32..40, part in 0.05_f64..1.0, seed: u64
    ) {
        let demands = random_demands(devices, part, seed);
        let mut wavelengths = Wavelengths::new(devices, count, reach, false);
        for _ in 0..5 {
            let lit = wavelengths.decide(&demands).to_vec();
            check_light(devices, count, &demands, &lit);
        }
    }

    #[test]
    fn switches_join_ports_once(devices in 2_u32..24, switches in 1_u32..12, part in 0.05_f64..1.0, seed: u64) {
        let demands = random_demands(devices, part, seed);
        let counts = circuits(devices, switches, &demands, None);
        let joined = permutations(devices, switches, &demands);
        let mut found = vec![0; demands.len()];
        for switch in &joined {
            let targets: Vec<u32> = switch.iter().flatten().copied().collect();
            let distinct: BTreeSet<u32> = targets.iter().copied().collect();
            prop_assert_eq!(targets.len(), distinct.len(), "a port leads to one device");
            for (source, target) in (0..).zip(switch) {
                let Some(target) = *target else { continue };
                let pair = |demand: &Demand| (demand.source, demand.target) == (source, target);
                found[demands.iter().position(pair).expect("a demand asks for it")] += 1;
            }
        }
        prop_assert_eq!(found, counts);
    }
}

#[test]
fn whoever_gets_least_gets_as_much_as_can_be() {
    // Brute force: compares with all possible allocations of ports.
    for seed in 0..200 {
        let demands = random_demands(3, 0.7, seed);
        let switches = 4;
        let counts = circuits(3, switches, &demands, None);
        let least = |counts: &[u32]| {
            let shares = demands.iter().zip(counts).map(|(d, &count)| f64::from(count) / d.size);
            shares.fold(f64::INFINITY, f64::min)
        };
        let fits = |counts: &[u32]| {
            (0..3).all(|device| {
                let sum = |of: &dyn Fn(&Demand) -> u32| -> u32 {
                    let own = demands.iter().zip(counts).filter(|(d, _)| of(d) == device);
                    own.map(|(_, count)| count).sum()
                };
                sum(&|demand| demand.source) <= switches && sum(&|demand| demand.target) <= switches
            })
        };
        let mut best = 0.0_f64;
        let mut tried = vec![0; demands.len()];
        'all: loop {
            if fits(&tried) {
                best = best.max(least(&tried));
            }
            for count in &mut tried {
                *count += 1;
                if *count <= switches {
                    continue 'all;
                }
                *count = 0;
            }
            break;
        }
        assert!(fits(&counts));
        if !demands.is_empty() {
            assert!((least(&counts) - best).abs() < 1e-12, "seed {seed}: {counts:?}, best {best}");
        }
    }
}

#[test]
fn one_way_neighbours_get_every_wavelength_of_their_direction() {
    for (devices, count) in [(1024, 20), (1024, 160)] {
        let neighbour = |source| Demand { source, target: (source + 1) % devices, size: 1.0 };
        let demands: Vec<Demand> = (0..devices).map(neighbour).collect();
        let mut wavelengths = Wavelengths::new(devices, count, 16, false);
        let lit = wavelengths.decide(&demands);
        let of_one: u32 = lit.iter().filter(|circuit| circuit.demand == 7).map(|c| c.count).sum();
        assert_eq!(of_one, count);
    }
}

proptest! {
    #[test]
    fn leaves_have_as_many_circuits_as_uplinks(
        groups in 1_u32..5,
        of_leaf in 1_u32..5,
        switches in 1_u32..6,
        uplinks in 0_u32..12,
        part in 0.1..0.9,
        seed in any::<u64>(),
    ) {
        let devices = groups * of_leaf;
        let demands = random_demands(devices, part, seed);
        let leaf = |device: u32| (device / of_leaf) as usize;
        let leaves: Vec<bool> = demands.iter().map(|d| leaf(d.source) != leaf(d.target)).collect();
        let known = Leaves { devices: of_leaf, uplinks };
        let counts = circuits(devices, switches, &demands, Some((known, &leaves)));
        let mut used = vec![[0_u32; 2]; groups as usize];
        let mut ports = vec![[0_u32; 2]; devices as usize];
        for ((demand, &count), &is_between) in demands.iter().zip(&counts).zip(&leaves) {
            ports[demand.source as usize][0] += count;
            ports[demand.target as usize][1] += count;
            if is_between {
                used[leaf(demand.source)][0] += count;
                used[leaf(demand.target)][1] += count;
            }
        }
        prop_assert!(used.iter().flatten().all(|&count| count <= uplinks));
        prop_assert!(ports.iter().flatten().all(|&count| count <= switches));
        // The allocation is maximal: no demand could get another circuit.
        for (demand, &is_between) in demands.iter().zip(&leaves) {
            let is_full = ports[demand.source as usize][0] == switches
                || ports[demand.target as usize][1] == switches;
            let is_cut = is_between
                && (used[leaf(demand.source)][0] == uplinks
                    || used[leaf(demand.target)][1] == uplinks);
            prop_assert!(is_full || is_cut);
        }
        // With as many uplinks as ports, leaves do not constrain circuits.
        let enough = Leaves { devices: of_leaf, uplinks: of_leaf * switches };
        let same = circuits(devices, switches, &demands, Some((enough, &leaves)));
        prop_assert_eq!(same, circuits(devices, switches, &demands, None));
    }
}
