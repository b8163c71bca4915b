//! Striping: spreads transfers between islands over channels and over idle hosts as relays.
//!
//! All crossings are scheduled together, as on the links of a machine: each is striped over
//! disjoint paths, so that all its parts arrive together. Small transfers take only the shortest
//! path.
//!
//! Source: the multi-TSP system §4.2-4.3, here with hosts for chips and channels for links. Differs
//! from the paper: A host forwards a message once it has received all of it, and clocks are not
//! synchronised, so the paths, shares and order of the schedule are used, and its times are not.

use std::collections::{BTreeMap, BTreeSet};

use base::{Bytes, Channel, HostId, IslandId, Nanos, Ticks};
use ir::Region;
use route::{RouteTransfer, Timing, route};
use topology::{Cluster, Dcn};

/// Minimum total size for which a schedule is worthwhile.
const LEAST: Bytes = Bytes(256 << 10);
/// Maximum message size of a striped crossing: relays forward one message while they receive the
/// next (pipelining).
const MESSAGE: u64 = 4 << 20;
/// Maximum number of hosts of an island to schedule over: idle hosts are added as relays up to it.
const BESIDE_MAX: usize = 32;
/// Maximum number of crossings for which idle hosts are used as relays; more crossings use all
/// channels anyway, and would take long to schedule.
const CROSSINGS_MAX: usize = 64;

/// A transfer between islands: sender, receiver and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Crossing {
    pub from: HostId,
    pub to: HostId,
    pub size: Bytes,
}

/// One path of a crossing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StripePath {
    /// Its hops: the channel and the host that it leads to.
    pub steps: Vec<(Channel, HostId)>,
    /// Its share of the crossing, relative to the other paths.
    pub share: u64,
    /// Start time in the schedule, which orders the sends.
    pub start: Ticks,
}

impl StripePath {
    /// The direct path, which is bound to no channel.
    pub fn direct(to: HostId) -> Self {
        Self { steps: vec![(Channel::INSIDE, to)], share: 1, start: Ticks(0) }
    }
}

/// Returns the timing model: the time to forward 64 KiB through a host.
///
/// Assumed: a host takes 200 us from one message to the next hop.
fn timing() -> Timing {
    let unit = Bytes(64 << 10);
    let forward = Nanos(200_000);
    Timing { clock_hz: 1e9, vector: unit, encoded: unit, forward, buffer: 1 << 32 }
}

/// Returns the paths of each crossing, all of which start together; `None` if a schedule is not
/// worthwhile, or the channels of an island are not known.
pub(crate) fn lanes(cluster: &Cluster, crossings: &[Crossing]) -> Option<Vec<Vec<StripePath>>> {
    let size: u64 = crossings.iter().map(|crossing| crossing.size.0).sum();
    if size < LEAST.0 {
        return None;
    }
    let ends: BTreeSet<HostId> =
        crossings.iter().flat_map(|crossing| [crossing.from, crossing.to]).collect();
    let beside = if crossings.len() <= CROSSINGS_MAX { BESIDE_MAX } else { 0 };
    let dcn = Dcn::of(cluster, with_idle(cluster, ends, beside)?, beside)?;
    let transfers: Option<Vec<RouteTransfer>> = crossings
        .iter()
        .map(|crossing| {
            let (from, to) = (dcn.vertex(crossing.from)?, dcn.vertex(crossing.to)?);
            Some(RouteTransfer::new(from, to, crossing.size))
        })
        .collect();
    let plan = route(dcn.network(), transfers?, timing()).ok()?;
    let mut lanes: Vec<Vec<StripePath>> = vec![Vec::new(); crossings.len()];
    for train in &plan.schedule.trains {
        let lanes = &mut lanes[train.task as usize];
        let (steps, start) = (dcn.steps(train.links()), train.hops[0].start);
        match lanes.iter_mut().find(|lane| lane.steps == steps) {
            Some(lane) => lane.share += train.count,
            None => lanes.push(StripePath { steps, share: train.count, start }),
        }
    }
    Some(lanes)
}

/// Returns these hosts and idle hosts of their islands, up to `beside` per island; `None` if the
/// channels of an island are not known.
fn with_idle(cluster: &Cluster, ends: BTreeSet<HostId>, beside: usize) -> Option<Vec<HostId>> {
    let mut busy: BTreeMap<IslandId, usize> = BTreeMap::new();
    for &host in &ends {
        *busy.entry(cluster.host(host)?.island).or_default() += 1;
    }
    let mut idle = Vec::new();
    for (island, busy) in busy {
        let island = cluster.island(island)?;
        if island.channels.is_empty() {
            return None;
        }
        let most = beside.saturating_sub(busy);
        idle.extend(island.hosts.iter().filter(|host| !ends.contains(host)).take(most));
    }
    Some(ends.into_iter().chain(idle).collect())
}

