//! Cost models of communication where nothing else happens: [`NetworkModel`] for transfers on any
//! topology, [`ClosedForm`] for collectives on an interconnect, measured in part.

mod closed_form;
mod network;

pub use closed_form::{ClosedForm, Reached, ReduceTimes};
pub use network::NetworkModel;
