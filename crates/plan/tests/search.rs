//! Schedules of steps under policies, and results of searches.

use base::{BitsPerSecond, Nanos, Random};
use cost::ChannelCost;
use ir::{Collective, Dependency, StepGraph, StepOp};
use plan::{
    CommPlan, Execution, HandOrders, Motif, Place, Placed, Policy, Problem, ProblemError,
    ScheduledSpan, SearchLimits, SearchSpace, Slot, StepScheduler, StopReason, System, Unrolled,
    compare, executions, least_period, search,
};
use proptest::prelude::*;

/// Name, operation on two devices, and dependencies of a node.
type Task = (String, StepOp, Vec<Dependency>);

fn after(nodes: &[(u32, u32)]) -> Vec<Dependency> {
    nodes.iter().map(|&(node, steps_before)| Dependency { node, steps_before }).collect()
}

fn compute(name: &str, time: u64, waits: &[(u32, u32)]) -> Task {
    (name.to_owned(), StepOp::compute(vec![0, 1], Nanos(time)), after(waits))
}

fn communicate(name: &str, waits: &[(u32, u32)]) -> Task {
    let collective = Collective::all_reduce(2, 2).unwrap();
    (name.to_owned(), StepOp::of_ranks(collective, 4), after(waits))
}

/// A step of this many ranks; computations run on all of them.
fn step_of(ranks: u32, tasks: Vec<Task>) -> Result<Problem, ProblemError> {
    let mut step = StepGraph::new("step", ranks);
    for (name, op, after) in tasks {
        let op = match op {
            StepOp::Compute { time, .. } => StepOp::compute((0..ranks).collect::<Vec<_>>(), time),
            op => op,
        };
        step.add(name, op, &after);
    }
    Problem::new(step)
}

fn step(tasks: Vec<Task>) -> Result<Problem, ProblemError> {
    step_of(2, tasks)
}

/// An execution option of motifs in sequence, each as its channel and its time.
fn option(motifs: &[(u32, u64)]) -> Execution {
    let motif = Motif::of(&Collective::all_reduce(2, 2).unwrap());
    let placed = (0..).zip(motifs).map(|(number, &(channel, time))| Placed {
        motif: motif.clone(),
        after: if number == 0 { vec![] } else { vec![number - 1] },
        channel,
        time: Nanos(time),
    });
    let (form, place) = (String::new(), Place::One(0));
    Execution { form, segments: 1, place, motifs: placed.collect() }
}

/// All options of all tasks.
fn every(options: &[Vec<Execution>]) -> Vec<Vec<u32>> {
    options.iter().map(|options| (0..options.len() as u32).collect()).collect()
}

/// An all-to-all that takes 3.5 on the fast channel or 9.5 on the slow one, issued after three
/// all-reduces of 2.5 each: an instance of SYNDICATE §3.1.2, whose cost table is lost.
#[test]
fn the_example_is_planned_in_time() {
    let tasks = ["b", "c", "d", "a"].map(|name| communicate(name, &[]));
    let step = step(tasks.to_vec()).unwrap();
    let reduce = vec![option(&[(0, 25)])];
    let exchange = vec![option(&[(0, 35)]), option(&[(1, 95)])];
    let options = [reduce.clone(), reduce.clone(), reduce, exchange];
    let unrolled = Unrolled::new(&step, &options, 1);
    let greedy = [0; 4];
    let limits = SearchLimits::default();
    let found =
        |policy: &Policy| search(&unrolled, policy, &greedy, &every(&options), &limits).end.0;
    assert_eq!(
        StepScheduler::new(&unrolled, Policy::Fifo).end(&greedy).0,
        110,
        "as it is asked for"
    );
    assert_eq!(found(&Policy::Fifo), 110, "options alone");
    assert_eq!(
        StepScheduler::new(&unrolled, Policy::CriticalPath).end(&greedy).0,
        110,
        "order alone"
    );
    assert_eq!(found(&Policy::CriticalPath), 95, "both");
}

