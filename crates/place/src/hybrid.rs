//! Hybrid parallelism: searches for the number of copies of a model, the devices of each, and the batch
//! size.
//!
//! Source: SiP-ML §3.2 and §4.1: all splits of devices into copies and devices per copy, for all batch
//! sizes whose number of steps is known; the fastest wins. Differs from the paper: the largest number
//! of shards per operation is searched for as well.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{Bytes, Nanos};
use ir::{Collective, Dependency, StepGraph, StepNode, StepOp};

use crate::assign::{Assigned, PlacementLimits, Rule, placed_by, placements};
use crate::balance::{Balanced, ShardCollective};
use crate::estimate::DeviceModel;
use crate::ops::{OpError, OpGraph, OpSum, Split};

/// Bucket size of gradients: an all-reduce is issued for each bucket of at least this many bytes, and
/// for the rest.
///
/// Assumed: as PyTorch's DDP does.
const BUCKET: u64 = 25 << 20;

/// A strategy of data and model parallelism.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParallelismCut {
    /// Number of copies (data parallelism).
    pub copies: u32,
    /// Devices per copy (model parallelism).
    pub devices: u32,
    /// Most shards per operation.
    pub width: u32,
}

/// A model spread over devices by a strategy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spread {
    /// Samples per step, over all copies.
    pub batch: u32,
    /// Steps to train the model.
    pub steps: u64,
    /// The strategy.
    pub cut: ParallelismCut,
    /// Placement of the shards of one copy.
    pub assigned: Assigned,
    /// Number of shards of a copy.
    pub shards: u32,
    /// Simulated time of a step.
    pub step: Nanos,
    /// Largest memory in use on a device.
    pub memory: Bytes,
}

/// One strategy for a model, simulated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SimulatedPlacement<T> {
    /// The shards of a copy.
    pub balanced: Balanced,
    /// Their placement.
    pub assigned: Assigned,
    /// Estimated makespan of a copy without contention, under the placement that is best then.
    pub estimate: Nanos,
    /// Simulated time of a step.
    pub step: Nanos,
    /// The step graph.
    pub graph: StepGraph,
    /// Other results of the simulation.
    pub came: T,
}

/// The search problem.
#[derive(Clone, Debug)]
pub struct ParallelismSearch<'a> {
    /// The model.
    pub graph: &'a OpGraph,
    /// The devices of the whole fabric.
    pub room: DeviceModel,
    /// Time quantum: target compute time of a shard.
    pub quantum: Nanos,
    /// Batch sizes, each with the number of steps to train.
    pub curve: &'a [(u32, u64)],
    /// Most devices of a copy.
    pub spread_max: u32,
    /// The number of devices of a part is a multiple of this, so that parts are alike.
    pub part: u32,
    /// Limits of the search for placements.
    pub limits: PlacementLimits,
}

