//! Ranks that differ, do not come, go, or ask for what cannot be.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use base::{Channel, HostId, TransferTag};
use ir::{Collective, DType};
use plan::RankSchedule;
use run::channel::DataPlane;
use run::enforcer::{Elements, Enforcer, EnforcerError, Reduction, Team, TeamChannel};

use crate::planes::{Cable, LONG, as_ranks, planes, planes_of_all_kinds};
use crate::steps::{check, submit};

/// Each rank of a team asks for a collective of its own; returns the error of each.
fn asked(
    planes: &[DataPlane],
    name: u64,
    ask: impl Fn(u32) -> Option<Collective> + Sync,
) -> Vec<Option<EnforcerError>> {
    as_ranks(planes, name, LONG, |rank, plane, enforcer| {
        let collective = ask(rank)?;
        let script = Arc::new(RankSchedule::single(&collective, 0));
        let part = enforcer.prepare(script).unwrap();
        let step = enforcer.begin(&part, 0).unwrap();
        let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
        enforcer.wait(ticket).err()
    })
}

#[test]
fn ranks_that_ask_for_different_things_are_told() {
    for planes in planes_of_all_kinds(3) {
        let reduce = |elements| Collective::all_reduce(3, elements).unwrap();
        let sizes = asked(&planes, 1, |rank| Some(reduce(if rank == 1 { 900 } else { 1000 })));
        let kinds = asked(&planes, 2, |rank| {
            Some(if rank == 2 { Collective::all_gather(3, 1000).unwrap() } else { reduce(1000) })
        });
        for errors in [sizes, kinds] {
            let errors: Vec<EnforcerError> = errors.into_iter().map(Option::unwrap).collect();
            let is_typed = |error: &EnforcerError| {
                matches!(
                    error,
                    EnforcerError::Diverged { .. }
                        | EnforcerError::Reported { .. }
                        | EnforcerError::Lost { .. }
                )
            };
            assert!(errors.iter().all(is_typed), "{errors:?}");
            assert!(errors.iter().any(|error| matches!(error, EnforcerError::Diverged { .. })));
        }
    }
}

#[test]
fn a_rank_that_does_not_come_or_goes_is_named() {
    for planes in planes_of_all_kinds(3) {
        // This rank closes at once, while others wait for it.
        let reduce = Collective::all_reduce(3, 1000).unwrap();
        let gone = asked(&planes, 1, |rank| (rank != 2).then(|| reduce.clone()));
        assert!(gone[2].is_none());
        for error in gone[..2].iter().map(|error| error.as_ref().unwrap()) {
            let is_named = match error {
                EnforcerError::Lost { rank, .. } | EnforcerError::Reported { rank, .. } => {
                    *rank < 3
                }
                _ => false,
            };
            assert!(is_named, "{error}");
        }
        // This rank joins and submits nothing until the others have given up.
        let given_up = Barrier::new(3);
        let late = as_ranks(&planes, 2, Duration::from_millis(300), |rank, plane, enforcer| {
            if rank == 2 {
                given_up.wait();
                return None;
            }
            let part = enforcer.prepare(Arc::new(RankSchedule::single(&reduce, 1))).unwrap();
            let step = enforcer.begin(&part, 0).unwrap();
            let ticket = submit(enforcer, plane, &reduce, (step, 0)).unwrap();
            let error = enforcer.wait(ticket).err();
            given_up.wait();
            error
        });
        assert!(matches!(late[0], Some(EnforcerError::Late { rank: 2, .. })), "{late:?}");
        assert!(late[1].as_ref().unwrap().to_string().contains("for rank 2"), "{late:?}");
        // This rank never joins.
        let hosts: Vec<HostId> = (0..3).map(HostId).collect();
        let channels = [TeamChannel { channel: Channel(1), rate: None }];
        let name = TransferTag(3);
        let (rank, hosts, channels) = (0, &hosts[..], &channels[..]);
        let team = Team {
            plane: &planes[0],
            name,
            rank,
            hosts,
            names: None,
            channels,
            timeout: Duration::from_secs(60),
            meeting: Duration::from_secs(60),
        };
        let began = Instant::now();
        let gone = base::Status::new(base::Code::Unavailable, "gone");
        planes[0].lose_peer(HostId(2), TransferTag(0), &gone);
        assert!(matches!(Enforcer::join(&team), Err(EnforcerError::Join { rank: 2, .. })));
        assert!(began.elapsed() < Duration::from_secs(10), "it is known to be lost");
    }
}

