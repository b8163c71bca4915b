//! Measured run times of programs.

use base::{ExecutableId, Nanos};
use rustc_hash::FxHashMap;

/// Gain of the moving average that follows measured run times.
const ESTIMATE_GAIN: f64 = 0.25;

/// Moving averages of expected and measured run time. Their quotient is the factor by which a
/// program runs longer than expected; segments with an expected time of zero leave it unchanged.
#[derive(Debug, Clone, Copy)]
struct Measured {
    expected: f64,
    actual: f64,
}

impl Measured {
    /// A single measurement is distorted by the wake-up latency of a host's thread, so it is
    /// averaged.
    fn learn(&mut self, found: Measured) {
        self.expected += ESTIMATE_GAIN * (found.expected - self.expected);
        self.actual += ESTIMATE_GAIN * (found.actual - self.actual);
    }
}

/// Measured run times of all programs.
#[derive(Debug, Default)]
pub(super) struct RunTimes(FxHashMap<ExecutableId, Measured>);

impl RunTimes {
    /// Returns measured over expected run time of a program, if it was measured.
    pub fn factor(&self, executable: ExecutableId) -> Option<f64> {
        let Measured { expected, actual } = self.0.get(&executable)?;
        Some(actual / expected.max(1.0))
    }

    /// Adds a measurement of a program.
    pub fn learn(&mut self, executable: ExecutableId, expected: Nanos, actual: Nanos) {
        let found = Measured { expected: expected.0 as f64, actual: actual.0 as f64 };
        self.0.entry(executable).or_insert(found).learn(found);
    }

    /// Forgets the measurements of a program.
    pub fn forget(&mut self, executable: ExecutableId) {
        self.0.remove(&executable);
    }
}
