//! The seam between the controller and its world: everything that goes in and comes out.

use std::ops::Range;
use std::sync::Arc;

use base::{
    BufferId, Bytes, ClientId, DeviceId, ExecutableId, HostId, InputId, Nanos, Status, TransferTag,
};
use ir::{ArraySpec, DType, Dims, Ends, Partition, Region, Sparse};
use smallvec::SmallVec;

use crate::accounts::Share;

/// A name that a client chose for an array or an upload; unique within the client.
pub type Handle = u64;

/// Correlates a request of one client with its reply.
pub type RequestId = u64;

/// Correlates a command that asks a host for an answer with that answer.
pub type Ticket = u64;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A client connected.
    ClientJoined {
        /// Which client.
        client: ClientId,
        /// What it is entitled to.
        share: Share,
    },
    /// A client went away; everything it held is freed.
    ClientLeft(ClientId),
    /// A client asked for something.
    Request {
        /// Who asks.
        client: ClientId,
        /// Name of the request in the reply.
        id: RequestId,
        /// What is asked.
        request: Request,
    },
    /// The bytes of an upload have arrived whole.
    UploadArrived {
        /// Whose upload.
        client: ClientId,
        /// The client's name for it.
        upload: Handle,
        /// The bytes. The controller only passes them on.
        data: bytes::Bytes,
    },
    /// A client takes back an upload that it did not use.
    UploadDropped {
        /// Whose upload.
        client: ClientId,
        /// The client's name for it.
        upload: Handle,
    },
    /// A host connected and described itself.
    HostJoined {
        /// Which host.
        host: HostId,
        /// What it said.
        info: HostInfo,
    },
    /// A host is gone.
    HostLost {
        /// Which host.
        host: HostId,
        /// How that was noticed.
        cause: String,
    },
    /// A host reported.
    Host {
        /// Which host.
        host: HostId,
        /// What it reported.
        report: Report,
    },
}

/// What the world must do.
#[derive(Debug)]
pub enum Effect {
    /// Send a command to a host, after all earlier ones.
    ToHost {
        /// Which host.
        host: HostId,
        /// What it shall do.
        command: Command,
    },
    /// Answer a request.
    Reply {
        /// Whose request.
        client: ClientId,
        /// Which request.
        id: RequestId,
        /// The answer.
        result: Result<Reply, Status>,
    },
    /// End this host's process; it is lost or its island is.
    StopHost(HostId),
    /// Tell a host, ahead of all commands, that what it still expects from another will not come.
    LosePeer {
        /// Who is told.
        host: HostId,
        /// Who is lost.
        lost: HostId,
        /// What the messages of the lost one become.
        error: Status,
    },
}

