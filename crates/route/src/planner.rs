//! Gives every vector its way and its start.
//!
//! Tasks are taken one after another: those that could begin first, and of those that could begin
//! together those with the fewest hops. A chip computes one thing at a time. A transfer is spread
//! over ways that share no link so that all of its vectors come at once: a way that is longer, or
//! taken for a while, gets fewer, and what is small goes the shortest way alone. Ways that are not
//! the shortest help one transfer and hinder others, so all is planned without them, with few and
//! with more, and, where it is not too much, piece by piece around what is taken; what comes first
//! is kept.
//!
//! Source: the multi-TSP system §4.3. Differs from the paper: it does not say how its compiler
//! orders transfers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

use base::{Bytes, Ticks, VertexId};
use fabric::{Network, RotationalSymmetry};
use smallvec::SmallVec;
use thiserror::Error;

use crate::bookings::Bookings;
use crate::earliest;
use crate::paths::{Path, disjoint};
use crate::schedule::{Hop, RoutePlan, Schedule, Timing, Train, part};
use crate::task::{Computation, RouteTransfer, Task};

/// The longest computation: 10 hours of 900 MHz.
const LENGTH_MAX: Ticks = Ticks(1 << 55);

/// How many hops more than the shortest a way may have.
///
/// Source: the multi-TSP system §4.3, non-minimal routes inside a node and between nodes.
const DETOURS: [usize; 4] = [0, 1, 2, 5];

/// What planning may take of this machine's memory.
const PLANNING_MAX: Bytes = Bytes(6 << 30);

/// Refuses shards, or blocks, of which a chip's memory does not hold so many.
pub(crate) fn check_memory(shard: Bytes, count: u64, timing: &Timing) -> Result<(), RouteError> {
    let tensor = Bytes(shard.0.saturating_mul(count));
    let most = timing.memory();
    if tensor <= most { Ok(()) } else { Err(RouteError::Memory { tensor, most }) }
}

/// Refuses what would take more memory than planning may.
pub(crate) fn check_planning(needed: u128) -> Result<(), RouteError> {
    if needed <= u128::from(PLANNING_MAX.0) {
        return Ok(());
    }
    let needed = Bytes(u64::try_from(needed).unwrap_or(u64::MAX));
    Err(RouteError::Planning { needed, most: PLANNING_MAX })
}

/// What cannot be scheduled.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RouteError {
    /// A transfer of somebody who is not there, or a computation of a switch.
    #[error("task {task} is between vertices {from} and {to}; there are {vertices}")]
    Vertex {
        /// Which task.
        task: u32,
        /// Who has it.
        from: VertexId,
        /// Who gets it.
        to: VertexId,
        /// How many there are.
        vertices: u32,
    },
    /// A transfer to where it is.
    #[error("task {task} goes from vertex {vertex} to itself")]
    Nowhere {
        /// Which task.
        task: u32,
        /// Where it is.
        vertex: VertexId,
    },
    /// More than a chip holds.
    #[error("task {task} is of {size}; a chip holds {most}")]
    Size {
        /// Which task.
        task: u32,
        /// How much it is.
        size: Bytes,
        /// What a chip holds.
        most: Bytes,
    },
    /// It waits for what is not there.
    #[error("task {task} comes after task {after}, which is not there")]
    After {
        /// Which task.
        task: u32,
        /// What it waits for.
        after: u32,
    },
    /// It computes for ever.
    #[error("task {task} computes for {length} cycles; expected at most {most}")]
    Long {
        /// Which task.
        task: u32,
        /// How long it computes.
        length: Ticks,
        /// How long it may.
        most: Ticks,
    },
    /// What it is to send on does not come to where it leaves from, or not all of it.
    #[error("task {task} sends on what task {from} brings, which is not at vertex {vertex}")]
    Brings {
        /// Which task.
        task: u32,
        /// What should bring it.
        from: u32,
        /// Where it leaves from.
        vertex: VertexId,
    },
    /// Links that differ, where all are exchanged, or lead one way only, where sums are made.
    #[error(
        "an all-to-all needs links that are all alike, and sums need each with one like it that leads \
         back; this fabric has other links"
    )]
    Uneven,
    /// More endpoints than trees are looked for.
    #[error(
        "a collective over switches or links that differ is planned for at most {most} endpoints; this \
         fabric has {found}"
    )]
    Many {
        /// How many there are.
        found: u32,
        /// How many there may be.
        most: u32,
    },
    /// More than a chip holds, of a collective.
    #[error("a tensor of {tensor} and what comes of it do not fit a chip's memory of {most}")]
    Memory {
        /// What each chip has of it in the end.
        tensor: Bytes,
        /// What a chip holds.
        most: Bytes,
    },
    /// More than can be planned.
    #[error("planning it would take {needed} of this machine's memory; expected at most {most}")]
    Planning {
        /// What it would take.
        needed: Bytes,
        /// What it may take.
        most: Bytes,
    },
    /// Transfers that wait for each other.
    #[error("task {task} waits for itself, or for others that wait for it")]
    Cycle {
        /// One of them.
        task: u32,
    },
    /// No way.
    #[error("there is no way from vertex {from} to vertex {to} for task {task}")]
    NoWay {
        /// Which task.
        task: u32,
        /// Who has it.
        from: VertexId,
        /// Who gets it.
        to: VertexId,
    },
}

