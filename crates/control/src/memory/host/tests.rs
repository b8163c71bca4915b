//! Dispatched commands, executed by a host that knows nothing but those commands.

use std::collections::BTreeMap;

use base::{ClientId, ExecutableId};
use proptest::prelude::*;
use protocol::{Acknowledge, AssembledShard};
use smallvec::smallvec;

use super::*;

const CAPACITY: u64 = 100;
const DEVICES: u32 = 2;

/// Model of a real host: arrays, the memory that each names, and where it resides.
#[derive(Default)]
struct Host {
    arrays: BTreeMap<BufferId, Vec<usize>>,
    /// Device, bytes, and whether it is resident there; `None` once deleted.
    memory: Vec<Option<(u32, u64, bool)>>,
}

impl Host {
    fn make(&mut self, buffer: BufferId, shards: &[ShardMemory]) {
        let first = self.memory.len();
        self.memory.extend(shards.iter().map(|shard| Some((shard.device.0, shard.bytes, true))));
        self.arrays.insert(buffer, (first..self.memory.len()).collect());
    }

    fn used(&self, device: u32) -> u64 {
        let named: std::collections::BTreeSet<usize> =
            self.arrays.values().flatten().copied().collect();
        let there = named.iter().filter_map(|&piece| self.memory[piece]);
        there.filter(|piece| piece.0 == device && piece.2).map(|piece| piece.1).sum()
    }

    /// Spills or restores arrays; all arrays that share memory with one of them must be listed.
    fn move_all(&mut self, buffers: &[BufferId], to_device: bool) {
        for buffer in buffers {
            for &piece in &self.arrays[buffer].clone() {
                let Some(memory) = &mut self.memory[piece] else { continue };
                memory.2 = to_device;
                for (other, pieces) in &self.arrays {
                    assert!(!pieces.contains(&piece) || buffers.contains(other), "{other:?}");
                }
            }
        }
    }

    fn is_usable(&self, buffer: BufferId) -> bool {
        let pieces = self.arrays.get(&buffer).into_iter().flatten();
        pieces.into_iter().all(|&piece| self.memory[piece].is_none_or(|memory| memory.2))
    }

    /// Returns the command of a step and its footprint; `None` if there are no arrays for it.
    fn command(&self, step: &Step, first: BufferId) -> Option<(Command, Footprint)> {
        let live: Vec<BufferId> = self.arrays.keys().copied().collect();
        let pick = |which: usize| live.get(which % live.len().max(1)).copied();
        let mut footprint = Footprint::default();
        let command = match step {
            Step::Put(a, b) => {
                let shards = shards(*a, *b).into_iter().collect();
                footprint = Footprint::making(std::iter::once(shards));
                Command::Bitcast { source: BufferId(0), buffer: first, spec: any_spec() }
            }
            Step::Gather(from, shard) => {
                let source = pick(*from)?;
                let shard = shard % self.arrays[&source].len().max(1) as u32;
                let shards = vec![AssembledShard { position: 0, source, shard }];
                Command::AssembleShards { buffer: first, spec: any_spec(), shards }
            }
            Step::Launch(args, donates, scratch) => {
                let args: Vec<_> = args.iter().filter_map(|&arg| pick(arg)).collect();
                let like: SmallVec<[ShardMemory; 4]> = self.arrays[args.first()?]
                    .iter()
                    .filter_map(|&piece| self.memory[piece])
                    .map(|(device, bytes, _)| ShardMemory { device: DeviceId(device), bytes })
                    .collect();
                footprint = Footprint::making(std::iter::once(like));
                footprint.scratch = vec![ShardMemory { device: DeviceId(0), bytes: *scratch }];
                footprint.donated = donates.then_some(0).into_iter().collect();
                launch(&args, first)
            }
            Step::Free(which) => Command::Free { buffers: vec![pick(*which)?] },
            Step::Delete(which) => Command::Delete { buffers: vec![pick(*which)?] },
            Step::Send(which) => {
                Command::Send { source: pick(*which)?, pieces: vec![], client: ClientId(1) }
            }
        };
        Some((command, footprint))
    }

    /// Executes a command, whose results are numbered from `first`.
    fn execute(&mut self, command: &Command, footprint: &Footprint, first: BufferId) {
        match command {
            Command::AssembleShards { buffer, shards, .. } => {
                let AssembledShard { source, shard, .. } = shards[0];
                let piece = self.arrays[&source].get(shard as usize).copied();
                self.arrays.insert(*buffer, piece.into_iter().collect());
            }
            Command::Launch { args, .. } => {
                if !footprint.donated.is_empty() {
                    self.delete(args[0]);
                }
                self.make(first, &footprint.made);
            }
            Command::Free { buffers } => drop(self.arrays.remove(&buffers[0])),
            Command::Delete { buffers } => self.delete(buffers[0]),
            Command::Send { .. } => {}
            _ => self.make(first, &footprint.made),
        }
    }

