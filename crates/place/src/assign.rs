//! Assigns a device to each shard (placement).
//!
//! Several rules (heuristics) each make a placement; the best of them is then improved by changes of
//! one group of shards at a time (Metropolis–Hastings with simulated annealing), within a limit of
//! evaluations.
//!
//! Source: SiP-ML §3.2 for the device range and the relocation of parents. Differs from the paper: it
//! is one of several initial placements, and the arrival of a shard's inputs counts when its device is
//! chosen.

use base::{Bytes, Nanos, Random};

use crate::balance::Balanced;
use crate::estimate::{DeviceModel, Estimate};
use crate::ops::{OpError, OpGraph};

/// The heuristic that made a placement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// The device that is free first, of the range that all parents reach, from the highest parent on;
    /// where that range is empty, the device of the highest parent. As SiP-ML's public simulator does.
    Range,
    /// The same, but where the range is empty, parents out of reach are relocated.
    Relocate,
    /// Earliest finish time: of the devices within reach, the one on which the shard is done first;
    /// shards in order of urgency (list scheduling).
    Earliest,
    /// Consecutive shards, with the same compute time on each device.
    Blocks,
    /// Pipeline stages: consecutive operations, with the same compute time on each group of devices; a
    /// group has as many devices as the widest operation has shards, which are spread over the group.
    Stages,
    /// All on one device, as far as its memory allows.
    Together,
    /// The device of [`Op::device`](crate::Op::device), modulo the number of devices; 0 where there is
    /// none.
    Given,
}

impl Rule {
    /// All rules.
    pub const ALL: [Self; 7] = [
        Self::Range,
        Self::Relocate,
        Self::Earliest,
        Self::Blocks,
        Self::Stages,
        Self::Together,
        Self::Given,
    ];
}

/// Limits of the search for placements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlacementLimits {
    /// Placements to evaluate, besides those of rules.
    pub evaluations: u64,
    /// Random seed: the same seed finds the same placement.
    pub seed: u64,
}

/// A placement of shards.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Assigned {
    /// By shard, its device.
    pub devices: Vec<u32>,
    /// By shard, its priority among the ready shards of a device.
    pub urgencies: Vec<u64>,
    /// Estimated makespan, without contention.
    pub end: Nanos,
    /// The rule of the initial placement.
    pub rule: Rule,
    /// Estimated makespan of the initial placement.
    pub rule_end: Nanos,
    /// Lower bound on the makespan.
    pub bound: Nanos,
}

/// Returns distinct placements, by estimated makespan: that of each rule, and the best of them
/// improved. O(evaluations · (shards + edges) · log shards + shards · devices · edges of one).
///
/// # Errors
/// By every rule some shard fits on no device.
pub fn placements(
    graph: &OpGraph,
    balanced: &Balanced,
    room: &DeviceModel,
    limits: &PlacementLimits,
) -> Result<Vec<Assigned>, OpError> {
    let mut estimate = Estimate::new(balanced, room);
    let bound = bound(balanced, room);
    let mut found: Vec<Assigned> = Vec::new();
    let mut full = None;
    for rule in Rule::ALL {
        match placed(graph, balanced, room, rule, (&mut estimate, bound)) {
            Ok(placed) => {
                if !found.iter().any(|other| other.devices == placed.devices) {
                    found.push(placed);
                }
            }
            Err(error) => full = Some(error),
        }
    }
    found.sort_by_key(|placed| placed.end);
    let Some(best) = found.first() else {
        return Err(full.expect("a rule has failed"));
    };
    if best.end > best.bound {
        let better = improve(balanced, room, estimate, best, limits);
        if better.end < best.end {
            found.insert(0, better);
        }
    }
    Ok(found)
}

/// The first of [`placements`].
///
/// # Errors
/// As there.
pub fn assign(
    graph: &OpGraph,
    balanced: &Balanced,
    room: &DeviceModel,
    limits: &PlacementLimits,
) -> Result<Assigned, OpError> {
    Ok(placements(graph, balanced, room, limits)?.swap_remove(0))
}