/// Schedules tasks on a fabric. The same tasks give the same plan.
///
/// # Errors
/// A task makes no sense, or tasks wait for each other.
pub fn route(
    network: &Network,
    tasks: impl IntoIterator<Item = impl Into<Task>>,
    timing: Timing,
) -> Result<RoutePlan, RouteError> {
    let tasks: Vec<Task> = tasks.into_iter().map(Into::into).collect();
    check(network, &tasks, &timing)?;
    let ways = ways(network, &tasks)?;
    let plan = |strategy| plan(network, &tasks, timing, &ways, strategy);
    let mut best = plan(Strategy::Ways(DETOURS[0]))?;
    let transfers = tasks.iter().filter(|task| task.transfer().is_some()).count();
    let around = earliest::is_affordable(network, transfers).then_some(Strategy::Pieces);
    let others = DETOURS[1..].iter().map(|&detour| Strategy::Ways(detour)).chain(around);
    for plan in others.map(plan) {
        let plan = plan?;
        if plan.end() < best.end() {
            best = plan;
        }
    }
    Ok(RoutePlan { circle: RotationalSymmetry::trivial(network), tasks, schedule: best })
}

/// Ways that share no link, between two vertices.
type Ways = BTreeMap<(VertexId, VertexId), Vec<Path>>;

/// Those of all transfers, the shortest first, each list as long as any plan may want it.
fn ways(network: &Network, tasks: &[Task]) -> Result<Ways, RouteError> {
    let mut ways = Ways::new();
    let transfers = (0..).zip(tasks).filter_map(|(task, one)| Some((task, one.transfer()?)));
    for (task, &RouteTransfer { source: from, target: to, .. }) in transfers {
        let most = DETOURS[DETOURS.len() - 1];
        let found = ways.entry((from, to)).or_insert_with(|| disjoint(network, from, to, most));
        if found.is_empty() {
            return Err(RouteError::NoWay { task, from, to });
        }
    }
    Ok(ways)
}

/// How transfers find their ways.
#[derive(Clone, Copy, Debug)]
enum Strategy {
    /// Over those that share no link, of at most so many hops more than the shortest.
    Ways(usize),
    /// Piece by piece, around what is taken.
    Pieces,
}

impl Strategy {
    /// Into how many pieces it cuts a task.
    fn pieces(self, task: &Task, timing: &Timing) -> u64 {
        match (self, task.transfer()) {
            (Strategy::Pieces, Some(transfer)) => {
                timing.vectors(transfer.size).clamp(1, earliest::PIECES)
            }
            _ => 1,
        }
    }
}

