//! Sizes and times as distinct types, which cannot be added to one another.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};

use serde::{Deserialize, Serialize};

/// A size in bytes.
///
/// ```
/// use base::Bytes;
/// assert_eq!((Bytes(1 << 20) + Bytes(512)).to_string(), "1.0 MiB");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Bytes(pub u64);

/// A point in time or a span, in nanoseconds since the controller started.
///
/// ```
/// use base::Nanos;
/// assert_eq!(Nanos::from_millis(3).0, 3_000_000);
/// ```
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct Nanos(pub u64);

impl Nanos {
    /// A span of whole milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis * 1_000_000)
    }

    /// The span since `earlier`, or zero if `earlier` lies ahead.
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }

    /// Parses a duration such as `50us`, in ns, us, ms or s; rounds to whole nanoseconds.
    ///
    /// ```
    /// use base::Nanos;
    /// assert_eq!(Nanos::parse("1.5us"), Some(Nanos(1500)));
    /// assert_eq!(Nanos::parse("often"), None);
    /// ```
    pub fn parse(text: &str) -> Option<Nanos> {
        let (number, unit) = split_number(text)?;
        let unit = match unit {
            "ns" => 1.0,
            "us" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            _ => return None,
        };
        Some(Nanos((number * unit).round() as u64))
    }

    /// A span that is `factor` times as long.
    pub fn times(self, factor: f64) -> Nanos {
        Nanos((self.0 as f64 * factor) as u64)
    }
}

/// A point in time or a span in thousandths of a cycle. Schedules are exact in this unit: the transfer
/// time of a vector on a link is not a whole number of cycles.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Ticks(pub u64);

/// The bandwidth of a link or a memory.
///
/// ```
/// use base::BitsPerSecond;
/// assert_eq!(BitsPerSecond(100e9).gigabytes(), 12.5);
/// ```
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct BitsPerSecond(pub f64);

impl BitsPerSecond {
    /// Parses a rate such as `10Gbit/s`, with the prefix K, M, G, T or none.
    ///
    /// ```
    /// use base::BitsPerSecond;
    /// assert_eq!(BitsPerSecond::parse("8Tbit/s"), Some(BitsPerSecond(8e12)));
    /// assert_eq!(BitsPerSecond::parse("fast"), None);
    /// ```
    pub fn parse(text: &str) -> Option<BitsPerSecond> {
        let (number, unit) = split_number(text)?;
        let prefix = match unit.strip_prefix(' ').unwrap_or(unit).strip_suffix("bit/s")? {
            "" => 1.0,
            "K" => 1e3,
            "M" => 1e6,
            "G" => 1e9,
            "T" => 1e12,
            _ => return None,
        };
        Some(BitsPerSecond(number * prefix))
    }

    /// Returns the bandwidth in 10⁹ bytes per second.
    pub const fn gigabytes(self) -> f64 {
        self.0 / 8e9
    }
}

/// Splits a text into a plain decimal number and what follows it.
fn split_number(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|one: char| !one.is_ascii_digit() && one != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    let is_plain = number.len() <= 24
        && number.split('.').count() <= 2
        && number.split('.').all(|digits| !digits.is_empty());
    Some((number.parse().ok().filter(|_| is_plain)?, rest))
}

macro_rules! arithmetic {
    ($name:ident) => {
        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name(self.0 + other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                self.0 += other.0;
            }
        }
        impl Sub for $name {
            type Output = $name;
            fn sub(self, other: $name) -> $name {
                $name(self.0 - other.0)
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = $name>>(values: I) -> $name {
                $name(values.map(|value| value.0).sum())
            }
        }
    };
}
arithmetic!(Bytes);
arithmetic!(Nanos);
arithmetic!(Ticks);

impl fmt::Display for Ticks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["B", "KiB", "MiB", "GiB"] {
            if value < 1024.0 {
                return match unit {
                    "B" => write!(f, "{value} {unit}"),
                    _ => write!(f, "{value:.1} {unit}"),
                };
            }
            value /= 1024.0;
        }
        write!(f, "{value:.1} TiB")
    }
}