impl ParallelismSearch<'_> {
    /// Simulates one strategy, with the placement of a rule, or with the best placement found.
    ///
    /// # Arguments
    /// - `judge`: simulates a step; returns its time and other results.
    ///
    /// # Errors
    /// The model does not fit in memory or is invalid; errors of `judge`.
    pub fn carried<T, E: From<OpError>>(
        &self,
        samples: u32,
        cut: ParallelismCut,
        rule: Option<Rule>,
        judge: impl FnMut(&StepGraph) -> Result<(Nanos, T), E>,
    ) -> Result<SimulatedPlacement<T>, E> {
        self.judged(self.placements(samples, cut, rule)?, cut, judge)
    }

    /// The placement with the shortest simulated step.
    fn judged<T, E: From<OpError>>(
        &self,
        (balanced, placements): (Balanced, Vec<Assigned>),
        cut: ParallelismCut,
        mut judge: impl FnMut(&StepGraph) -> Result<(Nanos, T), E>,
    ) -> Result<SimulatedPlacement<T>, E> {
        let estimate = placements[0].end;
        let mut best: Option<(Assigned, Nanos, StepGraph, T)> = None;
        for assigned in placements {
            // Prune: the estimate without contention is taken as a lower bound on the simulated time.
            if best.as_ref().is_some_and(|best| assigned.end >= best.1) {
                break;
            }
            let graph = step_of(self.graph, &balanced, &assigned, cut, self.part)?;
            let (step, came) = judge(&graph)?;
            if best.as_ref().is_none_or(|best| step < best.1) {
                best = Some((assigned, step, graph, came));
            }
        }
        let (assigned, step, graph, came) = best.expect("there is a placement");
        Ok(SimulatedPlacement { balanced, assigned, estimate, step, graph, came })
    }

    /// Placements of a copy, by estimated makespan.
    fn placements(
        &self,
        samples: u32,
        ParallelismCut { devices, width, .. }: ParallelismCut,
        rule: Option<Rule>,
    ) -> Result<(Balanced, Vec<Assigned>), OpError> {
        let costed = self.graph.at(samples)?;
        let balanced = Balanced::new(self.graph, &costed, self.quantum, width);
        let room = DeviceModel { devices, reach: self.room.reach.min(devices), ..self.room };
        let placements = match rule {
            Some(rule) => vec![placed_by(self.graph, &balanced, &room, rule)?],
            None => placements(self.graph, &balanced, &room, &self.limits)?,
        };
        Ok((balanced, placements))
    }

    /// Simulates all strategies for the model; returns those that fit in memory.
    ///
    /// # Arguments
    /// - `judge`: simulates a step; returns its time.
    /// - `tell`: progress callback with the number of strategies done and of all; returns whether to
    ///   continue.
    ///
    /// # Errors
    /// No strategy fits in memory, or the model is invalid; errors of `judge`.
    pub fn all<E: From<OpError>>(
        &self,
        mut judge: impl FnMut(&StepGraph) -> Result<Nanos, E>,
        mut tell: impl FnMut(usize, usize) -> bool,
    ) -> Result<Vec<Spread>, E> {
        let strategies = self.strategies();
        let (mut found, mut full) = (Vec::new(), None);
        for (number, &(batch, steps, cut)) in strategies.iter().enumerate() {
            if !tell(number, strategies.len()) {
                break;
            }
            let placements = match self.placements(batch / cut.copies, cut, None) {
                Ok(placements) => placements,
                Err(error @ (OpError::Large { .. } | OpError::Full { .. })) => {
                    full = Some(error);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let judge = |step: &StepGraph| Ok::<_, E>((judge(step)?, ()));
            let carried = self.judged(placements, cut, judge)?;
            let SimulatedPlacement { balanced, assigned, step, .. } = carried;
            let held = balanced.held(&assigned.devices, cut.devices);
            let memory = held.into_iter().max().unwrap_or_default();
            let shards = balanced.shards.len() as u32;
            found.push(Spread { batch, steps, cut, assigned, shards, step, memory });
        }
        match full {
            Some(error) if found.is_empty() => Err(error.into()),
            _ => Ok(found),
        }
    }

    fn strategies(&self) -> Vec<(u32, u64, ParallelismCut)> {
        let all = self.room.devices;
        // Blocks connect to blocks at any number of shards, so try the largest only; collectives
        // between fewer shards communicate less, so there try all.
        let is_uniform = self.graph.ops.iter().all(|op| op.split == Split::Blocks);
        let cuts = |batch: u32| {
            let copies = powers(all.min(batch)).filter(move |&copies| {
                all.is_multiple_of(copies)
                    && batch.is_multiple_of(copies)
                    && all / copies <= self.spread_max
            });
            copies.flat_map(move |copies| {
                let devices = all / copies;
                let widths = powers(devices).filter(move |&width| {
                    devices.is_multiple_of(width) && (!is_uniform || 2 * width > devices)
                });
                widths.map(move |width| ParallelismCut { copies, devices, width })
            })
        };
        self.curve
            .iter()
            .flat_map(|&(batch, steps)| cuts(batch).map(move |cut| (batch, steps, cut)))
            .collect()
    }
}

/// Powers of two up to `most`.
fn powers(most: u32) -> impl Iterator<Item = u32> {
    let all = std::iter::successors(Some(1_u32), |power| power.checked_mul(2));
    all.take_while(move |&power| power <= most)
}

/// The step graph of a placed model: one part of all devices, which represents the others.
///
/// # Errors
/// The size of a collective overflows.
///
/// # Arguments
/// - `cut`: the strategy; copies are on consecutive ranges of devices.
/// - `part`: the number of devices of a part is a multiple of this, if possible.
pub fn step_of(
    graph: &OpGraph,
    balanced: &Balanced,
    assigned: &Assigned,
    cut: ParallelismCut,
    part: u32,
) -> Result<StepGraph, OpError> {
    let ParallelismCut { copies, devices, .. } = cut;
    // Fewest copies whose devices make up a whole part.
    let whole = (1..=copies)
        .find(|&count| copies.is_multiple_of(count) && (count * devices).is_multiple_of(part));
    let count = whole.unwrap_or(copies);
    let mut step = StepGraph::of_parts("step", count * devices, copies / count);
    let names: Vec<Arc<str>> = graph.ops.iter().map(|op| op.name.as_str().into()).collect();
    let mut done: Vec<Vec<u32>> = Vec::new();
    for first in (0..count).map(|copy| copy * devices) {
        done.push(add_copy(&mut step, &names, balanced, assigned, first)?);
    }
    add_gradients(&mut step, graph, balanced, assigned, cut, &done)?;
    for sum in &graph.sums {
        for (copy, done) in (0..).zip(&done) {
            add_sum(&mut step, sum, balanced, assigned, copy * devices, done)?;
        }
    }
    Ok(step)
}

/// Adds one copy whose first device is `first`; returns the node of each shard.
fn add_copy(
    step: &mut StepGraph,
    names: &[Arc<str>],
    balanced: &Balanced,
    assigned: &Assigned,
    first: u32,
) -> Result<Vec<u32>, OpError> {
    let mut done: Vec<u32> = Vec::with_capacity(balanced.shards.len());
    // By shard, the devices that it sends to, and the transfer node for each.
    let mut sent: Vec<Vec<(u32, u32)>> = vec![Vec::new(); balanced.shards.len()];
    let mut sizes: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (shard, &device) in balanced.shards.iter().zip(&assigned.devices) {
        for &(from, size) in shard.after.iter().filter(|_| shard.meeting.is_none()) {
            *sizes.entry((from, device)).or_default() += size.0;
        }
    }
    let places = assigned.devices.iter().zip(&assigned.urgencies);
    for (number, (shard, (&device, &urgency))) in balanced.shards.iter().zip(places).enumerate() {
        let name = &names[shard.op as usize];
        if let Some(ShardCollective { kind, size, .. }) = &shard.meeting {
            let members = balanced.members(number, &assigned.devices);
            let devices: Vec<u32> = members.into_iter().map(|member| first + member).collect();
            let after: Vec<Dependency> =
                shard.after.iter().map(|&(from, _)| Dependency::on(done[from as usize])).collect();
            let make = |ranks, size| Collective::of_kind(kind.clone(), ranks, size);
            done.push(step.add(name.clone(), StepOp::collective(make, devices, *size)?, &after));
            continue;
        }
        let mut after = Vec::with_capacity(shard.after.len());
        for &(from, _) in &shard.after {
            let source = assigned.devices[from as usize];
            if source == device || balanced.shards[from as usize].meeting.is_some() {
                after.push(done[from as usize]);
                continue;
            }
            let known = sent[from as usize].iter().find(|(to, _)| *to == device);
            let node = known.map(|&(_, node)| node).unwrap_or_else(|| {
                let size = Bytes(sizes[&(from, device)]);
                let (source, target) = (first + source, first + device);
                let transfer = StepOp::Transfer { source, target, size };
                let node = step.add(name.clone(), transfer, &[Dependency::on(done[from as usize])]);
                sent[from as usize].push((device, node));
                node
            });
            after.push(node);
        }
        after.sort_unstable();
        after.dedup();
        let op = StepOp::compute(first + device, shard.time);
        let after: Vec<Dependency> = after.into_iter().map(Dependency::on).collect();
        let node = StepNode { name: name.clone(), op, priority: Some(urgency) };
        done.push(step.add_node(node, &after));
    }
    Ok(done)
}

/// Adds bucketed all-reduces of gradients among devices with the same parameters: those of different
/// copies, and those of shards that take different samples.
fn add_gradients(
    step: &mut StepGraph,
    graph: &OpGraph,
    balanced: &Balanced,
    assigned: &Assigned,
    ParallelismCut { copies, devices, .. }: ParallelismCut,
    done: &[Vec<u32>],
) -> Result<(), OpError> {
    // Open buckets, by the devices of a copy that share the parameters: bytes, and nodes to wait for.
    let mut open: BTreeMap<Vec<u32>, (u64, Vec<u32>)> = BTreeMap::new();
    let reduce = |step: &mut StepGraph, of_copy: &[u32], (size, after): (u64, Vec<u32>)| {
        let of = |copy: u32| of_copy.iter().map(move |device| copy * devices + device);
        add_all_reduce(step, (0..copies).flat_map(of).collect(), Bytes(size), &after)
    };
    let mut add = |of_copy: Vec<u32>, size: u64, shards: std::ops::Range<u32>| {
        let bucket = open.entry(of_copy.clone()).or_default();
        bucket.0 += size;
        for done in done {
            bucket.1.extend(&done[shards.start as usize..shards.end as usize]);
        }
        if bucket.0 >= BUCKET
            && let Some(bucket) = open.remove(&of_copy)
        {
            reduce(step, &of_copy, bucket)?;
        }
        Ok::<(), OpError>(())
    };
    for (number, shard) in (0..).zip(&balanced.shards) {
        let op = &graph.ops[shard.op as usize];
        let (first, count) = balanced.of[shard.op as usize];
        let is_of_all = op.split == Split::Samples;
        if op.gradients.0 == 0 || shard.meeting.is_some() || (is_of_all && number > first) {
            continue;
        }
        let shards = if is_of_all { first..first + count } else { number..number + 1 };
        let each = if is_of_all { op.gradients.0 } else { op.gradients.0.div_ceil(count.into()) };
        let places = &assigned.devices[shards.start as usize..shards.end as usize];
        let mut of_copy = places.to_vec();
        of_copy.sort_unstable();
        of_copy.dedup();
        add(of_copy, each, shards)?;
    }
    for (of_copy, bucket) in open {
        reduce(step, &of_copy, bucket)?;
    }
    Ok(())
}

/// Adds an all-reduce, if there are several devices.
fn add_all_reduce(
    step: &mut StepGraph,
    devices: Vec<u32>,
    size: Bytes,
    after: &[u32],
) -> Result<(), OpError> {
    if devices.len() > 1 {
        let after: Vec<Dependency> = after.iter().copied().map(Dependency::on).collect();
        step.add("sum", StepOp::collective(Collective::all_reduce, devices, size)?, &after);
    }
    Ok(())
}

/// Adds the all-reduce of an [`OpSum`] among the devices of its operations.
fn add_sum(
    step: &mut StepGraph,
    sum: &OpSum,
    balanced: &Balanced,
    assigned: &Assigned,
    first: u32,
    done: &[u32],
) -> Result<(), OpError> {
    let shards = sum.after.iter().flat_map(|&op| {
        let (start, count) = balanced.of[op as usize];
        start..start + count
    });
    let shards: Vec<u32> = shards.collect();
    let members: BTreeSet<u32> =
        shards.iter().map(|&shard| first + assigned.devices[shard as usize]).collect();
    let after: Vec<u32> = shards.iter().map(|&shard| done[shard as usize]).collect();
    add_all_reduce(step, members.into_iter().collect(), sum.size, &after)
}