/// The schedule that one strategy makes.
fn plan(
    network: &Network,
    tasks: &[Task],
    timing: Timing,
    ways: &Ways,
    strategy: Strategy,
) -> Result<Schedule, RouteError> {
    let links = Bookings::new(network.links().len());
    let chips = Bookings::new(network.endpoints() as usize);
    let mut planner = Planner { network, timing, links, chips };
    let mut schedule = Schedule { timing, trains: Vec::new(), ends: vec![Ticks(0); tasks.len()] };
    let mut waits: Vec<usize> = tasks.iter().map(|one| one.waits_for().count()).collect();
    let mut next: Vec<Vec<u32>> = vec![Vec::new(); tasks.len()];
    for (number, task) in (0..).zip(tasks) {
        for after in task.waits_for() {
            next[after as usize].push(number);
        }
    }
    // When it may begin, which piece it is, over how many hops at least, of what.
    let mut ready: BinaryHeap<Reverse<(Ticks, u64, usize, u32)>> = BinaryHeap::new();
    let mut begins = vec![Ticks(0); tasks.len()];
    let known = |transfer: &RouteTransfer| ways[&(transfer.source, transfer.target)].as_slice();
    let in_turn = |number: u32, begin: Ticks| {
        let hops = tasks[number as usize].transfer().map_or(0, |one| known(one)[0].len());
        Reverse((begin, 0, hops, number))
    };
    for number in (0..tasks.len() as u32).filter(|&n| waits[n as usize] == 0) {
        ready.push(in_turn(number, Ticks(0)));
    }
    let mut done = 0;
    while let Some(Reverse((begin, piece, hops, number))) = ready.pop() {
        let place = number as usize;
        let pieces = strategy.pieces(&tasks[place], &timing);
        let end = match &tasks[place] {
            Task::Transfer(transfer) => {
                let vectors = part(timing.vectors(transfer.size), pieces, piece);
                let ends = (transfer.source, transfer.target);
                match strategy {
                    Strategy::Ways(detour) => {
                        let ways = known(transfer);
                        let most = ways.partition_point(|path| path.len() <= hops + detour);
                        planner.spread(number, vectors, &ways[..most], begin, &mut schedule.trains)
                    }
                    Strategy::Pieces => {
                        let size = (begin, vectors.end - vectors.start);
                        let way = earliest::way(network, &timing, &planner.links, ends, size);
                        let way = way.unwrap_or_else(|| known(transfer)[0].clone());
                        planner.spread(number, vectors, &[way], begin, &mut schedule.trains)
                    }
                }
            }
            Task::Computation(Computation { chip, length, .. }) => {
                planner.compute(*chip, *length, begin)
            }
        };
        schedule.ends[place] = schedule.ends[place].max(end);
        if piece + 1 < pieces {
            ready.push(Reverse((begin, piece + 1, hops, number)));
            continue;
        }
        done += 1;
        for &later in &next[place] {
            let begin = &mut begins[later as usize];
            *begin = (*begin).max(schedule.ends[place]);
            waits[later as usize] -= 1;
            if waits[later as usize] == 0 {
                ready.push(in_turn(later, begins[later as usize]));
            }
        }
    }
    if done < tasks.len() {
        let stuck = waits.iter().position(|&count| count > 0).expect("one was not done");
        return Err(RouteError::Cycle { task: stuck as u32 });
    }
    Ok(schedule)
}

fn check(network: &Network, tasks: &[Task], timing: &Timing) -> Result<(), RouteError> {
    for (task, asked) in (0..).zip(tasks) {
        let unknown = asked.waits_for().find(|&after| after as usize >= tasks.len());
        if let Some(after) = unknown {
            return Err(RouteError::After { task, after });
        }
        let vertices = network.vertices();
        match *asked {
            Task::Transfer(RouteTransfer {
                source: from,
                target: to,
                size,
                from: ref brought,
                ..
            }) => {
                let brings = |other: &u32| {
                    let other = tasks[*other as usize].transfer();
                    other.is_some_and(|one| one.target == from && one.size >= size)
                };
                if let Some(&other) = brought.iter().find(|other| !brings(other)) {
                    return Err(RouteError::Brings { task, from: other, vertex: from });
                }
                if from.0 >= vertices || to.0 >= vertices {
                    return Err(RouteError::Vertex { task, from, to, vertices });
                }
                if from == to {
                    return Err(RouteError::Nowhere { task, vertex: from });
                }
                let most = timing.memory();
                if size > most {
                    return Err(RouteError::Size { task, size, most });
                }
            }
            Task::Computation(Computation { chip, length, .. }) => {
                if chip.0 >= network.endpoints() {
                    return Err(RouteError::Vertex { task, from: chip, to: chip, vertices });
                }
                if length > LENGTH_MAX {
                    return Err(RouteError::Long { task, length, most: LENGTH_MAX });
                }
            }
        }
    }
    Ok(())
}

struct Planner<'a> {
    network: &'a Network,
    timing: Timing,
    links: Bookings,
    chips: Bookings,
}

impl Planner<'_> {
    /// Spreads vectors of a transfer over these ways; when all of them have come.
    fn spread(
        &mut self,
        task: u32,
        vectors: Range<u64>,
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
        let shares = shares(
            vectors.end - vectors.start,
            open.iter().map(|&(first, slot, _)| (first.0, slot)),
        );
        let (mut first, mut end) = (vectors.start, begin);
        for (&(_, slot, path), share) in open.iter().zip(shares) {
            if share == 0 {
                continue;
            }
            let (hops, came) = self.fit(path, begin, slot, share);
            for hop in &hops {
                self.links.take(hop.link.0 as usize, hop.start, share * slot);
            }
            trains.push(Train { task, first, count: share, hops });
            first += share;
            end = end.max(came);
        }
        end
    }

    /// Lets a chip compute when it is free; when it is done.
    fn compute(&mut self, chip: VertexId, length: Ticks, begin: Ticks) -> Ticks {
        let chip = chip.0 as usize;
        let start = self.chips.free(chip, begin, length.0);
        self.chips.take(chip, start, length.0);
        start + length
    }

    /// When a train on its own can go over a way, and when it has come.
    fn fit(&self, path: &Path, begin: Ticks, slot: u64, count: u64) -> (SmallVec<[Hop; 3]>, Ticks) {
        let mut at = begin;
        let hops = path.iter().map(|&link| {
            let start = self.links.free(link.0 as usize, at, count * slot);
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
