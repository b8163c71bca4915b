//! Device memory: quotas of clients, placement of buffers, and spilling to host memory.
//!
//! A client may hold as much of a device as the device has, as if it were the only client; more is
//! an error at once, independent of other clients. All clients together may oversubscribe a device:
//! before a command is dispatched, its buffers are swapped in, and the least recently used idle
//! buffers are evicted (spilled) to host memory until the rest fits. So a client waits for copies
//! instead of failing, and, since all idle buffers can be spilled, never for another client to free
//! memory. Runs of whole programs reserve their memory when they begin and wait for none
//! afterwards.
//!
//! Source: PATHWAYS §4.6 (back-pressure when memory is taken by others' buffers). Differs from the
//! paper: 1. It stalls a computation until memory is free; here idle buffers of others are evicted.

mod footprint;
mod host;
mod quota;

use std::borrow::Cow;
use std::sync::Arc;

use base::{BufferId, ClientId, DeviceId, ExecutableId, HostId};
use ir::ArraySpec;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use topology::Device;

use crate::programs::{Dataflow, Executable, ExecutableForm};
use crate::submissions::Out;
pub(crate) use footprint::ShardMemory;
use footprint::{Footprint, ResultSource};
use host::{HostMemory, MemoryRoom};
use protocol::Command;
use protocol::HostInfo;
pub(crate) use quota::{Charge, Quota};

/// Index of the size of temporaries in a compiler's memory statistics.
const TEMPORARIES: usize = 4;

/// Location of a physical or virtual device.
#[derive(Debug, Clone, Copy)]
struct Place {
    host: HostId,
    physical: DeviceId,
}

/// Memory that a client's segmented runs may need; launches of others can come between their
/// segments.
#[derive(Debug, Default)]
struct Promise {
    /// Segmented runs that are not fully dispatched.
    runs: u32,
    /// The maximum that one of them needs; at most one of a client is in progress on a host.
    needs: FxHashMap<DeviceId, u64>,
}

/// Memory footprints of commands.
#[derive(Debug, Default)]
struct Footprints {
    /// The memory kind that is accounted on each host, if any.
    kinds: Vec<Option<Arc<str>>>,
    places: FxHashMap<DeviceId, Place>,
    programs: FxHashMap<ExecutableId, FxHashMap<HostId, Footprint>>,
}

impl Footprints {
    /// Returns the shards of an array on accounted hosts, with their host and position.
    fn placed(&self, spec: &ArraySpec) -> impl Iterator<Item = (HostId, u32, ShardMemory)> {
        let devices = spec.sharding.devices.iter().enumerate();
        devices.filter_map(|(position, device)| {
            let place = self.places.get(device)?;
            let counted = self.kinds[place.host.0 as usize].as_ref()?;
            let is_counted = spec.sharding.memory.as_ref().is_none_or(|kind| kind == counted);
            let bytes = spec.shard_bytes(position).0;
            let shard = ShardMemory { device: place.physical, bytes };
            is_counted.then_some((place.host, position as u32, shard))
        })
    }

    fn on_host(&self, host: HostId, spec: &ArraySpec) -> SmallVec<[ShardMemory; 4]> {
        self.placed(spec).filter(|placed| placed.0 == host).map(|placed| placed.2).collect()
    }

    /// Returns the footprint of a command on a host.
    fn of(&self, host: HostId, command: &Command) -> Cow<'_, Footprint> {
        let making = |specs: &[Arc<ArraySpec>]| {
            Footprint::making(specs.iter().map(|spec| self.on_host(host, spec)))
        };
        match command {
            Command::Launch { executable, .. } | Command::RunProgram { executable, .. } => {
                let hosts = self.programs.get(executable);
                match hosts.and_then(|hosts| hosts.get(&host)) {
                    Some(known) => Cow::Borrowed(known),
                    None => Cow::default(),
                }
            }
            Command::RunExchange { results, .. } | Command::RunColocated { results, .. } => {
                Cow::Owned(making(results))
            }
            Command::Collective { made, .. } | Command::RowExchange { made, .. } => {
                let first = footprint::first_made(command).unwrap_or(BufferId(0));
                let made = made.iter().flat_map(|group| &group.values).map(|value| {
                    ((value.buffer.0 - first.0) as u32, self.on_host(host, &value.spec))
                });
                Cow::Owned(Footprint::making_at(made))
            }
            Command::Put { spec, .. }
            | Command::Copy { spec, .. }
            | Command::Bitcast { spec, .. }
            | Command::Receive { spec, .. } => Cow::Owned(making(std::slice::from_ref(spec))),
            _ => Cow::default(),
        }
    }

    /// Returns the footprint of a run of a program on each host.
    fn of_program(&self, executable: ExecutableId) -> impl Iterator<Item = &Footprint> {
        self.programs.get(&executable).into_iter().flat_map(|hosts| hosts.values())
    }
}

