//! Moving an array from any sharding to any other, host to host.
//!
//! Every distinct region of the target is cut where source shards meet it. Each piece leaves one
//! replica of the source and enters each target island once, at one host; that host passes it on
//! to the other hosts of its island that hold the same region. So each byte crosses the
//! data-centre network once per target island.

use std::collections::BTreeMap;

use base::{HostId, IslandId, TransferTag};
use fabric::Cluster;
use ir::{ArraySpec, Region};

use crate::seam::Piece;

/// What each host must send and receive.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Plan {
    pub sends: BTreeMap<HostId, Vec<(u32, Region, TransferTag, HostId)>>,
    pub receives: BTreeMap<HostId, Receive>,
}

/// What one host receives.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Receive {
    pub shards: Vec<(Vec<u32>, Vec<Piece>)>,
    pub relays: Vec<(TransferTag, TransferTag, HostId)>,
}

/// Device positions that hold one region.
struct Holders {
    region: Region,
    positions: Vec<u32>,
}

/// Plans the transfer of `source` to `target`, which have one shape.
///
/// Where one of the shardings does not say which region a shard holds, shards correspond by
/// position; the caller has checked that there are equally many.
pub(crate) fn plan(
    cluster: &Cluster,
    source: &ArraySpec,
    target: &ArraySpec,
    mut next_tag: impl FnMut() -> TransferTag,
) -> Plan {
    let (sources, targets) = match (holders(source), holders(target)) {
        (Some(sources), Some(targets)) => (sources, targets),
        _ => (by_position(source), by_position(target)),
    };
    let mut plan = Plan::default();
    for (turn, wanted) in targets.iter().enumerate() {
        for hosts in by_island(cluster, target, &wanted.positions) {
            let entry = *hosts.keys().nth(turn % hosts.len()).expect("a region has a holder");
            let pieces = sources
                .iter()
                .filter_map(|held| Some((held, held.region.intersect(&wanted.region)?)));
            for (held, shared) in pieces {
                let position = choose_replica(cluster, source, &held.positions, entry, turn);
                let from = host_of(cluster, source, position);
                let tag = next_tag();
                let part = shared.relative_to(&held.region);
                plan.sends.entry(from).or_default().push((position, part, tag, entry));
                let place = shared.relative_to(&wanted.region);
                for (&host, positions) in &hosts {
                    let (tag, from) = if host == entry {
                        (tag, from)
                    } else {
                        let onward = next_tag();
                        let relays = &mut plan.receives.entry(entry).or_default().relays;
                        relays.push((tag, onward, host));
                        (onward, entry)
                    };
                    let piece = Piece { tag, from, region: place.clone() };
                    add_piece(plan.receives.entry(host).or_default(), positions, piece);
                }
            }
        }
    }
    plan
}

fn add_piece(receive: &mut Receive, positions: &[u32], piece: Piece) {
    match receive.shards.iter_mut().find(|shard| shard.0 == positions) {
        Some(shard) => shard.1.push(piece),
        None => receive.shards.push((positions.to_vec(), vec![piece])),
    }
}

/// Groups device positions by the region they hold; none if the sharding does not say.
fn holders(spec: &ArraySpec) -> Option<Vec<Holders>> {
    let mut groups: Vec<Holders> = Vec::new();
    let mut known: std::collections::HashMap<Region, usize> = std::collections::HashMap::new();
    for position in 0..spec.sharding.devices.len() {
        let region = spec.sharding.region(&spec.dims, position)?;
        match known.get(&region) {
            Some(&group) => groups[group].positions.push(position as u32),
            None => {
                known.insert(region.clone(), groups.len());
                groups.push(Holders { region, positions: vec![position as u32] });
            }
        }
    }
    Some(groups)
}

/// Gives every position a region of its own: the shards laid out along a first axis.
fn by_position(spec: &ArraySpec) -> Vec<Holders> {
    (0..spec.sharding.devices.len())
        .map(|position| {
            let dims = spec.sharding.shard_dims(&spec.dims, position);
            let start: Vec<i64> = std::iter::once(position as i64)
                .chain(std::iter::repeat_n(0, dims.len()))
                .collect();
            let size: Vec<i64> = std::iter::once(1).chain(dims.iter().copied()).collect();
            Holders { region: Region::new(&start, &size), positions: vec![position as u32] }
        })
        .collect()
}

fn host_of(cluster: &Cluster, spec: &ArraySpec, position: u32) -> HostId {
    let device = spec.sharding.devices[position as usize];
    cluster.device(device).expect("specs name known devices").host
}

/// The hosts that hold one region, with their positions, island by island.
fn by_island(
    cluster: &Cluster,
    spec: &ArraySpec,
    positions: &[u32],
) -> Vec<BTreeMap<HostId, Vec<u32>>> {
    let mut islands: BTreeMap<IslandId, BTreeMap<HostId, Vec<u32>>> = BTreeMap::new();
    for &position in positions {
        let host = host_of(cluster, spec, position);
        let island = cluster.host(host).expect("devices name known hosts").island;
        islands.entry(island).or_default().entry(host).or_default().push(position);
    }
    islands.into_values().collect()
}

