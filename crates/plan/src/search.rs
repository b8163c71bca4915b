//! Searches for the execution options of collectives that minimize the makespan together.
//!
//! Each proposal changes the option of one random collective; it is accepted if it is better, or
//! sometimes if it is worse (Metropolis–Hastings with simulated annealing). Several chains start from
//! the same choice. Small search spaces are enumerated.
//!
//! Source: SYNDICATE §4.3.1. Differs from the paper: limits are counts, so that the same seed finds the
//! same plan.

use base::{Nanos, Random};
use rayon::prelude::*;

use crate::schedule::{Policy, StepScheduler, Unrolled};

/// Initial temperature: the slowdown, as a fraction of the best makespan, that is accepted with
/// probability 1/e.
const WARMTH: f64 = 0.02;

/// When to stop, and the random seed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SearchLimits {
    /// Most evaluations of a chain.
    pub evaluations: u64,
    /// Number of chains.
    pub chains: u32,
    /// Seed of all random choices.
    pub seed: u64,
}

impl Default for SearchLimits {
    fn default() -> Self {
        Self { evaluations: 20_000, chains: 4, seed: 0 }
    }
}

/// Why a search stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopReason {
    /// All choices have been evaluated.
    Exhausted,
    /// The limit of evaluations was reached.
    Evaluations,
    /// In every chain the second half of the evaluations found nothing better.
    Converged,
}

/// Result of a search.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Chosen option of each task, by index.
    pub chosen: Vec<u32>,
    /// Distinct results of the other chains, the best first.
    pub others: Vec<Vec<u32>>,
    /// When all steps end (makespan).
    pub end: Nanos,
    /// Choices that were evaluated.
    pub evaluations: u64,
    /// Why the search stopped.
    pub reason: StopReason,
}

/// Returns the best choice of options found under a policy.
///
/// # Arguments
/// - `first`: the initial choice; the result is no worse.
/// - `options`: of each task, the options that may be chosen; a task with fewer than two keeps its first
///   choice.
pub fn search(
    steps: &Unrolled,
    policy: &Policy,
    first: &[u32],
    options: &[Vec<u32>],
    limits: &SearchLimits,
) -> Found {
    let open: Open = (0..steps.tasks())
        .filter(|&task| options[task].len() > 1)
        .map(|task| (task, options[task].as_slice()))
        .collect();
    let all =
        open.iter().try_fold(1_u64, |all, (_, options)| all.checked_mul(options.len() as u64));
    if let Some(all) = all.filter(|&all| all <= limits.evaluations) {
        return exhaust(steps, policy, first, &open, all);
    }
    let chains = (0..limits.chains.max(1)).into_par_iter().map(|chain| {
        let random = Random::of(&[limits.seed, u64::from(chain)]);
        chain_from(steps, policy, first, &open, limits.evaluations, random)
    });
    let mut chains: Vec<Found> = chains.collect();
    chains.sort_by_key(|found| found.end);
    let has_converged = chains.iter().all(|found| found.reason == StopReason::Converged);
    let evaluations = chains.iter().map(|found| found.evaluations).sum();
    let reason = if has_converged { StopReason::Converged } else { StopReason::Evaluations };
    let mut chains = chains.into_iter();
    let best = chains.next().expect("there is a chain");
    let mut others: Vec<Vec<u32>> = Vec::new();
    for found in chains {
        if found.chosen != best.chosen && !others.contains(&found.chosen) {
            others.push(found.chosen);
        }
    }
    Found { evaluations, reason, others, ..best }
}

/// Tasks with several options, and these.
type Open<'a> = Vec<(usize, &'a [u32])>;

/// Evaluates all choices.
fn exhaust(steps: &Unrolled, policy: &Policy, first: &[u32], open: &Open, all: u64) -> Found {
    let mut scheduler = StepScheduler::new(steps, policy.clone());
    let mut chosen = first.to_vec();
    let mut best = (scheduler.end(&chosen), chosen.clone());
    for number in 0..all {
        let mut rest = number;
        for &(task, options) in open {
            chosen[task] = options[(rest % options.len() as u64) as usize];
            rest /= options.len() as u64;
        }
        let end = scheduler.end(&chosen);
        if end < best.0 {
            best = (end, chosen.clone());
        }
    }
    let (end, chosen) = best;
    Found { chosen, others: Vec::new(), end, evaluations: all + 1, reason: StopReason::Exhausted }
}

fn chain_from(
    steps: &Unrolled,
    policy: &Policy,
    first: &[u32],
    open: &Open,
    most: u64,
    mut random: Random,
) -> Found {
    let mut scheduler = StepScheduler::new(steps, policy.clone());
    let mut chosen = first.to_vec();
    let mut end = scheduler.end(&chosen);
    let mut best = (end, chosen.clone());
    let (mut tried, mut found_at) = (1, 1);
    let mut reason = StopReason::Evaluations;
    while tried < most {
        if tried > most / 4 && found_at < tried / 2 {
            reason = StopReason::Converged;
            break;
        }
        let (task, options) = open[random.below(open.len() as u64) as usize];
        let was = chosen[task];
        chosen[task] = options[random.below(options.len() as u64) as usize];
        if chosen[task] == was {
            tried += 1;
            continue;
        }
        let changed = scheduler.end(&chosen);
        tried += 1;
        let worse = (changed.0 as f64 - end.0 as f64) / best.0.0.max(1) as f64;
        let warmth = WARMTH * (1.0 - tried as f64 / most as f64);
        if worse <= 0.0 || random.fraction() < (-worse / warmth).exp() {
            end = changed;
        } else {
            chosen[task] = was;
        }
        if end < best.0 {
            best = (end, chosen.clone());
            found_at = tried;
        }
    }
    let (end, chosen) = best;
    Found { chosen, others: Vec::new(), end, evaluations: tried, reason }
}
