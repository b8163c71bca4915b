//! Wavelength allocation on a ring, decided anew for every interval.
//!
//! Both directions of the ring have the same number of wavelengths. A circuit takes one wavelength, the
//! same on all segments from its source to its target; behind its target the wavelength serves another
//! circuit. First a fractional allocation is computed: demands are split between both directions in the
//! best proportions found so far, and each is scaled by the fullest segment on its path. Whole
//! wavelengths follow by deficit scheduling: the fraction that a demand does not get now is carried
//! over as credit, so that over several intervals all demands get their fair share. Wavelengths are
//! then assigned by a sweep along the ring from a rotating start, by best fit: each circuit takes those
//! that stay free for little longer than it needs.
//!
//! Source: SiP-ML §3.3 and A.1, as the circulation of a wavelength around the ring. Differs from the
//! paper: 1. divided by loads of segments, not by solving a flow; 2. both directions; 3. carried-over
//! fractions instead of random rounding; 4. circuits keep one wavelength on their whole path
//! (wavelength continuity), since nothing on a ring converts it.

use std::cmp::Ordering;

use super::Demand;

/// Largest step of a demand's share of a direction per adjustment.
const STEP: f32 = 0.1;
/// Each demand's share is adjusted once in this many intervals: adjusting all at a time would
/// overshoot.
const TURNS: u32 = 8;
/// Exponent of a segment's relative load in its weight (congestion cost).
const POWER: i32 = 16;
/// Maximum number of intervals for which a demand accumulates credit.
const INTERVALS_MAX: f32 = 64.0;
/// Credit of a demand that was never present.
const NEVER: f32 = f32::NEG_INFINITY;
/// Initial credit of a demand for less than one wavelength, so that small demands do not wait at first
/// until credit for a whole wavelength has accumulated.
const OWED: f32 = 0.9;
/// Leftover wavelengths go to demands with at least this credit: what they get ahead of time they do
/// not request later, when demand may exceed supply.
const AHEAD: f32 = 0.0;
/// Number of urgency levels, by the number of intervals for which a demand has been waiting, in powers
/// of two.
const URGENCIES: usize = 8;
/// Urgency at which the fair share is considered infeasible and is reduced.
const LATE: usize = 6;
/// Relative step by which the feasible fraction is reduced, or increased again.
const POSSIBLE_STEP: f32 = 1e-3;

/// Direction around the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Towards higher device numbers.
    Up,
    /// Towards lower device numbers.
    Down,
}

/// Wavelengths that connect two devices for an interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Circuit {
    /// Index of the demand that they serve.
    pub demand: u32,
    /// Direction around the ring.
    pub direction: Direction,
    /// The first wavelength.
    pub first: u32,
    /// Number of consecutive wavelengths.
    pub count: u32,
}

/// Wavelength allocator of one ring.
#[derive(Clone, Debug)]
pub struct Wavelengths {
    pairs: Pairs,
    /// Wavelengths in each direction.
    count: u32,
    /// Whether the ring is cut, so that there is one path between two devices.
    is_cut: bool,
    /// For each pair of devices: the share that goes up, and the credits up and down.
    shares: Vec<f32>,
    owed: Vec<[f32; 2]>,
    intervals: u32,
    /// The fraction of the fair share that has proved feasible with whole wavelengths.
    possible: f32,
    circuits: Vec<Circuit>,
    sweep: Sweep,
    loads: [Loads; 2],
}

impl Wavelengths {
    /// Creates the allocator of a ring of `devices` devices.
    ///
    /// # Arguments
    /// - `count`: number of wavelengths in each direction.
    /// - `reach`: maximum length of a circuit, in devices.
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

    /// Allocates circuits for the next interval; demands out of reach get nothing. O(demands + devices
    /// · log devices).
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

    /// Shifts shares towards the direction that was less loaded in the last interval.
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

    /// Computes the load of each segment under the fractional allocation.
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

    /// Allocates the wavelengths of one direction; returns the highest urgency of any demand.
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
            // Credit is spent gradually, so that other demands do not starve.
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

/// Numbering of the pairs of devices that a circuit may join.
#[derive(Clone, Copy, Debug)]
struct Pairs {
    devices: u32,
    reach: u32,
}

impl Pairs {
    /// Number of pairs per source.
    fn of_one(self) -> u32 {
        (2 * self.reach).min(self.devices.saturating_sub(1))
    }

    fn count(self) -> usize {
        self.devices as usize * self.of_one() as usize
    }

    /// Returns the source of a pair.
    fn source(self, pair: usize) -> u32 {
        pair as u32 / self.of_one().max(1)
    }