/// The placement of one rule.
///
/// # Errors
/// A shard fits on no device.
pub fn placed_by(
    graph: &OpGraph,
    balanced: &Balanced,
    room: &DeviceModel,
    rule: Rule,
) -> Result<Assigned, OpError> {
    let mut estimate = Estimate::new(balanced, room);
    placed(graph, balanced, room, rule, (&mut estimate, bound(balanced, room)))
}

fn placed(
    graph: &OpGraph,
    balanced: &Balanced,
    room: &DeviceModel,
    rule: Rule,
    (estimate, bound): (&mut Estimate<'_>, u64),
) -> Result<Assigned, OpError> {
    let devices = Placing::new(graph, balanced, room, &estimate.urgencies).place(rule)?;
    let end = Nanos(estimate.end(&devices));
    let (urgencies, bound) = (estimate.urgencies.clone(), Nanos(bound));
    Ok(Assigned { devices, urgencies, end, rule, rule_end: end, bound })
}

/// Lower bound on the makespan: the critical path, or all compute time spread evenly.
fn bound(balanced: &Balanced, room: &DeviceModel) -> u64 {
    let mut levels = vec![0; balanced.shards.len()];
    let (mut longest, mut all) = (0, 0);
    for (number, shard) in balanced.shards.iter().enumerate() {
        let before = shard.after.iter().map(|&(from, _)| levels[from as usize]).max();
        levels[number] = before.unwrap_or(0) + shard.time.0;
        longest = longest.max(levels[number]);
        all += shard.time.0;
    }
    longest.max(all.div_ceil(u64::from(room.devices)))
}

/// Simulated annealing: moves a group of shards, or exchanges the urgencies of two shards.
fn improve(
    balanced: &Balanced,
    room: &DeviceModel,
    mut estimate: Estimate<'_>,
    placed: &Assigned,
    limits: &PlacementLimits,
) -> Assigned {
    let (mut devices, mut end, bound) = (placed.devices.clone(), placed.end.0, placed.bound.0);
    let mut random = Random::of(&[limits.seed]);
    let groups = Groups::new(balanced);
    let mut held = balanced.held(&devices, room.devices);
    let mut best = (devices.clone(), estimate.urgencies.clone(), end);
    let spread = end as f64 * HEAT;
    let count = balanced.shards.len() as u64;
    for number in 0..limits.evaluations {
        if best.2 <= bound {
            break;
        }
        let heat = spread * (1.0 - number as f64 / limits.evaluations as f64);
        let change = if random.below(EXCHANGES) == 0 {
            Change::Exchange([random.below(count) as usize, random.below(count) as usize])
        } else {
            let group = random.below(groups.members.len() as u64) as usize;
            let from = devices[groups.members[group][0] as usize];
            let to = groups.suggest(balanced, &devices, group, room, &mut random);
            let has_room = held[to as usize] + groups.memory[group] <= room.memory;
            if to == from || !has_room || groups.is_far(balanced, &devices, group, (from, to), room)
            {
                continue;
            }
            Change::Move { group, from, to }
        };
        change.make(&groups, &mut devices, &mut estimate.urgencies);
        let changed = estimate.end(&devices);
        let worse = changed.saturating_sub(end) as f64;
        if changed > end && random.fraction() >= (-worse / heat.max(1e-9)).exp() {
            change.back().make(&groups, &mut devices, &mut estimate.urgencies);
            continue;
        }
        end = changed;
        if let Change::Move { group, from, to } = change {
            held[from as usize] = held[from as usize] - groups.memory[group];
            held[to as usize] += groups.memory[group];
        }
        if end < best.2 {
            best = (devices.clone(), estimate.urgencies.clone(), end);
        }
    }
    let (devices, urgencies, end) = best;
    Assigned { devices, urgencies, end: Nanos(end), ..placed.clone() }
}

/// Initial temperature, as a fraction of the initial makespan.
const HEAT: f64 = 0.02;
/// One of this many changes is of urgencies.
const EXCHANGES: u64 = 4;

/// A change of a placement (annealing move).
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Moves a group of shards to another device.
    Move { group: usize, from: u32, to: u32 },
    /// Exchanges the urgencies of two shards.
    Exchange([usize; 2]),
}

