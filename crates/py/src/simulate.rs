//! Python bindings of the dispatch simulator.

use base::Nanos;
use control::{Config, Dispatch, Share};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sim::{ClientWork, SimClient, SimCosts, Simulation};
use topology::IslandSpec;

/// `(work, count, computation_ns, weight, priority)` of a client.
type ClientArguments = (String, u32, u64, u32, i32);

/// What is simulated; `fairway.studies.reproduce.pathways.DispatchScenario`.
#[derive(FromPyObject)]
pub(crate) struct DispatchScenario {
    /// Hosts and devices of each host, by island.
    islands: Vec<(u32, u32)>,
    clients: Vec<ClientArguments>,
    costs: Vec<(String, u64)>,
    warm_up_ns: u64,
    measured_ns: u64,
    sequential: bool,
    trace: bool,
}

/// Simulates the controller with modelled hosts in virtual time (discrete event).
///
/// Times are nanoseconds. `costs` replaces some of the measured ones. With `trace`, the work on the
/// first host's devices is returned as `(client, start, end)`.
#[pyfunction]
pub(crate) fn simulate_dispatch(
    py: Python<'_>,
    scenario: DispatchScenario,
) -> PyResult<Bound<'_, PyDict>> {
    let DispatchScenario { islands, clients, costs, warm_up_ns, measured_ns, sequential, trace } =
        scenario;
    let islands: Vec<IslandSpec> = islands
        .into_iter()
        .map(|(hosts, devices_per_host)| IslandSpec::new(hosts, devices_per_host))
        .collect();
    let clients = clients.into_iter().map(client).collect::<PyResult<Vec<_>>>()?;
    let mut known = SimCosts::measured();
    for (name, value) in costs {
        set_cost(&mut known, &name, value)?;
    }
    let dispatch = if sequential { Dispatch::Sequential } else { Dispatch::Parallel };
    let outcome = py.detach(|| {
        let config = Config { dispatch, ..Config::default() };
        let mut simulation = Simulation::new(&islands, clients, known, config);
        simulation.run(Nanos(warm_up_ns), Nanos(measured_ns))
    });
    let result = PyDict::new(py);
    result.set_item("computations", outcome.computations)?;
    result.set_item("measured_ns", outcome.measured.0)?;
    result.set_item("controller_busy_ns", outcome.controller_busy.0)?;
    result.set_item("events", outcome.events)?;
    if trace {
        let spans = outcome.spans.iter().map(|span| (span.client.0, span.start.0, span.end.0));
        result.set_item("spans", spans.collect::<Vec<_>>())?;
    }
    Ok(result)
}

/// Default costs of simulations, in nanoseconds.
#[pyfunction]
pub(crate) fn simulation_costs(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let mut known = SimCosts::measured();
    let costs = PyDict::new(py);
    for name in COSTS {
        costs.set_item(name, cost(&mut known, name).expect("each name is known").0)?;
    }
    Ok(costs)
}

const COSTS: [&str; 10] = [
    "request",
    "command",
    "report",
    "client",
    "launch",
    "step",
    "network",
    "collective",
    "collective_per_doubling",
    "jax_dispatch",
];

fn cost<'a>(costs: &'a mut SimCosts, name: &str) -> Option<&'a mut Nanos> {
    match name {
        "request" => Some(&mut costs.request),
        "command" => Some(&mut costs.command),
        "report" => Some(&mut costs.report),
        "client" => Some(&mut costs.client),
        "launch" => Some(&mut costs.launch),
        "step" => Some(&mut costs.step),
        "network" => Some(&mut costs.network),
        "collective" => Some(&mut costs.collective),
        "collective_per_doubling" => Some(&mut costs.collective_per_doubling),
        "jax_dispatch" => Some(&mut costs.jax_dispatch),
        _ => None,
    }
}

fn set_cost(costs: &mut SimCosts, name: &str, value: u64) -> PyResult<()> {
    let unknown = || {
        let known = COSTS.join(", ");
        PyValueError::new_err(format!("there is no cost {name:?}; there are {known}"))
    };
    *cost(costs, name).ok_or_else(unknown)? = Nanos(value);
    Ok(())
}

fn client(given: ClientArguments) -> PyResult<SimClient> {
    let (work, count, computation_ns, weight, priority) = given;
    let work = match work.as_str() {
        "op_by_op" => ClientWork::OpByOp,
        "chained" => ClientWork::Chained(count),
        "fused" => ClientWork::Fused(count),
        "pipeline" => ClientWork::Pipeline(count),
        other => return Err(PyValueError::new_err(format!("there is no work {other:?}"))),
    };
    let share = Share { weight, priority };
    Ok(SimClient { share, work, computation: Nanos(computation_ns) })
}
