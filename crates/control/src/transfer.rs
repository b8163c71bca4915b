//! Resharding transfers: moves an array from any sharding to any other, host to host.
//!
//! Every distinct region of the target is intersected with the source shards. Each piece is sent
//! from one replica of the source and enters each target island once, at one host, which forwards
//! it to the other hosts of its island that hold the same region. So each byte crosses the
//! data-centre network once per target island. Where the channels of hosts onto that network are
//! known, the crossing traffic is striped over them, and over those of idle hosts of the same
//! islands.

use std::collections::BTreeMap;

use base::{Bytes, Channel, HostId, IslandId, Ticks, TransferTag};
use ir::{ArraySpec, Region};
use protocol::{ReceivedShard, RelayHop, ShardPiece, ShardSend};
use topology::Cluster;

use crate::stripes::{self, Crossing, StripePath};

/// The messages that each host must send, receive and relay.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct TransferPlan {
    /// Pieces of source shards, with shards numbered by their positions in the array.
    pub sends: BTreeMap<HostId, Vec<ShardSend>>,
    pub receives: BTreeMap<HostId, Receive>,
    /// Messages relayed by hosts that need none of their contents.
    pub relays: BTreeMap<HostId, Vec<RelayHop>>,
}

/// The messages that one host receives.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Receive {
    pub shards: Vec<ReceivedShard>,
    pub relays: Vec<RelayHop>,
}

/// Device positions that hold the same region (replicas).
struct Holders {
    region: Region,
    positions: Vec<u32>,
}

/// The part of one source region that one island needs for one target region.
struct Shipment<'a> {
    held: &'a Holders,
    wanted: &'a Holders,
    /// Intersection of both regions.
    region: Region,
    from: HostId,
    entry: HostId,
    /// Hosts of the island that hold the target region, with their positions.
    hosts: BTreeMap<HostId, Vec<u32>>,
}

/// Plans the transfer of `source` to `target`, which have the same shape.
///
/// If one of the shardings does not say which region a shard holds, shards correspond by position;
/// the caller has checked that both have the same number.
pub(crate) fn plan(
    cluster: &Cluster,
    source: &ArraySpec,
    target: &ArraySpec,
    next_tag: impl FnMut() -> TransferTag,
) -> TransferPlan {
    let (sources, targets) = match (holders(source), holders(target)) {
        (Some(sources), Some(targets)) => (sources, targets),
        _ => (by_position(source), by_position(target)),
    };
    let mut shipments = Vec::new();
    for (turn, wanted) in targets.iter().enumerate() {
        for hosts in by_island(cluster, target, &wanted.positions) {
            let entry = *hosts.keys().nth(turn % hosts.len()).expect("a region has a holder");
            for (held, region) in shared(&sources, wanted) {
                let position = choose_replica(cluster, source, &held.positions, entry, turn);
                let from = host_of(cluster, source, position);
                let hosts = hosts.clone();
                shipments.push(Shipment { held, wanted, region, from, entry, hosts });
            }
        }
    }
    let lanes = lanes(cluster, source.dtype.bits(), &shipments);
    let mut planner =
        Planner { cluster, source, next_tag, plan: TransferPlan::default(), sends: vec![] };
    for (shipment, lanes) in shipments.iter().zip(lanes) {
        planner.ship(shipment, &lanes);
    }
    planner.done()
}

/// Returns the intersection of each source region with a target region. A target region without
/// elements is sent as one empty message of the equal source region, or of the first: so it is made
/// once its source is, and fails if that fails.
fn shared<'a>(sources: &'a [Holders], wanted: &Holders) -> Vec<(&'a Holders, Region)> {
    if wanted.region.elements() == 0 {
        let like = sources.iter().find(|held| held.region == wanted.region);
        let held = like.or(sources.first()).expect("an array has at least one shard");
        return vec![(held, wanted.region.clone())];
    }
    let share = |held: &'a Holders| Some((held, held.region.intersect(&wanted.region)?));
    sources.iter().filter_map(share).collect()
}

/// Returns the paths of each shipment.
fn lanes(cluster: &Cluster, bits: u64, shipments: &[Shipment]) -> Vec<Vec<StripePath>> {
    let island = |host: HostId| cluster.host(host).expect("devices name known hosts").island;
    let crosses = |shipment: &Shipment| island(shipment.from) != island(shipment.entry);
    let crossings: Vec<Crossing> = shipments
        .iter()
        .filter(|shipment| crosses(shipment))
        .map(|shipment| {
            let size = Bytes((shipment.region.elements() * bits).div_ceil(8));
            Crossing { from: shipment.from, to: shipment.entry, size }
        })
        .collect();
    let mut spread = stripes::lanes(cluster, &crossings).unwrap_or_default().into_iter();
    let lanes = shipments.iter().map(|shipment| {
        let lanes = if crosses(shipment) { spread.next() } else { None };
        // A crossing of zero bytes has no paths.
        let lanes = lanes.filter(|lanes| !lanes.is_empty());
        lanes.unwrap_or_else(|| vec![StripePath::direct(shipment.entry)])
    });
    lanes.collect()
}

