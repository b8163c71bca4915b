//! Allocation of contiguous ranges of devices, in a row or on a ring.

/// Returns the contiguous range of `count` devices of least cost, as its cost and its first device; of
/// equal costs the first, and none if no range is available. O(devices · cost of one).
///
/// # Arguments
/// - `is_ring`: whether the last device is adjacent to the first.
/// - `cost`: of the range from a device on; none if that is not available.
///
/// ```
/// let taken = [false, true, false, false, true, false];
/// let is_free = |first: u32| (first..first + 2).all(|device| !taken[device as usize % 6]);
/// let cost = |first| is_free(first).then_some(0);
/// assert_eq!(place::min_cost_contiguous_range(6, 2, false, cost), Some((0, 2)));
/// let from_behind = |first| is_free(first).then_some(6 - first);
/// assert_eq!(place::min_cost_contiguous_range(6, 2, true, from_behind), Some((1, 5)));
/// ```
pub fn min_cost_contiguous_range<C: Ord>(
    devices: u32,
    count: u32,
    is_ring: bool,
    cost: impl Fn(u32) -> Option<C>,
) -> Option<(C, u32)> {
    if count == 0 || count > devices {
        return None;
    }
    // On a ring there is one range of all devices.
    let firsts = if is_ring && count < devices { devices } else { devices - count + 1 };
    (0..firsts).filter_map(|first| Some((cost(first)?, first))).min()
}