    /// Returns how far up the target of a pair is.
    fn up(self, pair: usize) -> u32 {
        let span = (pair % self.of_one() as usize) as u32;
        if span < self.reach { span + 1 } else { self.devices - 1 - (span - self.reach) }
    }

    /// Returns the number of a pair, if its target is within reach, and how far up the target is.
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

    /// Returns the path up and the path down as (first segment, number of segments); the latter as seen
    /// from the other side of the ring, where down is up.
    fn ways(self, source: u32, up: u32) -> [(u32, u32); 2] {
        [(source, up), (self.devices - 1 - source, self.devices - up)]
    }
}

/// Loads of segments: segment `n` joins device `n` and the next.
#[derive(Clone, Debug)]
struct Loads {
    devices: u32,
    loads: Vec<f64>,
    /// Prefix sums of the segments' weights (marginal costs).
    weights: Vec<f32>,
    /// Sparse table of range maxima: for each power of two, the maximum over that many segments from
    /// each one on.
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

    /// Accumulates the added differences; returns the largest load of a segment.
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

    /// Computes weights, which grow steeply with the load relative to `top`.
    ///
    /// # Arguments
    /// - `top`: largest load in either direction.
    fn weigh(&mut self, top: f32) {
        let mut total = 0.0;
        for (weight, load) in self.weights[1..].iter_mut().zip(&self.most[0]) {
            total += (load / top).powi(POWER);
            *weight = total;
        }
    }

    /// Returns the largest load of a segment on a path.
    fn most(&self, start: u32, length: u32) -> f64 {
        let level = (u32::BITS - 1 - length.leading_zeros()) as usize;
        let last = (start + length - (1 << level)) % self.devices;
        let row = &self.most[level];
        f64::from(row[start as usize].max(row[last as usize]))
    }

    /// Returns the marginal cost of a path.
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

/// A request or allocation of `count` wavelengths for a demand on `length` segments from `start` on.
#[derive(Clone, Copy, Debug)]
struct Arc {
    start: u32,
    length: u32,
    count: u32,
    demand: u32,
    pair: u32,
}

/// A half-open range of wavelengths.
type Run = (u32, u32);

/// Assigns wavelengths by a sweep along the ring from a cut.
#[derive(Clone, Debug)]
struct Sweep {
    devices: u32,
    count: u32,
    cut: u32,
    arcs: Vec<Arc>,
    /// Requests by urgency; for `left`, the wavelengths of each segment that are not admitted yet.
    asked: [Vec<Arc>; URGENCIES],
    /// Requests ahead of time, served from what is left.
    offered: Vec<Arc>,
    left: Vec<u32>,
    /// For each place, the index of its first arc in `order`; and the arcs sorted by start.
    starts: Vec<u32>,
    order: Vec<u32>,
    /// For each place, wavelengths that are free up to there.
    free: Vec<Vec<Run>>,
    is_free: Vec<u64>,
    /// For each place, wavelengths that become free there, and up to where.
    ends: Vec<Vec<(Run, u32)>>,
    /// Assigned arcs, unserved arcs, and the lit wavelengths of each segment.
    given: Vec<(Arc, Run)>,
    missed: Vec<Arc>,
    lit: Palette,
}

/// Bit set of the lit wavelengths of each segment.
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

    /// Marks wavelengths as lit on `length` segments from `start` on.
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

    /// Returns the first wavelength that is dark on all of these segments.
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

    /// Returns the arc relative to the cut.
    fn turned(&self, arc: Arc) -> Arc {
        Arc { start: (arc.start + self.devices - self.cut) % self.devices, ..arc }
    }

    /// Admission: admits requests as far as segments have wavelengths left, the most urgent first.
    fn promise(&mut self) {
        self.left.fill(self.count);
        for asked in self.asked.iter_mut().chain([&mut self.offered]) {
            // Requests of equal urgency take turns at being first.
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

    /// Assigns wavelengths to admitted requests, and reports them to `tell`.
    fn give(&mut self, mut tell: impl FnMut(&Arc, u32, u32)) {
        self.promise();
        self.sort();
        self.free.iter_mut().for_each(Vec::clear);
        self.ends.iter_mut().for_each(Vec::clear);
        self.is_free.fill(0);
        self.given.clear();
        self.missed.clear();
        // Arcs over the cut reserve their wavelengths from the first place on.
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

    /// Serves missed arcs with wavelengths that arcs over the cut reserved but do not need there (first
    /// fit).
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

    /// Sorts arcs by start (counting sort).
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

    /// Takes at most `most` wavelengths that are free at least up to `until`, by best fit: those that
    /// become unavailable soonest after it.
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
