//! Shardings: which device holds which region of an array.

use std::sync::Arc;

use base::DeviceId;

use crate::{Dims, Region};

/// How an array is partitioned over the devices of a [`Sharding`].
#[derive(Clone, PartialEq, Debug)]
pub enum Partition {
    /// Every device holds the whole array.
    Replicated,
    /// The array is partitioned into a grid of equal tiles, `counts[axis]` along each axis; the device
    /// at position `p` holds tile `tile_of[p]`, counted in row-major order. Several devices may hold
    /// the same tile (replicas).
    Tiled {
        /// Tiles along each axis of the array.
        counts: Dims,
        /// Tile held by each device position.
        tile_of: Arc<[u32]>,
    },
    /// Every device holds a shard of this shape, at an unspecified offset.
    Even {
        /// Shape of each shard.
        shard: Dims,
    },
    /// Devices hold shards of individual shapes, at unspecified offsets.
    Uneven {
        /// Shape of each shard.
        shards: Arc<[Dims]>,
    },
}

/// The devices of an array, the memory kind on each, and how the array is partitioned.
#[derive(Clone, PartialEq, Debug)]
pub struct Sharding {
    /// Devices in logical order.
    pub devices: Arc<[DeviceId]>,
    /// Memory kind such as `device` or `pinned_host`; `None` is the device's default.
    pub memory: Option<Arc<str>>,
    /// How the array is partitioned.
    pub partition: Partition,
}

impl Sharding {
    /// Creates the sharding of an array that one device holds whole.
    pub fn single(device: DeviceId, memory: Option<Arc<str>>) -> Self {
        Self { devices: Arc::new([device]), memory, partition: Partition::Replicated }
    }

    /// Whether every device holds the whole array.
    pub fn is_replicated(&self) -> bool {
        match &self.partition {
            Partition::Replicated => true,
            Partition::Tiled { counts, .. } => counts.iter().all(|&count| count == 1),
            Partition::Even { .. } | Partition::Uneven { .. } => self.devices.len() == 1,
        }
    }

    /// Returns the shape of the shard at `position` of an array of shape `dims`. If an extent is not
    /// divisible, the last tiles along the axis are shorter.
    pub fn shard_dims(&self, dims: &[i64], position: usize) -> Dims {
        match &self.partition {
            Partition::Replicated => dims.into(),
            Partition::Even { shard } => shard.clone(),
            Partition::Uneven { shards } => shards[position].clone(),
            Partition::Tiled { .. } => self.tile(dims, position).size,
        }
    }

    /// Returns the region of the array at `position`; `None` if the sharding does not specify it.
    pub fn region(&self, dims: &[i64], position: usize) -> Option<Region> {
        match &self.partition {
            Partition::Replicated => Some(Region { start: zeros(dims), size: dims.into() }),
            Partition::Tiled { .. } => Some(self.tile(dims, position)),
            Partition::Even { .. } | Partition::Uneven { .. } if self.devices.len() == 1 => {
                Some(Region { start: zeros(dims), size: dims.into() })
            }
            Partition::Even { .. } | Partition::Uneven { .. } => None,
        }
    }

    /// Whether another sharding gives each device position the same region of an array. Unspecified
    /// regions count as equal, and so do all partitions of an array without elements, which compilers
    /// choose freely.
    pub fn cuts_like(&self, other: &Sharding, dims: &[i64]) -> bool {
        if dims.contains(&0) {
            return true;
        }
        let positions = 0..self.devices.len();
        positions.into_iter().all(|at| self.region(dims, at) == other.region(dims, at))
    }

    fn tile(&self, dims: &[i64], position: usize) -> Region {
        let Partition::Tiled { counts, tile_of } = &self.partition else {
            unreachable!("only a tiled sharding has tiles")
        };
        let mut rest = i64::from(tile_of[position]);
        let mut start = zeros(dims);
        let mut size: Dims = dims.into();
        for axis in (0..dims.len()).rev() {
            let extent = (dims[axis] + counts[axis] - 1) / counts[axis];
            let index = rest % counts[axis];
            rest /= counts[axis];
            start[axis] = (index * extent).min(dims[axis]);
            size[axis] = extent.min(dims[axis] - start[axis]);
        }
        Region { start, size }
    }
}

fn zeros(dims: &[i64]) -> Dims {
    Dims::from_elem(0, dims.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiled(counts: &[i64], tile_of: &[u32]) -> Sharding {
        Sharding {
            devices: (0..tile_of.len() as u32).map(DeviceId).collect(),
            memory: None,
            partition: Partition::Tiled { counts: counts.into(), tile_of: tile_of.into() },
        }
    }

    #[test]
    fn tiles_cover_the_array_once() {
        let sharding = tiled(&[2, 3], &[5, 4, 3, 2, 1, 0]);
        let dims = [4, 7];
        let mut seen = [[0; 7]; 4];
        for position in 0..6 {
            let region = sharding.region(&dims, position).unwrap();
            for row in 0..region.size[0] {
                for column in 0..region.size[1] {
                    let at = (region.start[0] + row, region.start[1] + column);
                    seen[at.0 as usize][at.1 as usize] += 1;
                }
            }
        }
        assert_eq!(seen, [[1; 7]; 4]);
    }

    #[test]
    fn no_elements_are_cut_alike() {
        let (halves, whole) = (tiled(&[2, 1], &[0, 1]), tiled(&[1, 1], &[0, 0]));
        assert!(halves.cuts_like(&whole, &[4, 0]));
        assert!(!halves.cuts_like(&whole, &[4, 1]));
    }

    #[test]
    fn a_scalar_is_held_whole() {
        let region = tiled(&[], &[0, 0]).region(&[], 1).unwrap();
        assert_eq!(region.elements(), 1);
    }
}
