//! Gives every vector its way and its start.
//!
//! Transfers are taken one after another, those with the fewest hops first among those that could
//! begin. Each is spread over ways that share no link so that all of its vectors come at once: a way
//! that is longer, or taken for a while, gets fewer, and what is small goes the shortest way alone.
//! Ways that are not the shortest help one transfer and hinder others, so all is planned without
//! them, with few and with more, and what comes first is kept.
//!
//! Source: the multi-TSP system §4.3. Differs from the paper: it does not say how its compiler
//! orders transfers.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::{Bytes, Ticks, VertexId};
use fabric::Network;
use smallvec::SmallVec;
use thiserror::Error;

use crate::links::Links;
use crate::paths::{Path, disjoint};
use crate::schedule::{Hop, Schedule, Timing, Train, Transfer};

/// How many hops more than the shortest a way may have.
///
/// Source: the multi-TSP system §4.3, non-minimal routes inside a node and between nodes.
const DETOURS: [usize; 3] = [0, 1, 2];

/// What cannot be scheduled.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RouteError {
    /// A transfer of somebody who is not there.
    #[error("transfer {transfer} is between vertices {from} and {to}; there are {vertices}")]
    Vertex {
        /// Which transfer.
        transfer: u32,
        /// Who has it.
        from: VertexId,
        /// Who gets it.
        to: VertexId,
        /// How many there are.
        vertices: u32,
    },
    /// A transfer to where it is.
    #[error("transfer {transfer} goes from vertex {vertex} to itself")]
    Nowhere {
        /// Which transfer.
        transfer: u32,
        /// Where it is.
        vertex: VertexId,
    },
    /// More than a chip holds.
    #[error("transfer {transfer} is of {size}; a chip holds {most}")]
    Size {
        /// Which transfer.
        transfer: u32,
        /// How much it is.
        size: Bytes,
        /// What a chip holds.
        most: Bytes,
    },
    /// It waits for what is not there.
    #[error("transfer {transfer} comes after transfer {after}, which is not there")]
    After {
        /// Which transfer.
        transfer: u32,
        /// What it waits for.
        after: u32,
    },
    /// Links that differ, or switches.
    #[error("the fabric has switches, or links that differ; expected chips with links all alike")]
    Uneven,
    /// Transfers that wait for each other.
    #[error("transfer {transfer} waits for itself, or for others that wait for it")]
    Cycle {
        /// One of them.
        transfer: u32,
    },
    /// No way.
    #[error("there is no way from vertex {from} to vertex {to} for transfer {transfer}")]
    NoWay {
        /// Which transfer.
        transfer: u32,
        /// Who has it.
        from: VertexId,
        /// Who gets it.
        to: VertexId,
    },
}

/// Schedules transfers on a fabric. The same transfers give the same schedule.
///
/// # Errors
/// A transfer makes no sense, or transfers wait for each other.
pub fn route(
    network: &Network,
    transfers: &[Transfer],
    timing: Timing,
) -> Result<Schedule, RouteError> {
    check(network, transfers, &timing)?;
    let plans = DETOURS.map(|detour| plan(network, transfers, timing, detour));
    let [first, others @ ..] = plans;
    let mut best = first?;
    for plan in others {
        let plan = plan?;
        if plan.end() < best.end() {
            best = plan;
        }
    }
    Ok(best)
}

/// The same with ways of at most so many hops more than the shortest.
fn plan(
    network: &Network,
    transfers: &[Transfer],
    timing: Timing,
    detour: usize,
) -> Result<Schedule, RouteError> {
    let mut planner = Planner { network, timing, links: Links::new(network.links().len()) };
    let mut schedule =
        Schedule { timing, trains: Vec::new(), ends: vec![Ticks(0); transfers.len()] };
    let mut waits: Vec<usize> = transfers.iter().map(|one| one.waits_for().count()).collect();
    let mut next: Vec<Vec<u32>> = vec![Vec::new(); transfers.len()];
    for (number, transfer) in (0..).zip(transfers) {
        for after in transfer.waits_for() {
            next[after as usize].push(number);
        }
    }
    let mut ready: BinaryHeap<Reverse<(usize, u32)>> = BinaryHeap::new();
    let mut ways: Vec<Vec<Path>> = vec![Vec::new(); transfers.len()];
    let mut begins = vec![Ticks(0); transfers.len()];
    let make_ready = |number: u32, ways: &mut Vec<Vec<Path>>| {
        let Transfer { source, target, .. } = transfers[number as usize];
        let found = disjoint(network, source, target, detour);
        let hops = found.first().map(Path::len);
        ways[number as usize] = found;
        hops.map(|hops| Reverse((hops, number))).ok_or(RouteError::NoWay {
            transfer: number,
            from: source,
            to: target,
        })
    };
    for number in (0..transfers.len() as u32).filter(|&n| waits[n as usize] == 0) {
        ready.push(make_ready(number, &mut ways)?);
    }
    let mut done = 0;
    while let Some(Reverse((_, number))) = ready.pop() {
        let place = number as usize;
        let count = timing.vectors(transfers[place].size);
        let paths = std::mem::take(&mut ways[place]);
        schedule.ends[place] =
            planner.spread(number, count, &paths, begins[place], &mut schedule.trains);
        done += 1;
        for &later in &next[place] {
            let begin = &mut begins[later as usize];
            *begin = (*begin).max(schedule.ends[place]);
            waits[later as usize] -= 1;
            if waits[later as usize] == 0 {
                ready.push(make_ready(later, &mut ways)?);
            }
        }
    }
    if done < transfers.len() {
        let stuck = waits.iter().position(|&count| count > 0).expect("one was not done");
        return Err(RouteError::Cycle { transfer: stuck as u32 });
    }
    Ok(schedule)
}

