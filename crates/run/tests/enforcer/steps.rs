//! Random steps, what their collectives mean, and ranks that run them.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use base::{BitsPerSecond, Nanos, Random};
use cost::ChannelCost;
use ir::{Collective, CollectiveKind, DType, Dependency, StepGraph, StepOp};
use plan::{CommPlan, Policy, Problem, RankSchedule, SearchSpace, executions};
use run::channel::DataPlane;
use run::enforcer::{Elements, Enforcer, EnforcerError, PreparedSchedule, Reduction};

/// Generates a collective of `ranks` ranks.
pub fn collective(random: &mut Random, ranks: u32) -> Collective {
    let elements = match random.below(8) {
        0 | 1 => random.below(9),
        2..5 => random.below(2_000),
        5 | 6 => random.below(60_000),
        // Larger than the flow-control window of a lane.
        _ => random.below(600_000),
    };
    let root = random.below(u64::from(ranks)) as u32;
    let made = match random.below(7) {
        0 => Collective::all_reduce(ranks, elements),
        1 => Collective::reduce_scatter(ranks, elements),
        2 => Collective::all_gather(ranks, elements),
        3 => Collective::broadcast(ranks, elements, root),
        4 => Collective::reduce(ranks, elements, root),
        5 => Collective::all_to_all(ranks, elements),
        _ => {
            let sizes = (0..ranks * ranks).map(|_| random.below(3_000)).collect();
            Collective::all_to_all_of(ranks, sizes)
        }
    };
    made.unwrap()
}

/// Input of a rank: integers, so that sums are exact in any order.
pub fn given(step: u64, operation: u32, rank: u32, place: u64) -> f32 {
    ((step * 31 + u64::from(operation) * 7 + u64::from(rank) * 3 + place) % 97) as f32
}

/// Expected result, by the semantics of the collective.
pub fn expected(collective: &Collective, step: u64, operation: u32, rank: u32) -> Vec<f32> {
    let value = |rank, place| given(step, operation, rank, place);
    let ranks = collective.ranks();
    let sum = |place: u64| (0..ranks).map(|rank| value(rank, place)).sum::<f32>();
    match collective.kind() {
        CollectiveKind::AllReduce => (0..collective.elements()).map(sum).collect(),
        CollectiveKind::ReduceScatter => collective.block(rank).map(sum).collect(),
        CollectiveKind::AllGather => {
            (0..ranks).flat_map(|one| collective.block(one).map(move |at| value(one, at))).collect()
        }
        CollectiveKind::Broadcast { root } => {
            (0..collective.elements()).map(|at| value(*root, at)).collect()
        }
        CollectiveKind::Reduce { root } if *root == rank => {
            (0..collective.elements()).map(sum).collect()
        }
        CollectiveKind::Reduce { .. } => Vec::new(),
        CollectiveKind::AllToAll { .. } => (0..ranks)
            .flat_map(|one| {
                let (read, _, size) = collective.pair(one, rank);
                (read..read + size).map(move |at| value(one, at))
            })
            .collect(),
    }
}

/// A random plan of a random step without computation.
pub fn script(random: &mut Random, ranks: u32, ahead: bool) -> Arc<RankSchedule> {
    scripts(random, ranks, ahead, 1).remove(0)
}

/// Several random plans of one random step.
pub fn scripts(random: &mut Random, ranks: u32, ahead: bool, plans: u32) -> Vec<Arc<RankSchedule>> {
    let count = 1 + random.below(5);
    let mut step = StepGraph::new("step", ranks);
    for number in 0..count {
        let op = StepOp::of_ranks(collective(random, ranks), 4);
        let communicates = step.add(format!("op {number}"), op, &[]);
        if ahead {
            let time = Nanos(random.below(3_000_000));
            let op = StepOp::compute((0..ranks).collect::<Vec<_>>(), time);
            step.add(format!("compute {number}"), op, &[Dependency::on(communicates)]);
        }
    }
    let step = Problem::new(step).unwrap();
    let costs: Vec<ChannelCost> = [2e9, 1e9]
        .map(|rate| ChannelCost {
            rate: BitsPerSecond(rate),
            latency: Nanos(50_000),
            sums: BitsPerSecond(2e10),
            incast: 0.1,
            overlap: Vec::new(),
        })
        .to_vec();
    let options: Vec<_> = step
        .nodes()
        .iter()
        .map(|node| match &node.op {
            StepOp::Collective(op) => {
                executions(&op.collective, op.element_bytes, &costs, &SearchSpace::default())
            }
            _ => Vec::new(),
        })
        .collect();
    let plan = |_| {
        let mut choose = |options: &Vec<_>| random.below(options.len().max(1) as u64) as u32;
        let chosen: Vec<u32> = options.iter().map(&mut choose).collect();
        let policies = [Policy::CriticalPath, Policy::Fifo, Policy::Lifo];
        let policy = &policies[random.below(3) as usize];
        Arc::new(RankSchedule::of(&step, &options, &CommPlan::of(&step, &options, &chosen, policy)))
    };
    (0..plans).map(plan).collect()
}

