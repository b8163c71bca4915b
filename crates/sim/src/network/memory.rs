//! Memories of chips, and the computations on them.

use base::{Address, VertexId};
use half::f16;

use super::code::VECTOR;

/// The element type in which vectors are summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SumType {
    /// As 32-bit floating-point numbers.
    #[default]
    F32,
    /// As 16-bit floating-point numbers.
    F16,
    /// As 32-bit integers, which wrap.
    I32,
}

impl SumType {
    fn add(self, there: &mut [u8], vector: &[u8; VECTOR]) {
        match self {
            SumType::F32 => add(there, vector, |one, other| {
                (f32::from_le_bytes(one) + f32::from_le_bytes(other)).to_le_bytes()
            }),
            SumType::F16 => add(there, vector, |one, other| {
                (f16::from_le_bytes(one) + f16::from_le_bytes(other)).to_le_bytes()
            }),
            SumType::I32 => add(there, vector, |one, other| {
                i32::from_le_bytes(one).wrapping_add(i32::from_le_bytes(other)).to_le_bytes()
            }),
        }
    }
}

/// Adds vectors elementwise; elements have `N` bytes.
fn add<const N: usize>(there: &mut [u8], vector: &[u8], sum: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (there, came) in there.chunks_exact_mut(N).zip(vector.chunks_exact(N)) {
        let number = |bytes: &[u8]| bytes.try_into().expect("chunks are of a number");
        there.copy_from_slice(&sum(number(there), number(came)));
    }
}

/// A chip's memory as bytes, addressed in vectors.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ChipMemory(pub Vec<u8>);

impl ChipMemory {
    /// Creates a memory of `vectors` zeroed vectors.
    pub fn new(vectors: u64) -> Self {
        Self(vec![0; vectors as usize * VECTOR])
    }

    /// Returns its size in vectors.
    pub fn vectors(&self) -> u64 {
        (self.0.len() / VECTOR) as u64
    }

    /// Returns the vector at an address.
    pub(super) fn read(&self, at: u64) -> &[u8; VECTOR] {
        let at = at as usize * VECTOR;
        self.0[at..at + VECTOR].try_into().expect("it is as long as a vector")
    }

    /// Writes a vector to an address, or adds it to what is there.
    pub(super) fn write(&mut self, at: u64, vector: &[u8; VECTOR], sum: Option<SumType>) {
        let at = at as usize * VECTOR;
        let there = &mut self.0[at..at + VECTOR];
        match sum {
            Some(sum) => sum.add(there, vector),
            None => there.copy_from_slice(vector),
        }
    }

    /// Writes bytes at an address; returns `false` if they do not fit.
    pub fn put(&mut self, at: Address, bytes: &[u8]) -> bool {
        let at = at.0 as usize * VECTOR;
        let there = self.0.get_mut(at..at + bytes.len());
        there.map(|there| there.copy_from_slice(bytes)).is_some()
    }
}

/// Results of a computation, as (address, bytes) to write to memory.
pub type Results = Vec<(Address, Vec<u8>)>;

/// The computations that chips execute.
pub trait Compute: Sync {
    /// Executes one task: memory is read when the task begins, and the result is written when it is
    /// done.
    ///
    /// # Errors
    /// A message that says what failed.
    fn compute(&self, task: u32, chip: VertexId, memory: &ChipMemory) -> Result<Results, String>;
}

/// No computation, for plans of transfers only.
pub struct Nothing;

impl Compute for Nothing {
    fn compute(&self, _: u32, _: VertexId, _: &ChipMemory) -> Result<Results, String> {
        Ok(Vec::new())
    }
}