#[test]
fn channels_that_share_something_take_longer_together() {
    let tasks = vec![communicate("a", &[]), compute("wait", 50, &[]), communicate("b", &[(1, 0)])];
    let options = [vec![option(&[(0, 100)])], vec![], vec![option(&[(1, 200)])]];
    let end = |overlap: [f64; 2]| {
        let mut both = channels();
        both[0].overlap = vec![0.0, overlap[0]];
        both[1].overlap = vec![overlap[1], 0.0];
        let step = step(tasks.clone()).unwrap().on(&both);
        StepScheduler::new(&Unrolled::new(&step, &options, 1), Policy::Fifo).end(&[0; 3]).0
    };
    assert_eq!(end([0.0, 0.0]), 250);
    // They overlap for 50, which slows one down by a half and the other by a tenth.
    assert_eq!(end([0.5, 0.1]), 280);
}

#[test]
fn steps_overlap_where_they_may() {
    // Data are exchanged for the next step while this one computes.
    let step = step(vec![
        communicate("data", &[]),
        compute("forward", 10, &[(0, 0), (3, 1)]),
        compute("backward", 20, &[(1, 0)]),
        communicate("gradients", &[(2, 0)]),
    ])
    .unwrap();
    let options = [vec![option(&[(0, 15)])], vec![], vec![], vec![option(&[(0, 5)])]];
    let plan = CommPlan::of(&step, &options, &[0; 4], &Policy::CriticalPath);
    assert_eq!(plan.period.0, 35);
    let slot = |task, ahead| Slot { ahead, task, motif: 0 };
    assert_eq!(plan.order, [[slot(0, 1), slot(3, 0)]], "data are exchanged a step ahead");
    for (steps, end) in [(1, 50), (2, 85), (3, 120)] {
        let unrolled = Unrolled::new(&step, &options, steps);
        let (found, spans) = StepScheduler::new(&unrolled, Policy::CriticalPath).spans(&[0; 4]);
        assert_eq!(found.0, end, "{spans:?}");
    }
}

/// Checks that dependencies end before their dependents begin, and that a channel carries one motif at
/// a time.
fn check(
    step: &Problem,
    executions: &[Vec<Execution>],
    chosen: &[u32],
    steps: u32,
    spans: &[ScheduledSpan],
) {
    let motifs: usize = (0..step.nodes().len())
        .map(|task| match executions[task].get(chosen[task] as usize) {
            Some(execution) => execution.motifs.len(),
            None => 1,
        })
        .sum();
    assert_eq!(spans.len(), motifs * steps as usize, "all is done, once");
    let ends = |step: u32, task: u32| {
        let of = spans.iter().filter(|span| (span.step, span.task) == (step, task));
        of.map(|span| span.end).max().unwrap_or_default()
    };
    for span in spans {
        for dependency in step.graph().dependencies(span.task) {
            if let Some(before) = span.step.checked_sub(dependency.steps_before) {
                assert!(span.start >= ends(before, dependency.node));
            }
        }
        if let Some(motif) = span.motif {
            let placed = &executions[span.task as usize][chosen[span.task as usize] as usize];
            let placed = &placed.motifs[motif as usize];
            assert_eq!(
                (placed.channel, placed.time.0),
                (span.channel.unwrap(), span.end.0 - span.start.0)
            );
            for &after in &placed.after {
                let before = spans.iter().find(|other| {
                    (other.step, other.task, other.motif) == (span.step, span.task, Some(after))
                });
                assert!(span.start >= before.expect("it is done").end);
            }
        }
    }
    let mut of_channel: Vec<&ScheduledSpan> = spans.iter().collect();
    of_channel.sort_by_key(|span| (span.channel, span.start, span.end));
    for pair in of_channel.windows(2).filter(|pair| pair[0].channel == pair[1].channel) {
        assert!(pair[0].end <= pair[1].start, "one at a time: {pair:?}");
    }
}

