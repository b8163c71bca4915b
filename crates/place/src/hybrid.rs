//! Copies of a model, each spread over devices: which of both how often, and how many samples a step.
//!
//! Source: SiP-ML §3.2 and §4.1: all splits of devices into copies and devices of a copy, for all
//! batches whose number of steps is known; the one that is done first wins. Differs from the paper:
//! into how many shards an operation is cut at most is looked for as well.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{Bytes, Nanos};
use ir::{Collective, Dependency, StepGraph, StepNode, StepOp};

use crate::assign::{Assigned, PlacementLimits, Rule, placed_by, placements};
use crate::balance::{Balanced, ShardCollective};
use crate::estimate::DeviceModel;
use crate::ops::{OpError, OpGraph, OpSum, Split};

/// Gradients of a device are told others when there is so much of them.
///
/// Assumed: as PyTorch's DDP does.
const BUCKET: u64 = 25 << 20;

/// Into what a model is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParallelismCut {
    /// Copies.
    pub copies: u32,
    /// Devices of a copy.
    pub devices: u32,
    /// Into how many shards an operation is cut at most.
    pub width: u32,
}

/// How a model is spread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spread {
    /// Samples of a step, of all copies.
    pub batch: u32,
    /// Steps that it takes to train.
    pub steps: u64,
    /// How it is cut.
    pub cut: ParallelismCut,
    /// Where the shards of one copy lie.
    pub assigned: Assigned,
    /// How many shards there are.
    pub shards: u32,
    /// What a step takes, carried out.
    pub step: Nanos,
    /// The most that a device holds.
    pub memory: Bytes,
}

/// One way to spread a model, carried out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SimulatedPlacement<T> {
    /// The shards of a copy.
    pub balanced: Balanced,
    /// Where they lie.
    pub assigned: Assigned,
    /// What a copy would take if nothing waited to be sent, placed as is best then.
    pub estimate: Nanos,
    /// What a step takes.
    pub step: Nanos,
    /// The step.
    pub graph: StepGraph,
    /// What else came of it.
    pub came: T,
}

/// What is looked for.
#[derive(Clone, Debug)]
pub struct ParallelismSearch<'a> {
    /// The model.
    pub graph: &'a OpGraph,
    /// Devices of the whole fabric, and what is known of them.
    pub room: DeviceModel,
    /// About how long a shard takes.
    pub quantum: Nanos,
    /// Samples of a step, and how many steps they take to train.
    pub curve: &'a [(u32, u64)],
    /// Most devices of a copy.
    pub spread_max: u32,
    /// Devices that a part must have a multiple of, so that parts are alike.
    pub part: u32,
    /// How long to look for places.
    pub limits: PlacementLimits,
}

impl ParallelismSearch<'_> {
    /// One way to spread the model, carried out: as some rule places it, or as well as can be found.
    ///
    /// # Arguments
    /// - `judge`: carries a step out; how long that takes, and what else came of it.
    ///
    /// # Errors
    /// It does not fit, or the model makes no sense; or the judge's own.
    pub fn carried<T, E: From<OpError>>(
        &self,
        samples: u32,
        cut: ParallelismCut,
        rule: Option<Rule>,
        judge: impl FnMut(&StepGraph) -> Result<(Nanos, T), E>,
    ) -> Result<SimulatedPlacement<T>, E> {
        self.judged(self.placements(samples, cut, rule)?, cut, judge)
    }

    /// The placement that is done first when it is carried out.
    fn judged<T, E: From<OpError>>(
        &self,
        (balanced, placements): (Balanced, Vec<Assigned>),
        cut: ParallelismCut,
        mut judge: impl FnMut(&StepGraph) -> Result<(Nanos, T), E>,
    ) -> Result<SimulatedPlacement<T>, E> {
        let estimate = placements[0].end;
        let mut best: Option<(Assigned, Nanos, StepGraph, T)> = None;
        for assigned in placements {
            // What waits for nobody is not done sooner when it is carried out.
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

    /// Placements of a copy, the one that should be done first in front.
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

    /// All ways to spread the model, those that fit, as judged.
    ///
    /// # Arguments
    /// - `judge`: what a step takes, carried out.
    /// - `tell`: how many were looked at, of how many; says whether to go on.
    ///
    /// # Errors
    /// None fits, or the model makes no sense; or the judge's own.
    pub fn all<E: From<OpError>>(
        &self,
        mut judge: impl FnMut(&StepGraph) -> Result<Nanos, E>,
        mut tell: impl FnMut(usize, usize) -> bool,
    ) -> Result<Vec<Spread>, E> {
        let ways = self.ways();
        let (mut found, mut full) = (Vec::new(), None);
        for (number, &(batch, steps, cut)) in ways.iter().enumerate() {
            if !tell(number, ways.len()) {
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

    fn ways(&self) -> Vec<(u32, u64, ParallelismCut)> {
        let all = self.room.devices;
        // Blocks meet blocks however many there are; where shards tell each other something, fewer
        // of them tell less.
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
        let ways = self.curve.iter();
        ways.flat_map(|&(batch, steps)| cuts(batch).map(move |cut| (batch, steps, cut))).collect()
    }
}

/// 1, 2, 4 and so on.
fn powers(most: u32) -> impl Iterator<Item = u32> {
    let all = std::iter::successors(Some(1_u32), |power| power.checked_mul(2));
    all.take_while(move |&power| power <= most)
}

/// The step graph of a placed model: of one part of all devices, which stands for the others.
///
/// # Errors
/// There is more to be summed than can be counted.
///
/// # Arguments
/// - `cut`: copies one behind another, with the devices of the next beside those of the last.
/// - `part`: a part has a multiple of so many devices, if there are as many.
pub fn step_of(
    graph: &OpGraph,
    balanced: &Balanced,
    assigned: &Assigned,
    cut: ParallelismCut,
    part: u32,
) -> Result<StepGraph, OpError> {
    let ParallelismCut { copies, devices, .. } = cut;
    // As many copies as make a part whole.
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
    // Of each shard, the devices that it sends to, and the node that does.
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

/// Devices that have the same parameters add up their gradients, so many at a time: of different
/// copies, and of shards that take different samples.
fn add_gradients(
    step: &mut StepGraph,
    graph: &OpGraph,
    balanced: &Balanced,
    assigned: &Assigned,
    ParallelismCut { copies, devices, .. }: ParallelismCut,
    done: &[Vec<u32>],
) -> Result<(), OpError> {
    // By the devices that have the same in a copy: how much there is, and behind which nodes.
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

/// Adds the sum of what devices have, if there are several.
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

/// Devices of some operations add up what they have.
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
