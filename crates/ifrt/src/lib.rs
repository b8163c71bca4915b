//! The front door: JAX's IFRT proxy protocol over gRPC.
//!
//! The client that ships in every jaxlib connects here, so unmodified programs run. Messages are
//! translated to the controller's requests and back; nothing is decided here.

mod buffers;
mod connection;
mod decode;
mod dtype;
mod encode;
mod limits;
mod listener;
mod presentation;
#[allow(missing_docs)]
mod proto;
mod service;
mod session;
mod sharding;

pub use listener::{DoorError, Listener};
pub use presentation::Presentation;
