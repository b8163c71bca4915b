//! A model of the memory of one host's devices.
//!
//! A host allocates, frees, spills and restores only on command, so its memory contents follow from
//! the commands dispatched to it.

use base::{BufferId, DeviceId};
use protocol::{AssembledShard, Command};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::footprint::{self, Footprint, ResultSource, ShardMemory};

type PieceId = u64;
type Pieces = SmallVec<[PieceId; 2]>;

/// Memory on one device that is named by one or several buffers.
#[derive(Debug)]
struct ShardPiece {
    shard: ShardMemory,
    names: SmallVec<[BufferId; 2]>,
    /// Whether it is spilled to host memory.
    is_spilled: bool,
    /// Number of runs of whole programs in progress that pin it to the device.
    pins: u32,
}

#[derive(Debug)]
struct Held {
    pieces: Pieces,
    /// Logical time of its last use, for LRU eviction.
    used: u64,
}

/// Spills and restores that must precede a command.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryRoom {
    /// Buffers to evict to host memory.
    pub spill: Vec<BufferId>,
    /// Buffers to swap in.
    pub restore: Vec<BufferId>,
}

/// Memory of one host's devices.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    /// Capacity of each device in bytes; `None` if it is unknown.
    pub capacity: Option<u64>,
    /// Bytes in use on each device: resident memory and reservations of runs in progress.
    used: FxHashMap<DeviceId, u64>,
    buffers: FxHashMap<BufferId, Held>,
    pieces: FxHashMap<PieceId, ShardPiece>,
    next_piece: PieceId,
    /// Arguments of each run of a whole program in progress, by its first buffer.
    runs: FxHashMap<BufferId, Vec<Pieces>>,
    clock: u64,
    spilled: u64,
}

impl HostMemory {
    /// Returns the bytes in use, over all its devices.
    pub fn in_use(&self) -> u64 {
        self.used.values().sum()
    }

    /// Returns the bytes that are spilled to host memory.
    pub fn spilled(&self) -> u64 {
        self.spilled
    }

    /// Returns the bytes in use on each device.
    pub fn used(&self) -> &FxHashMap<DeviceId, u64> {
        &self.used
    }

    /// Adds a buffer that exists before any command is dispatched.
    pub fn add(&mut self, buffer: BufferId, shards: &[ShardMemory]) -> Vec<PieceId> {
        let pieces: Pieces = shards.iter().map(|&shard| self.new_piece(shard)).collect();
        self.insert(buffer, pieces.clone());
        pieces.to_vec()
    }

    /// Returns the memory of a buffer.
    pub fn pieces(&self, buffer: BufferId) -> impl Iterator<Item = (PieceId, ShardMemory)> {
        self.pieces_of(&[buffer]).into_iter().map(|id| (id, self.pieces[&id].shard))
    }

    /// Returns the spills and restores that a command requires; `None` if it must wait for a run in
    /// progress to end.
    pub fn room_for(&self, command: &Command, footprint: &Footprint) -> Option<MemoryRoom> {
        let mut room = MemoryRoom::default();
        let mut needed: FxHashSet<BufferId> = FxHashSet::default();
        let mut wanted = self.adds(command, footprint);
        for buffer in footprint::uses(command) {
            if !self.buffers.contains_key(&buffer) || !needed.insert(buffer) {
                continue;
            }
            let pieces = self.pieces_of(&[buffer]);
            if !pieces.iter().any(|id| self.pieces[id].is_spilled) {
                continue;
            }
            let group = self.group(buffer);
            for piece in self.pieces_of(&group) {
                let shard = self.pieces[&piece].shard;
                *wanted.entry(shard.device).or_default() += i128::from(shard.bytes);
            }
            needed.extend(&group);
            room.restore.extend(group);
        }
        let capacity = self.capacity.map_or(i128::MAX, i128::from);
        let mut missing: FxHashMap<DeviceId, i128> = FxHashMap::default();
        for (device, bytes) in wanted {
            let used = self.used.get(&device).copied().unwrap_or_default();
            let over = i128::from(used) + bytes - capacity;
            if bytes > 0 && over > 0 {
                missing.insert(device, over);
            }
        }
        if !missing.is_empty() {
            room.spill = self.choose(&mut missing, &needed);
        }
        missing.values().all(|&bytes| bytes <= 0).then_some(room)
    }

