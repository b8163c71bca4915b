//! Python bindings of fault simulation.

use pyo3::prelude::*;
use rayon::prelude::*;
use sim::faults::{FaultCounts, FaultRun, run};

/// The result of runs with faults.
#[pyclass(frozen, module = "fairway._native")]
pub(crate) struct FaultReport {
    counts: FaultCounts,
    /// Invariants that did not hold: the seed and what was wrong.
    #[pyo3(get)]
    violations: Vec<(u64, String)>,
    /// Longest wait of a client on whose islands nothing was wrong, in seconds.
    #[pyo3(get)]
    longest_wait_s: f64,
    /// What happened in order, if it was asked for.
    #[pyo3(get)]
    log: Vec<String>,
}

#[pymethods]
impl FaultReport {
    /// How often each fault was injected and what happened, by name.
    #[getter]
    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.counts.by_name().to_vec()
    }
}

/// Runs seeds from `first` on, on all processors.
#[pyfunction]
pub(crate) fn simulate_faults(py: Python<'_>, first: u64, seeds: u64) -> FaultReport {
    py.detach(|| {
        let runs: Vec<FaultRun> =
            (first..first + seeds).into_par_iter().map(|seed| run(seed, false)).collect();
        report(runs)
    })
}

/// Runs one seed and keeps its log.
#[pyfunction]
pub(crate) fn replay_faults(py: Python<'_>, seed: u64) -> FaultReport {
    py.detach(|| report(vec![run(seed, true)]))
}

fn report(runs: Vec<FaultRun>) -> FaultReport {
    let mut counts = FaultCounts::default();
    runs.iter().for_each(|run| counts.add(&run.counts));
    let longest = runs.iter().map(|run| run.longest_wait).max();
    let broken = runs.iter().filter_map(|run| run.violation.as_ref());
    let violations = broken.map(|one| (one.seed, one.to_string())).collect();
    FaultReport {
        counts,
        violations,
        longest_wait_s: longest.map_or(0.0, |wait| wait.0 as f64 / 1e9),
        log: runs.into_iter().flat_map(|run| run.log).collect(),
    }
}
