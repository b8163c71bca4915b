//! Memory of messages: shared segments, page-aligned and reused.
//!
//! Fresh pages cost more to fault in than to fill, so both ends keep theirs until they have been idle
//! for a while. The first page of a segment holds its state: the sender sets `busy`, the receiver
//! clears it when the message is dropped, and only then is the segment filled again. No acknowledgement
//! is sent.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

/// Bytes in front of a segment's payload; keeps the payload page-aligned.
const STATE_BYTES: usize = 4096;
/// Seals of shared memory: its length and its seals cannot change.
const SEALS: rustix::fs::SealFlags = rustix::fs::SealFlags::SHRINK
    .union(rustix::fs::SealFlags::GROW)
    .union(rustix::fs::SealFlags::SEAL);
/// Copies of at least this size use several threads.
const PARALLEL_BYTES: usize = 4 << 20;
/// Size of the chunks that threads copy.
const PART_BYTES: usize = 1 << 20;
/// Copies of at least this size bypass the caches. Below, the reader gains more from cache hits than
/// the writer from bypassing (measured with 32 MiB of cache, copying and then reading: bypassing is 1.1
/// to 1.3 times as fast at 16 MiB, 0.9 times at 8 MiB).
const PAST_CACHES_BYTES: usize = 16 << 20;
/// Maximum size of the idle private memory that is kept for later messages.
const KEPT_BYTES: usize = 1 << 30;

/// A mapped range of memory, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the range is plain memory that stays mapped as long as the value lives.
unsafe impl Send for Mapping {}
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps private memory, or a file, which other processes may map as well.
    pub fn new(length: usize, file: Option<&OwnedFd>) -> io::Result<Self> {
        let flags = match file {
            Some(_) => libc::MAP_SHARED | libc::MAP_NORESERVE,
            None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        };
        let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: a new mapping chosen by the kernel; the result is checked.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                descriptor,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("a mapping is not at address zero");
        Ok(Self { start, length })
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Creates a sealed memory file (memfd) of `length` bytes; pages are allocated when they are written.
pub(crate) fn memory_file(length: usize) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a constant name; the result is checked.
    let descriptor = unsafe { libc::memfd_create(c"fairway".as_ptr(), flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor this function just made and owns.
    let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
    File::from(file.try_clone()?).set_len(length as u64)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Fails unless `file` has at least `length` bytes and cannot shrink: a process that accesses a mapping
/// beyond the end of a truncated file is killed (`SIGBUS`).
///
/// # Errors
/// The file is shorter, or not sealed.
pub(crate) fn check_sealed(file: &OwnedFd, length: usize) -> io::Result<()> {
    let refuse = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    let sealed = rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
    if !sealed {
        return refuse("shared memory that its sender could cut off; expected a sealed file");
    }
    if (rustix::fs::fstat(file)?.st_size as u64) < length as u64 {
        return refuse("shared memory shorter than it is said to be");
    }
    Ok(())
}

/// Shared memory that one process fills and another reads.
#[derive(Debug)]
pub(crate) struct MemfdSegment {
    mapping: Mapping,
    pub file: OwnedFd,
}

impl MemfdSegment {
    /// Creates a segment for payloads of at most `payload` bytes.
    pub fn create(payload: usize) -> io::Result<Self> {
        let length = STATE_BYTES + payload;
        let file = memory_file(length)?;
        Ok(Self { mapping: Mapping::new(length, Some(&file))?, file })
    }

    /// Maps a segment that another process has created.
    pub fn open(file: OwnedFd) -> io::Result<Self> {
        // Before the length is read: until the file is sealed, its sender may shorten it.
        check_sealed(&file, STATE_BYTES + 1)?;
        let length = rustix::fs::fstat(&file)?.st_size as usize;
        Ok(Self { mapping: Mapping::new(length, Some(&file))?, file })
    }

    fn state(&self) -> &AtomicU32 {
        // SAFETY: the first page of the mapping is aligned, lives as long as `self`, and is only
        // ever accessed as this atomic.
        unsafe { self.mapping.start.cast::<AtomicU32>().as_ref() }
    }

    pub fn capacity(&self) -> usize {
        self.mapping.length - STATE_BYTES
    }

    pub fn is_busy(&self) -> bool {
        self.state().load(Ordering::Acquire) != 0
    }

    pub fn release(&self) {
        self.state().store(0, Ordering::Release);
    }

    /// Marks the segment busy and fills it.
    pub fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.capacity() && !self.is_busy(), "segments are chosen to fit");
        self.state().store(1, Ordering::Release);
        // SAFETY: the payload is in bounds of the mapping, and not read while the segment is not busy.
        let target = unsafe { std::slice::from_raw_parts_mut(self.payload(), bytes.len()) };
        copy(bytes, target);
    }

    fn payload(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.mapping.start.as_ptr().add(STATE_BYTES) }
    }
}

