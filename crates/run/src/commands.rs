//! What the controller has queued for a host.

use parking_lot::Mutex;
use protocol::CommandFrames;
use tokio::sync::Notify;

/// Commands queued for one host.
#[derive(Debug, Default)]
pub(crate) struct CommandQueue {
    pub frames: Mutex<CommandFrames>,
    pub written: Notify,
    pub closed: Mutex<bool>,
    /// Asks the thread that sends this host's heartbeats for one.
    pub heartbeat: Mutex<Option<std::sync::mpsc::SyncSender<()>>>,
}
