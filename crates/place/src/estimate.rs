//! When shards are done, if each lies where it does and devices take what is most urgent first.
//!
//! What goes between devices takes its time, but nothing waits for it to leave: whoever wants that too
//! carries the placement out.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::{BitsPerSecond, Bytes, Nanos};

use crate::balance::Balanced;

/// Devices that shards are placed on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Room {
    /// How many there are.
    pub devices: u32,
    /// How far from each other those may be that send to each other, in devices on a ring.
    pub reach: u32,
    /// What goes between two.
    pub rate: BitsPerSecond,
    /// What it takes besides.
    pub latency: Nanos,
    /// What each can hold.
    pub memory: Bytes,
}

impl Room {
    /// What so much takes from one device to another.
    pub fn time(&self, size: Bytes) -> Nanos {
        self.latency + Nanos((size.0 as f64 * 8e9 / self.rate.0) as u64)
    }

    /// Devices from one to another, the shorter way around.
    pub fn distance(&self, one: u32, other: u32) -> u32 {
        let up = (other + self.devices - one) % self.devices;
        up.min(self.devices - up)
    }
}

/// Finds when all shards are done, again and again.
pub(crate) struct Estimate<'a> {
    shards: &'a Balanced,
    room: &'a Room,
    /// Of each shard, those that need it, and the time that takes between devices.
    next: Vec<Vec<(u32, u64)>>,
    /// Of each shard; at first what there is from its beginning to the end of the step, if nothing waits.
    pub urgencies: Vec<u64>,
    waits: Vec<u32>,
    // What is kept for the next time.
    left: Vec<u32>,
    from: Vec<u64>,
    ready: Vec<BinaryHeap<(u64, Reverse<u32>)>>,
    is_busy: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, bool, u32)>>,
}

impl<'a> Estimate<'a> {
    pub fn new(shards: &'a Balanced, room: &'a Room) -> Self {
        let count = shards.shards.len();
        let mut next = vec![Vec::new(); count];
        for (number, shard) in (0..).zip(&shards.shards) {
            for &(from, size) in &shard.after {
                next[from as usize].push((number, room.time(size).0));
            }
        }
        let mut levels = vec![0; count];
        for number in (0..count).rev() {
            let after = next[number].iter().map(|&(other, _)| levels[other as usize]).max();
            levels[number] = shards.shards[number].time.0 + after.unwrap_or(0);
        }
        Self {
            shards,
            room,
            next,
            urgencies: levels,
            waits: shards.shards.iter().map(|shard| shard.after.len() as u32).collect(),
            left: Vec::new(),
            from: Vec::new(),
            ready: vec![BinaryHeap::new(); room.devices as usize],
            is_busy: Vec::new(),
            events: BinaryHeap::new(),
        }
    }

    /// When the last shard is done. O((shards + edges) · log shards).
    ///
    /// # Arguments
    /// - `devices`: of each shard.
    pub fn end(&mut self, devices: &[u32]) -> u64 {
        self.left.clone_from(&self.waits);
        self.from.clear();
        self.from.resize(devices.len(), 0);
        self.is_busy.clear();
        self.is_busy.resize(self.room.devices as usize, false);
        for (number, &waits) in self.waits.iter().enumerate() {
            if waits == 0 {
                self.events.push(Reverse((0, true, number as u32)));
            }
        }
        let mut end = 0;
        while let Some(Reverse((now, _, _))) = self.events.peek().copied() {
            let mut open: Vec<u32> = Vec::new();
            while let Some(&Reverse((time, arrives, shard))) = self.events.peek()
                && time == now
            {
                self.events.pop();
                let device = devices[shard as usize];
                open.push(device);
                if arrives {
                    let urgency = self.urgencies[shard as usize];
                    self.ready[device as usize].push((urgency, Reverse(shard)));
                } else {
                    end = now;
                    self.is_busy[device as usize] = false;
                    self.done(shard, now, devices);
                }
            }
            for device in open {
                if self.is_busy[device as usize] {
                    continue;
                }
                let Some((_, Reverse(shard))) = self.ready[device as usize].pop() else { continue };
                self.is_busy[device as usize] = true;
                let done = now + self.shards.shards[shard as usize].time.0;
                self.events.push(Reverse((done, false, shard)));
            }
        }
        end
    }

    fn done(&mut self, shard: u32, now: u64, devices: &[u32]) {
        for &(other, time) in &self.next[shard as usize] {
            let stays = devices[shard as usize] == devices[other as usize];
            let came = if stays { now } else { now + time };
            let from = &mut self.from[other as usize];
            *from = (*from).max(came);
            self.left[other as usize] -= 1;
            if self.left[other as usize] == 0 {
                self.events.push(Reverse((*from, true, other)));
            }
        }
    }
}
