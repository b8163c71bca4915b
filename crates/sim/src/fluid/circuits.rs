//! Circuit allocation for a part, on rings of fibre or on circuit switches, decided from queued and
//! recently offered bytes.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use topology::circuits::{Demand, Direction, Leaves, Wavelengths, circuits};
use topology::{Clos, Interconnect, InterconnectKind, Ring};

use super::rates::{SharePath, Shares, bytes_per_ns};

/// Length of the ring segment that represents a ring of identical parts, in reaches.
const REACHES: u32 = 4;

/// Exponential backoff: while the same demands are open, each decision waits twice as long as the last,
/// up to 2^`STEADY_MAX` intervals, since a past decision stays right for longer, and every
/// reconfiguration loses light.
const STEADY_MAX: u32 = 6;
/// Least demand of a flow that is not done, in bytes, so that what is left of it gets light.
const LEAST: f64 = 1.0;

/// A hop: a device of the part, and the distance up to the other device, along its row or its column.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Hop {
    source: u32,
    up: u32,
    is_column: bool,
}

/// Traffic of one hop. The resource of line `n` is `Circuits::first + n`.
#[derive(Clone, Debug)]
struct Line {
    hop: Hop,
    /// Bytes offered since the last decision, and bytes not yet transferred.
    came: f64,
    waits: f64,
    /// Flows that are not done.
    flows: u32,
    /// Capacity in bytes per nanosecond once all of its circuits are lit.
    lit: f64,
    /// Its wavelengths as (copy of the part, direction, first, count).
    runs: Vec<(u32, Direction, u32, u32)>,
}

impl Line {
    /// Bytes not yet transferred.
    fn left(&self) -> f64 {
        if self.flows > 0 { self.waits.max(LEAST) } else { 0.0 }
    }

    /// Bytes for which circuits are allocated.
    fn demand(&self) -> f64 {
        self.left().max(self.came)
    }
}

/// The circuits of a part, and when they are decided.
pub(crate) struct Circuits {
    decider: Decider,
    devices: u32,
    total: u32,
    /// Capacity of one wavelength or switch port, in bytes per nanosecond.
    unit: f64,
    every: Option<u64>,
    delay: u64,
    /// Resource of the first line.
    first: u32,
    lines: Vec<Line>,
    numbers: FxHashMap<Hop, u32>,
    /// Relay paths of hops without a circuit.
    relayed: FxHashMap<Hop, Vec<Hop>>,
    /// Next decision if the same demands stay open, earliest possible decision, and backoff exponent:
    /// the number of decisions since demands changed.
    next: u64,
    earliest: u64,
    steady: u32,
    /// When reconfigured circuits light up.
    lights: Option<u64>,
    pub changes: u64,
}

enum Decider {
    /// One ring, or rings of rows followed by rings of columns.
    Rings { columns: u32, rings: Vec<FibreRing> },
    /// Circuit switches.
    Switches {
        count: u32,
        /// Exponent applied to demands.
        power: f64,
        clos: Option<Clos>,
    },
}

/// One ring, from the point of view of the part.
struct FibreRing {
    wavelengths: Wavelengths,
    /// Devices of the part on the ring, and devices of the ring.
    devices: u32,
    total: u32,
    /// Copies of the part on the shortened ring that represents it.
    copies: u32,
    reach: u32,
    is_cut: bool,
}

impl FibreRing {
    /// # Arguments
    /// - `count`: number of wavelengths in each direction.
    /// - `is_cut`: whether no light passes from the last device to the first. The representative part
    ///   is then one in the middle.
    fn new(ring: Ring, count: u32, (devices, total): (u32, u32), is_cut: bool) -> Self {
        let copies = (REACHES * ring.reach).div_ceil(devices).min(total / devices);
        let around = devices * copies;
        let is_row = is_cut && devices == total;
        let farthest = if is_row { around - 1 } else { (around - u32::from(is_cut)) / 2 };
        let reach = ring.reach.min(farthest).max(1);
        let wavelengths = Wavelengths::new(around, count, reach, is_row);
        Self { wavelengths, devices, total, copies, reach, is_cut }
    }