#[test]
fn ranks_do_not_wait_for_one_that_left_because_another_was_lost() {
    let planes = planes(3);
    let hosts: Vec<HostId> = (0..3).map(HostId).collect();
    let channels = [TeamChannel { channel: Channel(1), rate: None }];
    let (name, rank) = (TransferTag(7), 2);
    let team = Team {
        plane: &planes[2],
        name,
        rank,
        hosts: &hosts,
        names: None,
        channels: &channels,
        timeout: LONG,
        meeting: LONG,
    };
    // Rank 0 has left, and host 1 is back already: a process that knows nothing of the team.
    assert!(planes[2].begins_at(HostId(1), TransferTag(8)));
    let began = Instant::now();
    assert!(matches!(Enforcer::join(&team), Err(EnforcerError::Join { rank: 1, .. })));
    assert!(began.elapsed() < Duration::from_secs(10), "it is known to be another process");
}

#[test]
fn a_process_in_the_place_of_a_rank_is_not_waited_for() {
    let planes = planes(2);
    let cables = planes[1].channels().iter().map(|target| Cable::to(target)).collect::<Vec<_>>();
    let addresses: Vec<String> = cables.iter().map(|cable| cable.address.clone()).collect();
    planes[0].add_peer(HostId(1), &addresses.join(","));
    let own = ["tcp:127.0.0.1:0".to_owned(), "tcp:127.0.0.1:0".to_owned()];
    let next = DataPlane::listen(HostId(1), &own[0], &own, "secret", false).unwrap();
    let done = Barrier::new(2);
    as_ranks(&planes, 1, LONG, |rank, plane, enforcer| {
        if rank == 0 {
            plane.add_peer(HostId(1), &next.channels().join(","));
            assert!(plane.begins_at(HostId(1), TransferTag(2)));
            cables.iter().for_each(Cable::cut);
            let began = Instant::now();
            let collective = Collective::all_reduce(2, 5000).unwrap();
            let script = Arc::new(RankSchedule::single(&collective, 0));
            let step = enforcer.begin(&enforcer.prepare(script).unwrap(), 0).unwrap();
            let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
            let error = enforcer.wait(ticket).unwrap_err();
            assert!(matches!(error, EnforcerError::Lost { rank: 1, .. }), "{error}");
            assert!(began.elapsed() < Duration::from_secs(10), "it is known to be lost");
        }
        done.wait();
    });
    next.close();
}

#[test]
fn a_connection_that_is_refused_while_ranks_join_is_opened_again() {
    let planes = planes(2);
    let target = planes[1].channels();
    let cables = [Cable::closing(&target[0], 2), Cable::closing(&target[1], 1)];
    planes[0].add_peer(HostId(1), &cables.each_ref().map(|cable| cable.address.clone()).join(","));
    let collective = Collective::all_reduce(2, 5000).unwrap();
    let script = Arc::new(RankSchedule::single(&collective, 0));
    as_ranks(&planes, 1, Duration::from_secs(20), |_, plane, enforcer| {
        let part = enforcer.prepare(script.clone()).unwrap();
        let step = enforcer.begin(&part, 0).unwrap();
        let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
        check(enforcer, &script, ticket, (step, 0));
    });
}

#[test]
fn a_rank_that_leaves_at_once_has_joined_for_the_others() {
    // Only while both ends are open does the kernel name the owner of a connection: a rank that closed
    // its lanes before the others had accepted them would be awaited until the timeout.
    for _ in 0..50 {
        let planes = planes(2);
        as_ranks(&planes, 1, Duration::from_secs(20), |_, _, _| ());
    }
}