/// Tasks that compute or communicate, in any order, with options of one to three motifs.
fn steps() -> impl Strategy<Value = (Problem, Vec<Vec<Execution>>)> {
    let motif = (0..3_u32, 0..50_u64);
    let options = prop::collection::vec(prop::collection::vec(motif, 1..4), 1..4);
    let task = (any::<bool>(), 0..60_u64, options, any::<[prop::sample::Index; 2]>(), 0..9_u8);
    prop::collection::vec(task, 1..9).prop_map(|drawn| {
        let count = drawn.len();
        let mut executions = Vec::new();
        let tasks = (0..).zip(drawn).map(|(number, (computes, time, options, others, kind))| {
            let mut waits = Vec::new();
            if number > 0 && kind % 3 > 0 {
                waits.push((others[0].index(number) as u32, 0));
            }
            if kind > 5 {
                waits.push((others[1].index(count) as u32, 1));
            }
            if computes {
                executions.push(vec![]);
                return compute("c", time, &waits);
            }
            executions.push(options.iter().map(|motifs| option(motifs)).collect());
            communicate("m", &waits)
        });
        let tasks = tasks.collect();
        (step(tasks).expect("it makes sense"), executions)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn schedules_keep_what_must_be(
        (step, options) in steps(),
        unrolled in 1..4_u32,
        seed in any::<u64>(),
    ) {
        let steps = Unrolled::new(&step, &options, unrolled);
        let mut random = Random::of(&[seed]);
        let hand = (0..step.nodes().len()).map(|_| random.below(19) as i32 - 9).collect();
        for policy in [Policy::CriticalPath, Policy::Fifo, Policy::Lifo, Policy::Hand(hand)] {
            let mut scheduler = StepScheduler::new(&steps, policy);
            for _ in 0..3 {
                let chosen: Vec<u32> =
                    options.iter().map(|options| random.below(options.len().max(1) as u64) as u32).collect();
                let (end, spans) = scheduler.spans(&chosen);
                check(&step, &options, &chosen, unrolled, &spans);
                prop_assert_eq!(end, spans.iter().map(|span| span.end).max().unwrap_or_default());
                prop_assert_eq!(end, scheduler.end(&chosen), "again the same");
            }
        }
    }

    #[test]
    fn orders_can_be_kept_in_every_step((step, options) in steps(), seed in any::<u64>()) {
        let mut random = Random::of(&[seed]);
        let chosen: Vec<u32> =
            options.iter().map(|options| random.below(options.len().max(1) as u64) as u32).collect();
        for policy in [Policy::CriticalPath, Policy::Fifo, Policy::Lifo] {
            let plan = CommPlan::of(&step, &options, &chosen, &policy);
            for unrolled in 1..6 {
                let steps = Unrolled::new(&step, &options, unrolled);
                let fixed = Policy::Fixed(plan.order.clone());
                let (_, spans) = StepScheduler::new(&steps, fixed).spans(&chosen);
                check(&step, &options, &chosen, unrolled, &spans);
            }
        }
    }

    #[test]
    fn no_plan_takes_less_than_the_least((step, options) in steps(), seed in any::<u64>()) {
        let least = least_period(&step, &options, &[BitsPerSecond(1e9); 3]);
        let mut random = Random::of(&[seed]);
        let chosen: Vec<u32> =
            options.iter().map(|options| random.below(options.len().max(1) as u64) as u32).collect();
        for policy in [Policy::CriticalPath, Policy::Fifo, Policy::Lifo] {
            let plan = CommPlan::of(&step, &options, &chosen, &policy);
            prop_assert!(plan.period.0 + 1 >= least.0, "{:?} under {least:?}", plan.period);
        }
    }

    #[test]
    fn searches_find_what_is_best_and_always_the_same((step, options) in steps(), seed in any::<u64>()) {
        let steps = Unrolled::new(&step, &options, 2);
        let first = vec![0; options.len()];
        let policy = Policy::CriticalPath;
        let all = search(&steps, &policy, &first, &every(&options), &SearchLimits::default());
        prop_assert_eq!(all.reason, StopReason::Exhausted);
        let few = SearchLimits { evaluations: 400, chains: 2, seed };
        let found = search(&steps, &policy, &first, &every(&options), &few);
        prop_assert!(found.end >= all.end);
        prop_assert!(found.end <= StepScheduler::new(&steps, policy.clone()).end(&first));
        prop_assert!(found == search(&steps, &policy, &first, &every(&options), &few));
        prop_assert_eq!(StepScheduler::new(&steps, policy).end(&found.chosen), found.end);
    }
}

fn channels() -> Vec<ChannelCost> {
    let channel = |rate: f64| ChannelCost {
        rate: BitsPerSecond(rate),
        latency: Nanos(100_000),
        sums: BitsPerSecond(32e9),
        incast: 0.02,
        overlap: Vec::new(),
    };
    vec![channel(200e6), channel(100e6)]
}

#[test]
fn large_payloads_go_around_rings_and_small_ones_straight() {
    let best = |elements: u64, collective: fn(u32, u64) -> Collective| {
        let collective = collective(8, elements);
        let variety = SearchSpace { segments: vec![1], stripes: false, ..SearchSpace::default() };
        executions(&collective, 4, &channels(), &variety).swap_remove(0)
    };
    let all_reduce = |ranks, elements| Collective::all_reduce(ranks, elements).unwrap();
    assert_eq!(best(64, all_reduce).form, "one-shot");
    assert_eq!(best(4096, all_reduce).form, "two-shot");
    let large = best(1 << 22, all_reduce);
    assert!(large.form == "whole" || large.form == "ring", "{large}");
    assert!(large.motifs.iter().all(|motif| motif.channel == 0), "the fast one");
}

#[test]
fn stripes_take_less_than_the_fastest_channel_alone() {
    let collective = Collective::all_to_all(4, 1 << 20).unwrap();
    let all = executions(&collective, 4, &channels(), &SearchSpace::default());
    let alone = all[0].alone();
    let striped = all.iter().filter(|one| one.place == Place::All).map(Execution::alone).min();
    let striped = striped.expect("there are some");
    assert!(striped.0 * 13 < alone.0 * 10, "{striped:?} and {alone:?}");
}

#[test]
fn steps_that_make_no_sense_are_refused() {
    assert!(step(vec![]).is_err());
    assert!(step(vec![compute("a", 1, &[(0, 0)])]).is_err());
    assert!(step(vec![compute("a", 1, &[(1, 1)])]).is_err());
    assert!(step(vec![compute("a", 1, &[(0, 2)])]).is_err());
    let error = step(vec![compute("a", 1, &[]), compute("b", 1, &[(1, 0)])]).unwrap_err();
    assert!(error.to_string().contains("node 1 depends on node 1"), "{error}");
}

/// A recommendation model as in SYNDICATE §6.5: embeddings are exchanged, gradients are all-reduced.
fn recommendation(ranks: u32, mebibytes: [u64; 5], millis: [u64; 6]) -> Problem {
    let ms = |index: usize| millis[index] * 1_000_000;
    let elements = |index: usize| mebibytes[index] << 18;
    let of = |collective: Collective, name: &str, waits: &[(u32, u32)]| {
        (name.to_owned(), StepOp::of_ranks(collective, 4), after(waits))
    };
    let reduce = |name, index, waits: &[(u32, u32)]| {
        of(Collective::all_reduce(ranks, elements(index)).unwrap(), name, waits)
    };
    let exchange = |name, index, waits: &[(u32, u32)]| {
        of(Collective::all_to_all(ranks, elements(index)).unwrap(), name, waits)
    };
    let tasks = vec![
        exchange("data", 0, &[]),
        compute("forward embeddings", ms(0), &[(0, 0), (10, 1)]),
        exchange("embeddings", 1, &[(1, 0)]),
        compute("forward bottom", ms(1), &[(9, 1)]),
        compute("forward top", ms(2), &[(2, 0), (3, 0), (6, 1)]),
        compute("backward top", ms(3), &[(4, 0)]),
        reduce("sum top", 2, &[(5, 0)]),
        exchange("gradients of embeddings", 3, &[(5, 0)]),
        compute("backward bottom", ms(4), &[(5, 0)]),
        reduce("sum bottom", 4, &[(8, 0)]),
        compute("backward embeddings", ms(5), &[(7, 0)]),
    ];
    step_of(ranks, tasks).unwrap()
}

#[test]
fn joint_plans_take_no_longer_than_any_other() {
    let hand = HandOrders {
        plain: Some(vec![0, 0, 1, 0, 0, 0, 8, 6, 0, 9, 0]),
        prefetch: Some(vec![-5, 0, 1, 0, 0, 0, 8, 6, 0, 9, 0]),
    };
    let mut random = Random::of(&[5]);
    for _ in 0..6 {
        let mut drawn = |most| random.below(most) + 1;
        let sizes = [drawn(6), drawn(10), drawn(8), drawn(10), drawn(20)];
        let times = [drawn(100), drawn(200), drawn(300), drawn(500), drawn(400), drawn(200)];
        let step = recommendation(4, sizes, times);
        let variety = SearchSpace { segments: vec![1, 2, 4], ..SearchSpace::default() };
        let options: Vec<Vec<Execution>> = step
            .nodes()
            .iter()
            .map(|node| match &node.op {
                StepOp::Collective(op) => {
                    executions(&op.collective, op.element_bytes, &channels(), &variety)
                }
                _ => vec![],
            })
            .collect();
        let limits = SearchLimits { evaluations: 2_000, chains: 1, seed: 1 };
        let planned = compare(&step, &options, &hand, &limits);
        assert!(planned == compare(&step, &options, &hand, &limits), "always the same");
        let period =
            |system| planned.iter().find(|one| one.system == system).expect("it plans").plan.period;
        let joint = period(System::Joint);
        for other in [System::Fifo, System::Lifo, System::Hand, System::HandPrefetch] {
            assert!(joint <= period(other), "{other:?}");
        }
        assert!(joint <= period(System::Executions) && joint <= period(System::Order));
        assert!(period(System::Striped) <= joint);
        let computed: u64 = times.iter().sum::<u64>() * 1_000_000;
        assert!(period(System::Striped).0 >= computed, "devices compute all the while");
    }
}

/// Steps of five or six collectives with four options each, and computations between them.
fn small_step(random: &mut Random) -> (Problem, Vec<Vec<Execution>>) {
    let count = 5 + random.below(2) as usize;
    let (mut tasks, mut options) = (Vec::new(), Vec::new());
    for number in 0..count {
        let (at, mut waits) = (tasks.len() as u64, Vec::new());
        if at > 0 && random.below(4) > 0 {
            waits.push((random.below(at) as u32, 0));
        }
        tasks.push(compute("c", random.below(100), &waits));
        options.push(vec![]);
        tasks.push(communicate("m", &[(2 * number as u32, 0)]));
        let one = |random: &mut Random| {
            let motifs: Vec<(u32, u64)> = (0..=random.below(4))
                .map(|_| (random.below(2) as u32, 1 + random.below(60)))
                .collect();
            option(&motifs)
        };
        options.push((0..4).map(|_| one(random)).collect());
    }
    (step(tasks).unwrap(), options)
}

#[test]
fn searches_come_within_a_hundredth_of_the_best_of_all() {
    let mut random = Random::of(&[11]);
    let mut worst: f64 = 1.0;
    for _ in 0..100 {
        let (step, options) = small_step(&mut random);
        let steps = Unrolled::new(&step, &options, 2);
        let first = vec![0; options.len()];
        let policy = Policy::CriticalPath;
        let limits = |evaluations| SearchLimits { evaluations, chains: 4, seed: 3 };
        let all = search(&steps, &policy, &first, &every(&options), &limits(1 << 12));
        assert_eq!(all.reason, StopReason::Exhausted);
        // Fewer than there are choices, so that the search is not exhaustive.
        let fewer = limits(1000);
        let found = search(&steps, &policy, &first, &every(&options), &fewer);
        assert_ne!(found.reason, StopReason::Exhausted);
        worst = worst.max(found.end.0 as f64 / all.end.0 as f64);
    }
    assert!(worst <= 1.01, "{worst}");
}
