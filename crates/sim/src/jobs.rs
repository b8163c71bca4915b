//! Multi-job scheduling on the devices of one fabric, in virtual time: placement on contiguous devices,
//! queueing, and migration of jobs to defragment the ring.
//!
//! Jobs queue first-in first-out by arrival, and the first is placed as soon as devices are free for
//! it: by best fit, on the smallest free contiguous range of the ring that is large enough. Where a
//! switch can remap devices on the ring, jobs between free ranges are compacted, those with the fewest
//! devices in total, if that makes room (defragmentation); they pause meanwhile.
//!
//! Source: SiP-ML §3.3 (several jobs), which proposes the switch without further detail.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use base::Nanos;
use place::min_cost_contiguous_range;
use thiserror::Error;

/// A job arrival.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Arrival time.
    pub time: Nanos,
    /// Number of devices it needs.
    pub devices: u32,
    /// Computation time.
    pub takes: Nanos,
}

/// Which sets of devices can run a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DevicePool {
    /// Any devices: the fabric joins all of them alike.
    Any,
    /// Contiguous devices on a ring.
    Neighbours,
    /// Contiguous devices on a ring that a switch can remap: a job that migrates pauses for this long.
    Remapped(Nanos),
}

/// An arrival whose device count can never be satisfied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("job {job} needs {found} devices; expected 1 to {of}")]
pub struct JobError {
    /// Job number.
    pub job: u32,
    /// Devices it needs.
    pub found: u32,
    /// Devices in the fabric.
    pub of: u32,
}

/// A job's residence on one range of devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stay {
    /// Job number.
    pub job: u32,
    /// First device; the range may wrap around the ring.
    pub first: u32,
    /// Number of devices.
    pub count: u32,
    /// Start time.
    pub from: Nanos,
    /// End time.
    pub to: Nanos,
}

/// Schedule and metrics of the jobs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shared {
    /// Start and end time of each job.
    pub times: Vec<(Nanos, Nanos)>,
    /// Residences of jobs, in the order in which they ended.
    pub stays: Vec<Stay>,
    /// Number of job migrations.
    pub moves: u32,
    /// Time lost to fragmentation: the first job in the queue waited although enough devices were free.
    pub apart: Nanos,
}

/// Schedules jobs, given in the order of arrival, on `devices` devices. O(jobs · (jobs + devices)).
///
/// # Errors
/// A job needs 0 devices, or more than the fabric has.
pub fn share(devices: u32, room: DevicePool, arrivals: &[Arrival]) -> Result<Shared, JobError> {
    for (job, arrival) in (0..).zip(arrivals) {
        if !(1..=devices).contains(&arrival.devices) {
            return Err(JobError { job, found: arrival.devices, of: devices });
        }
    }
    let mut sharing = Sharing {
        devices,
        room,
        arrivals,
        free: devices,
        placed: BTreeMap::new(),
        line: VecDeque::new(),
        ends: vec![NEVER; arrivals.len()],
        events: BinaryHeap::new(),
        came: Shared { times: vec![(Nanos(0), Nanos(0)); arrivals.len()], ..Shared::default() },
    };
    sharing.run();
    Ok(sharing.came)
}

/// End time of a job that has not started.
const NEVER: Nanos = Nanos(u64::MAX);

/// A simulation event: a job ends, unless its end was postponed since, or arrives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    Over { job: u32 },
    Comes { job: u32 },
}

#[derive(Clone, Copy, Debug)]
struct Placed {
    job: u32,
    count: u32,
    from: Nanos,
}

struct Sharing<'a> {
    devices: u32,
    room: DevicePool,
    arrivals: &'a [Arrival],
    free: u32,
    /// Jobs on devices, keyed by their first device.
    placed: BTreeMap<u32, Placed>,
    line: VecDeque<u32>,
    ends: Vec<Nanos>,
    events: BinaryHeap<Reverse<(Nanos, Event)>>,
    came: Shared,
}

