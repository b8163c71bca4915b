//! List scheduler: assigns every vector its path and its start.
//!
//! Tasks are scheduled one after another: first those that can begin first, and of those that can begin
//! together, those with the fewest hops. A chip computes one task at a time. A transfer is spread over
//! link-disjoint paths so that all of its vectors arrive at once: a path that is longer, or booked for
//! a while, gets fewer, and a small transfer takes the shortest path alone. Non-minimal paths help one
//! transfer and hinder others, so schedules are made without them, with few and with more, and, where
//! affordable, piece by piece around existing bookings; the one with the smallest makespan is kept.
//!
//! Source: the multi-TSP system §4.3. Differs from the paper: it does not say how its compiler orders
//! transfers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

use base::{Bytes, Ticks, VertexId};
use smallvec::SmallVec;
use thiserror::Error;
use topology::{Network, RotationalSymmetry};

use crate::bookings::Bookings;
use crate::earliest;
use crate::paths::{Path, disjoint};
use crate::schedule::{Hop, RoutePlan, Schedule, Timing, Train, part};
use crate::task::{Computation, RouteTransfer, Task};

/// Longest computation: about 11 hours at 900 MHz.
const LENGTH_MAX: Ticks = Ticks(1 << 55);

/// Detours tried: extra hops of a path beyond the shortest.
///
/// Source: the multi-TSP system §4.3, non-minimal routes inside a node and between nodes.
const DETOURS: [usize; 4] = [0, 1, 2, 5];

/// Memory limit of planning on this machine.
const PLANNING_MAX: Bytes = Bytes(6 << 30);

/// Checks that a chip's memory holds `count` shards or blocks.
pub(crate) fn check_memory(shard: Bytes, count: u64, timing: &Timing) -> Result<(), RouteError> {
    let tensor = Bytes(shard.0.saturating_mul(count));
    let most = timing.memory();
    if tensor <= most { Ok(()) } else { Err(RouteError::Memory { tensor, most }) }
}

/// Checks that planning stays within its memory limit.
pub(crate) fn check_planning(needed: u128) -> Result<(), RouteError> {
    if needed <= u128::from(PLANNING_MAX.0) {
        return Ok(());
    }
    let needed = Bytes(u64::try_from(needed).unwrap_or(u64::MAX));
    Err(RouteError::Planning { needed, most: PLANNING_MAX })
}

/// Why tasks cannot be scheduled.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RouteError {
    /// A transfer has an unknown vertex, or a computation is on a switch.
    #[error("task {task} is between vertices {from} and {to}; there are {vertices}")]
    Vertex {
        /// The task.
        task: u32,
        /// Source.
        from: VertexId,
        /// Target.
        to: VertexId,
        /// Number of vertices.
        vertices: u32,
    },
    /// A transfer from a vertex to itself.
    #[error("task {task} goes from vertex {vertex} to itself")]
    Nowhere {
        /// The task.
        task: u32,
        /// The vertex.
        vertex: VertexId,
    },
    /// A tensor is larger than a chip's memory.
    #[error("task {task} is of {size}; a chip holds {most}")]
    Size {
        /// The task.
        task: u32,
        /// Size of the tensor.
        size: Bytes,
        /// Memory of a chip.
        most: Bytes,
    },
    /// A task depends on an unknown task.
    #[error("task {task} comes after task {after}, which is not there")]
    After {
        /// The task.
        task: u32,
        /// The unknown task.
        after: u32,
    },
    /// A computation is too long.
    #[error("task {task} computes for {length} cycles; expected at most {most}")]
    Long {
        /// The task.
        task: u32,
        /// Its length.
        length: Ticks,
        /// Maximum length.
        most: Ticks,
    },
    /// A forwarded tensor does not arrive at the source of its transfer, or not all of it.
    #[error("task {task} sends on what task {from} brings, which is not at vertex {vertex}")]
    Brings {
        /// The task.
        task: u32,
        /// The transfer that should bring it.
        from: u32,
        /// The source of the transfer.
        vertex: VertexId,
    },
    /// Links differ in an all-to-all, or have no equal reverse link in a reduction.
    #[error(
        "an all-to-all needs links that are all alike, and sums need each with one like it that leads \
         back; this fabric has other links"
    )]
    Uneven,
    /// Too many endpoints to search for trees.
    #[error(
        "a collective over switches or links that differ is planned for at most {most} endpoints; this \
         fabric has {found}"
    )]
    Many {
        /// Number of endpoints.
        found: u32,
        /// Maximum number of endpoints.
        most: u32,
    },
    /// A collective's tensor is larger than a chip's memory.
    #[error("a tensor of {tensor} and what comes of it do not fit a chip's memory of {most}")]
    Memory {
        /// Size that each chip must hold.
        tensor: Bytes,
        /// Memory of a chip.
        most: Bytes,
    },
    /// Planning needs too much memory.
    #[error("planning it would take {needed} of this machine's memory; expected at most {most}")]
    Planning {
        /// Memory needed.
        needed: Bytes,
        /// Memory limit.
        most: Bytes,
    },
    /// A cycle of dependencies.
    #[error("task {task} waits for itself, or for others that wait for it")]
    Cycle {
        /// A task on or behind the cycle.
        task: u32,
    },
    /// No path joins the ends of a transfer.
    #[error("there is no path from vertex {from} to vertex {to} for task {task}")]
    NoPath {
        /// The task.
        task: u32,
        /// Source.
        from: VertexId,
        /// Target.
        to: VertexId,
    },
}

