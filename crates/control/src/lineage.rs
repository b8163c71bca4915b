//! Which buffers of a client derive from which others.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use base::BufferId;
use smallvec::SmallVec;

use crate::programs::Dataflow;

/// Operations of each client that are remembered.
const LINEAGE_LENGTH: usize = 4096;

/// One operation: the buffers that it has made, and those that it has read.
#[derive(Debug)]
struct Operation {
    made: Range<u64>,
    read: SmallVec<[BufferId; 8]>,
    /// The whole program that it ran.
    program: Option<Arc<Dataflow>>,
}

impl Operation {
    /// Adds what derives from buffers in `derived` in a run of a whole program: of its values and
    /// results, and its completion, which comes last, if any of them does.
    fn derive_in(&self, dataflow: &Dataflow, derived: &mut Derived) {
        let (program, lowered) = (&dataflow.program, &dataflow.lowered);
        let inputs = program.inputs as usize;
        let buffer = |slot: usize| match slot.checked_sub(inputs) {
            Some(slot) => BufferId(self.made.start + slot as u64),
            None => self.read[slot],
        };
        let slots = inputs + (self.made.end - self.made.start) as usize;
        let mut found: Vec<bool> = (0..slots).map(|slot| derived.contains(buffer(slot))).collect();
        for node in &program.nodes {
            if node.args.iter().any(|arg| found[arg.0 as usize]) {
                node.results.clone().for_each(|result| found[result as usize] = true);
            }
        }
        for (value, &slot) in program.results.iter().zip(&lowered.results) {
            found[slot as usize] |= found[value.0 as usize];
        }
        let completion = inputs + lowered.slots as usize;
        let is_any = found.contains(&true);
        found[completion..].fill(is_any);
        let newest = derived.0.last().map_or(0, |range| range.end);
        let numbers = (inputs..slots).filter(|&slot| found[slot]).map(|slot| buffer(slot).0);
        derived.0.extend(numbers.filter(|&number| number >= newest).map(|one| one..one + 1));
    }
}

/// From which buffers a client's newest buffers were made.
#[derive(Debug, Default)]
pub(crate) struct Lineage {
    operations: VecDeque<Operation>,
    /// End of the buffers of the operations that are forgotten.
    forgotten: u64,
}

impl Lineage {
    /// Notes an operation that has made `count` buffers, each from all that it has read.
    pub fn note(&mut self, first: BufferId, count: u64, read: SmallVec<[BufferId; 8]>) {
        self.note_run(first, count, read, None);
    }

    /// Notes an operation that has made `count` buffers; each from all that it has read, or as the
    /// whole program says that it ran.
    pub fn note_run(
        &mut self,
        first: BufferId,
        count: u64,
        read: SmallVec<[BufferId; 8]>,
        program: Option<Arc<Dataflow>>,
    ) {
        if self.operations.len() == LINEAGE_LENGTH {
            self.forgotten = self.operations.pop_front().map_or(0, |oldest| oldest.made.end);
        }
        let made = first.0..first.0 + count;
        self.operations.push_back(Operation { made, read, program });
    }

    /// Returns the buffers that derive from those numbered `lost`: all newer ones if not all operations since are
    /// remembered.
    pub fn derived(&self, lost: Range<u64>) -> Derived {
        let is_forgotten = lost.start < self.forgotten;
        let end = if is_forgotten { u64::MAX } else { lost.end };
        let mut derived = Derived(std::iter::once(lost.start..end).collect());
        if is_forgotten {
            return derived;
        }
        for operation in self.operations.iter().filter(|one| one.made.end > lost.end) {
            match &operation.program {
                Some(program) => operation.derive_in(program, &mut derived),
                None if operation.read.iter().any(|&buffer| derived.contains(buffer)) => {
                    derived.0.push(operation.made.clone());
                }
                None => {}
            }
        }
        derived
    }
}

