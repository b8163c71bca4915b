//! The types that fields of messages may have, and how each is written and read.

use std::ops::Range;
use std::sync::Arc;

use base::{
    BufferId, Bytes, Channel, ClientId, Code, ExecutableId, HostId, InputId, Nanos, Status,
    TransferTag,
};
use ir::{ArraySpec, DType, Partition, Region};
use smallvec::{Array, SmallVec};
use topology::Cluster;

use crate::decoder::Result;
use crate::{Decoder, Encoder, FieldSchema, MessageSchema, Role, Schema};

/// A type that fields of messages may have.
pub trait Field {
    /// Returns the type that the field has in Python.
    fn python() -> String;

    /// Adds the definitions that the type needs in Python.
    fn define(_schema: &mut Schema) {}

    /// Writes a value.
    fn write(&self, out: &mut Encoder<'_>);
}

/// A type that is read from messages of hosts.
pub trait Decode: Field + Sized {
    /// Reads a value.
    ///
    /// # Errors
    /// It is malformed.
    fn read(decoder: &mut Decoder<'_>) -> Result<Self>;
}

/// Decodes one message, without its length prefix.
///
/// # Errors
/// It is malformed, or something follows it.
pub fn decode<T: Decode>(message: &[u8]) -> Result<T> {
    let mut decoder = Decoder::new(message);
    let value = T::read(&mut decoder)?;
    decoder.end()?;
    Ok(value)
}

/// Encodes one message that does not depend on its receiver.
pub fn encode(message: &impl Field) -> Vec<u8> {
    let (mut out, cluster) = (Vec::new(), Cluster::new(&[]));
    message.write(&mut Encoder::new(&mut out, HostId(0), &cluster, usize::MAX));
    out
}

macro_rules! unsigned {
    ($($type:ty: $expected:literal),*) => { $(
        impl Field for $type {
            fn python() -> String {
                "int".to_owned()
            }

            fn write(&self, out: &mut Encoder<'_>) {
                out.uint(u64::from(*self));
            }
        }

        impl Decode for $type {
            fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
                decoder.integer($expected)
            }
        }
    )* };
}

unsigned!(u32: "a small whole number", u64: "a whole number");

macro_rules! wrapped {
    ($($type:ident),*) => { $(
        impl Field for $type {
            fn python() -> String {
                "int".to_owned()
            }

            fn write(&self, out: &mut Encoder<'_>) {
                self.0.write(out);
            }
        }

        impl Decode for $type {
            fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
                Decode::read(decoder).map(Self)
            }
        }
    )* };
}

wrapped!(BufferId, Bytes, Channel, ClientId, ExecutableId, HostId, InputId, Nanos, TransferTag);

macro_rules! plain {
    ($($type:ty as $python:literal: $value:ident $write:expr, $read:expr;)*) => { $(
        impl Field for $type {
            fn python() -> String {
                $python.to_owned()
            }

            fn write(&self, out: &mut Encoder<'_>) {
                let $value = self;
                $write(out);
            }
        }

        impl Decode for $type {
            fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
                $read(decoder)
            }
        }
    )* };
}

plain! {
    i64 as "int": value |out: &mut Encoder<'_>| out.int(*value),
        |from: &mut Decoder<'_>| from.integer("a whole number");
    f64 as "float": value |out: &mut Encoder<'_>| out.float(*value), Decoder::float;
    bool as "bool": value |out: &mut Encoder<'_>| out.bool(*value), Decoder::bool;
    String as "str": value |out: &mut Encoder<'_>| out.text(&[value]), Decoder::text;
    Arc<str> as "str": value |out: &mut Encoder<'_>| out.text(&[value]),
        |from: &mut Decoder<'_>| from.text().map(Arc::from);
    Vec<u8> as "bytes": value |out: &mut Encoder<'_>| out.bytes(value), Decoder::bytes;
    bytes::Bytes as "bytes": value |out: &mut Encoder<'_>| out.bytes(value),
        |from: &mut Decoder<'_>| from.bytes().map(bytes::Bytes::from);
    // `CODE_NAME: message`, the form of XLA's errors and of hosts' own.
    Status as "str": value |out: &mut Encoder<'_>| {
        out.text(&[value.code.name(), ": ", &value.message]);
    }, |from: &mut Decoder<'_>| from.text().map(|text| status(&text));
    DType as "str": value |out: &mut Encoder<'_>| out.text(&[value.name()]),
        |from: &mut Decoder<'_>| {
            let name = from.text()?;
            DType::from_name(&name).ok_or_else(|| from.malformed("an element type"))
        };
}

/// Parses `CODE_NAME: message`; without a known name the error is an internal one.
fn status(text: &str) -> Status {
    let mut status = Status::parse(text);
    if status.code == Code::Unknown && status.message == text {
        status.code = Code::Internal;
    }
    status
}

fn list<T: Field>() -> String {
    format!("list[{}]", T::python())
}

fn write_list<T: Field>(values: &[T], out: &mut Encoder<'_>) {
    out.array(values.len());
    values.iter().for_each(|value| value.write(out));
}

fn read_list<T: Decode, L: FromIterator<T>>(decoder: &mut Decoder<'_>) -> Result<L> {
    let length = decoder.array()?;
    (0..length).map(|_| T::read(decoder)).collect()
}

macro_rules! lists {
    ($([$($generics:tt)*] $type:ty: $item:ty),*) => { $(
        impl<$($generics)*> Field for $type
        where
            $item: Field,
        {
            fn python() -> String {
                list::<$item>()
            }

            fn define(schema: &mut Schema) {
                <$item>::define(schema);
            }

            fn write(&self, out: &mut Encoder<'_>) {
                write_list(self, out);
            }
        }

        impl<$($generics)*> Decode for $type
        where
            $item: Decode,
        {
            fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
                read_list(decoder)
            }
        }
    )* };
}

