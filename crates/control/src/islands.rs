//! What the controller knows of islands that are added and removed while clients run.

use base::Status;

/// State of an island: whether work can be scheduled on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IslandState {
    /// All its hosts have joined.
    Up,
    /// Some of its hosts have not joined yet.
    Starting,
    /// One of its hosts was lost.
    Lost,
    /// It was removed.
    Removed,
}

/// The removal of an island in progress.
#[derive(Debug, Default)]
pub(crate) struct Removal {
    /// Whether it has finished: migrations off the island have succeeded or failed.
    pub is_over: bool,
    /// Why the island could not be removed.
    pub error: Option<Status>,
}
