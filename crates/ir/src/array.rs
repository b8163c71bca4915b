//! The static description of one logical array.

use base::Bytes;

use crate::{DType, Dims, Sharding};

/// Element type, shape and sharding of a logical array.
#[derive(Clone, PartialEq, Debug)]
pub struct ArraySpec {
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole array.
    pub dims: Dims,
    /// How the array is partitioned over devices.
    pub sharding: Sharding,
}

impl ArraySpec {
    /// Bytes of the whole array, each element once.
    pub fn bytes(&self) -> Bytes {
        let extents = self.dims.iter().map(|&extent| extent.max(0) as u64);
        let elements = extents.fold(1, u64::saturating_mul);
        Bytes(elements.saturating_mul(self.dtype.bits()) / 8)
    }

    /// Bytes of the shard at `position`.
    pub fn shard_bytes(&self, position: usize) -> Bytes {
        let dims = self.sharding.shard_dims(&self.dims, position);
        let elements: u64 = dims.iter().map(|&extent| extent.max(0) as u64).product();
        Bytes(elements * self.dtype.bits() / 8)
    }

    /// Bytes held over all devices, replicas counted.
    pub fn device_bytes(&self) -> Bytes {
        match &self.sharding.partition {
            crate::Partition::Uneven { .. } => {
                (0..self.sharding.devices.len()).map(|position| self.shard_bytes(position)).sum()
            }
            _ => Bytes(self.shard_bytes(0).0 * self.sharding.devices.len() as u64),
        }
    }
}
