//! Assignment of wavelengths to circuits by a sweep along the ring.

/// Number of urgency levels, by the number of intervals for which a demand has been waiting, in powers
/// of two.
pub(super) const URGENCIES: usize = 8;

/// A request or allocation of `count` wavelengths for a demand on `length` segments from `start` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arc {
    pub start: u32,
    pub length: u32,
    pub count: u32,
    pub demand: u32,
    pub pair: u32,
}

/// A half-open range of wavelengths.
pub(super) type WavelengthRange = (u32, u32);

/// Assigns wavelengths by a sweep along the ring from a cut.
#[derive(Clone, Debug)]
pub(super) struct Sweep {
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
    free: Vec<Vec<WavelengthRange>>,
    is_free: Vec<u64>,
    /// For each place, wavelengths that become free there, and up to where.
    ends: Vec<Vec<(WavelengthRange, u32)>>,
    /// Assigned arcs, unserved arcs, and the lit wavelengths of each segment.
    given: Vec<(Arc, WavelengthRange)>,
    missed: Vec<Arc>,
    lit: Palette,
}

/// Bit set of the lit wavelengths of each segment.
#[derive(Clone, Debug)]
pub(super) struct Palette {
    words: usize,
    count: u32,
    bits: Vec<u64>,
}

impl Palette {
    pub fn new(segments: u32, count: u32) -> Self {
        let words = (count as usize).div_ceil(64);
        Self { words, count, bits: vec![0; segments as usize * words] }
    }

    pub fn clear(&mut self) {
        self.bits.fill(0);
    }

    /// Marks wavelengths as lit on `length` segments from `start` on.
    fn light(&mut self, start: u32, length: u32, run: WavelengthRange) {
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
    pub fn new(devices: u32, count: u32) -> Self {
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

    pub fn begin(&mut self, cut: u32) {
        self.cut = cut;
    }

    pub fn clear(&mut self) {
        self.arcs.clear();
        self.asked.iter_mut().for_each(Vec::clear);
        self.offered.clear();
    }

    pub fn ask(&mut self, arc: Arc, urgency: usize) {
        self.asked[urgency].push(self.turned(arc));
    }

    pub fn offer(&mut self, arc: Arc) {
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

    /// Assigns wavelengths to admitted requests, and reports them to `assigned`.
    pub fn assign(&mut self, mut assigned: impl FnMut(&Arc, u32, u32)) {
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
        self.place_missed();
        for (arc, run) in &self.given {
            assigned(arc, run.0, run.1 - run.0);
        }
    }

    /// Serves missed arcs with wavelengths that arcs over the cut reserved but do not need there (first
    /// fit).
    fn place_missed(&mut self) {
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

    fn put(&mut self, run: WavelengthRange, until: u32) {
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
    fn take(&mut self, until: u32, most: u32) -> Option<(WavelengthRange, u32)> {
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
