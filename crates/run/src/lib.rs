//! The runtime of the controller: sockets, host processes, the data plane, and the enforcer.

mod callbacks;
pub mod channel;
mod commands;
pub mod enforcer;
mod link;
mod queues;
mod reachability;
mod readbacks;
mod world;

pub use callbacks::{Call, CallbackKey, Callbacks};
pub use link::accept_hosts;
pub use readbacks::{Readback, Readbacks};
pub use world::{ClientConnection, ClientOrigin, INLINE_BYTES, ProcessAction, Replies, World};
