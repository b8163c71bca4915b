//! Wavelengths on a ring, decided anew for every interval.
//!
//! Each direction of the ring has as many wavelengths. A circuit takes one wavelength on all segments
//! from its source to its target, the same on all of them; behind its target the wavelength serves
//! another one. What everybody would get if wavelengths could be divided is found first: demands take
//! both directions in the proportions that have come out best so far, and each is enlarged until some
//! segment on its way is full. Whole wavelengths follow: what a demand does not get now it is owed, so
//! that over several intervals all get what they should. Wavelengths are then given out along the
//! ring, from a place that changes, those that are about to be needed again last.
//!
//! Source: SiP-ML §3.3 and A.1, as the circulation of a wavelength around the ring. Differs from the
//! paper: 1. divided by loads of segments, not by solving a flow; 2. both directions; 3. owed
//! fractions instead of random rounding; 4. wavelengths keep their colour on all of their way, since
//! nothing on a ring changes it.

use std::cmp::Ordering;

use super::Demand;

/// How far the share of a direction that costs nothing grows when it is looked at.
const STEP: f32 = 0.1;
/// In so many intervals each demand's share is looked at once: all at a time would overshoot.
const TURNS: u32 = 8;
/// Segments count by this power of what they carry.
const POWER: i32 = 16;
/// Intervals for which a demand may be owed what it should have got.
const INTERVALS_MAX: f32 = 64.0;
/// Who has never asked is owed this.
const NEVER: f32 = f32::NEG_INFINITY;
/// What who asks for less than a wavelength is owed at first: nobody waits at first for what is
/// little until all of a wavelength has come together.
const OWED: f32 = 0.9;
/// Wavelengths that are left go to those that are owed at least so much: what they have ahead of time
/// is not asked for later, where more would be wanted than there is.
const AHEAD: f32 = 0.0;
/// Steps in which it is told for how many intervals a demand has been owed something: each twice as long.
const URGENCIES: usize = 8;
/// With this urgency a demand has waited so long that less must be fair.
const LATE: usize = 6;
/// By what part it is less then, or more again.
const POSSIBLE_STEP: f32 = 1e-3;

/// Which way around.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// To the device with the next higher number.
    Up,
    /// To the one with the next lower number.
    Down,
}

/// Wavelengths that join two devices for an interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Circuit {
    /// Which demand they serve.
    pub demand: u32,
    /// Which way around they go.
    pub direction: Direction,
    /// The first wavelength.
    pub first: u32,
    /// How many there are, one after another.
    pub count: u32,
}

/// Decides about the wavelengths of one ring.
#[derive(Clone, Debug)]
pub struct Wavelengths {
    pairs: Pairs,
    /// In each direction.
    count: u32,
    /// Then there is one way between two devices.
    is_cut: bool,
    /// Of each device and how far up its target is: the part that goes up, and what is owed up, down.
    shares: Vec<f32>,
    owed: Vec<[f32; 2]>,
    intervals: u32,
    /// The part of what would be fair that has turned out to be possible with whole wavelengths.
    possible: f32,
    circuits: Vec<Circuit>,
    sweep: Sweep,
    loads: [Loads; 2],
}

impl Wavelengths {
    /// Those of a ring of so many devices.
    ///
    /// # Arguments
    /// - `count`: wavelengths in each direction.
    /// - `reach`: how far a circuit may go, in devices.
    /// - `is_cut`: whether no light passes from the last device to the first.
    pub fn new(devices: u32, count: u32, reach: u32, is_cut: bool) -> Self {
        let pairs = Pairs { devices, reach: reach.min(devices.saturating_sub(1)) };
        let shares = (0..pairs.count()).map(|pair| {
            let up = pairs.up(pair);
            if is_cut {
                let passes = pairs.source(pair) + up >= devices;
                return if passes { 0.0 } else { 1.0 };
            }
            match (2 * up).cmp(&devices) {
                Ordering::Less => 1.0,
                Ordering::Equal => 0.5,
                Ordering::Greater => 0.0,
            }
        });
        Self {
            pairs,
            count,
            is_cut,
            shares: shares.collect(),
            owed: vec![[NEVER; 2]; pairs.count()],
            intervals: 0,
            possible: 1.0,
            circuits: Vec::new(),
            sweep: Sweep::new(devices, count),
            loads: [Loads::new(devices), Loads::new(devices)],
        }
    }