/// Buffers as ranges of their numbers, in their order.
#[derive(Debug)]
pub(crate) struct Derived(Vec<Range<u64>>);

impl Derived {
    pub fn contains(&self, buffer: BufferId) -> bool {
        let after = self.0.partition_point(|range| range.start <= buffer.0);
        after > 0 && self.0[after - 1].contains(&buffer.0)
    }
}

#[cfg(test)]
mod tests {
    use ir::Program;
    use smallvec::smallvec;

    use super::*;
    use crate::programs::Lowered;

    fn found(lineage: &Lineage, lost: u64) -> Vec<u64> {
        let derived = lineage.derived(lost..lost + 1);
        (0..60).filter(|&number| derived.contains(BufferId(number))).collect()
    }

    #[test]
    fn what_derives_is_found_over_several_operations() {
        let mut lineage = Lineage::default();
        lineage.note(BufferId(10), 2, smallvec![BufferId(3)]);
        lineage.note(BufferId(12), 1, smallvec![BufferId(4), BufferId(11)]);
        lineage.note(BufferId(20), 10, smallvec![BufferId(4)]);
        lineage.note(BufferId(30), 2, smallvec![BufferId(12), BufferId(29)]);
        lineage.note(BufferId(40), 0, smallvec![BufferId(31)]);
        assert_eq!(found(&lineage, 3), [3, 10, 11, 12, 30, 31]);
        assert_eq!(found(&lineage, 11), [11, 12, 30, 31]);
        assert_eq!(found(&lineage, 29), [29, 30, 31]);
        assert_eq!(found(&lineage, 31), [31]);
    }

    #[test]
    fn in_a_whole_program_what_reads_it_derives() {
        let kind = "float32[] on [0]";
        let text = format!(
            "program @two\nfunction @f\ninput %0: {kind}\ninput %1: {kind}\n\
             node %2: {kind} = call @f (%0)\nnode %3: {kind} = call @f (%1)\n\
             node %4: {kind} = call @f (%2)\nnode %5: {kind} = call @f (%3)\n\
             return (%4, %5, %0, %5)\n"
        );
        let program = Program::parse(&text).unwrap();
        let lowered = Lowered { slots: 6, results: vec![4, 5, 6, 7], ..Lowered::default() };
        let (source, functions) = (program.clone(), Vec::new());
        let inputs = Vec::new();
        let dataflow = Dataflow { source, program, inputs, lowered, functions, partitioned: None };
        let program = Arc::new(dataflow);
        let mut lineage = Lineage::default();
        // Values 2 to 5, the copies of %0 and of %5, and the completion.
        let read = smallvec![BufferId(3), BufferId(4)];
        lineage.note_run(BufferId(20), 7, read, Some(program));
        lineage.note(BufferId(30), 1, smallvec![BufferId(23)]);
        lineage.note(BufferId(31), 1, smallvec![BufferId(22)]);
        assert_eq!(found(&lineage, 3), [3, 20, 22, 24, 26, 31]);
        assert_eq!(found(&lineage, 4), [4, 21, 23, 25, 26, 30]);
        assert_eq!(found(&lineage, 20), [20, 22, 26, 31]);
        assert_eq!(found(&lineage, 22), [22, 26, 31]);
    }

    #[test]
    fn all_that_is_newer_derives_from_what_is_forgotten() {
        let mut lineage = Lineage::default();
        for number in 0..LINEAGE_LENGTH as u64 + 5 {
            lineage.note(BufferId(10 + number), 1, smallvec![BufferId(9 + number)]);
        }
        assert_eq!(found(&lineage, 14), (14..60).collect::<Vec<_>>());
        assert_eq!(found(&lineage, 15), (15..60).collect::<Vec<_>>());
        let derived = lineage.derived(15..16);
        assert_eq!(derived.0.len(), LINEAGE_LENGTH);
        assert_eq!(lineage.derived(14..15).0.len(), 1);
    }
}
