//! Memory that all ranks of a team on one machine see.
//!
//! Every rank has a range of its own, which all others map. It begins with a board for each channel, on
//! which the rank says how far it is; vectors lie behind. A range is as large as the machine's memory, and
//! takes none before something is written.

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
/// What a motif keeps aside: no more elements than [`plan`] lets it, and none is longer.
pub(super) const ASIDE_BYTES: usize = 128 << 10;
/// A board, and what is kept aside of two motifs in a row.
const BOARD_BYTES: usize = PAGE + 2 * ASIDE_BYTES;
/// Longest text on a board.
const TEXT_MAX: usize = 1024;
/// Memory given back that is kept for whoever asks for as much again.
const KEPT_BYTES: usize = 256 << 20;
/// What ranks tell each other first: the length of their range.
const HELLO_BYTES: usize = 8;

/// Motifs that a board still tells of: a rank that reads nothing compares them later.
const NOTES: usize = 8;
/// Words of the name of a motif's operation on a board, of which the rest is cut off.
const NAME_WORDS: usize = 10;

/// What is being carried out: number of the motif on this channel, what it is, and where the vector is.
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

/// A text, and how long it is.
#[derive(Debug)]
#[repr(C, align(64))]
struct Text {
    length: AtomicU32,
    bytes: [AtomicU32; TEXT_MAX / 4],
}

/// Apart from what is written beside it, in caches.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Apart<T>(T);

/// What one rank lets all others know on a channel. Nobody else writes it.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Board {
    /// How far it is: see [`mark`].
    progress: Apart<AtomicU64>,
    /// Whether it is to be woken.
    is_asleep: Apart<AtomicU32>,
    /// The last motif whose elements mean nothing, and whether the rank has given up.
    poisoned: Apart<AtomicU64>,
    has_ended: AtomicU32,
    notes: [Note; NOTES],
    poison: Text,
    end: Text,
}

const _: () = assert!(size_of::<Board>() <= PAGE, "a board is a page");

/// How far a rank is: in the motif of this number, behind all rounds before this one.
pub(super) fn mark(turn: u64, round: u32) -> u64 {
    turn << 32 | u64::from(round)
}

/// What a board tells of a turn.
pub(super) enum Recorded {
    /// The rank has not come to it.
    NotYet,
    /// It carries out this.
    As(Subject),
    /// It took no part, or is too far behind it.
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

    /// Says how far the rank is; whoever sees it sees all that was written before.
    pub fn proceed(&self, mark: u64) {
        // Whoever goes to sleep afterwards sees it, and whoever slept before is seen.
        self.progress.0.store(mark, Ordering::SeqCst);
    }

    pub fn is_asleep(&self) -> bool {
        self.is_asleep.0.load(Ordering::SeqCst) != 0
    }

    pub fn sleep(&self, is_asleep: bool) {
        self.is_asleep.0.store(u32::from(is_asleep), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Says what is carried out in a turn, and where the vector lies.
    pub fn publish(&self, turn: u64, (subject, name): (Subject, &str), place: usize) {
        // Whoever sees anything of this sees how far the rank was before.
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

    /// What people call the operation that was published last for this turn or a later one.
    pub fn name(&self, turn: u64) -> String {
        let note = &self.notes[turn as usize % NOTES];
        let words = note.name.iter().map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        let bytes: Vec<u8> = words.flatten().take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What was published of a turn, if that is still there.
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

    /// What was published of a turn, for whoever does not keep the rank from going on meanwhile.
    pub fn recorded(&self, turn: u64) -> Recorded {
        if self.progress() < mark(turn, 0) {
            return Recorded::NotYet;
        }
        let found = self.published(turn);
        fence(Ordering::Acquire);
        // Behind this turn the note is written anew.
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
    /// Lets all ranks map each other's ranges; these lanes lead to them on this machine.
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
        let first = (team.ways.len() * BOARD_BYTES).next_multiple_of(PAGE);
        let heap = Mutex::new(Heap::new(first, length));
        Ok(Arc::new(Self { rank: team.rank as usize, length, ranges, file, heap }))
    }

    /// A rank's board on a channel.
    pub fn board(&self, rank: usize, line: usize) -> &Board {
        // SAFETY: inside the mapping and aligned to a page; all of it is atomics, for which every value
        // is one, and which begin as zeros.
        unsafe { &*self.ranges[rank].start().add(line * BOARD_BYTES).cast::<Board>() }
    }

    pub fn own(&self, line: usize) -> &Board {
        self.board(self.rank, line)
    }

    /// Keeps a part of a vector aside in a turn; returns where it would begin if all of it were there.
    ///
    /// # Safety
    /// Nobody reads what was kept aside two turns before, or writes the vector.
    pub unsafe fn keep_aside(
        &self,
        (line, turn): (usize, u64),
        work: &CollectiveBuffer,
        (start, length): (usize, usize),
    ) -> usize {
        let place = line * BOARD_BYTES + PAGE + (turn as usize % 2) * ASIDE_BYTES;
        assert!(length <= ASIDE_BYTES, "no more is kept aside");
        // SAFETY: inside the mapping; the rest is promised by the caller.
        unsafe {
            let aside = self.ranges[self.rank].start().add(place);
            std::slice::from_raw_parts_mut(aside, length)
                .copy_from_slice(work.slice(start, length));
        }
        place.wrapping_sub(start)
    }

    /// Elements of a rank; none if there is no such place.
    ///
    /// # Safety
    /// The rank does not write them meanwhile.
    pub unsafe fn elements(&self, rank: usize, place: usize, length: usize) -> Option<&[u8]> {
        if place.checked_add(length).is_none_or(|end| end > self.length) {
            return None;
        }
        // SAFETY: inside the mapping; the rest is promised by the caller.
        Some(unsafe { std::slice::from_raw_parts(self.ranges[rank].start().add(place), length) })
    }

    /// Where in this rank's range a vector lies, if it does.
    pub fn place_of(&self, work: &CollectiveBuffer) -> Option<usize> {
        let place = work.address().checked_sub(self.ranges[self.rank].start() as usize)?;
        place.checked_add(work.length()).filter(|&end| end <= self.length).map(|_| place)
    }

    /// Memory that others see.
    ///
    /// # Errors
    /// There is none left.
    pub fn memory(self: &Arc<Self>, length: usize) -> io::Result<SharedMemory> {
        let taken = self.heap.lock().take(length);
        let place = taken.ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: inside the mapping.
        let start = unsafe { self.ranges[self.rank].start().add(place) };
        let holder = Held { ground: self.clone(), place, length };
        Ok(SharedMemory::held(start, length, Box::new(holder)))
    }
}

/// The range of another rank.
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

/// Bytes of memory that there are.
fn memory_of_machine() -> usize {
    let info = rustix::system::sysinfo();
    info.totalram as usize * info.mem_unit as usize
}

/// Memory of the heap that somebody holds.
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
            // What cannot be given back stays, and is used again.
            let _ = fallocate(&self.ground.file, flags, place as u64, length as u64);
        }
    }
}

/// What is free of a range.
#[derive(Debug)]
struct Heap {
    /// Where, and how much; neighbours are one.
    free: BTreeMap<usize, usize>,
    /// What was given back and is kept for the same length, the oldest first.
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

    /// Returns what nobody needs any more.
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