/// Copies, with several threads if the size pays for them. Threads take chunks dynamically, since some
/// start late on busy cores.
fn copy(source: &[u8], target: &mut [u8]) {
    if source.len() < PARALLEL_BYTES {
        return target.copy_from_slice(source);
    }
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(4));
    let copy_part = match source.len() {
        ..PAST_CACHES_BYTES => |source: &[u8], target: &mut [u8]| target.copy_from_slice(source),
        PAST_CACHES_BYTES.. => copy_past_caches,
    };
    let parts = Mutex::new(source.chunks(PART_BYTES).zip(target.chunks_mut(PART_BYTES)));
    let work = || {
        while let Some((source, target)) = { parts.lock().next() } {
            copy_part(source, target);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
}

/// Copies with non-temporal stores, which neither read the target nor pollute the caches. glibc does
/// the same above a threshold derived from the cache size that it detects; on a virtual machine it
/// detected ten times the real size.
#[cfg(target_arch = "x86_64")]
fn copy_past_caches(source: &[u8], target: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let (from, from_rest) = source.as_chunks::<LINE>();
    let (to, to_rest) = target.as_chunks_mut::<LINE>();
    if to.as_ptr().cast::<__m128i>().is_aligned() {
        for (from, to) in from.iter().zip(to) {
            let from: *const __m128i = from.as_ptr().cast();
            let to: *mut __m128i = to.as_mut_ptr().cast();
            // SAFETY: a line is four such words, and the target is aligned for them.
            unsafe {
                let line = [0, 1, 2, 3].map(|lane| _mm_loadu_si128(from.add(lane)));
                for (lane, value) in line.into_iter().enumerate() {
                    _mm_stream_si128(to.add(lane), value);
                }
            }
        }
        // SAFETY: every x86-64 processor has this instruction.
        unsafe { _mm_sfence() };
    } else {
        to.copy_from_slice(from);
    }
    to_rest.copy_from_slice(from_rest);
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_past_caches(source: &[u8], target: &mut [u8]) {
    target.copy_from_slice(source);
}

/// Memory that is filled by appending.
#[derive(Debug)]
pub struct Filling {
    block: SharedBlock,
    filled: usize,
    length: usize,
}

impl Filling {
    pub(crate) fn new(block: SharedBlock, length: usize) -> Self {
        Self { block, filled: 0, length }
    }

    /// Appends bytes if they fit; returns whether they did.
    pub fn append(&mut self, bytes: &[u8]) -> bool {
        if bytes.len() > self.length - self.filled {
            return false;
        }
        // SAFETY: this value owns the block, and the range was just checked.
        let target = unsafe { self.block.slice_mut(self.filled, bytes.len()) };
        target.copy_from_slice(bytes);
        self.filled += bytes.len();
        true
    }

    /// Returns the number of bytes appended so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Returns the appended bytes.
    pub fn finish(self) -> Payload {
        Payload::of_block(Arc::new(self.block), self.filled)
    }
}

/// Page-aligned memory with one owner; it returns to its pool or arena when dropped.
#[derive(Debug)]
pub struct SharedMemory {
    start: *mut u8,
    length: usize,
    /// Owns the memory and frees it.
    _holder: Box<dyn Any + Send + Sync>,
}

// SAFETY: it is plain memory with one owner, which can be sent.
unsafe impl Send for SharedMemory {}
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    pub(crate) fn new(block: SharedBlock, length: usize) -> Self {
        Self { start: block.start(), length, _holder: Box::new(block) }
    }

    /// Wraps memory that `holder` keeps alive and that has no other user.
    pub(crate) fn held(start: *mut u8, length: usize, holder: Box<dyn Any + Send + Sync>) -> Self {
        Self { start, length, _holder: holder }
    }

    /// Returns the address of the first byte, which is stable.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

/// Private memory that returns to its pool when dropped.
#[derive(Debug)]
pub(crate) struct SharedBlock {
    mapping: Option<Mapping>,
    pool: Arc<Pool>,
}

/// A pool of idle private memory.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Mappings, each with whether it was idle at the last trim.
    idle: Mutex<Vec<(Mapping, bool)>>,
}

impl Pool {
    /// Allocates at least `length` bytes, page-aligned.
    pub fn take(self: &Arc<Self>, length: usize) -> io::Result<SharedBlock> {
        let wanted = size_class(length);
        let mut idle = self.idle.lock();
        let found = idle.iter().position(|(mapping, _)| mapping.length == wanted);
        let mapping = match found {
            Some(index) => idle.swap_remove(index).0,
            None => {
                drop(idle);
                Mapping::new(wanted, None)?
            }
        };
        Ok(SharedBlock { mapping: Some(mapping), pool: self.clone() })
    }

    /// Frees memory that has been idle since the last trim.
    pub fn tidy(&self) {
        let mut idle = self.idle.lock();
        idle.retain(|(_, seen)| !seen);
        for (_, seen) in idle.iter_mut() {
            *seen = true;
        }
    }
}

/// Rounds a size up to its size class, so that memory can be reused; untouched pages cost nothing.
pub(crate) fn size_class(length: usize) -> usize {
    length.next_power_of_two().max(64 << 10)
}

impl Drop for SharedBlock {
    fn drop(&mut self) {
        let mapping = self.mapping.take().expect("only drop takes it");
        let mut idle = self.pool.idle.lock();
        let kept: usize = idle.iter().map(|(mapping, _)| mapping.length).sum();
        if kept + mapping.length <= KEPT_BYTES {
            idle.push((mapping, false));
        }
    }
}

impl SharedBlock {
    fn start(&self) -> *mut u8 {
        self.mapping.as_ref().expect("only drop takes it").start.as_ptr()
    }

    /// Borrows the bytes `offset..offset + length` for writing.
    ///
    /// # Safety
    /// Slices that live at the same time must not overlap, and the range must be in bounds of the
    /// block.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start().add(offset), length) }
    }
}

