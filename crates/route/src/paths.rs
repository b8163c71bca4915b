//! Link-disjoint paths between two vertices.

use std::collections::VecDeque;

use base::{LinkId, VertexId};
use smallvec::SmallVec;
use topology::Network;

/// A path: links in order.
pub(crate) type Path = SmallVec<[LinkId; 3]>;

/// Returns link-disjoint paths, the shortest first, of at most `detour` hops more than the first.
///
/// Greedy: each is the shortest over the links left. That may be fewer than possible: a maximum flow
/// would find all. O(paths · (vertices + links)).
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

/// Returns the shortest path over unused links, by breadth-first search; ties prefer lower link
/// numbers.
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

/// Traces a path back from the target, given the link by which each vertex was reached; `None` if it
/// was not reached.
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
