//! The sources that programs are compiled from.

use std::sync::Arc;

use base::{Code, DeviceId, Status};

use crate::colocated::Colocated;

/// The source that a program is compiled from.
#[derive(Debug, Clone)]
pub(crate) struct CompileSource {
    /// Portable artifact.
    pub program: Arc<Vec<u8>>,
    /// Serialized compile options.
    pub options: Arc<Vec<u8>>,
    /// Devices in the order of the device assignment.
    pub devices: Arc<[DeviceId]>,
    /// Replicas and partitions, whose product is the device count.
    pub grid: (u32, u32),
    /// What it is.
    pub kind: SourceKind,
}

/// What a program is compiled as.
#[derive(Debug, Clone)]
pub(crate) enum SourceKind {
    /// What a client sends: a computation, which is partitioned if it is over several islands.
    Whole,
    /// Collectives between islands, as a client writes them or as they were partitioned off.
    Exchange {
        /// Whether they were partitioned off.
        is_crossing: bool,
    },
    /// A computation that each of several islands performs alike.
    OfEachIsland {
        /// The devices of each island, in the order of its device assignment.
        members: Arc<[Arc<[DeviceId]>]>,
        /// Whether its first parameter is the number of the island.
        takes_island: bool,
    },
    /// A Python function of a client.
    Colocated(Arc<Colocated>),
}

impl CompileSource {
    /// Returns the source of a Python function.
    pub fn colocated(
        function: Colocated,
        program: Vec<u8>,
        devices: Arc<[DeviceId]>,
    ) -> CompileSource {
        let kind = SourceKind::Colocated(Arc::new(function));
        Self { program: Arc::new(program), options: Arc::default(), devices, grid: (1, 1), kind }
    }

    /// Returns the source of a computation.
    pub fn computation(
        program: Vec<u8>,
        options: Vec<u8>,
        devices: Arc<[DeviceId]>,
        grid: (u32, u32),
    ) -> CompileSource {
        let (program, options) = (Arc::new(program), Arc::new(options));
        Self { program, options, devices, grid, kind: SourceKind::Whole }
    }

    /// Returns whether it is one computation, on devices of one island.
    pub fn is_whole(&self) -> bool {
        matches!(self.kind, SourceKind::Whole)
    }

    /// Fails unless there is one device for each replica of each partition.
    pub fn check_grid(&self) -> Result<(), Status> {
        let devices = match &self.kind {
            SourceKind::OfEachIsland { members, .. } => members[0].len(),
            SourceKind::Whole => self.devices.len(),
            SourceKind::Exchange { .. } | SourceKind::Colocated(_) => return Ok(()),
        };
        let grid = self.grid;
        if devices as u64 == u64::from(grid.0) * u64::from(grid.1) {
            return Ok(());
        }
        Err(Status::new(
            Code::InvalidArgument,
            format!(
                "a program of {} replicas x {} partitions needs {} devices; its device assignment \
                 names {devices}",
                grid.0,
                grid.1,
                grid.0 * grid.1,
            ),
        ))
    }
}
