//! Looks for the ways to carry collectives out that together take least.
//!
//! From one choice to the next one collective is carried out in another way, at random, and the
//! change is kept if it is better, or sometimes if it is worse (Metropolis, Hastings). Several such
//! chains begin at the same choice. What is small is tried out whole.
//!
//! Source: SYNDICATE §4.3.1. Differs from the paper: limits are counts, so that the same seed finds
//! the same plan.

use base::{Nanos, Random};
use rayon::prelude::*;

use crate::schedule::{Policy, StepScheduler, Unrolled};

/// How much worse a change may be, as a part of all, to be kept with a chance of 1/e at first.
const WARMTH: f64 = 0.02;

/// When to stop, and what to draw from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SearchLimits {
    /// Most choices that a chain looks at.
    pub evaluations: u64,
    /// Chains.
    pub chains: u32,
    /// What decides all that is drawn.
    pub seed: u64,
}

impl Default for SearchLimits {
    fn default() -> Self {
        Self { evaluations: 20_000, chains: 4, seed: 0 }
    }
}

/// Why a search has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopReason {
    /// All choices have been tried.
    Exhausted,
    /// As many as were allowed.
    Evaluations,
    /// Nothing better was found in the second half of all that were tried, in any chain.
    Stale,
}

/// What was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The way of each task.
    pub chosen: Vec<u32>,
    /// What other chains found, the best first.
    pub others: Vec<Vec<u32>>,
    /// When all steps end.
    pub end: Nanos,
    /// Choices that were looked at.
    pub evaluations: u64,
    /// Why no more were.
    pub reason: StopReason,
}

/// The best choice that is found under a policy.
///
/// # Arguments
/// - `first`: the choice to begin with; what is found is no worse.
/// - `ways`: of each task, those that may be chosen; of one with none, the first choice stays.
pub fn search(
    steps: &Unrolled,
    policy: &Policy,
    first: &[u32],
    ways: &[Vec<u32>],
    limits: &SearchLimits,
) -> Found {
    let open: Open = (0..steps.tasks())
        .filter(|&task| ways[task].len() > 1)
        .map(|task| (task, ways[task].as_slice()))
        .collect();
    let all = open.iter().try_fold(1_u64, |all, (_, ways)| all.checked_mul(ways.len() as u64));
    if let Some(all) = all.filter(|&all| all <= limits.evaluations) {
        return exhaust(steps, policy, first, &open, all);
    }
    let chains = (0..limits.chains.max(1)).into_par_iter().map(|chain| {
        let random = Random::of(&[limits.seed, u64::from(chain)]);
        chain_from(steps, policy, first, &open, limits.evaluations, random)
    });
    let mut chains: Vec<Found> = chains.collect();
    chains.sort_by_key(|found| found.end);
    let is_stale = chains.iter().all(|found| found.reason == StopReason::Stale);
    let evaluations = chains.iter().map(|found| found.evaluations).sum();
    let reason = if is_stale { StopReason::Stale } else { StopReason::Evaluations };
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

/// Tasks with several ways, and these.
type Open<'a> = Vec<(usize, &'a [u32])>;

/// Tries all.
fn exhaust(steps: &Unrolled, policy: &Policy, first: &[u32], open: &Open, all: u64) -> Found {
    let mut scheduler = StepScheduler::new(steps, policy.clone());
    let mut chosen = first.to_vec();
    let mut best = (scheduler.end(&chosen), chosen.clone());
    for number in 0..all {
        let mut rest = number;
        for &(task, ways) in open {
            chosen[task] = ways[(rest % ways.len() as u64) as usize];
            rest /= ways.len() as u64;
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
            reason = StopReason::Stale;
            break;
        }
        let (task, ways) = open[random.below(open.len() as u64) as usize];
        let was = chosen[task];
        chosen[task] = ways[random.below(ways.len() as u64) as usize];
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
