//! Baseline planners, which choose less, beside the joint ones.
//!
//! All share one oracle for segments: the number of segments of each collective is searched for in
//! every system, so that no gain is due to segmentation alone.
//!
//! Source: SYNDICATE §6.4. Differs from the paper: its sched-only and exec-only get that oracle too.

use base::Random;
use rayon::prelude::*;

use crate::options::{Execution, Place};
use crate::order::{CommPlan, improve};
use crate::problem::Problem;
use crate::schedule::{Policy, StepScheduler, Unrolled};
use crate::search::{SearchLimits, StopReason, search};

/// Evaluations per change of an order: orders get an eighth of the evaluations.
const CHANGES: u64 = 8;
/// Number of steps that are unrolled and planned as one.
const STEPS: u32 = 2;

/// Least relative gain for which a joint plan is preferred to that of a simpler system: it relies on
/// more of the measurements, whose error is about as large.
const WORTH: f64 = 0.015;

/// A planner of steps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum System {
    /// Collectives in program order, each with the option that is best alone.
    Fifo,
    /// The last issued first (BS+).
    Lifo,
    /// In an order written by hand (HO).
    Hand,
    /// In a hand-written order that prefetches data for the next step.
    HandPrefetch,
    /// In program order, with options that are searched for (S-Exec).
    Executions,
    /// In an order that is searched for, with the options that are best alone (S-Sched).
    Order,
    /// Order and options together, each collective on one channel.
    Joint,
    /// The same, and collectives may be striped over all channels.
    Striped,
}

/// A system's plan of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Planned {
    /// The planner.
    pub system: System,
    /// The plan.
    pub plan: CommPlan,
    /// Choices that were evaluated.
    pub evaluations: u64,
    /// Why the search stopped.
    pub reason: StopReason,
}

/// Hand-written orders, as [`Policy::Hand`] takes them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HandOrders {
    /// Without prefetching.
    pub plain: Option<Vec<i32>>,
    /// With prefetching.
    pub prefetch: Option<Vec<i32>>,
}

/// Plans a step by all systems; joint plans take no longer than any before them.
///
/// # Arguments
/// - `executions`: of each task, its options, the fastest alone first; empty if it computes.
pub fn compare(
    problem: &Problem,
    executions: &[Vec<Execution>],
    hand: &HandOrders,
    limits: &SearchLimits,
) -> Vec<Planned> {
    let planner =
        Planner { problem, executions, steps: Unrolled::new(problem, executions, STEPS), limits };
    let cuts = planner.allowed(|option, best| option.is_like(best));
    let single = planner.allowed(|option, _| option.place != Place::All);
    let all = planner.allowed(|_, _| true);
    let greedy = vec![0; problem.nodes().len()];
    let mut planned: Vec<Planned> = Vec::new();
    let mut plan = |system, policy: Policy, options: &[Vec<u32>]| {
        planned.push(planner.plan(system, &policy, &greedy, options));
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
    // Orders of earlier systems with the same options are in its search space.
    let like = planned.iter().filter(|other| other.system != System::Executions);
    let best = like.min_by_key(|other| other.plan.period).map(|other| other.plan.clone());
    if let (Some(best), Some(last)) = (best, planned.last_mut()) {
        last.plan = best;
    }
    for (system, options) in [(System::Joint, &single), (System::Striped, &all)] {
        planned.push(planner.joint(system, options, &planned));
    }
    planned
}

/// A step, with what plans of all systems have in common.
struct Planner<'a> {
    problem: &'a Problem,
    executions: &'a [Vec<Execution>],
    steps: Unrolled,
    limits: &'a SearchLimits,
}

impl Planner<'_> {
    /// Returns the options of each task that may be chosen, given the option and the task's fastest.
    fn allowed(&self, may: impl Fn(&Execution, &Execution) -> bool) -> Vec<Vec<u32>> {
        let of = |options: &Vec<Execution>| {
            let those = (0..).zip(options).filter(|(_, option)| may(option, &options[0]));
            those.map(|(number, _)| number).collect()
        };
        self.executions.iter().map(of).collect()
    }

    /// Plans with options that are searched for, from the options `first` on.
    fn plan(
        &self,
        system: System,
        policy: &Policy,
        first: &[u32],
        options: &[Vec<u32>],
    ) -> Planned {
        let found = search(&self.steps, policy, first, options, self.limits);
        let mut candidates = found.others;
        candidates.insert(0, found.chosen);
        let plans = candidates.par_iter().enumerate().map(|(number, chosen)| {
            let plan = CommPlan::of(self.problem, self.executions, chosen, policy);
            if *policy != Policy::CriticalPath {
                return plan;
            }
            // Orders other than by critical path may take less.
            let mut random = Random::of(&[self.limits.seed, number as u64]);
            let budget = self.limits.evaluations / CHANGES;
            improve(plan, self.problem, self.executions, budget, &mut random)
        });
        let plans: Vec<CommPlan> = plans.collect();
        let plan = plans.into_iter().min_by_key(|plan| plan.period).expect("there is one");
        Planned { system, plan, evaluations: found.evaluations, reason: found.reason }
    }

    /// Plans order and options together; choices and orders of the earlier systems are in its search
    /// space.
    fn joint(&self, system: System, options: &[Vec<u32>], earlier: &[Planned]) -> Planned {
        let mut scheduler = StepScheduler::new(&self.steps, Policy::CriticalPath);
        let first = earlier.iter().min_by_key(|other| scheduler.end(&other.plan.chosen));
        let first = first.expect("others have planned").plan.chosen.clone();
        let mut joint = self.plan(system, &Policy::CriticalPath, &first, options);
        let best = earlier.iter().min_by_key(|other| other.plan.period);
        let best = best.expect("others have planned");
        if best.plan.period.0 as f64 * (1.0 - WORTH) <= joint.plan.period.0 as f64 {
            joint.plan = best.plan.clone();
        }
        joint
    }
}
