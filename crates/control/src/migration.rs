//! Migrations of clients to other islands that are in progress.

use std::collections::BTreeMap;

use base::{DeviceId, IslandId, Status};

use crate::events::Handle;
use crate::objects::Buffer;
use crate::programs::Executable;

/// Physical devices of each virtual one: before the migration, and after it.
pub(crate) type Places = BTreeMap<DeviceId, (DeviceId, DeviceId)>;

/// A migration in progress.
#[derive(Debug)]
pub(crate) struct Migration {
    pub number: u64,
    /// Source and target island.
    pub from: IslandId,
    pub to: IslandId,
    pub places: Places,
    pub stage: Stage,
    /// Programs compiled for the new devices.
    pub programs: BTreeMap<Handle, Executable>,
    /// Number of programs that are still being compiled.
    pub missing: usize,
    pub error: Option<Status>,
    /// Arrays on the new devices, with the handle that each will have.
    pub arrays: Vec<(Handle, Buffer)>,
}

/// How far a migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Earlier requests of the client are not all dispatched and answered.
    Draining,
    /// Programs are being compiled for the new devices.
    Compiling,
    /// Arrays are being copied.
    Copying,
}

impl Migration {
    /// Creates a migration that has not begun to compile.
    pub fn new(number: u64, from: IslandId, to: IslandId, places: Places) -> Self {
        Self {
            number,
            from,
            to,
            places,
            stage: Stage::Draining,
            programs: BTreeMap::new(),
            missing: 0,
            error: None,
            arrays: Vec::new(),
        }
    }

    /// Returns the copies of its arrays.
    pub fn copies_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.arrays.iter_mut().map(|(_, copy)| copy)
    }
}
