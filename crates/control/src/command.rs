//! Commands that the controller sends to hosts.

use std::ops::Range;
use std::sync::Arc;

use base::{BufferId, Channel, ClientId, ExecutableId, HostId, InputId, Status, TransferTag};
use ir::{ArraySpec, Dims, Ends, Region, Sparse};
use smallvec::SmallVec;

/// Correlates a command that asks a host for an answer with that answer.
pub type CommandTicket = u64;

/// A command to a host. Hosts execute commands in order; those that wait (for a computation or a
/// message) complete asynchronously and delay only the commands that depend on them.
#[derive(Debug, Clone)]
pub enum Command {
    /// Run a program on this host's share of its devices.
    Launch {
        /// Sequence number in the island's launch order.
        sequence: u64,
        /// Sequence number of the launch that this host must have enqueued last; filled in when the
        /// command is dispatched.
        previous: u64,
        /// When the host must acknowledge it; filled in when the command is dispatched.
        acknowledge: Acknowledge,
        /// The program.
        executable: ExecutableId,
        /// Its arguments.
        args: SmallVec<[BufferId; 8]>,
        /// The first result; the others follow consecutively.
        first_result: BufferId,
        /// Number of results.
        results: u32,
        /// Arguments that must not be donated.
        keep: SmallVec<[u32; 4]>,
        /// The buffer that holds the completion, if requested.
        completion: Option<BufferId>,
        /// The client, for the timeline.
        client: ClientId,
    },
    /// Make an array from bytes.
    Put {
        /// The new buffer.
        buffer: BufferId,
        /// Its description.
        spec: Arc<ArraySpec>,
        /// This host's device positions, and the bytes that fill them.
        shards: Vec<(Vec<u32>, PutSource)>,
    },
    /// Assemble an array that shares the shards of others.
    Gather {
        /// The new buffer.
        buffer: BufferId,
        /// Its description.
        spec: Arc<ArraySpec>,
        /// For each of this host's positions: the source buffer, and which of this host's shards of
        /// it.
        shards: Vec<(u32, BufferId, u32)>,
    },
    /// Copy shards to other devices or memories of this host.
    Copy {
        /// The source.
        source: BufferId,
        /// The new buffer.
        buffer: BufferId,
        /// Its description; positions correspond.
        spec: Arc<ArraySpec>,
    },
    /// Reinterpret the bytes of each shard.
    Bitcast {
        /// The source.
        source: BufferId,
        /// The new buffer.
        buffer: BufferId,
        /// Its description; positions correspond.
        spec: Arc<ArraySpec>,
    },
    /// Send pieces of shards to other hosts once they are computed.
    Send {
        /// The source.
        source: BufferId,
        /// The pieces, in the order in which they are sent on each channel.
        pieces: Vec<ShardSend>,
        /// The client; its messages on one channel are sent in the order of these commands.
        client: ClientId,
    },
    /// Relay messages that this host itself does not need.
    Relay(Vec<RelayHop>),
    /// Make an array from messages of other hosts.
    Receive {
        /// The new buffer.
        buffer: BufferId,
        /// Its description.
        spec: Arc<ArraySpec>,
        /// This host's device positions, and the pieces that make up the region they share.
        shards: Vec<(Vec<u32>, Vec<ShardPiece>)>,
        /// Messages among these to forward to other hosts of this island.
        relays: Vec<RelayHop>,
    },
    /// Fetch the bytes of a shard.
    Read {
        /// Correlates the answer.
        ticket: CommandTicket,
        /// The buffer.
        buffer: BufferId,
        /// Which of this host's shards.
        shard: u32,
        /// Strides in bytes of the answer; `None` is row-major.
        byte_strides: Option<Vec<i64>>,
    },
    /// Answer once the buffers are computed.
    CheckReady {
        /// Correlates the answer.
        ticket: CommandTicket,
        /// The buffers.
        buffers: Vec<BufferId>,
    },
    /// Free the device memory of buffers, for all buffers that share it.
    Delete(Vec<BufferId>),
    /// Forget buffers.
    Free(Vec<BufferId>),
    /// Make buffers that return this error on use.
    Poison {
        /// The buffers.
        buffers: Vec<BufferId>,
        /// The error.
        error: Status,
    },
    /// Compile a program, or load the executable that another host of the island compiled.
    Compile {
        /// Correlates the answer.
        ticket: CommandTicket,
        /// The program.
        executable: ExecutableId,
        /// Portable artifact.
        program: Arc<Vec<u8>>,
        /// Serialized compile options.
        options: Arc<Vec<u8>>,
        /// The island-local numbers of its devices.
        devices: Vec<u32>,
        /// Replicas and partitions.
        grid: (u32, u32),
        /// Whether to compile or to load.
        role: CompileRole,
    },
    /// Prepare a program that spans several islands, which must consist of collectives only.
    CompileExchange {
        /// Correlates the answer.
        ticket: CommandTicket,
        /// The program.
        executable: ExecutableId,
        /// Portable artifact.
        program: Arc<Vec<u8>>,
        /// Host of each device position.
        owners: Arc<[HostId]>,
    },
    /// Run a program that consists of collectives only, over the data plane.
    Exchange {
        /// The program.
        executable: ExecutableId,
        /// Its arguments.
        args: SmallVec<[BufferId; 8]>,
        /// The first result; the others follow consecutively.
        first_result: BufferId,
        /// This host's shards of each result.
        results: Vec<Arc<ArraySpec>>,
        /// First transfer tag of this run.
        first_tag: TransferTag,
        /// The client, for the timeline.
        client: ClientId,
    },
    /// Send rows to the shards that the data choose, and make arrays of the rows received.
    Sparse(Box<SparsePart>),
    /// Forget a program.
    FreeExecutable(ExecutableId),
    /// Parse a whole program: its dataflow, and the code of each of its functions.
    ReadProgram {
        /// Correlates the answer.
        ticket: CommandTicket,
        /// IFRT IR as written by the client's compiler.
        program: Arc<Vec<u8>>,
    },
    /// Keep this host's part of a whole program for later runs.
    LoadProgram {
        /// The program.
        executable: ExecutableId,
        /// The host's steps in each run, in order. Buffers are slots: first the arguments, then the
        /// buffers that the run makes; tags count from the run's first tag.
        steps: Arc<Vec<Command>>,
    },
    /// Run a whole program.
    Run {
        /// Sequence number in the island's launch order.
        sequence: u64,
        /// Sequence number of the launch or run that this host must have begun last; filled in when
        /// the command is dispatched.
        previous: u64,
        /// When the host must acknowledge it; filled in when the command is dispatched.
        acknowledge: Acknowledge,
        /// The program.
        executable: ExecutableId,
        /// Range of the host's steps to run.
        steps: Range<u32>,
        /// Its arguments: the first slots.
        args: Arc<[BufferId]>,
        /// The buffer of the first slot after the arguments; the others follow consecutively.
        first_buffer: BufferId,
        /// First transfer tag of this run.
        first_tag: TransferTag,
        /// The buffer that holds the completion, if requested.
        completion: Option<BufferId>,
        /// The plan that its collectives follow, counted from 1; 0 if no plan will be made.
        plan: u32,
        /// The client, for the timeline.
        client: ClientId,
    },
    /// A new plan for the collectives of a program; runs name the plan that they follow.
    Plan {
        /// The program.
        executable: ExecutableId,
        /// Number of the plan: that of the previous plan plus one.
        plan: u32,
        /// The script of [`Report::Planned`](crate::Report::Planned).
        script: Arc<str>,
    },
    /// Text of the optimised program.
    ProgramText {
        /// Correlates the answer.
        ticket: CommandTicket,
        /// The program.
        executable: ExecutableId,
    },
    /// Spill buffers to host memory; all buffers that share memory with them are listed too.
    Spill(Vec<BufferId>),
    /// Swap buffers back in to their devices, with all that share memory with them.
    Restore(Vec<BufferId>),
    /// Every batch of an input from this one on is an error; another host cannot make more.
    EndInput {
        /// The input.
        input: InputId,
        /// Number of batches before its end.
        batches: u64,
        /// The error.
        error: Status,
    },
    /// Report when a buffer sent by other islands has arrived, or has become an error.
    ReportArrival(BufferId),
    /// Report when all launches so far have finished.
    ReportEnd,
    /// Release idle pooled memory; a client has disconnected.
    Tidy,
    /// Data-plane addresses of all hosts; sent whenever a host joins and none is missing but those
    /// that are lost.
    Peers(Vec<(HostId, String)>),
}

