//! What the controller and its hosts say to each other, defined once for Rust and Python.
//!
//! Every message is defined by the macro `messages!` with its number, its fields and their
//! documentation. From the one definition come the Rust type, its encoder, its decoder where the
//! controller reads it, and the Python module that hosts use (`python/fairway/host/messages.py`,
//! printed by [`python_module`]).
//!
//! On the wire a message is a MessagePack array `[number, field, ...]`, a record inside a message
//! an array of its fields. Commands travel in frames (see [`CommandFrames`]); a report is one
//! message behind its length in four little-endian bytes.

#[macro_use]
mod macros;

mod arrays;
mod command;
mod decoder;
mod definition;
mod encoder;
mod field;
mod frame;
mod program;
mod report;
mod sample;
mod schema;
mod text;

pub use arrays::{
    AssembledShard, GivenGroup, GroupCollective, MadeGroup, MadeValue, PeerMessage, ReceivedShard,
    RelayHop, RowDirection, ShardPiece, ShardSend, ShardUpload,
};
pub use command::{Acknowledge, Command, CommandTicket, PeerAddress};
pub use decoder::{Decoder, ProtocolError};
pub use encoder::Encoder;
pub use field::{Decode, Field, decode, encode};
pub use frame::{COMMAND_FRAME_LIMIT, CommandFrames, HELLO_LIMIT, REPORT_LIMIT};
pub use program::{
    CompileRole, Compiled, CompiledSharding, CostAnalysis, ExecutableMessage, FunctionCode,
    HostCollective, MemoryStats, OutputSpec, PartitionedFunction,
};
pub use report::{Hello, HostCall, HostChannel, HostInfo, HostReply, Report, UnreachablePeer};
pub use sample::{Sample, sample_of};
pub use schema::{FieldSchema, MessageSchema, Role, Schema};
pub use text::python_module;
