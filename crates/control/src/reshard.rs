//! Chooses how to reshard an array: share its buffers, copy within hosts, or exchange messages.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BufferId, Bytes, ClientId, Code, DeviceId, HostId, Status, TransferTag};
use ir::ArraySpec;
use protocol::{AssembledShard, Command};
use topology::Cluster;

use crate::transfer;

/// Strategy for converting an array from one sharding to another.
#[derive(Debug)]
pub(crate) enum ShardMove {
    /// No data is moved; the result may share the source's buffers.
    Share,
    /// These commands, each host's in this order.
    Commands(Vec<(HostId, Command)>),
}

/// Plans the conversion of `source` to `target`; both are on `cluster` and have the same shape.
///
/// # Arguments
/// - `client`: the client, which orders the messages on each channel.
/// - `may_share`: the result may share buffers with the source.
///
/// # Errors
/// One of the shardings does not say which region a shard holds, and shards cannot correspond by
/// position, as their numbers differ.
pub(crate) fn plan(
    cluster: &Cluster,
    source: (BufferId, &ArraySpec),
    target: (BufferId, &Arc<ArraySpec>),
    (client, may_share): (ClientId, bool),
    next_tag: impl FnMut() -> TransferTag,
) -> Result<ShardMove, Status> {
    let (from, to) = (&source.1.sharding, &target.1.sharding);
    let same_cut = from.partition == to.partition
        || (from.is_replicated() && to.is_replicated())
        || from.devices.len() == 1 && to.devices.len() == 1;
    if same_cut && may_share && from.devices == to.devices && from.memory == to.memory {
        return Ok(ShardMove::Share);
    }
    let host = |device: DeviceId| host_of(cluster, device);
    let stays = from.devices.len() == to.devices.len()
        && from.devices.iter().zip(to.devices.iter()).all(|(&a, &b)| host(a) == host(b));
    if same_cut && stays {
        let (buffer, spec) = (target.0, target.1.clone());
        let copy = Command::Copy { source: source.0, buffer, spec };
        let hosts = hosts_of(cluster, &to.devices);
        return Ok(ShardMove::Commands(
            hosts.into_iter().map(|host| (host, copy.clone())).collect(),
        ));
    }
    let known = |spec: &ArraySpec| spec.sharding.region(&spec.dims, 0).is_some();
    if from.devices.len() != to.devices.len() && !(known(source.1) && known(target.1)) {
        return Err(Status::new(
            Code::Unimplemented,
            "an array whose sharding does not say which shard is where cannot be resharded to \
             another number of devices; give it a NamedSharding first",
        ));
    }
    Ok(ShardMove::Commands(messages(cluster, source, target, client, next_tag)))
}

fn messages(
    cluster: &Cluster,
    source: (BufferId, &ArraySpec),
    target: (BufferId, &Arc<ArraySpec>),
    client: ClientId,
    next_tag: impl FnMut() -> TransferTag,
) -> Vec<(HostId, Command)> {
    let plan = transfer::plan(cluster, source.1, target.1, next_tag);
    let mut commands = Vec::with_capacity(plan.sends.len() + plan.receives.len());
    for (host, mut pieces) in plan.sends {
        for piece in &mut pieces {
            piece.shard = local_shard(cluster, source.1, piece.shard);
        }
        commands.push((host, Command::Send { source: source.0, pieces, client }));
    }
    commands
        .extend(plan.relays.into_iter().map(|(host, relays)| (host, Command::Relay { relays })));
    for (host, receive) in plan.receives {
        let (buffer, spec) = (target.0, target.1.clone());
        let (shards, relays) = (receive.shards, receive.relays);
        commands.push((host, Command::Receive { buffer, spec, shards, relays }));
    }
    commands
}

/// Returns the bytes that a command receives from other hosts.
pub(crate) fn brought(command: &Command) -> Bytes {
    let Command::Receive { spec, shards, .. } = command else { return Bytes(0) };
    let elements: u64 =
        shards.iter().flat_map(|shard| &shard.pieces).map(|piece| piece.region.elements()).sum();
    Bytes(elements * spec.dtype.bits() / 8)
}

/// Returns the commands that make `target` share whole shards: at each position, the given shard of
/// the given buffer.
pub(crate) fn share(
    cluster: &Cluster,
    target: (BufferId, &Arc<ArraySpec>),
    sources: &[(BufferId, &ArraySpec, u32)],
) -> Vec<(HostId, Command)> {
    let mut shards: BTreeMap<HostId, Vec<_>> = BTreeMap::new();
    for (position, &(source, spec, from)) in sources.iter().enumerate() {
        let host = host_of(cluster, target.1.sharding.devices[position]);
        let shard = local_shard(cluster, spec, from);
        let shard = AssembledShard { position: position as u32, source, shard };
        shards.entry(host).or_default().push(shard);
    }
    let (buffer, spec) = (target.0, target.1);
    let assemble = |shards| Command::AssembleShards { buffer, spec: spec.clone(), shards };
    shards.into_iter().map(|(host, shards)| (host, assemble(shards))).collect()
}

/// Returns the host that owns a device.
pub(crate) fn host_of(cluster: &Cluster, device: DeviceId) -> HostId {
    cluster.device(device).expect("device ids are checked where they enter").host
}

/// Returns the hosts that own any of `devices`, in the order in which they first appear.
pub(crate) fn hosts_of(cluster: &Cluster, devices: &[DeviceId]) -> Vec<HostId> {
    let mut hosts: Vec<HostId> = Vec::new();
    for &device in devices {
        let host = host_of(cluster, device);
        if hosts.last() != Some(&host) && !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    hosts
}

/// Returns the number of `devices` that each host owns.
pub(crate) fn devices_of_each(
    cluster: &Cluster,
    devices: &[DeviceId],
    hosts: &[HostId],
) -> Arc<[u32]> {
    let mut counts: BTreeMap<HostId, u32> = BTreeMap::new();
    for &device in devices {
        *counts.entry(host_of(cluster, device)).or_default() += 1;
    }
    hosts.iter().map(|host| counts.get(host).copied().unwrap_or_default()).collect()
}

/// Returns the index of the shard at `position` among the shards that its host holds.
fn local_shard(cluster: &Cluster, spec: &ArraySpec, position: u32) -> u32 {
    let devices = &spec.sharding.devices;
    let host = host_of(cluster, devices[position as usize]);
    let before = devices[..position as usize].iter();
    before.filter(|&&device| host_of(cluster, device) == host).count() as u32
}
