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
use super::loads::Loads;
use super::sweep::{Arc, Sweep, URGENCIES};

/// Largest step of a demand's share of a direction per adjustment.
const STEP: f32 = 0.1;
/// Each demand's share is adjusted once in this many intervals: adjusting all at a time would
/// overshoot.
const TURNS: u32 = 8;
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
            latest = self.allocate(demands, direction).max(latest);
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
            let paths = self.pairs.paths(demand.source, up);
            if paths.iter().any(|path| path.1 > reach) {
                continue;
            }
            let [one, other] =
                [0, 1].map(|path| self.loads[path].weight(paths[path].0, paths[path].1));
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
            let paths = self.pairs.paths(demand.source, up);
            for (loads, ((start, length), part)) in
                self.loads.iter_mut().zip(paths.into_iter().zip(parts))
            {
                loads.add(start, length, demand.size * part);
            }
        }
        let top = self.loads.iter_mut().map(Loads::sum).fold(f32::MIN_POSITIVE, f32::max);
        self.loads.iter_mut().for_each(|loads| loads.weigh(top));
    }

    /// Allocates the wavelengths of one direction; returns the highest urgency of any demand.
    fn allocate(&mut self, demands: &[Demand], direction: Direction) -> usize {
        let mut latest = 0;
        let side = direction as usize;
        self.sweep.clear();
        for (number, demand) in (0..).zip(demands) {
            let Some((pair, up)) = self.pairs.find(demand) else { continue };
            let share = f64::from(self.shares[pair]);
            let (start, length) = self.pairs.paths(demand.source, up)[side];
            let size = demand.size * [share, 1.0 - share][side];
            if size <= 0.0 {
                continue;
            }
            let most = self.loads[side].most(start, length);
            let fair = (f64::from(self.count) * size / most) as f32 * self.possible;
            let owed = &mut self.owed[pair][side];
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
        self.sweep.assign(|arc, first, count| {
            owed[arc.pair as usize][side] -= count as f32;
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
    fn paths(self, source: u32, up: u32) -> [(u32, u32); 2] {
        [(source, up), (self.devices - 1 - source, self.devices - up)]
    }
}