    fn delete(&mut self, buffer: BufferId) {
        for &piece in &self.arrays[&buffer].clone() {
            self.memory[piece] = None;
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Makes an array with these numbers of bytes on each device.
    Put(u64, u64),
    /// Makes an array that shares one shard of an array.
    Gather(usize, u32),
    /// Runs on arrays, the first donated or not; the result has the size of the first.
    Launch(Vec<usize>, bool, u64),
    Free(usize),
    Delete(usize),
    Send(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0..32_usize;
    prop_oneof![
        4 => (0..40_u64, 0..40_u64).prop_map(|(a, b)| Step::Put(a, b)),
        2 => (which.clone(), 0..DEVICES).prop_map(|(a, d)| Step::Gather(a, d)),
        4 => (prop::collection::vec(which.clone(), 1..3), any::<bool>(), 0..20_u64)
            .prop_map(|(args, donates, scratch)| Step::Launch(args, donates, scratch)),
        2 => which.clone().prop_map(Step::Free),
        1 => which.clone().prop_map(Step::Delete),
        2 => which.prop_map(Step::Send),
    ]
}

fn shards(a: u64, b: u64) -> Vec<ShardMemory> {
    let shard = |(device, bytes)| ShardMemory { device: DeviceId(device), bytes };
    [(0, a), (1, b)].into_iter().map(shard).collect()
}

fn launch(args: &[BufferId], first_result: BufferId) -> Command {
    Command::Launch {
        sequence: 0,
        previous: 0,
        acknowledge: Acknowledge::No,
        executable: ExecutableId(1),
        args: args.iter().copied().collect(),
        first_result,
        results: 1,
        keep: smallvec![],
        completion: None,
        client: ClientId(1),
    }
}

proptest! {
    #[test]
    fn nothing_is_used_that_is_not_there_and_nothing_overflows(
        steps in prop::collection::vec(step(), 1..80)
    ) {
        let mut memory = HostMemory { capacity: Some(CAPACITY), ..HostMemory::default() };
        let mut host = Host::default();
        for (next, step) in (1_u64..).zip(steps) {
            let first = BufferId(next);
            let Some((command, footprint)) = host.command(&step, first) else { continue };
            let Some(room) = memory.room_for(&command, &footprint) else {
                continue; // it needs more at once than the device has
            };
            memory.apply(&command, &footprint, &room);
            host.move_all(&room.spill, false);
            host.move_all(&room.restore, true);
            for buffer in footprint::uses(&command) {
                prop_assert!(host.is_usable(buffer), "{step:?} uses {buffer:?}");
            }
            let scratch: u64 = footprint.scratch.iter().map(|shard| shard.bytes).sum();
            host.execute(&command, &footprint, first);
            prop_assert!(host.used(0) + scratch <= CAPACITY);
            for device in 0..DEVICES {
                prop_assert!(host.used(device) <= CAPACITY);
            }
            let used: u64 = (0..DEVICES).map(|device| host.used(device)).sum();
            prop_assert_eq!(memory.in_use(), used);
        }
        let all: Vec<BufferId> = host.arrays.keys().copied().collect();
        memory.apply(&Command::Free { buffers: all }, &Footprint::default(), &MemoryRoom::default());
        prop_assert_eq!((memory.in_use(), memory.spilled()), (0, 0));
    }
}

fn any_spec() -> std::sync::Arc<ir::ArraySpec> {
    std::sync::Arc::new(ir::ArraySpec {
        dtype: ir::DType::U8,
        dims: ir::Dims::new(),
        sharding: ir::Sharding::single(DeviceId(0), None),
    })
}

#[test]
fn a_run_that_has_begun_keeps_its_memory() {
    let mut memory = HostMemory { capacity: Some(CAPACITY), ..HostMemory::default() };
    let arg = BufferId(1);
    memory.add(arg, &shards(30, 0));
    let of_run = Footprint {
        scratch: shards(40, 0),
        results: vec![(1, smallvec![ResultSource::Made(0)])],
        made: shards(10, 0)[..1].to_vec(),
        steps: 4,
        ..Footprint::default()
    };
    let run = |steps| Command::RunProgram {
        sequence: 0,
        previous: 0,
        acknowledge: Acknowledge::No,
        executable: ExecutableId(1),
        steps,
        args: [arg].into(),
        first_buffer: BufferId(10),
        first_tag: base::TransferTag(0),
        completion: None,
        plan: 0,
        client: ClientId(1),
    };
    let none = MemoryRoom::default();
    memory.apply(&run(0..2), &of_run, &none);
    assert_eq!(memory.in_use(), 70);
    let large = Footprint::making(std::iter::once(shards(31, 0).into_iter().collect()));
    let put = Command::Bitcast { source: BufferId(0), buffer: BufferId(20), spec: any_spec() };
    assert_eq!(memory.room_for(&put, &large), None, "it waits for the end of the run");
    memory.apply(&run(2..4), &of_run, &none);
    assert_eq!(memory.in_use(), 40);
    assert_eq!(memory.room_for(&put, &large), Some(none));
}
