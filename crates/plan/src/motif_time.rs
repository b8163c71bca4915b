//! Predicted times of motifs on channels.
//!
//! A round of a motif takes a latency, plus what its busiest rank takes to send or receive. Several
//! concurrent senders to one rank lower its receive rate (incast). Summation overlaps with receiving,
//! and counts where it takes longer.
//!
//! Source: SYNDICATE §4.3, §6.6.

use base::Nanos;
use cost::ChannelCost;
use ir::Collective;

use crate::motif::Motif;

/// Predicted time of a motif on a channel, alone. `element` is the size of an element in bytes.
pub(crate) fn motif_time(
    channel: &ChannelCost,
    collective: &Collective,
    motif: &Motif,
    element: u32,
) -> Nanos {
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
            total += kept as f64 * 8e9 / channel.sums.0;
        }
        let busiest = (0..ranks).map(|rank| {
            let beyond = f64::from(senders[rank].saturating_sub(1));
            let receives = received[rank] as f64 * (1.0 + channel.incast * beyond);
            let moves = (sent[rank] as f64).max(receives) * 8e9 / channel.rate.0;
            moves.max(summed[rank] as f64 * 8e9 / channel.sums.0)
        });
        total += channel.latency.0 as f64 + busiest.fold(0.0, f64::max);
    }
    Nanos(total.round() as u64)
}
