//! Ways from one vertex to another that share no link.

use std::collections::VecDeque;

use base::{LinkId, VertexId};
use fabric::Network;
use smallvec::SmallVec;

/// Links in order.
pub(crate) type Path = SmallVec<[LinkId; 3]>;

/// Ways that share no link, the shortest first, of at most `detour` hops more than the first.
///
/// Each is the shortest that is left. That may be fewer than there could be: a maximum flow would
/// find all. O(ways · (vertices + links)).
pub(crate) fn disjoint(
    network: &Network,
    source: VertexId,
    target: VertexId,
    detour: usize,
) -> Vec<Path> {
    let mut used = vec![false; network.links().len()];
    let mut paths: Vec<Path> = Vec::new();
    while let Some(path) = shortest(network, source, target, &used) {
        if paths.first().is_some_and(|first| path.len() > first.len() + detour) {
            break;
        }
        for link in &path {
            used[link.0 as usize] = true;
        }
        paths.push(path);
    }
    paths
}

/// The shortest way over links that are not used; of several, over the links of least number.
fn shortest(network: &Network, source: VertexId, target: VertexId, used: &[bool]) -> Option<Path> {
    let mut came: Vec<Option<LinkId>> = vec![None; network.vertices() as usize];
    let mut next = VecDeque::from([source]);
    while let Some(vertex) = next.pop_front() {
        if vertex == target {
            break;
        }
        for &link in network.out_of(vertex) {
            let to = network.link(link).target;
            if !used[link.0 as usize] && to != source && came[to.0 as usize].is_none() {
                came[to.0 as usize] = Some(link);
                next.push_back(to);
            }
        }
    }
    traced(network, source, target, &came)
}

/// The way to a vertex, if it was come to, by the link on which each was.
pub(crate) fn traced(
    network: &Network,
    source: VertexId,
    target: VertexId,
    came: &[Option<LinkId>],
) -> Option<Path> {
    let mut path = Path::new();
    let mut at = target;
    while at != source {
        let link = came[at.0 as usize]?;
        path.push(link);
        at = network.link(link).source;
    }
    path.reverse();
    Some(path)
}
