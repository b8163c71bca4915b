//! A fixed order for each channel, the same in every step, so that hosts need no coordination at run
//! time.
//!
//! Source: SYNDICATE §4.4 (sequence numbers of motifs). Differs from the paper: each channel has an
//! order of its own, and a motif may be in the order of the step before its own, so that prefetching
//! needs no separate rule.

use base::{Nanos, Random};

use crate::options::Execution;
use crate::problem::{Problem, computes};
use crate::schedule::{Policy, ScheduledSpan, Slot, StepScheduler, Unrolled};

/// Unrolled steps from which an order is read: the first ones fill the pipeline, and the last ones
/// drain it.
const READ: u32 = 8;
/// The steady-state step from which the order is read.
const MIDDLE: u32 = 4;
/// Most steps ahead to which [`improve`] shifts a slot.
const AHEAD_MAX: u32 = 2;
/// Unrolled steps on which an order is timed.
const TRIED: u32 = 16;

/// The execution option of each collective, and the order of motifs on each channel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommPlan {
    /// Option of each task, by index; any number for tasks that compute.
    pub chosen: Vec<u32>,
    /// By channel, the motifs that it issues in every step.
    pub order: Vec<Vec<Slot>>,
    /// Time of a step in steady state.
    pub period: Nanos,
}

impl CommPlan {
    /// The order in which a policy issues motifs, in a form that can be kept in every step.
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

/// Local search over orders: tries `changes` random changes, and keeps those that do not lengthen a
/// step.
///
/// Each change moves a slot to a random position in the order of its channel, and may shift it by one
/// step.
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
    // Cut all channels into turns again, at one common time.
    let read = Unrolled::new(problem, executions, READ);
    let (_, spans) = StepScheduler::new(&read, Policy::Fixed(best.order)).spans(&best.chosen);
    let cut = in_window(problem, &spans, &plan.order).and_then(|order| {
        let period = period(&steps, &best.chosen, &order)?;
        Some(CommPlan { order, period, ..plan.clone() })
    });
    cut.filter(|cut| cut.period <= plan.period).unwrap_or(plan)
}

/// When two successive steps begin: with the first node that computes, or, without one, with any node.
fn begin(problem: &Problem, spans: &[ScheduledSpan]) -> [Nanos; 2] {
    let first = problem.nodes().iter().position(computes);
    [MIDDLE, MIDDLE + 1].map(|number| {
        let of = spans.iter().filter(|span| {
            span.step == number && first.is_none_or(|first| span.task as usize == first)
        });
        of.map(|span| span.start).min().unwrap_or_default()
    })
}

/// The motifs that a channel carries for one step, in order.
fn in_step(spans: &[ScheduledSpan], channel: u32) -> Vec<Slot> {
    let of = spans.iter().filter(|span| span.step == MIDDLE && span.channel == Some(channel));
    of.filter_map(|span| Some(Slot { ahead: 0, task: span.task, motif: span.motif? })).collect()
}

/// The motifs that channels carry from the beginning of one step to that of the next, if these are the
/// motifs of one step, each once.
///
/// All channels are cut at the same time. So a dependency is never in a later turn, and ranks that keep
/// to these orders cannot deadlock, however few steps they know of.
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

/// The steady-state time of a step in this order; none if the order deadlocks.
fn period(steps: &Unrolled, chosen: &[u32], order: &[Vec<Slot>]) -> Option<Nanos> {
    let policy = Policy::Fixed(order.to_vec());
    period_of(steps, &mut StepScheduler::new(steps, policy), chosen)
}

fn period_of(steps: &Unrolled, scheduler: &mut StepScheduler<'_>, chosen: &[u32]) -> Option<Nanos> {
    let (_, spans) = scheduler.spans(chosen);
    // Exclude the last steps: nothing follows, so they overlap with less.
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
