//! Converts shardings of the protocol to and from [`ir::Sharding`].

use std::sync::Arc;

use base::{Code, DeviceId, Status};
use ir::{ArraySpec, Dims, Partition, Sharding};
use prost::Message;
use protocol::CompiledSharding;

use crate::dtype;
use crate::proto as p;

/// Version of serialized IFRT objects that is written; clients from jaxlib 0.8 on read it.
const SERDES_VERSION: i32 = 0;
const REPLICATED: i32 = 0;
const MAXIMAL: i32 = 1;
const OTHER: i32 = 3;

type Result<T> = std::result::Result<T, Status>;

pub(crate) fn invalid(message: impl Into<String>) -> Status {
    Status::new(Code::InvalidArgument, message)
}

pub(crate) fn message<M: Message + Default>(bytes: &[u8], what: &str) -> Result<M> {
    M::decode(bytes).map_err(|error| invalid(format!("{what} is malformed: {error}")))
}

pub(crate) fn dtype(proto: Option<&p::DTypeProto>) -> Result<ir::DType> {
    let kind = proto.map_or(0, |proto| proto.kind);
    dtype::from_kind(kind).ok_or_else(|| {
        Status::new(
            Code::Unimplemented,
            format!("element type number {kind} is not supported on Fairway's devices"),
        )
    })
}

pub(crate) fn dims(proto: Option<&p::ShapeProto>) -> Result<Dims> {
    let dims: Dims = proto.map_or(&[][..], |proto| &proto.dims).into();
    match dims.iter().find(|&&extent| extent < 0) {
        Some(extent) => Err(invalid(format!("a shape has the negative extent {extent}"))),
        None => Ok(dims),
    }
}

/// Decodes the description of an array.
pub(crate) fn spec(proto: Option<&p::ArraySpecProto>) -> Result<ArraySpec> {
    let proto = proto.ok_or_else(|| invalid("an array description is missing"))?;
    let dims = dims(proto.shape.as_ref())?;
    let sharding = sharding(proto.sharding.as_ref(), &dims)?;
    Ok(ArraySpec { dtype: dtype(proto.dtype.as_ref())?, dims, sharding })
}

/// Decodes a sharding of an array of shape `dims`.
pub(crate) fn sharding(proto: Option<&p::ShardingProto>, dims: &[i64]) -> Result<Sharding> {
    let serialized = proto
        .and_then(|proto| proto.serialized_sharding.as_ref())
        .ok_or_else(|| invalid("a sharding is missing"))?;
    let data = &serialized.data[..];
    match serialized.type_name.as_ref() {
        "xla::ifrt::SingleDeviceSharding" => {
            let proto: p::SingleDeviceShardingProto = message(data, "a sharding")?;
            Ok(Sharding::single(DeviceId(proto.device_id as u32), memory(proto.memory_kind)))
        }
        "xla::ifrt::HloSharding" => {
            let proto: p::HloShardingProto = message(data, "a sharding")?;
            let devices = devices(proto.devices.as_ref())?;
            let op = proto.xla_op_sharding.unwrap_or_default();
            let partition = partition(&op, dims.len(), devices.len())?;
            Ok(Sharding { devices, memory: memory(proto.memory_kind), partition })
        }
        "xla::ifrt::ConcreteEvenSharding" => {
            let proto: p::ConcreteEvenShardingProto = message(data, "a sharding")?;
            let partition = match proto.is_fully_replicated {
                true => Partition::Replicated,
                false => Partition::Even { shard: self::dims(proto.shard_shape.as_ref())? },
            };
            let devices = devices(proto.devices.as_ref())?;
            Ok(Sharding { devices, memory: memory(proto.memory_kind), partition })
        }
        "xla::ifrt::ConcreteSharding" => {
            let proto: p::ConcreteShardingProto = message(data, "a sharding")?;
            let devices = devices(proto.devices.as_ref())?;
            let shards: Vec<Dims> = proto
                .shard_shapes
                .iter()
                .map(|shape| self::dims(Some(shape)))
                .collect::<Result<_>>()?;
            if shards.len() != devices.len() {
                return Err(invalid(format!(
                    "a sharding over {} devices lists {} shard shapes",
                    devices.len(),
                    shards.len()
                )));
            }
            let partition = Partition::Uneven { shards: shards.into() };
            Ok(Sharding { devices, memory: memory(proto.memory_kind), partition })
        }
        other => Err(Status::new(
            Code::Unimplemented,
            format!("shardings of type {other} are not supported; use a NamedSharding"),
        )),
    }
}