impl Sharing<'_> {
    fn run(&mut self) {
        for (job, arrival) in (0..).zip(self.arrivals) {
            self.events.push(Reverse((arrival.time, Event::Comes { job })));
        }
        let mut before = Nanos(0);
        while let Some(Reverse((now, event))) = self.events.pop() {
            if let Some(&job) = self.line.front()
                && self.arrivals[job as usize].devices <= self.free
            {
                self.came.apart += now - before;
            }
            before = now;
            match event {
                Event::Comes { job } => self.line.push_back(job),
                Event::Over { job } if self.ends[job as usize] == now => self.leave(job, now),
                Event::Over { .. } => continue,
            }
            while let Some(&job) = self.line.front()
                && self.place(job, now)
            {
                self.line.pop_front();
            }
        }
    }

    fn leave(&mut self, job: u32, now: Nanos) {
        self.free += self.arrivals[job as usize].devices;
        self.came.times[job as usize].1 = now;
        let stays = &mut self.came.stays;
        self.placed.retain(|&first, placed| {
            if placed.job == job {
                stays.push(stay(first, *placed, now));
            }
            placed.job != job
        });
    }

    /// Places a job if devices are free for it; returns whether it did.
    fn place(&mut self, job: u32, now: Nanos) -> bool {
        let Arrival { devices: count, takes, .. } = self.arrivals[job as usize];
        if count > self.free {
            return false;
        }
        let ranges = match self.room {
            DevicePool::Any => self.any(count),
            DevicePool::Neighbours => {
                self.neighbours(count).map_or(Vec::new(), |first| vec![(first, count)])
            }
            DevicePool::Remapped(delay) => {
                let found = self.neighbours(count);
                vec![(found.unwrap_or_else(|| self.close_ranks(count, now, delay)), count)]
            }
        };
        if ranges.is_empty() {
            return false;
        }
        for (first, count) in ranges {
            self.placed.insert(first, Placed { job, count, from: now });
        }
        self.free -= count;
        self.came.times[job as usize].0 = now;
        self.end(job, now + takes);
        true
    }

    /// Sets or postpones a job's end time.
    fn end(&mut self, job: u32, time: Nanos) {
        if self.ends[job as usize] == time {
            return;
        }
        self.ends[job as usize] = time;
        self.events.push(Reverse((time, Event::Over { job })));
    }

    /// Returns the free ranges as (first device, length): around the ring, one after each job.
    fn holes(&self) -> Vec<(u32, u32)> {
        let Some((&first, _)) = self.placed.first_key_value() else {
            return vec![(0, self.devices)];
        };
        let next = self.placed.keys().copied().skip(1).chain([first + self.devices]);
        let ends = self.placed.iter().map(|(&first, placed)| first + placed.count);
        ends.zip(next).map(|(end, next)| (end % self.devices, next - end)).collect()
    }

    /// Best fit: returns the start of the smallest free range of at least `count` devices.
    fn neighbours(&self, count: u32) -> Option<u32> {
        let holes: BTreeMap<u32, u32> =
            self.holes().into_iter().filter(|hole| hole.1 > 0).collect();
        let size = |first: u32| holes.get(&first).copied().filter(|&size| size >= count);
        min_cost_contiguous_range(self.devices, count, true, size).map(|(_, first)| first)
    }

    /// Returns `count` free devices as ranges, taken in the order of [`Self::holes`].
    fn any(&self, count: u32) -> Vec<(u32, u32)> {
        let mut left = count;
        let take = |(first, size): (u32, u32)| {
            let taken = left.min(size);
            left -= taken;
            (first, taken)
        };
        self.holes().into_iter().map(take).filter(|range| range.1 > 0).collect()
    }

    /// Compacts jobs to one side of a hole until `count` contiguous devices are free, and returns the
    /// first of these. Migrates the jobs with the fewest devices in total. At least `count` devices
    /// must be free.
    fn close_ranks(&mut self, count: u32, now: Nanos, delay: Nanos) -> u32 {
        let jobs: Vec<(u32, Placed)> =
            self.placed.iter().map(|(&first, &job)| (first, job)).collect();
        let holes = self.holes();
        let total = jobs.len();
        // For each hole as the start: devices migrated, and number of jobs migrated, until there is
        // room.
        let candidates = (0..total).filter_map(|start| {
            let (mut room, mut moved) = (0, 0);
            (0..total).find_map(|over| {
                room += holes[(start + over) % total].1;
                let found = (room >= count).then_some((moved, over, start));
                moved += jobs[(start + over + 1) % total].1.count;
                found
            })
        });
        let (_, over, start) = candidates.min().expect("as many are free");
        let mut first = holes[start].0;
        for at in 1..=over {
            let (old, placed) = jobs[(start + at) % total];
            self.placed.remove(&old);
            self.came.stays.push(stay(old, placed, now));
            self.placed.insert(first, Placed { from: now, ..placed });
            self.came.moves += 1;
            self.end(placed.job, self.ends[placed.job as usize] + delay);
            first = (first + placed.count) % self.devices;
        }
        first
    }
}

fn stay(first: u32, placed: Placed, to: Nanos) -> Stay {
    let Placed { job, count, from } = placed;
    Stay { job, first, count, from, to }
}
