//! Validation of requests. A request that passes these checks cannot harm a host, whatever client
//! made it; one that does not is rejected with an error that says what to change.

use base::{Code, Status};
use ir::{ArraySpec, DType, Partition};

use crate::events::PutShard;
use crate::objects::Buffer;

/// Maximum number of elements of an array, and of its largest extent.
const ELEMENT_LIMIT: i64 = 1 << 48;
/// Maximum number of axes of an array, as in NumPy.
pub const RANK_LIMIT: usize = 64;
/// Bytes that a strided read may span beyond twice its size.
const STRIDE_SLACK_BYTES: i64 = 4096;

/// Returns the error of a request that makes no sense.
pub(crate) fn invalid(message: impl Into<String>) -> Status {
    Status::new(Code::InvalidArgument, message)
}

/// Fails if an array has too many axes or elements, or a negative extent.
pub(crate) fn check_shape(dims: &[i64]) -> Result<(), Status> {
    if dims.len() > RANK_LIMIT {
        return Err(invalid(format!("an array of {} axes; at most {RANK_LIMIT}", dims.len())));
    }
    let within = |extent: &i64| (0..=ELEMENT_LIMIT).contains(extent);
    let elements = dims.iter().try_fold(1_i64, |product, extent| product.checked_mul(*extent));
    if dims.iter().all(within) && elements.is_some_and(|count| count <= ELEMENT_LIMIT) {
        return Ok(());
    }
    let shape = &dims[..dims.len().min(8)];
    Err(invalid(format!("an array of shape {shape:?} has over 2^48 elements or a negative extent")))
}

/// Fails unless the sharding of an array fits its shape.
pub(crate) fn check_partition(spec: &ArraySpec) -> Result<(), Status> {
    let (rank, count) = (spec.dims.len(), spec.sharding.devices.len());
    let fits = match &spec.sharding.partition {
        Partition::Replicated => true,
        Partition::Tiled { counts, tile_of } => {
            let tiles = counts.iter().try_fold(1_i64, |tiles, &count| tiles.checked_mul(count));
            counts.len() == rank
                && counts.iter().all(|&count| count > 0)
                && tile_of.len() == count
                && tiles.is_some_and(|tiles| tile_of.iter().all(|&tile| i64::from(tile) < tiles))
        }
        Partition::Even { shard } => {
            check_shape(shard)?;
            true
        }
        Partition::Uneven { shards } => {
            for shard in shards.iter() {
                check_shape(shard)?;
            }
            shards.len() == count
        }
    };
    if fits {
        return Ok(());
    }
    Err(invalid(format!("the sharding does not fit an array of {rank} axes over {count} devices")))
}

/// Fails unless the uploads fill every shard of `spec` exactly once, with the right number of
/// bytes.
pub(crate) fn check_uploads(
    spec: &ArraySpec,
    shards: &[PutShard],
    uploads: &[bytes::Bytes],
) -> Result<(), Status> {
    let mut filled = vec![false; spec.sharding.devices.len()];
    for (shard, data) in shards.iter().zip(uploads) {
        for &position in &shard.positions {
            let count = filled.len();
            let Some(seen) = filled.get_mut(position as usize) else {
                return Err(invalid(format!(
                    "shard {position} is named; the sharding has {count} shards"
                )));
            };
            if std::mem::replace(seen, true) {
                return Err(invalid(format!("shard {position} is filled twice")));
            }
            let wanted = spec.sharding.shard_dims(&spec.dims, position as usize);
            if wanted != shard.dims {
                return Err(invalid(format!(
                    "shard {position} has shape {wanted:?}; the host buffer has {:?}",
                    shard.dims
                )));
            }
        }
        check_upload(spec.dtype, shard, data.len() as u64)?;
    }
    match filled.iter().position(|filled| !filled) {
        None => Ok(()),
        Some(position) => Err(invalid(format!("no host buffer fills shard {position}"))),
    }
}

fn check_upload(dtype: DType, shard: &PutShard, given: u64) -> Result<(), Status> {
    check_shape(&shard.dims)?;
    if let Some(strides) = &shard.byte_strides {
        // The host checks whether strided elements lie within the bytes.
        if strides.len() != shard.dims.len() {
            return Err(wrong_strides(strides, shard.dims.len()));
        }
        return Ok(());
    }
    let wanted = shard.dims.iter().product::<i64>() as u64 * dtype.bits() / 8;
    if given == wanted || matches!(dtype, DType::Token | DType::Str) {
        return Ok(());
    }
    Err(invalid(format!(
        "a host buffer of {given} bytes is given for {:?} elements of {}, which take {wanted}",
        shard.dims,
        dtype.name()
    )))
}

fn wrong_strides(strides: &[i64], rank: usize) -> Status {
    invalid(format!("{} strides are given for {rank} axes", strides.len()))
}

/// Fails if the bytes of an array, laid out by `strides`, would span much more than their size.
pub(crate) fn check_read(spec: &ArraySpec, strides: &[i64]) -> Result<(), Status> {
    if strides.len() != spec.dims.len() {
        return Err(wrong_strides(strides, spec.dims.len()));
    }
    let bytes = spec.shard_bytes(0).0 as i64;
    let reach = spec.dims.iter().zip(strides).try_fold(0_i64, |reach, (&extent, &stride)| {
        let steps = if stride < 0 { None } else { (extent - 1).max(0).checked_mul(stride) };
        steps.and_then(|steps| reach.checked_add(steps))
    });
    match reach {
        Some(reach) if reach <= bytes.saturating_mul(2).saturating_add(STRIDE_SLACK_BYTES) => {
            Ok(())
        }
        _ => Err(invalid(format!(
            "strides {strides:?} are negative or spread {bytes} bytes over far more; read it \
             row-major"
        ))),
    }
}

