//! Plans executed with data: sums are bit-exact, times are as planned, errors are corrected or
//! detected, and results do not depend on the number of threads.

use base::{Address, Bytes, Random, Ticks, VertexId};
use proptest::prelude::*;
use route::{
    Computation, RoutePlan, RouteTransfer, RoutedCollective, Task, Timing, all_gather,
    all_reduce_on, route, verify,
};
use sim::network::{
    ChipMemory, Compute, ENCODED, Encoded, Machine, MachineError, MachineReport, Mishap, Noise,
    Nothing, Results, SumType, VECTOR, decode, encode,
};
use topology::{Dragonfly, LinkModel, Network};

fn dragonfly(chips: u32) -> Dragonfly {
    Dragonfly::new(chips, LinkModel::default()).expect("it can be")
}

fn all_reduce(dragonfly: &Dragonfly, tensor: u64) -> RoutedCollective {
    all_reduce_on(dragonfly, Bytes(tensor), Timing::default()).expect("it can be")
}

/// Executes an all-reduce on numbers that identify their source, and checks the sums.
fn reduced(
    network: &Network,
    collective: &RoutedCollective,
    noise: Noise,
) -> (MachineReport, Vec<ChipMemory>, bool) {
    let plan = collective.plan.whole(network);
    verify(network, &plan).expect("the plan holds");
    let layout = &collective.layout;
    let circle = &collective.plan.circle;
    let chips = network.endpoints();
    let own =
        |chip: u32, of: u32, number: u64| (chip as i32 + 1) * 1_000 + of as i32 * 7 + number as i32;
    let place = |start: Address, chip: u32, of: u32| {
        let place = layout.place(circle, VertexId(chip), VertexId(of));
        (u64::from(start.0) + place) as usize * VECTOR
    };
    let first: i32 = (0..chips as i32).sum();
    let numbers = layout.shard * VECTOR as u64 / 4;
    let mut memories = vec![ChipMemory::new(layout.vectors()); chips as usize];
    for chip in 0..chips {
        for of in 0..layout.shards {
            let bytes: Vec<u8> =
                (0..numbers).flat_map(|number| own(chip, of, number).to_le_bytes()).collect();
            for &start in &layout.inputs {
                let at = place(start, chip, of);
                memories[chip as usize].0[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
    }
    let machine = Machine::new(network, &plan, &Nothing).expect("it can be carried out");
    let machine = machine.adding(SumType::I32).with_noise(noise);
    let outcome = machine.run(&mut memories, |_| true).expect("it is carried out");
    let mut is_right = true;
    for chip in 0..chips {
        for of in 0..layout.shards {
            for number in 0..numbers {
                let each = layout.results.iter().map(|&start| {
                    let at = place(start, chip, of) + 4 * number as usize;
                    let bytes = &memories[chip as usize].0[at..at + 4];
                    i32::from_le_bytes(bytes.try_into().expect("4 bytes"))
                });
                let expected = own(0, of, number) * chips as i32 + first * 1_000;
                is_right &= each.sum::<i32>() == expected;
            }
        }
    }
    (outcome, memories, is_right)
}

#[test]
fn sums_are_right_and_come_when_planned() {
    for (chips, tensor) in [(8, 320), (8, 1 << 20), (72, 1 << 18), (264, 320), (264, 1 << 20)] {
        let dragonfly = dragonfly(chips);
        let collective = all_reduce(&dragonfly, tensor);
        let (outcome, _, is_right) = reduced(dragonfly.network(), &collective, Noise::none());
        assert!(is_right, "{tensor} bytes on {chips} chips");
        assert_eq!(outcome.incidents, [], "{tensor} bytes on {chips} chips");
        // The last vector begins to arrive one slot before it is complete.
        let last = outcome.end + Ticks(23_616);
        assert_eq!(last, collective.plan.end(), "{tensor} bytes on {chips} chips");
    }
}

#[test]
fn threads_change_nothing() {
    let dragonfly = dragonfly(72);
    let collective = all_reduce(&dragonfly, 1 << 18);
    let noise = Noise { seed: 5, probability: 0.01, ..Noise::none() };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads start")
            .install(|| reduced(dragonfly.network(), &collective, noise.clone()))
    };
    let one = run(1);
    assert!(one.0.corrected > 0);
    for repeat in 0..20 {
        assert_eq!(one, run(1 + repeat % 2), "repeat {repeat}");
    }
}

#[test]
fn single_errors_are_mended_and_double_ones_noticed() {
    let dragonfly = dragonfly(16);
    let collective = all_reduce(&dragonfly, 1 << 18);
    let network = dragonfly.network();
    let single = Noise { seed: 1, probability: 0.1, ..Noise::none() };
    let (outcome, _, is_right) = reduced(network, &collective, single.clone());
    assert!(is_right && outcome.incidents.is_empty());
    assert!(outcome.corrected > 1000, "{} vectors were mended", outcome.corrected);
    let double = Noise { bits: 2, ..single };
    let (noticed, _, is_right) = reduced(network, &collective, double);
    assert!(!is_right, "two wrong bits in a thousand vectors change something");
    assert_eq!(noticed.incidents.len() as u64, outcome.corrected, "the same vectors are hit");
    assert!(noticed.incidents.iter().all(|one| one.mishap == Mishap::Damaged));
    assert_eq!(noticed.corrected, 0);
}

#[test]
fn a_dead_chip_is_missed_by_all_that_wait_for_it() {
    let dragonfly = dragonfly(16);
    let collective = all_reduce(&dragonfly, 6400);
    let noise = Noise { dead: [VertexId(3)].into(), ..Noise::none() };
    let (outcome, _, _) = reduced(dragonfly.network(), &collective, noise);
    let missed = outcome.incidents.iter().filter(|one| {
        dragonfly.network().link(one.link).source == VertexId(3) && one.mishap == Mishap::Missing
    });
    assert!(missed.count() > 0);
}

/// A million vectors with one bit error each, and a million with two.
#[test]
fn every_single_error_is_corrected_and_every_double_one_detected() {
    let mut random = Random::of(&[11]);
    let mut vector = [0; VECTOR];
    for round in 0..1_000_000_u32 {
        if round % 1000 == 0 {
            vector.fill_with(|| random.word() as u8);
        }
        let number = round as u16;
        let mut sent = encode(&vector, number);
        let bits = 8 * ENCODED as u64;
        let first = random.below(bits);
        let mut other = random.below(bits);
        while other == first {
            other = random.below(bits);
        }
        let mut flip = |bit: u64| sent.0[bit as usize / 8] ^= 1 << (bit % 8);
        flip(first);
        assert_eq!(decode(&sent, number), Ok((vector, true)), "bit {first}");
        let mut flip = |bit: u64| sent.0[bit as usize / 8] ^= 1 << (bit % 8);
        flip(other);
        assert!(decode(&sent, number).is_err(), "bits {first} and {other}");
    }
}

proptest! {
    #[test]
    fn what_is_sent_comes(bytes in prop::collection::vec(any::<u8>(), VECTOR), number: u16) {
        let vector: [u8; VECTOR] = bytes.try_into().expect("it is as long");
        prop_assert_eq!(decode(&encode(&vector, number), number), Ok((vector, false)));
        prop_assert!(decode(&encode(&vector, number), number ^ 1).is_err(), "another's number");
    }

    #[test]
    fn bursts_are_never_taken_for_data(
        bytes in prop::collection::vec(any::<u8>(), VECTOR),
        start in 0..ENCODED - 8,
        burst: u64,
    ) {
        prop_assume!(burst != 0);
        let vector: [u8; VECTOR] = bytes.try_into().expect("it is as long");
        let Encoded(mut sent) = encode(&vector, 9);
        for (byte, wrong) in sent[start..].iter_mut().zip(burst.to_le_bytes()) {
            *byte ^= wrong;
        }
        let found = decode(&Encoded(sent), 9);
        prop_assert!(found.is_err() || found == Ok((vector, true)), "never another vector");
    }
}

/// Doubles the numbers at the beginning of a chip's memory.
struct Doubles;

impl Compute for Doubles {
    fn compute(&self, _: u32, _: VertexId, memory: &ChipMemory) -> Result<Results, String> {
        let doubled = memory.0[..VECTOR].iter().map(|byte| byte * 2).collect();
        Ok(vec![(Address(1), doubled)])
    }
}

struct Fails;

impl Compute for Fails {
    fn compute(&self, _: u32, _: VertexId, _: &ChipMemory) -> Result<Results, String> {
        Err("the matrix is singular".into())
    }
}

fn doubled(chips: &Dragonfly) -> RoutePlan {
    let compute =
        Computation { chip: VertexId(0), length: Ticks(500_000), after: Default::default() };
    let send = RouteTransfer {
        read: Address(1),
        after: [0].as_slice().into(),
        ..RouteTransfer::new(VertexId(0), VertexId(5), Bytes(320))
    };
    let tasks: [Task; 2] = [compute.into(), send.into()];
    route(chips.network(), tasks, Timing::default()).expect("the tasks make sense")
}

#[test]
fn chips_compute_and_send_what_they_computed() {
    let node = dragonfly(8);
    let plan = doubled(&node);
    let mut memories = vec![ChipMemory::new(2); 8];
    memories[0].0[..VECTOR].fill(21);
    let machine = Machine::new(node.network(), &plan, &Doubles).expect("it can be carried out");
    let outcome = machine.run(&mut memories, |_| true).expect("it is carried out");
    assert_eq!(memories[5].0[..VECTOR], [42; VECTOR]);
    assert_eq!(outcome.end, Ticks(500_000) + plan.schedule.timing.hop(&node.network().links()[0]));
}

#[test]
fn what_cannot_be_carried_out_is_refused() {
    let node = dragonfly(8);
    let network = node.network();
    let part = all_gather(network, Bytes(640), Timing::default()).expect("it can be").plan;
    let refused = Machine::new(network, &part, &Nothing).err();
    assert_eq!(refused, Some(MachineError::Part { parts: 8 }));
    let plan = doubled(&node);
    let run = |compute: &dyn Compute, vectors: u64, go_on: bool| {
        let machine = Machine::new(network, &plan, compute).expect("it can be carried out");
        machine.run(&mut vec![ChipMemory::new(vectors); 8], |_| go_on).expect_err("it cannot")
    };
    assert!(matches!(run(&Doubles, 1, true), MachineError::Memory { needed: 2, .. }));
    assert!(matches!(run(&Fails, 2, true), MachineError::Computation { task: 0, .. }));
    assert_eq!(run(&Doubles, 2, false), MachineError::Stopped);
}
