//! Routes every piece of a transfer on the path with the earliest finish time.
//!
//! Transfers are divided into pieces, and take turns: the first piece of each, then the second. Each
//! piece avoids existing link bookings. So transfers with a common end share idle links around it,
//! which paths chosen per transfer do not find; the cost is one search per piece.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::{LinkId, Ticks, VertexId};
use topology::Network;

use crate::bookings::Bookings;
use crate::paths::{Path, traced};
use crate::schedule::Timing;

/// Maximum number of pieces of a transfer.
pub(crate) const PIECES: u64 = 16;
/// Limit of the effort of all searches, in links examined.
const EFFORT_MAX: usize = 2_000_000;

/// Returns whether routing this many transfers piece by piece is affordable.
pub(crate) fn is_affordable(network: &Network, transfers: usize) -> bool {
    transfers * PIECES as usize * network.links().len() <= EFFORT_MAX
}

/// Returns the path on which `count` vectors arrive earliest, given current bookings. O(links · log
/// links).
///
/// A Dijkstra-like search that keeps one path per vertex, chosen by when the last vector could be
/// forwarded; so it is heuristic, since another path may be better further on.
pub(crate) fn path(
    network: &Network,
    timing: &Timing,
    taken: &Bookings,
    (source, target): (VertexId, VertexId),
    (begin, count): (Ticks, u64),
) -> Option<Path> {
    let mut came: Vec<Option<LinkId>> = vec![None; network.vertices() as usize];
    let mut best = vec![Ticks(u64::MAX); network.vertices() as usize];
    best[source.0 as usize] = begin;
    // When the last vector may depart, when the first may, and the vertex.
    let mut open = BinaryHeap::from([Reverse((begin, begin, source))]);
    while let Some(Reverse((last, first, vertex))) = open.pop() {
        if vertex == target {
            break;
        }
        if last > best[vertex.0 as usize] {
            continue;
        }
        for &id in network.out_of(vertex) {
            let link = network.link(id);
            let length = count * timing.slot(link).0;
            let start = taken.free(id.0 as usize, first, length);
            let hop = timing.hop(link);
            let all = last.max(start + Ticks(length)) + hop;
            let known = &mut best[link.target.0 as usize];
            if all < *known {
                *known = all;
                came[link.target.0 as usize] = Some(id);
                open.push(Reverse((all, start + hop, link.target)));
            }
        }
    }
    traced(network, source, target, &came)
}