fn check(network: &Network, transfers: &[Transfer], timing: &Timing) -> Result<(), RouteError> {
    for (transfer, asked) in (0..).zip(transfers) {
        let Transfer { source: from, target: to, size, .. } = *asked;
        let vertices = network.vertices();
        if from.0 >= vertices || to.0 >= vertices {
            return Err(RouteError::Vertex { transfer, from, to, vertices });
        }
        if from == to {
            return Err(RouteError::Nowhere { transfer, vertex: from });
        }
        let most = Bytes(timing.buffer * timing.vector.0);
        if size > most {
            return Err(RouteError::Size { transfer, size, most });
        }
        let unknown = asked.waits_for().find(|&after| after as usize >= transfers.len());
        if let Some(after) = unknown {
            return Err(RouteError::After { transfer, after });
        }
    }
    Ok(())
}

struct Planner<'a> {
    network: &'a Network,
    timing: Timing,
    links: Links,
}

impl Planner<'_> {
    /// Spreads a transfer over these ways; when all of it has come.
    fn spread(
        &mut self,
        transfer: u32,
        count: u64,
        paths: &[Path],
        begin: Ticks,
        trains: &mut Vec<Train>,
    ) -> Ticks {
        // What a way would take if one vector went over it, and what each further one adds.
        let mut open: SmallVec<[(Ticks, u64, &Path); 8]> = SmallVec::new();
        for path in paths {
            let slot = self.timing.pace(self.network, path.iter().copied()).0;
            let (_, end) = self.fit(path, begin, slot, 1);
            open.push((Ticks(end.0 - slot), slot, path));
        }
        open.sort_by_key(|&(first, _, _)| first);
        let shares = shares(count, open.iter().map(|&(first, slot, _)| (first.0, slot)));
        let (mut first, mut end) = (0, begin);
        for (&(_, slot, path), share) in open.iter().zip(shares) {
            if share == 0 {
                continue;
            }
            let (hops, came) = self.fit(path, begin, slot, share);
            for hop in &hops {
                self.links.take(hop.link, hop.start, share * slot);
            }
            trains.push(Train { transfer, first, count: share, hops });
            first += share;
            end = end.max(came);
        }
        end
    }

    /// When a train on its own can go over a way, and when it has come.
    fn fit(&self, path: &Path, begin: Ticks, slot: u64, count: u64) -> (SmallVec<[Hop; 3]>, Ticks) {
        let mut at = begin;
        let hops = path.iter().map(|&link| {
            let start = self.links.free(link, at, count * slot);
            at = start + self.timing.hop(self.network.link(link));
            Hop { link, start }
        });
        let hops = hops.collect();
        (hops, at + Ticks(count * slot))
    }
}

/// How many vectors go each way so that the last of all comes as early as it can.
///
/// # Arguments
/// - `ways`: when the first vector would begin to come, and the time between two; the earliest way
///   first.
fn shares(count: u64, ways: impl Iterator<Item = (u64, u64)>) -> Vec<u64> {
    let ways: Vec<(u64, u64)> = ways.collect();
    // The time at which so many have come, by halving: what comes by then only grows with it.
    let come = |time: u64| -> u64 {
        ways.iter().map(|&(first, slot)| time.saturating_sub(first) / slot).sum()
    };
    let (mut low, mut high) = (ways[0].0, ways[0].0 + count * ways[0].1);
    while low < high {
        let middle = low + (high - low) / 2;
        if come(middle) >= count { high = middle } else { low = middle + 1 }
    }
    let mut left = count;
    let part = |&(first, slot): &(u64, u64)| {
        let share = (low.saturating_sub(first) / slot).min(left);
        left -= share;
        share
    };
    ways.iter().map(part).collect()
}
