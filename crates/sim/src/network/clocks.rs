//! Clocks that drift, and what holds them together: counters that neighbours exchange.
//!
//! Every chip counts cycles of a clock of its own. Its hardware-aligned counter (HAC) is that count
//! with corrections: each chip but the root hears its parent's counter every 256 cycles over a link
//! whose latency jitters, and steps towards what it hears plus the latency that was measured before.
//! A program starts everywhere when counters of aligned chips overflow, one epoch a hop later than at
//! the root, and from then on counts the chip's own cycles, in the software-aligned counter (SAC).
//! RUNTIME_DESKEW waits a little longer or shorter, by the difference of the two.
//!
//! Source: the multi-TSP system §3. Differs from the paper: it leaves open how fast a counter is
//! corrected; here the mean of some exchanges moves it by a cycle at most.

use std::collections::VecDeque;

use base::{LinkId, Random, VertexId};
use fabric::Network;
use thiserror::Error;

/// Cycles until a counter overflows: 8 bits, of which four values are taken.
pub const EPOCH: u64 = 252;
/// Bits behind the binary point of counts of cycles.
const FRACTION: u32 = 32;
const CYCLE: i64 = 1 << FRACTION;
const HALF: i64 = EPOCH as i64 / 2;
/// Draws that the table of a link's latencies tells apart.
const DRAWS: usize = 1 << 16;

/// How long a link takes, in cycles, from one time to the next; or was measured to take.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Latency {
    /// Never less.
    pub min: u32,
    /// On the average.
    pub mean: f64,
    /// Never more.
    pub max: u32,
    /// Standard deviation.
    pub deviation: f64,
}

/// The seven links that were measured, 100,000 times each.
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

/// What clocks are like.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ClockModel {
    /// How far clocks are off at most, in parts of a million.
    pub drift_ppm: f64,
    /// Cycles between exchanges of a counter.
    pub exchange: u64,
    /// Exchanges whose mean decides about a correction.
    pub average: u32,
    /// Exchanges that measure a link's latency.
    pub measurements: u32,
    /// Which clocks, and which jitter.
    pub seed: u64,
}

impl Default for ClockModel {
    /// Assumed: 100 ppm, as crystals of this kind are sold; the mean of 16 exchanges.
    fn default() -> Self {
        Self { drift_ppm: 100.0, exchange: 256, average: 16, measurements: 100_000, seed: 0 }
    }
}

/// Clocks that cannot be aligned.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ClockError {
    /// Too fast for what corrects them.
    #[error(
        "clocks that are off by {drift_ppm} ppm drift faster than one cycle in {correction}; \
         exchange counters more often, or average fewer of them"
    )]
    Drift {
        /// How far they are off.
        drift_ppm: f64,
        /// Cycles between corrections.
        correction: u64,
    },
    /// Nothing to hear.
    #[error("{what} is 0; expected at least 1")]
    Zero {
        /// What.
        what: &'static str,
    },
}

/// How a chip hears the chip before it on the tree.
struct Child {
    chip: usize,
    parent: usize,
    /// Which of the measured links its link is like.
    kind: usize,
    /// What the link is held to take.
    latency: i64,
    sum: i64,
}

/// The clocks of all chips of a network, from when they are switched on.
pub struct Clocks {
    model: ClockModel,
    /// In the order of the tree, parents first.
    children: Vec<Child>,
    height: u32,
    /// What each counter gains in an exchange, in fractions of a cycle.
    drift: Vec<i64>,
    /// What each counter is ahead of the true time.
    ahead: Vec<i64>,
    tables: Vec<Vec<u8>>,
    random: Random,
    exchanges: u64,
}

impl Clocks {
    /// Measures all links of the tree, with clocks that are anywhere.
    ///
    /// # Errors
    /// Corrections are slower than clocks may drift.
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
        // The parent may be off the other way.
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

    /// Lets time go on for so many cycles.
    ///
    /// # Arguments
    /// - `look`: is shown the clocks after each correction; `false` stops them.
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

    /// Every chip hears its parent once.
    fn exchange(&mut self) {
        for (ahead, drift) in self.ahead.iter_mut().zip(&self.drift) {
            *ahead += drift;
        }
        let mut draws = 0;
        for (number, child) in self.children.iter_mut().enumerate() {
            // A random number is good for four draws.
            draws = if number % 4 == 0 { self.random.word() } else { draws >> 16 };
            let took = i64::from(MEASURED[child.kind].min)
                + i64::from(self.tables[child.kind][draws as usize % DRAWS]);
            // Counters are whole cycles; what is heard left the parent so long ago.
            let heard = (self.ahead[child.parent] >> FRACTION) - took;
            let own = self.ahead[child.chip] >> FRACTION;
            let latency = child.latency >> FRACTION;
            let mut apart = heard + latency - own;
            // Counters overflow: of what they may be apart, the least is meant.
            if !(-HALF..HALF).contains(&apart) {
                apart = (apart + HALF).rem_euclid(2 * HALF) - HALF;
            }
            let rest = child.latency & (CYCLE - 1);
            child.sum += (apart << FRACTION) + rest;
        }
        self.exchanges += 1;
    }