    /// Applies a dispatched command, after its spills and restores.
    pub fn apply(&mut self, command: &Command, footprint: &Footprint, room: &MemoryRoom) {
        room.spill.iter().for_each(|&buffer| self.move_out(buffer));
        room.restore.iter().for_each(|&buffer| self.move_in(buffer));
        self.clock += 1;
        for buffer in footprint::uses(command) {
            if let Some(held) = self.buffers.get_mut(&buffer) {
                held.used = self.clock;
            }
        }
        match command {
            Command::Free { buffers } => buffers.iter().for_each(|buffer| self.free(*buffer)),
            Command::Delete { buffers } => buffers.iter().for_each(|buffer| self.delete(*buffer)),
            Command::AssembleShards { buffer, shards, .. } => {
                let piece = |&AssembledShard { source, shard: index, .. }: &AssembledShard| {
                    self.buffers.get(&source)?.pieces.get(index as usize).copied()
                };
                let pieces = shards.iter().filter_map(piece).collect();
                self.insert(*buffer, pieces);
            }
            Command::Launch { args, keep, first_result, .. } => {
                let args: Vec<Pieces> = args.iter().map(|arg| self.pieces_of(&[*arg])).collect();
                for &index in footprint.donated.iter().filter(|index| !keep.contains(index)) {
                    self.destroy(args.get(index as usize));
                }
                self.make(*first_result, footprint, &args);
            }
            Command::RunProgram { steps, args, first_buffer, .. } => {
                if steps.start == 0 {
                    self.begin_run(*first_buffer, footprint, args);
                }
                if steps.end == footprint.steps {
                    self.end_run(*first_buffer, footprint);
                }
            }
            _ => {
                if let Some(first) = footprint::first_made(command) {
                    self.make(first, footprint, &[]);
                }
            }
        }
    }

    /// Returns the bytes that a command allocates on each device, less donated memory that it
    /// reuses.
    pub fn adds(&self, command: &Command, footprint: &Footprint) -> FxHashMap<DeviceId, i128> {
        let mut adds: FxHashMap<DeviceId, i128> = FxHashMap::default();
        if matches!(command, Command::RunProgram { steps, .. } if steps.start > 0) {
            return adds;
        }
        let is_run = footprint.steps > 0;
        let made = footprint.made.iter().filter(|_| !is_run);
        for shard in made.chain(&footprint.scratch) {
            *adds.entry(shard.device).or_default() += i128::from(shard.bytes);
        }
        if let Command::Launch { args, keep, .. } = command {
            for &index in footprint.donated.iter().filter(|index| !keep.contains(index)) {
                let Some(&arg) = args.get(index as usize) else { continue };
                for piece in self.pieces_of(&[arg]) {
                    let shard = self.pieces[&piece].shard;
                    *adds.entry(shard.device).or_default() -= i128::from(shard.bytes);
                }
            }
        }
        adds
    }

    /// Chooses buffers to evict until nothing is missing: the least recently used first.
    fn choose(
        &self,
        missing: &mut FxHashMap<DeviceId, i128>,
        needed: &FxHashSet<BufferId>,
    ) -> Vec<BufferId> {
        let mut chosen = Vec::new();
        let mut idle: Vec<(u64, BufferId)> =
            self.buffers.iter().map(|(&buffer, held)| (held.used, buffer)).collect();
        idle.sort_unstable();
        for (_, buffer) in idle {
            if missing.values().all(|&bytes| bytes <= 0) {
                break;
            }
            if chosen.contains(&buffer) {
                continue;
            }
            let group = self.group(buffer);
            let pieces = self.pieces_of(&group);
            let pieces = || pieces.iter().map(|id| &self.pieces[id]);
            let helps = |piece: &ShardPiece| {
                let wanted = missing.get(&piece.shard.device);
                piece.shard.bytes > 0 && wanted.is_some_and(|&bytes| bytes > 0)
            };
            let stays = pieces().any(|piece| piece.pins > 0 || piece.is_spilled)
                || group.iter().any(|member| needed.contains(member));
            if stays || !pieces().any(helps) {
                continue;
            }
            for piece in pieces() {
                if let Some(missing) = missing.get_mut(&piece.shard.device) {
                    *missing -= i128::from(piece.shard.bytes);
                }
            }
            chosen.extend(group);
        }
        chosen
    }

    /// Returns the buffers that share memory with `buffer`, directly or through others, and itself;
    /// sorted.
    fn group(&self, buffer: BufferId) -> Vec<BufferId> {
        let mut group = vec![buffer];
        let mut next = 0;
        while let Some(&member) = group.get(next) {
            next += 1;
            for piece in self.pieces_of(&[member]) {
                for &name in &self.pieces[&piece].names {
                    if !group.contains(&name) {
                        group.push(name);
                    }
                }
            }
        }
        group.sort_unstable();
        group
    }