pub fn submit(
    enforcer: &Enforcer,
    plane: &DataPlane,
    collective: &Collective,
    at: (u64, u32),
) -> Result<run::enforcer::CollectiveTicket, EnforcerError> {
    let rank = enforcer.rank();
    let elements = Elements::new(DType::F32, Reduction::Sum)?;
    let length = collective.work(rank) as usize * 4;
    // Some vectors are not in shared memory.
    let memory = if (at.0 + u64::from(at.1)).is_multiple_of(2) {
        enforcer.memory(length)
    } else {
        plane.memory(length)
    };
    let work = run::enforcer::CollectiveBuffer::of(memory.unwrap());
    // SAFETY: no other reference exists yet.
    let vector: &mut [f32] = bytemuck::cast_slice_mut(unsafe { work.slice_mut(0, length) });
    for (place, element) in (0..).zip(vector) {
        *element = given(at.0, at.1, rank, place);
    }
    enforcer.submit(at, (collective, elements), work, None)
}

pub fn check(
    enforcer: &Enforcer,
    part: &RankSchedule,
    ticket: run::enforcer::CollectiveTicket,
    at: (u64, u32),
) {
    let collective = &part.operations[at.1 as usize].collective;
    let work = enforcer.wait(ticket).unwrap();
    let range = collective.result(enforcer.rank());
    let count = (range.end - range.start) as usize * 4;
    // SAFETY: the collective has completed.
    let bytes = unsafe { work.slice(range.start as usize * 4, count) };
    let found: &[f32] = bytemuck::cast_slice(bytes);
    let expected = expected(collective, at.0, at.1, enforcer.rank());
    assert!(found == expected, "rank {}: {collective}, step {at:?}", enforcer.rank());
}

/// Runs several steps of one schedule, submitted in an order and at times that differ by rank.
pub fn steps(
    enforcer: &Enforcer,
    plane: &DataPlane,
    part: &Arc<PreparedSchedule>,
    script: &RankSchedule,
    (count, seed, together): (u64, u64, u64),
) {
    let mut random = Random::of(&[seed, u64::from(enforcer.rank()) + 100]);
    let mut done = 0;
    while done < count {
        let now = together.min(count - done);
        let mut waiting = Vec::new();
        let begin = |turn: u64| enforcer.begin(part, (now - 1 - turn) as u32).unwrap();
        let begun: Vec<u64> = (0..now).map(begin).collect();
        for step in begun {
            let mut open: Vec<u32> = (0..script.operations.len() as u32).collect();
            while !open.is_empty() {
                let operation = open.swap_remove(random.below(open.len() as u64) as usize);
                if random.below(4) == 0 {
                    thread::sleep(Duration::from_micros(random.below(2_000)));
                }
                let collective = &script.operations[operation as usize].collective;
                let ticket = submit(enforcer, plane, collective, (step, operation)).unwrap();
                waiting.push((ticket, (step, operation)));
            }
        }
        for (ticket, at) in waiting {
            check(enforcer, script, ticket, at);
        }
        done += now;
    }
}

/// Runs steps of the plan in force, at times that differ by rank; returns the plan of each step.
pub fn planned_steps(
    enforcer: &Enforcer,
    plane: &DataPlane,
    script: &RankSchedule,
    (count, seed): (u64, u64),
) -> Vec<u64> {
    const AHEAD: u64 = 2;
    let mut random = Random::of(&[seed, u64::from(enforcer.rank()) + 100]);
    let mut plans = Vec::new();
    for turn in 0..count {
        let (step, plan) = enforcer.begin_planned((count - 1 - turn).min(AHEAD) as u32).unwrap();
        plans.push(plan);
        if random.below(3) == 0 {
            thread::sleep(Duration::from_micros(random.below(3_000)));
        }
        let operations = (0..).zip(&script.operations);
        let submitted: Vec<_> = operations
            .map(|(number, one)| {
                let at = (step, number);
                (submit(enforcer, plane, &one.collective, at).unwrap(), at)
            })
            .collect();
        for (ticket, at) in submitted {
            check(enforcer, script, ticket, at);
        }
    }
    plans
}
