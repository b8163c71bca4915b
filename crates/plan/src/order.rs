//! One order for each channel, the same in every step: what hosts can keep without asking anybody.
//!
//! Source: SYNDICATE §4.4 (sequence numbers of motifs). Differs from the paper: each channel has an
//! order of its own, and a motif may stand in the order of the step before its own, so that what is
//! fetched ahead needs no rule of its own.

use base::{Nanos, Random};

use crate::options::Execution;
use crate::problem::{Problem, computes};
use crate::schedule::{Policy, ScheduledSpan, Slot, StepScheduler, Unrolled};

/// Steps from which an order is read: the first ones have nothing before them, and the last ones
/// nothing after.
const READ: u32 = 8;
/// The step whose time the order is read from.
const MIDDLE: u32 = 4;
/// How many steps ahead something may be.
const AHEAD_MAX: u32 = 2;
/// Steps that an order is tried on.
const TRIED: u32 = 16;

/// How each collective is carried out, and the order of its motifs on their channels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommPlan {
    /// The way of each task; any number for those that compute.
    pub chosen: Vec<u32>,
    /// For each channel, what it carries in every step.
    pub order: Vec<Vec<Slot>>,
    /// What a step takes, after the first ones.
    pub period: Nanos,
}

impl CommPlan {
    /// The order in which a policy would send, if it can be kept in every step.
    pub fn of(
        problem: &Problem,
        executions: &[Vec<Execution>],
        chosen: &[u32],
        policy: &Policy,
    ) -> Self {
        let steps = Unrolled::new(problem, executions, READ);
        let (_, spans) = StepScheduler::new(&steps, policy.clone()).spans(chosen);
        let count = spans.iter().filter_map(|span| span.channel).max().map_or(0, |last| last + 1);
        let by_step: Vec<Vec<Slot>> = (0..count).map(|channel| in_step(&spans, channel)).collect();
        let window = in_window(problem, &spans, &by_step);
        let tried = Unrolled::new(problem, executions, TRIED);
        let plans = [window, Some(by_step)].into_iter().flatten();
        let timed = plans.filter_map(|order| {
            let period = period(&tried, chosen, &order)?;
            Some(Self { chosen: chosen.to_vec(), order, period })
        });
        timed.min_by_key(|plan| plan.period).expect("the order of a schedule can be kept")
    }
}

/// Changes the order of a plan at random, as long as steps take no longer, so many times.
///
/// What is moved goes anywhere else in the order of its channel, and now and then into the turn of an
/// earlier or later step.
pub(crate) fn improve(
    plan: CommPlan,
    problem: &Problem,
    executions: &[Vec<Execution>],
    changes: u64,
    random: &mut Random,
) -> CommPlan {
    let steps = Unrolled::new(problem, executions, TRIED);
    let mut best = plan.clone();
    let lines: Vec<usize> = (0..best.order.len()).filter(|&at| best.order[at].len() > 1).collect();
    if lines.is_empty() {
        return best;
    }
    let mut scheduler = StepScheduler::new(&steps, Policy::Fixed(best.order.clone()));
    for _ in 0..changes {
        let line = lines[random.below(lines.len() as u64) as usize];
        let length = best.order[line].len() as u64;
        let [from, to] = [(); 2].map(|()| random.below(length) as usize);
        let mut order = best.order.clone();
        let mut moved = order[line].remove(from);
        let across = random.below(3);
        match across {
            1 if moved.ahead < AHEAD_MAX => moved.ahead += 1,
            2 if moved.ahead > 0 => moved.ahead -= 1,
            _ if from == to => continue,
            _ => {}
        }
        order[line].insert(to, moved);
        scheduler.order(&order);
        if let Some(period) = period_of(&steps, &mut scheduler, &best.chosen)
            && period <= best.period
        {
            best = CommPlan { order, period, ..best };
        }
    }
    // Channels are cut into turns again, all at one time.
    let read = Unrolled::new(problem, executions, READ);
    let (_, spans) = StepScheduler::new(&read, Policy::Fixed(best.order)).spans(&best.chosen);
    let cut = in_window(problem, &spans, &plan.order).and_then(|order| {
        let period = period(&steps, &best.chosen, &order)?;
        Some(CommPlan { order, period, ..plan.clone() })
    });
    cut.filter(|cut| cut.period <= plan.period).unwrap_or(plan)
}