/// Cuts a region into parts with sizes proportional to `shares`; some may be empty.
pub(crate) fn cut(region: &Region, shares: &[u64]) -> Vec<Option<Region>> {
    // Parts along the outermost axis are contiguous in memory.
    let enough = |&axis: &usize| region.size[axis] >= 4 * shares.len() as i64;
    let longest = || (0..region.size.len()).max_by_key(|&axis| region.size[axis]);
    let Some(axis) = (0..region.size.len()).find(enough).or_else(longest) else {
        return first_alone(region, shares.len());
    };
    let (length, all) = (region.size[axis], shares.iter().sum::<u64>());
    let (mut given, mut begin) = (0, 0);
    let part = |share: &u64| {
        given += share;
        let end = (i128::from(length) * i128::from(given) / i128::from(all.max(1))) as i64;
        let mut part = region.clone();
        part.start[axis] += begin;
        part.size[axis] = end - begin;
        begin = end;
        (part.size[axis] > 0).then_some(part)
    };
    shares.iter().map(part).collect()
}

fn first_alone(region: &Region, count: usize) -> Vec<Option<Region>> {
    (0..count).map(|number| (number == 0).then(|| region.clone())).collect()
}

/// Cuts the part of a crossing that takes one path into messages of bounded size.
pub(crate) fn messages(region: Region, bits: u64) -> Vec<Region> {
    let count = (region.elements() * bits / 8).div_ceil(MESSAGE).max(1);
    cut(&region, &vec![1; count as usize]).into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use base::BitsPerSecond;
    use topology::IslandSpec;

    use super::*;

    fn crossing(from: u32, to: u32, mebibytes: u64) -> Crossing {
        Crossing { from: HostId(from), to: HostId(to), size: Bytes(mebibytes << 20) }
    }

    /// Two islands with this number of hosts each, and one channel per host.
    fn lanes_of(hosts: u32, crossings: &[Crossing]) -> Vec<Vec<StripePath>> {
        let mut cluster = Cluster::new(&[IslandSpec::new(hosts, 1); 2]);
        for island in [IslandId(0), IslandId(1)] {
            cluster.set_channels(island, vec![BitsPerSecond(1e9)]);
        }
        lanes(&cluster, crossings).expect("it is worth while")
    }

    /// Share of the total that each host of the first island sends on its channel.
    fn leaves(crossings: &[Crossing], lanes: &[Vec<StripePath>]) -> BTreeMap<HostId, f64> {
        let all: u64 = lanes.iter().flatten().map(|lane| lane.share).sum();
        let mut leaves = BTreeMap::new();
        for (crossing, lanes) in crossings.iter().zip(lanes) {
            for lane in lanes {
                let mut at = crossing.from;
                for &(channel, host) in &lane.steps {
                    if channel == Channel(1) {
                        *leaves.entry(at).or_default() += lane.share as f64 / all as f64;
                    }
                    at = host;
                }
                assert_eq!(at, crossing.to);
            }
        }
        leaves
    }

    #[test]
    fn one_host_sends_to_many_over_all_channels_of_its_island() {
        let crossings = [crossing(0, 4, 16), crossing(0, 5, 16), crossing(0, 6, 16)];
        let parts = leaves(&crossings, &lanes_of(4, &crossings));
        assert_eq!(parts.len(), 4);
        assert!(parts.values().all(|&part| part < 0.3), "{parts:?}");
    }

    #[test]
    fn hosts_that_all_send_use_their_own_channels() {
        let crossings: Vec<Crossing> = (0..4).map(|host| crossing(host, 4 + host, 16)).collect();
        let lanes = lanes_of(4, &crossings);
        assert!(lanes.iter().all(|lanes| lanes.len() == 1 && lanes[0].steps.len() == 1));
    }

    #[test]
    fn a_region_is_cut_whole() {
        for region in [Region::new(&[3, 0], &[64, 5]), Region::new(&[0, 7], &[2, 9])] {
            let parts = cut(&region, &[5, 1, 0, 3]);
            let elements: u64 = parts.iter().flatten().map(Region::elements).sum();
            assert_eq!(elements, region.elements());
            assert_eq!(parts[2], None);
            let parts: Vec<&Region> = parts.iter().flatten().collect();
            for (number, part) in parts.iter().enumerate() {
                assert!(parts[..number].iter().all(|other| other.intersect(part).is_none()));
            }
        }
        let scalar = Region::new(&[], &[]);
        assert_eq!(cut(&scalar, &[1, 1]), [Some(scalar), None]);
        let long = messages(Region::new(&[0], &[10 << 20]), 32);
        assert!(long.len() == 10 && long.iter().all(|part| part.elements() == 1 << 20));
    }
}
