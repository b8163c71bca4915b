//! The seam between the controller and its world: everything that goes in and comes out.

use std::sync::Arc;

use base::{
    BufferId, Bytes, ClientId, DeviceId, ExecutableId, HostId, InputId, IslandId, Nanos, Status,
};
use ir::{ArraySpec, DType, Dims, Partition};
use smallvec::SmallVec;

use crate::accounts::Share;
use crate::command::{Command, CommandTicket};

/// A name that a client chose for an array or an upload; unique within the client.
pub type Handle = u64;

/// Correlates a request of one client with its reply.
pub type RequestId = u64;

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
    /// A client has the bytes of a read, or wants them no more.
    ReadFetched {
        /// Whose read.
        client: ClientId,
        /// The request that asked for it.
        read: RequestId,
    },
    /// Some time has passed.
    Tick,
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
    /// An island whose hosts were ended must come back.
    RestartIsland(IslandId),
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
    Costs(CostAnalysis),
    /// Answer to `FunctionMemory`.
    FunctionMemory(Vec<(String, MemoryStats)>),
    /// Answer to `FunctionCosts`.
    FunctionCosts(Vec<(String, CostAnalysis)>),
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
pub type CostAnalysis = Vec<(String, f64)>;

/// Sizes: generated code, arguments, outputs, aliases, temporaries, then the same five on the
/// host, then the peak.
pub type MemoryStats = [i64; 11];

/// What a host says of itself when it joins.
#[derive(Debug, Clone, PartialEq)]
pub struct HostInfo {
    /// Process id on its machine.
    pub process: u32,
    /// Where its data plane listens for hosts of its island, and for others if it has no channels.
    pub data_address: String,
    /// Where each of its channels onto the network between islands listens.
    pub channels: Vec<String>,
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
        ticket: CommandTicket,
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
    /// A buffer that other islands send is there, or has become an error.
    Arrived {
        /// The buffer.
        buffer: BufferId,
    },
    /// A host has sent rows of a sparse exchange to others; only the data say how many.
    Moved {
        /// For whom.
        client: ClientId,
        /// How much.
        bytes: Bytes,
    },
    /// A host has made a plan for the collectives of a program; or they cannot go on by the one
    /// they have, and go as they come again.
    Planned {
        /// The program.
        executable: ExecutableId,
        /// The plan by which they go.
        plan: u32,
        /// The one that they shall go by from now on; empty if that is as they come.
        script: String,
        /// What a run was seen to take, and what it is told to take by the new plan, if it is one.
        told: Option<(Nanos, Nanos)>,
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
    pub parameters: Option<Vec<CompiledSharding>>,
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
    pub costs: Option<CostAnalysis>,
    /// The input whose next batch is what a run gives; none if it computes something.
    pub input: Option<InputId>,
}

/// How a parameter or result is cut, and the compiler's own words for it.
#[derive(Debug, Clone, PartialEq)]
pub struct CompiledSharding {
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
    pub cut: CompiledSharding,
    /// Memory kind, if not the default.
    pub memory: Option<Arc<str>>,
}
