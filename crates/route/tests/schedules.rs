//! Schedules of transfers: the paper's examples, and that every schedule passes verification.

use base::{BitsPerSecond, Bytes, Nanos, Ticks, VertexId};
use proptest::prelude::*;
use route::{
    Computation, Fault, RouteError, RoutePlan, RouteTransfer, Schedule, Task, Timing, Train,
    lower_bound, route, verify,
};
use topology::{Cable, Dragonfly, Link, LinkModel, Network, torus};

fn node() -> Dragonfly {
    Dragonfly::new(8, LinkModel::default()).expect("a node can be")
}

fn transfer(source: u32, target: u32, size: u64) -> RouteTransfer {
    RouteTransfer::new(VertexId(source), VertexId(target), Bytes(size))
}

/// Schedules tasks and verifies the plan.
fn routed(network: &Network, transfers: &[RouteTransfer]) -> RoutePlan {
    let plan = route(network, transfers.to_vec(), Timing::default());
    let plan = plan.expect("the transfers make sense");
    verify(network, &plan).expect("the plan holds");
    let bound = lower_bound(network, &plan);
    assert!(plan.end() >= bound, "{} is below the bound of {bound}", plan.end());
    plan
}

#[test]
fn a_hop_takes_its_latency_and_each_vector_a_slot() {
    let plan = routed(node().network(), &[transfer(0, 1, 320)]);
    // 722 ns, and 328 bytes at 12.5 GB/s.
    let nanos = plan.schedule.timing.nanos(plan.end());
    assert!((nanos - (722.0 + 26.24)).abs() < 0.01, "{nanos}");
}

#[test]
fn three_hops_cross_264_chips() {
    let dragonfly = Dragonfly::new(264, LinkModel::default()).expect("it can be");
    let hops = dragonfly.network().hops_from(VertexId(0));
    let far = hops.iter().position(|hops| *hops == Some(3)).expect("it has a diameter of 3");
    let plan = routed(dragonfly.network(), &[transfer(0, far as u32, 320)]);
    let nanos = plan.schedule.timing.nanos(plan.end());
    assert!((nanos - (3.0 * 722.0 + 26.24)).abs() < 0.01, "{nanos}");
}

/// Returns the speed-up of a transfer that may also use this many intermediate chips.
///
/// Source: the multi-TSP system §4.3, Figure 10.
fn gain(between: u32, size: u64) -> f64 {
    let links = |chips: u32| -> Vec<Link> {
        let pairs = (2..chips).flat_map(|chip| [(0, chip), (chip, 1)]).chain([(0, 1)]);
        let both = pairs.flat_map(|(one, other)| [(one, other), (other, one)]);
        let LinkModel { rate, latency } = LinkModel::default();
        let link = |(source, target)| (VertexId(source), VertexId(target));
        both.map(link)
            .map(|(source, target)| Link { source, target, rate, latency, cable: Cable::Chassis })
            .collect()
    };
    let end = |between: u32| {
        let network = Network::new(2 + between, 0, links(2 + between)).expect("it is connected");
        routed(&network, &[transfer(0, 1, size)]).end().0 as f64
    };
    end(0) / end(between)
}

#[test]
fn ways_that_are_longer_pay_from_nine_kilobytes_on() {
    for between in 1..=6 {
        assert_eq!(gain(between, 8 << 10), 1.0, "over {between} chips");
        assert!(gain(between, 10_000) > 1.0, "over {between} chips");
    }
    for (size, expected) in [(16 << 10, 1.35), (64 << 10, 2.87), (1 << 20, 6.35)] {
        let found = gain(6, size);
        assert!((found - expected).abs() < 0.02 * expected, "{size}: {found} for {expected}");
        let gains: Vec<f64> = (1..=6).map(|between| gain(between, size)).collect();
        assert!(gains.is_sorted(), "more ways gain more: {gains:?}");
    }
}

/// A and B send to D, and the link from B to D is on the shortest path of both.
///
/// Source: the multi-TSP system §4.2, Figure 8.
#[test]
fn contention_is_resolved_before_anything_is_sent() {
    let [a, b, c, d] = [0, 1, 2, 3];
    let pairs = [(a, b), (b, d), (a, c), (c, d)];
    let LinkModel { rate, latency } = LinkModel::default();
    let links = pairs.iter().flat_map(|&(one, other)| [(one, other), (other, one)]).map(
        |(source, target)| {
            let (source, target) = (VertexId(source), VertexId(target));
            Link { source, target, rate, latency, cable: Cable::Chassis }
        },
    );
    let network = Network::new(4, 0, links.collect()).expect("it is connected");
    let size = 1 << 20;
    let plan = routed(&network, &[transfer(a, d, size), transfer(b, d, size)]);
    // Two links lead to D, and both are busy until the end.
    let slots = 2 * plan.schedule.timing.vectors(Bytes(size)) * 23_616 / 2;
    let bound = plan.schedule.timing.ticks(Nanos(722)).0 + slots;
    let end = plan.end().0;
    assert!(end as f64 <= 1.03 * bound as f64, "{end} for {bound}");
}

