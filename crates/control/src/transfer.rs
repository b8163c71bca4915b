//! Moving an array from any sharding to any other, host to host.
//!
//! Every distinct region of the target is cut where source shards meet it. Each piece leaves one
//! replica of the source and enters each target island once, at one host; that host passes it on
//! to the other hosts of its island that hold the same region. So each byte crosses the
//! data-centre network once per target island. Where the channels of hosts onto that network are
//! known, what crosses is spread over them, and over those of hosts beside.

use std::collections::BTreeMap;

use base::{Bytes, Channel, HostId, IslandId, Ticks, TransferTag};
use fabric::Cluster;
use ir::{ArraySpec, Region};

use crate::command::{Outgoing, Piece, Relay};
use crate::stripes::{self, Crossing, Lane};

/// What each host must send, receive and pass on.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Plan {
    /// Pieces of source shards, which are named by their positions in the array.
    pub sends: BTreeMap<HostId, Vec<Outgoing>>,
    pub receives: BTreeMap<HostId, Receive>,
    /// What goes through hosts that hold none of it.
    pub relays: BTreeMap<HostId, Vec<Relay>>,
}

/// What one host receives.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Receive {
    pub shards: Vec<(Vec<u32>, Vec<Piece>)>,
    pub relays: Vec<Relay>,
}

/// Device positions that hold one region.
struct Holders {
    region: Region,
    positions: Vec<u32>,
}

/// What one island gets of one source region and one target region.
struct Shipment<'a> {
    held: &'a Holders,
    wanted: &'a Holders,
    /// Both share it.
    region: Region,
    from: HostId,
    entry: HostId,
    /// Hosts of the island that want it, with their positions.
    hosts: BTreeMap<HostId, Vec<u32>>,
}

/// Plans the transfer of `source` to `target`, which have one shape.
///
/// Where one of the shardings does not say which region a shard holds, shards correspond by
/// position; the caller has checked that there are equally many.
pub(crate) fn plan(
    cluster: &Cluster,
    source: &ArraySpec,
    target: &ArraySpec,
    next_tag: impl FnMut() -> TransferTag,
) -> Plan {
    let (sources, targets) = match (holders(source), holders(target)) {
        (Some(sources), Some(targets)) => (sources, targets),
        _ => (by_position(source), by_position(target)),
    };
    let mut shipments = Vec::new();
    for (turn, wanted) in targets.iter().enumerate() {
        for hosts in by_island(cluster, target, &wanted.positions) {
            let entry = *hosts.keys().nth(turn % hosts.len()).expect("a region has a holder");
            for held in &sources {
                let Some(region) = held.region.intersect(&wanted.region) else { continue };
                let position = choose_replica(cluster, source, &held.positions, entry, turn);
                let from = host_of(cluster, source, position);
                let hosts = hosts.clone();
                shipments.push(Shipment { held, wanted, region, from, entry, hosts });
            }
        }
    }
    let lanes = lanes(cluster, source.dtype.bits(), &shipments);
    let mut planner = Planner { cluster, source, next_tag, plan: Plan::default(), sends: vec![] };
    for (shipment, lanes) in shipments.iter().zip(lanes) {
        planner.ship(shipment, &lanes);
    }
    planner.done()
}

/// The lanes of each shipment.
fn lanes(cluster: &Cluster, bits: u64, shipments: &[Shipment]) -> Vec<Vec<Lane>> {
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
        // A crossing of nothing has no lanes.
        let lanes = lanes.filter(|lanes| !lanes.is_empty());
        lanes.unwrap_or_else(|| vec![Lane::direct(shipment.entry)])
    });
    lanes.collect()
}

struct Planner<'a, F> {
    cluster: &'a Cluster,
    source: &'a ArraySpec,
    next_tag: F,
    plan: Plan,
    /// When each message leaves, from where.
    sends: Vec<(Ticks, HostId, Outgoing)>,
}