    /// Decides for the next interval; demands out of reach get nothing.
    /// O(demands + devices · log devices).
    pub fn decide(&mut self, demands: &[Demand]) -> &[Circuit] {
        self.turn(demands);
        self.measure(demands);
        self.sweep.begin(self.intervals.wrapping_mul(0x9E37_79B1) % self.pairs.devices.max(1));
        self.intervals = self.intervals.wrapping_add(1);
        self.circuits.clear();
        let mut latest = 0;
        for direction in [Direction::Up, Direction::Down] {
            latest = self.give(demands, direction).max(latest);
        }
        let change = if latest >= LATE { 1.0 - POSSIBLE_STEP } else { 1.0 + POSSIBLE_STEP };
        self.possible = (self.possible * change).min(1.0);
        &self.circuits
    }

    /// Moves shares towards the direction that is less loaded, as the last interval was.
    fn turn(&mut self, demands: &[Demand]) {
        let Pairs { devices, reach } = self.pairs;
        if self.is_cut || 2 * reach < devices || self.intervals == 0 {
            return;
        }
        let first = (self.intervals % TURNS) as usize;
        for demand in demands.iter().skip(first).step_by(TURNS as usize) {
            let Some((pair, up)) = self.pairs.find(demand) else { continue };
            let ways = self.pairs.ways(demand.source, up);
            if ways.iter().any(|way| way.1 > reach) {
                continue;
            }
            let [one, other] = [0, 1].map(|way| self.loads[way].weight(ways[way].0, ways[way].1));
            let step = STEP * (other - one) / (one + other + f32::MIN_POSITIVE);
            self.shares[pair] = (self.shares[pair] + step).clamp(0.0, 1.0);
        }
    }

    /// What each segment would carry.
    fn measure(&mut self, demands: &[Demand]) {
        self.loads.iter_mut().for_each(Loads::clear);
        for demand in demands {
            let Some((pair, up)) = self.pairs.find(demand) else { continue };
            let share = f64::from(self.shares[pair]);
            let parts = [share, 1.0 - share];
            let ways = self.pairs.ways(demand.source, up);
            for (loads, ((start, length), part)) in
                self.loads.iter_mut().zip(ways.into_iter().zip(parts))
            {
                loads.add(start, length, demand.size * part);
            }
        }
        let top = self.loads.iter_mut().map(Loads::sum).fold(f32::MIN_POSITIVE, f32::max);
        self.loads.iter_mut().for_each(|loads| loads.weigh(top));
    }

    /// Gives out the wavelengths of one direction; how urgent the most urgent demand was.
    fn give(&mut self, demands: &[Demand], direction: Direction) -> usize {
        let mut latest = 0;
        let way = direction as usize;
        self.sweep.clear();
        for (number, demand) in (0..).zip(demands) {
            let Some((pair, up)) = self.pairs.find(demand) else { continue };
            let share = f64::from(self.shares[pair]);
            let (start, length) = self.pairs.ways(demand.source, up)[way];
            let size = demand.size * [share, 1.0 - share][way];
            if size <= 0.0 {
                continue;
            }
            let most = self.loads[way].most(start, length);
            let fair = (f64::from(self.count) * size / most) as f32 * self.possible;
            let owed = &mut self.owed[pair][way];
            if *owed == NEVER {
                *owed = if fair < 1.0 { OWED } else { 0.0 };
            }
            *owed = (*owed + fair).min(fair * INTERVALS_MAX + 1.0);
            // Some of what it is owed at a time, so that others are not kept waiting by it.
            let count = owed.min(2.0 * fair + 1.0).max(0.0) as u32;
            let arc = Arc { start, length, count: count.max(1), demand: number, pair: pair as u32 };
            if count == 0 && *owed >= AHEAD {
                self.sweep.offer(arc);
            } else if count > 0 {
                let late = ((*owed - fair.max(1.0)) / fair).max(0.0);
                let urgency = ((1.0 + 2.0 * late) as u32).ilog2() as usize;
                let urgency = urgency.min(URGENCIES - 1);
                self.sweep.ask(arc, urgency);
                latest = latest.max(urgency);
            }
        }
        let (owed, circuits) = (&mut self.owed, &mut self.circuits);
        self.sweep.give(|arc, first, count| {
            owed[arc.pair as usize][way] -= count as f32;
            circuits.push(Circuit { demand: arc.demand, direction, first, count });
        });
        latest
    }
}

/// Pairs of devices that a circuit may join, by number.
#[derive(Clone, Copy, Debug)]
struct Pairs {
    devices: u32,
    reach: u32,
}

impl Pairs {
    /// How many there are of one source.
    fn of_one(self) -> u32 {
        (2 * self.reach).min(self.devices.saturating_sub(1))
    }

