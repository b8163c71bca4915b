//! The vector that a collective reads and writes on one rank.

use std::any::Any;
use std::ops::Range;

use crate::channel::SharedMemory;

/// A buffer of which several motifs of one collective read and write disjoint parts concurrently.
#[derive(Debug)]
pub struct CollectiveBuffer {
    start: *mut u8,
    length: usize,
    /// Owns the memory.
    _holder: Box<dyn Any + Send + Sync>,
}

// SAFETY: it is plain memory, and its holder can be sent; the callers of `slice` and `slice_mut`
// synchronize access to its parts.
unsafe impl Send for CollectiveBuffer {}
unsafe impl Sync for CollectiveBuffer {}

impl CollectiveBuffer {
    /// Wraps all of this memory.
    pub fn of(memory: SharedMemory) -> Self {
        let (start, length) = (memory.start(), memory.length());
        Self { start, length, _holder: Box::new(memory) }
    }

    /// Wraps memory that `holder` keeps alive.
    ///
    /// # Safety
    /// The range must be readable and writable, aligned to its elements, and not accessed by other code
    /// until the collective completes.
    pub unsafe fn borrowed(
        start: *mut u8,
        length: usize,
        holder: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, length, _holder: holder }
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> usize {
        self.start as usize
    }

    /// Borrows a part for reading.
    ///
    /// # Safety
    /// The part must not be written during the borrow.
    ///
    /// # Panics
    /// The part is out of bounds.
    pub unsafe fn slice(&self, start: usize, length: usize) -> &[u8] {
        assert!(
            start <= self.length && length <= self.length - start,
            "a motif is inside its vector"
        );
        // SAFETY: in bounds of the memory, which the holder keeps alive; the caller promises the rest.
        unsafe { std::slice::from_raw_parts(self.start.add(start), length) }
    }

    /// Borrows a part for writing.
    ///
    /// # Safety
    /// The part must not be accessed otherwise during the borrow.
    ///
    /// # Panics
    /// The part is out of bounds.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, start: usize, length: usize) -> &mut [u8] {
        assert!(
            start <= self.length && length <= self.length - start,
            "a motif is inside its vector"
        );
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), length) }
    }

    /// Copies a part to the same offset of another vector.
    ///
    /// # Safety
    /// The target must not be accessed, nor the source written, by other code during the copy.
    pub unsafe fn copy_to(&self, other: &CollectiveBuffer, part: Range<usize>) {
        let (start, length) = (part.start, part.len());
        // SAFETY: promised by the caller.
        unsafe { other.slice_mut(start, length).copy_from_slice(self.slice(start, length)) };
    }

    /// Copies a part of this vector to another part that it does not overlap.
    ///
    /// # Safety
    /// The target must not be accessed, nor the source written, by other code during the copy.
    pub unsafe fn copy(&self, from: usize, to: usize, length: usize) {
        // SAFETY: promised by the caller; the ranges do not overlap.
        unsafe { self.slice_mut(to, length).copy_from_slice(self.slice(from, length)) };
    }
}