/// Schedules tasks on a fabric. Deterministic: the same tasks give the same plan.
///
/// # Errors
/// A task is invalid, its ends are not connected, or dependencies form a cycle.
pub fn route(
    network: &Network,
    tasks: impl IntoIterator<Item = impl Into<Task>>,
    timing: Timing,
) -> Result<RoutePlan, RouteError> {
    let tasks: Vec<Task> = tasks.into_iter().map(Into::into).collect();
    check(network, &tasks, &timing)?;
    let paths = disjoint_paths(network, &tasks)?;
    let plan = |strategy| plan(network, &tasks, timing, &paths, strategy);
    let mut best = plan(Strategy::Disjoint(DETOURS[0]))?;
    let transfers = tasks.iter().filter(|task| task.transfer().is_some()).count();
    let around = earliest::is_affordable(network, transfers).then_some(Strategy::Pieces);
    let others = DETOURS[1..].iter().map(|&detour| Strategy::Disjoint(detour)).chain(around);
    for plan in others.map(plan) {
        let plan = plan?;
        if plan.end() < best.end() {
            best = plan;
        }
    }
    Ok(RoutePlan { circle: RotationalSymmetry::trivial(network), tasks, schedule: best })
}

/// Link-disjoint paths between pairs of vertices.
type DisjointPaths = BTreeMap<(VertexId, VertexId), Vec<Path>>;

/// Returns the disjoint paths of all transfers, the shortest first, as many as any strategy needs.
fn disjoint_paths(network: &Network, tasks: &[Task]) -> Result<DisjointPaths, RouteError> {
    let mut paths = DisjointPaths::new();
    let transfers = (0..).zip(tasks).filter_map(|(task, one)| Some((task, one.transfer()?)));
    for (task, &RouteTransfer { source: from, target: to, .. }) in transfers {
        let most = DETOURS[DETOURS.len() - 1];
        let found = paths.entry((from, to)).or_insert_with(|| disjoint(network, from, to, most));
        if found.is_empty() {
            return Err(RouteError::NoPath { task, from, to });
        }
    }
    Ok(paths)
}

/// Routing strategy of a plan.
#[derive(Clone, Copy, Debug)]
enum Strategy {
    /// Over link-disjoint paths of at most this many hops more than the shortest.
    Disjoint(usize),
    /// Piece by piece, around existing bookings.
    Pieces,
}

impl Strategy {
    /// Returns the number of pieces that a task is divided into.
    fn pieces(self, task: &Task, timing: &Timing) -> u64 {
        match (self, task.transfer()) {
            (Strategy::Pieces, Some(transfer)) => {
                timing.vectors(transfer.size).clamp(1, earliest::PIECES)
            }
            _ => 1,
        }
    }
}

/// Makes a schedule by one strategy, by list scheduling.
fn plan(
    network: &Network,
    tasks: &[Task],
    timing: Timing,
    paths: &DisjointPaths,
    strategy: Strategy,
) -> Result<Schedule, RouteError> {
    let links = Bookings::new(network.links().len());
    let chips = Bookings::new(network.endpoints() as usize);
    let mut planner = Planner { network, timing, links, chips };
    let mut schedule = Schedule { timing, trains: Vec::new(), ends: vec![Ticks(0); tasks.len()] };
    let hops = |number: u32| {
        let transfer = tasks[number as usize].transfer();
        transfer.map_or(0, |one| paths[&(one.source, one.target)][0].len())
    };
    let mut ready = ReadyList::new(tasks, hops);
    while let Some(Ready { begin, piece, hops, number }) = ready.pop() {
        let place = number as usize;
        let pieces = strategy.pieces(&tasks[place], &timing);
        let end = match &tasks[place] {
            Task::Transfer(transfer) => {
                let vectors = part(timing.vectors(transfer.size), pieces, piece);
                let ends = (transfer.source, transfer.target);
                let known = paths[&ends].as_slice();
                match strategy {
                    Strategy::Disjoint(detour) => {
                        let most = known.partition_point(|path| path.len() <= hops + detour);
                        planner.spread(number, vectors, &known[..most], begin, &mut schedule.trains)
                    }
                    Strategy::Pieces => {
                        let size = (begin, vectors.end - vectors.start);
                        let path = earliest::path(network, &timing, &planner.links, ends, size);
                        let path = path.unwrap_or_else(|| known[0].clone());
                        planner.spread(number, vectors, &[path], begin, &mut schedule.trains)
                    }
                }
            }
            Task::Computation(Computation { chip, length, .. }) => {
                planner.compute(*chip, *length, begin)
            }
        };
        schedule.ends[place] = schedule.ends[place].max(end);
        if piece + 1 < pieces {
            ready.push(Ready { begin, piece: piece + 1, hops, number });
        } else {
            ready.finish(number, schedule.ends[place]);
        }
    }
    match ready.stuck() {
        None => Ok(schedule),
        Some(task) => Err(RouteError::Cycle { task }),
    }
}

