//! Cost model of motifs on channels.
//!
//! A round of a motif takes a latency, plus what its busiest rank takes to send or receive. Several
//! concurrent senders to one rank lower its receive rate (incast). Summation overlaps with receiving,
//! and counts where it takes longer. Channels that share a resource slow each other down while both are
//! busy.
//!
//! Source: SYNDICATE §4.3, §6.6. Differs from the paper: it measures every option on its testbed; here
//! four terms per channel, and one for each pair, are fitted to such measurements.

use base::{BitsPerSecond, Nanos};

use crate::motif::Motif;
use ir::Collective;

/// One independent channel of every rank onto a network.
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
    /// Predicted time of a motif on it, alone. `element` is the size of an element in bytes.
    pub fn time(&self, collective: &Collective, motif: &Motif, element: u32) -> Nanos {
        let ranks = collective.ranks() as usize;
        let (mut sent, mut received) = (vec![0_u64; ranks], vec![0_u64; ranks]);
        let (mut summed, mut senders) = (vec![0_u64; ranks], vec![0_u32; ranks]);
        let mut total = 0.0;
        for round in motif.rounds(collective) {
            for rank in 0..ranks {
                (sent[rank], received[rank], summed[rank], senders[rank]) = (0, 0, 0, 0);
            }
            for transfer in &round {
                let size = transfer.count * u64::from(element);
                let target = transfer.target as usize;
                sent[transfer.source as usize] += size;
                received[target] += size;
                senders[target] += 1;
                summed[target] += if transfer.sums { size } else { 0 };
            }
            if motif.keeps_aside() {
                // Each rank first copies what it sends, so that it can sum before others have read it.
                let kept = round.first().map_or(0, |transfer| transfer.count * u64::from(element));
                total += kept as f64 * 8e9 / self.sums.0;
            }
            let busiest = (0..ranks).map(|rank| {
                let beyond = f64::from(senders[rank].saturating_sub(1));
                let receives = received[rank] as f64 * (1.0 + self.incast * beyond);
                let moves = (sent[rank] as f64).max(receives) * 8e9 / self.rate.0;
                moves.max(summed[rank] as f64 * 8e9 / self.sums.0)
            });
            total += self.latency.0 as f64 + busiest.fold(0.0, f64::max);
        }
        Nanos(total.round() as u64)
    }
}