    /// Returns the live memory of buffers, each piece once.
    fn pieces_of(&self, buffers: &[BufferId]) -> Pieces {
        let held = buffers.iter().filter_map(|buffer| self.buffers.get(buffer));
        let mut found = Pieces::new();
        for id in held.flat_map(|held| &held.pieces) {
            if self.pieces.contains_key(id) && !found.contains(id) {
                found.push(*id);
            }
        }
        found
    }

    fn move_out(&mut self, buffer: BufferId) {
        for id in self.pieces_of(&[buffer]) {
            let piece = self.pieces.get_mut(&id).expect("pieces of buffers exist");
            if !std::mem::replace(&mut piece.is_spilled, true) {
                let shard = piece.shard;
                self.spilled += shard.bytes;
                self.give_back(shard);
            }
        }
    }

    fn move_in(&mut self, buffer: BufferId) {
        for id in self.pieces_of(&[buffer]) {
            let piece = self.pieces.get_mut(&id).expect("pieces of buffers exist");
            if std::mem::replace(&mut piece.is_spilled, false) {
                let shard = piece.shard;
                self.spilled -= shard.bytes;
                self.take(shard);
            }
        }
    }

    fn take(&mut self, shard: ShardMemory) {
        *self.used.entry(shard.device).or_default() += shard.bytes;
    }

    fn give_back(&mut self, shard: ShardMemory) {
        let used = self.used.get_mut(&shard.device).expect("what is given back was taken");
        *used -= shard.bytes;
    }

    /// Allocates the memory of results and names it.
    fn make(&mut self, first: BufferId, footprint: &Footprint, args: &[Pieces]) {
        let own: Vec<PieceId> = footprint.made.iter().map(|&shard| self.new_piece(shard)).collect();
        for (offset, sources) in &footprint.results {
            let piece = |source: &ResultSource| match *source {
                ResultSource::Made(index) => Some(own[index as usize]),
                ResultSource::Argument(arg, shard) => {
                    args.get(arg as usize)?.get(shard as usize).copied()
                }
            };
            let pieces = sources.iter().filter_map(piece).collect();
            self.insert(BufferId(first.0 + u64::from(*offset)), pieces);
        }
    }

    fn new_piece(&mut self, shard: ShardMemory) -> PieceId {
        self.take(shard);
        self.next_piece += 1;
        let piece = ShardPiece { shard, names: SmallVec::new(), is_spilled: false, pins: 0 };
        self.pieces.insert(self.next_piece, piece);
        self.next_piece
    }

    /// Names memory; a name that is used again releases its previous memory.
    fn insert(&mut self, buffer: BufferId, pieces: Pieces) {
        self.free(buffer);
        for id in &pieces {
            if let Some(piece) = self.pieces.get_mut(id) {
                piece.names.push(buffer);
            }
        }
        self.buffers.insert(buffer, Held { pieces, used: self.clock });
    }

    fn free(&mut self, buffer: BufferId) {
        let Some(held) = self.buffers.remove(&buffer) else { return };
        for id in held.pieces {
            let Some(piece) = self.pieces.get_mut(&id) else { continue };
            piece.names.retain(|name| *name != buffer);
            if piece.names.is_empty() {
                self.drop_piece(id);
            }
        }
    }

    fn delete(&mut self, buffer: BufferId) {
        let pieces = self.pieces_of(&[buffer]);
        self.destroy(Some(&pieces));
    }

    fn destroy(&mut self, pieces: Option<&Pieces>) {
        for &id in pieces.into_iter().flatten() {
            self.drop_piece(id);
        }
    }

    fn drop_piece(&mut self, id: PieceId) {
        let Some(piece) = self.pieces.remove(&id) else { return };
        if piece.is_spilled {
            self.spilled -= piece.shard.bytes;
        } else {
            self.give_back(piece.shard);
        }
    }

    fn begin_run(&mut self, first: BufferId, footprint: &Footprint, args: &[BufferId]) {
        footprint.scratch.iter().for_each(|&shard| self.take(shard));
        let args: Vec<Pieces> = args.iter().map(|arg| self.pieces_of(&[*arg])).collect();
        for id in args.iter().flatten() {
            self.pieces.get_mut(id).expect("found above").pins += 1;
        }
        self.runs.insert(first, args);
    }

    fn end_run(&mut self, first: BufferId, footprint: &Footprint) {
        let Some(args) = self.runs.remove(&first) else { return };
        footprint.scratch.iter().for_each(|&shard| self.give_back(shard));
        for id in args.iter().flatten() {
            if let Some(piece) = self.pieces.get_mut(id) {
                piece.pins -= 1;
            }
        }
        for &index in &footprint.donated {
            self.destroy(args.get(index as usize));
        }
        self.make(first, footprint, &args);
    }
}

#[cfg(test)]
mod tests;
