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
use route::{Timing, Transfer, route};

/// All together must be this much to be worth a schedule.
const LEAST: Bytes = Bytes(256 << 10);
/// The longest message of a crossing that takes several ways: hosts between pass on what has come
/// while more is coming.
const MESSAGE: u64 = 4 << 20;
/// Most pairs of hosts in an island of which one may pass on what is the other's.
const PAIRS_MAX: usize = 4096;
/// Most hosts of an island that pass on what is others'.
const RELAYS_MAX: usize = 16;

/// What crosses: from where, to where, how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Crossing {
    pub from: HostId,
    pub to: HostId,
    pub size: Bytes,
}

/// One way of a crossing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lane {
    /// The hosts that it leads to, one after another, and by which channel each is reached.
    pub steps: Vec<(Channel, HostId)>,
    /// How much of the crossing takes it, beside the other lanes.
    pub share: u64,
    /// When it begins, for the order of what leaves.
    pub start: Ticks,
}

impl Lane {
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
pub(crate) fn lanes(cluster: &Cluster, crossings: &[Crossing]) -> Option<Vec<Vec<Lane>>> {
    let size: u64 = crossings.iter().map(|crossing| crossing.size.0).sum();
    if size < LEAST.0 {
        return None;
    }
    let ends: BTreeSet<HostId> =
        crossings.iter().flat_map(|crossing| [crossing.from, crossing.to]).collect();
    let relays = idle(cluster, &ends)?;
    let ends: Vec<HostId> = ends.into_iter().collect();
    let dcn = Dcn::of(cluster, &ends, &relays)?;
    let transfers: Option<Vec<Transfer>> = crossings
        .iter()
        .map(|crossing| {
            let (from, to) = (dcn.vertex(crossing.from)?, dcn.vertex(crossing.to)?);
            Some(Transfer::new(from, to, crossing.size))
        })
        .collect();
    let plan = route(dcn.network(), transfers?, timing()).ok()?;
    let mut lanes: Vec<Vec<Lane>> = vec![Vec::new(); crossings.len()];
    for train in &plan.schedule.trains {
        let lanes = &mut lanes[train.task as usize];
        let (steps, start) = (dcn.steps(train.links()), train.hops[0].start);
        match lanes.iter_mut().find(|lane| lane.steps == steps) {
            Some(lane) => lane.share += train.count,
            None => lanes.push(Lane { steps, share: train.count, start }),
        }
    }
    Some(lanes)
}

/// Hosts beside these that have nothing to send or receive; none if an island's channels are not
/// known.
fn idle(cluster: &Cluster, ends: &BTreeSet<HostId>) -> Option<Vec<HostId>> {
    let mut busy: BTreeMap<IslandId, usize> = BTreeMap::new();
    for &host in ends {
        *busy.entry(cluster.host(host)?.island).or_default() += 1;
    }
    let mut idle = Vec::new();
    for (island, busy) in busy {
        let island = cluster.island(island)?;
        if island.channels.is_empty() {
            return None;
        }
        let most = RELAYS_MAX.min(PAIRS_MAX / busy);
        idle.extend(island.hosts.iter().filter(|host| !ends.contains(host)).take(most));
    }
    Some(idle)
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
