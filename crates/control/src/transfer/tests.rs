//! Transfer plans, executed on arrays of bytes.

use std::sync::Arc;

use base::{BitsPerSecond, DeviceId};
use ir::{DType, Partition, Sharding};
use topology::IslandSpec;

use super::*;

fn spec(devices: std::ops::Range<u32>, dims: &[i64], partition: Partition) -> ArraySpec {
    ArraySpec {
        dtype: DType::C128,
        dims: dims.into(),
        sharding: Sharding { devices: devices.map(DeviceId).collect(), memory: None, partition },
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

/// Sender and contents of each message, by receiver and tag.
type Messages = BTreeMap<(HostId, TransferTag), (HostId, Vec<u8>)>;

/// Returns the index in a whole array of an element of one of its regions.
fn flat_index(spec: &ArraySpec, region: &Region, index: usize) -> usize {
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
}

/// Executes the sends of a plan on an array whose bytes count up.
fn send_all(cluster: &Cluster, plan: &TransferPlan, source: &ArraySpec) -> Messages {
    let mut messages = Messages::new();
    for (&host, pieces) in &plan.sends {
        for piece in pieces {
            let position = piece.shard;
            assert_eq!(host_of(cluster, source, position), host, "it has that shard");
            let shard = source.sharding.region(&source.dims, position as usize).unwrap();
            let start: Vec<i64> =
                piece.region.start.iter().zip(&shard.start).map(|(a, b)| a + b).collect();
            let whole = Region::new(&start, &piece.region.size);
            let bytes = (0..whole.elements() as usize).map(|i| flat_index(source, &whole, i) as u8);
            let bytes = bytes.collect();
            assert!(messages.insert((piece.target, piece.tag), (host, bytes)).is_none());
        }
    }
    messages
}

/// Executes the relays of a plan.
fn relay_all(plan: &TransferPlan, messages: &mut Messages) {
    let inside = plan.receives.iter().map(|(host, receive)| (*host, &receive.relays));
    let relays = plan.relays.iter().map(|(host, relays)| (*host, relays)).chain(inside);
    let mut open: Vec<(HostId, RelayHop)> =
        relays.flat_map(|(host, relays)| relays.iter().map(move |relay| (host, *relay))).collect();
    while !open.is_empty() {
        let before = open.len();
        open.retain(|(host, relay)| {
            let Some((from, bytes)) = messages.get(&(*host, relay.tag)) else { return true };
            assert_eq!(*from, relay.source, "it comes from whom it is expected from");
            let entry = (*host, bytes.clone());
            assert!(messages.insert((relay.target, relay.onward), entry).is_none());
            false
        });
        assert!(open.len() < before, "what is to be passed on comes");
    }
}

/// Executes a plan on arrays of bytes and returns the contents of each target position.
fn carry_out(
    cluster: &Cluster,
    plan: &TransferPlan,
    source: &ArraySpec,
    target: &ArraySpec,
) -> Vec<Vec<u8>> {
    let mut messages = send_all(cluster, plan, source);
    relay_all(plan, &mut messages);
    let mut held: Vec<Option<Vec<u8>>> = vec![None; target.sharding.devices.len()];
    let receives = plan.receives.iter();
    for (host, ReceivedShard { positions, pieces }) in
        receives.flat_map(|(host, receive)| receive.shards.iter().map(move |one| (*host, one)))
    {
        for &position in positions {
            let region = target.sharding.region(&target.dims, position as usize).unwrap();
            let shard = ArraySpec { dims: region.size.clone(), ..target.clone() };
            let bytes = held[position as usize].get_or_insert_default();
            bytes.resize(region.elements() as usize, 255);
            assert!(!pieces.is_empty(), "what comes of nothing does not fail with its source");
            for piece in pieces {
                let (from, message) = &messages[&(host, piece.tag)];
                assert_eq!(*from, piece.source);
                for (index, &byte) in message.iter().enumerate() {
                    bytes[flat_index(&shard, &piece.region, index)] = byte;
                }
            }
        }
    }
    let made = held.into_iter().map(|bytes| bytes.expect("a host makes each shard"));
    made.collect()
}

/// Checks that each target position holds the corresponding region of the whole array.
fn check(cluster: &Cluster, source: &ArraySpec, target: &ArraySpec) -> TransferPlan {
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

/// Bytes that each host sends on each channel, relayed messages included.
fn loads(plan: &TransferPlan) -> BTreeMap<(HostId, Channel), u64> {
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
    let partitions = [
        Partition::Replicated,
        tiles(&[4, 1], vec![0, 1, 2, 3]),
        tiles(&[2, 2], vec![3, 1, 2, 0]),
        tiles(&[1, 2], vec![0, 1, 0, 1]),
        tiles(&[1, 4], vec![0, 1, 2, 3]),
    ];
    for dims in [[4, 6], [0, 6], [4, 0], [3, 1]] {
        for from in &partitions {
            for to in &partitions {
                check(&cluster, &spec(0..4, &dims, from.clone()), &spec(4..8, &dims, to.clone()));
            }
        }
    }
}

#[test]
fn shards_without_elements_correspond_by_position() {
    let cluster = Cluster::new(&IslandSpec::parse("2x2x2").unwrap());
    let shards = Partition::Uneven { shards: [[2, 0][..].into(), [0, 0][..].into()].into() };
    let (source, target) = (spec(0..2, &[2, 0], shards.clone()), spec(4..6, &[2, 0], shards));
    let plan = plan(&cluster, &source, &target, tags());
    let sent: Vec<u32> = plan.sends.values().flatten().map(|piece| piece.shard).collect();
    assert_eq!(sent, [0, 1]);
    let made: Vec<u32> =
        plan.receives.values().flat_map(|r| &r.shards).flat_map(|s| s.positions.clone()).collect();
    assert_eq!(made, [0, 1]);
}

/// Islands with this number of hosts, one device each, and channels of these rates in Gbit/s.
fn with_channels(islands: &[(u32, &[f64])]) -> Cluster {
    let specs = islands.iter().map(|(hosts, _)| IslandSpec::new(*hosts, 1));
    let mut cluster = Cluster::new(&specs.collect::<Vec<_>>());
    for (island, (_, rates)) in (0..).map(IslandId).zip(islands) {
        let rates = rates.iter().map(|rate| BitsPerSecond(rate * 1e9)).collect();
        cluster.set_channels(island, rates);
    }
    cluster
}

/// 4 MiB, with 16 bytes per element.
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