    /// Returns the steps from a device to the one `up` further, each at most the reach, the shorter way
    /// around unless the ring is cut there: how far up each step goes.
    fn steps(&self, source: u32, up: u32) -> impl Iterator<Item = u32> + use<> {
        let (total, reach) = (self.total, self.reach);
        let is_inside = self.is_cut && (source + up) % total < self.devices;
        let goes_up = if is_inside { source + up < total } else { 2 * up <= total };
        let mut left = if goes_up { up } else { total - up };
        std::iter::from_fn(move || {
            let step = left.min(reach);
            left -= step;
            (step > 0).then_some(if goes_up { step } else { total - step })
        })
    }
}

impl Circuits {
    pub fn new(
        interconnect: &Interconnect,
        devices: u32,
        (wanted, power): (impl Iterator<Item = (u32, u32, f64)>, f64),
        shares: &mut Shares,
    ) -> Self {
        let total = interconnect.devices;
        let (decider, unit, every, delay) = match interconnect.kind {
            InterconnectKind::Circuits { switches, every, delay, clos } => {
                let unit = bytes_per_ns(interconnect.rate) / f64::from(switches);
                (Decider::Switches { count: switches, power, clos }, unit, every, delay)
            }
            InterconnectKind::Ring(ring) => {
                let unit = bytes_per_ns(interconnect.rate) / f64::from(ring.wavelengths);
                let is_cut = interconnect.faults.is_cut;
                let one = FibreRing::new(ring, ring.wavelengths / 2, (devices, total), is_cut);
                let rings = vec![one];
                (Decider::Rings { columns: total, rings }, unit, Some(ring.every), ring.delay)
            }
            InterconnectKind::Rings { columns, ring } => {
                // A device's wavelengths are split evenly between its row and its column.
                let unit = bytes_per_ns(interconnect.rate) / f64::from(ring.wavelengths);
                let count = (ring.wavelengths / 4).max(1);
                let rows = devices / columns;
                let of_rows =
                    (0..rows).map(|_| FibreRing::new(ring, count, (columns, columns), false));
                let height = (rows, total / columns);
                let of_columns = (0..columns).map(|_| FibreRing::new(ring, count, height, false));
                let rings = of_rows.chain(of_columns).collect();
                (Decider::Rings { columns, rings }, unit, Some(ring.every), ring.delay)
            }
            InterconnectKind::Flat
            | InterconnectKind::Cluster { .. }
            | InterconnectKind::Links(_) => {
                unreachable!("these have no circuits")
            }
        };
        let mut circuits = Self {
            decider,
            devices,
            total,
            unit,
            every: every.map(|every| every.0),
            delay: delay.0,
            first: shares.count(),
            lines: Vec::new(),
            numbers: FxHashMap::default(),
            relayed: FxHashMap::default(),
            next: 0,
            earliest: 0,
            steady: 0,
            lights: None,
            changes: 0,
        };
        // Training steps repeat, so circuits for the whole step are lit when it starts.
        for (source, target, bytes) in wanted {
            for hop in circuits.hops(source, target) {
                let number = circuits.line(hop, shares);
                circuits.lines[number as usize].came += bytes;
            }
        }
        circuits.decide(0, shares);
        circuits.light(shares);
        circuits
    }