#[derive(Debug)]
enum Holder {
    Segment(Arc<MemfdSegment>),
    Block(Arc<SharedBlock>),
}

/// The bytes of one message. Dropping the last clone frees the memory for another message.
#[derive(Debug, Clone)]
pub struct Payload {
    holder: Arc<Holder>,
    start: usize,
    length: usize,
}

impl Payload {
    pub(crate) fn of_segment(segment: Arc<MemfdSegment>, length: usize) -> Self {
        let start = segment.payload() as usize;
        Self { holder: Arc::new(Holder::Segment(segment)), start, length }
    }

    pub(crate) fn of_block(block: Arc<SharedBlock>, length: usize) -> Self {
        let start = block.start() as usize;
        Self { holder: Arc::new(Holder::Block(block)), start, length }
    }
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        let _keeps_alive = &self.holder;
        // SAFETY: the holder keeps the range mapped; it was filled before it became a payload
        // and is not filled again before the last clone is gone.
        unsafe { std::slice::from_raw_parts(self.start as *const u8, self.length) }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        match self {
            Holder::Segment(segment) => segment.release(),
            Holder::Block(block) => {
                debug_assert!(Arc::strong_count(block) >= 1, "the block outlives its payload");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_every_length_and_alignment_are_whole() {
        let lengths = [0, 1, 63, 64, 65, 4095, PARALLEL_BYTES, PARALLEL_BYTES + 1];
        let past_caches = [0, 1, PART_BYTES - 1].map(|more| PAST_CACHES_BYTES + more);
        for length in lengths.into_iter().chain(past_caches) {
            let source: Vec<u8> = (0..length + 1).map(|at| (at % 251) as u8).collect();
            let mut target = vec![0xff; length + 32];
            for (from, to) in [(0, 0), (1, 0), (0, 1), (1, 16)] {
                target.fill(0xff);
                copy(&source[from..from + length], &mut target[to..to + length]);
                assert_eq!(target[to..to + length], source[from..from + length], "{length}");
                let outside = target[..to].iter().chain(&target[to + length..]);
                assert!(outside.copied().all(|byte| byte == 0xff), "{length} from {from} to {to}");
            }
        }
    }

    #[test]
    fn a_segment_is_free_again_once_its_payload_is_dropped() {
        let sender = MemfdSegment::create(1 << 16).unwrap();
        sender.fill(b"fairway");
        let receiver = Arc::new(MemfdSegment::open(sender.file.try_clone().unwrap()).unwrap());
        let payload = Payload::of_segment(receiver, 7);
        let copy = payload.clone();
        drop(payload);
        assert_eq!(copy.as_ref(), b"fairway");
        assert!(sender.is_busy());
        drop(copy);
        assert!(!sender.is_busy());
    }
}