    /// Every chip steps towards the mean of what it heard.
    fn correct(&mut self) {
        let half = i64::from(self.model.average) * CYCLE / 2;
        for child in &mut self.children {
            let step = i64::from(child.sum > half) - i64::from(child.sum < -half);
            self.ahead[child.chip] += step * CYCLE;
            child.sum = 0;
        }
    }

    /// True time, in cycles of a clock that is right.
    pub fn now(&self) -> u64 {
        self.exchanges * self.model.exchange
    }

    /// How many hops the tree has.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// What a chip's clock gains in a cycle.
    pub fn drift(&self, chip: VertexId) -> f64 {
        self.drift[chip.0 as usize] as f64 / CYCLE as f64 / self.model.exchange as f64
    }

    /// What a chip's counter is ahead of the root's, in cycles; of what it may be, the least.
    pub fn ahead(&self, chip: VertexId) -> f64 {
        let root = self.children.first().map_or(0, |first| first.parent);
        self.apart(chip.0 as usize, root)
    }

    /// The most that any counter is away from the root's, in cycles.
    pub fn spread(&self) -> f64 {
        let root = self.children.first().map_or(0, |first| first.parent);
        self.children.iter().map(|child| self.apart(child.chip, root).abs()).fold(0.0, f64::max)
    }

    /// The most that any counter is away from its parent's, in cycles.
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
    /// The root waits for its counter to overflow (DESKEW) and tells its children (TRANSMIT). A chip
    /// looks for that when its own counter overflows, and tells its children then. Each chip knows how
    /// many hops are still to go below it, and waits that long before it starts (NOTIFY): for each hop
    /// as many epochs as the slowest link takes, and one.
    ///
    /// Source: the multi-TSP system §3.2, where the overhead's unit is an epoch and not a cycle.
    pub fn start(&mut self) -> Start {
        let chips = self.ahead.len();
        let longest = self.children.iter().map(|child| MEASURED[child.kind].max).max().unwrap_or(0);
        let hop = u64::from(longest) / EPOCH + 1;
        let root = self.children.first().map_or(0, |first| first.parent);
        let begin = self.overflow(root, 0.0);
        // When each chip knows, and how many hops that took.
        let mut known = vec![(begin, 0); chips];
        for child in &self.children {
            let (told, hops) = known[child.parent];
            let draw = self.random.below(DRAWS as u64) as usize;
            let took = MEASURED[child.kind].min + u32::from(self.tables[child.kind][draw]);
            // A vector is taken up to an epoch after it has come.
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

    /// When a chip's counter overflows next, from a time on.
    fn overflow(&self, chip: usize, from: f64) -> f64 {
        let ahead = self.ahead[chip] as f64 / CYCLE as f64;
        let epoch = EPOCH as f64;
        from + (epoch - (from + ahead).rem_euclid(epoch)).rem_euclid(epoch)
    }
}

/// When a program starts, in cycles after the root's first word of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Start {
    /// When it should: as many epochs for each hop as it may take.
    pub cycles: u64,
    /// When the first chip does.
    pub first: f64,
    /// When the last chip does.
    pub last: f64,
}

/// The measured link that a link is like.
pub(super) fn kind_of(link: LinkId) -> usize {
    link.0 as usize / 2 % MEASURED.len()
}

/// The latency of a link at some time, above its least one, by what is drawn.
pub(super) fn table(latency: &Latency) -> Vec<u8> {
    // As if normally distributed, cut off at both ends; the cut changes neither mean nor deviation
    // by more than the table's last digit.
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
        // Both ends were seen, so both are there at least once.
        let end = (below / all * DRAWS as f64).round() as usize;
        table[first..end].fill((cycles - latency.min) as u8);
    }
    table[0] = 0;
    table[DRAWS - 1] = (latency.max - latency.min) as u8;
    table
}

/// Sends a counter there and back so often.
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

/// Measures the seven links of Table 2 anew.
pub fn measurements(times: u32, seed: u64) -> [Latency; 7] {
    let mut random = Random::of(&[seed]);
    MEASURED.map(|latency| measure(&table(&latency), latency.min, times.max(1), &mut random))
}

/// Chips with their parents and the links from those, parents first, and how many hops it has.
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
