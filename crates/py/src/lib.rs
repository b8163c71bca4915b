//! Python bindings (PyO3): converts arguments and maps errors, nothing else.

mod collectives;
mod costs;
mod data;
mod device_plans;
mod enforcer;
mod faults;
mod flow;
mod gateway;
mod networks;
mod placement;
mod plans;
mod programs;
mod scripts;
mod server;
mod simulate;
mod step_plans;
mod steps;
mod topologies;
mod warnings;

use base::Status;
use pyo3::prelude::*;

pyo3::create_exception!(
    fairway._native,
    StatusError,
    pyo3::exceptions::PyRuntimeError,
    "A failure with a code: `args` is the code's name and the message."
);

pub(crate) fn status_error(status: &Status) -> PyErr {
    StatusError::new_err((status.code.name(), status.message.clone()))
}

pub(crate) fn os_error(error: std::io::Error) -> PyErr {
    error.into()
}

/// Maps an error of invalid input to `ValueError`.
pub(crate) fn wrong(error: impl std::error::Error) -> PyErr {
    pyo3::exceptions::PyValueError::new_err(error.to_string())
}

/// The compiled half of `fairway`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    warnings::subscribe();
    module.add("StatusError", module.py().get_type::<StatusError>())?;
    module.add("TeamError", module.py().get_type::<enforcer::TeamError>())?;
    module.add("CONTROLLER", run::channel::CONTROLLER.0)?;
    module.add("INLINE_BYTES", run::INLINE_BYTES)?;
    module.add_class::<collectives::PyCollective>()?;
    module.add_class::<enforcer::PyEnforcer>()?;
    module.add_class::<enforcer::PyPart>()?;
    module.add_class::<scripts::PyScript>()?;
    module.add_class::<step_plans::PyStepPlan>()?;
    module.add_class::<enforcer::PyTicket>()?;
    module.add_class::<data::PyDataPlane>()?;
    module.add_class::<data::PyMemory>()?;
    module.add_class::<data::PyPayload>()?;
    module.add_class::<flow::PyPlacement>()?;
    module.add_class::<flow::PyStepSchedule>()?;
    module.add_class::<networks::PyFabric>()?;
    module.add_class::<placement::PyInterconnect>()?;
    module.add_class::<placement::PyLinks>()?;
    module.add_class::<placement::PyOpGraph>()?;
    module.add_class::<plans::PyPlan>()?;
    module.add_class::<server::Server>()?;
    module.add_class::<warnings::PyWarnings>()?;
    module.add_class::<gateway::PyGateway>()?;
    module.add_class::<gateway::PyRemote>()?;
    module.add_class::<device_plans::PyDevicePlan>()?;
    module.add_class::<device_plans::PyPlannedStep>()?;
    module.add_class::<steps::PyStepGraph>()?;
    module.add_class::<steps::PyStepNode>()?;
    module.add_class::<topologies::PyTopology>()?;
    module.add_function(wrap_pyfunction!(step_plans::plan_step, module)?)?;
    module.add_function(wrap_pyfunction!(step_plans::collective_options, module)?)?;
    module.add_function(wrap_pyfunction!(flow::place_step, module)?)?;
    module.add_function(wrap_pyfunction!(flow::schedule_step, module)?)?;
    module.add_function(wrap_pyfunction!(networks::measure_links, module)?)?;
    module.add_function(wrap_pyfunction!(networks::send_with_errors, module)?)?;
    module.add_function(wrap_pyfunction!(placement::decide_wavelengths, module)?)?;
    module.add_function(wrap_pyfunction!(placement::share_devices, module)?)?;
    module.add_function(wrap_pyfunction!(programs::program_nodes, module)?)?;
    module.add_function(wrap_pyfunction!(programs::read_program, module)?)?;
    module.add_class::<faults::FaultReport>()?;
    module.add_function(wrap_pyfunction!(faults::simulate_faults, module)?)?;
    module.add_function(wrap_pyfunction!(faults::replay_faults, module)?)?;
    module.add_function(wrap_pyfunction!(simulate::simulate_dispatch, module)?)?;
    module.add_function(wrap_pyfunction!(device_plans::plan_devices, module)?)?;
    module.add_function(wrap_pyfunction!(simulate::simulation_costs, module)?)?;
    Ok(())
}