    fn count(self) -> usize {
        self.devices as usize * self.of_one() as usize
    }

    /// The source of a pair.
    fn source(self, pair: usize) -> u32 {
        pair as u32 / self.of_one().max(1)
    }

    /// How far up the target of a pair is.
    fn up(self, pair: usize) -> u32 {
        let span = (pair % self.of_one() as usize) as u32;
        if span < self.reach { span + 1 } else { self.devices - 1 - (span - self.reach) }
    }

    /// The number of a pair, if its target is within reach, and how far up that is.
    fn find(self, demand: &Demand) -> Option<(usize, u32)> {
        let around = if demand.target < demand.source { self.devices } else { 0 };
        let up = demand.target + around - demand.source;
        let span = match (up, self.devices - up) {
            (0, _) => return None,
            (up, _) if up <= self.reach => up - 1,
            (_, down) if down <= self.reach => self.reach + down - 1,
            _ => return None,
        };
        Some(((demand.source * self.of_one() + span) as usize, up))
    }

    /// From which device over how many segments it is so far up, and down: that way as seen from the
    /// other side of the ring, where down is up.
    fn ways(self, source: u32, up: u32) -> [(u32, u32); 2] {
        [(source, up), (self.devices - 1 - source, self.devices - up)]
    }
}

/// What segments carry: segment `n` joins device `n` and the next.
#[derive(Clone, Debug)]
struct Loads {
    devices: u32,
    loads: Vec<f64>,
    /// Sums of what a unit more would cost, from the first segment on.
    weights: Vec<f32>,
    /// Of each power of two, the most of so many segments from each on.
    most: Vec<Vec<f32>>,
}

impl Loads {
    fn new(devices: u32) -> Self {
        let levels = (u32::BITS - devices.leading_zeros()) as usize;
        Self {
            devices,
            loads: vec![0.0; devices as usize + 1],
            weights: vec![0.0; devices as usize + 1],
            most: vec![vec![0.0; devices as usize]; levels],
        }
    }

    fn clear(&mut self) {
        self.loads.fill(0.0);
    }

    fn add(&mut self, start: u32, length: u32, size: f64) {
        let (start, end) = (start as usize, (start + length) as usize);
        let devices = self.devices as usize;
        self.loads[start] += size;
        if end >= devices {
            self.loads[0] += size;
            self.loads[end - devices] -= size;
        } else {
            self.loads[end] -= size;
        }
    }

    /// Sums up what was added; the most that a segment carries.
    fn sum(&mut self) -> f32 {
        let mut sum = 0.0;
        for load in &mut self.loads {
            sum += *load;
            *load = sum;
        }
        let devices = self.devices as usize;
        for (most, load) in self.most[0].iter_mut().zip(&self.loads) {
            *most = *load as f32;
        }
        for level in 1..self.most.len() {
            let (below, above) = self.most.split_at_mut(level);
            let (below, half) = (&below[level - 1], 1 << (level - 1));
            for (at, most) in above[0].iter_mut().enumerate() {
                *most = below[at].max(below[(at + half) % devices]);
            }
        }
        self.most[0].iter().copied().fold(0.0, f32::max)
    }

    /// Segments weigh the more the fuller they are, those that are fullest by far the most.
    ///
    /// # Arguments
    /// - `top`: what the fullest of both directions carries.
    fn weigh(&mut self, top: f32) {
        let mut total = 0.0;
        for (weight, load) in self.weights[1..].iter_mut().zip(&self.most[0]) {
            total += (load / top).powi(POWER);
            *weight = total;
        }
    }

    /// The most that a segment of this way carries.
    fn most(&self, start: u32, length: u32) -> f64 {
        let level = (u32::BITS - 1 - length.leading_zeros()) as usize;
        let last = (start + length - (1 << level)) % self.devices;
        let row = &self.most[level];
        f64::from(row[start as usize].max(row[last as usize]))
    }

    /// What a unit more on this way would cost.
    fn weight(&self, start: u32, length: u32) -> f32 {
        let (start, end, devices) =
            (start as usize, (start + length) as usize, self.devices as usize);
        if end <= devices {
            self.weights[end] - self.weights[start]
        } else {
            self.weights[devices] - self.weights[start] + self.weights[end - devices]
        }
    }
}

/// So many wavelengths for a demand, on so many segments from one on.
#[derive(Clone, Copy, Debug)]
struct Arc {
    start: u32,
    length: u32,
    count: u32,
    demand: u32,
    pair: u32,
}

/// Wavelengths from the first to before the second.
type Run = (u32, u32);

