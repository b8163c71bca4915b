//! How what crosses from island to island is spread over channels and over hosts beside.
//!
//! All of it is scheduled at once, as the links of a machine are: each crossing over ways that share
//! nothing, so that all of it comes together. What is small goes the shortest way alone.
//!
//! Source: the multi-TSP system §4.2-4.3, here with hosts for chips and channels for links. Differs
//! from the paper: a host passes a message on when it has all of it, and nobody's clock is kept, so of
//! the schedule the ways, the shares and the order hold, and the times do not.

use std::collections::{BTreeMap, BTreeSet};

use base::{Bytes, Channel, HostId, IslandId, Nanos, Ticks};
use fabric::{Cluster, Dcn};
use ir::Region;
use route::{RouteTransfer, Timing, route};

/// All together must be this much to be worth a schedule.
const LEAST: Bytes = Bytes(256 << 10);
/// The longest message of a crossing that takes several ways: hosts between pass on what has come
/// while more is coming.
const MESSAGE: u64 = 4 << 20;
/// Most hosts of an island that pass on what is each other's.
const BESIDE_MAX: usize = 32;
/// Most crossings of which some may go over hosts beside; more use all channels by themselves, and
/// would take long to schedule.
const CROSSINGS_MAX: usize = 64;

/// What crosses: from where, to where, how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Crossing {
    pub from: HostId,
    pub to: HostId,
    pub size: Bytes,
}

/// One way of a crossing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StripePath {
    /// The hosts that it leads to, one after another, and by which channel each is reached.
    pub steps: Vec<(Channel, HostId)>,
    /// How much of the crossing takes it, beside the other lanes.
    pub share: u64,
    /// When it begins, for the order of what leaves.
    pub start: Ticks,
}

impl StripePath {
    /// The way that takes no channel of its own.
    pub fn direct(to: HostId) -> Self {
        Self { steps: vec![(Channel::INSIDE, to)], share: 1, start: Ticks(0) }
    }
}

/// What moving 64 KiB takes where hosts pass messages on.
///
/// Assumed: a host takes 200 us from one message to the next hop.
fn timing() -> Timing {
    let unit = Bytes(64 << 10);
    let forward = Nanos(200_000);
    Timing { clock_hz: 1e9, vector: unit, encoded: unit, forward, buffer: 1 << 32 }
}

/// The lanes of each crossing, all of which begin together; none if a schedule is not worth while,
/// or nobody knows the channels of an island.
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

/// These hosts and those beside them, as many as are worth while; none if the channels of an island
/// are not known.
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

/// Cuts a region into parts whose sizes are as these shares, of which some may come to nothing.
pub(crate) fn cut(region: &Region, shares: &[u64]) -> Vec<Option<Region>> {
    // Parts of the outermost axis lie together in memory.
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

/// Cuts what takes one of several lanes into messages that are not too long.
pub(crate) fn messages(region: Region, bits: u64) -> Vec<Region> {
    let count = (region.elements() * bits / 8).div_ceil(MESSAGE).max(1);
    cut(&region, &vec![1; count as usize]).into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use base::BitsPerSecond;
    use fabric::IslandSpec;

    use super::*;

    fn crossing(from: u32, to: u32, mebibytes: u64) -> Crossing {
        Crossing { from: HostId(from), to: HostId(to), size: Bytes(mebibytes << 20) }
    }

    /// Two islands of so many hosts, with one channel each.
    fn lanes_of(hosts: u32, crossings: &[Crossing]) -> Vec<Vec<StripePath>> {
        let channels = vec![BitsPerSecond(1e9)];
        let spec = IslandSpec { channels, ..IslandSpec::new(hosts, 1) };
        lanes(&Cluster::new(&[spec.clone(), spec]), crossings).expect("it is worth while")
    }

    /// What leaves each host of the first island by its channel, in parts of all.
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
