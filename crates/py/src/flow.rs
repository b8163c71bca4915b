//! Python bindings of the nouns between a step graph and its report: placements and schedules.

use ir::Placement;
use place::{PlacementLimits, place_devices};
use pyo3::prelude::*;
use route::{StepSchedule, Timing, route_step};

use crate::device_plans::PyPlannedStep;
use crate::steps::PyStepGraph;
use crate::topologies::PyTopology;
use crate::wrong;

/// Where the devices of a step are; see `ir::Placement`.
#[pyclass(frozen, eq, skip_from_py_object, name = "Placement", module = "fairway._native")]
#[derive(Clone, PartialEq)]
pub(crate) struct PyPlacement(Placement);

#[pymethods]
impl PyPlacement {
    /// Device `i` of a step on device `devices[i]` of a topology.
    #[new]
    fn new(step: &str, topology: &str, devices: Vec<u32>) -> Self {
        Self(Placement::new(step, topology, devices))
    }

    /// Parses the text of `str`. Raises `ValueError`.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        Ok(Self(Placement::parse(text).map_err(wrong)?))
    }

    #[getter]
    fn devices(&self) -> Vec<u32> {
        self.0.devices.clone()
    }

    /// Returns the step on the devices of a topology. Raises `ValueError` if it does not fit.
    fn apply(&self, step: &PyStepGraph, topology: &PyTopology) -> PyResult<PyStepGraph> {
        Ok(PyStepGraph(self.0.apply(&step.0, topology.0.devices()).map_err(wrong)?))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Placement({} devices on {:?})", self.0.devices.len(), self.0.topology)
    }
}

/// Places a step's devices on a topology by the time that their communication takes alone. Raises
/// `ValueError`.
#[pyfunction]
pub(crate) fn place_step(
    py: Python<'_>,
    step: &PyStepGraph,
    topology: &PyTopology,
    evaluations: u64,
    seed: u64,
) -> PyResult<PyPlacement> {
    let limits = PlacementLimits { evaluations, seed };
    let name = topology.0.to_string();
    let network = topology.0.interconnect();
    let placed = py.detach(|| place_devices(&step.0, network, &name, &limits)).map_err(wrong)?;
    Ok(PyPlacement(placed.placement))
}

/// A scheduled step: every vector's links and start times; see `route::StepSchedule`.
#[pyclass(frozen, name = "StepSchedule", module = "fairway._native")]
pub(crate) struct PyStepSchedule {
    schedule: StepSchedule,
}

#[pymethods]
impl PyStepSchedule {
    /// Parses the text of `str`, and verifies it on the links of the topology. Raises `ValueError`.
    #[staticmethod]
    fn parse(text: &str, topology: &PyTopology) -> PyResult<Self> {
        let links = topology.fabric()?;
        let schedule = StepSchedule::parse(text, links.network()).map_err(wrong)?;
        Ok(Self { schedule })
    }

    /// Makespan of the step.
    #[getter]
    fn seconds(&self) -> f64 {
        let schedule = &self.schedule.plan.schedule;
        schedule.timing.nanos(schedule.end()) / 1e9
    }

    /// Number of computations and transfers.
    #[getter]
    fn tasks(&self) -> usize {
        self.schedule.plan.tasks.len()
    }

    /// By node of the step, the algorithm of its collective; None if it is none.
    #[getter]
    fn algorithms(&self) -> Vec<Option<String>> {
        let algorithms = self.schedule.algorithms.iter();
        algorithms.map(|one| one.as_deref().map(str::to_owned)).collect()
    }

    /// By node of the step, when all of it is done, in seconds.
    #[getter]
    fn ends_s(&self) -> Vec<f64> {
        let schedule = &self.schedule.plan.schedule;
        let end = |tasks: &std::ops::Range<u32>| {
            let ends = &schedule.ends[tasks.start as usize..tasks.end as usize];
            schedule.timing.nanos(ends.iter().copied().max().unwrap_or_default()) / 1e9
        };
        self.schedule.tasks.iter().map(end).collect()
    }

    fn __str__(&self) -> String {
        self.schedule.to_string()
    }
}

/// Schedules a placed and planned step on the links of a topology. Raises `ValueError`.
#[pyfunction]
pub(crate) fn schedule_step(
    py: Python<'_>,
    step: &PyPlannedStep,
    topology: &PyTopology,
) -> PyResult<PyStepSchedule> {
    let links = topology.fabric()?;
    let timing = Timing::default();
    let schedule = py.detach(|| route_step(links.network(), &step.0, timing)).map_err(wrong)?;
    Ok(PyStepSchedule { schedule })
}