/// What a client may ask.
#[derive(Debug)]
pub enum Request {
    /// Make an array from uploaded bytes.
    Put {
        /// Name of the new array.
        array: Handle,
        /// What it is.
        spec: ArraySpec,
        /// Which upload fills which device positions.
        shards: Vec<PutShard>,
    },
    /// Make arrays that hold nothing but an error.
    MakeErrors {
        /// Names of the new arrays.
        arrays: Vec<Handle>,
        /// What they would be.
        specs: Vec<ArraySpec>,
        /// The error every use of them gives.
        error: Status,
    },
    /// Make one array of single-device arrays, sharing their buffers.
    Assemble {
        /// Name of the new array.
        array: Handle,
        /// Shape and sharding of the new array; `dtype` is that of the parts.
        spec: ArraySpec,
        /// One single-device array per device position.
        parts: Vec<Handle>,
    },
    /// Make single-device arrays of one array, sharing its buffers.
    Disassemble {
        /// The array.
        array: Handle,
        /// Name of the new array of each device position.
        results: Vec<Handle>,
    },
    /// The first shard of a replicated array, sharing its buffer.
    FullyReplicatedShard {
        /// The array.
        array: Handle,
        /// Name of the new array.
        result: Handle,
    },
    /// Rearrange whole shards among arrays on the same devices.
    Remap {
        /// Inputs.
        arrays: Vec<Handle>,
        /// Names of the new arrays.
        results: Vec<Handle>,
        /// What the new arrays are.
        specs: Vec<ArraySpec>,
        /// For each result and device position, the input and its position.
        sources: Vec<Vec<ShardSource>>,
        /// What becomes of the inputs.
        semantics: CopySemantics,
    },
    /// The same bytes under other specs.
    Bitcast {
        /// Inputs.
        arrays: Vec<Handle>,
        /// Names of the new arrays.
        results: Vec<Handle>,
        /// What the new arrays are.
        specs: Vec<ArraySpec>,
        /// What becomes of the inputs.
        semantics: CopySemantics,
    },
    /// Copy each shard to the device at the same position of another device list.
    Copy {
        /// Inputs.
        arrays: Vec<Handle>,
        /// Names of the new arrays.
        results: Vec<Handle>,
        /// Target devices; none keeps those of each input.
        devices: Option<Arc<[DeviceId]>>,
        /// Target memory kind; none keeps that of each input.
        memory: Option<Option<Arc<str>>>,
        /// What becomes of the inputs.
        semantics: CopySemantics,
    },
    /// Move arrays to any sharding on any devices.
    Reshard {
        /// Inputs.
        arrays: Vec<Handle>,
        /// Names of the new arrays.
        results: Vec<Handle>,
        /// What the new arrays are.
        specs: Vec<ArraySpec>,
        /// What becomes of the inputs.
        semantics: CopySemantics,
    },
    /// Fetch the bytes of a single-device or replicated array.
    Read {
        /// The array.
        array: Handle,
        /// Distance in bytes between neighbours along each axis; none is row-major.
        byte_strides: Option<Vec<i64>>,
    },
    /// Wait until arrays are computed.
    CheckReady {
        /// The arrays.
        arrays: Vec<Handle>,
    },
    /// Free the device memory of arrays; their names stay.
    Delete {
        /// The arrays.
        arrays: Vec<Handle>,
    },
    /// Has an array been deleted or donated?
    IsDeleted {
        /// The array.
        array: Handle,
    },
    /// Forget the names of arrays, freeing what no other name shares.
    Destruct {
        /// The arrays.
        arrays: Vec<Handle>,
    },
    /// Compile a program for devices.
    Compile {
        /// Portable StableHLO artifact.
        program: Vec<u8>,
        /// Serialized compile options.
        options: Vec<u8>,
        /// Devices in the order of the device assignment.
        devices: Arc<[DeviceId]>,
        /// Replicas and partitions, whose product is the device count.
        grid: (u32, u32),
    },
    /// Compile a whole program, whose functions run on devices of any islands.
    CompileProgram {
        /// IFRT IR as the client's compiler writes it.
        program: Vec<u8>,
        /// Serialized compile options and grid of each function, by a name that the program's
        /// reader knows.
        options: Vec<(String, Vec<u8>, (u32, u32))>,
        /// The device that each number in the program stands for.
        devices: Arc<[DeviceId]>,
    },
    /// What the compiler found out about a program.
    Metadata {
        /// The program.
        executable: Handle,
    },
    /// Estimated cost of a program.
    CostAnalysis {
        /// The program.
        executable: Handle,
    },
    /// Memory that each function of a whole program needs.
    FunctionMemory {
        /// The program.
        executable: Handle,
    },
    /// Estimated cost of each function of a whole program.
    FunctionCosts {
        /// The program.
        executable: Handle,
    },
    /// Text of the optimised program.
    ProgramText {
        /// The program.
        executable: Handle,
    },
    /// Run a program.
    Execute {
        /// The program.
        executable: Handle,
        /// Its arguments.
        args: SmallVec<[Handle; 8]>,
        /// Names of the results; empty asks the controller for names and specs.
        results: SmallVec<[Handle; 8]>,
        /// Arguments that must survive even if the program could reuse them.
        keep: SmallVec<[u32; 4]>,
        /// Name under which the completion can be awaited; zero asks for one.
        status: Option<Handle>,
        /// Devices to run a portable program on; empty means those it was compiled for.
        devices: Vec<DeviceId>,
    },
    /// Wait for the completion of a run.
    Completion {
        /// Name given to `Execute`.
        status: Handle,
    },
    /// Is this program deleted?
    ExecutableIsDeleted {
        /// The program.
        executable: Handle,
    },
    /// Unload a program but keep its name.
    DeleteExecutable {
        /// The program.
        executable: Handle,
    },
    /// Unload a program and forget its name.
    DestructExecutable {
        /// The program.
        executable: Handle,
    },
}

