//! Floating-point numbers with a total order.

use std::cmp::Ordering;

/// A number in the total order of IEEE 754 ([`f64::total_cmp`]), for heaps and sorted sets.
///
/// ```
/// use base::Ordered;
/// assert!(Ordered(1.5) < Ordered(2.0));
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ordered(pub f64);

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}
