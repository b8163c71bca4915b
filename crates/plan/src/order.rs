//! One order for each channel, the same in every step: what hosts can keep without asking anybody.
//!
//! Source: SYNDICATE §4.4 (sequence numbers of motifs). Differs from the paper: each channel has an
//! order of its own, and a motif may stand in the order of the step before its own, so that what is
//! fetched ahead needs no rule of its own.

use base::Nanos;
use serde::{Deserialize, Serialize};

use crate::options::Execution;
use crate::schedule::{Policy, Scheduler, Span, Unrolled};
use crate::step::{Step, Work};

/// Steps from which an order is read: the first ones have nothing before them, and the last ones
/// nothing after.
const READ: u32 = 8;
/// The step whose time the order is read from.
const MIDDLE: u32 = 4;
/// Steps that an order is tried on.
const TRIED: u32 = 16;

/// A motif in the order of a channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// How many steps ahead of the others: 0, or more for what is fetched ahead.
    pub ahead: u32,
    /// Of which task.
    pub task: u32,
    /// Which motif of its execution.
    pub motif: u32,
}

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
    pub fn of(step: &Step, executions: &[Vec<Execution>], chosen: &[u32], policy: &Policy) -> Self {
        let steps = Unrolled::new(step, executions, READ);
        let (_, spans) = Scheduler::new(&steps, policy.clone()).spans(chosen);
        let count = spans.iter().filter_map(|span| span.channel).max().map_or(0, |last| last + 1);
        let began = begin(step, &spans);
        let by_step: Vec<Vec<Slot>> = (0..count).map(|channel| in_step(&spans, channel)).collect();
        let window: Option<Vec<Vec<Slot>>> = (0..count)
            .map(|channel| in_window(&spans, channel, began, &by_step[channel as usize]))
            .collect();
        let tried = Unrolled::new(step, executions, TRIED);
        let plans = [window, Some(by_step)].into_iter().flatten();
        let timed = plans.filter_map(|order| {
            let period = period(&tried, chosen, &order)?;
            Some(Self { chosen: chosen.to_vec(), order, period })
        });
        timed.min_by_key(|plan| plan.period).expect("the order of a schedule can be kept")
    }
}

/// When two steps begin: with the first thing that they compute, or with anything.
fn begin(step: &Step, spans: &[Span]) -> [Nanos; 2] {
    let first = step.tasks().iter().position(|task| matches!(task.work, Work::Compute(_)));
    [MIDDLE, MIDDLE + 1].map(|number| {
        let of = spans.iter().filter(|span| {
            span.step == number && first.is_none_or(|first| span.task as usize == first)
        });
        of.map(|span| span.start).min().unwrap_or_default()
    })
}

/// What a channel carries for one step, in its order.
fn in_step(spans: &[Span], channel: u32) -> Vec<Slot> {
    let of = spans.iter().filter(|span| span.step == MIDDLE && span.channel == Some(channel));
    of.filter_map(|span| Some(Slot { ahead: 0, task: span.task, motif: span.motif? })).collect()
}

/// What it carries from the beginning of one step to that of the next, if that is as much as one step
/// has, each once.
fn in_window(
    spans: &[Span],
    channel: u32,
    [from, until]: [Nanos; 2],
    step: &[Slot],
) -> Option<Vec<Slot>> {
    let of = spans.iter().filter(|span| span.channel == Some(channel));
    let of: Vec<&Span> = of.filter(|span| (from..until).contains(&span.start)).collect();
    let least = of.iter().map(|span| span.step).min().unwrap_or_default();
    let slots = of.iter().filter_map(|span| {
        Some(Slot { ahead: span.step - least, task: span.task, motif: span.motif? })
    });
    let slots: Vec<Slot> = slots.collect();
    let names = |slots: &[Slot]| {
        let mut names: Vec<(u32, u32)> = slots.iter().map(|slot| (slot.task, slot.motif)).collect();
        names.sort_unstable();
        names
    };
    (names(&slots) == names(step)).then_some(slots)
}

/// What a step takes in this order once the first ones are over; none if they wait for each other.
fn period(steps: &Unrolled, chosen: &[u32], order: &[Vec<Slot>]) -> Option<Nanos> {
    let policy = Policy::Fixed(order.to_vec());
    let (_, spans) = Scheduler::new(steps, policy).spans(chosen);
    let end = |step: u32| {
        spans.iter().filter(|span| span.step <= step).map(|span| span.end).max().unwrap_or_default()
    };
    let expected = steps.spans(chosen);
    (spans.len() == expected).then(|| {
        let (half, last) = (end(TRIED / 2 - 1), end(TRIED - 1));
        Nanos(last.since(half).0 / u64::from(TRIED / 2))
    })
}
