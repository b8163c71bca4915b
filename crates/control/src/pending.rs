//! Requests that wait for answers of hosts.

use base::{BufferId, ClientId, HostId, Status};
use smallvec::SmallVec;

use crate::dataflow::Reading;
use crate::events::RequestId;
use crate::partition::Partitioning;
use crate::programs::Compiling;

/// What to do with the answers of hosts once all have arrived.
#[derive(Debug)]
pub(crate) enum Waiting {
    /// Every host must report these buffers ready.
    Ready(SmallVec<[BufferId; 8]>),
    /// The answer of the only host, the bytes of this buffer, is the client's answer.
    Read(BufferId),
    /// The answer of the only host is the client's answer.
    Answer,
    /// A program is being compiled.
    Compile(Compiling),
    /// A host partitions a program over several islands.
    Partition(Partitioning),
    /// A host parses a whole program.
    Program(Reading),
    /// A migrating client's arrays are being copied to the new physical devices.
    Moved,
}

/// A request that is waiting for answers of hosts.
#[derive(Debug)]
pub(crate) struct Pending {
    pub client: ClientId,
    pub request: RequestId,
    /// Hosts that have not answered yet.
    pub hosts: Vec<HostId>,
    pub error: Option<Status>,
    pub waiting: Waiting,
}