/// What becomes of the inputs of an array operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopySemantics {
    /// The results share nothing with the inputs.
    AlwaysCopy,
    /// The results may share the inputs' buffers.
    ReuseInput,
    /// The inputs are deleted.
    DonateInput,
}

/// One upload and the device positions it fills.
#[derive(Debug, Clone)]
pub struct PutShard {
    /// Device positions of the array's sharding; the bytes go to each.
    pub positions: Vec<u32>,
    /// Name of the upload.
    pub upload: Handle,
    /// Shape of the uploaded bytes.
    pub dims: Dims,
    /// Distance in bytes between neighbours along each axis; none is row-major.
    pub byte_strides: Option<Vec<i64>>,
}

/// Where a shard of a remapped array comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardSource {
    /// Which input array.
    pub array: u32,
    /// Which device position of it.
    pub position: u32,
}

/// Answers to requests.
#[derive(Debug)]
pub enum Reply {
    /// Done; nothing to say.
    Done,
    /// The bytes asked for by `Read`.
    Data(bytes::Bytes),
    /// Answer to `IsDeleted` and `ExecutableIsDeleted`.
    Deleted(bool),
    /// Answer to `Compile`.
    Compiled {
        /// The client's name for the program from now on.
        executable: Handle,
        /// What the compiler found out.
        compiled: Arc<Compiled>,
        /// Devices it runs on.
        devices: Arc<[DeviceId]>,
        /// Name and devices of each function of a whole program.
        functions: Option<Vec<(String, Arc<[DeviceId]>)>>,
    },
    /// Answer to `Metadata`.
    Metadata(Arc<Compiled>, Arc<[ArraySpec]>),
    /// Answer to `CostAnalysis`.
    Costs(Costs),
    /// Answer to `FunctionMemory`.
    FunctionMemory(Vec<(String, MemoryStats)>),
    /// Answer to `FunctionCosts`.
    FunctionCosts(Vec<(String, Costs)>),
    /// Answer to `ProgramText`.
    Text(String),
    /// Answer to `Execute`.
    Executed {
        /// Name under which the completion can be awaited; zero if not asked for.
        status: Handle,
        /// Name and spec of each result, unless the client chose the names.
        outputs: Vec<(Handle, Arc<ArraySpec>)>,
        /// What the compiler found out.
        compiled: Arc<Compiled>,
    },
}

/// Properties of a cost analysis, by name.
pub type Costs = Vec<(String, f64)>;

/// Sizes: generated code, arguments, outputs, aliases, temporaries, then the same five on the
/// host, then the peak.
pub type MemoryStats = [i64; 11];

/// What a host says of itself when it joins.
#[derive(Debug, Clone, PartialEq)]
pub struct HostInfo {
    /// Process id on its machine.
    pub process: u32,
    /// Where its data plane listens.
    pub data_address: String,
    /// Version of the host's jaxlib.
    pub jaxlib: String,
    /// Platform that selects JAX's lowerings: `cpu`, `cuda`.
    pub platform: String,
    /// Version text of the platform.
    pub platform_version: String,
    /// What the vendor calls its devices.
    pub device_kind: Arc<str>,
    /// Memory kinds of its devices, the default first.
    pub memories: Arc<[Arc<str>]>,
    /// Devices it owns.
    pub devices: u32,
    /// Bytes of memory that each of them has; none if it is not to be counted.
    pub device_memory: Option<u64>,
}

