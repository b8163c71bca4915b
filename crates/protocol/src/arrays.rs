//! Parts of commands that make arrays and transfer them.

use std::sync::Arc;

use base::{BufferId, Channel, HostId, TransferTag};
use ir::{ArraySpec, Dims, Region};

use crate::field::add_record;
use crate::{Encoder, Field, Sample, Schema};

/// An upload, and the device positions of a host that it fills.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardUpload {
    /// The host's device positions; the bytes are copied to each.
    pub positions: Vec<u32>,
    /// The bytes.
    pub data: bytes::Bytes,
    /// Tag of the message that carries the bytes if they are too large for the command.
    pub tag: TransferTag,
    /// Shape of the uploaded bytes.
    pub dims: Dims,
    /// Stride in bytes along each axis; `None` is row-major.
    pub byte_strides: Option<Vec<i64>>,
}

/// The bytes, or the tag of the message that carries them.
impl Field for ShardUpload {
    fn python() -> String {
        "ShardUpload".to_owned()
    }

    fn define(schema: &mut Schema) {
        let fields = [
            ("positions", "list[int]", "This host's device positions; the bytes fill each."),
            ("data", "bytes | int", "The bytes, or the tag of the message that carries them."),
            ("dims", "list[int]", "Shape of the bytes."),
            ("byte_strides", "list[int] | None", "Stride along each axis; None is row-major."),
        ];
        let doc = "An upload, and the device positions that it fills.";
        add_record(schema, "ShardUpload", doc, &fields);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        out.array(4);
        self.positions.write(out);
        if self.data.len() < out.inline() {
            self.data.write(out);
        } else {
            self.tag.write(out);
        }
        self.dims.write(out);
        self.byte_strides.write(out);
    }
}

impl Sample for ShardUpload {
    fn sample(random: &mut base::Random) -> Self {
        Self {
            positions: Sample::sample(random),
            data: Sample::sample(random),
            tag: Sample::sample(random),
            dims: Sample::sample(random),
            byte_strides: Sample::sample(random),
        }
    }
}

record! { to hosts
    /// One shard of an array that shares the shards of others.
    #[derive(Copy, Eq)]
    pub struct AssembledShard {
        /// Its device position.
        pub position: u32,
        /// The buffer whose shard it is.
        pub source: BufferId,
        /// Which of the host's shards of that buffer.
        pub shard: u32,
    }
}

record! { to hosts
    /// A message received that holds a part of a shard.
    pub struct ShardPiece {
        /// The message.
        pub tag: TransferTag,
        /// The host that sends it.
        pub source: HostId,
        /// Region of the shard that it fills.
        pub region: Region,
    }
}

record! { to hosts
    /// Device positions that hold one region of an array, and the messages that make it up.
    pub struct ReceivedShard {
        /// The host's device positions.
        pub positions: Vec<u32>,
        /// The pieces of the region.
        pub pieces: Vec<ShardPiece>,
    }
}

record! { to hosts
    /// A message sent that holds a part of a shard.
    pub struct ShardSend {
        /// Index of the shard among those that the host holds.
        pub shard: u32,
        /// Region of the shard.
        pub region: Region,
        /// The message.
        pub tag: TransferTag,
        /// The host that receives it.
        pub target: HostId,
        /// The channel it is sent on.
        pub channel: Channel,
    }
}

record! { to hosts
    /// A message that a host relays under another tag.
    #[derive(Copy, Eq)]
    pub struct RelayHop {
        /// Its tag on arrival.
        pub tag: TransferTag,
        /// The host that sends it.
        pub source: HostId,
        /// Its tag on the next hop.
        pub onward: TransferTag,
        /// The host that receives it.
        pub target: HostId,
        /// The channel it is sent on.
        pub channel: Channel,
    }
}

record! { to hosts
    /// A group of arguments of a collective or an exchange of rows, on one host.
    pub struct GivenGroup {
        /// Its values.
        pub buffers: Vec<BufferId>,
        /// The numbers, over all groups, of this host's shards.
        pub shards: Vec<u32>,
    }
}

record! { to hosts
    /// A value that a host makes.
    pub struct MadeValue {
        /// The new buffer.
        pub buffer: BufferId,
        /// Its description.
        pub spec: Arc<ArraySpec>,
    }
}

record! { to hosts
    /// A group of results of a collective or an exchange of rows, on one host.
    pub struct MadeGroup {
        /// Its values.
        pub values: Vec<MadeValue>,
        /// The numbers, over all groups, of this host's shards.
        pub shards: Vec<u32>,
    }
}

record! { to hosts
    /// The single message of an exchange between this host and another.
    pub struct PeerMessage {
        /// The other host.
        pub host: HostId,
        /// The message.
        pub tag: TransferTag,
        /// The numbers of the other host's shards.
        pub shards: Vec<u32>,
    }
}

choice! {
    /// A collective over groups of devices.
    pub enum GroupCollective {
        /// All-reduce: each group receives the sum over all groups.
        1 Reduce = "REDUCE",
        /// All-gather: each group receives the arrays of all groups, stacked.
        2 Gather = "GATHER",
        /// Reduce-scatter: each group receives the sum of what all groups have for it.
        3 Scatter = "SCATTER",
    }
}

choice! {
    /// The direction of an exchange of rows.
    pub enum RowDirection {
        /// Each row is sent to the bins that are chosen for it.
        1 Dispatch = "DISPATCH",
        /// Each row returns to the choice that it was sent for.
        2 Collect = "COLLECT",
    }
}
