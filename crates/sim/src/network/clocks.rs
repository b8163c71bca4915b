//! Clock drift and clock synchronisation: counters that neighbours exchange.
//!
//! Every chip counts cycles of its own clock. Its hardware-aligned counter (HAC) is that count with
//! corrections: each chip but the root receives its parent's counter every 256 cycles over a link whose
//! latency jitters, and steps towards the received value plus the link latency that was characterised
//! before. A program starts on every chip when the aligned counters overflow, one epoch per hop later
//! than at the root, and from then on counts the chip's own cycles, in the software-aligned counter
//! (SAC). RUNTIME_DESKEW resynchronises by waiting a little longer or shorter, by the difference of the
//! two.
//!
//! Source: the multi-TSP system §3. Differs from the paper: it does not state how fast a counter is
//! corrected; here the mean of several exchanges moves it by at most one cycle.

use std::collections::VecDeque;

use base::{LinkId, Random, VertexId};
use thiserror::Error;
use topology::Network;

/// Cycles until a counter overflows: 8 bits, of which four values are reserved.
pub const EPOCH: u64 = 252;
/// Fractional bits of fixed-point cycle counts.
const FRACTION: u32 = 32;
const CYCLE: i64 = 1 << FRACTION;
const HALF: i64 = EPOCH as i64 / 2;
/// Entries of a link's latency table (an inverse distribution function).
const DRAWS: usize = 1 << 16;

/// Distribution of a link's latency in cycles, actual or measured.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Latency {
    /// Minimum.
    pub min: u32,
    /// Mean.
    pub mean: f64,
    /// Maximum.
    pub max: u32,
    /// Standard deviation.
    pub deviation: f64,
}

/// The paper's seven characterised links, measured 100,000 times each.
///
/// Source: the multi-TSP system, Table 2.
pub const MEASURED: [Latency; 7] = [
    Latency { min: 209, mean: 216.87, max: 228, deviation: 2.93 },
    Latency { min: 210, mean: 216.87, max: 227, deviation: 2.88 },
    Latency { min: 209, mean: 216.41, max: 226, deviation: 2.66 },
    Latency { min: 210, mean: 216.47, max: 226, deviation: 2.71 },
    Latency { min: 209, mean: 216.27, max: 226, deviation: 2.78 },
    Latency { min: 209, mean: 216.48, max: 225, deviation: 2.63 },
    Latency { min: 211, mean: 217.35, max: 228, deviation: 2.84 },
];

/// Parameters of clocks and their synchronisation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ClockModel {
    /// Maximum drift of a clock from nominal, in parts per million.
    pub drift_ppm: f64,
    /// Cycles between counter exchanges.
    pub exchange: u64,
    /// Number of exchanges averaged for one correction.
    pub average: u32,
    /// Number of exchanges that characterise a link's latency.
    pub measurements: u32,
    /// Random seed of drift and jitter.
    pub seed: u64,
}

impl Default for ClockModel {
    /// Assumed: 100 ppm, typical of crystals of this kind; the mean of 16 exchanges.
    fn default() -> Self {
        Self { drift_ppm: 100.0, exchange: 256, average: 16, measurements: 100_000, seed: 0 }
    }
}

/// Why clocks cannot be aligned.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ClockError {
    /// Clocks drift faster than corrections can follow.
    #[error(
        "clocks that are off by {drift_ppm} ppm drift faster than one cycle in {correction}; \
         exchange counters more often, or average fewer of them"
    )]
    Drift {
        /// Maximum drift in parts per million.
        drift_ppm: f64,
        /// Cycles between corrections.
        correction: u64,
    },
    /// A parameter is 0.
    #[error("{what} is 0; expected at least 1")]
    Zero {
        /// The parameter.
        what: &'static str,
    },
}

/// A chip's synchronisation with its parent in the spanning tree.
struct Child {
    chip: usize,
    parent: usize,
    /// Index of the measured link that models its link.
    kind: usize,
    /// The link's characterised mean latency.
    latency: i64,
    sum: i64,
}

