//! Deterministic pseudo-random numbers, seeded by a few words: SplitMix64 (Steele, Lea, Flood 2014).

use smallvec::SmallVec;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the stream that these words seed.
    pub fn of(words: &[u64]) -> Self {
        let mut random = Self(0x9E37_79B9_7F4A_7C15);
        for word in words {
            random.0 ^= *word;
            random.0 = random.word();
        }
        random
    }

    /// Returns 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in `0.0..1.0`.
    pub fn fraction(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number in `0..count`; the relative bias is below `count` / 2⁶⁴.
    pub fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(count)) >> 64) as u64
    }

    /// Draws `count` distinct numbers in `0..below`, in the order in which they were drawn; all of them
    /// if there are fewer.
    pub fn distinct(&mut self, count: u32, below: u32) -> SmallVec<[u32; 2]> {
        let mut drawn = SmallVec::new();
        while drawn.len() < count.min(below) as usize {
            let number = self.below(below.into()) as u32;
            if !drawn.contains(&number) {
                drawn.push(number);
            }
        }
        drawn
    }
}