#[test]
fn what_waits_begins_when_the_others_have_come() {
    let mut second = transfer(1, 2, 4096);
    second.after.push(0);
    let plan = routed(node().network(), &[transfer(0, 1, 1 << 16), second]);
    let begin = plan.schedule.trains.iter().filter(|train| train.task == 1);
    let begin = begin.map(|train| train.hops[0].start).min();
    assert!(begin >= Some(plan.schedule.ends[0]));
}

#[test]
fn chips_compute_one_thing_at_a_time_while_links_move_others() {
    let dragonfly = node();
    let network = dragonfly.network();
    let compute = |chip, length, after: &[u32]| {
        Task::Computation(Computation {
            chip: VertexId(chip),
            length: Ticks(length),
            after: after.into(),
        })
    };
    let mut sent = transfer(0, 1, 320);
    sent.after.push(0);
    let tasks = [compute(0, 5000, &[]), compute(0, 7000, &[]), sent.into(), compute(1, 9000, &[2])];
    let plan = route(network, tasks, Timing::default()).expect("the tasks make sense");
    verify(network, &plan).expect("the plan holds");
    assert_eq!(plan.schedule.ends[..2], [Ticks(5000), Ticks(12_000)]);
    let hop = plan.schedule.timing.hop(&network.links()[0]);
    assert_eq!(plan.schedule.ends[2], Ticks(5000 + hop.0 + 23_616), "it is sent meanwhile");
    assert_eq!(plan.schedule.ends[3], plan.schedule.ends[2] + Ticks(9000));
    let wrong = |place: usize, end: u64| {
        let mut plan = plan.clone();
        plan.schedule.ends[place] = Ticks(end);
        verify(network, &plan).expect_err("it is wrong")
    };
    assert!(matches!(wrong(1, 11_999), Fault::Busy { .. }));
    assert!(matches!(wrong(3, 9000), Fault::Begun { .. }));
    let long = [compute(0, u64::MAX, &[])];
    let long = route(network, long, Timing::default()).expect_err("it takes for ever");
    assert!(matches!(long, RouteError::Long { .. }));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let dragonfly = node();
    let refused = |transfers: &[RouteTransfer]| {
        route(dragonfly.network(), transfers.to_vec(), Timing::default())
            .expect_err("it makes no sense")
    };
    let after =
        |source, after: &[u32]| RouteTransfer { after: after.into(), ..transfer(source, 7, 1) };
    assert!(matches!(refused(&[transfer(0, 8, 1)]), RouteError::Vertex { .. }));
    assert!(matches!(refused(&[transfer(3, 3, 1)]), RouteError::Nowhere { .. }));
    assert!(matches!(refused(&[transfer(0, 1, 1 << 40)]), RouteError::Size { .. }));
    assert!(matches!(refused(&[after(0, &[1])]), RouteError::After { .. }));
    assert!(matches!(refused(&[after(0, &[0])]), RouteError::Cycle { .. }));
    assert!(matches!(refused(&[after(0, &[1]), after(1, &[0])]), RouteError::Cycle { .. }));
}

#[test]
fn what_is_wrong_is_found() {
    let dragonfly = node();
    let network = dragonfly.network();
    let mut asked = vec![transfer(0, 1, 1 << 16), transfer(2, 1, 1 << 16), transfer(1, 3, 640)];
    asked[2].after.push(0);
    let good = routed(network, &asked);
    let wrong = |change: &dyn Fn(&mut Schedule)| {
        let mut plan = good.clone();
        change(&mut plan.schedule);
        verify(network, &plan).expect_err("it is wrong")
    };
    // A train of a task that no other task depends on.
    let detours = |train: &Train| train.task == 1 && train.hops.len() == 2;
    let long = good.schedule.trains.iter().position(detours).expect("one detours");
    let direct =
        good.schedule.trains.iter().position(|train| train.hops.len() == 1).expect("one does not");
    let booked = wrong(&|schedule| {
        let mut again = schedule.trains[direct].clone();
        again.hops[0].start.0 += 1;
        schedule.trains.push(again);
    });
    assert!(matches!(booked, Fault::Booked { .. }), "{booked}");
    let early = wrong(&|schedule| schedule.trains[long].hops[1].start.0 -= 1);
    assert!(matches!(early, Fault::Early { .. }), "{early}");
    let before = wrong(&|schedule| {
        let last = schedule.trains.iter_mut().find(|train| train.task == 2);
        last.expect("it is scheduled").hops[0].start = Ticks(0);
    });
    assert!(matches!(before, Fault::Early { .. }), "{before}");
    let way = wrong(&|schedule| schedule.trains[long].hops.truncate(1));
    assert!(matches!(way, Fault::Path { .. }), "{way}");
    let lost = wrong(&|schedule| drop(schedule.trains.remove(direct)));
    assert!(matches!(lost, Fault::Count { .. }), "{lost}");
    let short = wrong(&|schedule| schedule.trains[direct].count -= 1);
    assert!(matches!(short, Fault::Count { .. }), "{short}");
    let end = wrong(&|schedule| schedule.ends[0].0 -= 1);
    assert!(matches!(end, Fault::End { .. }), "{end}");
    let full = wrong(&|schedule| {
        schedule.timing.buffer = 1;
        let train = &mut schedule.trains[long];
        train.hops[1].start.0 += 1000 * 23_616;
        let link = network.link(train.hops[1].link);
        let takes = Ticks(train.count * schedule.timing.slot(link).0) + schedule.timing.hop(link);
        schedule.ends[train.task as usize] = train.hops[1].start + takes;
    });
    assert!(matches!(full, Fault::Buffer { .. }), "{full}");
}

