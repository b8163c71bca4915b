//! The client front end: JAX's IFRT proxy protocol over gRPC.
//!
//! The client that ships in every jaxlib connects here, so unmodified programs run. Messages are
//! translated to the controller's requests and back; all scheduling and placement is up to the
//! controller.

mod buffers;
mod callbacks;
mod connection;
mod decode;
mod dtype;
mod encode;
#[cfg(test)]
mod fuzz;
mod limits;
mod listener;
mod plugin;
mod presentation;
#[allow(missing_docs)]
mod proto;
mod service;
mod session;
mod sharding;

pub use listener::{Admittance, DoorError, Listener};
pub use presentation::Presentation;
