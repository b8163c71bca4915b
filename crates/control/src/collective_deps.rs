//! Dependencies between the collectives of a program, through any hosts.
//!
//! A plan that reorders collectives must not put one before another that it depends on, even if the
//! dependency passes through hosts that take part in neither. So dependencies are computed here,
//! where the whole program is known: from the data that each value depends on, and from the steps
//! that precede a step on its host, since a launch blocks the steps behind it until its arguments
//! are ready.

use std::collections::BTreeMap;

use base::HostId;
use fixedbitset::FixedBitSet;
use ir::{Node, Operation, Program, Sparse};

/// Dependencies found in the part of a program that has been traversed.
#[derive(Debug)]
pub(crate) struct Waits {
    /// Per value: the collectives that have finished when it is ready.
    made_after: Vec<FixedBitSet>,
    /// Per value: the collectives that have finished when all its readers so far have read it.
    read_after: Vec<FixedBitSet>,
    /// Per host: the collectives that have finished when it reaches its next step.
    reached: BTreeMap<HostId, FixedBitSet>,
    /// Per host: the collectives that have finished when its row exchanges so far are done.
    exchanged: BTreeMap<HostId, FixedBitSet>,
    /// Per host: the collectives that have finished when its sends so far are done; a send whose
    /// source is not ready blocks later sends.
    sent: BTreeMap<HostId, FixedBitSet>,
    next: u32,
}

/// Returns whether this is a collective, whose schedule and routes a plan decides.
fn is_collective(operation: &Operation) -> bool {
    matches!(operation, Operation::Sparse(Sparse::Reduce | Sparse::Gather | Sparse::Scatter))
}

impl Waits {
    pub fn new(program: &Program) -> Self {
        let none = vec![FixedBitSet::new(); program.values.len()];
        Self {
            made_after: none.clone(),
            read_after: none,
            reached: BTreeMap::new(),
            exchanged: BTreeMap::new(),
            sent: BTreeMap::new(),
            next: 0,
        }
    }

    /// Traverses a node; for a collective, returns its number and those that it depends on.
    ///
    /// # Arguments
    /// - `hosts`: the hosts that have steps for it.
    pub fn pass(&mut self, node: &Node, hosts: &[HostId]) -> Option<(u32, Vec<u32>)> {
        let mut before = FixedBitSet::new();
        for arg in &node.args {
            before.union_with(&self.made_after[arg.0 as usize]);
        }
        for host in hosts {
            if let Some(reached) = self.reached.get(host) {
                before.union_with(reached);
            }
        }
        let mut found = None;
        match &node.operation {
            Operation::Call { .. } => {
                for arg in &node.args {
                    before.union_with(&self.read_after[arg.0 as usize]);
                }
                for &host in hosts {
                    self.reached.insert(host, before.clone());
                }
            }
            Operation::Assemble => {}
            Operation::Move { .. } => {
                follow(&mut self.sent, hosts, &mut before);
                for arg in &node.args {
                    self.read_after[arg.0 as usize].union_with(&before);
                }
            }
            operation @ Operation::Sparse(_) => {
                if is_collective(operation) {
                    found = Some((self.next, before.ones().map(|one| one as u32).collect()));
                    before.grow_and_insert(self.next as usize);
                    self.next += 1;
                } else {
                    follow(&mut self.exchanged, hosts, &mut before);
                }
                for arg in &node.args {
                    self.read_after[arg.0 as usize].union_with(&before);
                }
            }
        }
        for result in node.results.clone() {
            self.made_after[result as usize] = before.clone();
        }
        found
    }
}

/// Serialises a node on these hosts: adds the dependencies of their earlier nodes in `done`, and
/// records its own.
fn follow(done: &mut BTreeMap<HostId, FixedBitSet>, hosts: &[HostId], before: &mut FixedBitSet) {
    for host in hosts {
        if let Some(earlier) = done.get(host) {
            before.union_with(earlier);
        }
    }
    for &host in hosts {
        done.insert(host, before.clone());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Each device is on its own host. The result of the first sum goes through host 2 to host 1,
    /// which needs it for the second sum; host 0 could begin that sum at once. The third waits for
    /// host 1 to reach it; the fourth for a call that may donate what the third reads.
    const PROGRAM: &str = "\
program @chain
function @f
function @g
function @h
input %0: float32[4] on [0]
input %1: float32[4] on [1]
input %2: float32[4] on [0]
node %3: float32[4] on [0], %4: float32[4] on [1] = reduce (%0, %1)
node %5: float32[4] on [2] = move (%4)
node %6: float32[4] on [2] = call @f (%5)
node %7: float32[4] on [1] = move (%6)
node %8: float32[4] on [1] = call @g (%7)
node %9: float32[4] on [0], %10: float32[4] on [1] = reduce (%2, %8)
node %11: float32[4] on [0], %12: float32[4] on [1] = reduce (%2, %1)
node %13: float32[4] on [1] = call @h (%1)
node %14: float32[4] on [0], %15: float32[4] on [1] = reduce (%0, %13)
return (%3, %9, %10, %11, %12, %14, %15)
";

    /// The first move waits for a sum, and the second move is queued behind it.
    const MOVES: &str = "\
program @moves
function @g
input %0: float32[4] on [0]
input %1: float32[4] on [1]
input %2: float32[4] on [0]
node %3: float32[4] on [0], %4: float32[4] on [1] = reduce (%0, %1)
node %5: float32[4] on [1] = move (%3)
node %6: float32[4] on [1] = move (%2)
node %7: float32[4] on [1] = call @g (%6)
node %8: float32[4] on [0], %9: float32[4] on [1] = reduce (%0, %7)
return (%4, %5, %8, %9)
";

    fn waits(text: &str) -> Vec<(u32, Vec<u32>)> {
        let program = Program::parse(text).unwrap();
        program.verify().unwrap();
        let mut waits = Waits::new(&program);
        let hosts_of = |node: &Node| {
            let values = node.args.iter().map(|arg| arg.0).chain(node.results.clone());
            let devices = values.flat_map(|value| {
                program.values[value as usize].sharding.devices.iter().map(|device| device.0)
            });
            Vec::from_iter(devices.map(HostId).collect::<BTreeSet<_>>())
        };
        program.nodes.iter().filter_map(|node| waits.pass(node, &hosts_of(node))).collect()
    }

    #[test]
    fn collectives_wait_for_others_by_way_of_any_host() {
        let expected = [(0, vec![]), (1, vec![0]), (2, vec![0]), (3, vec![0, 2])];
        assert_eq!(waits(PROGRAM), expected);
    }

    #[test]
    fn moves_wait_for_those_before_them() {
        assert_eq!(waits(MOVES), [(0, vec![]), (1, vec![0])]);
    }
}
