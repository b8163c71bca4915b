//! Cost models of communication, behind one contract: [`NetworkModel`].
//!
//! Measured channels ([`plan::ChannelCost`]) and closed forms ([`ClosedForm`], of any topology) both
//! fulfil it; what searches for placements asks no more.
//!
//! [`plan::ChannelCost`]: ../plan/struct.ChannelCost.html

mod closed_form;
mod network;

pub use closed_form::{ClosedForm, Reached, ReduceTimes};
pub use network::NetworkModel;