/// When two steps begin: with the first thing that they compute, or with anything.
fn begin(problem: &Problem, spans: &[ScheduledSpan]) -> [Nanos; 2] {
    let first = problem.nodes().iter().position(computes);
    [MIDDLE, MIDDLE + 1].map(|number| {
        let of = spans.iter().filter(|span| {
            span.step == number && first.is_none_or(|first| span.task as usize == first)
        });
        of.map(|span| span.start).min().unwrap_or_default()
    })
}

/// What a channel carries for one step, in its order.
fn in_step(spans: &[ScheduledSpan], channel: u32) -> Vec<Slot> {
    let of = spans.iter().filter(|span| span.step == MIDDLE && span.channel == Some(channel));
    of.filter_map(|span| Some(Slot { ahead: 0, task: span.task, motif: span.motif? })).collect()
}

/// What channels carry from the beginning of one step to that of the next, if that is as much as one
/// step has, each once.
///
/// All channels are cut at the same time. So what something waits for never stands in a later turn,
/// and ranks that keep to these orders do not wait for each other, however few steps they know of.
fn in_window(
    problem: &Problem,
    spans: &[ScheduledSpan],
    by_step: &[Vec<Slot>],
) -> Option<Vec<Vec<Slot>>> {
    let [from, until] = begin(problem, spans);
    let inside = spans.iter().filter(|span| (from..until).contains(&span.start));
    let inside: Vec<&ScheduledSpan> = inside.filter(|span| span.channel.is_some()).collect();
    let least = inside.iter().map(|span| span.step).min().unwrap_or_default();
    let names = |slots: &[Slot]| {
        let mut names: Vec<(u32, u32)> = slots.iter().map(|slot| (slot.task, slot.motif)).collect();
        names.sort_unstable();
        names
    };
    let of = |(channel, step): (u32, &Vec<Slot>)| {
        let of = inside.iter().filter(|span| span.channel == Some(channel));
        let slots = of.filter_map(|span| {
            Some(Slot { ahead: span.step - least, task: span.task, motif: span.motif? })
        });
        let slots: Vec<Slot> = slots.collect();
        (names(&slots) == names(step)).then_some(slots)
    };
    (0..).zip(by_step).map(of).collect()
}

/// What a step takes in this order once the first ones are over; none if they wait for each other.
fn period(steps: &Unrolled, chosen: &[u32], order: &[Vec<Slot>]) -> Option<Nanos> {
    let policy = Policy::Fixed(order.to_vec());
    period_of(steps, &mut StepScheduler::new(steps, policy), chosen)
}

fn period_of(steps: &Unrolled, scheduler: &mut StepScheduler<'_>, chosen: &[u32]) -> Option<Nanos> {
    let (_, spans) = scheduler.spans(chosen);
    // The last steps have less beside them, as nothing comes behind.
    let (from, until) = (TRIED / 4, TRIED - TRIED / 4);
    let mut ends = vec![[Nanos(0); 2]; steps.tasks()];
    for span in &spans {
        let ends = &mut ends[span.task as usize];
        for (end, step) in ends.iter_mut().zip([from, until]) {
            *end = if span.step == step { (*end).max(span.end) } else { *end };
        }
    }
    let took = ends.iter().map(|[from, until]| until.since(*from).0).max().unwrap_or_default();
    (spans.len() == steps.spans(chosen)).then(|| Nanos(took / u64::from(until - from)))
}