/// What a host reports.
#[derive(Debug)]
pub enum Report {
    /// The launches up to the next one that was to be acknowledged are done.
    Finished {
        /// How long the host was busy with them.
        busy: Nanos,
    },
    /// The answer to a command with a ticket.
    Done {
        /// Which command.
        ticket: Ticket,
        /// The answer.
        result: Result<HostReply, Status>,
    },
    /// A host has made the next batch of an input, or there will be no more.
    Batch {
        /// The input.
        input: InputId,
        /// Why there are no more: the data have ended, or its function failed.
        end: Option<Status>,
    },
    /// A host has sent rows of a sparse exchange to others; only the data say how many.
    Moved {
        /// For whom.
        client: ClientId,
        /// How much.
        bytes: Bytes,
    },
    /// The order of launches was broken; the island cannot go on.
    OrderBroken {
        /// Sequence number expected next and the one found.
        message: String,
    },
}

/// Answers of hosts.
#[derive(Debug)]
pub enum HostReply {
    /// Done; nothing to say.
    Done,
    /// The bytes of a `Read`.
    Data(bytes::Bytes),
    /// What the compiler found out.
    Compiled(Box<Compiled>),
    /// Answer to `ProgramText`.
    Text(String),
    /// Answer to `ReadProgram`.
    Program {
        /// The program, as [`ir::Program`] prints it.
        text: String,
        /// The same with runs of small calls made one call each.
        batched: String,
        /// The code of each function of the latter, in its order.
        functions: Vec<FunctionCode>,
    },
}

/// One function of a whole program.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionCode {
    /// Under which of these names its compile options may be found, the best first.
    pub options: Vec<String>,
    /// Portable artifact.
    pub artifact: Vec<u8>,
}

/// What a compiler found out about a program.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Compiled {
    /// Name of the program.
    pub name: String,
    /// Digest of the compiled program, if the compiler gives one.
    pub fingerprint: Option<Vec<u8>>,
    /// Partition of each parameter; none if the compiler does not say.
    pub parameters: Option<Vec<Cut>>,
    /// Minor-to-major axes of each parameter.
    pub parameter_layouts: Vec<Vec<i64>>,
    /// Each result.
    pub outputs: Vec<OutputSpec>,
    /// Minor-to-major axes of each result.
    pub output_layouts: Vec<Vec<i64>>,
    /// Parameters whose buffers the results may reuse.
    pub donated: Vec<u32>,
    /// Number of parameters.
    pub parameter_count: u32,
    /// Memory it needs.
    pub memory: Option<MemoryStats>,
    /// Size of the generated code in bytes.
    pub code_bytes: i64,
    /// Estimated cost; none if it was not compiled by XLA.
    pub costs: Option<Costs>,
    /// The input whose next batch is what a run gives; none if it computes something.
    pub input: Option<InputId>,
}

/// How a parameter or result is cut, and the compiler's own words for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// How it is cut over the program's devices.
    pub partition: Partition,
    /// Serialized `OpSharding`, which can say more (that copies are yet to be summed, say); empty
    /// if there is none. The controller only passes it on.
    pub encoded: bytes::Bytes,
}

/// One result of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputSpec {
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole array.
    pub dims: Dims,
    /// How it is cut over the program's devices.
    pub cut: Cut,
    /// Memory kind, if not the default.
    pub memory: Option<Arc<str>>,
}

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
        /// Where each piece goes: which of this host's shards, region within it, message, target
        /// host.
        pieces: Vec<(u32, Region, TransferTag, HostId)>,
    },
    /// Make an array from messages of other hosts.
    Receive {
        /// The new buffer.
        buffer: BufferId,
        /// Its description.
        spec: Arc<ArraySpec>,
        /// This host's device positions and the pieces their common region is made of.
        shards: Vec<(Vec<u32>, Vec<Piece>)>,
        /// Messages to pass on to other hosts of this island, under another tag.
        relays: Vec<(TransferTag, TransferTag, HostId)>,
    },
    /// Fetch the bytes of a shard.
    Read {
        /// Name of the answer.
        ticket: Ticket,
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
        ticket: Ticket,
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
        ticket: Ticket,
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
        ticket: Ticket,
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
        ticket: Ticket,
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
        /// Who asked, for the timeline.
        client: ClientId,
    },
    /// Text of the optimised program.
    ProgramText {
        /// Name of the answer.
        ticket: Ticket,
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

/// One message that is a part of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// The message.
    pub tag: TransferTag,
    /// Who sends it.
    pub from: HostId,
    /// Where in the shard its bytes belong.
    pub region: Region,
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
