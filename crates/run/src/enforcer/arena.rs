//! Shared memory of all ranks of a team on one machine.
//!
//! Every rank owns a range, which all others map. The range begins with a board for each channel, on
//! which the rank publishes its progress; vectors follow. A range is as large as the machine's memory;
//! its pages are allocated only when they are written.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, fallocate};

use super::EnforcerError;
use super::stream::{ReliableStream, Subject};
use super::team::Team;
use super::work::CollectiveBuffer;
use crate::channel::{Mapping, SharedMemory, check_sealed, memory_file};

const PAGE: usize = 4096;
/// Size of a staging area: [`plan`] limits the elements of a motif that stages them so that they fit,
/// whatever their type.
pub(super) const ASIDE_BYTES: usize = 128 << 10;
/// Size of a board and the staging areas of two consecutive motifs.
const BOARD_BYTES: usize = PAGE + 2 * ASIDE_BYTES;
/// Longest text on a board, in bytes.
const TEXT_MAX: usize = 1024;
/// Maximum number of freed bytes that are cached for allocations of the same size.
const KEPT_BYTES: usize = 256 << 20;
/// Bytes of the handshake: the length of the rank's range.
const HELLO_BYTES: usize = 8;

/// Number of recent motifs that a board records: a sender to which a peer sends nothing checks the
/// peer's records later.
const NOTES: usize = 8;
/// Words of an operation's name on a board; a longer name is truncated.
const NAME_WORDS: usize = 10;

/// Record of a motif in execution: its turn (sequence number on the channel), identity, and the offset
/// of the vector.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Note {
    turn: AtomicU64,
    step: AtomicU64,
    operation: AtomicU32,
    motif: AtomicU32,
    digest: AtomicU32,
    place: AtomicU64,
    name: [AtomicU64; NAME_WORDS],
}

/// A text and its length in bytes.
#[derive(Debug)]
#[repr(C, align(64))]
struct Text {
    length: AtomicU32,
    bytes: [AtomicU32; TEXT_MAX / 4],
}

/// Aligned to cache lines of its own, to avoid false sharing.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Apart<T>(T);

/// What one rank publishes to all others on a channel. Only that rank writes it.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Board {
    /// Progress: see [`mark`].
    progress: Apart<AtomicU64>,
    /// Whether the rank sleeps and needs a wake-up.
    is_asleep: Apart<AtomicU32>,
    /// The last turn whose elements are poisoned, and whether the rank has given up.
    poisoned: Apart<AtomicU64>,
    has_ended: AtomicU32,
    notes: [Note; NOTES],
    poison: Text,
    end: Text,
}

const _: () = assert!(size_of::<Board>() <= PAGE, "a board is a page");

/// Encodes progress: in this turn, with all rounds before `round` completed.
pub(super) fn mark(turn: u64, round: u32) -> u64 {
    turn << 32 | u64::from(round)
}

/// The record of a turn on a board.
pub(super) enum Recorded {
    /// The rank has not reached the turn.
    NotYet,
    /// The rank executes this motif.
    As(Subject),
    /// No record: the rank took no part, or has overwritten it since.
    Nothing,
}

impl Text {
    fn write(&self, text: &str) {
        let bytes = &text.as_bytes()[..text.len().min(TEXT_MAX)];
        for (word, part) in self.bytes.iter().zip(bytes.chunks(4)) {
            let mut whole = [0; 4];
            whole[..part.len()].copy_from_slice(part);
            word.store(u32::from_le_bytes(whole), Ordering::Relaxed);
        }
        self.length.store(bytes.len() as u32, Ordering::Release);
    }

