//! Lower bound on the period of a step under any plan.
//!
//! The channels are relaxed to one that is as fast as all of them together, and every collective takes
//! the option that uses it least. The work between the end of a task and the beginning of another in
//! the next step takes at least as long as its communication, and as its longest chain (critical path);
//! the chain from the latter task to the former within a step is added.

use base::{BitsPerSecond, Nanos};
use ir::StepOp;

use crate::options::Execution;
use crate::problem::{Problem, computes};
use crate::schedule::Unrolled;

/// Returns the least steady-state time of a step, if collectives use one of these options. O(tasks² ·
/// dependencies).
///
/// # Arguments
/// - `executions`: of each task, its options; empty if it computes.
/// - `rates`: of each channel.
pub fn least_period(
    problem: &Problem,
    executions: &[Vec<Execution>],
    rates: &[BitsPerSecond],
) -> Nanos {
    let graph = Graph::new(problem, executions, rates);
    let tasks = problem.nodes().len();
    let of_all = |graph: &Graph, computes: bool| -> f64 {
        (0..tasks)
            .filter(|&task| graph.computes[task] == computes)
            .map(|task| graph.times[task])
            .sum()
    };
    let mut least = of_all(&graph, true).max(of_all(&graph, false));
    for from in 0..tasks {
        // Chains from the beginning of `from` to the end of each task of the same step.
        for (to, within) in graph.chains(from).into_iter().enumerate() {
            // Work between the end of `to` and the beginning of `from` in the next step.
            if let Some(within) = within
                && let Some(between) = graph.between(to, from)
            {
                least = least.max(within + between);
            }
        }
    }
    Nanos(least as u64)
}

/// Two unrolled steps: nodes of the second follow those of the first.
struct Graph {
    times: Vec<f64>,
    computes: Vec<bool>,
    steps: Unrolled,
}

impl Graph {
    fn new(problem: &Problem, executions: &[Vec<Execution>], rates: &[BitsPerSecond]) -> Self {
        let tasks = problem.nodes();
        let all: f64 = rates.iter().map(|rate| rate.0).sum();
        let moved = |option: &Execution| -> f64 {
            let of = option.motifs.iter();
            of.map(|one| one.time.0 as f64 * rates[one.channel as usize].0).sum::<f64>() / all
        };
        let times = tasks.iter().zip(executions).map(|(task, options)| match task.op {
            StepOp::Compute { time, .. } => time.0 as f64,
            _ => options.iter().map(moved).reduce(f64::min).unwrap_or(0.0),
        });
        let steps = Unrolled::new(problem, executions, 2);
        let computes = tasks.iter().map(computes).collect();
        Self { times: times.collect(), computes, steps }
    }

    fn time(&self, node: usize) -> f64 {
        self.times[node % self.times.len()]
    }

    /// The longest chain from the beginning of a task to the end of each task of the same step.
    fn chains(&self, from: usize) -> Vec<Option<f64>> {
        let mut ends: Vec<Option<f64>> = vec![None; self.steps.nodes()];
        ends[from] = Some(self.time(from));
        for node in from..self.steps.nodes() {
            let Some(end) = ends[node] else { continue };
            for next in self.steps.next(node) {
                let through = end + self.time(next);
                ends[next] = Some(ends[next].map_or(through, |known| known.max(through)));
            }
        }
        ends.truncate(self.times.len());
        ends
    }

    /// Lower bound on the time between the end of one task and the beginning of another in the next
    /// step; none if the latter does not depend on the former.
    fn between(&self, end: usize, begin: usize) -> Option<f64> {
        let begin = begin + self.times.len();
        let mut longest: Vec<Option<f64>> = vec![None; self.steps.nodes()];
        longest[end] = Some(0.0);
        for node in end..begin {
            let Some(chain) = longest[node] else { continue };
            for next in self.steps.next(node).filter(|&next| next <= begin) {
                let time = if next == begin { 0.0 } else { self.time(next) };
                longest[next] =
                    Some(longest[next].map_or(chain + time, |known| known.max(chain + time)));
            }
        }
        let chain = longest[begin]?;
        let mut leads = vec![false; self.steps.nodes()];
        leads[begin] = true;
        for node in (end..begin).rev() {
            leads[node] = self.steps.next(node).any(|next| leads[next]);
        }
        let tasks = self.times.len();
        let inside = (end + 1..begin).filter(|&node| leads[node] && longest[node].is_some());
        let moved: f64 =
            inside.filter(|node| !self.computes[node % tasks]).map(|n| self.time(n)).sum();
        Some(chain.max(moved))
    }
}
