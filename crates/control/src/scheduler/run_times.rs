//! Measured run times of programs.

use base::{ExecutableId, Nanos};
use rustc_hash::FxHashMap;

/// Number of latest measurements of a program that are kept.
const KEPT: usize = 7;

/// The latest quotients of measured and expected run time of a program.
///
/// Their median counts: a program's first run is cold, and single ones are distorted by the wake-up
/// latency of a host's thread or by other processes.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    factors: [f64; KEPT],
    count: usize,
}

impl Measured {
    /// Adds a measurement. Segments with an expected time of zero say nothing of the others.
    fn learn(&mut self, expected: Nanos, actual: Nanos) {
        if expected > Nanos(0) {
            self.factors[self.count % KEPT] = actual.0 as f64 / expected.0 as f64;
            self.count += 1;
        }
    }

    /// Returns the median; of an even number of measurements the lower one of both in the middle.
    fn factor(&self) -> f64 {
        let mut known = self.factors;
        let known = &mut known[..self.count.min(KEPT)];
        known.sort_unstable_by(f64::total_cmp);
        if known.is_empty() { 1.0 } else { known[(known.len() - 1) / 2] }
    }
}

/// Measured run times of all programs.
#[derive(Debug, Default)]
pub(super) struct RunTimes(FxHashMap<ExecutableId, Measured>);

impl RunTimes {
    /// Returns measured over expected run time of a program, if it was measured.
    pub fn factor(&self, executable: ExecutableId) -> Option<f64> {
        self.0.get(&executable).map(Measured::factor)
    }

    /// Adds a measurement of a program.
    pub fn learn(&mut self, executable: ExecutableId, expected: Nanos, actual: Nanos) {
        self.0.entry(executable).or_default().learn(expected, actual);
    }

    /// Forgets the measurements of a program.
    pub fn forget(&mut self, executable: ExecutableId) {
        self.0.remove(&executable);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cold_run_and_an_interrupted_one_do_not_count() {
        let mut times = RunTimes::default();
        assert_eq!(times.factor(ExecutableId(1)), None);
        for actual in [17_000_000, 1_000_000, 1_100_000, 40_000_000, 1_000_000] {
            times.learn(ExecutableId(1), Nanos(2_000_000), Nanos(actual));
        }
        assert_eq!(times.factor(ExecutableId(1)), Some(0.55));
    }

    #[test]
    fn a_program_follows_what_it_takes_now() {
        let mut times = RunTimes::default();
        for actual in std::iter::repeat_n(1_000_000, 20).chain(std::iter::repeat_n(3_000_000, 4)) {
            times.learn(ExecutableId(1), Nanos(1_000_000), Nanos(actual));
        }
        assert_eq!(times.factor(ExecutableId(1)), Some(3.0));
    }
}
