//! Measured channels.
//!
//! Source: SYNDICATE §6.6. Differs from the paper: it measures every option on its testbed; here four
//! terms per channel, and one for each pair, are fitted to such measurements.

use std::collections::BTreeMap;

use base::{BitsPerSecond, Bytes, Nanos};

use crate::network::{NetworkModel, Port};

/// One independent channel of every rank or device onto a network.
///
/// ```
/// use base::{BitsPerSecond, Bytes, Nanos};
/// use cost::{ChannelCost, NetworkModel};
/// let channel = ChannelCost::of(BitsPerSecond(8e9), Nanos(500));
/// assert_eq!(channel.transfer_time(0, 1, Bytes(1_000)), Nanos(1_500));
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct ChannelCost {
    /// Rate at which each rank sends and receives on it, full duplex.
    pub rate: BitsPerSecond,
    /// Latency of a round: to its first byte, and from its last to the next round.
    pub latency: Nanos,
    /// Rate at which a rank sums.
    pub sums: BitsPerSecond,
    /// Incast: added receive time for each concurrent sender beyond the first, as a fraction.
    pub incast: f64,
    /// Contention: by channel index, added time of motifs while that channel is busy too, as a
    /// fraction; zero for channels beyond the end.
    pub overlap: Vec<f64>,
}

impl ChannelCost {
    /// Rate at which a device sums whose memory keeps up with its links.
    const SUMS: BitsPerSecond = BitsPerSecond(1e15);

    /// A channel of which only rate and latency are known.
    pub fn of(rate: BitsPerSecond, latency: Nanos) -> Self {
        Self { rate, latency, sums: Self::SUMS, incast: 0.0, overlap: Vec::new() }
    }
}

impl NetworkModel for ChannelCost {
    /// As many as there may be: every device has the channel.
    fn devices(&self) -> u32 {
        u32::MAX
    }

    fn port(&self) -> Port {
        Port { rate: self.rate, latency: self.latency }
    }

    /// Also for incast.
    fn round_time(&self, transfers: &[(u32, u32, Bytes)]) -> Nanos {
        let mut ports: BTreeMap<(u32, bool), (u64, u32)> = BTreeMap::new();
        for &(source, target, size) in transfers.iter().filter(|one| one.0 != one.1) {
            for end in [(source, false), (target, true)] {
                let (bytes, messages) = ports.entry(end).or_default();
                *bytes += size.0;
                *messages += 1;
            }
        }
        let time = |(&(_, receives), &(bytes, messages)): (&(u32, bool), &(u64, u32))| {
            let beyond = if receives { f64::from(messages - 1) } else { 0.0 };
            let bytes = bytes as f64 * (1.0 + self.incast * beyond);
            Port { latency: Nanos(0), ..self.port() }.time(Bytes(bytes as u64))
        };
        self.farthest(transfers) + ports.iter().map(time).max().unwrap_or_default()
    }

    fn transfer_time(&self, source: u32, target: u32, size: Bytes) -> Nanos {
        if source == target { Nanos(0) } else { self.port().time(size) }
    }
}