/// The replica to send from: on the target host, else on its island, else each in turn.
fn choose_replica(
    cluster: &Cluster,
    spec: &ArraySpec,
    positions: &[u32],
    entry: HostId,
    turn: usize,
) -> u32 {
    let island = |host: HostId| cluster.host(host).expect("devices name known hosts").island;
    let near = |same: &dyn Fn(HostId) -> bool| {
        positions.iter().copied().find(|&position| same(host_of(cluster, spec, position)))
    };
    near(&|host| host == entry)
        .or_else(|| near(&|host| island(host) == island(entry)))
        .unwrap_or(positions[turn % positions.len()])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base::DeviceId;
    use fabric::IslandSpec;
    use ir::{DType, Partition, Sharding};

    use super::*;

    fn spec(devices: std::ops::Range<u32>, dims: &[i64], partition: Partition) -> ArraySpec {
        ArraySpec {
            dtype: DType::U8,
            dims: dims.into(),
            sharding: Sharding {
                devices: devices.map(DeviceId).collect(),
                memory: None,
                partition,
            },
        }
    }

    fn tiles(counts: &[i64], tile_of: Vec<u32>) -> Partition {
        Partition::Tiled { counts: counts.into(), tile_of: tile_of.into() }
    }

    fn tags() -> impl FnMut() -> TransferTag {
        let mut next = 0;
        move || {
            next += 1;
            TransferTag(next)
        }
    }

    /// Carries a plan out on arrays of bytes and returns what each target position holds.
    fn carry_out(plan: &Plan, source: &ArraySpec, target: &ArraySpec) -> Vec<Vec<u8>> {
        let at = |spec: &ArraySpec, region: &Region, index: usize| -> usize {
            let mut rest = index as i64;
            let mut flat = 0;
            let mut stride = 1;
            for axis in (0..spec.dims.len()).rev() {
                let inner = rest % region.size[axis];
                rest /= region.size[axis];
                flat += (region.start[axis] + inner) * stride;
                stride *= spec.dims[axis];
            }
            flat as usize
        };
        let mut messages: BTreeMap<TransferTag, Vec<u8>> = BTreeMap::new();
        for (position, part, tag, _) in plan.sends.values().flatten() {
            let shard = source.sharding.region(&source.dims, *position as usize).unwrap();
            let start: Vec<i64> = part.start.iter().zip(&shard.start).map(|(a, b)| a + b).collect();
            let whole = Region::new(&start, &part.size);
            let bytes =
                (0..part.elements() as usize).map(|i| at(source, &whole, i) as u8).collect();
            assert!(messages.insert(*tag, bytes).is_none());
        }
        for (tag, onward, _) in plan.receives.values().flat_map(|receive| &receive.relays) {
            let copy = messages[tag].clone();
            messages.insert(*onward, copy);
        }
        let mut held: Vec<Vec<u8>> = vec![Vec::new(); target.sharding.devices.len()];
        for (positions, pieces) in plan.receives.values().flat_map(|receive| &receive.shards) {
            for &position in positions {
                let region = target.sharding.region(&target.dims, position as usize).unwrap();
                let shard = ArraySpec { dims: region.size.clone(), ..target.clone() };
                let bytes = &mut held[position as usize];
                bytes.resize(region.elements() as usize, 255);
                for piece in pieces {
                    for (index, &byte) in messages[&piece.tag].iter().enumerate() {
                        bytes[at(&shard, &piece.region, index)] = byte;
                    }
                }
            }
        }
        held
    }

    #[test]
    fn any_sharding_reaches_any_other() {
        let cluster = Cluster::new(&IslandSpec::parse("2x2x2").unwrap());
        let dims = [4, 6];
        let partitions = [
            Partition::Replicated,
            tiles(&[4, 1], vec![0, 1, 2, 3]),
            tiles(&[2, 2], vec![3, 1, 2, 0]),
            tiles(&[1, 2], vec![0, 1, 0, 1]),
            tiles(&[1, 4], vec![0, 1, 2, 3]),
        ];
        for from in &partitions {
            for to in &partitions {
                let source = spec(0..4, &dims, from.clone());
                let target = spec(4..8, &dims, to.clone());
                let plan = plan(&cluster, &source, &target, tags());
                let held = carry_out(&plan, &source, &target);
                for (position, bytes) in held.iter().enumerate() {
                    let region = target.sharding.region(&dims, position).unwrap();
                    let expected: Vec<u8> = (0..region.size[0])
                        .flat_map(|row| (0..region.size[1]).map(move |column| (row, column)))
                        .map(|(r, c)| ((region.start[0] + r) * 6 + region.start[1] + c) as u8)
                        .collect();
                    assert_eq!(bytes, &expected, "{from:?} to {to:?} at {position}");
                }
            }
        }
    }

    #[test]
    fn each_byte_crosses_between_islands_once() {
        let cluster = Cluster::new(&IslandSpec::parse("2x2x2").unwrap());
        let source = spec(0..4, &[8], tiles(&[4], vec![0, 1, 2, 3]));
        let target = spec(4..8, &[8], Partition::Replicated);
        let plan = plan(&cluster, &source, &target, tags());
        let crossing: u64 = plan.sends.values().flatten().map(|send| send.1.elements()).sum();
        assert_eq!(crossing, 8);
        let relayed: usize = plan.receives.values().map(|receive| receive.relays.len()).sum();
        assert_eq!(relayed, 4, "the second host of the island gets its copy from the first");
        let _: Arc<[DeviceId]> = target.sharding.devices;
    }
}
