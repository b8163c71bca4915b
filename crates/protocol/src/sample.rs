//! Random values of every field, for the tests of both languages.
//!
//! They are derived from the definitions, so a new message is tested without another line.

use std::ops::Range;
use std::sync::Arc;

use base::{
    BufferId, Bytes, Channel, ClientId, Code, DeviceId, ExecutableId, HostId, InputId, Nanos,
    Random, Status, TransferTag,
};
use ir::{ArraySpec, DType, Dims, Partition, Region, Sharding};
use smallvec::{Array, SmallVec};

/// A type of which there are random values.
pub trait Sample: Sized {
    /// Returns a random value.
    fn sample(random: &mut Random) -> Self;
}

/// Returns the random value that a seed stands for.
pub fn sample_of<T: Sample>(seed: u64) -> T {
    T::sample(&mut Random::of(&[seed]))
}

macro_rules! samples {
    ($($type:ty: |$random:ident| $value:expr;)*) => { $(
        impl Sample for $type {
            fn sample($random: &mut Random) -> Self {
                $value
            }
        }
    )* };
}

/// Returns a number of any of the widths that MessagePack has.
fn number(random: &mut Random) -> u64 {
    random.word() >> random.below(64)
}

fn bytes(random: &mut Random) -> Vec<u8> {
    let length = number(random) % 300;
    (0..length).map(|_| random.word() as u8).collect()
}

fn dims(random: &mut Random, rank: u64) -> Dims {
    (0..rank).map(|_| 1 + random.below(300) as i64).collect()
}

samples! {
    u32: |random| number(random) as u32;
    u64: |random| number(random);
    i64: |random| number(random) as i64;
    f64: |random| random.fraction() * 1e9;
    bool: |random| random.below(2) == 1;
    BufferId: |random| Self(number(random));
    Bytes: |random| Self(number(random));
    Channel: |random| Self(random.below(5) as u32);
    ClientId: |random| Self(number(random));
    ExecutableId: |random| Self(number(random));
    HostId: |random| Self(random.below(1000) as u32);
    InputId: |random| Self(number(random));
    Nanos: |random| Self(number(random));
    TransferTag: |random| Self(number(random));
    String: |random| {
        let words = ["", "step", "grüße", "a text of more than thirty-one bytes, in ASCII only"];
        words[random.below(4) as usize].to_owned()
    };
    Arc<str>: |random| String::sample(random).into();
    Vec<u8>: |random| bytes(random);
    bytes::Bytes: |random| bytes(random).into();
    Status: |random| {
        Status::new(Code::from_number(1 + random.below(16) as i32), String::sample(random))
    };
    DType: |random| DType::ALL[random.below(DType::ALL.len() as u64) as usize];
    Range<u32>: |random| u32::sample(random)..u32::sample(random);
    Region: |random| {
        let rank = random.below(4);
        Region::new(&dims(random, rank), &dims(random, rank))
    };
    Partition: |random| match bool::sample(random) {
        true => Self::Replicated,
        false => Self::Tiled { counts: Sample::sample(random), tile_of: Sample::sample(random) },
    };
    // Of the first four devices, so that small clusters have them.
    ArraySpec: |random| {
        let rank = random.below(4);
        let devices = (0..1 + random.below(4)).map(|device| DeviceId(device as u32)).collect();
        let memory = Option::sample(random);
        let sharding = Sharding { devices, memory, partition: Partition::Replicated };
        Self { dtype: DType::sample(random), dims: dims(random, rank), sharding }
    };
}

fn some<T: Sample, L: FromIterator<T>>(random: &mut Random) -> L {
    (0..random.below(4)).map(|_| T::sample(random)).collect()
}

impl<T: Sample> Sample for Vec<T> {
    fn sample(random: &mut Random) -> Self {
        some(random)
    }
}

impl<T: Sample> Sample for Arc<[T]> {
    fn sample(random: &mut Random) -> Self {
        some(random)
    }
}

impl<A: Array> Sample for SmallVec<A>
where
    A::Item: Sample,
{
    fn sample(random: &mut Random) -> Self {
        some(random)
    }
}

impl<T: Sample, const N: usize> Sample for [T; N] {
    fn sample(random: &mut Random) -> Self {
        std::array::from_fn(|_| T::sample(random))
    }
}

impl<T: Sample> Sample for Arc<T> {
    fn sample(random: &mut Random) -> Self {
        Self::new(T::sample(random))
    }
}

impl<T: Sample> Sample for Box<T> {
    fn sample(random: &mut Random) -> Self {
        Self::new(T::sample(random))
    }
}

impl<T: Sample> Sample for Option<T> {
    fn sample(random: &mut Random) -> Self {
        bool::sample(random).then(|| T::sample(random))
    }
}

impl<A: Sample, B: Sample> Sample for (A, B) {
    fn sample(random: &mut Random) -> Self {
        (A::sample(random), B::sample(random))
    }
}