/// One host's part in a sparse exchange.
#[derive(Debug, Clone)]
pub struct SparsePart {
    /// The operation.
    pub sparse: Sparse,
    /// The shards between which rows are exchanged.
    pub ends: Ends,
    /// The groups of arguments that this host has shards of.
    pub given: Vec<Group<BufferId>>,
    /// The groups of results that this host has shards of, with their specs.
    pub made: Vec<Group<(BufferId, Arc<ArraySpec>)>>,
    /// Each receiving host: the single message to it, and the numbers of its shards. Empty if this
    /// host has no shard of the arguments.
    pub to: Vec<(HostId, TransferTag, Vec<u32>)>,
    /// Each sending host: the single message from it, and the numbers of its shards.
    pub from: Vec<(HostId, TransferTag, Vec<u32>)>,
    /// Index among the collectives of its program, if it is one.
    pub number: u32,
    /// Collectives that finish before this one can begin on all hosts.
    pub after: Vec<u32>,
}

/// One group of values of a sparse exchange, on one host.
#[derive(Debug, Clone)]
pub struct Group<T> {
    /// Its values.
    pub values: Vec<T>,
    /// The numbers, over all groups, of this host's shards.
    pub shards: Vec<u32>,
}

/// When a host acknowledges a launch and those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acknowledge {
    /// Never.
    No,
    /// When the devices have finished it.
    Finished,
    /// When it has been enqueued on the devices.
    Enqueued,
}

