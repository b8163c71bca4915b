//! The controller's protocol: all events and requests that enter it, and all effects and replies
//! that leave it.

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

/// An input of the state machine.
#[derive(Debug)]
pub enum Event {
    /// A client connected.
    ClientJoined {
        /// Which client.
        client: ClientId,
        /// Its weight and priority.
        share: Share,
    },
    /// A client disconnected; everything it held is freed.
    ClientLeft(ClientId),
    /// A client sent a request.
    Request {
        /// Which client.
        client: ClientId,
        /// Correlates the reply with the request.
        id: RequestId,
        /// The request.
        request: Request,
    },
    /// All bytes of an upload have arrived.
    UploadArrived {
        /// Which client.
        client: ClientId,
        /// The client's name for it.
        upload: Handle,
        /// The bytes, which the controller forwards without reading them.
        data: bytes::Bytes,
    },
    /// A client withdraws an upload that it did not use.
    UploadDropped {
        /// Which client.
        client: ClientId,
        /// The client's name for it.
        upload: Handle,
    },
    /// A client has fetched the bytes of a read, or no longer wants them.
    ReadFetched {
        /// Which client.
        client: ClientId,
        /// The `Read` request.
        read: RequestId,
    },
    /// Time has passed: the watchdog checks for launches that do not end.
    Tick,
    /// A host connected and described itself.
    HostJoined {
        /// Which host.
        host: HostId,
        /// Its description.
        info: HostInfo,
    },
    /// A host is lost.
    HostLost {
        /// Which host.
        host: HostId,
        /// How the failure was detected.
        cause: String,
    },
    /// A host sent a report.
    Host {
        /// Which host.
        host: HostId,
        /// The report.
        report: Report,
    },
}

/// An output of the state machine, to be carried out by its caller.
#[derive(Debug)]
pub enum Effect {
    /// Send a command to a host, after all earlier ones.
    ToHost {
        /// Which host.
        host: HostId,
        /// The command.
        command: Command,
    },
    /// Reply to a request.
    Reply {
        /// Which client.
        client: ClientId,
        /// Which request.
        id: RequestId,
        /// The reply.
        result: Result<Reply, Status>,
    },
    /// Stop the process of this host; the host is lost, or its island is.
    StopHost(HostId),
    /// Restart an island whose hosts were stopped.
    RestartIsland(IslandId),
    /// Notify a host, ahead of all commands, that a peer is lost and its outstanding messages will
    /// not arrive.
    LosePeer {
        /// The host to notify.
        host: HostId,
        /// The peer that is lost.
        lost: HostId,
        /// The error that messages of the lost peer become.
        error: Status,
    },
}

