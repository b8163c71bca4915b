//! Ranks execute random plans; results match the semantics of the collectives.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use base::Random;
use ir::Collective;
use plan::RankSchedule;
use run::enforcer::EnforcerError;

use crate::planes::{as_ranks, planes, planes_of_all_kinds};
use crate::steps::{planned_steps, script, scripts, steps};

#[test]
fn random_plans_do_what_their_collectives_mean() {
    for ranks in [1, 2, 3, 5] {
        for planes in planes_of_all_kinds(ranks) {
            for seed in 0..8 {
                let mut random = Random::of(&[seed, u64::from(ranks)]);
                let script = script(&mut random, ranks, seed % 2 == 0);
                let together = 1 + random.below(3);
                as_ranks(&planes, seed, Duration::from_secs(20), |_, plane, enforcer| {
                    let part = enforcer.prepare(script.clone()).unwrap();
                    steps(enforcer, plane, &part, &script, (6, seed, together));
                });
            }
        }
    }
}

#[test]
fn plans_change_in_the_same_step_on_all_ranks() {
    const STEPS: u64 = 40;
    for ranks in [1, 2, 3] {
        for planes in planes_of_all_kinds(ranks) {
            for seed in 0..3 {
                let mut random = Random::of(&[seed, u64::from(ranks), 7]);
                let scripts = scripts(&mut random, ranks, seed % 2 == 0, 4);
                let plans =
                    as_ranks(&planes, seed, Duration::from_secs(20), |rank, plane, enforcer| {
                        enforcer.follow(&enforcer.prepare(scripts[0].clone()).unwrap()).unwrap();
                        thread::scope(|scope| {
                            if rank == 0 {
                                scope.spawn(|| {
                                    let mut next = scripts[1..].iter().cycle();
                                    while enforcer.steps_begun() < STEPS {
                                        thread::sleep(Duration::from_millis(2));
                                        match enforcer.propose(next.next().unwrap()) {
                                            Ok(from) => assert!(from <= STEPS + 8, "{from}"),
                                            // A rank has not reached the previous plan, or the first.
                                            Err(EnforcerError::Refused { reason }) => {
                                                let early = ["about to begin", "to follow first"];
                                                let is_early =
                                                    early.iter().any(|one| reason.contains(one));
                                                // Or it has run all its steps, and closed.
                                                let is_over = reason.contains("is lost")
                                                    && enforcer.steps_begun() == STEPS;
                                                assert!(is_early || is_over, "{reason}");
                                            }
                                            Err(error) => panic!("{error}"),
                                        }
                                    }
                                });
                            }
                            planned_steps(enforcer, plane, &scripts[0], (STEPS, seed))
                        })
                    });
                assert!(plans.iter().all(|of_rank| *of_rank == plans[0]), "{plans:?}");
                assert!(plans[0].is_sorted());
                assert!(plans[0].last() > Some(&0), "none was ever changed: {plans:?}");
            }
        }
    }
}

#[test]
fn a_plan_that_a_rank_cannot_keep_to_is_kept_to_by_none() {
    let planes = planes(2);
    let reduce = |elements| Collective::all_reduce(2, elements).unwrap();
    let known = Arc::new(RankSchedule::single(&reduce(1000), 0));
    as_ranks(&planes, 1, Duration::from_secs(5), |rank, plane, enforcer| {
        assert_eq!(enforcer.begin_planned(0).unwrap_err(), EnforcerError::NoPlan);
        let part = enforcer.prepare(known.clone()).unwrap();
        enforcer.follow(&part).unwrap();
        planned_steps(enforcer, plane, &known, (1, 1));
        if rank == 1 {
            let error = enforcer.propose(&known).unwrap_err();
            assert_eq!(error, EnforcerError::Proposer { rank: 1 });
        } else {
            let other = RankSchedule::single(&reduce(1001), 0);
            let longer = RankSchedule::series(&reduce(1000), 0, 2);
            for wrong in [other, longer, RankSchedule::single(&reduce(1000), 7)] {
                let error = enforcer.propose(&wrong).unwrap_err();
                assert!(matches!(error, EnforcerError::Refused { .. }), "{error}");
            }
        }
        assert_eq!(planned_steps(enforcer, plane, &known, (10, 2)), [0; 10]);
    });
}
