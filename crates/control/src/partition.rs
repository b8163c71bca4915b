//! A computation over several islands that a host partitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{DeviceId, IslandId, Status};
use protocol::PartitionedFunction;

use crate::dataflow::malformed;
use crate::programs::Purpose;
use crate::sources::{CompileSource, SourceKind};

/// A computation over several islands, until a host has partitioned it.
#[derive(Debug)]
pub(crate) struct Partitioning {
    pub source: CompileSource,
    pub purpose: Purpose,
}

impl Partitioning {
    /// Returns the sources of the functions that the computation consists of.
    ///
    /// # Arguments
    /// - `members`: for each island, the program's devices in the order of the island's computations.
    ///
    /// # Errors
    /// The members are not all devices of the program, each once, and equally many of each island.
    pub fn functions(
        &self,
        functions: Vec<PartitionedFunction>,
        members: &[Vec<u32>],
        island_of: impl Fn(DeviceId) -> IslandId,
    ) -> Result<Vec<CompileSource>, Status> {
        let members = self.members(members, island_of)?;
        let size = members[0].len() as u32;
        let source = |PartitionedFunction { is_crossing, takes_island, code }| {
            let kind = if is_crossing {
                SourceKind::Exchange { is_crossing }
            } else {
                SourceKind::OfEachIsland { members: members.clone(), takes_island }
            };
            CompileSource {
                program: Arc::new(code),
                options: self.source.options.clone(),
                devices: self.source.devices.clone(),
                grid: (1, size),
                kind,
            }
        };
        Ok(functions.into_iter().map(source).collect())
    }

    /// Returns the devices of each island, as a host has ordered them.
    fn members(
        &self,
        members: &[Vec<u32>],
        island_of: impl Fn(DeviceId) -> IslandId,
    ) -> Result<Arc<[Arc<[DeviceId]>]>, Status> {
        let devices = &self.source.devices;
        let mut all: Vec<u32> = members.iter().flatten().copied().collect();
        all.sort_unstable();
        let is_each_once = all.iter().copied().eq(0..devices.len() as u32);
        let is_equal = members.iter().all(|own| own.len() == members[0].len());
        if !is_each_once || !is_equal {
            return Err(malformed(&format!("its islands have the devices {members:?}")));
        }
        let of = |own: &Vec<u32>| own.iter().map(|&number| devices[number as usize]).collect();
        let members: Arc<[Arc<[DeviceId]>]> = members.iter().map(of).collect();
        let mut islands: BTreeMap<IslandId, usize> = BTreeMap::new();
        for own in members.iter() {
            if own.iter().any(|&device| island_of(device) != island_of(own[0])) {
                return Err(malformed(&"one part of it is on devices of several islands"));
            }
            *islands.entry(island_of(own[0])).or_default() += 1;
        }
        if islands.values().any(|&parts| parts > 1) {
            return Err(malformed(&"two parts of it are on one island"));
        }
        Ok(members)
    }
}