    fn read(&self) -> String {
        let length = (self.length.load(Ordering::Acquire) as usize).min(TEXT_MAX);
        let words = self.bytes.iter().map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        let bytes: Vec<u8> = words.flatten().take(length).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Board {
    pub fn progress(&self) -> u64 {
        self.progress.0.load(Ordering::Acquire)
    }

    /// Publishes progress (release): a rank that sees it also sees all earlier writes.
    pub fn proceed(&self, mark: u64) {
        // SeqCst: either a rank that goes to sleep later sees this, or this rank sees that it sleeps.
        self.progress.0.store(mark, Ordering::SeqCst);
    }

    pub fn is_asleep(&self) -> bool {
        self.is_asleep.0.load(Ordering::SeqCst) != 0
    }

    pub fn sleep(&self, is_asleep: bool) {
        self.is_asleep.0.store(u32::from(is_asleep), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Records the motif of a turn and the offset of its vector.
    pub fn publish(&self, turn: u64, (subject, name): (Subject, &str), place: usize) {
        // A rank that sees any of this record also sees the earlier progress.
        fence(Ordering::Release);
        let note = &self.notes[turn as usize % NOTES];
        let Subject { step, operation, motif, digest } = subject;
        note.turn.store(turn, Ordering::Relaxed);
        note.step.store(step, Ordering::Relaxed);
        note.operation.store(operation, Ordering::Relaxed);
        note.motif.store(motif, Ordering::Relaxed);
        note.digest.store(digest, Ordering::Relaxed);
        note.place.store(place as u64, Ordering::Relaxed);
        let mut parts = name.as_bytes().chunks(8);
        for word in &note.name {
            let mut whole = [0; 8];
            let part = parts.next().unwrap_or_default();
            whole[..part.len()].copy_from_slice(part);
            word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
            if part.len() < whole.len() {
                break;
            }
        }
    }

    /// Returns the operation's name that was last recorded for this turn or a later one.
    pub fn name(&self, turn: u64) -> String {
        let note = &self.notes[turn as usize % NOTES];
        let words = note.name.iter().map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        let bytes: Vec<u8> = words.flatten().take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the record of a turn, if it has not been overwritten.
    pub fn published(&self, turn: u64) -> Option<(Subject, usize)> {
        let note = &self.notes[turn as usize % NOTES];
        let subject = Subject {
            step: note.step.load(Ordering::Relaxed),
            operation: note.operation.load(Ordering::Relaxed),
            motif: note.motif.load(Ordering::Relaxed),
            digest: note.digest.load(Ordering::Relaxed),
        };
        let place = note.place.load(Ordering::Relaxed) as usize;
        (note.turn.load(Ordering::Relaxed) == turn).then_some((subject, place))
    }

    /// Returns the record of a turn, for readers that do not block the rank from overwriting it.
    pub fn recorded(&self, turn: u64) -> Recorded {
        if self.progress() < mark(turn, 0) {
            return Recorded::NotYet;
        }
        let found = self.published(turn);
        fence(Ordering::Acquire);
        // Later turns overwrite the record.
        let is_kept = self.progress() < mark(turn + NOTES as u64 - 1, 0);
        found.filter(|_| is_kept).map_or(Recorded::Nothing, |(subject, _)| Recorded::As(subject))
    }

    pub fn poison(&self, turn: u64, reason: &str) {
        self.poison.write(reason);
        self.poisoned.0.store(turn, Ordering::Release);
    }

    pub fn poisoned(&self, turn: u64) -> Option<String> {
        (self.poisoned.0.load(Ordering::Acquire) == turn).then(|| self.poison.read())
    }

    pub fn give_up(&self, reason: &str) {
        self.end.write(reason);
        self.has_ended.store(1, Ordering::SeqCst);
    }

    pub fn ended(&self) -> Option<String> {
        (self.has_ended.load(Ordering::Acquire) != 0).then(|| self.end.read())
    }
}

/// The ranges of all ranks.
#[derive(Debug)]
pub(super) struct SharedArena {
    rank: usize,
    length: usize,
    ranges: Vec<Mapping>,
    file: OwnedFd,
    heap: Mutex<Heap>,
}

impl SharedArena {
    /// Exchanges the descriptors of all ranks' ranges and maps them; these lanes reach the other ranks
    /// on this machine.
    pub fn meet(
        team: &Team<'_>,
        lanes: &mut [Option<ReliableStream>],
        deadline: Instant,
    ) -> Result<Arc<Self>, EnforcerError> {
        let length = memory_of_machine().next_multiple_of(PAGE);
        let file = memory_file(length).map_err(|error| team.no(&error))?;
        for lane in lanes.iter_mut().flatten() {
            let hello = (length as u64).to_le_bytes();
            lane.socket
                .write_with_descriptor(&hello, file.as_fd())
                .map_err(|error| team.absent(lane.peer, &error.to_string()))?;
        }
        let mut ranges = Vec::with_capacity(lanes.len());
        for lane in lanes {
            let range = match lane {
                None => Mapping::new(length, Some(&file)).map_err(|error| team.no(&error))?,
                Some(lane) => {
                    range_of(lane, length, deadline).map_err(|error| match error.kind() {
                        io::ErrorKind::TimedOut => team.late(lane.peer, "it says nothing"),
                        _ => team.absent(lane.peer, &error.to_string()),
                    })?
                }
            };
            ranges.push(range);
        }
        let first = (team.channels.len() * BOARD_BYTES).next_multiple_of(PAGE);
        let heap = Mutex::new(Heap::new(first, length));
        Ok(Arc::new(Self { rank: team.rank as usize, length, ranges, file, heap }))
    }

    /// Returns the board of a rank on a channel.
    pub fn board(&self, rank: usize, line: usize) -> &Board {
        // SAFETY: in bounds of the mapping and page-aligned; it consists of atomics, for which every
        // bit pattern is valid, initially zero.
        unsafe { &*self.ranges[rank].start().add(line * BOARD_BYTES).cast::<Board>() }
    }

    pub fn own(&self, line: usize) -> &Board {
        self.board(self.rank, line)
    }

    /// Copies a part of a vector to the staging area of a turn; returns the offset at which the vector
    /// would begin if all of it were there.
    ///
    /// # Safety
    /// Other ranks must not read the staging area of two turns before, nor other code write the vector.
    pub unsafe fn keep_aside(
        &self,
        (line, turn): (usize, u64),
        work: &CollectiveBuffer,
        (start, length): (usize, usize),
    ) -> usize {
        let place = line * BOARD_BYTES + PAGE + (turn as usize % 2) * ASIDE_BYTES;
        assert!(length <= ASIDE_BYTES, "no more is kept aside");
        // SAFETY: in bounds of the mapping; the caller promises the rest.
        unsafe {
            let aside = self.ranges[self.rank].start().add(place);
            std::slice::from_raw_parts_mut(aside, length)
                .copy_from_slice(work.slice(start, length));
        }
        place.wrapping_sub(start)
    }

    /// Borrows elements of a rank; `None` if the part is out of bounds.
    ///
    /// # Safety
    /// The rank must not write them during the borrow.
    pub unsafe fn elements(&self, rank: usize, place: usize, length: usize) -> Option<&[u8]> {
        if place.checked_add(length).is_none_or(|end| end > self.length) {
            return None;
        }
        // SAFETY: in bounds of the mapping; the caller promises the rest.
        Some(unsafe { std::slice::from_raw_parts(self.ranges[rank].start().add(place), length) })
    }

    /// Returns the offset of a vector in this rank's range, if it lies there.
    pub fn place_of(&self, work: &CollectiveBuffer) -> Option<usize> {
        let place = work.address().checked_sub(self.ranges[self.rank].start() as usize)?;
        place.checked_add(work.length()).filter(|&end| end <= self.length).map(|_| place)
    }

    /// Allocates memory that all ranks can read.
    ///
    /// # Errors
    /// No memory is left in the range.
    pub fn memory(self: &Arc<Self>, length: usize) -> io::Result<SharedMemory> {
        let taken = self.heap.lock().take(length);
        let place = taken.ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: in bounds of the mapping.
        let start = unsafe { self.ranges[self.rank].start().add(place) };
        let holder = Held { ground: self.clone(), place, length };
        Ok(SharedMemory::held(start, length, Box::new(holder)))
    }
}

/// Receives and maps the range of another rank.
fn range_of(lane: &mut ReliableStream, length: usize, deadline: Instant) -> io::Result<Mapping> {
    let mut polled = [PollFd::new(&lane.socket, PollFlags::IN)];
    let left = deadline.saturating_duration_since(Instant::now());
    let limit = Timespec::try_from(left).expect("a timeout is hours at most");
    if poll(&mut polled, Some(&limit))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut hello = [0; HELLO_BYTES];
    let file = lane.socket.read_with_descriptor(&mut hello)?;
    let (Some(file), true) = (file, u64::from_le_bytes(hello) == length as u64) else {
        let text = "it is on another machine, or of another version";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    };
    check_sealed(&file, length)?;
    Mapping::new(length, Some(&file))
}

/// Returns the size of the machine's memory in bytes.
fn memory_of_machine() -> usize {
    let info = rustix::system::sysinfo();
    info.totalram as usize * info.mem_unit as usize
}

/// An allocation of the heap, freed when dropped.
struct Held {
    ground: Arc<SharedArena>,
    place: usize,
    length: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut heap = self.ground.heap.lock();
        for (place, length) in heap.give_back(self.place, self.length) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Ignored: pages that cannot be released stay, and are reused.
            let _ = fallocate(&self.ground.file, flags, place as u64, length as u64);
        }
    }
}

/// A first-fit allocator of a range.
#[derive(Debug)]
struct Heap {
    /// Free blocks: offset and length; adjacent blocks are merged.
    free: BTreeMap<usize, usize>,
    /// Freed blocks that are cached for allocations of the same length, the oldest first.
    kept: Vec<(usize, usize)>,
}

impl Heap {
    fn new(first: usize, end: usize) -> Self {
        Self { free: BTreeMap::from([(first, end - first)]), kept: Vec::new() }
    }

    fn take(&mut self, length: usize) -> Option<usize> {
        let length = length.max(1).next_multiple_of(PAGE);
        if let Some(at) = self.kept.iter().rposition(|&(_, kept)| kept == length) {
            return Some(self.kept.remove(at).0);
        }
        let (&place, &free) = self.free.iter().find(|(_, free)| **free >= length)?;
        self.free.remove(&place);
        if free > length {
            self.free.insert(place + length, free - length);
        }
        Some(place)
    }

    /// Frees a block; returns the blocks that leave the cache, whose pages can be released.
    fn give_back(&mut self, place: usize, length: usize) -> Vec<(usize, usize)> {
        self.kept.push((place, length.max(1).next_multiple_of(PAGE)));
        let mut gone = Vec::new();
        while self.kept.iter().map(|(_, length)| length).sum::<usize>() > KEPT_BYTES {
            let (place, length) = self.kept.remove(0);
            gone.push((place, length));
            self.merge(place, length);
        }
        gone
    }

    fn merge(&mut self, mut place: usize, mut length: usize) {
        if let Some((&before, &free)) = self.free.range(..place).next_back()
            && before + free == place
        {
            self.free.remove(&before);
            (place, length) = (before, length + free);
        }
        if let Some(free) = self.free.remove(&(place + length)) {
            length += free;
        }
        self.free.insert(place, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_serves_again_and_is_one_again() {
        let mut heap = Heap::new(PAGE, 1 << 40);
        let small: Vec<usize> = (0..4).map(|_| heap.take(100).unwrap()).collect();
        assert_eq!(small, [1, 2, 3, 4].map(|page| page * PAGE));
        assert!(heap.give_back(small[1], 100).is_empty());
        assert_eq!(heap.take(4000), Some(small[1]), "as long when rounded");
        let large = heap.take(KEPT_BYTES).unwrap();
        assert!(heap.give_back(large, KEPT_BYTES).is_empty());
        for place in small {
            heap.give_back(place, 100);
        }
        let other = heap.take(2 * KEPT_BYTES).unwrap();
        let gone = heap.give_back(other, 2 * KEPT_BYTES);
        assert_eq!(gone.len(), 5, "all that is kept makes room, the oldest first");
        assert!(heap.kept.is_empty());
        assert_eq!(heap.free, BTreeMap::from([(PAGE, (1 << 40) - PAGE)]));
        assert_eq!(heap.take(1 << 41), None);
    }
}