/// A client's request.
#[derive(Debug)]
pub enum Request {
    /// Make an array from uploaded bytes.
    Put {
        /// Name of the new array.
        array: Handle,
        /// Its shape, dtype and sharding.
        spec: ArraySpec,
        /// Which upload fills which device positions.
        shards: Vec<PutShard>,
    },
    /// Make arrays that hold only an error.
    MakeErrors {
        /// Names of the new arrays.
        arrays: Vec<Handle>,
        /// The specs that the arrays would have had.
        specs: Vec<ArraySpec>,
        /// The error that every use of them returns.
        error: Status,
    },
    /// Assemble one array from single-device arrays, sharing their buffers.
    Assemble {
        /// Name of the new array.
        array: Handle,
        /// Shape and sharding of the new array; `dtype` is that of the parts.
        spec: ArraySpec,
        /// One single-device array per device position.
        parts: Vec<Handle>,
    },
    /// Split an array into single-device arrays, sharing its buffers.
    Disassemble {
        /// The array.
        array: Handle,
        /// Name of the new array of each device position.
        results: Vec<Handle>,
    },
    /// Make a single-device array of the first shard of a replicated array, sharing its buffer.
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
        /// Specs of the new arrays.
        specs: Vec<ArraySpec>,
        /// For each result and device position, the input and its position.
        sources: Vec<Vec<ShardSource>>,
        /// Whether the inputs are copied, reused or donated.
        semantics: CopySemantics,
    },
    /// Reinterpret the same bytes under other specs.
    Bitcast {
        /// Inputs.
        arrays: Vec<Handle>,
        /// Names of the new arrays.
        results: Vec<Handle>,
        /// Specs of the new arrays.
        specs: Vec<ArraySpec>,
        /// Whether the inputs are copied, reused or donated.
        semantics: CopySemantics,
    },
    /// Copy each shard to the device at the same position of another device list.
    Copy {
        /// Inputs.
        arrays: Vec<Handle>,
        /// Names of the new arrays.
        results: Vec<Handle>,
        /// Target devices; `None` keeps those of each input.
        devices: Option<Arc<[DeviceId]>>,
        /// Target memory kind; `None` keeps that of each input.
        memory: Option<Option<Arc<str>>>,
        /// Whether the inputs are copied, reused or donated.
        semantics: CopySemantics,
    },
    /// Reshard arrays: transfer them to any sharding on any devices.
    Reshard {
        /// Inputs.
        arrays: Vec<Handle>,
        /// Names of the new arrays.
        results: Vec<Handle>,
        /// Specs of the new arrays.
        specs: Vec<ArraySpec>,
        /// Whether the inputs are copied, reused or donated.
        semantics: CopySemantics,
    },
    /// Fetch the bytes of a single-device or replicated array.
    Read {
        /// The array.
        array: Handle,
        /// Stride in bytes along each axis; `None` is row-major.
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
    /// Ask whether an array has been deleted or donated.
    IsDeleted {
        /// The array.
        array: Handle,
    },
    /// Forget the names of arrays, freeing buffers that no other name shares.
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
        /// IFRT IR as written by the client's compiler.
        program: Vec<u8>,
        /// Serialized compile options and grid of each function, by a name that the host that reads
        /// the program can look up.
        options: Vec<(String, Vec<u8>, (u32, u32))>,
        /// The device that each device number in the program refers to.
        devices: Arc<[DeviceId]>,
    },
    /// Ask for the compiled metadata of a program.
    Metadata {
        /// The program.
        executable: Handle,
    },
    /// Estimate the cost of a program.
    CostAnalysis {
        /// The program.
        executable: Handle,
    },
    /// Ask for the memory that each function of a whole program needs.
    FunctionMemory {
        /// The program.
        executable: Handle,
    },
    /// Estimate the cost of each function of a whole program.
    FunctionCosts {
        /// The program.
        executable: Handle,
    },
    /// Ask for the text of the optimised program.
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
        /// Names of the results; if empty, the controller chooses names and returns them with the
        /// specs.
        results: SmallVec<[Handle; 8]>,
        /// Arguments that must not be donated even if the program could reuse them.
        keep: SmallVec<[u32; 4]>,
        /// Name under which the completion can be awaited; zero lets the controller choose it.
        status: Option<Handle>,
        /// Devices to run a portable program on; if empty, those it was compiled for.
        devices: Vec<DeviceId>,
    },
    /// Wait for the completion of a run.
    Completion {
        /// Name given to `Execute`.
        status: Handle,
    },
    /// Ask whether a program is deleted.
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

/// What happens to the inputs of an array operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopySemantics {
    /// The results share no buffers with the inputs.
    AlwaysCopy,
    /// The results may share the inputs' buffers.
    ReuseInput,
    /// The inputs are deleted.
    DonateInput,
}

/// One upload and the device positions it fills.
#[derive(Debug, Clone)]
pub struct PutShard {
    /// Device positions in the array's sharding; the bytes are copied to each.
    pub positions: Vec<u32>,
    /// Name of the upload.
    pub upload: Handle,
    /// Shape of the uploaded bytes.
    pub dims: Dims,
    /// Stride in bytes along each axis; `None` is row-major.
    pub byte_strides: Option<Vec<i64>>,
}

/// The source of a shard of a remapped array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardSource {
    /// Index of the input array.
    pub array: u32,
    /// Device position within it.
    pub position: u32,
}

/// Replies to requests.
#[derive(Debug)]
pub enum Reply {
    /// Success without a value.
    Done,
    /// Reply to `Read`: the bytes.
    Data(bytes::Bytes),
    /// Reply to `IsDeleted` and `ExecutableIsDeleted`.
    Deleted(bool),
    /// Reply to `Compile`.
    Compiled {
        /// The client's handle for the program.
        executable: Handle,
        /// The compiled metadata.
        compiled: Arc<Compiled>,
        /// Devices it runs on.
        devices: Arc<[DeviceId]>,
        /// Name and devices of each function of a whole program.
        functions: Option<Vec<(String, Arc<[DeviceId]>)>>,
    },
    /// Reply to `Metadata`.
    Metadata(Arc<Compiled>, Arc<[ArraySpec]>),
    /// Reply to `CostAnalysis`.
    Costs(CostAnalysis),
    /// Reply to `FunctionMemory`.
    FunctionMemory(Vec<(String, MemoryStats)>),
    /// Reply to `FunctionCosts`.
    FunctionCosts(Vec<(String, CostAnalysis)>),
    /// Reply to `ProgramText`.
    Text(String),
    /// Reply to `Execute`.
    Executed {
        /// Name under which the completion can be awaited; zero if not requested.
        status: Handle,
        /// Name and spec of each result, unless the client chose the names.
        outputs: Vec<(Handle, Arc<ArraySpec>)>,
        /// The compiled metadata.
        compiled: Arc<Compiled>,
    },
}

/// Properties of a cost analysis, by name.
pub type CostAnalysis = Vec<(String, f64)>;