impl<F: FnMut() -> TransferTag> Planner<'_, F> {
    fn ship(&mut self, shipment: &Shipment, lanes: &[Lane]) {
        let shares: Vec<u64> = lanes.iter().map(|lane| lane.share).collect();
        let parts = stripes::cut(&shipment.region, &shares);
        if let [lane] = lanes {
            return parts.iter().flatten().for_each(|part| self.send(shipment, lane, part));
        }
        let bits = self.source.dtype.bits();
        let mut left: Vec<_> = parts
            .into_iter()
            .map(|part| part.map_or(Vec::new(), |part| stripes::messages(part, bits)).into_iter())
            .collect();
        // About in the order in which they come, so that what has come can be put in its place.
        while left.iter().any(|messages| messages.len() > 0) {
            for (lane, messages) in lanes.iter().zip(&mut left) {
                if let Some(message) = messages.next() {
                    self.send(shipment, lane, &message);
                }
            }
        }
    }

    /// Sends one message along a lane: from the last host on it that holds what is sent, to the
    /// first that wants it.
    fn send(&mut self, shipment: &Shipment, lane: &Lane, region: &Region) {
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
        let outgoing = Outgoing { shard: position, region: part, tag, to, channel };
        self.sends.push((lane.start, at, outgoing));
        let mut from = at;
        for pair in steps[..=last].windows(2) {
            let [(_, here), (channel, to)] = *pair else { unreachable!("windows are of two") };
            let onward = (self.next_tag)();
            let relay = Relay { tag, from, onward, to, channel };
            self.plan.relays.entry(here).or_default().push(relay);
            (tag, from) = (onward, here);
        }
        self.deliver(shipment, region, (tag, from), steps[last].1);
    }

    /// A message comes to an island at one host, which passes it on to others that want it.
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
                relays.push(Relay { tag, from, onward, to: host, channel: Channel::INSIDE });
                (onward, entry)
            };
            let piece = Piece { tag, from, region: place.clone() };
            add_piece(self.plan.receives.entry(host).or_default(), positions, piece);
        }
    }

    fn done(mut self) -> Plan {
        self.sends.sort_by_key(|send| send.0);
        for (_, host, outgoing) in self.sends {
            self.plan.sends.entry(host).or_default().push(outgoing);
        }
        self.plan
    }
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

    use base::{BitsPerSecond, DeviceId};
    use fabric::IslandSpec;
    use ir::{DType, Partition, Sharding};

    use super::*;

    fn spec(devices: std::ops::Range<u32>, dims: &[i64], partition: Partition) -> ArraySpec {
        ArraySpec {
            dtype: DType::C128,
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
    fn carry_out(
        cluster: &Cluster,
        plan: &Plan,
        source: &ArraySpec,
        target: &ArraySpec,
    ) -> Vec<Vec<u8>> {
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
        // What arrives where, under which tag, from whom.
        let mut messages: BTreeMap<(HostId, TransferTag), (HostId, Vec<u8>)> = BTreeMap::new();
        for (&host, pieces) in &plan.sends {
            for piece in pieces {
                let position = piece.shard;
                assert_eq!(host_of(cluster, source, position), host, "it has that shard");
                let shard = source.sharding.region(&source.dims, position as usize).unwrap();
                let start: Vec<i64> =
                    piece.region.start.iter().zip(&shard.start).map(|(a, b)| a + b).collect();
                let whole = Region::new(&start, &piece.region.size);
                let bytes = (0..whole.elements() as usize).map(|i| at(source, &whole, i) as u8);
                let bytes = bytes.collect();
                assert!(messages.insert((piece.to, piece.tag), (host, bytes)).is_none());
            }
        }
        let inside = plan.receives.iter().map(|(host, receive)| (*host, &receive.relays));
        let relays = plan.relays.iter().map(|(host, relays)| (*host, relays)).chain(inside);
        let mut open: Vec<(HostId, Relay)> = relays
            .flat_map(|(host, relays)| relays.iter().map(move |relay| (host, *relay)))
            .collect();
        while !open.is_empty() {
            let before = open.len();
            open.retain(|(host, relay)| {
                let Some((from, bytes)) = messages.get(&(*host, relay.tag)) else { return true };
                assert_eq!(*from, relay.from, "it comes from whom it is expected from");
                let entry = (*host, bytes.clone());
                assert!(messages.insert((relay.to, relay.onward), entry).is_none());
                false
            });
            assert!(open.len() < before, "what is to be passed on comes");
        }
        let mut held: Vec<Vec<u8>> = vec![Vec::new(); target.sharding.devices.len()];
        let receives = plan.receives.iter();
        for (host, (positions, pieces)) in
            receives.flat_map(|(host, receive)| receive.shards.iter().map(move |one| (*host, one)))
        {
            for &position in positions {
                let region = target.sharding.region(&target.dims, position as usize).unwrap();
                let shard = ArraySpec { dims: region.size.clone(), ..target.clone() };
                let bytes = &mut held[position as usize];
                bytes.resize(region.elements() as usize, 255);
                for piece in pieces {
                    let (from, message) = &messages[&(host, piece.tag)];
                    assert_eq!(*from, piece.from);
                    for (index, &byte) in message.iter().enumerate() {
                        bytes[at(&shard, &piece.region, index)] = byte;
                    }
                }
            }
        }
        held
    }

    /// Each target position holds what the whole array has there.
    fn check(cluster: &Cluster, source: &ArraySpec, target: &ArraySpec) -> Plan {
        let plan = plan(cluster, source, target, tags());
        let held = carry_out(cluster, &plan, source, target);
        for (position, bytes) in held.iter().enumerate() {
            let region = target.sharding.region(&target.dims, position).unwrap();
            let (rows, columns) = (region.size[0], region.size[1]);
            let expected: Vec<u8> = (0..rows)
                .flat_map(|row| (0..columns).map(move |column| (row, column)))
                .map(|(r, c)| (region.start[0] + r) * target.dims[1] + region.start[1] + c)
                .map(|index| index as u8)
                .collect();
            assert!(bytes == &expected, "{source:?} to {target:?} at {position}");
        }
        plan
    }

    /// Bytes that leave each host by each channel, what it passes on included.
    fn loads(plan: &Plan) -> BTreeMap<(HostId, Channel), u64> {
        let mut loads: BTreeMap<(HostId, Channel), u64> = BTreeMap::new();
        let mut sizes = BTreeMap::new();
        for (host, piece) in
            plan.sends.iter().flat_map(|(host, all)| all.iter().map(move |p| (host, p)))
        {
            *loads.entry((*host, piece.channel)).or_default() += piece.region.elements();
            sizes.insert(piece.tag, piece.region.elements());
        }
        for (host, relay) in
            plan.relays.iter().flat_map(|(host, all)| all.iter().map(move |r| (host, r)))
        {
            let size = sizes[&relay.tag];
            sizes.insert(relay.onward, size);
            *loads.entry((*host, relay.channel)).or_default() += size;
        }
        loads
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
                check(&cluster, &spec(0..4, &dims, from.clone()), &spec(4..8, &dims, to.clone()));
            }
        }
    }

    /// Islands of so many hosts with one device each, whose channels move so many Gbit/s.
    fn with_channels(islands: &[(u32, &[f64])]) -> Cluster {
        let specs = islands.iter().map(|(hosts, rates)| IslandSpec {
            channels: rates.iter().map(|rate| BitsPerSecond(rate * 1e9)).collect(),
            ..IslandSpec::new(*hosts, 1)
        });
        Cluster::new(&specs.collect::<Vec<_>>())
    }

    /// 4 MiB of 16 bytes each.
    const LARGE: [i64; 2] = [512, 512];

    fn whole(device: u32) -> ArraySpec {
        spec(device..device + 1, &LARGE, Partition::Replicated)
    }

    #[test]
    fn what_is_large_goes_over_the_channels_of_hosts_beside() {
        let cluster = with_channels(&[(2, &[1.0]), (2, &[1.0])]);
        let plan = check(&cluster, &whole(0), &whole(2));
        let loads = loads(&plan);
        let (own, beside) = (loads[&(HostId(0), Channel(1))], loads[&(HostId(1), Channel(1))]);
        assert_eq!(own + beside, 512 * 512);
        assert!(own >= beside && own < beside * 11 / 10, "{own} and {beside}");
        assert_eq!(plan.relays.keys().copied().collect::<Vec<_>>(), [HostId(1), HostId(3)]);
    }

    #[test]
    fn channels_of_different_rates_get_shares_like_them() {
        let cluster = with_channels(&[(1, &[0.2, 0.1]), (1, &[0.2, 0.1])]);
        let loads = loads(&check(&cluster, &whole(0), &whole(1)));
        let (fast, slow) = (loads[&(HostId(0), Channel(1))], loads[&(HostId(0), Channel(2))]);
        assert!(fast > slow * 19 / 10 && fast < slow * 21 / 10, "{fast} and {slow}");
    }

    #[test]
    fn nobody_gets_from_afar_what_is_beside() {
        let cluster = with_channels(&[(2, &[1.0]), (2, &[1.0])]);
        let everywhere = |devices| spec(devices, &LARGE, Partition::Replicated);
        let plan = check(&cluster, &everywhere(0..2), &everywhere(2..4));
        assert!(plan.relays.is_empty(), "both hosts have it and both want it");
        let loads = loads(&plan);
        assert_eq!(loads.values().sum::<u64>(), 512 * 512);
        assert!(loads.keys().map(|(host, _)| *host).eq([HostId(0), HostId(1)]));
    }

    #[test]
    fn what_is_small_or_of_unknown_channels_goes_alone() {
        let small = |device| spec(device..device + 1, &[64, 64], Partition::Replicated);
        let cluster = with_channels(&[(2, &[1.0]), (2, &[1.0])]);
        let plan = check(&cluster, &small(0), &small(2));
        assert_eq!(loads(&plan).into_iter().collect::<Vec<_>>(), [((HostId(0), Channel(0)), 4096)]);
        let cluster = with_channels(&[(2, &[1.0]), (2, &[])]);
        let plan = check(&cluster, &whole(0), &whole(2));
        assert_eq!(
            loads(&plan).into_iter().collect::<Vec<_>>(),
            [((HostId(0), Channel(0)), 512 * 512)]
        );
    }

    proptest::proptest! {
        #![proptest_config(proptest::test_runner::Config::with_cases(64))]

        #[test]
        fn arrays_arrive_whole_over_any_channels(
            hosts in (1..5_u32, 1..5_u32),
            rates in (proptest::collection::vec(0.1..2.0_f64, 0..3), proptest::collection::vec(0.1..2.0_f64, 0..3)),
            cuts in (0..3_usize, 0..3_usize),
            rows in 1..12_i64,
            columns in 1_600..3_000_i64,
        ) {
            let cluster = with_channels(&[(hosts.0, &rates.0), (hosts.1, &rates.1)]);
            let partition = |hosts: u32, cut| {
                let all = (0..hosts).collect();
                match cut {
                    0 => Partition::Replicated,
                    1 => tiles(&[i64::from(hosts), 1], all),
                    _ => tiles(&[1, i64::from(hosts)], all),
                }
            };
            let even = i64::from(hosts.0 * hosts.1);
            let dims = [rows * even, columns / even * even];
            let source = spec(0..hosts.0, &dims, partition(hosts.0, cuts.0));
            let target = spec(hosts.0..hosts.0 + hosts.1, &dims, partition(hosts.1, cuts.1));
            let first = check(&cluster, &source, &target);
            proptest::prop_assert!(first == plan(&cluster, &source, &target, tags()), "always the same");
        }
    }

    #[test]
    fn each_byte_crosses_between_islands_once() {
        let cluster = Cluster::new(&IslandSpec::parse("2x2x2").unwrap());
        let source = spec(0..4, &[8], tiles(&[4], vec![0, 1, 2, 3]));
        let target = spec(4..8, &[8], Partition::Replicated);
        let plan = plan(&cluster, &source, &target, tags());
        let crossing: u64 = plan.sends.values().flatten().map(|send| send.region.elements()).sum();
        assert_eq!(crossing, 8);
        let relayed: usize = plan.receives.values().map(|receive| receive.relays.len()).sum();
        assert_eq!(relayed, 4, "the second host of the island gets its copy from the first");
        let _: Arc<[DeviceId]> = target.sharding.devices;
    }
}
