//! Analytical cost model of collectives (latency and bandwidth in closed form), for searches over many
//! parallelism strategies.

use std::collections::BTreeMap;

use base::{Bytes, Nanos};
use ir::CollectiveKind;
use topology::{Interconnect, InterconnectKind};

use crate::network::{NetworkModel, Port};

/// Measured all-reduce times of a number of devices: bytes and seconds, in ascending order of bytes.
pub type ReduceTimes = Vec<(f64, f64)>;

/// Closed forms of collectives on an interconnect, with measurements where there are any.
#[derive(Clone, PartialEq, Debug)]
pub struct ClosedForm {
    /// The interconnect of the devices.
    pub interconnect: Interconnect,
    /// Measured all-reduces inside a server, by number of devices.
    pub measured: BTreeMap<u32, ReduceTimes>,
}

impl NetworkModel for ClosedForm {
    fn devices(&self) -> u32 {
        self.interconnect.devices
    }

    fn port(&self) -> Port {
        self.interconnect.port()
    }

    fn transfer_time(&self, source: u32, target: u32, size: Bytes) -> Nanos {
        self.interconnect.transfer_time(source, target, size)
    }

    /// In closed form among devices at equal distances; else around a ring of their transfers.
    fn collective_time(&self, kind: &CollectiveKind, devices: &[u32], size: Bytes) -> Nanos {
        let (links, count) = (Reached { links: self, part: 1.0 }, devices.len() as u32);
        let bytes = size.0 as f64;
        let seconds = match (kind, stride(devices)) {
            (CollectiveKind::AllReduce, Some(1)) => links.reduce_s(count, bytes),
            (CollectiveKind::AllReduce, Some(stride)) => links.apart_s(stride, count, bytes),
            (CollectiveKind::AllToAll { .. }, Some(stride)) => {
                links.exchange_s(stride, count, bytes / f64::from(count))
            }
            _ => return self.interconnect.collective_time(kind, devices, size),
        };
        Nanos((1e9 * seconds).round() as u64)
    }
}

/// The distance between neighbours, if it is the same between all of them.
fn stride(devices: &[u32]) -> Option<u32> {
    let stride = devices.get(1)?.checked_sub(devices[0]).filter(|&stride| stride > 0)?;
    devices.windows(2).all(|pair| pair[1].wrapping_sub(pair[0]) == stride).then_some(stride)
}

/// Closed forms whose rates between servers are reached in part.
#[derive(Clone, Copy, Debug)]
pub struct Reached<'a> {
    /// The closed forms.
    pub links: &'a ClosedForm,
    /// Fraction of the rate between servers that is reached.
    pub part: f64,
}

impl Reached<'_> {
    /// Devices per server.
    fn per_server(&self) -> u32 {
        match self.links.interconnect.kind {
            InterconnectKind::Cluster { per_server, .. } => per_server,
            _ => u32::MAX,
        }
    }

    /// Bytes per second from each of `count` devices at distance `stride` to the next, when all send.
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

    /// Seconds of a hierarchical all-reduce of `bytes` bytes among `count` adjacent devices.
    pub fn reduce_s(&self, count: u32, bytes: f64) -> f64 {
        let inside = count.min(self.per_server());
        let servers = f64::from(count / inside);
        let among = match self.links.measured.get(&inside) {
            _ if inside < 2 => 0.0,
            Some(times) => interpolated(times, bytes),
            None => self.ring_s(1, inside, bytes),
        };
        // Between servers each device reduces its shard of the sum.
        among
            + if servers > 1.0 {
                self.ring_s(inside, count / inside, bytes / f64::from(inside))
            } else {
                0.0
            }
    }

    /// Seconds of a ring all-reduce.
    fn ring_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        let others = f64::from(count) - 1.0;
        2.0 * others * (bytes / f64::from(count) / self.rate(stride, count) + self.latency_s())
    }

    /// Seconds of an all-reduce of `bytes` bytes among `count` devices at distance `stride`.
    pub fn apart_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        if count == 1 {
            return 0.0;
        }
        match self.links.measured.get(&count) {
            Some(times) if count * stride <= self.per_server() => interpolated(times, bytes),
            _ => self.ring_s(stride, count, bytes),
        }
    }

    /// Seconds in which each of `count` devices sends `bytes` bytes to the next, at distance `stride`.
    pub fn pass_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        bytes / self.rate(stride, count) + self.latency_s()
    }

    /// Seconds of an all-to-all among `count` devices at distance `stride`, each sending `bytes` bytes
    /// in all.
    pub fn exchange_s(&self, stride: u32, count: u32, bytes: f64) -> f64 {
        if count == 1 {
            return 0.0;
        }
        let others = f64::from(count - 1) / f64::from(count);
        bytes * others / self.rate(stride, count) + self.latency_s()
    }
}

/// Interpolates measured times linearly; above the last size in proportion, below the first half of its
/// time plus the other half in proportion.
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
