//! Python bindings of topologies: names, and the views made from them.

use base::{BitsPerSecond, Nanos, VertexId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use topology::{Cable, Fabric, Link, Network, Topology};

use crate::networks::{LinkArguments, PyFabric};
use crate::placement::PyInterconnect;
use crate::wrong;

/// What joins devices; see `topology::Topology`.
#[pyclass(frozen, name = "Topology", module = "fairway._native")]
pub(crate) struct PyTopology(pub Topology);

#[pymethods]
impl PyTopology {
    /// Parses a name such as `torus:8x8` or `sip-ring:1024,wavelengths=64`. Raises `ValueError`.
    #[staticmethod]
    fn parse(name: &str) -> PyResult<Self> {
        Ok(Self(name.parse().map_err(wrong)?))
    }

    /// A topology of endpoints and switches with these links. Raises `ValueError`.
    #[staticmethod]
    fn of_links(
        name: &str,
        endpoints: u32,
        switches: u32,
        links: Vec<LinkArguments>,
    ) -> PyResult<Self> {
        let links = links.into_iter().map(|(source, target, rate, latency)| Link {
            source: VertexId(source),
            target: VertexId(target),
            rate: BitsPerSecond(rate),
            latency: Nanos(latency),
            cable: Cable::Rack,
        });
        let network = Network::new(endpoints, switches, links.collect()).map_err(wrong)?;
        Ok(Self(Topology::of_links(name, Fabric::Network(network))))
    }

    /// Number of devices.
    #[getter]
    fn devices(&self) -> u32 {
        self.0.devices()
    }

    /// Whether it consists of links, on which schedules can be made.
    #[getter]
    fn is_routed(&self) -> bool {
        self.0.links().is_some()
    }

    /// The links that packets take. Raises `ValueError` if its model has shares of bandwidth or
    /// circuits instead.
    #[getter]
    pub(crate) fn fabric(&self) -> PyResult<PyFabric> {
        let links = self.0.links().ok_or_else(|| {
            PyValueError::new_err(format!(
                "{} is modelled by shares of bandwidth or optical circuits, not by links; expected a \
                 packet network, such as dragonfly:264, torus:8x8 or fattree:8",
                self.0
            ))
        })?;
        Ok(PyFabric::new(links.clone()))
    }

    /// The shares of resources that flows get.
    #[getter]
    fn interconnect(&self) -> PyInterconnect {
        PyInterconnect::new(self.0.interconnect().clone())
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Topology({:?}, {} devices)", self.0.to_string(), self.0.devices())
    }
}