/// The clocks of all chips of a network, from power-on.
pub struct Clocks {
    model: ClockModel,
    /// In tree order, parents first.
    children: Vec<Child>,
    height: u32,
    /// Drift of each counter per exchange interval, in fixed-point cycles.
    drift: Vec<i64>,
    /// Offset of each counter ahead of true time, in fixed-point cycles.
    ahead: Vec<i64>,
    tables: Vec<Vec<u8>>,
    random: Random,
    exchanges: u64,
}

impl Clocks {
    /// Characterises all links of the spanning tree; counters start at random offsets.
    ///
    /// # Errors
    /// Clocks may drift faster than corrections follow, or a parameter is 0.
    pub fn new(network: &Network, root: VertexId, model: ClockModel) -> Result<Self, ClockError> {
        let zeros = [
            ("the time between exchanges", model.exchange == 0),
            ("the number of exchanges to average", model.average == 0),
            ("the number of measurements", model.measurements == 0),
        ];
        if let Some((what, _)) = zeros.into_iter().find(|(_, is_zero)| *is_zero) {
            return Err(ClockError::Zero { what });
        }
        let correction = model.exchange * u64::from(model.average);
        // The parent may drift in the opposite direction.
        let apart = 2.0 * model.drift_ppm * 1e-6 * correction as f64;
        if apart.is_nan() || apart >= 1.0 {
            return Err(ClockError::Drift { drift_ppm: model.drift_ppm, correction });
        }
        let tables: Vec<Vec<u8>> = MEASURED.iter().map(table).collect();
        let mut random = Random::of(&[model.seed]);
        let chips = network.vertices() as usize;
        let drift = (0..chips).map(|_| {
            let part = (2.0 * random.fraction() - 1.0) * model.drift_ppm * 1e-6;
            (part * model.exchange as f64 * CYCLE as f64) as i64
        });
        let drift: Vec<i64> = drift.collect();
        let ahead = (0..chips).map(|_| random.below(EPOCH) as i64 * CYCLE);
        let ahead: Vec<i64> = ahead.collect();
        let (tree, height) = tree(network, root);
        let children = tree.into_iter().map(|(chip, parent, link)| {
            let kind = kind_of(link);
            let measured =
                measure(&tables[kind], MEASURED[kind].min, model.measurements, &mut random);
            let latency = (measured.mean * CYCLE as f64) as i64;
            Child { chip, parent, kind, latency, sum: 0 }
        });
        let children = children.collect();
        Ok(Self { model, children, height, drift, ahead, tables, random, exchanges: 0 })
    }

    /// Advances time by at least `cycles`, in whole correction intervals.
    ///
    /// # Arguments
    /// - `look`: called with the clocks after each correction; returns `false` to stop.
    pub fn advance(&mut self, cycles: u64, mut look: impl FnMut(&Self) -> bool) {
        let corrections = cycles.div_ceil(self.model.exchange * u64::from(self.model.average));
        for _ in 0..corrections {
            for _ in 0..self.model.average {
                self.exchange();
            }
            self.correct();
            if !look(self) {
                break;
            }
        }
    }

    /// Every chip receives its parent's counter once.
    fn exchange(&mut self) {
        for (ahead, drift) in self.ahead.iter_mut().zip(&self.drift) {
            *ahead += drift;
        }
        let mut draws = 0;
        for (number, child) in self.children.iter_mut().enumerate() {
            // A 64-bit random number supplies four draws.
            draws = if number % 4 == 0 { self.random.word() } else { draws >> 16 };
            let took = i64::from(MEASURED[child.kind].min)
                + i64::from(self.tables[child.kind][draws as usize % DRAWS]);
            // Counters are whole cycles; the received value is as old as the transmission took.
            let heard = (self.ahead[child.parent] >> FRACTION) - took;
            let own = self.ahead[child.chip] >> FRACTION;
            let latency = child.latency >> FRACTION;
            let mut apart = heard + latency - own;
            // Counters overflow, so the smallest of the possible offsets is meant.
            if !(-HALF..HALF).contains(&apart) {
                apart = (apart + HALF).rem_euclid(2 * HALF) - HALF;
            }
            let rest = child.latency & (CYCLE - 1);
            child.sum += (apart << FRACTION) + rest;
        }
        self.exchanges += 1;
    }

