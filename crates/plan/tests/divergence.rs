//! Ranks submit collectives at different times and in different orders, and all issue them in one
//! order.
//!
//! Counterexamples elsewhere: a compiler pass that orders collectives on each rank by itself
//! (pytorch#189454), and exchanges that are awaited in an order of each rank's own (torchrec#4149).
//! Both deadlock.

use std::sync::Arc;

use base::{Nanos, Random};
use ir::{Collective, Dependency, StepGraph, StepOp};
use plan::{
    ChannelQueue, CommPlan, Execution, HandOrders, Motif, Place, Placed, Policy, Problem,
    QueueEntry, RankSchedule, SearchLimits, compare,
};
use rayon::prelude::*;

const CASES: u64 = 100_000;
/// One of this many plans is searched for.
const SEARCHED: u64 = 16;
const STEPS: u64 = 4;
/// Number of steps that are announced to follow, if there are as many.
const AHEAD: u64 = 2;

/// A random step of computations and collectives, which depend on earlier nodes or on the previous
/// step.
fn step(random: &mut Random) -> (Problem, Vec<Vec<Execution>>) {
    let count = 2 + random.below(7);
    let channels = 1 + random.below(3);
    let mut options = Vec::new();
    let mut step = StepGraph::new("step", 2);
    for number in 0..count {
        let mut after = Vec::new();
        for _ in 0..random.below(3).min(number) {
            after.push(Dependency::on(random.below(number) as u32));
        }
        if random.below(3) == 0 {
            after.push(Dependency { node: random.below(count) as u32, steps_before: 1 });
        }
        if random.below(3) == 0 {
            options.push(vec![]);
            let time = Nanos(random.below(50));
            step.add("computes", StepOp::compute(vec![0, 1], time), &after);
            continue;
        }
        let collective = Collective::all_reduce(2, 2).unwrap();
        options.push(vec![option(random, &collective, channels)]);
        step.add("communicates", StepOp::of_ranks(collective, 4), &after);
    }
    (Problem::new(step).unwrap(), options)
}

fn option(random: &mut Random, collective: &Collective, channels: u64) -> Execution {
    let motif = Motif::of(collective);
    let placed = (0..=random.below(3) as u32).map(|number| Placed {
        motif: motif.clone(),
        after: (0..number).filter(|_| random.below(2) == 0).collect(),
        channel: random.below(channels) as u32,
        time: Nanos(random.below(40)),
    });
    let motifs = placed.collect();
    Execution { form: String::new(), segments: 1, place: Place::One(0), motifs }
}

/// State of one rank.
struct Rank {
    begun: u64,
    courses: Vec<ChannelQueue>,
    /// By step and operation: whether it was submitted, and which of its motifs are done.
    submitted: Vec<Vec<bool>>,
    done: Vec<Vec<Vec<bool>>>,
    /// By channel, the motifs that it has carried.
    carried: Vec<Vec<QueueEntry>>,
    /// By channel, the motif in progress.
    inside: Vec<Option<QueueEntry>>,
}

struct World<'a> {
    step: &'a Problem,
    script: Arc<RankSchedule>,
    /// The operation of each task that communicates.
    operations: Vec<Option<usize>>,
    ranks: Vec<Rank>,
    /// By step, the number of steps that are announced to follow.
    following: [u32; STEPS as usize],
}

