//! What hosts are told to do.

use std::ops::Range;
use std::sync::Arc;

use base::{BufferId, Channel, ClientId, ExecutableId, HostId, InputId, Status, TransferTag};
use ir::{ArraySpec, Dims, Ends, Region, Sparse};
use smallvec::SmallVec;

/// Correlates a command that asks a host for an answer with that answer.
pub type CommandTicket = u64;

/// What a host is told to do. Commands are carried out in order; those that wait (for a
/// computation or a message) are finished on the side and hold up only what needs them.
#[derive(Debug, Clone)]
pub enum Command {
    /// Run a program on this host's share of its devices.
    Launch {
        /// Position in the island's one order.
        sequence: u64,
        /// The launch of that order which this host must have handed over last; filled in when
        /// the command leaves.
        previous: u64,
        /// Shall the host report? Filled in when the command leaves.
        acknowledge: Acknowledge,
        /// The program.
        executable: ExecutableId,
        /// Its arguments.
        args: SmallVec<[BufferId; 8]>,
        /// The first result; the others follow.
        first_result: BufferId,
        /// Number of results.
        results: u32,
        /// Arguments that must survive.
        keep: SmallVec<[u32; 4]>,
        /// Where the completion is kept, if asked for.
        completion: Option<BufferId>,
        /// Who asked, for the timeline.
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
    /// Make an array that shares the shards of others.
    Gather {
        /// The new buffer.
        buffer: BufferId,
        /// Its description.
        spec: Arc<ArraySpec>,
        /// For each of this host's positions: source buffer and which of this host's shards of it.
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
        /// The pieces, in the order in which they leave on each channel.
        pieces: Vec<ShardSend>,
        /// For whom; what one client sends on a channel leaves in the order of these commands.
        client: ClientId,
    },
    /// Pass messages on that this host itself has no use for.
    Relay(Vec<RelayHop>),
    /// Make an array from messages of other hosts.
    Receive {
        /// The new buffer.
        buffer: BufferId,
        /// Its description.
        spec: Arc<ArraySpec>,
        /// This host's device positions and the pieces their common region is made of.
        shards: Vec<(Vec<u32>, Vec<ShardPiece>)>,
        /// Messages among these to pass on to other hosts of this island.
        relays: Vec<RelayHop>,
    },
    /// Fetch the bytes of a shard.
    Read {
        /// Name of the answer.
        ticket: CommandTicket,
        /// The buffer.
        buffer: BufferId,
        /// Which of this host's shards.
        shard: u32,
        /// Layout of the answer.
        byte_strides: Option<Vec<i64>>,
    },
    /// Answer once the buffers are computed.
    CheckReady {
        /// Name of the answer.
        ticket: CommandTicket,
        /// The buffers.
        buffers: Vec<BufferId>,
    },
    /// Free the device memory of buffers, whoever shares it.
    Delete(Vec<BufferId>),
    /// Forget buffers.
    Free(Vec<BufferId>),
    /// Make buffers that give this error on use.
    Poison {
        /// The buffers.
        buffers: Vec<BufferId>,
        /// The error.
        error: Status,
    },
    /// Compile a program, or load what another host of the island compiled.
    Compile {
        /// Name of the answer.
        ticket: CommandTicket,
        /// The program.
        executable: ExecutableId,
        /// Portable artifact.
        program: Arc<Vec<u8>>,
        /// Serialized compile options.
        options: Arc<Vec<u8>>,
        /// The island's numbers of its devices.
        devices: Vec<u32>,
        /// Replicas and partitions.
        grid: (u32, u32),
        /// Compile, or load?
        role: CompileRole,
    },
    /// Get ready for a program over several islands, if it is nothing but collectives.
    CompileExchange {
        /// Name of the answer.
        ticket: CommandTicket,
        /// The program.
        executable: ExecutableId,
        /// Portable artifact.
        program: Arc<Vec<u8>>,
        /// Host of each device position.
        owners: Arc<[HostId]>,
    },
    /// Run a program that is nothing but collectives, over the data plane.
    Exchange {
        /// The program.
        executable: ExecutableId,
        /// Its arguments.
        args: SmallVec<[BufferId; 8]>,
        /// The first result; the others follow.
        first_result: BufferId,
        /// This host's shards of each result.
        results: Vec<Arc<ArraySpec>>,
        /// First of the tags that are this run's.
        first_tag: TransferTag,
        /// Who asked, for the timeline.
        client: ClientId,
    },
    /// Send rows to the shards that the data choose, and make arrays of those that come.
    Sparse(Box<SparsePart>),
    /// Forget a program.
    FreeExecutable(ExecutableId),
    /// Read a whole program: what it computes where, and the code of each of its functions.
    ReadProgram {
        /// Name of the answer.
        ticket: CommandTicket,
        /// IFRT IR as the client's compiler writes it.
        program: Arc<Vec<u8>>,
    },
    /// Keep this host's part of a whole program for later runs.
    LoadProgram {
        /// Its name.
        executable: ExecutableId,
        /// What the host does in each run, in order. Buffers are slots: first the arguments, then
        /// what the run makes; tags count from the first that is the run's.
        steps: Arc<Vec<Command>>,
    },
    /// Run a whole program.
    Run {
        /// Position in the island's one order.
        sequence: u64,
        /// The launch or run of that order which this host must have begun last; filled in when
        /// the command leaves.
        previous: u64,
        /// Shall the host report? Filled in when the command leaves.
        acknowledge: Acknowledge,
        /// The program.
        executable: ExecutableId,
        /// Which of the host's steps.
        steps: Range<u32>,
        /// Its arguments: the first slots.
        args: Arc<[BufferId]>,
        /// The buffer of the slot after the arguments; the others follow.
        first_buffer: BufferId,
        /// First of the tags that are this run's.
        first_tag: TransferTag,
        /// Where the completion is kept, if asked for.
        completion: Option<BufferId>,
        /// By which plan its collectives go, counted from 1; 0 if none will be made.
        plan: u32,
        /// Who asked, for the timeline.
        client: ClientId,
    },
    /// Another plan for the collectives of a program; runs say from when it holds.
    Plan {
        /// The program.
        executable: ExecutableId,
        /// Its number: one more than that of the one before.
        plan: u32,
        /// What [`Report::Planned`](crate::Report::Planned) said.
        script: Arc<str>,
    },
    /// Text of the optimised program.
    ProgramText {
        /// Name of the answer.
        ticket: CommandTicket,
        /// The program.
        executable: ExecutableId,
    },
    /// Move buffers to the host's own memory; all that share memory with them are named too.
    Spill(Vec<BufferId>),
    /// Bring buffers back to their devices, and all that share memory with them.
    Restore(Vec<BufferId>),
    /// Every batch of an input from this one on is an error; another host can make no more.
    EndInput {
        /// The input.
        input: InputId,
        /// Batches before its end.
        batches: u64,
        /// The error.
        error: Status,
    },
    /// Report when a buffer that other islands send is there, or has become an error.
    ReportArrival(BufferId),
    /// Report when all launches so far have ended.
    ReportEnd,
    /// Give idle memory back; somebody who used much of it is gone.
    Tidy,
    /// Where the hosts of the run listen; sent once all have joined.
    Peers(Vec<(HostId, String)>),
}

/// One host's part in a sparse exchange.
#[derive(Debug, Clone)]
pub struct SparsePart {
    /// What is exchanged.
    pub sparse: Sparse,
    /// Between which shards.
    pub ends: Ends,
    /// The groups of arguments that this host has shards of.
    pub given: Vec<Group<BufferId>>,
    /// The same of the results, with their descriptions.
    pub made: Vec<Group<(BufferId, Arc<ArraySpec>)>>,
    /// Each host that receives: the one message to it, and the numbers of its shards. None comes
    /// from a host that gives nothing, or goes from it.
    pub to: Vec<(HostId, TransferTag, Vec<u32>)>,
    /// Each host that gives: its one message, and the numbers of its shards.
    pub from: Vec<(HostId, TransferTag, Vec<u32>)>,
    /// Which collective of its program it is, if it is one.
    pub number: u32,
    /// Collectives that end before this one can begin on all hosts.
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

/// When a host reports on a launch and those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acknowledge {
    /// Never.
    No,
    /// When the devices have finished it.
    Finished,
    /// When the devices have been given it.
    Enqueued,
}

/// Who compiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CompileRole {
    /// Compile, then send the executable to these hosts.
    Leader(Vec<(HostId, TransferTag)>),
    /// Load the executable that arrives from this host; compile if that does not work.
    Follower(HostId, TransferTag),
}

