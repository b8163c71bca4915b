//! Events of the simulation.

use base::{BufferId, HostId, Nanos, Status, TransferTag};
use protocol::{Command, Report};

/// An event.
#[derive(Debug)]
pub(super) enum SimEvent {
    User(usize),
    Tick,
    Fault(InjectedFault),
    /// A report, and the process that it is from.
    Report(HostId, u64, Report),
    HeartbeatAnswered(HostId, u64),
    HeartbeatFailed(HostId, u64),
    ConnectionLost(HostId, u64),
    ToHost(HostId, u64, ToHost),
    Message {
        to: HostId,
        to_process: u64,
        from: HostId,
        from_process: u64,
        tag: TransferTag,
        content: Result<i64, Status>,
        /// Whether it was held up.
        is_late: bool,
    },
    /// A process has something to do.
    Turn(HostId, u64),
    Ended(BufferId),
}

#[derive(Debug)]
pub(super) enum ToHost {
    Command(Command),
    Lose(HostId, TransferTag, Status),
    Acknowledge(TransferTag),
    Heartbeat,
}

/// Something that goes wrong, or the supervisor's part in it.
#[derive(Debug, Clone, Copy)]
pub(super) enum InjectedFault {
    /// A process is killed.
    Kill(HostId),
    /// A process is stopped for a while.
    Stop(HostId, Nanos),
    /// A host is cut off from all others for a while.
    Cut(HostId, Nanos),
    /// A client's connection ends.
    Depart(usize),
    /// The controller's machine is frozen for a while.
    Freeze(Nanos),
    /// An island is removed; by force, or once slices have moved.
    Remove(usize, bool),
    /// A process that the controller has given up is ended.
    End(HostId, u64),
    /// An island is started again.
    Restart(usize),
    /// A process of a host starts.
    Start(HostId),
}
