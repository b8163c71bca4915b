//! Python bindings of collectives.

use ir::Collective;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::wrong;

/// One collective of ranks on vectors of elements.
#[pyclass(frozen, eq, name = "Collective", module = "fairway._native")]
#[derive(PartialEq)]
pub(crate) struct PyCollective(pub Collective);

#[pymethods]
impl PyCollective {
    #[staticmethod]
    fn all_reduce(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::all_reduce(ranks, elements).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn reduce_scatter(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::reduce_scatter(ranks, elements).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn all_gather(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::all_gather(ranks, elements).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn broadcast(ranks: u32, elements: u64, root: u32) -> PyResult<Self> {
        Collective::broadcast(ranks, elements, root).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn reduce(ranks: u32, elements: u64, root: u32) -> PyResult<Self> {
        Collective::reduce(ranks, elements, root).map(Self).map_err(wrong)
    }

    #[staticmethod]
    fn all_to_all(ranks: u32, elements: u64) -> PyResult<Self> {
        Collective::all_to_all(ranks, elements).map(Self).map_err(wrong)
    }

    /// An all-to-all with blocks of these sizes: from rank `i` to rank `j` at `i * ranks + j`.
    #[staticmethod]
    fn all_to_all_of(ranks: u32, sizes: Vec<u64>) -> PyResult<Self> {
        Collective::all_to_all_of(ranks, sizes.into()).map(Self).map_err(wrong)
    }

    #[staticmethod]
    #[allow(clippy::needless_pass_by_value)]
    fn permute(ranks: u32, elements: u64, pairs: Vec<(u32, u32)>) -> PyResult<Self> {
        Collective::permute(ranks, elements, &pairs).map(Self).map_err(wrong)
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.0.ranks()
    }

    #[getter]
    fn elements(&self) -> u64 {
        self.0.elements()
    }

    /// Number of elements of the vector that a rank works on.
    fn work(&self, rank: u32) -> PyResult<u64> {
        self.check(rank)?;
        Ok(self.0.work(rank))
    }

    /// Start and end of a rank's result in its vector.
    fn result(&self, rank: u32) -> PyResult<(u64, u64)> {
        self.check(rank)?;
        let range = self.0.result(rank);
        Ok((range.start, range.end))
    }

    /// Start and end of the block of a vector that a rank owns.
    fn block(&self, rank: u32) -> PyResult<(u64, u64)> {
        self.check(rank)?;
        let range = self.0.block(rank);
        Ok((range.start, range.end))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }
}

impl PyCollective {
    fn check(&self, rank: u32) -> PyResult<()> {
        let ranks = self.0.ranks();
        if rank < ranks {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("rank {rank} was asked for; there are {ranks}")))
    }
}