    /// Every chip steps towards the mean of the received offsets, by at most one cycle.
    fn correct(&mut self) {
        let half = i64::from(self.model.average) * CYCLE / 2;
        for child in &mut self.children {
            let step = i64::from(child.sum > half) - i64::from(child.sum < -half);
            self.ahead[child.chip] += step * CYCLE;
            child.sum = 0;
        }
    }

    /// Returns the true time, in cycles of an exact clock.
    pub fn now(&self) -> u64 {
        self.exchanges * self.model.exchange
    }

    /// Returns the height of the spanning tree in hops.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Returns the relative drift of a chip's clock: cycles gained per cycle.
    pub fn drift(&self, chip: VertexId) -> f64 {
        self.drift[chip.0 as usize] as f64 / CYCLE as f64 / self.model.exchange as f64
    }

    /// Returns how far a chip's counter is ahead of the root's, in cycles, as the smallest offset
    /// modulo an epoch.
    pub fn ahead(&self, chip: VertexId) -> f64 {
        let root = self.children.first().map_or(0, |first| first.parent);
        self.apart(chip.0 as usize, root)
    }

    /// Returns the largest offset of any counter from the root's, in cycles.
    pub fn spread(&self) -> f64 {
        let root = self.children.first().map_or(0, |first| first.parent);
        self.children.iter().map(|child| self.apart(child.chip, root).abs()).fold(0.0, f64::max)
    }

    /// Returns the largest offset of any counter from its parent's, in cycles.
    pub fn spread_over_links(&self) -> f64 {
        let apart = |child: &Child| self.apart(child.chip, child.parent).abs();
        self.children.iter().map(apart).fold(0.0, f64::max)
    }

    fn apart(&self, one: usize, other: usize) -> f64 {
        let epoch = EPOCH as i64 * CYCLE;
        let apart = self.ahead[one] - self.ahead[other];
        ((apart + epoch / 2).rem_euclid(epoch) - epoch / 2) as f64 / CYCLE as f64
    }

    /// Starts a program on all chips, hop by hop.
    ///
    /// The root waits for its counter to overflow (DESKEW) and notifies its children (TRANSMIT). A chip
    /// checks for the message when its own counter overflows, and then notifies its children. Each chip
    /// knows how many hops of the tree's height remain below its depth, and waits that long before it
    /// starts (NOTIFY): for each hop as many epochs as the slowest link takes, plus one.
    ///
    /// Source: the multi-TSP system §3.2, where the overhead's unit is an epoch and not a cycle.
    pub fn start(&mut self) -> Start {
        let chips = self.ahead.len();
        let longest = self.children.iter().map(|child| MEASURED[child.kind].max).max().unwrap_or(0);
        let hop = u64::from(longest) / EPOCH + 1;
        let root = self.children.first().map_or(0, |first| first.parent);
        let begin = self.overflow(root, 0.0);
        // When each chip received the start message, and its depth in hops.
        let mut known = vec![(begin, 0); chips];
        for child in &self.children {
            let (told, hops) = known[child.parent];
            let draw = self.random.below(DRAWS as u64) as usize;
            let took = MEASURED[child.kind].min + u32::from(self.tables[child.kind][draw]);
            // A vector is picked up as late as an epoch after its arrival.
            let came = told + f64::from(took);
            known[child.chip] = (self.overflow(child.chip, came), hops + 1);
        }
        let starts = known.iter().map(|&(when, hops)| {
            let left = u64::from(self.height - hops) * hop * EPOCH;
            when + left as f64
        });
        let (first, last) = starts
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(first, last), start| {
                (first.min(start), last.max(start))
            });
        let cycles = u64::from(self.height) * hop * EPOCH;
        Start { cycles, first: first - begin, last: last - begin }
    }

    /// Returns when a chip's counter next overflows at or after a time.
    fn overflow(&self, chip: usize, from: f64) -> f64 {
        let ahead = self.ahead[chip] as f64 / CYCLE as f64;
        let epoch = EPOCH as f64;
        from + (epoch - (from + ahead).rem_euclid(epoch)).rem_euclid(epoch)
    }
}

