//! The runtime of the controller: sockets, host processes, the data plane, and the enforcer.

pub mod channel;
pub mod enforcer;
pub mod identity;
mod link;
mod world;

pub use link::accept_hosts;
pub use world::{HostConnection, INLINE_BYTES, ProcessAction, Replies, World};