/// One message that arrives and is a part of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardPiece {
    /// The message.
    pub tag: TransferTag,
    /// Who sends it.
    pub from: HostId,
    /// Where in the shard its bytes belong.
    pub region: Region,
}

/// One message that leaves and is a part of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardSend {
    /// Which shard: a number among those that the host holds.
    pub shard: u32,
    /// What part of it.
    pub region: Region,
    /// The message.
    pub tag: TransferTag,
    /// Who gets it.
    pub to: HostId,
    /// How it gets there.
    pub channel: Channel,
}

/// One message that a host passes on under another tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayHop {
    /// As it arrives.
    pub tag: TransferTag,
    /// Who sends it.
    pub from: HostId,
    /// As it goes on.
    pub onward: TransferTag,
    /// Who gets it.
    pub to: HostId,
    /// How it gets there.
    pub channel: Channel,
}

/// Where the bytes of a shard come from.
#[derive(Debug, Clone)]
pub struct PutSource {
    /// The bytes.
    pub data: bytes::Bytes,
    /// Message under which they travel if they are too large to travel in the command.
    pub tag: TransferTag,
    /// Shape of the uploaded bytes.
    pub dims: Dims,
    /// Distance in bytes between neighbours along each axis; none is row-major.
    pub byte_strides: Option<Vec<i64>>,
}
