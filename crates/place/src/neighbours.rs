//! Neighbours: which stretch of a row of devices, or of a ring, somebody gets.

/// The stretch of so many neighbours that costs least, as what it costs and its first device; the first
/// of those that cost the same, and none if none can be had. O(devices · cost of one).
///
/// # Arguments
/// - `is_ring`: whether the last device is the first one's neighbour, too.
/// - `cost`: of the stretch from a device on; none if it cannot be had.
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
    // Around a ring there is one stretch of all devices.
    let firsts = if is_ring && count < devices { devices } else { devices - count + 1 };
    (0..firsts).filter_map(|first| Some((cost(first)?, first))).min()
}