lists!([T] Vec<T>: T, [T] Arc<[T]>: T, [A: Array] SmallVec<A>: A::Item);

impl<T: Field, const N: usize> Field for [T; N] {
    fn python() -> String {
        list::<T>()
    }

    fn define(schema: &mut Schema) {
        T::define(schema);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        write_list(self, out);
    }
}

impl<T: Decode, const N: usize> Decode for [T; N] {
    fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
        let values: Vec<T> = read_list(decoder)?;
        values.try_into().map_err(|_| decoder.malformed("a fixed number of values"))
    }
}

macro_rules! pointers {
    ($($type:ident),*) => { $(
        impl<T: Field> Field for $type<T> {
            fn python() -> String {
                T::python()
            }

            fn define(schema: &mut Schema) {
                T::define(schema);
            }

            fn write(&self, out: &mut Encoder<'_>) {
                (**self).write(out);
            }
        }

        impl<T: Decode> Decode for $type<T> {
            fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
                T::read(decoder).map(Self::new)
            }
        }
    )* };
}

pointers!(Arc, Box);

impl<T: Field> Field for Option<T> {
    fn python() -> String {
        format!("{} | None", T::python())
    }

    fn define(schema: &mut Schema) {
        T::define(schema);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        match self {
            Some(value) => value.write(out),
            None => out.nil(),
        }
    }
}

impl<T: Decode> Decode for Option<T> {
    fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
        if decoder.nil() { Ok(None) } else { T::read(decoder).map(Some) }
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    fn python() -> String {
        format!("tuple[{}, {}]", A::python(), B::python())
    }

    fn define(schema: &mut Schema) {
        A::define(schema);
        B::define(schema);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        out.array(2);
        self.0.write(out);
        self.1.write(out);
    }
}

impl<A: Decode, B: Decode> Decode for (A, B) {
    fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
        decoder.array_of(2, "a pair")?;
        Ok((A::read(decoder)?, B::read(decoder)?))
    }
}

/// The first index and the one after the last.
impl Field for Range<u32> {
    fn python() -> String {
        "tuple[int, int]".to_owned()
    }

    fn write(&self, out: &mut Encoder<'_>) {
        (self.start, self.end).write(out);
    }
}

/// Adds a record that is written by hand; fields as name, Python type and documentation.
pub(crate) fn add_record(
    schema: &mut Schema,
    name: &'static str,
    doc: &'static str,
    fields: &[(&'static str, &str, &'static str)],
) {
    let field = |&(name, python, doc): &(&'static str, &str, &'static str)| FieldSchema {
        name,
        python: python.to_owned(),
        doc: vec![doc],
    };
    let fields = fields.iter().map(field).collect();
    schema.add_record(MessageSchema {
        number: None,
        name,
        doc: vec![doc],
        fields,
        role: Role::None,
    });
}

impl Field for Region {
    fn python() -> String {
        "Region".to_owned()
    }

    fn define(schema: &mut Schema) {
        let fields = [
            ("start", "list[int]", "First index along each axis."),
            ("size", "list[int]", "Extent along each axis."),
        ];
        add_record(schema, "Region", "A box of indices of a shard.", &fields);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        out.array(2);
        self.start.write(out);
        self.size.write(out);
    }
}

/// An array's spec is written as the shards of the host that reads it.
impl Field for ArraySpec {
    fn python() -> String {
        "HostArray".to_owned()
    }

    fn define(schema: &mut Schema) {
        let shard = [
            ("position", "int", "Its device position in the array's sharding."),
            ("device", "int", "The host's number of its device."),
            ("shape", "list[int]", "Its shape."),
        ];
        add_record(schema, "HostShard", "One shard of an array on this host.", &shard);
        let array = [
            ("dtype", "str", "Element type, as numpy names it."),
            ("memory", "str | None", "Memory kind; None is the device's default."),
            ("shards", "list[HostShard]", "The shards on this host."),
        ];
        add_record(schema, "HostArray", "The part of an array that this host holds.", &array);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        let (cluster, host) = (out.cluster(), out.host());
        let devices = self.sharding.devices.iter().enumerate();
        let mine = devices.filter_map(|(position, &device)| {
            let device = cluster.device(device)?;
            (device.host == host).then_some((position, device.local))
        });
        out.array(3);
        self.dtype.write(out);
        self.sharding.memory.write(out);
        out.array(mine.clone().count());
        for (position, local) in mine {
            out.array(3);
            out.uint(position as u64);
            local.write(out);
            self.sharding.shard_dims(&self.dims, position).write(out);
        }
    }
}

/// How a parameter or result is partitioned; nil is replicated.
impl Field for Partition {
    fn python() -> String {
        "Tiles | None".to_owned()
    }

    fn define(schema: &mut Schema) {
        let fields = [
            ("counts", "list[int]", "Tiles along each axis."),
            ("tile_of", "list[int]", "Tile held by each device position, in row-major order."),
        ];
        add_record(schema, "Tiles", "A partition of an array into a grid of equal tiles.", &fields);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        match self {
            Self::Tiled { counts, tile_of } => {
                out.array(2);
                counts.write(out);
                tile_of.write(out);
            }
            // Compilers report no other partitions.
            Self::Replicated | Self::Even { .. } | Self::Uneven { .. } => out.nil(),
        }
    }
}

impl Decode for Partition {
    fn read(decoder: &mut Decoder<'_>) -> Result<Self> {
        if decoder.nil() {
            return Ok(Self::Replicated);
        }
        decoder.array_of(2, "a partition of two fields")?;
        Ok(Self::Tiled { counts: Decode::read(decoder)?, tile_of: Decode::read(decoder)? })
    }
}