    /// Returns the hops from a device of the part to any device, each of which can have a circuit:
    /// along rows first.
    fn hops(&self, source: u32, target: u32) -> Vec<Hop> {
        let Decider::Rings { columns, rings } = &self.decider else {
            let up = (target + self.total - source) % self.total;
            return vec![Hop { source, up, is_column: false }];
        };
        let columns = *columns;
        let mut hops = Vec::new();
        let (mut row, mut column) = (source / columns, source % columns);
        let local = |row: u32, column: u32| (row * columns + column) % self.devices;
        let across = (target % columns + columns - column) % columns;
        for up in rings[self.ring_of(local(row, column), false)].steps(column, across) {
            hops.push(Hop { source: local(row, column), up, is_column: false });
            column = (column + up) % columns;
        }
        let rows = self.total / columns;
        let along = (target / columns + rows - row) % rows;
        if along > 0 {
            for up in rings[self.ring_of(local(row, column), true)].steps(row, along) {
                hops.push(Hop { source: local(row, column), up, is_column: true });
                row = (row + up) % rows;
            }
        }
        hops
    }

    /// Returns the number of the ring that carries a hop.
    fn ring_of(&self, source: u32, is_column: bool) -> usize {
        match &self.decider {
            Decider::Rings { columns, rings } if rings.len() > 1 => {
                let rows = self.devices / columns;
                (if is_column { rows + source % columns } else { source / columns }) as usize
            }
            _ => 0,
        }
    }

    fn line(&mut self, hop: Hop, shares: &mut Shares) -> u32 {
        let first = self.first;
        *self.numbers.entry(hop).or_insert_with(|| {
            self.lines.push(Line {
                hop,
                came: 0.0,
                waits: 0.0,
                flows: 0,
                lit: 0.0,
                runs: Vec::new(),
            });
            shares.resource(0.0) - first
        })
    }

    pub fn path(&mut self, source: u32, target: u32, shares: &mut Shares) -> SharePath {
        let mut hops = self.hops(source, target);
        if self.every.is_none()
            && let [hop] = hops[..]
            && !self.is_lit(hop)
        {
            hops = self.relay(hop);
        }
        hops.into_iter().map(|hop| self.first + self.line(hop, shares)).collect()
    }

    fn is_lit(&self, hop: Hop) -> bool {
        self.numbers.get(&hop).is_some_and(|&number| self.lines[number as usize].lit > 0.0)
    }

    /// Returns the relay path over the fewest lit circuits. O(devices · circuits of one), cached per
    /// hop.
    fn relay(&mut self, hop: Hop) -> Vec<Hop> {
        if let Some(known) = self.relayed.get(&hop) {
            return known.clone();
        }
        let mut from: Vec<Vec<u32>> = vec![Vec::new(); self.devices as usize];
        for line in self.lines.iter().filter(|line| line.lit > 0.0) {
            from[line.hop.source as usize].push(line.hop.up);
        }
        let mut came: Vec<Option<u32>> = vec![None; self.total as usize];
        let goal = (hop.source + hop.up) % self.total;
        let mut open = VecDeque::from([hop.source]);
        while let Some(at) = open.pop_front() {
            if at == goal {
                break;
            }
            for up in &from[(at % self.devices) as usize] {
                let next = (at + up) % self.total;
                if next != hop.source && came[next as usize].is_none() {
                    came[next as usize] = Some(*up);
                    open.push_back(next);
                }
            }
        }
        let (mut at, mut hops) = (goal, Vec::new());
        while let Some(up) = came[at as usize] {
            at = (at + self.total - up) % self.total;
            hops.push(Hop { source: at % self.devices, up, is_column: false });
        }
        hops.reverse();
        self.relayed.insert(hop, hops.clone());
        hops
    }

    pub fn offer(&mut self, path: &SharePath, bytes: f64) {
        for &resource in path.iter().filter(|&&resource| resource >= self.first) {
            let line = &mut self.lines[(resource - self.first) as usize];
            if line.flows == 0 {
                (self.next, self.steady) = (self.earliest, 0);
            }
            line.came += bytes;
            line.waits += bytes;
            line.flows += 1;
        }
    }

    pub fn done(&mut self, path: &SharePath, bytes: f64) {
        for &resource in path.iter().filter(|&&resource| resource >= self.first) {
            let waits = &mut self.lines[(resource - self.first) as usize].waits;
            *waits = (*waits - bytes).max(0.0);
        }
    }