#[test]
fn what_a_rank_cannot_make_fails_for_all_and_the_next_goes_well() {
    for planes in planes_of_all_kinds(4) {
        let collective = Collective::all_reduce(4, 5000).unwrap();
        as_ranks(&planes, 1, Duration::from_secs(20), |rank, plane, enforcer| {
            let part = enforcer.prepare(Arc::new(RankSchedule::single(&collective, 0))).unwrap();
            let elements = Elements::new(DType::F32, Reduction::Sum).unwrap();
            let step = enforcer.begin(&part, 0).unwrap();
            let work = run::enforcer::CollectiveBuffer::of(plane.memory(20_000).unwrap());
            let poison = (rank == 1).then(|| "INTERNAL: layer 3 has failed".to_owned());
            let ticket = enforcer.submit((step, 0), (&collective, elements), work, poison).unwrap();
            let error = enforcer.wait(ticket).unwrap_err();
            assert_eq!(error, EnforcerError::Poisoned("INTERNAL: layer 3 has failed".to_owned()));
            let step = enforcer.begin(&part, 0).unwrap();
            let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
            check(enforcer, &RankSchedule::single(&collective, 0), ticket, (step, 0));
        });
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_harms_nobody() {
    for planes in planes_of_all_kinds(2) {
        let collective = Collective::all_reduce(2, 100).unwrap();
        as_ranks(&planes, 1, Duration::from_secs(20), |_, plane, enforcer| {
            let script = Arc::new(RankSchedule::single(&collective, 0));
            let part = enforcer.prepare(script.clone()).unwrap();
            let step = enforcer.begin(&part, 0).unwrap();
            let other = Collective::all_reduce(2, 101).unwrap();
            let error = submit(enforcer, plane, &other, (step, 0)).unwrap_err();
            assert!(matches!(error, EnforcerError::Different { operation: 0, .. }), "{error}");
            let error = submit(enforcer, plane, &collective, (step, 1)).unwrap_err();
            assert!(matches!(error, EnforcerError::Operation { operation: 1, .. }), "{error}");
            let error = submit(enforcer, plane, &collective, (step + 1, 0)).unwrap_err();
            assert!(matches!(error, EnforcerError::Step { .. }), "{error}");
            let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
            let error = submit(enforcer, plane, &collective, (step, 0)).unwrap_err();
            assert!(matches!(error, EnforcerError::Twice { .. }), "{error}");
            check(enforcer, &script, ticket, (step, 0));
            let three = Collective::all_reduce(3, 100).unwrap();
            let error = enforcer.prepare(Arc::new(RankSchedule::single(&three, 0))).unwrap_err();
            assert!(matches!(error, EnforcerError::Rank { .. }), "{error}");
            let error =
                enforcer.prepare(Arc::new(RankSchedule::single(&collective, 5))).unwrap_err();
            assert!(matches!(error, EnforcerError::Channels { found: 6, channels: 2 }), "{error}");
            assert!(Elements::new(DType::C128, Reduction::Sum).is_err());
        });
    }
}

#[test]
fn what_a_channel_no_longer_carries_goes_by_another() {
    const OPERATIONS: u32 = 6;
    let planes = planes(3);
    let cables: Vec<Cable> = planes.iter().map(|plane| Cable::to(&plane.channels()[1])).collect();
    for (one, plane) in planes.iter().enumerate() {
        for (other, peer) in planes.iter().enumerate().filter(|(other, _)| *other != one) {
            let addresses = format!("{},{}", peer.channels()[0], cables[other].address);
            plane.add_peer(HostId(other as u32), &addresses);
        }
    }
    let collective = Collective::all_reduce(3, 600_000).unwrap();
    let script = Arc::new(RankSchedule::series(&collective, 1, OPERATIONS));
    as_ranks(&planes, 1, Duration::from_secs(20), |rank, plane, enforcer| {
        let part = enforcer.prepare(script.clone()).unwrap();
        let step = enforcer.begin(&part, 0).unwrap();
        let submit = |operation| submit(enforcer, plane, &collective, (step, operation));
        let tickets: Vec<_> = (0..OPERATIONS).map(|number| submit(number).unwrap()).collect();
        for (number, ticket) in (0..).zip(tickets) {
            check(enforcer, &script, ticket, (step, number));
            if rank == 0 && number == 1 {
                cables.iter().for_each(Cable::cut);
            }
        }
    });
}