fn some_transfers(vertices: u32) -> impl Strategy<Value = Vec<RouteTransfer>> {
    let one =
        (0..vertices, 1..vertices, 0_u64..200_000, any::<prop::sample::Index>(), any::<bool>());
    prop::collection::vec(one, 1..24).prop_map(move |drawn| {
        let each = (0..).zip(drawn).map(|(number, (source, apart, size, before, waits))| {
            let mut transfer = transfer(source, (source + apart) % vertices, size);
            if waits && number > 0 {
                transfer.after.push(before.index(number as usize) as u32);
            }
            transfer
        });
        each.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_schedule_holds_on_a_dragonfly(transfers in some_transfers(72)) {
        let dragonfly = Dragonfly::new(72, LinkModel::default()).expect("it can be");
        let plan = routed(dragonfly.network(), &transfers);
        prop_assert_eq!(&plan, &routed(dragonfly.network(), &transfers), "the same again");
    }

    #[test]
    fn every_schedule_holds_on_links_of_many_speeds(
        transfers in some_transfers(12),
        rates in prop::collection::vec(1_u64..100, 48),
    ) {
        let even = torus(&[3, 4], LinkModel::default()).expect("it can be");
        let links = even.links().iter().zip(rates);
        let links = links.map(|(link, gigabits)| {
            Link { rate: BitsPerSecond(gigabits as f64 * 1e9), ..*link }
        });
        let network = Network::new(12, 0, links.collect()).expect("it is connected");
        routed(&network, &transfers);
    }

    /// For any tasks, valid or not: a plan that passes verification, or an error.
    #[test]
    fn any_tasks_are_planned_or_refused(
        drawn in prop::collection::vec(
            (0_u32..14, 0_u32..14, any::<u64>(), prop::collection::vec(0_u32..9, 0..3), 0_u8..4),
            0..8,
        ),
    ) {
        let torus = torus(&[3, 4], LinkModel::default()).expect("it can be");
        let tasks = drawn.into_iter().map(|(one, other, much, after, kind)| -> Task {
            let (one, other, after) = (VertexId(one), VertexId(other), after.into());
            match kind {
                0 => Computation { chip: one, length: Ticks(much), after }.into(),
                1 => RouteTransfer { from: after, ..RouteTransfer::new(one, other, Bytes(much % 9000)) }.into(),
                2 => RouteTransfer { after, ..RouteTransfer::new(one, other, Bytes(much % 9000)) }.into(),
                _ => RouteTransfer { after, ..RouteTransfer::new(one, other, Bytes(much)) }.into(),
            }
        });
        if let Ok(plan) = route(&torus, tasks, Timing::default()) {
            prop_assert_eq!(verify(&torus, &plan), Ok(()));
        }
    }

    /// For any plan, verification terminates.
    #[test]
    fn any_plan_is_checked(
        transfers in some_transfers(12),
        damage in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<u64>(), 0_u8..7), 1..6,
        ),
    ) {
        let torus = torus(&[3, 4], LinkModel::default()).expect("it can be");
        let mut plan = routed(&torus, &transfers);
        for (place, value, kind) in damage {
            let (trains, ends) = (&mut plan.schedule.trains, &mut plan.schedule.ends);
            if trains.is_empty() {
                break;
            }
            let count = trains.len();
            let train = &mut trains[place.index(count)];
            match kind {
                0 => train.task = value as u32,
                1 => train.first = value,
                2 => train.count = value % 1_000_000,
                3 => train.hops.truncate(value as usize % 3),
                4 => train.hops.iter_mut().for_each(|hop| hop.start = Ticks(value >> 8)),
                5 => train.hops.iter_mut().for_each(|hop| hop.link.0 = value as u32 % 60),
                _ => ends[place.index(transfers.len())] = Ticks(value >> 8),
            }
        }
        let _ = verify(&torus, &plan);
    }
}
