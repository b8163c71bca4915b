//! Copies of a model, each spread over devices: which of both how often, and how many samples a step.
//!
//! Source: SiP-ML §3.2 and §4.1: all splits of devices into copies and devices of a copy, for all
//! batches whose number of steps is known; the one that is done first wins.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{Bytes, Nanos};

use crate::assign::{Assigned, Limits, Rule, assign, placed_by};
use crate::balance::Balanced;
use crate::estimate::Room;
use crate::ops::{OpError, OpGraph, Sum};
use crate::tasks::{Job, TaskGraph};

/// Gradients of a device are told others when there is so much of them.
///
/// Assumed: as PyTorch's DDP does.
const BUCKET: u64 = 25 << 20;

/// How a model is spread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spread {
    /// Samples of a step, of all copies.
    pub batch: u32,
    /// Steps that it takes to train.
    pub steps: u64,
    /// Copies.
    pub copies: u32,
    /// Where the shards of one copy lie.
    pub assigned: Assigned,
    /// How many shards there are.
    pub shards: u32,
    /// What a step takes, carried out.
    pub step: Nanos,
    /// The most that a device holds.
    pub memory: Bytes,
}

/// What is looked for.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The model.
    pub graph: &'a OpGraph,
    /// Devices of the whole fabric, and what is known of them.
    pub room: Room,
    /// About how long a shard takes.
    pub quantum: Nanos,
    /// Samples of a step, and how many steps they take to train.
    pub curve: &'a [(u32, u64)],
    /// Most devices of a copy.
    pub spread_max: u32,
    /// Devices that a part must have a multiple of, so that parts are alike.
    pub part: u32,
    /// How long to look for places.
    pub limits: Limits,
}