/// Memory of all devices.
#[derive(Debug, Default)]
pub(crate) struct DeviceMemory {
    hosts: Vec<HostMemory>,
    footprints: Footprints,
    promises: FxHashMap<ClientId, Promise>,
}

impl DeviceMemory {
    /// Adds a device; its capacity is known once its host joins.
    pub fn add_device(&mut self, device: &Device) {
        let hosts = self.hosts.len().max(device.host.0 as usize + 1);
        self.hosts.resize_with(hosts, HostMemory::default);
        self.footprints.kinds.resize_with(hosts, || None);
        let place = Place { host: device.host, physical: device.id };
        self.footprints.places.insert(device.id, place);
    }

    /// Registers a virtual device as an alias of a physical one.
    pub fn place(&mut self, alias: DeviceId, device: DeviceId) {
        let places = &mut self.footprints.places;
        if let Some(&place) = places.get(&device) {
            places.insert(alias, place);
        }
    }

    /// A host has joined, with nothing in its memory.
    pub fn join(&mut self, host: HostId, info: &HostInfo) {
        let memory = &mut self.hosts[host.0 as usize];
        *memory = HostMemory::default();
        memory.capacity = info.device_memory;
        let counted = info.memories.first().filter(|_| info.device_memory.is_some());
        self.footprints.kinds[host.0 as usize] = counted.cloned();
    }

    /// A host is lost, with everything in its memory.
    pub fn lose(&mut self, host: HostId) {
        self.hosts[host.0 as usize] = HostMemory::default();
        self.footprints.kinds[host.0 as usize] = None;
        self.footprints.programs.retain(|_, hosts| {
            hosts.remove(&host);
            !hosts.is_empty()
        });
    }

    /// Returns whether the capacity of any device is known. Nothing is accounted otherwise.
    pub fn is_limited(&self) -> bool {
        self.hosts.iter().any(|host| host.capacity.is_some())
    }

    /// Returns the capacity of a device in bytes; `None` if it is unknown.
    pub fn capacity(&self, device: DeviceId) -> Option<u64> {
        self.hosts[self.footprints.places.get(&device)?.host.0 as usize].capacity
    }

    /// Returns, in bytes, the capacity of each device of a host, the memory in use on all of them,
    /// and the memory spilled to the host; `None` if the capacity is unknown.
    pub fn usage(&self, host: HostId) -> Option<(u64, u64, u64)> {
        let memory = &self.hosts[host.0 as usize];
        memory.capacity.map(|capacity| (capacity, memory.in_use(), memory.spilled()))
    }

    /// Returns the shards of an array on accounted hosts, with their positions.
    pub fn shards(&self, spec: &ArraySpec) -> impl Iterator<Item = (u32, ShardMemory)> {
        self.footprints.placed(spec).map(|(_, position, shard)| (position, shard))
    }

    /// Returns whether memory on a host suffices for a command, after eviction if necessary.
    pub fn fits(&self, host: HostId, command: &Command) -> bool {
        let memory = &self.hosts[host.0 as usize];
        memory.capacity.is_none()
            || memory.room_for(command, &self.footprints.of(host, command)).is_some()
    }

    /// Dispatches a command to a host, after the spills and restores that it requires.
    pub fn on_dispatch(&mut self, host: HostId, command: Command, out: &mut Out) {
        let memory = &mut self.hosts[host.0 as usize];
        if memory.capacity.is_some() {
            let footprint = self.footprints.of(host, &command);
            let room = memory.room_for(&command, &footprint).unwrap_or_default();
            memory.apply(&command, &footprint, &room);
            let MemoryRoom { spill, restore } = room;
            if !spill.is_empty() {
                out.push((host, Command::Spill { buffers: spill }));
            }
            if !restore.is_empty() {
                out.push((host, Command::Restore { buffers: restore }));
            }
            if let Command::FreeExecutable { executable } = command {
                self.forget(host, executable);
            }
        }
        out.push((host, command));
    }

    /// Returns the bytes that a run of a program needs on each device, besides its arguments.
    pub fn demand(&self, executable: ExecutableId) -> impl Iterator<Item = ShardMemory> {
        self.footprints.of_program(executable).flat_map(|footprint| {
            let made = footprint.made.iter().filter(|_| footprint.steps == 0);
            made.chain(&footprint.scratch).copied()
        })
    }

    /// Computes the footprints of a program and of its functions.
    pub fn learn(&mut self, executable: &Executable) {
        if !self.is_limited() {
            return;
        }
        let footprints = match &executable.form {
            ExecutableForm::Dataflow(dataflow) => {
                dataflow.functions.iter().for_each(|function| self.learn(function));
                let steps = dataflow.lowered.steps.iter();
                steps.map(|(&host, steps)| (host, self.of_run(host, dataflow, steps))).collect()
            }
            _ => {
                let hosts = executable.hosts.iter();
                hosts.map(|&host| (host, self.of_launch(host, executable))).collect()
            }
        };
        self.footprints.programs.insert(executable.id, footprints);
    }