/// Gives wavelengths out along a ring that is cut at one place.
#[derive(Clone, Debug)]
struct Sweep {
    devices: u32,
    count: u32,
    cut: u32,
    arcs: Vec<Arc>,
    /// What is asked for, by urgency; of each segment, wavelengths that nobody has been promised.
    asked: [Vec<Arc>; URGENCIES],
    /// What would be taken ahead of time where there is something left.
    offered: Vec<Arc>,
    left: Vec<u32>,
    /// Of each place, the first of its arcs among those in order, and these.
    starts: Vec<u32>,
    order: Vec<u32>,
    /// Of each place, wavelengths that are free until there.
    free: Vec<Vec<Run>>,
    is_free: Vec<u64>,
    /// Of each place, wavelengths that become free there, and until where.
    ends: Vec<Vec<(Run, u32)>>,
    /// What has been given, and what arcs have not got; of each segment, wavelengths that pass light.
    given: Vec<(Arc, Run)>,
    missed: Vec<Arc>,
    lit: Palette,
}

/// Of each segment a bit for every wavelength.
#[derive(Clone, Debug)]
struct Palette {
    words: usize,
    count: u32,
    bits: Vec<u64>,
}

impl Palette {
    fn new(segments: u32, count: u32) -> Self {
        let words = (count as usize).div_ceil(64);
        Self { words, count, bits: vec![0; segments as usize * words] }
    }

    fn clear(&mut self) {
        self.bits.fill(0);
    }

    /// Lights wavelengths on so many segments from one on.
    fn light(&mut self, start: u32, length: u32, run: Run) {
        let segments = self.bits.len() / self.words;
        for word in run.0 as usize / 64..(run.1 as usize).div_ceil(64) {
            let low = run.0.saturating_sub(64 * word as u32).min(64);
            let high = (run.1 - 64 * word as u32).min(64);
            let mask = (u64::MAX >> (64 - (high - low))) << low;
            for step in 0..length as usize {
                let segment = (start as usize + step) % segments;
                self.bits[segment * self.words + word] |= mask;
            }
        }
    }

    /// The first wavelength that is dark on all of these segments.
    fn dark(&self, start: u32, length: u32) -> Option<u32> {
        let segments = self.bits.len() / self.words;
        (0..self.words).find_map(|word| {
            let lit = (0..length as usize).fold(0, |lit, step| {
                lit | self.bits[(start as usize + step) % segments * self.words + word]
            });
            let found = 64 * word as u32 + lit.trailing_ones();
            (lit != u64::MAX && found < self.count).then_some(found)
        })
    }
}

impl Sweep {
    fn new(devices: u32, count: u32) -> Self {
        let places = devices as usize + 1;
        Self {
            devices,
            count,
            cut: 0,
            arcs: Vec::new(),
            asked: Default::default(),
            offered: Vec::new(),
            left: vec![count; devices as usize],
            starts: vec![0; places + 1],
            order: Vec::new(),
            free: vec![Vec::new(); places],
            is_free: vec![0; places.div_ceil(64)],
            ends: vec![Vec::new(); places],
            given: Vec::new(),
            missed: Vec::new(),
            lit: Palette::new(devices, count),
        }
    }

    fn begin(&mut self, cut: u32) {
        self.cut = cut;
    }

    fn clear(&mut self) {
        self.arcs.clear();
        self.asked.iter_mut().for_each(Vec::clear);
        self.offered.clear();
    }

    fn ask(&mut self, arc: Arc, urgency: usize) {
        self.asked[urgency].push(self.turned(arc));
    }

    fn offer(&mut self, arc: Arc) {
        self.offered.push(self.turned(arc));
    }

    /// The same, as seen from the cut.
    fn turned(&self, arc: Arc) -> Arc {
        Arc { start: (arc.start + self.devices - self.cut) % self.devices, ..arc }
    }

    /// Promises what is there to those who are owed most.
    fn promise(&mut self) {
        self.left.fill(self.count);
        for asked in self.asked.iter_mut().chain([&mut self.offered]) {
            // Who is owed as much takes turns at being first.
            let turn = self.cut as usize % asked.len().max(1);
            asked.rotate_left(turn);
        }
        for arc in self.asked.iter().rev().chain([&self.offered]).flatten() {
            let (start, end) = (arc.start as usize, (arc.start + arc.length) as usize);
            let devices = self.left.len();
            let (first, rest) = (start..end.min(devices), 0..end.saturating_sub(devices));
            let least = |range: std::ops::Range<usize>| self.left[range].iter().copied().min();
            let most = least(first.clone()).min(least(rest.clone()).or(Some(u32::MAX)));
            let count = arc.count.min(most.unwrap_or(0));
            if count > 0 {
                self.left[first].iter_mut().for_each(|left| *left -= count);
                self.left[rest].iter_mut().for_each(|left| *left -= count);
                self.arcs.push(Arc { count, ..*arc });
            }
        }
    }

