//! Axis-aligned boxes of an index space: the part that a shard holds, and the overlap of two shards.

use crate::Dims;

/// A box `[start, start + size)` in every dimension.
///
/// ```
/// use ir::Region;
/// let left = Region::new(&[0, 0], &[4, 6]);
/// let right = Region::new(&[2, 4], &[4, 4]);
/// assert_eq!(left.intersect(&right), Some(Region::new(&[2, 4], &[2, 2])));
/// assert_eq!(left.intersect(&Region::new(&[4, 0], &[1, 1])), None);
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Region {
    /// First index in every dimension.
    pub start: Dims,
    /// Extent in every dimension.
    pub size: Dims,
}

impl Region {
    /// Creates the box at `start` of extent `size`, both of the array's rank.
    pub fn new(start: &[i64], size: &[i64]) -> Self {
        assert_eq!(start.len(), size.len(), "a region's start and size have one rank");
        Self { start: start.into(), size: size.into() }
    }

    /// Returns the number of elements; 1 for a scalar.
    pub fn elements(&self) -> u64 {
        self.size.iter().map(|&extent| extent.max(0) as u64).product()
    }

    /// Returns the intersection; `None` if it is empty. Two scalars intersect.
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        let mut start = Dims::new();
        let mut size = Dims::new();
        for axis in 0..self.start.len() {
            let low = self.start[axis].max(other.start[axis]);
            let high =
                (self.start[axis] + self.size[axis]).min(other.start[axis] + other.size[axis]);
            if high <= low {
                return None;
            }
            start.push(low);
            size.push(high - low);
        }
        Some(Region { start, size })
    }

    /// Returns the box relative to `origin`'s first index.
    pub fn relative_to(&self, origin: &Region) -> Region {
        let start = self.start.iter().zip(&origin.start).map(|(a, b)| a - b).collect();
        Region { start, size: self.size.clone() }
    }
}