impl Change {
    fn make(self, groups: &Groups, devices: &mut [u32], urgencies: &mut [u64]) {
        match self {
            Change::Move { group, to, .. } => {
                groups.members[group].iter().for_each(|&shard| devices[shard as usize] = to);
            }
            Change::Exchange([one, other]) => urgencies.swap(one, other),
        }
    }

    fn back(self) -> Self {
        match self {
            Change::Move { group, from, to } => Change::Move { group, from: to, to: from },
            Change::Exchange(both) => Change::Exchange(both),
        }
    }
}

/// Shards that must share a device.
struct Groups {
    members: Vec<Vec<u32>>,
    memory: Vec<Bytes>,
    /// By shard, the shards that depend on it.
    next: Vec<Vec<u32>>,
}

impl Groups {
    fn new(balanced: &Balanced) -> Self {
        let count = balanced.shards.len();
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); count];
        let mut next = vec![Vec::new(); count];
        for (number, shard) in (0..).zip(&balanced.shards) {
            if shard.meeting.is_none() {
                members[shard.place as usize].push(number);
            }
            shard.after.iter().for_each(|&(from, _)| next[from as usize].push(number));
        }
        members.retain(|members| !members.is_empty());
        let of = |members: &Vec<u32>| {
            members.iter().map(|&shard| balanced.shards[shard as usize].memory).sum()
        };
        let memory = members.iter().map(of).collect();
        Self { members, memory, next }
    }

    /// Shards with an edge to or from a shard of a group.
    fn beside<'a>(
        &'a self,
        balanced: &'a Balanced,
        group: usize,
    ) -> impl Iterator<Item = u32> + 'a {
        self.members[group]
            .iter()
            .flat_map(move |&shard| {
                let before = balanced.shards[shard as usize].after.iter().map(|&(from, _)| from);
                before.chain(self.next[shard as usize].iter().copied())
            })
            .filter(|&shard| balanced.shards[shard as usize].meeting.is_none())
    }

    /// Proposes a device: that of an adjacent shard, or any.
    fn suggest(
        &self,
        balanced: &Balanced,
        devices: &[u32],
        group: usize,
        room: &DeviceModel,
        random: &mut Random,
    ) -> u32 {
        let count = self.beside(balanced, group).count() as u64;
        if count > 0 && random.below(3) == 0 {
            let chosen = random.below(count) as usize;
            if let Some(shard) = self.beside(balanced, group).nth(chosen) {
                return devices[shard as usize];
            }
        }
        random.below(room.devices.into()) as u32
    }

    /// Returns whether a move would put a group out of reach of its adjacent shards, which it is not
    /// yet.
    fn is_far(
        &self,
        balanced: &Balanced,
        devices: &[u32],
        group: usize,
        (from, to): (u32, u32),
        room: &DeviceModel,
    ) -> bool {
        let farthest = |device| self.farthest(balanced, devices, group, device, room);
        room.reach < room.devices / 2 && farthest(to) > room.reach && farthest(from) <= room.reach
    }

    /// The distance from a device to the farthest of a group's adjacent shards.
    fn farthest(
        &self,
        balanced: &Balanced,
        devices: &[u32],
        group: usize,
        device: u32,
        room: &DeviceModel,
    ) -> u32 {
        let others = self.beside(balanced, group);
        others.map(|shard| room.distance(devices[shard as usize], device)).max().unwrap_or(0)
    }
}

/// Places shards one after another by a rule.
struct Placing<'a> {
    graph: &'a OpGraph,
    balanced: &'a Balanced,
    room: &'a DeviceModel,
    levels: &'a [u64],
    devices: Vec<u32>,
    ends: Vec<u64>,
    free: Vec<u64>,
    held: Vec<Bytes>,
    /// By shard, the memory of all shards that share its place.
    needed: Vec<Bytes>,
}

const NOWHERE: u32 = u32::MAX;