/// Start times of a program, in cycles after the root sends the start message.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Start {
    /// Nominal start time: for each hop, the most epochs that it may take.
    pub cycles: u64,
    /// When the first chip starts.
    pub first: f64,
    /// When the last chip starts.
    pub last: f64,
}

/// Returns the index of the measured link that models a link.
pub(super) fn kind_of(link: LinkId) -> usize {
    link.0 as usize / 2 % MEASURED.len()
}

/// Returns a table of link latencies above the minimum, to be indexed by a uniform draw.
pub(super) fn table(latency: &Latency) -> Vec<u8> {
    // A truncated normal distribution; truncation changes neither mean nor deviation by more than the
    // last digit of the paper's table.
    let weight = |cycles: u32| {
        let away = (f64::from(cycles) - latency.mean) / latency.deviation;
        (-away * away / 2.0).exp()
    };
    let all: f64 = (latency.min..=latency.max).map(weight).sum();
    let mut below = 0.0;
    let mut table = vec![0; DRAWS];
    for cycles in latency.min..=latency.max {
        let first = (below / all * DRAWS as f64).round() as usize;
        below += weight(cycles);
        // The minimum and maximum were both observed, so each has at least one entry.
        let end = (below / all * DRAWS as f64).round() as usize;
        table[first..end].fill((cycles - latency.min) as u8);
    }
    table[0] = 0;
    table[DRAWS - 1] = (latency.max - latency.min) as u8;
    table
}

/// Draws `times` latencies from a table and returns their statistics.
fn measure(table: &[u8], least: u32, times: u32, random: &mut Random) -> Latency {
    let (mut min, mut max, mut sum, mut squares) = (u32::MAX, 0, 0_u64, 0_u64);
    for _ in 0..times {
        let took = least + u32::from(table[random.below(DRAWS as u64) as usize]);
        (min, max) = (min.min(took), max.max(took));
        sum += u64::from(took);
        squares += u64::from(took).pow(2);
    }
    let count = f64::from(times);
    let mean = sum as f64 / count;
    let deviation = (squares as f64 / count - mean * mean).max(0.0).sqrt();
    Latency { min, mean, max, deviation }
}

/// Repeats the measurement of the seven links of Table 2.
pub fn measurements(times: u32, seed: u64) -> [Latency; 7] {
    let mut random = Random::of(&[seed]);
    MEASURED.map(|latency| measure(&table(&latency), latency.min, times.max(1), &mut random))
}

/// Returns the breadth-first spanning tree as (chip, parent, link from the parent), parents first, and
/// its height.
fn tree(network: &Network, root: VertexId) -> (Vec<(usize, usize, LinkId)>, u32) {
    let mut depth = vec![None; network.vertices() as usize];
    depth[root.0 as usize] = Some(0);
    let (mut tree, mut height) = (Vec::new(), 0);
    let mut next = VecDeque::from([root]);
    while let Some(vertex) = next.pop_front() {
        let below = depth[vertex.0 as usize].map_or(0, |depth| depth + 1);
        for &link in network.out_of(vertex) {
            let to = network.link(link).target;
            if depth[to.0 as usize].is_none() {
                depth[to.0 as usize] = Some(below);
                height = below;
                tree.push((to.0 as usize, vertex.0 as usize, link));
                next.push_back(to);
            }
        }
    }
    (tree, height)
}
