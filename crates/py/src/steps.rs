//! Python bindings of step graphs: construction, parsing, lowering from programs, and MPMD planning.

use std::sync::Arc;

use base::{Bytes, Nanos};
use ir::{Collective, CollectiveOp, Dependency, Devices, StepGraph, StepNode, StepOp};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::collectives::PyCollective;
use crate::programs::parse_program;
use crate::wrong;

/// A dependency: a node of the same step, or a node and how many steps before.
#[derive(FromPyObject)]
enum After {
    Same(u32),
    Before((u32, u32)),
}

impl From<After> for Dependency {
    fn from(after: After) -> Self {
        match after {
            After::Same(node) => Self::on(node),
            After::Before((node, steps_before)) => Self { node, steps_before },
        }
    }
}

/// One device or several.
#[derive(FromPyObject)]
enum DevicesArgument {
    One(u32),
    Many(Vec<u32>),
}

impl From<DevicesArgument> for Devices {
    fn from(devices: DevicesArgument) -> Self {
        match devices {
            DevicesArgument::One(device) => device.into(),
            DevicesArgument::Many(devices) => devices.into(),
        }
    }
}

/// A collective, or the name of one in which all ranks have equal shares.
#[derive(FromPyObject)]
enum CollectiveArgument<'py> {
    Whole(PyRef<'py, PyCollective>),
    Named(String),
}

/// Computation and communication of devices in one step; see `ir::StepGraph`.
#[pyclass(eq, skip_from_py_object, name = "StepGraph", module = "fairway._native")]
#[derive(Clone, PartialEq)]
pub(crate) struct PyStepGraph(pub StepGraph);

#[pymethods]
impl PyStepGraph {
    #[new]
    #[pyo3(signature = (devices, name="step", parts=1))]
    fn new(devices: u32, name: &str, parts: u32) -> Self {
        Self(StepGraph::of_parts(name, devices, parts))
    }

    /// Parses the text of `str`, and verifies it. Raises `ValueError`.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        let graph = StepGraph::parse(text).map_err(wrong)?;
        graph.verify().map_err(wrong)?;
        Ok(Self(graph))
    }

    /// Lowers a captured program, given as text, to a step graph; see `ir::lower`. Raises `ValueError`.
    #[staticmethod]
    fn of_program(text: &str) -> PyResult<Self> {
        Ok(Self(ir::lower(&parse_program(text)?)))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// Number of devices of one part.
    #[getter]
    fn devices(&self) -> u32 {
        self.0.devices
    }

    #[getter]
    fn parts(&self) -> u32 {
        self.0.parts
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("StepGraph({:?}, {} nodes, {} devices)", self.0.name, self.0.len(), self.0.devices)
    }

    /// Adds a computation that occupies each of the devices; returns its number.
    #[pyo3(signature = (devices, time_ns, after=Vec::new(), *, name="", priority=None))]
    fn compute(
        &mut self,
        devices: DevicesArgument,
        time_ns: u64,
        after: Vec<After>,
        name: &str,
        priority: Option<u64>,
    ) -> u32 {
        self.add(name, StepOp::compute(devices, Nanos(time_ns)), after, priority)
    }

    /// Adds a transfer of `size` bytes; returns its number.
    #[pyo3(signature = (source, target, size, after=Vec::new(), *, name=""))]
    fn transfer(
        &mut self,
        source: u32,
        target: u32,
        size: u64,
        after: Vec<After>,
        name: &str,
    ) -> u32 {
        self.add(name, StepOp::Transfer { source, target, size: Bytes(size) }, after, None)
    }

    /// Adds a collective among the devices, ranked in this order; returns its number. Given by name, it
    /// is on vectors of `size` bytes; otherwise `size` is that of an element. Raises `ValueError`.
    #[pyo3(signature = (kind, devices, size, after=Vec::new(), *, name=""))]
    fn collective(
        &mut self,
        kind: CollectiveArgument<'_>,
        devices: Vec<u32>,
        size: u64,
        after: Vec<After>,
        name: &str,
    ) -> PyResult<u32> {
        let op = match kind {
            CollectiveArgument::Named(kind) => {
                let make = match kind.as_str() {
                    "all_reduce" => Collective::all_reduce,
                    "all_gather" => Collective::all_gather,
                    "reduce_scatter" => Collective::reduce_scatter,
                    "all_to_all" => Collective::all_to_all,
                    _ => {
                        let known = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
                        let text = format!("{kind:?} is no collective; expected one of {known:?}");
                        return Err(PyValueError::new_err(text));
                    }
                };
                StepOp::collective(make, devices, Bytes(size)).map_err(wrong)?
            }
            CollectiveArgument::Whole(collective) => {
                let element_bytes = u32::try_from(size)
                    .map_err(|_| PyValueError::new_err(format!("an element of {size} bytes")))?;
                let (collective, devices) = (collective.0.clone(), devices.into());
                StepOp::Collective(Box::new(CollectiveOp { collective, devices, element_bytes }))
            }
        };
        Ok(self.add(name, op, after, None))
    }

    /// The nodes, by number.
    #[getter]
    fn nodes(&self) -> Vec<PyStepNode> {
        let node = |number| PyStepNode {
            node: self.0.nodes()[number as usize].clone(),
            after: self.0.dependencies(number).into(),
        };
        (0..self.0.len() as u32).map(node).collect()
    }

    /// Returns the step with compute times multiplied by a factor. Raises `ValueError`.
    fn scaled(&self, factor: f64) -> PyResult<Self> {
        if !(1e-6..=1e6).contains(&factor) {
            let text = format!("compute times cannot be scaled by {factor}; expected 1e-6 to 1e6");
            return Err(PyValueError::new_err(text));
        }
        Ok(Self(self.0.scaled(factor)))
    }

    /// Returns the kind of communication of each node: the index of its strategy in a plan.
    fn communication_kinds(&self) -> Vec<Option<u32>> {
        plan::communication_kinds(&self.0)
    }

    /// Raises `ValueError` if devices or dependencies do not exist, or dependencies within a step are
    /// cyclic.
    fn verify(&self) -> PyResult<()> {
        self.0.verify().map_err(wrong)
    }
}