impl Wanted<'_> {
    /// One copy on so many devices, of so many samples, and what it comes to: as some rule places it,
    /// or as well as can be found.
    ///
    /// # Errors
    /// It does not fit, or the model makes no sense.
    pub fn copy(
        &self,
        samples: u32,
        devices: u32,
        rule: Option<Rule>,
    ) -> Result<(Balanced, Assigned), OpError> {
        let costed = self.graph.at(samples)?;
        let balanced = Balanced::new(self.graph, &costed, self.quantum, devices);
        let room = Room { devices, reach: self.room.reach.min(devices), ..self.room };
        let assigned = match rule {
            Some(rule) => placed_by(self.graph, &balanced, &room, rule)?,
            None => assign(self.graph, &balanced, &room, &self.limits)?,
        };
        Ok((balanced, assigned))
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
        mut judge: impl FnMut(&TaskGraph) -> Result<Nanos, E>,
        mut tell: impl FnMut(usize, usize) -> bool,
    ) -> Result<Vec<Spread>, E> {
        let ways = self.ways();
        let (mut found, mut full) = (Vec::new(), None);
        for (number, &(batch, steps, copies)) in ways.iter().enumerate() {
            if !tell(number, ways.len()) {
                break;
            }
            match self.copy(batch / copies, self.room.devices / copies, None) {
                Ok((balanced, assigned)) => {
                    let devices = self.room.devices / copies;
                    let spread = (devices, copies);
                    let tasks = tasks(self.graph, &balanced, &assigned, spread, self.part);
                    let step = judge(&tasks)?;
                    let memory = balanced
                        .held(&assigned.devices, devices)
                        .into_iter()
                        .max()
                        .unwrap_or_default();
                    let shards = balanced.shards.len() as u32;
                    found.push(Spread { batch, steps, copies, assigned, shards, step, memory });
                }
                Err(error @ (OpError::Large { .. } | OpError::Full { .. })) => full = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
        match full {
            Some(error) if found.is_empty() => Err(error.into()),
            _ => Ok(found),
        }
    }

    fn ways(&self) -> Vec<(u32, u64, u32)> {
        let devices = self.room.devices;
        let copies = |batch: u32| {
            let counts = std::iter::successors(Some(1_u32), |count| count.checked_mul(2));
            let counts = counts.take_while(move |&count| count <= devices.min(batch));
            counts.filter(move |&count| {
                devices.is_multiple_of(count)
                    && batch.is_multiple_of(count)
                    && devices / count <= self.spread_max
            })
        };
        let ways = self.curve.iter();
        ways.flat_map(|&(batch, steps)| copies(batch).map(move |count| (batch, steps, count)))
            .collect()
    }
}

/// What a step comes to: one part of all devices, which stands for the others.
///
/// # Arguments
/// - `devices`: of a copy.
/// - `copies`: of the model, one behind another, with the devices of the next beside those of the last.
/// - `part`: a part has a multiple of so many devices, if there are as many.
pub fn tasks(
    graph: &OpGraph,
    balanced: &Balanced,
    assigned: &Assigned,
    (devices, copies): (u32, u32),
    part: u32,
) -> TaskGraph {
    // As many copies as make a part whole.
    let whole = (1..=copies)
        .find(|&count| copies.is_multiple_of(count) && (count * devices).is_multiple_of(part));
    let count = whole.unwrap_or(copies);
    let mut tasks = TaskGraph::new(count * devices, copies / count);
    let mut done: Vec<Vec<u32>> = Vec::new();
    for first in (0..count).map(|copy| copy * devices) {
        done.push(add_copy(&mut tasks, balanced, assigned, first));
    }
    if copies > 1 {
        add_gradients(&mut tasks, graph, balanced, assigned, (devices, copies), &done);
    }
    for sum in &graph.sums {
        for (copy, done) in (0..).zip(&done) {
            add_sum(&mut tasks, sum, balanced, assigned, copy * devices, done);
        }
    }
    tasks
}

/// Adds one copy whose first device is this; the task of each shard.
fn add_copy(
    tasks: &mut TaskGraph,
    balanced: &Balanced,
    assigned: &Assigned,
    first: u32,
) -> Vec<u32> {
    let mut done: Vec<u32> = Vec::with_capacity(balanced.shards.len());
    // Of each shard, what it sends to which device, and the task that does.
    let mut sent: Vec<Vec<(u32, u32)>> = vec![Vec::new(); balanced.shards.len()];
    let mut sizes: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (shard, &device) in balanced.shards.iter().zip(&assigned.devices) {
        for &(from, size) in &shard.after {
            *sizes.entry((from, device)).or_default() += size.0;
        }
    }
    let places = assigned.devices.iter().zip(&assigned.urgencies);
    for (shard, (&device, &urgency)) in balanced.shards.iter().zip(places) {
        let mut after = Vec::with_capacity(shard.after.len());
        for &(from, _) in &shard.after {
            let source = assigned.devices[from as usize];
            if source == device {
                after.push(done[from as usize]);
                continue;
            }
            let known = sent[from as usize].iter().find(|(to, _)| *to == device);
            let task = known.map(|&(_, task)| task).unwrap_or_else(|| {
                let size = Bytes(sizes[&(from, device)]);
                let (source, target) = (first + source, first + device);
                let transfer = Job::Transfer { source, target, size };
                let task = tasks.add(transfer, &[done[from as usize]]);
                sent[from as usize].push((device, task));
                task
            });
            after.push(task);
        }
        after.sort_unstable();
        after.dedup();
        let compute = Job::Compute { device: first + device, time: shard.time };
        let task = tasks.add(compute, &after);
        tasks.urge(task, urgency);
        done.push(task);
    }
    done
}

/// Devices that have the same shards of different copies add up their gradients, so many at a time.
fn add_gradients(
    tasks: &mut TaskGraph,
    graph: &OpGraph,
    balanced: &Balanced,
    assigned: &Assigned,
    (devices, copies): (u32, u32),
    done: &[Vec<u32>],
) {
    let mut open: Vec<(u64, Vec<u32>)> = vec![(0, Vec::new()); devices as usize];
    let members =
        |device: u32| -> Arc<[u32]> { (0..copies).map(|copy| copy * devices + device).collect() };
    let rings: Vec<Arc<[u32]>> = (0..devices).map(members).collect();
    let tell = |tasks: &mut TaskGraph, device: usize, bucket: &mut (u64, Vec<u32>)| {
        let (size, after) = std::mem::take(bucket);
        let members = Arc::clone(&rings[device]);
        tasks.add(Job::AllReduce { members, size: Bytes(size) }, &after);
    };
    for (number, (shard, &device)) in balanced.shards.iter().zip(&assigned.devices).enumerate() {
        let gradients = graph.ops[shard.op as usize].gradients.0;
        if gradients == 0 {
            continue;
        }
        let bucket = &mut open[device as usize];
        bucket.0 += gradients.div_ceil(u64::from(balanced.of[shard.op as usize].1));
        bucket.1.extend(done.iter().map(|done| done[number]));
        if bucket.0 >= BUCKET {
            tell(tasks, device as usize, bucket);
        }
    }
    for (device, bucket) in open.iter_mut().enumerate().filter(|(_, bucket)| bucket.0 > 0) {
        tell(tasks, device, bucket);
    }
}

/// Devices of some operations add up what they have.
fn add_sum(
    tasks: &mut TaskGraph,
    sum: &Sum,
    balanced: &Balanced,
    assigned: &Assigned,
    first: u32,
    done: &[u32],
) {
    let shards = sum.after.iter().flat_map(|&op| {
        let (start, count) = balanced.of[op as usize];
        start..start + count
    });
    let shards: Vec<u32> = shards.collect();
    let members: BTreeSet<u32> =
        shards.iter().map(|&shard| first + assigned.devices[shard as usize]).collect();
    if members.len() > 1 {
        let after: Vec<u32> = shards.iter().map(|&shard| done[shard as usize]).collect();
        let members = members.into_iter().collect();
        tasks.add(Job::AllReduce { members, size: sum.size }, &after);
    }
}