impl<'a> Placing<'a> {
    fn new(
        graph: &'a OpGraph,
        balanced: &'a Balanced,
        room: &'a DeviceModel,
        levels: &'a [u64],
    ) -> Self {
        let count = balanced.shards.len();
        let mut needed = vec![Bytes(0); count];
        for shard in &balanced.shards {
            needed[shard.place as usize] += shard.memory;
        }
        Self {
            graph,
            balanced,
            room,
            levels,
            devices: vec![NOWHERE; count],
            ends: vec![0; count],
            free: vec![0; room.devices as usize],
            held: vec![Bytes(0); room.devices as usize],
            needed,
        }
    }

    fn place(mut self, rule: Rule) -> Result<Vec<u32>, OpError> {
        // Compute time of each place: forward and backward.
        let mut times = vec![0; self.balanced.shards.len()];
        for shard in &self.balanced.shards {
            times[shard.place as usize] += shard.time.0;
        }
        let all: u64 = times.iter().sum();
        let mut so_far = 0;
        let width = self.balanced.of.iter().map(|&(_, count)| count).max().unwrap_or(1);
        let width = width.min(self.room.devices);
        let (stages, mut stage) = (f64::from(self.room.devices / width), 0);
        for number in self.order(rule) {
            let shard = &self.balanced.shards[number as usize];
            if shard.meeting.is_some() {
                self.meet(number);
                continue;
            }
            let place = shard.place as usize;
            if self.devices[place] == NOWHERE {
                let device = match rule {
                    Rule::Range => self.in_range(number, false),
                    Rule::Relocate => self.in_range(number, true),
                    Rule::Earliest => self.earliest(number),
                    Rule::Together => self.next_with_room(number, 0),
                    Rule::Given => {
                        let device = self.graph.ops[shard.op as usize].device.unwrap_or(0);
                        self.next_with_room(number, device % self.room.devices)
                    }
                    Rule::Blocks => {
                        let share =
                            so_far as f64 / all.max(1) as f64 * f64::from(self.room.devices);
                        self.next_with_room(number, share as u32)
                    }
                    Rule::Stages => {
                        let (first, count) = self.balanced.of[shard.op as usize];
                        if number == first {
                            stage = (so_far as f64 / all.max(1) as f64 * stages) as u32;
                        }
                        let within = u64::from(number - first) * u64::from(width);
                        let device = stage * width + (within / u64::from(count)) as u32;
                        self.next_with_room(number, device)
                    }
                };
                let device = device.ok_or_else(|| self.full(number))?;
                self.held[device as usize] += self.needed[place];
                self.devices[place] = device;
                so_far += times[place];
            }
            let device = self.devices[place];
            self.devices[number as usize] = device;
            let start = self.came(number, device).max(self.free[device as usize]);
            self.ends[number as usize] = start + shard.time.0;
            self.free[device as usize] = start + shard.time.0;
        }
        Ok(self.devices)
    }

    /// A collective of shards: occupies no device, but takes time.
    fn meet(&mut self, number: u32) {
        let shard = &self.balanced.shards[number as usize];
        let source = |&(from, _): &(u32, Bytes)| self.devices[from as usize];
        self.devices[number as usize] = shard.after.first().map_or(0, source);
        let came = shard.after.iter().map(|&(from, _)| self.ends[from as usize]).max();
        self.ends[number as usize] = came.unwrap_or(0) + self.room.shard_time(shard).0;
    }