impl PyStepGraph {
    fn add(&mut self, name: &str, op: StepOp, after: Vec<After>, priority: Option<u64>) -> u32 {
        let after: Vec<Dependency> = after.into_iter().map(Into::into).collect();
        self.0.add_node(StepNode { name: name.into(), op, priority }, &after)
    }
}

/// A node of a step graph.
#[pyclass(frozen, name = "StepNode", module = "fairway._native")]
pub(crate) struct PyStepNode {
    node: StepNode,
    after: Arc<[Dependency]>,
}

#[pymethods]
impl PyStepNode {
    #[getter]
    fn name(&self) -> &str {
        &self.node.name
    }

    /// `compute`, `transfer`, or the name of a collective.
    #[getter]
    fn kind(&self) -> &'static str {
        match &self.node.op {
            StepOp::Compute { .. } => "compute",
            StepOp::Transfer { .. } => "transfer",
            StepOp::Collective(op) => op.collective.kind().name(),
        }
    }

    /// Its devices; of a transfer the source and the target.
    #[getter]
    fn devices(&self) -> Vec<u32> {
        self.node.op.devices().collect()
    }

    /// Compute time in ns; 0 if it communicates.
    #[getter]
    fn time_ns(&self) -> u64 {
        match self.node.op {
            StepOp::Compute { time, .. } => time.0,
            _ => 0,
        }
    }

    /// Bytes transferred, or of the vector of each rank; 0 if it computes.
    #[getter]
    fn size(&self) -> u64 {
        match &self.node.op {
            StepOp::Compute { .. } => 0,
            StepOp::Transfer { size, .. } => size.0,
            StepOp::Collective(op) => op.size().0,
        }
    }

    /// Nodes of the same step that it depends on.
    #[getter]
    fn after(&self) -> Vec<u32> {
        let same = self.after.iter().filter(|on| on.steps_before == 0);
        same.map(|on| on.node).collect()
    }

    /// Nodes of earlier steps that it depends on, each with how many steps before.
    #[getter]
    fn carried(&self) -> Vec<(u32, u32)> {
        let earlier = self.after.iter().filter(|on| on.steps_before > 0);
        earlier.map(|on| (on.node, on.steps_before)).collect()
    }

    fn __str__(&self) -> String {
        self.node.op.to_string()
    }
}
