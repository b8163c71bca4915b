//! What groups of devices take to tell each other something, by closed forms: for searches that look
//! at many cuts.

use std::collections::BTreeMap;

use fabric::{Interconnect, InterconnectKind};

/// What all-reduces of so many devices were measured to take: bytes and seconds, by size.
pub type ReduceTimes = Vec<(f64, f64)>;

/// An interconnect, and what is known of it besides.
#[derive(Clone, PartialEq, Debug)]
pub struct Links {
    /// What joins devices.
    pub interconnect: Interconnect,
    /// Of groups inside a server, by how many devices they have.
    pub measured: BTreeMap<u32, ReduceTimes>,
}

/// The same, as far as rates between servers are reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reached<'a> {
    pub links: &'a Links,
    /// The part that is.
    pub part: f64,
}

impl Reached<'_> {
    /// Devices that are joined best.
    fn per_server(&self) -> u32 {
        match self.links.interconnect.kind {
            InterconnectKind::Cluster { per_server, .. } => per_server,
            _ => u32::MAX,
        }
    }

    /// Bytes a second to the next of `count` devices that are so far apart, when all do so.
    fn rate(&self, stride: u32, count: u32) -> f64 {
        let rate = self.links.interconnect.ring_rate(stride, count).0 / 8.0;
        if u64::from(stride) * u64::from(count) > u64::from(self.per_server()) {
            rate * self.part
        } else {
            rate
        }
    }

    fn latency_s(&self) -> f64 {
        self.links.interconnect.latency.0 as f64 / 1e9
    }

    /// Seconds in which so many neighbours add up so many bytes each.
    pub fn reduce_s(&self, count: u32, bytes: f64) -> f64 {
        let inside = count.min(self.per_server());
        let servers = f64::from(count / inside);
        let among = match self.links.measured.get(&inside) {
            _ if inside < 2 => 0.0,
            Some(times) => interpolated(times, bytes),
            None => self.ring_s(1, inside, bytes),
        };
        // Between servers each device adds up what it has of the sum.
        among
            + if servers > 1.0 {
                self.ring_s(inside, count / inside, bytes / f64::from(inside))
            } else {
                0.0
            }
    }

    /// Seconds of an all-reduce around a ring.
    fn ring_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        let others = f64::from(count) - 1.0;
        2.0 * others * (bytes / f64::from(count) / self.rate(stride, count) + self.latency_s())
    }

    /// Seconds in which so many devices that are so far apart add up so many bytes each.
    pub fn apart_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        if count == 1 {
            return 0.0;
        }
        match self.links.measured.get(&count) {
            Some(times) if count * stride <= self.per_server() => interpolated(times, bytes),
            _ => self.ring_s(stride, count, bytes),
        }
    }

    /// Seconds in which each of so many devices passes so many bytes on to the next, so far on.
    pub fn pass_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        bytes / self.rate(stride, count) + self.latency_s()
    }

    /// Seconds in which so many devices, so far apart, send so many bytes each, as much to each other.
    pub fn exchange_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        if count == 1 {
            return 0.0;
        }
        let others = f64::from(count - 1) / f64::from(count);
        bytes * others / self.rate(stride, count) + self.latency_s()
    }
}

/// Seconds for a size, between those that were measured; beyond the last in proportion, below the first
/// half of it and what is left in proportion.
fn interpolated(times: &[(f64, f64)], bytes: f64) -> f64 {
    let (first, last) = (times[0], times[times.len() - 1]);
    if bytes <= first.0 {
        return first.1 * (0.5 + 0.5 * bytes / first.0);
    }
    if bytes >= last.0 {
        return last.1 * bytes / last.0;
    }
    let above = times.partition_point(|time| time.0 < bytes);
    let ((one, from), (other, to)) = (times[above - 1], times[above]);
    from + (to - from) * (bytes - one) / (other - one)
}
