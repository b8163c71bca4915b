//! Estimates the makespan of a placement, with list scheduling by urgency on each device.
//!
//! Transfers take time but do not contend for links; simulate the placement to account for contention.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::{BitsPerSecond, Bytes, Nanos};
use ir::CollectiveKind;

use crate::balance::{Balanced, OpShard, ShardCollective};

/// The devices that shards are placed on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeviceModel {
    /// Number of devices.
    pub devices: u32,
    /// Largest distance at which devices communicate directly, in devices on a ring.
    pub reach: u32,
    /// Rate between two devices.
    pub rate: BitsPerSecond,
    /// Servers, and the rate between them, if there are any.
    pub servers: Option<Servers>,
    /// Latency of a transfer.
    pub latency: Nanos,
    /// Memory of each device.
    pub memory: Bytes,
}

/// Servers: devices with a faster interconnect among them than to the rest.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Servers {
    /// Devices per server.
    pub devices: u32,
    /// Rate of a server to others.
    pub rate: BitsPerSecond,
}

impl DeviceModel {
    /// Time of a transfer of `size` bytes between devices of one server, and of different servers.
    pub fn times(&self, size: Bytes) -> [Nanos; 2] {
        let time =
            |rate: BitsPerSecond| self.latency + Nanos((size.0 as f64 * 8e9 / rate.0) as u64);
        [time(self.rate), time(self.between())]
    }

    /// Returns whether two devices are on different servers.
    pub fn is_between(&self, one: u32, other: u32) -> bool {
        self.servers.is_some_and(|servers| one / servers.devices != other / servers.devices)
    }

    fn between(&self) -> BitsPerSecond {
        let of_servers = self.servers.map_or(self.rate.0, |servers| servers.rate.0);
        BitsPerSecond(self.rate.0.min(of_servers))
    }

    /// Time of a ring collective among `count` devices.
    fn meeting_time(&self, kind: &CollectiveKind, size: Bytes, count: u32) -> Nanos {
        let is_one = self.servers.is_none_or(|servers| count <= servers.devices);
        let rate = if is_one { self.rate } else { self.between() };
        let moved = kind.ring_load(count) * size.0 as f64 * 8e9 / rate.0;
        Nanos(u64::from(kind.rounds(count)) * self.latency.0 + moved as u64)
    }

    /// Time of a shard: to compute, or of its collective.
    pub(crate) fn shard_time(&self, shard: &OpShard) -> Nanos {
        let Some(ShardCollective { kind, size, receivers }) = &shard.meeting else {
            return shard.time;
        };
        let count = receivers.1.max(shard.after.len() as u32).min(self.devices);
        self.meeting_time(kind, *size, count)
    }

    /// Distance of two devices on the ring, in the shorter direction.
    pub fn distance(&self, one: u32, other: u32) -> u32 {
        let up = (other + self.devices - one) % self.devices;
        up.min(self.devices - up)
    }
}

/// Estimates makespans repeatedly, and reuses its memory (discrete-event simulation).
pub(crate) struct Estimate<'a> {
    shards: &'a Balanced,
    room: &'a DeviceModel,
    /// By shard, its time: to compute, or of its collective.
    times: Vec<u64>,
    /// By shard, its dependents, and the transfer times within a server and between servers.
    next: Vec<Vec<(u32, [u64; 2])>>,
    /// By shard, its priority; initially its longest chain to the end of the step, without contention.
    pub urgencies: Vec<u64>,
    waits: Vec<u32>,
    // Working memory.
    left: Vec<u32>,
    from: Vec<u64>,
    ready: Vec<BinaryHeap<(u64, Reverse<u32>)>>,
    is_busy: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, bool, u32)>>,
}

impl<'a> Estimate<'a> {
    pub fn new(shards: &'a Balanced, room: &'a DeviceModel) -> Self {
        let count = shards.shards.len();
        let mut next = vec![Vec::new(); count];
        for (number, shard) in (0..).zip(&shards.shards) {
            for &(from, size) in &shard.after {
                let meets =
                    shard.meeting.is_some() || shards.shards[from as usize].meeting.is_some();
                let times = if meets { [0; 2] } else { room.times(size).map(|time| time.0) };
                next[from as usize].push((number, times));
            }
        }
        let times: Vec<u64> = shards.shards.iter().map(|shard| room.shard_time(shard).0).collect();
        let mut levels = vec![0; count];
        for number in (0..count).rev() {
            let after = next[number].iter().map(|&(other, _)| levels[other as usize]).max();
            levels[number] = times[number] + after.unwrap_or(0);
        }
        Self {
            shards,
            room,
            times,
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

    /// Returns the makespan. O((shards + edges) · log shards).
    ///
    /// # Arguments
    /// - `devices`: the device of each shard.
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
                if self.shards.shards[shard as usize].meeting.is_some() {
                    if arrives {
                        let time = if self.is_apart(shard, devices) {
                            self.times[shard as usize]
                        } else {
                            0
                        };
                        self.events.push(Reverse((now + time, false, shard)));
                    } else {
                        self.done(shard, now, devices);
                    }
                    continue;
                }
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
                let done = now + self.times[shard as usize];
                self.events.push(Reverse((done, false, shard)));
            }
        }
        end
    }

    /// Returns whether the participants of a collective are on several devices.
    fn is_apart(&self, number: u32, devices: &[u32]) -> bool {
        let shard = &self.shards.shards[number as usize];
        let (first, count) = shard.meeting.as_ref().map_or((0, 0), |meeting| meeting.receivers);
        let here = devices[first as usize];
        let is_other = |shard: u32| devices[shard as usize] != here;
        (first..first + count).any(is_other) || shard.after.iter().any(|&(from, _)| is_other(from))
    }

    fn done(&mut self, shard: u32, now: u64, devices: &[u32]) {
        for &(other, times) in &self.next[shard as usize] {
            let (here, there) = (devices[shard as usize], devices[other as usize]);
            let time = times[usize::from(self.room.is_between(here, there))];
            let came = if here == there { now } else { now + time };
            let from = &mut self.from[other as usize];
            *from = (*from).max(came);
            self.left[other as usize] -= 1;
            if self.left[other as usize] == 0 {
                self.events.push(Reverse((*from, true, other)));
            }
        }
    }
}