/// Fails unless shard `from` of `source` can be shared, unchanged, as shard `position` of `spec`.
pub(crate) fn check_shared(
    spec: &ArraySpec,
    position: usize,
    source: &Buffer,
    from: usize,
) -> Result<(), Status> {
    let given = &source.spec;
    let Some(&held) = given.sharding.devices.get(from) else {
        return Err(invalid(format!(
            "shard {from} is named of an array of {} shards",
            given.sharding.devices.len()
        )));
    };
    let device = spec.sharding.devices[position];
    if device != held {
        return Err(invalid(format!(
            "shard {position} is to lie on device {device} but the array given for it lies on \
             device {held}; move it there with jax.device_put"
        )));
    }
    let wanted = spec.sharding.shard_dims(&spec.dims, position);
    let found = given.sharding.shard_dims(&given.dims, from);
    // The tokens of effects have no elements; clients and programs write their shape differently.
    let is_shape = wanted == found || spec.dtype == DType::Token;
    if is_shape && spec.dtype == given.dtype {
        return Ok(());
    }
    Err(invalid(format!(
        "shard {position} is {wanted:?} of {}; the array given for it is {found:?} of {}",
        spec.dtype.name(),
        given.dtype.name()
    )))
}

/// Fails unless `spec` has the shape and dtype of `source`, on any devices.
pub(crate) fn check_same_array(source: &ArraySpec, spec: &ArraySpec) -> Result<(), Status> {
    if source.dims == spec.dims && source.dtype == spec.dtype {
        return Ok(());
    }
    Err(invalid(format!(
        "an array of shape {:?} of {} cannot be moved into one of shape {:?} of {}",
        source.dims,
        source.dtype.name(),
        spec.dims,
        spec.dtype.name()
    )))
}

/// Fails unless each shard of `spec` has the size of that of `source`, on the same device.
pub(crate) fn check_bitcast(source: &ArraySpec, spec: &ArraySpec) -> Result<(), Status> {
    let same_bytes =
        || (0..spec.sharding.devices.len()).all(|p| source.shard_bytes(p) == spec.shard_bytes(p));
    if source.sharding.devices == spec.sharding.devices && same_bytes() {
        return Ok(());
    }
    Err(invalid("a bitcast keeps devices and bytes; move or reshape the array first"))
}

/// Fails unless as many items are given as are expected.
pub(crate) fn check_counts(what: &str, wanted: usize, given: usize) -> Result<(), Status> {
    if wanted == given {
        return Ok(());
    }
    Err(invalid(format!("{given} {what} are given where {wanted} are needed")))
}

#[cfg(test)]
mod tests {
    use base::DeviceId;
    use ir::{Dims, Sharding};

    use super::*;

    fn spec(dims: &[i64], partition: Partition, devices: u32) -> ArraySpec {
        let sharding =
            Sharding { devices: (0..devices).map(DeviceId).collect(), memory: None, partition };
        ArraySpec { dtype: DType::F32, dims: dims.into(), sharding }
    }

    #[test]
    fn shapes_have_limits() {
        assert!(check_shape(&[1 << 24, 1 << 24]).is_ok());
        assert!(check_shape(&[0, 1 << 48]).is_ok());
        for bad in [&[-1][..], &[1 << 62, 1 << 62], &[0, i64::MAX], &[1; 65]] {
            assert!(check_shape(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn tiles_exist() {
        let tiled = |counts: &[i64], tile_of: &[u32]| Partition::Tiled {
            counts: counts.into(),
            tile_of: tile_of.into(),
        };
        assert!(check_partition(&spec(&[4], tiled(&[2], &[0, 1]), 2)).is_ok());
        assert!(check_partition(&spec(&[4], tiled(&[2], &[0, 2]), 2)).is_err());
        assert!(check_partition(&spec(&[4], tiled(&[0], &[0, 0]), 2)).is_err());
        assert!(check_partition(&spec(&[4], tiled(&[2, 1], &[0, 1]), 2)).is_err());
        assert!(check_partition(&spec(&[4], tiled(&[2], &[0]), 2)).is_err());
    }

    #[test]
    fn uploads_fill_each_shard_once() {
        let halves = Partition::Tiled { counts: [2][..].into(), tile_of: [0, 1].into() };
        let spec = spec(&[4], halves, 2);
        let shard = |positions: &[u32]| PutShard {
            positions: positions.to_vec(),
            upload: 1,
            dims: Dims::from_slice(&[2]),
            byte_strides: None,
        };
        let data = |bytes: usize| bytes::Bytes::from(vec![0; bytes]);
        let check = |shards: &[PutShard], uploads: &[bytes::Bytes]| {
            check_uploads(&spec, shards, uploads).is_ok()
        };
        assert!(check(&[shard(&[0, 1])], &[data(8)]));
        assert!(check(&[shard(&[1]), shard(&[0])], &[data(8), data(8)]));
        assert!(!check(&[shard(&[0])], &[data(8)]));
        assert!(!check(&[shard(&[0, 0])], &[data(8)]));
        assert!(!check(&[shard(&[0, 2])], &[data(8)]));
        assert!(!check(&[shard(&[0, 1])], &[data(7)]));
    }

    #[test]
    fn strides_may_transpose_but_not_spread() {
        let spec = spec(&[3, 5], Partition::Replicated, 1);
        assert!(check_read(&spec, &[4, 12]).is_ok());
        for bad in [&[4][..], &[-4, 12], &[1 << 40, 4], &[i64::MAX, i64::MAX]] {
            assert!(check_read(&spec, bad).is_err(), "{bad:?}");
        }
    }
}