    /// A host has unloaded a program.
    fn forget(&mut self, host: HostId, executable: ExecutableId) {
        let programs = &mut self.footprints.programs;
        if let Some(hosts) = programs.get_mut(&executable) {
            hosts.remove(&host);
            if hosts.is_empty() {
                programs.remove(&executable);
            }
        }
    }

    /// Returns whether a run may be split into segments, so that launches of others can come
    /// between. Such a run holds memory on one host while it waits for its turn on another; so that
    /// none ever waits for memory, the segmented runs of all clients must fit at once. A run that
    /// does not fit is launched on all its hosts in one step.
    pub fn begin_segmented(&mut self, client: ClientId, executable: ExecutableId) -> bool {
        if !self.is_limited() {
            return true;
        }
        let hosts = self.footprints.of_program(executable);
        let needs: Vec<ShardMemory> =
            hosts.flat_map(|footprint| footprint.needs.iter().copied()).collect();
        let fits = |shard: &ShardMemory| {
            let others = self.promises.iter().filter(|(other, _)| **other != client);
            let promised: u64 =
                others.filter_map(|(_, promise)| promise.needs.get(&shard.device)).sum();
            self.capacity(shard.device).is_none_or(|capacity| promised + shard.bytes <= capacity)
        };
        if !needs.iter().all(fits) {
            return false;
        }
        let promise = self.promises.entry(client).or_default();
        promise.runs += 1;
        for shard in needs {
            let known = promise.needs.entry(shard.device).or_default();
            *known = (*known).max(shard.bytes);
        }
        true
    }

    /// The last segment of a run has been dispatched.
    pub fn end_segmented(&mut self, client: ClientId) {
        let Some(promise) = self.promises.get_mut(&client) else { return };
        promise.runs = promise.runs.saturating_sub(1);
        if promise.runs == 0 {
            self.promises.remove(&client);
        }
    }

    /// A client is gone, with all its runs.
    pub fn release(&mut self, client: ClientId) {
        self.promises.remove(&client);
    }

    fn of_launch(&self, host: HostId, executable: &Executable) -> Footprint {
        let outputs = executable.output_specs.iter();
        let mut footprint =
            Footprint::making(outputs.map(|spec| self.footprints.on_host(host, spec)));
        let memory = executable.compiled.memory.unwrap_or_default();
        let temporaries = memory[TEMPORARIES].max(0) as u64;
        let devices =
            executable.devices.iter().filter_map(|device| self.footprints.places.get(device));
        footprint.scratch = devices
            .filter(|place| place.host == host && temporaries > 0)
            .map(|place| ShardMemory { device: place.physical, bytes: temporaries })
            .collect();
        footprint.donated = executable.compiled.donated.iter().copied().collect();
        footprint
    }

    /// Symbolically executes a host's part of a program to find its peak memory.
    fn of_run(&self, host: HostId, dataflow: &Dataflow, steps: &[Command]) -> Footprint {
        let mut paper = HostMemory::default();
        let none = MemoryRoom::default();
        let mut arguments = Vec::new();
        for (index, spec) in dataflow.inputs.iter().enumerate() {
            let shards = self.footprints.on_host(host, spec);
            arguments.push(paper.add(BufferId(index as u64), &shards));
        }
        let held = paper.used().clone();
        let mut peaks = held.clone();
        for step in steps {
            let footprint = self.footprints.of(host, step);
            for (device, adds) in paper.adds(step, &footprint) {
                let used = i128::from(paper.used().get(&device).copied().unwrap_or_default());
                let peak = peaks.entry(device).or_default();
                *peak = (*peak).max((used + adds).max(0) as u64);
            }
            paper.apply(step, &footprint, &none);
        }
        let mut footprint = Footprint {
            donated: dataflow.program.donated.iter().copied().collect(),
            steps: steps.len() as u32,
            ..Footprint::default()
        };
        for (device, peak) in peaks {
            let bytes = peak - held.get(&device).copied().unwrap_or_default();
            footprint.scratch.push(ShardMemory { device, bytes });
            footprint.needs.push(ShardMemory { device, bytes: peak });
        }
        footprint.scratch.sort_by_key(|shard| shard.device);
        let mut made = Vec::new();
        for &slot in &dataflow.lowered.results {
            let mut sources = SmallVec::new();
            for (piece, shard) in paper.pieces(BufferId(u64::from(slot))) {
                let argument = arguments.iter().enumerate().find_map(|(index, pieces)| {
                    let place = pieces.iter().position(|&known| known == piece)?;
                    Some(ResultSource::Argument(index as u32, place as u32))
                });
                let known = made.iter().position(|&known| known == piece);
                sources.push(argument.unwrap_or_else(|| {
                    ResultSource::Made(known.unwrap_or_else(|| {
                        made.push(piece);
                        footprint.made.push(shard);
                        made.len() - 1
                    }) as u32)
                }));
            }
            let offset = slot - dataflow.inputs.len() as u32;
            footprint.results.push((offset, sources));
        }
        footprint
    }
}