struct Planner<'a, F> {
    cluster: &'a Cluster,
    source: &'a ArraySpec,
    next_tag: F,
    plan: TransferPlan,
    /// Start time, sender and contents of each message.
    sends: Vec<(Ticks, HostId, ShardSend)>,
}

impl<F: FnMut() -> TransferTag> Planner<'_, F> {
    fn ship(&mut self, shipment: &Shipment, lanes: &[StripePath]) {
        if let [lane] = lanes {
            return self.send(shipment, lane, &shipment.region);
        }
        let shares: Vec<u64> = lanes.iter().map(|lane| lane.share).collect();
        let parts = stripes::cut(&shipment.region, &shares);
        let bits = self.source.dtype.bits();
        let mut left: Vec<_> = parts
            .into_iter()
            .map(|part| part.map_or(Vec::new(), |part| stripes::messages(part, bits)).into_iter())
            .collect();
        // Interleaves the paths roughly in order of arrival, so that arrived messages can be copied
        // at once.
        while left.iter().any(|messages| messages.len() > 0) {
            for (lane, messages) in lanes.iter().zip(&mut left) {
                if let Some(message) = messages.next() {
                    self.send(shipment, lane, &message);
                }
            }
        }
    }

    /// Sends one message along a path: from the last host on it that holds the region, to the first
    /// that needs it.
    fn send(&mut self, shipment: &Shipment, lane: &StripePath, region: &Region) {
        let (cluster, source) = (self.cluster, self.source);
        let holder = |host: HostId| {
            let mut positions = shipment.held.positions.iter().copied();
            positions.find(|&position| host_of(cluster, source, position) == host)
        };
        let from = holder(shipment.from).expect("a replica was chosen there");
        let (mut at, mut position, mut steps) = (shipment.from, from, lane.steps.as_slice());
        for (number, &(_, host)) in lane.steps.iter().enumerate().rev().skip(1) {
            if let Some(held) = holder(host) {
                (at, position, steps) = (host, held, &lane.steps[number + 1..]);
                break;
            }
        }
        let wanted = steps.iter().position(|(_, host)| shipment.hosts.contains_key(host));
        let last = wanted.expect("a lane ends where it is wanted");
        let (channel, to) = steps[0];
        let mut tag = (self.next_tag)();
        let part = region.relative_to(&shipment.held.region);
        let outgoing = ShardSend { shard: position, region: part, tag, target: to, channel };
        self.sends.push((lane.start, at, outgoing));
        let mut from = at;
        for pair in steps[..=last].windows(2) {
            let [(_, here), (channel, to)] = *pair else { unreachable!("windows are of two") };
            let onward = (self.next_tag)();
            let relay = RelayHop { tag, source: from, onward, target: to, channel };
            self.plan.relays.entry(here).or_default().push(relay);
            (tag, from) = (onward, here);
        }
        self.deliver(shipment, region, (tag, from), steps[last].1);
    }

    /// Delivers a message to its entry host on an island, which forwards it to the others that need
    /// it.
    fn deliver(
        &mut self,
        shipment: &Shipment,
        region: &Region,
        (tag, from): (TransferTag, HostId),
        entry: HostId,
    ) {
        let place = region.relative_to(&shipment.wanted.region);
        for (&host, positions) in &shipment.hosts {
            let (tag, from) = if host == entry {
                (tag, from)
            } else {
                let onward = (self.next_tag)();
                let relays = &mut self.plan.receives.entry(entry).or_default().relays;
                relays.push(RelayHop {
                    tag,
                    source: from,
                    onward,
                    target: host,
                    channel: Channel::INSIDE,
                });
                (onward, entry)
            };
            let piece = ShardPiece { tag, source: from, region: place.clone() };
            add_piece(self.plan.receives.entry(host).or_default(), positions, piece);
        }
    }

    fn done(mut self) -> TransferPlan {
        self.sends.sort_by_key(|send| send.0);
        for (_, host, outgoing) in self.sends {
            self.plan.sends.entry(host).or_default().push(outgoing);
        }
        self.plan
    }
}

fn add_piece(receive: &mut Receive, positions: &[u32], piece: ShardPiece) {
    match receive.shards.iter_mut().find(|shard| shard.positions == positions) {
        Some(shard) => shard.pieces.push(piece),
        None => {
            let positions = positions.to_vec();
            receive.shards.push(ReceivedShard { positions, pieces: vec![piece] });
        }
    }
}

/// Groups device positions by the region they hold; `None` if the sharding does not say.
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

/// Gives every position a region of its own, with the shards stacked along a new first axis.
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

/// Returns the hosts that hold one region, with their positions, grouped by island.
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

/// Chooses the replica to send from: on the target host, else on its island, else round-robin.
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
mod tests;
