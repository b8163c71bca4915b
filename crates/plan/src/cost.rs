//! What motifs take on channels.
//!
//! A round of a motif takes what it takes to begin, and what its busiest rank sends or receives. Where
//! several send to one rank at a time, it receives less than its channel moves. Sums are made while
//! more is coming, and take what they take if that is longer. Channels that share something take
//! longer while others carry a motif too.
//!
//! Source: SYNDICATE §4.3, §6.6. Differs from the paper: it measures every option on its testbed; here
//! four terms a channel, and one for each pair, are fitted to such measurements.

use base::{BitsPerSecond, Nanos};

use crate::motif::Motif;
use ir::Collective;

/// One independent path of every rank onto a network.
#[derive(Clone, PartialEq, Debug)]
pub struct ChannelCost {
    /// What each rank sends and receives on it, both at a time.
    pub rate: BitsPerSecond,
    /// From the beginning of a round to its first byte, and from its last to the next round.
    pub latency: Nanos,
    /// What a rank sums.
    pub sums: BitsPerSecond,
    /// How much longer receiving takes for each sender beyond the first, as a part.
    pub incast: f64,
    /// How much longer motifs take while the channel of that number carries one too, as a part; of
    /// channels that are not there nothing.
    pub overlap: Vec<f64>,
}

impl ChannelCost {
    /// What a motif takes on it, alone.
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
                // Each copies what it has first, so that nobody waits until others have read it.
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
