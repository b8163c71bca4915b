//! Jobs that share the devices of a ring.

use base::Nanos;
use proptest::prelude::*;
use sim::jobs::{Arrival, DevicePool, Stay, share};

fn arrival(time: u64, devices: u32, takes: u64) -> Arrival {
    Arrival { time: Nanos(time), devices, takes: Nanos(takes) }
}

#[test]
fn jobs_get_the_smallest_stretch_that_is_large_enough() {
    // Jobs 0 and 2 leave free ranges of 4 and of 2; the last job takes the one of 2 (best fit).
    let arrivals = [
        arrival(0, 4, 10),
        arrival(0, 1, 99),
        arrival(0, 2, 10),
        arrival(0, 1, 99),
        arrival(20, 2, 5),
    ];
    let came = share(8, DevicePool::Neighbours, &arrivals).unwrap();
    let last = came.stays.iter().find(|stay| stay.job == 4).unwrap();
    assert_eq!((last.first, last.count), (5, 2), "{:?}", came.stays);
}

#[test]
fn a_switch_makes_room() {
    // 3 + 1 + 3 + 1: the first and the third leave six free devices, in two ranges (fragmentation).
    let arrivals = [
        arrival(0, 3, 10),
        arrival(0, 1, 99),
        arrival(0, 3, 10),
        arrival(0, 1, 99),
        arrival(20, 5, 7),
    ];
    let apart = share(8, DevicePool::Neighbours, &arrivals).unwrap();
    assert_eq!((apart.times[4].0, apart.apart), (Nanos(99), Nanos(79)));
    let remapped = share(8, DevicePool::Remapped(Nanos(3)), &arrivals).unwrap();
    assert_eq!((remapped.times[4], remapped.moves), ((Nanos(20), Nanos(27)), 1));
    // With a delay of 0, a job that is migrated ends when it would have ended otherwise.
    let at_once = share(8, DevicePool::Remapped(Nanos(0)), &arrivals).unwrap();
    assert_eq!((at_once.times[1].1, at_once.times[3].1), (Nanos(99), Nanos(99)));
    assert_eq!((at_once.moves, at_once.stays.len()), (1, 6));
    // The job that was migrated paused.
    assert_eq!(remapped.times[1].1.max(remapped.times[3].1), Nanos(102));
    assert_eq!(share(8, DevicePool::Any, &arrivals).unwrap().times[4], (Nanos(20), Nanos(27)));
}

#[test]
fn jobs_that_are_too_large_are_refused() {
    let error = share(8, DevicePool::Any, &[arrival(0, 1, 1), arrival(0, 9, 1)]).unwrap_err();
    assert_eq!(error.to_string(), "job 1 needs 9 devices; expected 1 to 8");
    assert!(share(8, DevicePool::Any, &[arrival(0, 0, 1)]).is_err());
}

fn places(stay: &Stay, devices: u32) -> Vec<u32> {
    (0..stay.count).map(|at| (stay.first + at) % devices).collect()
}

proptest! {
    #[test]
    fn nobody_shares_a_device(
        devices in 4_u32..40,
        jobs in prop::collection::vec((0_u64..50, 1_u32..40, 1_u64..80), 1..40),
        delay in 0_u64..5,
        kind in 0_u32..3,
    ) {
        let mut time = 0;
        let arrivals: Vec<Arrival> = jobs
            .iter()
            .map(|&(later, wanted, takes)| {
                time += later;
                arrival(time, (wanted - 1) % devices + 1, takes)
            })
            .collect();
        let room = match kind {
            0 => DevicePool::Any,
            1 => DevicePool::Neighbours,
            _ => DevicePool::Remapped(Nanos(delay)),
        };
        let came = share(devices, room, &arrivals).unwrap();
        for (number, one) in came.stays.iter().enumerate() {
            let own = places(one, devices);
            for other in &came.stays[..number] {
                let meets = one.from < other.to && other.from < one.to;
                let shares = places(other, devices).iter().any(|place| own.contains(place));
                prop_assert!(!(meets && shares), "{one:?} {other:?}");
            }
        }
        let (mut began, mut moves) = (Nanos(0), 0);
        for (job, (arrival, &(from, to))) in (0..).zip(arrivals.iter().zip(&came.times)) {
            // First-in first-out, each with all of its devices for as long as it computes, plus pauses
            // for migration.
            prop_assert!(from >= arrival.time && from >= began);
            began = from;
            let mut own: Vec<&Stay> = came.stays.iter().filter(|stay| stay.job == job).collect();
            own.sort_by_key(|stay| stay.from);
            let device_time: u64 = own.iter().map(|s| u64::from(s.count) * (s.to - s.from).0).sum();
            prop_assert_eq!(device_time, u64::from(arrival.devices) * (to - from).0);
            let turns = if kind == 0 { 0 } else { own.len() as u64 - 1 };
            prop_assert_eq!((to - from).0, arrival.takes.0 + turns * delay);
            moves += turns;
        }
        prop_assert_eq!(u64::from(came.moves), moves);
        prop_assert!(kind == 1 || came.apart == Nanos(0));
    }
}