fn memory(kind: Option<prost::alloc::string::String>) -> Option<Arc<str>> {
    kind.filter(|kind| !kind.is_empty()).map(Arc::from)
}

fn devices(proto: Option<&p::DeviceListProto>) -> Result<Arc<[DeviceId]>> {
    let ids = proto.map_or(&[][..], |proto| &proto.device_ids);
    if ids.is_empty() {
        return Err(invalid("a sharding names no device"));
    }
    Ok(ids.iter().map(|&id| DeviceId(id as u32)).collect())
}

/// Decodes the partition of an array of rank `rank` over `count` devices.
pub(crate) fn partition(op: &p::OpSharding, rank: usize, count: usize) -> Result<Partition> {
    if op.r#type != OTHER {
        return Ok(Partition::Replicated);
    }
    let grid = &op.tile_assignment_dimensions;
    if grid.len() < rank || product(grid) != Some(count as i64) {
        return Err(invalid(format!(
            "a sharding of a rank-{rank} array over {count} devices has the grid {grid:?}"
        )));
    }
    let order = device_order(op, count)?;
    if order.len() != count {
        let cells = order.len();
        return Err(invalid(format!("a sharding over {count} devices numbers {cells} of them")));
    }
    let copies: usize = grid[rank..].iter().product::<i64>() as usize;
    let mut tile_of = vec![u32::MAX; count];
    for (cell, &device) in order.iter().enumerate() {
        let held = tile_of.get_mut(device as usize);
        *held.ok_or_else(|| invalid(format!("a sharding names position {device} of {count}")))? =
            (cell / copies) as u32;
    }
    if tile_of.contains(&u32::MAX) {
        return Err(invalid("a sharding leaves a device without a tile"));
    }
    Ok(Partition::Tiled { counts: grid[..rank].into(), tile_of: tile_of.into() })
}

/// Returns the product of extents; `None` if an extent is below 1 or the product overflows.
fn product(extents: &[i64]) -> Option<i64> {
    extents.iter().try_fold(
        1_i64,
        |cells, &extent| {
            if extent < 1 { None } else { cells.checked_mul(extent) }
        },
    )
}

/// Returns the device position of each cell of the grid, in row-major order.
fn device_order(op: &p::OpSharding, count: usize) -> Result<Vec<i64>> {
    if !op.tile_assignment_devices.is_empty() {
        return Ok(op.tile_assignment_devices.clone());
    }
    let dims = &op.iota_reshape_dims;
    let axes: Vec<usize> = op.iota_transpose_perm.iter().map(|&axis| axis as usize).collect();
    let mut sorted = axes.clone();
    sorted.sort_unstable();
    if product(dims) != Some(count as i64) || !sorted.into_iter().eq(0..dims.len()) {
        return Err(invalid(format!(
            "a sharding over {count} devices numbers them by {dims:?} in the order {axes:?}"
        )));
    }
    let mut strides = vec![1; dims.len()];
    for axis in (0..dims.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * dims[axis + 1];
    }
    // Axes of extent 1 change nothing, and a client may name millions; few others fit.
    let varying: Vec<usize> = axes.into_iter().rev().filter(|&axis| dims[axis] > 1).collect();
    let cells = (0..count as i64).map(|cell| {
        let mut rest = cell;
        let mut device = 0;
        for &axis in &varying {
            device += rest % dims[axis] * strides[axis];
            rest /= dims[axis];
        }
        device
    });
    Ok(cells.collect())
}

/// Encodes a partition, by the compiler's own encoding if there is one. `count` is the number of
/// devices, used if the partition does not determine it.
pub(crate) fn to_op_sharding(cut: &CompiledSharding, count: usize) -> p::OpSharding {
    match p::OpSharding::decode(&cut.encoded[..]) {
        Ok(given) if !cut.encoded.is_empty() => given,
        _ => partition_to_op_sharding(&cut.partition, count),
    }
}