impl World<'_> {
    fn is_done(&self, rank: usize, step: u64, task: usize) -> bool {
        let rank = &self.ranks[rank];
        match self.operations[task] {
            Some(operation) => rank.done[step as usize][operation].iter().all(|&done| done),
            // A task that computes is done as soon as its dependencies are.
            None => step < rank.begun && self.may_start(rank, step, task),
        }
    }

    fn may_start(&self, rank: &Rank, step: u64, task: usize) -> bool {
        let number = self.ranks.iter().position(|other| std::ptr::eq(other, rank)).unwrap();
        self.step.graph().dependencies(task as u32).iter().all(|on| {
            step.checked_sub(u64::from(on.steps_before))
                .is_none_or(|step| self.is_done(number, step, on.node as usize))
        })
    }

    /// A rank takes one random step of those enabled; returns whether there was any.
    fn act(&mut self, number: usize, random: &mut Random) -> bool {
        let mut could: Vec<(u64, usize)> = Vec::new();
        let rank = &self.ranks[number];
        if rank.begun < STEPS {
            could.push((u64::MAX, 0));
        }
        for step in 0..rank.begun {
            for (task, operation) in self.operations.iter().enumerate() {
                let Some(operation) = *operation else { continue };
                if !rank.submitted[step as usize][operation] && self.may_start(rank, step, task) {
                    could.push((step, operation));
                }
            }
        }
        for (channel, inside) in rank.inside.iter().enumerate().filter(|(_, one)| one.is_none()) {
            assert!(inside.is_none());
            if rank.courses[channel].peek().is_some_and(|stop| self.is_ready(rank, stop)) {
                could.push((u64::MAX - 1, channel));
            }
        }
        if could.is_empty() {
            return false;
        }
        let (what, which) = could[random.below(could.len() as u64) as usize];
        let rank = &mut self.ranks[number];
        if what == u64::MAX {
            let following = self.following[rank.begun as usize];
            for (channel, course) in rank.courses.iter_mut().enumerate() {
                course.announce(self.script.slots(channel), following);
            }
            rank.begun += 1;
        } else if what == u64::MAX - 1 {
            rank.inside[which] = rank.courses[which].next();
        } else {
            rank.submitted[what as usize][which] = true;
        }
        self.finish();
        true
    }

    fn is_ready(&self, rank: &Rank, stop: QueueEntry) -> bool {
        let (step, operation) = (stop.step as usize, stop.operation as usize);
        let motif = &self.script.operations[operation].motifs[stop.motif as usize];
        let done = &rank.done[step][operation];
        rank.submitted[step][operation] && motif.after.iter().all(|&after| done[after as usize])
    }

    /// A motif ends once all ranks have entered it.
    fn finish(&mut self) {
        for channel in 0..self.script.order.len() {
            let Some(stop) = self.ranks[0].inside[channel] else { continue };
            if self.ranks.iter().any(|rank| rank.inside[channel] != Some(stop)) {
                continue;
            }
            for rank in &mut self.ranks {
                rank.inside[channel] = None;
                rank.carried[channel].push(stop);
                rank.done[stop.step as usize][stop.operation as usize][stop.motif as usize] = true;
            }
        }
    }
}

fn check(seed: u64) {
    let mut random = Random::of(&[seed]);
    let (step, options) = step(&mut random);
    let plan = if seed.is_multiple_of(SEARCHED) {
        let limits = SearchLimits { evaluations: 400, chains: 1, seed };
        compare(&step, &options, &HandOrders::default(), &limits).pop().unwrap().plan
    } else {
        let policies = [Policy::CriticalPath, Policy::Fifo, Policy::Lifo];
        let policy = &policies[random.below(3) as usize];
        CommPlan::of(&step, &options, &vec![0; options.len()], policy)
    };
    let script = Arc::new(RankSchedule::of(&step, &options, &plan));
    let mut operations = 0..;
    let communicates = |op: &StepOp| matches!(op, StepOp::Collective(_));
    let numbers =
        step.nodes().iter().map(|node| communicates(&node.op).then(|| operations.next().unwrap()));
    let numbers = numbers.collect();
    let channels = script.order.len();
    let of_step = || script.operations.iter().map(|one| vec![false; one.motifs.len()]).collect();
    let rank = || Rank {
        begun: 0,
        courses: (0..channels).map(|_| ChannelQueue::new()).collect(),
        submitted: vec![vec![false; script.operations.len()]; STEPS as usize],
        done: (0..STEPS).map(|_| of_step()).collect(),
        carried: vec![Vec::new(); channels],
        inside: vec![None; channels],
    };
    let ranks = (0..2 + random.below(3)).map(|_| rank()).collect();
    let mut known = 0;
    let following = std::array::from_fn(|step| {
        let most = (step as u64 + AHEAD).min(STEPS - 1);
        let least = most.min(known.max(step as u64));
        known = if random.below(2) == 0 { most } else { least + random.below(most - least + 1) };
        (known - step as u64) as u32
    });
    let script_of = script.clone();
    let mut world = World { step: &step, script: script_of, operations: numbers, ranks, following };
    let count = world.ranks.len() as u64;
    let mut idle = 0;
    while idle < count {
        // Some ranks run far ahead of others for a while.
        let number = random.below(count);
        let burst = 1 + random.below(6);
        let moved = (0..burst).filter(|_| world.act(number as usize, &mut random)).count();
        if moved > 0 {
            idle = 0;
            continue;
        }
        let any = (0..count).any(|number| world.act(number as usize, &mut random));
        idle = if any { 0 } else { count };
    }
    for rank in &world.ranks {
        assert!(rank.carried == world.ranks[0].carried, "seed {seed}: ranks differ");
        let all = rank.done.iter().flatten().flatten().all(|&done| done);
        assert!(all, "seed {seed}: {step:?} waits for ever");
    }
}

#[test]
fn ranks_that_differ_carry_the_same_out_and_always_end() {
    (0..CASES).into_par_iter().for_each(check);
}