    /// A flow over this path is done.
    pub fn close(&mut self, path: &SharePath) {
        for &resource in path.iter().filter(|&&resource| resource >= self.first) {
            let line = &mut self.lines[(resource - self.first) as usize];
            line.flows -= 1;
            if line.flows == 0 {
                line.waits = 0.0;
                (self.next, self.steady) = (self.earliest, 0);
            }
        }
    }

    pub fn next(&self, now: u64) -> Option<u64> {
        let decides = self.every.map(|every| self.next.max(now.div_ceil(every) * every));
        self.lights.into_iter().chain(decides).min()
    }

    pub fn turn(&mut self, now: u64, shares: &mut Shares) {
        if self.lights.is_some_and(|lights| lights <= now) {
            self.light(shares);
        }
        if let Some(every) = self.every
            && now >= self.next
        {
            self.earliest = (now / every + 1) * every;
            self.next = (now / every + (1 << self.steady)) * every;
            self.steady = (self.steady + 1).min(STEADY_MAX);
            self.decide(now, shares);
        }
    }

    /// Lights all decided circuits.
    fn light(&mut self, shares: &mut Shares) {
        self.lights = None;
        for (line, resource) in self.lines.iter().zip(self.first..) {
            shares.change(resource, line.lit);
        }
    }

    fn decide(&mut self, now: u64, shares: &mut Shares) {
        let open: Vec<u32> = (0..)
            .zip(&self.lines)
            .filter(|(_, line)| line.demand() > 0.0)
            .map(|(number, _)| number)
            .collect();
        if open.is_empty() {
            return;
        }
        let decided = match self.decider {
            Decider::Switches { count, power, clos } => {
                self.join(&open, (count, power, clos), shares)
            }
            Decider::Rings { .. } => self.tune(&open),
        };
        self.lines.iter_mut().for_each(|line| line.came = 0.0);
        if !self.is_worth_it(&decided, shares) && self.changes > 0 {
            return;
        }
        self.changes += 1;
        for ((resource, line), new) in (self.first..).zip(&mut self.lines).zip(decided) {
            line.lit = new.lit;
            line.runs = new.runs;
            shares.change(resource, new.kept);
        }
        self.lights = Some(now + self.delay);
    }

    /// Returns whether the new circuits transfer more in the next interval, although reconfigured ones
    /// are dark at first.
    fn is_worth_it(&self, decided: &[Decided], shares: &Shares) -> bool {
        let every = self.every.unwrap_or(u64::MAX) as f64;
        let (mut stays, mut turns) = (0.0, 0.0);
        for ((resource, line), new) in (self.first..).zip(&self.lines).zip(decided) {
            // Bytes held up at another line do not flow, however well this one is lit.
            stays += line.left().min(shares.taken(resource) * every);
            let dark = (new.lit - new.kept) * (self.delay as f64).min(every);
            turns += line.left().min(new.lit * every - dark);
        }
        turns > stays
    }

    /// Allocates circuits of switches to open demands.
    fn join(
        &mut self,
        open: &[u32],
        (switches, power, clos): (u32, f64, Option<Clos>),
        shares: &mut Shares,
    ) -> Vec<Decided> {
        let demand = |&number: &u32| {
            let line = &self.lines[number as usize];
            let target = (line.hop.source + line.hop.up) % self.total % self.devices;
            Demand { source: line.hop.source, target, size: line.demand().powf(power) }
        };
        let demands: Vec<Demand> = open.iter().map(demand).collect();
        let (devices, total) = (self.devices, self.total);
        // A part has whole leaves, unless it is the whole fabric.
        let leaves: Vec<bool> = open
            .iter()
            .map(|&number| {
                let Hop { source, up, .. } = self.lines[number as usize].hop;
                clos.is_some_and(|clos| {
                    source / clos.devices != (source + up) % total / clos.devices
                })
            })
            .collect();
        let join = |switches: u32| {
            let known = clos.map(|clos| {
                (Leaves { devices: clos.devices, uplinks: clos.uplinks(switches) }, &leaves[..])
            });
            circuits(devices, switches, &demands, known)
        };
        let mut counts = join(switches);
        let has_none = counts.contains(&0);
        if self.every.is_none() && has_none && self.total > 1 {
            // One switch joins all devices in a ring, so that every device can be reached.
            counts = join(switches - 1);
        }
        let mut decided = vec![Decided::default(); self.lines.len()];
        for (&number, count) in open.iter().zip(counts) {
            decided[number as usize].lit = f64::from(count) * self.unit;
        }
        if self.every.is_none() && has_none && self.total > 1 {
            for source in 0..self.devices {
                let number = self.line(Hop { source, up: 1, is_column: false }, shares) as usize;
                decided.resize(self.lines.len(), Decided::default());
                decided[number].lit += self.unit;
            }
        }
        for (line, new) in self.lines.iter().zip(&mut decided) {
            new.kept = line.lit.min(new.lit);
        }
        decided
    }

