//! The search for a plan of an MPMD step.

use base::{Nanos, Random};
use ir::StepOp;

use crate::devices::problem::{CommStrategy, DeviceProblem, QueuePolicy};
use crate::devices::run::DeviceRun;
use crate::options::fastest_algorithm;
use crate::search::{SearchLimits, StopReason};

/// A plan of a step, and its predicted makespan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DevicePlan {
    /// Number of channels.
    pub channels: u32,
    /// Strategy of each kind of communication.
    pub strategies: Vec<CommStrategy>,
    /// Algorithm of each kind that is a collective: the name of an [`Execution`](crate::Execution)'s form.
    pub algorithms: Vec<Option<String>>,
    /// The pieces of all communication of one step, as nodes and numbers, in the order in which queues
    /// issue them.
    pub order: Vec<(u32, u32)>,
    /// When all steps are done (makespan).
    pub end: Nanos,
    /// Number of plans that were evaluated.
    pub evaluations: u64,
    /// Why the search stopped.
    pub reason: StopReason,
}

impl DeviceProblem {
    /// Greedy strategies: each kind whole, on the channel of the highest rate.
    pub fn greedy(&self) -> Vec<CommStrategy> {
        let rate = |channel: &usize| self.channels[*channel].port().rate.0;
        let fastest = (0..self.channels.len()).max_by(|a, b| rate(a).total_cmp(&rate(b)));
        let channel = fastest.map(|channel| channel as u32);
        vec![CommStrategy { pieces: 1, channel }; self.kinds()]
    }

    /// Simulates all steps under these strategies; returns when they are done (makespan). O(pieces ·
    /// devices · (devices + log pieces)).
    pub fn end(&self, strategies: &[CommStrategy], policy: QueuePolicy) -> Nanos {
        DeviceRun::new(self, strategies, policy).end()
    }

    /// Searches for strategies that minimize the makespan, by hill climbing in one chain; the result is
    /// no worse than the greedy strategies. `limits.chains` is ignored.
    pub fn search(&self, policy: QueuePolicy, limits: &SearchLimits) -> DevicePlan {
        let most = self.channels.len() as u32;
        let mut options: Vec<CommStrategy> = Vec::new();
        for pieces in [1, 2, 4, 8, 16] {
            options
                .extend((0..most).map(|channel| CommStrategy { pieces, channel: Some(channel) }));
            if most > 1 && pieces > 1 {
                options.push(CommStrategy { pieces, channel: None });
            }
        }
        let mut random = Random::of(&[limits.seed]);
        let mut best = self.greedy();
        let mut end = self.end(&best, policy);
        let (mut tried, mut found_at) = (1, 1);
        let mut reason = StopReason::Evaluations;
        while tried < limits.evaluations && self.kinds() > 0 {
            if tried > limits.evaluations / 4 && found_at < tried / 2 {
                reason = StopReason::Converged;
                break;
            }
            let mut strategies = best.clone();
            let kind = random.below(self.kinds() as u64) as usize;
            strategies[kind] = options[random.below(options.len() as u64) as usize];
            tried += 1;
            let changed = self.end(&strategies, policy);
            if changed < end {
                (best, end, found_at) = (strategies, changed, tried);
            }
        }
        let algorithms = self.algorithms(&best);
        let order = DeviceRun::new(self, &best, policy).order(self.steps / 2);
        DevicePlan {
            channels: most,
            strategies: best,
            algorithms,
            order,
            end,
            evaluations: tried,
            reason,
        }
    }

    /// The algorithm of each kind that is a collective: the one whose piece is fastest alone.
    fn algorithms(&self, strategies: &[CommStrategy]) -> Vec<Option<String>> {
        let of = |(&node, strategy): (&u32, &CommStrategy)| {
            let StepOp::Collective(op) = self.step.op(node) else { return None };
            let network = &*self.channels[strategy.channel.unwrap_or(0) as usize];
            Some(fastest_algorithm(&op.split(strategy.pieces)[0], network).form)
        };
        self.examples.iter().zip(strategies).map(of).collect()
    }
}