    /// Order of placement: shards after their dependencies; by urgency if devices are chosen by finish
    /// time.
    fn order(&self, rule: Rule) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.balanced.shards.len() as u32).collect();
        if matches!(rule, Rule::Earliest) {
            order.sort_by_key(|&shard| (std::cmp::Reverse(self.levels[shard as usize]), shard));
        }
        order
    }

    /// When all inputs of a shard are on a device.
    fn came(&self, number: u32, device: u32) -> u64 {
        let shard = &self.balanced.shards[number as usize];
        let came = shard.after.iter().map(|&(from, size)| {
            let source = self.devices[from as usize];
            let stays = source == device || self.meets(from);
            let time = self.room.times(size)[usize::from(self.room.is_between(source, device))];
            self.ends[from as usize] + if stays { 0 } else { time.0 }
        });
        came.max().unwrap_or(0)
    }

    fn has_room(&self, number: u32, device: u32) -> bool {
        let place = self.balanced.shards[number as usize].place as usize;
        self.held[device as usize] + self.needed[place] <= self.room.memory
    }

    fn full(&self, number: u32) -> OpError {
        let shard = &self.balanced.shards[number as usize];
        let name = self.graph.ops[shard.op as usize].name.clone();
        let needed = self.needed[shard.place as usize];
        let has = self.room.memory;
        if needed > has {
            return OpError::Large { name, needed, has };
        }
        OpError::Full { name, needed, devices: self.room.devices, has }
    }

    /// The next device around the ring with enough memory, from `from` on.
    fn next_with_room(&self, number: u32, from: u32) -> Option<u32> {
        let devices = self.room.devices;
        let around = (0..devices).map(|step| (from + step) % devices);
        around.into_iter().find(|&device| self.has_room(number, device))
    }

    fn meets(&self, number: u32) -> bool {
        self.balanced.shards[number as usize].meeting.is_some()
    }

    /// Shards that a shard takes inputs of directly; collectives are not bound to a device.
    fn parents(&self, number: u32) -> impl Iterator<Item = u32> + '_ {
        let after = self.balanced.shards[number as usize].after.iter().map(|&(from, _)| from);
        after.filter(|&from| !self.meets(from))
    }

    /// The device with the earliest finish time, of those that all parents reach, or else of all.
    fn earliest(&self, number: u32) -> Option<u32> {
        let reaches = |device: u32| {
            let mut parents = self.parents(number).map(|from| self.devices[from as usize]);
            parents.all(|parent| self.room.distance(parent, device) <= self.room.reach)
        };
        let done = |device: u32| self.came(number, device).max(self.free[device as usize]);
        let devices = || (0..self.room.devices).filter(|&device| self.has_room(number, device));
        let near = devices().filter(|&device| reaches(device)).min_by_key(|&device| done(device));
        near.or_else(|| devices().min_by_key(|&device| done(device)))
    }

    /// The device that is free first, of the range that all parents reach.
    fn in_range(&mut self, number: u32, relocates: bool) -> Option<u32> {
        let last = self.room.devices - 1;
        let parents: Vec<u32> = self.parents(number).map(|p| self.devices[p as usize]).collect();
        let (Some(&lowest), Some(&highest)) = (parents.iter().min(), parents.iter().max()) else {
            return self.free_first(number, 0..=last);
        };
        let most = lowest.saturating_add(self.room.reach).min(last);
        if highest <= most {
            let found = self.free_first(number, highest..=most);
            return found.or_else(|| self.next_with_room(number, highest));
        }
        if !relocates {
            return self.next_with_room(number, highest);
        }
        // The device of the highest parent; the others are relocated into its reach.
        let device = self.next_with_room(number, highest)?;
        let least = device.saturating_sub(self.room.reach);
        let far: Vec<u32> =
            self.parents(number).filter(|&p| self.devices[p as usize] < least).collect();
        for parent in far {
            self.relocate(parent, least..=device);
        }
        Some(device)
    }

    fn free_first(&self, number: u32, range: std::ops::RangeInclusive<u32>) -> Option<u32> {
        let with_room = range.filter(|&device| self.has_room(number, device));
        with_room.min_by_key(|&device| (self.free[device as usize], device))
    }

    /// Relocates a placed shard, and all that share its place, into a range, if memory allows.
    fn relocate(&mut self, number: u32, range: std::ops::RangeInclusive<u32>) {
        let place = self.balanced.shards[number as usize].place;
        let Some(device) = self.free_first(number, range) else { return };
        let (was, needed) = (self.devices[place as usize], self.needed[place as usize]);
        self.held[was as usize] = self.held[was as usize] - needed;
        self.held[device as usize] += needed;
        for (shard, at) in self.balanced.shards.iter().zip(&mut self.devices) {
            if shard.place == place && *at != NOWHERE {
                *at = device;
            }
        }
        let time = self.balanced.shards[number as usize].time.0;
        let start = self.free[device as usize].max(self.came(number, device));
        self.ends[number as usize] = start + time;
        self.free[device as usize] = start + time;
    }
}
