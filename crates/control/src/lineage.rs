//! Which buffers of a client derive from which others.

use std::collections::VecDeque;
use std::ops::Range;

use base::BufferId;
use smallvec::SmallVec;

/// Operations of each client that are remembered.
const LINEAGE_LENGTH: usize = 4096;

/// One operation: the buffers that it has made, and those that it has read.
#[derive(Debug)]
struct Operation {
    made: Range<u64>,
    read: SmallVec<[BufferId; 8]>,
}

/// From which buffers a client's newest buffers were made.
#[derive(Debug, Default)]
pub(crate) struct Lineage {
    operations: VecDeque<Operation>,
    /// End of the buffers of the operations that are forgotten.
    forgotten: u64,
}

impl Lineage {
    /// Notes an operation that has made `count` buffers.
    pub fn note(&mut self, first: BufferId, count: u64, read: SmallVec<[BufferId; 8]>) {
        if self.operations.len() == LINEAGE_LENGTH {
            self.forgotten = self.operations.pop_front().map_or(0, |oldest| oldest.made.end);
        }
        self.operations.push_back(Operation { made: first.0..first.0 + count, read });
    }

    /// Returns the buffers that derive from `lost`: all newer ones if not all operations since are
    /// remembered.
    pub fn derived(&self, lost: BufferId) -> Derived {
        let is_forgotten = lost.0 < self.forgotten;
        let end = if is_forgotten { u64::MAX } else { lost.0 + 1 };
        let mut derived = Derived(std::iter::once(lost.0..end).collect());
        if is_forgotten {
            return derived;
        }
        for Operation { made, read } in
            self.operations.iter().filter(|one| one.made.end > lost.0 + 1)
        {
            // The input of a call inside a whole program is made by the same operation.
            if made.contains(&lost.0) || read.iter().any(|&buffer| derived.contains(buffer)) {
                derived.0.push(made.start.max(lost.0 + 1)..made.end);
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
    use smallvec::smallvec;

    use super::*;

    fn found(lineage: &Lineage, lost: u64) -> Vec<u64> {
        let derived = lineage.derived(BufferId(lost));
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
        // Inside a whole program: what it makes later than the lost buffer.
        assert_eq!(found(&lineage, 27), [27, 28, 29, 30, 31]);
        assert_eq!(found(&lineage, 31), [31]);
    }

    #[test]
    fn all_that_is_newer_derives_from_what_is_forgotten() {
        let mut lineage = Lineage::default();
        for number in 0..LINEAGE_LENGTH as u64 + 5 {
            lineage.note(BufferId(10 + number), 1, smallvec![BufferId(9 + number)]);
        }
        assert_eq!(found(&lineage, 14), (14..60).collect::<Vec<_>>());
        assert_eq!(found(&lineage, 15), (15..60).collect::<Vec<_>>());
        let derived = lineage.derived(BufferId(15));
        assert_eq!(derived.0.len(), LINEAGE_LENGTH);
        assert_eq!(lineage.derived(BufferId(14)).0.len(), 1);
    }
}
