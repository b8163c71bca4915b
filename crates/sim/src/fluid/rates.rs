//! Max-min fair rates of flows that share resources: no flow can get more without taking from one that
//! has no more. Computed by progressive filling (bottleneck by bottleneck).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::{BitsPerSecond, Ordered};
use smallvec::SmallVec;

pub(crate) fn bytes_per_ns(rate: BitsPerSecond) -> f64 {
    rate.0 / 8e9
}

/// Resources that a flow uses: its source, its target, and those in between.
pub(crate) type SharePath = SmallVec<[u32; 8]>;

/// Flows that share resources.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    /// Capacity of each resource in bytes per nanosecond, and the flows that use it.
    capacities: Vec<f64>,
    users: Vec<Vec<u32>>,
    paths: Vec<SharePath>,
    /// Index of a flow among the users of each of its resources.
    places: Vec<SharePath>,
    rates: Vec<f64>,
    spare: Vec<u32>,
    /// Resources whose flows or capacity changed since the last solution.
    changed: Vec<u32>,
    // Scratch space of [`Shares::solve`], kept between calls.
    left: Vec<f64>,
    open: Vec<u32>,
    seen: Vec<u32>,
    fixed: Vec<u32>,
    round: u32,
    /// Resources by fair share per flow, smallest first.
    heap: BinaryHeap<Reverse<(Ordered, u32)>>,
}

impl Shares {
    /// Adds a resource with a capacity in bytes per nanosecond; returns its number.
    pub fn resource(&mut self, capacity: f64) -> u32 {
        self.capacities.push(capacity);
        self.users.push(Vec::new());
        self.left.push(0.0);
        self.open.push(0);
        self.seen.push(0);
        self.capacities.len() as u32 - 1
    }

    /// Returns the number of resources.
    pub fn count(&self) -> u32 {
        self.capacities.len() as u32
    }

    /// Adds `count` resources of equal capacity.
    pub fn resources(&mut self, count: u32, capacity: f64) {
        for _ in 0..count {
            self.resource(capacity);
        }
    }

    /// Changes the capacity of a resource.
    pub fn change(&mut self, resource: u32, capacity: f64) {
        if self.capacities[resource as usize] != capacity {
            self.capacities[resource as usize] = capacity;
            self.changed.push(resource);
        }
    }

    /// Adds a flow over these resources; returns its number.
    pub fn add(&mut self, path: SharePath) -> u32 {
        let flow = self.spare.pop().unwrap_or_else(|| {
            self.paths.push(SharePath::new());
            self.places.push(SharePath::new());
            self.rates.push(0.0);
            self.fixed.push(0);
            self.paths.len() as u32 - 1
        });
        let places = path.iter().map(|&resource| {
            self.changed.push(resource);
            let users = &mut self.users[resource as usize];
            users.push(flow);
            users.len() as u32 - 1
        });
        self.places[flow as usize] = places.collect();
        self.paths[flow as usize] = path;
        self.rates[flow as usize] = 0.0;
        flow
    }

    /// Removes a flow.
    pub fn remove(&mut self, flow: u32) {
        let path = std::mem::take(&mut self.paths[flow as usize]);
        let places = std::mem::take(&mut self.places[flow as usize]);
        for (&resource, &place) in path.iter().zip(&places) {
            self.changed.push(resource);
            let users = &mut self.users[resource as usize];
            users.swap_remove(place as usize);
            let Some(&moved) = users.get(place as usize) else { continue };
            let mut resources = self.paths[moved as usize].iter();
            let at = resources.position(|&other| other == resource).expect("it takes of it");
            self.places[moved as usize][at] = place;
        }
        self.spare.push(flow);
    }

    /// Returns whether rates may have changed since the last solution.
    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Returns the bandwidth in use at a resource, by the last solution.
    pub fn taken(&self, resource: u32) -> f64 {
        self.users[resource as usize].iter().map(|&flow| self.rates[flow as usize]).sum()
    }

