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

use base::{BufferId, Bytes, HostId, TransferTag};
use ir::{ArraySpec, Ends, Sparse};
use protocol::{
    Command, GivenGroup, GroupCollective, MadeGroup, MadeValue, PeerMessage, RowDirection,
};
use topology::Cluster;

use crate::reshard;

/// A value of an exchange: its buffer and its spec.
type Value<'a> = (BufferId, &'a Arc<ArraySpec>);

/// The groups of the sending or receiving side, by host.
struct Side<T>(BTreeMap<HostId, Vec<Group<T>>>);

/// One group of values on one host.
#[derive(Clone)]
struct Group<T> {
    values: Vec<T>,
    /// The numbers, over all groups, of the host's shards.
    shards: Vec<u32>,
}

/// One host's part in a collective or an exchange of rows.
pub(crate) struct SparsePart {
    sparse: Sparse,
    ends: Ends,
    given: Vec<GivenGroup>,
    made: Vec<MadeGroup>,
    targets: Vec<PeerMessage>,
    sources: Vec<PeerMessage>,
}

impl SparsePart {
    /// Returns the command for the host.
    ///
    /// # Arguments
    /// - `number`: index among the collectives of its program, if it is one.
    /// - `after`: collectives that finish before this one can begin on all hosts.
    pub fn command(self, number: u32, after: Vec<u32>) -> Command {
        let Self { sparse, ends, given, made, targets, sources } = self;
        let (direction, bins, credit, round) = match sparse {
            Sparse::Dispatch { bins, credit, round } => {
                (RowDirection::Dispatch, bins, credit, round)
            }
            Sparse::Collect => (RowDirection::Collect, 0, 0, 0),
            Sparse::Reduce | Sparse::Gather | Sparse::Scatter => {
                let kind = match sparse {
                    Sparse::Reduce => GroupCollective::Reduce,
                    Sparse::Gather => GroupCollective::Gather,
                    _ => GroupCollective::Scatter,
                };
                return Command::Collective {
                    kind,
                    differing: ends.source.rows,
                    groups: ends.choices,
                    shard_bytes: Bytes(ends.row_bytes),
                    given,
                    made,
                    targets,
                    sources,
                    number,
                    after,
                };
            }
        };
        Command::RowExchange {
            direction,
            bins,
            credit,
            round,
            rows: ends.source.rows,
            choices: ends.choices,
            is_each: ends.is_each,
            row_bytes: Bytes(ends.row_bytes),
            given,
            made,
            targets,
            sources,
        }
    }
}

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
        let values =
            group.iter().map(|&(buffer, spec)| MadeValue { buffer, spec: spec.clone() }).collect();
        (values, group[0].1)
    });
    let (giving, getting) = (Side::new(cluster, given), Side::new(cluster, got));
    let mut parts: BTreeMap<HostId, SparsePart> = BTreeMap::new();
    for &host in giving.0.keys().chain(getting.0.keys()) {
        let given = giving.of(host).into_iter();
        let given = given.map(|Group { values: buffers, shards }| GivenGroup { buffers, shards });
        let made = getting.of(host).into_iter();
        let made = made.map(|Group { values, shards }| MadeGroup { values, shards });
        let (given, made) = (given.collect(), made.collect());
        let (targets, sources) = (Vec::new(), Vec::new());
        let part = SparsePart { sparse, ends, given, made, targets, sources };
        parts.entry(host).or_insert(part);
    }
    for (giver, given) in giving.shards() {
        for (getter, got) in getting.shards() {
            let tag = next_tag();
            parts.entry(giver).and_modify(|part| {
                part.targets.push(PeerMessage { host: getter, tag, shards: got })
            });
            parts.entry(getter).and_modify(|part| {
                let shards = given.clone();
                part.sources.push(PeerMessage { host: giver, tag, shards });
            });
        }
    }
    parts.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use ir::Program;
    use topology::IslandSpec;

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
                [Command::RowExchange { targets, sources, .. }, ..] => (host.0, targets, sources),
                other => panic!("{other:?}"),
            })
            .collect();
        let numbers = |peers: &[PeerMessage]| -> Vec<(u32, Vec<u32>)> {
            peers.iter().map(|peer| (peer.host.0, peer.shards.clone())).collect()
        };
        let getting = vec![(1, vec![0, 1]), (2, vec![2])];
        let giving = vec![(0, vec![0, 1]), (1, vec![2, 3])];
        let expected: [(u32, &[_], &[_]); 3] =
            [(0, &getting, &[]), (1, &getting, &giving), (2, &[], &giving)];
        assert_eq!(parts.len(), 3);
        for ((host, targets, sources), (wanted, to, from)) in parts.into_iter().zip(expected) {
            assert_eq!(host, wanted);
            assert_eq!((&numbers(targets)[..], &numbers(sources)[..]), (to, from));
        }
    }
}