fn partition_to_op_sharding(partition: &Partition, count: usize) -> p::OpSharding {
    let Partition::Tiled { counts, tile_of } = partition else {
        return p::OpSharding {
            r#type: if count == 1 { MAXIMAL } else { REPLICATED },
            tile_assignment_dimensions: if count == 1 { vec![1] } else { vec![] },
            tile_assignment_devices: if count == 1 { vec![0] } else { vec![] },
            ..Default::default()
        };
    };
    if counts.iter().all(|&tiles| tiles == 1) {
        return partition_to_op_sharding(&Partition::Replicated, count.max(2));
    }
    // Values of an MPMD program may each be on a different number of devices.
    let count = tile_of.len();
    let tiles: i64 = counts.iter().product();
    let copies = count as i64 / tiles;
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&position| (tile_of[position], position));
    let mut grid = counts.to_vec();
    if copies > 1 {
        grid.push(copies);
    }
    p::OpSharding {
        r#type: OTHER,
        tile_assignment_dimensions: grid,
        tile_assignment_devices: order.iter().map(|&position| position as i64).collect(),
        replicate_on_last_tile_dim: copies > 1,
        ..Default::default()
    }
}

/// Encodes the sharding of a result.
pub(crate) fn to_sharding(sharding: &Sharding, cut: &CompiledSharding) -> p::ShardingProto {
    let ids = sharding.devices.iter().map(|device| device.0 as i32);
    let memory_kind = sharding.memory.as_ref().map(|memory| memory.to_string());
    let serialized = if sharding.devices.len() == 1 {
        let proto = p::SingleDeviceShardingProto {
            version_number: SERDES_VERSION,
            device_id: sharding.devices[0].0 as i32,
            memory_kind,
        };
        p::Serialized {
            type_name: "xla::ifrt::SingleDeviceSharding".into(),
            data: proto.encode_to_vec().into(),
        }
    } else {
        let device_ids = ids.collect();
        let proto = p::HloShardingProto {
            version_number: SERDES_VERSION,
            devices: Some(p::DeviceListProto { version_number: SERDES_VERSION, device_ids }),
            memory_kind,
            xla_op_sharding: Some(to_op_sharding(cut, sharding.devices.len())),
        };
        p::Serialized {
            type_name: "xla::ifrt::HloSharding".into(),
            data: proto.encode_to_vec().into(),
        }
    };
    p::ShardingProto { serialized_sharding: Some(serialized) }
}

/// Encodes an element type.
pub(crate) fn to_dtype(dtype: ir::DType) -> p::DTypeProto {
    p::DTypeProto { version_number: SERDES_VERSION, kind: dtype::to_kind(dtype) }
}

/// Encodes a shape.
pub(crate) fn to_shape(dims: &[i64]) -> p::ShapeProto {
    p::ShapeProto { version_number: SERDES_VERSION, dims: dims.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_survives_the_protocol() {
        let partitions = [
            (Partition::Tiled { counts: vec![2, 2].into(), tile_of: [0, 1, 2, 3].into() }, 4),
            (Partition::Tiled { counts: vec![4, 1].into(), tile_of: [3, 0, 2, 1].into() }, 4),
            (Partition::Tiled { counts: vec![1, 2].into(), tile_of: [0, 1, 0, 1].into() }, 4),
        ];
        for (partition, count) in partitions {
            let op = partition_to_op_sharding(&partition, count);
            assert_eq!(self::partition(&op, 2, count).unwrap(), partition);
            // Independent of the number of devices of other values of the program.
            assert_eq!(partition_to_op_sharding(&partition, 1), op);
            assert_eq!(partition_to_op_sharding(&partition, 9), op);
        }
    }

    #[test]
    fn iota_order_is_a_transposed_count() {
        let op = p::OpSharding {
            r#type: OTHER,
            tile_assignment_dimensions: vec![3, 2],
            iota_reshape_dims: vec![2, 3],
            iota_transpose_perm: vec![1, 0],
            ..Default::default()
        };
        assert_eq!(device_order(&op, 6).unwrap(), vec![0, 3, 1, 4, 2, 5]);
    }
}
