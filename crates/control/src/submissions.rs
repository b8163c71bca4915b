//! What the controller submits to the scheduler, and what the scheduler dispatches.

use base::{ClientId, ExecutableId, HostId, InputId, Nanos};
use protocol::Command;
use smallvec::SmallVec;

/// Commands to dispatch to hosts, in order.
pub(crate) type Out = Vec<(HostId, Command)>;

/// Role of a command in a transfer between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransferRole {
    /// Not a part of a transfer.
    None,
    /// One of the sends of this transfer.
    Sends(u64),
    /// A receive, which must not be dispatched before all sends of this transfer.
    Receives(u64),
}

/// Position of a launch among the segments of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SegmentPosition {
    /// The whole run.
    Whole,
    /// The first of several segments.
    First,
    /// A segment between the first and the last.
    Middle,
    /// The last of several segments.
    Last,
}

/// A gang's launch on one host.
#[derive(Debug)]
pub(crate) struct Member {
    pub host: HostId,
    /// Number of the host's devices that it runs on.
    pub devices: u32,
    pub command: Command,
}

/// A request to launch a gang on all its hosts at once.
#[derive(Debug)]
pub(crate) struct LaunchRequest {
    pub client: ClientId,
    pub executable: ExecutableId,
    pub position: SegmentPosition,
    pub members: SmallVec<[Member; 2]>,
    /// Estimated run time, without measurements of the program.
    pub expected: Nanos,
    /// Inputs that it takes batches from, named once per batch.
    pub inputs: SmallVec<[InputId; 1]>,
}