/// Memory statistics in bytes: generated code, arguments, outputs, aliases, temporaries, then the
/// same five on the host, then the peak.
pub type MemoryStats = [i64; 11];

/// The description that a host sends when it joins.
#[derive(Debug, Clone, PartialEq)]
pub struct HostInfo {
    /// Process id on its machine.
    pub process: u32,
    /// Data-plane address for hosts of its island, and for all peers if it has no channels.
    pub data_address: String,
    /// Address of each of its channels onto the network between islands.
    pub channels: Vec<String>,
    /// Version of the host's jaxlib.
    pub jaxlib: String,
    /// Platform that selects JAX's lowerings: `cpu`, `cuda`.
    pub platform: String,
    /// Version text of the platform.
    pub platform_version: String,
    /// The vendor's name for its devices.
    pub device_kind: Arc<str>,
    /// Memory kinds of its devices, the default first.
    pub memories: Arc<[Arc<str>]>,
    /// Devices it owns.
    pub devices: u32,
    /// Memory of each of its devices in bytes; `None` if it is not to be accounted.
    pub device_memory: Option<u64>,
}

/// A host's report.
#[derive(Debug)]
pub enum Report {
    /// Acknowledgement: the launches up to and including the oldest one to be acknowledged are
    /// finished, or enqueued under sequential dispatch.
    Finished {
        /// How long the host was busy with them.
        busy: Nanos,
    },
    /// The answer to a command that has a ticket.
    Done {
        /// Which command.
        ticket: CommandTicket,
        /// The answer.
        result: Result<HostReply, Status>,
    },
    /// A host has made the next batch of an input, or cannot make more.
    Batch {
        /// The input.
        input: InputId,
        /// Why there are no more: the end of the data, or an error of the input function.
        end: Option<Status>,
    },
    /// A buffer sent by other islands has arrived, or has become an error.
    Arrived {
        /// The buffer.
        buffer: BufferId,
    },
    /// A host has sent rows of a sparse exchange to others; only the data determine how many.
    Moved {
        /// The client it was sent for.
        client: ClientId,
        /// Bytes sent.
        bytes: Bytes,
    },
    /// A host has made a plan for the collectives of a program; or the collectives cannot keep to
    /// their current plan and are unplanned again.
    Planned {
        /// The program.
        executable: ExecutableId,
        /// The plan currently in use.
        plan: u32,
        /// The plan to use from now on; empty if the collectives are no longer planned.
        script: String,
        /// Measured time of a run, and its predicted time under the new plan, if there is one.
        predicted: Option<(Nanos, Nanos)>,
    },
    /// The launch order was violated; the island cannot continue.
    OrderBroken {
        /// The sequence number that was expected, and the one found.
        message: String,
    },
}

/// Answers of hosts.
#[derive(Debug)]
pub enum HostReply {
    /// Success without a value.
    Done,
    /// The bytes of a `Read`.
    Data(bytes::Bytes),
    /// The compiled metadata.
    Compiled(Box<Compiled>),
    /// Answer to `ProgramText`.
    Text(String),
    /// Answer to `ReadProgram`.
    Program {
        /// The program, as [`ir::Program`] prints it.
        text: String,
        /// The same with runs of small calls fused into one call each.
        batched: String,
        /// The code of each function of `batched`, in its order.
        functions: Vec<FunctionCode>,
    },
}

/// One function of a whole program.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionCode {
    /// Names under which its compile options may be found, in order of preference.
    pub options: Vec<String>,
    /// Portable artifact.
    pub artifact: Vec<u8>,
}

/// Metadata of a compiled program.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Compiled {
    /// Name of the program.
    pub name: String,
    /// Digest of the compiled program, if the compiler provides one.
    pub fingerprint: Option<Vec<u8>>,
    /// Partition of each parameter; `None` if the compiler does not report them.
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
    /// Memory statistics, if the compiler reports them.
    pub memory: Option<MemoryStats>,
    /// Size of the generated code in bytes.
    pub code_bytes: i64,
    /// Estimated cost; `None` if it was not compiled by XLA.
    pub costs: Option<CostAnalysis>,
    /// The input whose next batch a run returns; `None` if it computes something.
    pub input: Option<InputId>,
}

/// The partition of a parameter or result, and the compiler's own encoding of it.
#[derive(Debug, Clone, PartialEq)]
pub struct CompiledSharding {
    /// How it is partitioned over the program's devices.
    pub partition: Partition,
    /// Serialized `OpSharding`, which can express more (such as partial sums that are not yet
    /// reduced); empty if there is none. The controller only forwards it.
    pub encoded: bytes::Bytes,
}

/// One result of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputSpec {
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole array.
    pub dims: Dims,
    /// How it is partitioned over the program's devices.
    pub cut: CompiledSharding,
    /// Memory kind, if not the default.
    pub memory: Option<Arc<str>>,
}