/// A part of a task whose dependencies are done. The order of fields is the order of planning: the
/// earliest begin first, then pieces in turn, then the fewest hops.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Ready {
    begin: Ticks,
    piece: u64,
    hops: usize,
    number: u32,
}

/// The ready list of list scheduling.
struct ReadyList<Hops> {
    ready: BinaryHeap<Reverse<Ready>>,
    /// Minimum hops of each task.
    hops: Hops,
    /// Number of unfinished dependencies of each task.
    waits: Vec<usize>,
    /// Tasks that depend on each task.
    next: Vec<Vec<u32>>,
    /// When each task may begin, by the dependencies that are done.
    begins: Vec<Ticks>,
}

impl<Hops: Fn(u32) -> usize> ReadyList<Hops> {
    fn new(tasks: &[Task], hops: Hops) -> Self {
        let waits: Vec<usize> = tasks.iter().map(|one| one.waits_for().count()).collect();
        let mut next: Vec<Vec<u32>> = vec![Vec::new(); tasks.len()];
        for (number, task) in (0..).zip(tasks) {
            for after in task.waits_for() {
                next[after as usize].push(number);
            }
        }
        let begins = vec![Ticks(0); tasks.len()];
        let mut made = Self { ready: BinaryHeap::new(), hops, waits, next, begins };
        for number in 0..tasks.len() as u32 {
            if made.waits[number as usize] == 0 {
                made.push_first(number);
            }
        }
        made
    }

    fn push_first(&mut self, number: u32) {
        let (begin, hops) = (self.begins[number as usize], (self.hops)(number));
        self.push(Ready { begin, piece: 0, hops, number });
    }

    fn push(&mut self, ready: Ready) {
        self.ready.push(Reverse(ready));
    }

    fn pop(&mut self) -> Option<Ready> {
        self.ready.pop().map(|Reverse(ready)| ready)
    }

    /// Adds the tasks for which this was the last dependency.
    fn finish(&mut self, number: u32, end: Ticks) {
        for later in std::mem::take(&mut self.next[number as usize]) {
            let begin = &mut self.begins[later as usize];
            *begin = (*begin).max(end);
            self.waits[later as usize] -= 1;
            if self.waits[later as usize] == 0 {
                self.push_first(later);
            }
        }
    }

    /// Returns a task that waits for dependencies that never end, once nothing is ready any more.
    fn stuck(&self) -> Option<u32> {
        self.waits.iter().position(|&count| count > 0).map(|task| task as u32)
    }
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
    /// Spreads vectors of a transfer over these paths and books their links; returns when all have
    /// arrived.
    fn spread(
        &mut self,
        task: u32,
        vectors: Range<u64>,
        paths: &[Path],
        begin: Ticks,
        trains: &mut Vec<Train>,
    ) -> Ticks {
        // For each path, when the first vector would begin to arrive, and the time that each further
        // one adds.
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

    /// Books the first free time of a chip for a computation; returns its end.
    fn compute(&mut self, chip: VertexId, length: Ticks, begin: Ticks) -> Ticks {
        let chip = chip.0 as usize;
        let start = self.chips.free(chip, begin, length.0);
        self.chips.take(chip, start, length.0);
        start + length
    }

    /// Fits a train on a path at the earliest free times; returns its hops and when all of it has
    /// arrived.
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

/// Returns how many vectors each path carries so that the last one arrives as early as possible.
///
/// # Arguments
/// - `paths`: for each path, when the first vector would begin to arrive, and the time between two; the
///   earliest path first.
fn shares(count: u64, paths: impl Iterator<Item = (u64, u64)>) -> Vec<u64> {
    let paths: Vec<(u64, u64)> = paths.collect();
    // The time by which `count` vectors have arrived, by bisection: arrivals grow monotonically with
    // it.
    let come = |time: u64| -> u64 {
        paths.iter().map(|&(first, slot)| time.saturating_sub(first) / slot).sum()
    };
    let (mut low, mut high) = (paths[0].0, paths[0].0 + count * paths[0].1);
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
    paths.iter().map(part).collect()
}
