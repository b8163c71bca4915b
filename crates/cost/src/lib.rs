//! Cost models of communication where nothing else happens, behind one contract, [`NetworkModel`]: any
//! topology's interconnect, measured channels ([`ChannelCost`]), and closed forms of collectives that are
//! measured in part ([`ClosedForm`]).

mod channel;
mod closed_form;
mod network;

pub use channel::ChannelCost;
pub use closed_form::{ClosedForm, Reached, ReduceTimes};
pub use network::{NetworkModel, Port};
