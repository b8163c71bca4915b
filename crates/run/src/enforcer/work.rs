//! The vector that a rank works on.

use std::any::Any;
use std::ops::Range;

use crate::channel::SharedMemory;

/// Memory that several motifs of one collective read and write in different places at a time.
#[derive(Debug)]
pub struct CollectiveBuffer {
    start: *mut u8,
    length: usize,
    /// Keeps the memory.
    _holder: Box<dyn Any + Send + Sync>,
}

// SAFETY: it is plain memory, and its holder can be sent; who may touch which part when is up to the
// callers of `slice` and `slice_mut`.
unsafe impl Send for CollectiveBuffer {}
unsafe impl Sync for CollectiveBuffer {}

impl CollectiveBuffer {
    /// All of this memory.
    pub fn of(memory: SharedMemory) -> Self {
        let (start, length) = (memory.start(), memory.length());
        Self { start, length, _holder: Box::new(memory) }
    }

    /// Memory that somebody else keeps as long as `holder` lives.
    ///
    /// # Safety
    /// The range can be read and written, is aligned to its elements, and nobody else touches it until
    /// the collective is over.
    pub unsafe fn borrowed(
        start: *mut u8,
        length: usize,
        holder: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, length, _holder: holder }
    }

    /// How many bytes it has.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Where it begins.
    pub fn address(&self) -> usize {
        self.start as usize
    }

    /// Bytes to be read.
    ///
    /// # Safety
    /// Nobody writes them meanwhile.
    ///
    /// # Panics
    /// They lie outside.
    pub unsafe fn slice(&self, start: usize, length: usize) -> &[u8] {
        assert!(
            start <= self.length && length <= self.length - start,
            "a motif is inside its vector"
        );
        // SAFETY: inside the memory, which the holder keeps; the rest is promised by the caller.
        unsafe { std::slice::from_raw_parts(self.start.add(start), length) }
    }

    /// Bytes to be written.
    ///
    /// # Safety
    /// Nobody else touches them meanwhile.
    ///
    /// # Panics
    /// They lie outside.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, start: usize, length: usize) -> &mut [u8] {
        assert!(
            start <= self.length && length <= self.length - start,
            "a motif is inside its vector"
        );
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), length) }
    }

    /// Copies a part to the same place of another vector.
    ///
    /// # Safety
    /// Nobody else touches the target, or writes the source, meanwhile.
    pub unsafe fn copy_to(&self, other: &CollectiveBuffer, part: Range<usize>) {
        let (start, length) = (part.start, part.len());
        // SAFETY: promised by the caller.
        unsafe { other.slice_mut(start, length).copy_from_slice(self.slice(start, length)) };
    }

    /// Copies a part to another, which it does not overlap.
    ///
    /// # Safety
    /// Nobody else touches the target, or writes the source, meanwhile.
    pub unsafe fn copy(&self, from: usize, to: usize, length: usize) {
        // SAFETY: promised by the caller; the ranges do not overlap.
        unsafe { self.slice_mut(to, length).copy_from_slice(self.slice(from, length)) };
    }
}
