//! Gives every piece of a transfer the way on which it comes earliest.
//!
//! Transfers are cut into pieces, and take turns: the first piece of each, then the second. Each
//! piece looks at what links are taken by now, and goes around. So transfers that have an end in
//! common share what is idle beside it, which ways that are chosen for each alone do not find; in
//! turn every piece costs a search.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::{LinkId, Ticks, VertexId};
use fabric::Network;

use crate::bookings::Bookings;
use crate::paths::{Path, traced};
use crate::schedule::Timing;

/// Pieces of a transfer.
pub(crate) const PIECES: u64 = 16;
/// What all searches together may take, in links that they look at.
const EFFORT_MAX: usize = 2_000_000;

/// Can so many searches be afforded?
pub(crate) fn is_affordable(network: &Network, transfers: usize) -> bool {
    transfers * PIECES as usize * network.links().len() <= EFFORT_MAX
}

/// The way on which so many vectors come earliest, as links are taken now. O(links · log links).
///
/// A search that knows of each vertex only one way to it: when the last vector could leave again
/// decides, though another way may be better further on.
pub(crate) fn way(
    network: &Network,
    timing: &Timing,
    taken: &Bookings,
    (source, target): (VertexId, VertexId),
    (begin, count): (Ticks, u64),
) -> Option<Path> {
    let mut came: Vec<Option<LinkId>> = vec![None; network.vertices() as usize];
    let mut best = vec![Ticks(u64::MAX); network.vertices() as usize];
    best[source.0 as usize] = begin;
    // When the last vector may leave, when the first may, and where.
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
