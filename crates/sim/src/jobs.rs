//! Several jobs on the devices of one fabric, in virtual time: who gets which neighbours, who waits,
//! and who gets another place so that others find room.
//!
//! Jobs come in line in the order of their arrival, and the first has devices as soon as there is room
//! for it: the smallest stretch of the ring that is free and large enough. Where a switch can give
//! devices other places on the ring, jobs that lie between free stretches close ranks, those with
//! fewest devices, if that makes room; they stand still meanwhile.
//!
//! Source: SiP-ML §3.3 (several jobs), which proposes the switch and says no more.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use base::Nanos;
use place::min_cost_contiguous_range;
use thiserror::Error;

/// A job that comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// When.
    pub time: Nanos,
    /// How many devices it needs.
    pub devices: u32,
    /// How long it computes.
    pub takes: Nanos,
}

/// Which devices do for a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DevicePool {
    /// Any: whatever joins them joins any of them alike.
    Any,
    /// Neighbours on a ring.
    Neighbours,
    /// Neighbours, and a switch gives devices other places: whoever gets one stands still so long.
    Remapped(Nanos),
}

/// A job that can never be placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("job {job} needs {found} devices; expected 1 to {of}")]
pub struct JobError {
    /// Its number.
    pub job: u32,
    /// How many it needs.
    pub found: u32,
    /// How many there are.
    pub of: u32,
}

/// Where a job lay for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stay {
    /// Its number.
    pub job: u32,
    /// The first of its devices; those that follow may go on around the ring.
    pub first: u32,
    /// How many of them.
    pub count: u32,
    /// From when on.
    pub from: Nanos,
    /// Until when.
    pub to: Nanos,
}

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shared {
    /// When each job began, and when it was over.
    pub times: Vec<(Nanos, Nanos)>,
    /// Where jobs lay, in the order in which they left.
    pub stays: Vec<Stay>,
    /// How often a job was given another place.
    pub moves: u32,
    /// How long the first in line waited although enough devices were free.
    pub apart: Nanos,
}

/// Gives devices to jobs, which must come in the order of their arrival. O(jobs · (jobs + devices)).
///
/// # Errors
/// A job needs no devices, or more than there are.
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

/// When a job is over that has not begun.
const NEVER: Nanos = Nanos(u64::MAX);

/// What happens: a job is over, unless that has been put off, or comes.
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
    /// By the first of their devices.
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

    /// Gives a job devices, if there is room for it.
    fn place(&mut self, job: u32, now: Nanos) -> bool {
        let Arrival { devices: count, takes, .. } = self.arrivals[job as usize];
        if count > self.free {
            return false;
        }
        let stretches = match self.room {
            DevicePool::Any => self.any(count),
            DevicePool::Neighbours => {
                self.neighbours(count).map_or(Vec::new(), |first| vec![(first, count)])
            }
            DevicePool::Remapped(delay) => {
                let found = self.neighbours(count);
                vec![(found.unwrap_or_else(|| self.close_ranks(count, now, delay)), count)]
            }
        };
        if stretches.is_empty() {
            return false;
        }
        for (first, count) in stretches {
            self.placed.insert(first, Placed { job, count, from: now });
        }
        self.free -= count;
        self.came.times[job as usize].0 = now;
        self.end(job, now + takes);
        true
    }

    /// A job is over then, which it may be told again.
    fn end(&mut self, job: u32, time: Nanos) {
        if self.ends[job as usize] == time {
            return;
        }
        self.ends[job as usize] = time;
        self.events.push(Reverse((time, Event::Over { job })));
    }

    /// What is free, as stretches from a device on: around the ring, after each job.
    fn holes(&self) -> Vec<(u32, u32)> {
        let Some((&first, _)) = self.placed.first_key_value() else {
            return vec![(0, self.devices)];
        };
        let next = self.placed.keys().copied().skip(1).chain([first + self.devices]);
        let ends = self.placed.iter().map(|(&first, placed)| first + placed.count);
        ends.zip(next).map(|(end, next)| (end % self.devices, next - end)).collect()
    }

    /// The smallest stretch that is large enough.
    fn neighbours(&self, count: u32) -> Option<u32> {
        let holes: BTreeMap<u32, u32> =
            self.holes().into_iter().filter(|hole| hole.1 > 0).collect();
        let size = |first: u32| holes.get(&first).copied().filter(|&size| size >= count);
        min_cost_contiguous_range(self.devices, count, true, size).map(|(_, first)| first)
    }

    /// The first devices that are free.
    fn any(&self, count: u32) -> Vec<(u32, u32)> {
        let mut left = count;
        let take = |(first, size): (u32, u32)| {
            let taken = left.min(size);
            left -= taken;
            (first, taken)
        };
        self.holes().into_iter().map(take).filter(|stretch| stretch.1 > 0).collect()
    }

    /// Moves jobs towards one of them until there is room behind; the first device of that. Those are
    /// moved that have fewest devices together. As many devices as are needed must be free.
    fn close_ranks(&mut self, count: u32, now: Nanos, delay: Nanos) -> u32 {
        let jobs: Vec<(u32, Placed)> =
            self.placed.iter().map(|(&first, &job)| (first, job)).collect();
        let holes = self.holes();
        let total = jobs.len();
        // From the hole behind each job: over how many that follow, of how many devices.
        let ways = (0..total).filter_map(|start| {
            let (mut room, mut moved) = (0, 0);
            (0..total).find_map(|over| {
                room += holes[(start + over) % total].1;
                let found = (room >= count).then_some((moved, over, start));
                moved += jobs[(start + over + 1) % total].1.count;
                found
            })
        });
        let (_, over, start) = ways.min().expect("as many are free");
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
