//! Schedules for Python.

use base::{Bytes, VertexId};
use fabric::{LinkModel, Network, named};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use route::{Plan, Timing, Transfer, busiest, lower_bound, route, verify};

fn wrong(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Schedules transfers, each of source, target, bytes and the places of those that it comes after,
/// on a fabric by its name, verified.
///
/// Raises `ValueError` if the fabric cannot be or a transfer makes no sense.
#[pyfunction]
pub(crate) fn route_transfers<'py>(
    py: Python<'py>,
    fabric: &str,
    transfers: Vec<(u32, u32, u64, Vec<u32>)>,
) -> PyResult<Bound<'py, PyDict>> {
    let fabric = named(fabric, LinkModel::default()).map_err(wrong)?;
    let network = fabric.network();
    let transfers: Vec<Transfer> = transfers
        .into_iter()
        .map(|(source, target, size, after)| Transfer {
            after: after.into(),
            ..Transfer::new(VertexId(source), VertexId(target), Bytes(size))
        })
        .collect();
    let timing = Timing::default();
    let plan = py.detach(|| route(network, transfers, timing)).map_err(wrong)?;
    py.detach(|| verify(network, &plan)).map_err(wrong)?;
    let found = PyDict::new(py);
    found.set_item("clock_hz", timing.clock_hz)?;
    found.set_item("vector_bytes", timing.vector.0)?;
    found.set_item("end_ticks", plan.end().0)?;
    found.set_item("ends_ticks", plan.schedule.ends.iter().map(|end| end.0).collect::<Vec<_>>())?;
    found.set_item("bound_ticks", lower_bound(network, &plan.tasks, &timing).0)?;
    let busiest = busiest(network, &plan).map(|(link, busy)| {
        let link = network.link(link);
        (link.source.0, link.target.0, busy.0)
    });
    found.set_item("busiest", busiest)?;
    found.set_item("trains", trains(py, network, &plan)?)?;
    Ok(found)
}

/// Each with its transfer, its first vector, how many, the chips of its way, and its starts.
fn trains<'py>(py: Python<'py>, network: &Network, plan: &Plan) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for train in &plan.schedule.trains {
        let links = train.hops.iter().map(|hop| network.link(hop.link));
        let way = links.clone().take(1).map(|link| link.source.0);
        let way: Vec<u32> = way.chain(links.map(|link| link.target.0)).collect();
        let starts: Vec<u64> = train.hops.iter().map(|hop| hop.start.0).collect();
        list.append((train.task, train.first, train.count, way, starts))?;
    }
    Ok(list)
}
