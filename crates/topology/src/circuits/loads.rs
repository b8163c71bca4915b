//! Loads of the segments of a ring in one direction.

/// Exponent of a segment's relative load in its weight (congestion cost).
const POWER: i32 = 16;

/// Loads of segments: segment `n` joins device `n` and the next.
#[derive(Clone, Debug)]
pub(super) struct Loads {
    devices: u32,
    loads: Vec<f64>,
    /// Prefix sums of the segments' weights (marginal costs).
    weights: Vec<f32>,
    /// Sparse table of range maxima: for each power of two, the maximum over that many segments from
    /// each one on.
    most: Vec<Vec<f32>>,
}

impl Loads {
    pub fn new(devices: u32) -> Self {
        let levels = (u32::BITS - devices.leading_zeros()) as usize;
        Self {
            devices,
            loads: vec![0.0; devices as usize + 1],
            weights: vec![0.0; devices as usize + 1],
            most: vec![vec![0.0; devices as usize]; levels],
        }
    }

    pub fn clear(&mut self) {
        self.loads.fill(0.0);
    }

    pub fn add(&mut self, start: u32, length: u32, size: f64) {
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
    pub fn sum(&mut self) -> f32 {
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
    pub fn weigh(&mut self, top: f32) {
        let mut total = 0.0;
        for (weight, load) in self.weights[1..].iter_mut().zip(&self.most[0]) {
            total += (load / top).powi(POWER);
            *weight = total;
        }
    }

    /// Returns the largest load of a segment on a path.
    pub fn most(&self, start: u32, length: u32) -> f64 {
        let level = (u32::BITS - 1 - length.leading_zeros()) as usize;
        let last = (start + length - (1 << level)) % self.devices;
        let row = &self.most[level];
        f64::from(row[start as usize].max(row[last as usize]))
    }

    /// Returns the marginal cost of a path.
    pub fn weight(&self, start: u32, length: u32) -> f32 {
        let (start, end, devices) =
            (start as usize, (start + length) as usize, self.devices as usize);
        if end <= devices {
            self.weights[end] - self.weights[start]
        } else {
            self.weights[devices] - self.weights[start] + self.weights[end - devices]
        }
    }
}
