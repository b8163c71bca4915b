//! What plans are compared with: systems that choose less.
//!
//! All have the same oracle for segments: how finely each collective is cut is searched for whoever
//! plans, so that no gain comes of that alone.
//!
//! Source: SYNDICATE §6.4. Differs from the paper: its sched-only and exec-only get that oracle too.

use base::Random;
use rayon::prelude::*;

use crate::options::{Execution, Place};
use crate::order::{CommPlan, improve};
use crate::problem::Problem;
use crate::schedule::{Policy, StepScheduler, Unrolled};
use crate::search::{SearchLimits, StopReason, search};

/// Of so many choices that are looked at, one change of an order is.
const CHANGES: u64 = 8;
/// How many steps are planned as one.
const STEPS: u32 = 2;

/// A plan that takes less by no more than this part of a step is not preferred to one that was found with
/// less: it leans on more of what was measured, which errs by about as much.
const WORTH: f64 = 0.015;

/// Who plans a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum System {
    /// As it is asked for, one collective after another, each as is best for it alone.
    Fifo,
    /// What was asked for last first (BS+).
    Lifo,
    /// In an order written by hand (HO).
    Hand,
    /// In another, in which data for the next step are fetched ahead.
    HandPrefetch,
    /// As it is asked for, in ways that are searched for (S-Exec).
    Executions,
    /// In an order that is searched for, in the ways that are best alone (S-Sched).
    Order,
    /// Order and ways together, each collective by one channel.
    Joint,
    /// The same, and collectives may be striped over all channels.
    Striped,
}

/// What a system makes of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Planned {
    /// Who planned.
    pub system: System,
    /// What it is.
    pub plan: CommPlan,
    /// Choices that were looked at.
    pub evaluations: u64,
    /// Why no more were.
    pub reason: StopReason,
}

/// Orders that somebody wrote down, as [`Policy::Hand`] takes them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HandOrders {
    /// Without fetching ahead.
    pub plain: Option<Vec<i32>>,
    /// With it.
    pub prefetch: Option<Vec<i32>>,
}

/// Lets all systems plan a step; joint plans take no longer than any before them.
///
/// # Arguments
/// - `executions`: of each task, its ways, the one first that is best alone; none if it computes.
pub fn compare(
    problem: &Problem,
    executions: &[Vec<Execution>],
    hand: &HandOrders,
    limits: &SearchLimits,
) -> Vec<Planned> {
    let steps = Unrolled::new(problem, executions, STEPS);
    let allowed = |may: &dyn Fn(&Execution, &Execution) -> bool| -> Vec<Vec<u32>> {
        let of = |ways: &Vec<Execution>| {
            let those = (0..).zip(ways).filter(|(_, way)| may(way, &ways[0]));
            those.map(|(number, _)| number).collect()
        };
        executions.iter().map(of).collect()
    };
    let cuts = allowed(&|way, best| way.is_like(best));
    let single = allowed(&|way, _| way.place != Place::All);
    let all = allowed(&|_, _| true);
    let greedy = vec![0; problem.nodes().len()];
    let mut planned: Vec<Planned> = Vec::new();
    let plan_from = |system, policy: &Policy, first: &[u32], ways: &[Vec<u32>]| {
        let found = search(&steps, policy, first, ways, limits);
        let mut candidates = found.others;
        candidates.insert(0, found.chosen);
        let plans = candidates.par_iter().enumerate().map(|(number, chosen)| {
            let plan = CommPlan::of(problem, executions, chosen, policy);
            if *policy != Policy::CriticalPath {
                return plan;
            }
            // Orders that no critical path says may take less.
            let mut random = Random::of(&[limits.seed, number as u64]);
            improve(plan, problem, executions, limits.evaluations / CHANGES, &mut random)
        });
        let plans: Vec<CommPlan> = plans.collect();
        let plan = plans.into_iter().min_by_key(|plan| plan.period).expect("there is one");
        Planned { system, plan, evaluations: found.evaluations, reason: found.reason }
    };
    let mut plan = |system, policy: Policy, ways: &[Vec<u32>]| {
        planned.push(plan_from(system, &policy, &greedy, ways));
    };
    plan(System::Fifo, Policy::Fifo, &cuts);
    plan(System::Lifo, Policy::Lifo, &cuts);
    if let Some(order) = &hand.plain {
        plan(System::Hand, Policy::Hand(order.clone()), &cuts);
    }
    if let Some(order) = &hand.prefetch {
        plan(System::HandPrefetch, Policy::Hand(order.clone()), &cuts);
    }
    plan(System::Executions, Policy::Fifo, &single);
    plan(System::Order, Policy::CriticalPath, &cuts);
    // Orders of those before, whose ways are among its own, are orders that it may find.
    let like = planned.iter().filter(|other| other.system != System::Executions);
    let best = like.min_by_key(|other| other.plan.period).map(|other| other.plan.clone());
    if let (Some(best), Some(last)) = (best, planned.last_mut()) {
        last.plan = best;
    }
    for (system, ways) in [(System::Joint, &single), (System::Striped, &all)] {
        // What others chose is among what may be chosen, and so is their order.
        let mut scheduler = StepScheduler::new(&steps, Policy::CriticalPath);
        let first = planned.iter().min_by_key(|other| scheduler.end(&other.plan.chosen));
        let first = first.expect("others have planned").plan.chosen.clone();
        let mut joint = plan_from(system, &Policy::CriticalPath, &first, ways);
        let best = planned.iter().min_by_key(|other| other.plan.period);
        let best = best.expect("others have planned");
        if best.plan.period.0 as f64 * (1.0 - WORTH) <= joint.plan.period.0 as f64 {
            joint.plan = best.plan.clone();
        }
        planned.push(joint);
    }
    planned
}