/// Role of a host in a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CompileRole {
    /// Compile, then send the executable to these hosts.
    Leader(Vec<(HostId, TransferTag)>),
    /// Load the executable received from this host; compile if loading fails.
    Follower(HostId, TransferTag),
}

/// A message received that holds a part of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardPiece {
    /// The message.
    pub tag: TransferTag,
    /// Its sender.
    pub from: HostId,
    /// Region of the shard that it fills.
    pub region: Region,
}

/// A message sent that holds a part of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardSend {
    /// Index of the shard among those that the host holds.
    pub shard: u32,
    /// Region of the shard.
    pub region: Region,
    /// The message.
    pub tag: TransferTag,
    /// Its receiver.
    pub to: HostId,
    /// The channel it is sent on.
    pub channel: Channel,
}

/// A message that a host relays under another tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayHop {
    /// Its tag on arrival.
    pub tag: TransferTag,
    /// Its sender.
    pub from: HostId,
    /// Its tag on the next hop.
    pub onward: TransferTag,
    /// Its receiver.
    pub to: HostId,
    /// The channel it is sent on.
    pub channel: Channel,
}

/// The source of the bytes of a shard.
#[derive(Debug, Clone)]
pub struct PutSource {
    /// The bytes.
    pub data: bytes::Bytes,
    /// Tag of the message that carries the bytes if they are too large for the command.
    pub tag: TransferTag,
    /// Shape of the uploaded bytes.
    pub dims: Dims,
    /// Stride in bytes along each axis; `None` is row-major.
    pub byte_strides: Option<Vec<i64>>,
}