    /// Gives what was asked for as far as there is some; tells which wavelengths an arc gets.
    fn give(&mut self, mut tell: impl FnMut(&Arc, u32, u32)) {
        self.promise();
        self.sort();
        self.free.iter_mut().for_each(Vec::clear);
        self.ends.iter_mut().for_each(Vec::clear);
        self.is_free.fill(0);
        self.given.clear();
        self.missed.clear();
        // What goes over the cut has its wavelengths from the first place on.
        let mut given = 0;
        for arc in self.arcs.iter().filter(|arc| arc.start + arc.length > self.devices) {
            let count = arc.count.min(self.count - given);
            if count > 0 {
                self.given.push((*arc, (given, given + count)));
                let end = (arc.start + arc.length - self.devices) as usize;
                self.ends[end].push(((given, given + count), arc.start));
                given += count;
            }
        }
        self.put((given, self.count), self.devices);
        for place in 0..self.devices {
            let mut ends = std::mem::take(&mut self.ends[place as usize]);
            for (run, until) in ends.drain(..) {
                self.put(run, until);
            }
            self.ends[place as usize] = ends;
            let (from, to) = (self.starts[place as usize], self.starts[place as usize + 1]);
            for number in from..to {
                let arc = self.arcs[self.order[number as usize] as usize];
                let end = arc.start + arc.length;
                if end > self.devices {
                    continue;
                }
                let mut left = arc.count;
                while left > 0
                    && let Some((run, until)) = self.take(end, left)
                {
                    self.given.push((arc, run));
                    left -= run.1 - run.0;
                    if end < self.devices {
                        self.ends[end as usize].push((run, until));
                    }
                }
                if left > 0 {
                    self.missed.push(Arc { count: left, ..arc });
                }
            }
        }
        self.mend();
        for (arc, run) in &self.given {
            tell(arc, run.0, run.1 - run.0);
        }
    }

    /// What was kept for arcs over the cut serves others where those do not need it.
    fn mend(&mut self) {
        if self.missed.is_empty() {
            return;
        }
        self.lit.clear();
        for (arc, run) in &self.given {
            self.lit.light(arc.start, arc.length, *run);
        }
        for arc in &self.missed {
            for _ in 0..arc.count {
                let Some(first) = self.lit.dark(arc.start, arc.length) else { break };
                let run = (first, first + 1);
                self.lit.light(arc.start, arc.length, run);
                self.given.push((*arc, run));
            }
        }
    }

    /// Arcs by where they start.
    fn sort(&mut self) {
        self.starts.fill(0);
        for arc in &self.arcs {
            self.starts[arc.start as usize + 2] += 1;
        }
        for place in 2..self.starts.len() {
            self.starts[place] += self.starts[place - 1];
        }
        self.order.resize(self.arcs.len(), 0);
        for (number, arc) in (0..).zip(&self.arcs) {
            let at = &mut self.starts[arc.start as usize + 1];
            self.order[*at as usize] = number;
            *at += 1;
        }
    }

    fn put(&mut self, run: Run, until: u32) {
        if run.0 < run.1 {
            let runs = &mut self.free[until as usize];
            match runs.last_mut() {
                Some(last) if last.1 == run.0 => last.1 = run.1,
                Some(last) if last.0 == run.1 => last.0 = run.0,
                _ => runs.push(run),
            }
            self.is_free[until as usize / 64] |= 1 << (until % 64);
        }
    }

    /// At most so many wavelengths that are free at least until a place, but not much longer.
    fn take(&mut self, until: u32, most: u32) -> Option<(Run, u32)> {
        let mut word = until as usize / 64;
        let mut bits = self.is_free[word] & (u64::MAX << (until % 64));
        while bits == 0 {
            word += 1;
            bits = *self.is_free.get(word)?;
        }
        let found = word as u32 * 64 + bits.trailing_zeros();
        let runs = &mut self.free[found as usize];
        let run = runs.last_mut()?;
        let taken = (run.0, run.1.min(run.0 + most));
        run.0 = taken.1;
        if run.0 == run.1 {
            runs.pop();
        }
        if runs.is_empty() {
            self.is_free[word] &= !(1 << (found % 64));
        }
        Some((taken, found))
    }
}
