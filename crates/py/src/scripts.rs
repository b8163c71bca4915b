//! Python bindings of the schedules of ranks.

use std::sync::Arc;

use plan::RankSchedule;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::collectives::PyCollective;
use crate::costs::{CostArguments, channels_of};
use crate::wrong;

/// The schedule of all collectives of a step: motifs and their order.
#[pyclass(frozen, name = "Script", module = "fairway._native")]
pub(crate) struct PyScript(pub Arc<RankSchedule>);

#[pymethods]
impl PyScript {
    /// Parses and verifies `text`. Raises `ValueError`.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        RankSchedule::parse(text).map(|script| Self(Arc::new(script))).map_err(wrong)
    }

    /// The same collective `count` times, one after another on one channel.
    #[staticmethod]
    #[pyo3(signature = (collective, channel, count = 1))]
    fn series(collective: &PyCollective, channel: u32, count: u32) -> PyResult<Self> {
        let script = RankSchedule::series(&collective.0, channel, count);
        script.verify().map_err(wrong)?;
        Ok(Self(Arc::new(script)))
    }

    /// One collective, by the option that is fastest alone on channels of these costs.
    #[staticmethod]
    fn alone(
        py: Python<'_>,
        collective: &PyCollective,
        element: u32,
        costs: Vec<CostArguments>,
        segments: Vec<u64>,
    ) -> PyResult<Self> {
        let (costs, variety) = channels_of(costs, segments)?;
        let script = py.detach(|| RankSchedule::alone(&collective.0, element, &costs, &variety));
        Ok(Self(Arc::new(script)))
    }

    #[getter]
    fn text(&self) -> String {
        self.0.print()
    }

    /// Transfers of an operation: motif, round, source rank, target rank, first element in the source's
    /// vector, first element in the target's, number of elements, and whether they are added.
    #[allow(clippy::type_complexity)]
    fn transfers(
        &self,
        operation: usize,
    ) -> PyResult<Vec<(usize, usize, u32, u32, u64, u64, u64, bool)>> {
        let count = self.0.operations.len();
        let one = self.0.operations.get(operation).ok_or_else(|| {
            PyValueError::new_err(format!("there is no operation {operation}; there are {count}"))
        })?;
        let mut found = Vec::new();
        for (motif, placed) in one.motifs.iter().enumerate() {
            for (round, transfers) in placed.motif.rounds(&one.collective).iter().enumerate() {
                found.extend(transfers.iter().map(|one| {
                    let &plan::RankTransfer { source, target, read, write, count, sums } = one;
                    (motif, round, source, target, read, write, count, sums)
                }));
            }
        }
        Ok(found)
    }

    /// By operation: name, collective, and number of motifs.
    #[getter]
    fn operations(&self) -> Vec<(String, PyCollective, usize)> {
        let of = |one: &plan::ScheduledCollective| {
            (one.name.clone(), PyCollective(one.collective.clone()), one.motifs.len())
        };
        self.0.operations.iter().map(of).collect()
    }
}
