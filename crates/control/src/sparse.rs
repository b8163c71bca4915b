//! The messages of a sparse exchange between hosts.
//!
//! The data choose which rows are sent where, so the plan only fixes the pairs of hosts that
//! communicate: every sending host sends each receiving host exactly one message, which states how
//! many rows it holds. A host has all its rows when it has all messages; that is the progress
//! tracking.
//!
//! Source: PATHWAYS §4.3. Differs from the paper: Progress is tracked by the messages that carry
//! the rows, empty ones included, not by separate punctuation; their number is that of pairs of
//! hosts.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BufferId, HostId, TransferTag};
use fabric::Cluster;
use ir::{ArraySpec, Ends, Sparse};

use crate::command::{Group, SparsePart};
use crate::reshard;

/// A value of an exchange: its buffer and its spec.
type Value<'a> = (BufferId, &'a Arc<ArraySpec>);

/// The groups of the sending or receiving side, by host.
struct Side<T>(BTreeMap<HostId, Vec<Group<T>>>);

impl<T: Clone> Side<T> {
    fn new<'a>(
        cluster: &Cluster,
        groups: impl Iterator<Item = (Vec<T>, &'a Arc<ArraySpec>)>,
    ) -> Self {
        let mut held: BTreeMap<HostId, Vec<Group<T>>> = BTreeMap::new();
        let mut number = 0;
        for (values, spec) in groups {
            let mut shards: BTreeMap<HostId, Vec<u32>> = BTreeMap::new();
            for &device in spec.sharding.devices.iter() {
                shards.entry(reshard::host_of(cluster, device)).or_default().push(number);
                number += 1;
            }
            for (host, shards) in shards {
                held.entry(host).or_default().push(Group { values: values.clone(), shards });
            }
        }
        Self(held)
    }

    fn of(&self, host: HostId) -> Vec<Group<T>> {
        self.0.get(&host).cloned().unwrap_or_default()
    }

    /// Returns the shard numbers of each host.
    fn shards(&self) -> impl Iterator<Item = (HostId, Vec<u32>)> {
        self.0.iter().map(|(&host, groups)| {
            (host, groups.iter().flat_map(|group| group.shards.iter().copied()).collect())
        })
    }
}

/// Plans each host's part in an exchange.
///
/// # Arguments
/// - `args`, `results`: verified; consecutive values form groups of the [`Sparse::widths`] sizes.
pub(crate) fn plan(
    cluster: &Cluster,
    (sparse, ends): (Sparse, Ends),
    args: &[Value<'_>],
    results: &[Value<'_>],
    mut next_tag: impl FnMut() -> TransferTag,
) -> Vec<(HostId, SparsePart)> {
    let (taken, made) = sparse.widths();
    let given = args.chunks(taken).map(|group| {
        let buffers = group.iter().map(|value| value.0).collect();
        (buffers, group[0].1)
    });
    let got = results.chunks(made).map(|group| {
        let values = group.iter().map(|value| (value.0, value.1.clone())).collect();
        (values, group[0].1)
    });
    let (giving, getting) = (Side::new(cluster, given), Side::new(cluster, got));
    let mut parts: BTreeMap<HostId, SparsePart> = BTreeMap::new();
    for &host in giving.0.keys().chain(getting.0.keys()) {
        let (given, made) = (giving.of(host), getting.of(host));
        let (to, from, after) = (Vec::new(), Vec::new(), Vec::new());
        let part = SparsePart { sparse, ends, given, made, to, from, number: 0, after };
        parts.entry(host).or_insert(part);
    }
    for (giver, given) in giving.shards() {
        for (getter, got) in getting.shards() {
            let tag = next_tag();
            parts.entry(giver).and_modify(|part| part.to.push((getter, tag, got)));
            parts.entry(getter).and_modify(|part| part.from.push((giver, tag, given.clone())));
        }
    }
    parts.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use fabric::IslandSpec;
    use ir::Program;

    use super::*;
    use crate::lower;

    const PROGRAM: &str = "\
program @sparse
input %0: float32[8,3] tiled 4x1 on [0..4]
input %1: int32[8,2] tiled 4x1 on [0..4]
node %2: float32[16,3] tiled 2x1 on [2,3], %3: int32[16] tiled 2 on [2,3], \
%4: int32[4] tiled 2 on [2,3], %5: float32[8,3] on [4], %6: int32[8] on [4], %7: int32[2] on [4] \
= dispatch (%0, %1) bins 2 credit 2 round 0
return (%2, %3, %4, %5, %6, %7)
";

    #[test]
    fn every_giving_host_sends_every_getting_host_one_message() {
        let cluster = Cluster::new(&IslandSpec::parse("2x2x2").unwrap());
        let program = Program::parse(PROGRAM).unwrap();
        program.verify().unwrap();
        let lowered = lower::lower(&cluster, &program, &[]).unwrap();
        assert_eq!(lowered.tags, 4, "two hosts give to two hosts");
        let parts: Vec<_> = lowered
            .steps
            .iter()
            .map(|(host, steps)| match &steps[..] {
                [crate::Command::Sparse(part), ..] => (host.0, &**part),
                other => panic!("{other:?}"),
            })
            .collect();
        let numbers = |groups: &[(HostId, TransferTag, Vec<u32>)]| -> Vec<(u32, Vec<u32>)> {
            groups.iter().map(|(host, _, shards)| (host.0, shards.clone())).collect()
        };
        let getting = vec![(1, vec![0, 1]), (2, vec![2])];
        let giving = vec![(0, vec![0, 1]), (1, vec![2, 3])];
        let expected: [(u32, &[_], &[_]); 3] =
            [(0, &getting, &[]), (1, &getting, &giving), (2, &[], &giving)];
        assert_eq!(parts.len(), 3);
        for ((host, part), (wanted, to, from)) in parts.into_iter().zip(expected) {
            assert_eq!(host, wanted);
            assert_eq!((&numbers(&part.to)[..], &numbers(&part.from)[..]), (to, from));
        }
    }
}