    /// Recomputes rates of all flows that may be affected by changes, and reports those that changed to
    /// `tell`. O(flows · resources of one + resources · log resources), over the affected ones.
    pub fn solve(&mut self, mut tell: impl FnMut(u32, f64)) {
        if self.changed.is_empty() {
            return;
        }
        self.round += 1;
        let mut takes = self.open_component();
        while takes > 0
            && let Some(Reverse((Ordered(share), resource))) = self.heap.pop()
        {
            let open = self.open[resource as usize];
            if open == 0 {
                continue;
            }
            // Other flows got their rates since, so the share per remaining flow is no less.
            let now = (self.left[resource as usize] / f64::from(open)).max(share);
            if now > share * (1.0 + 1e-12) {
                self.heap.push(Reverse((Ordered(now), resource)));
                continue;
            }
            takes -= self.fix_users(resource, share, &mut tell);
        }
        self.heap.clear();
    }

    /// Forgets the rates in the connected component of the changed resources. Returns the number of
    /// (flow, resource) pairs there, all without a rate, and leaves the fair shares in the heap.
    fn open_component(&mut self) -> usize {
        let round = self.round;
        let mut resources = std::mem::take(&mut self.changed);
        resources.retain(|&resource| {
            std::mem::replace(&mut self.seen[resource as usize], round) != round
        });
        // Heapified at once.
        let mut shares = std::mem::take(&mut self.heap).into_vec();
        let mut takes = 0;
        let mut at = 0;
        while let Some(&resource) = resources.get(at) {
            at += 1;
            let users = &self.users[resource as usize];
            self.left[resource as usize] = self.capacities[resource as usize];
            self.open[resource as usize] = users.len() as u32;
            if users.is_empty() {
                continue;
            }
            let share = self.capacities[resource as usize] / users.len() as f64;
            shares.push(Reverse((Ordered(share), resource)));
            takes += users.len();
            for &flow in users {
                for &other in &self.paths[flow as usize] {
                    if self.seen[other as usize] != round {
                        self.seen[other as usize] = round;
                        resources.push(other);
                    }
                }
            }
        }
        self.heap = BinaryHeap::from(shares);
        resources.clear();
        self.changed = resources;
        takes
    }

    /// Gives this share to a resource's users that have no rate yet. Returns the number of (flow,
    /// resource) pairs that got a rate.
    fn fix_users(&mut self, resource: u32, share: f64, tell: &mut impl FnMut(u32, f64)) -> usize {
        let mut fixed = 0;
        let users = std::mem::take(&mut self.users[resource as usize]);
        for &flow in &users {
            if std::mem::replace(&mut self.fixed[flow as usize], self.round) == self.round {
                continue;
            }
            fixed += self.paths[flow as usize].len();
            for &other in &self.paths[flow as usize] {
                self.left[other as usize] = (self.left[other as usize] - share).max(0.0);
                self.open[other as usize] -= 1;
            }
            if self.rates[flow as usize] != share {
                self.rates[flow as usize] = share;
                tell(flow, share);
            }
        }
        self.users[resource as usize] = users;
        fixed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_can_get_more_does() {
        // Two flows use the first resource; one of them also uses the second, as does a third flow.
        let mut shares = Shares::default();
        let (wide, narrow) = (shares.resource(10.0), shares.resource(4.0));
        let alone = shares.add(SharePath::from_slice(&[wide]));
        let both = shares.add(SharePath::from_slice(&[wide, narrow]));
        let other = shares.add(SharePath::from_slice(&[narrow]));
        shares.solve(|_, _| ());
        assert_eq!([alone, both, other].map(|flow| shares.rates[flow as usize]), [8.0, 2.0, 2.0]);
        shares.remove(other);
        shares.solve(|_, _| ());
        assert_eq!([alone, both].map(|flow| shares.rates[flow as usize]), [6.0, 4.0]);
        shares.change(narrow, 0.0);
        shares.solve(|_, _| ());
        assert_eq!([alone, both].map(|flow| shares.rates[flow as usize]), [10.0, 0.0]);
    }
}