    /// Allocates wavelengths of rings to open demands.
    fn tune(&mut self, open: &[u32]) -> Vec<Decided> {
        let mut of_ring: Vec<Vec<u32>> = Vec::new();
        for &number in open {
            let hop = self.lines[number as usize].hop;
            let ring = self.ring_of(hop.source, hop.is_column);
            of_ring.resize(of_ring.len().max(ring + 1), Vec::new());
            of_ring[ring].push(number);
        }
        let (lines, unit) = (&self.lines, self.unit);
        let Decider::Rings { columns, rings } = &mut self.decider else {
            unreachable!("asked of rings")
        };
        let mut decided = vec![Decided::default(); lines.len()];
        let is_one = rings.len() == 1;
        for (ring, open) in rings.iter_mut().zip(&of_ring).filter(|(_, open)| !open.is_empty()) {
            let (devices, reach, copies) = (ring.devices, ring.reach, ring.copies);
            let around = devices * copies;
            let demand = |copy: u32, line: &Line| {
                let place = match line.hop {
                    Hop { source, .. } if is_one => source,
                    Hop { source, is_column: true, .. } => source / *columns,
                    Hop { source, .. } => source % *columns,
                };
                let (source, up) = (place + copy * devices, line.hop.up);
                let up = if up <= reach { up } else { around - (ring.total - up) };
                Demand { source, target: (source + up) % around, size: line.demand() }
            };
            let demands: Vec<Demand> = (0..copies)
                .flat_map(|copy| open.iter().map(move |&number| (copy, number)))
                .map(|(copy, number)| demand(copy, &lines[number as usize]))
                .collect();
            let count = open.len();
            for circuit in ring.wavelengths.decide(&demands) {
                let (copy, at) = (circuit.demand as usize / count, circuit.demand as usize % count);
                let new = &mut decided[open[at] as usize];
                new.lit += f64::from(circuit.count) * unit / f64::from(copies);
                new.runs.push((copy as u32, circuit.direction, circuit.first, circuit.count));
            }
            for &number in open {
                let new = &mut decided[number as usize];
                let both = common(&lines[number as usize].runs, &new.runs);
                new.kept = f64::from(both) * unit / f64::from(copies);
            }
        }
        decided
    }
}

/// New circuits of a line.
#[derive(Clone, Debug, Default)]
struct Decided {
    lit: f64,
    /// The capacity that stays lit through the reconfiguration.
    kept: f64,
    runs: Vec<(u32, Direction, u32, u32)>,
}

/// Returns the number of wavelengths in both lists.
fn common(one: &[(u32, Direction, u32, u32)], other: &[(u32, Direction, u32, u32)]) -> u32 {
    let mut both = 0;
    for &(copy, direction, first, count) in one {
        for &(_, _, from, so_many) in other.iter().filter(|run| run.0 == copy && run.1 == direction)
        {
            let (start, end) = (first.max(from), (first + count).min(from + so_many));
            both += end.saturating_sub(start);
        }
    }
    both
}
