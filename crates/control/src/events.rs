//! All events and requests that enter the controller, and all effects and replies that leave it.

use std::sync::Arc;

use base::{ClientId, DeviceId, HostId, IslandId, Status, TransferTag};
use ir::{ArraySpec, Dims};
use protocol::{Command, Compiled, CostAnalysis, HostInfo, MemoryStats, Report};
use smallvec::SmallVec;

use crate::accounts::Share;
use crate::colocated::Colocated;
use crate::resharding::Resharding;

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
    /// Time has passed: hosts are sent heartbeats, and the watchdog checks for launches that do not
    /// end. Expected every [`crate::Config::tick_interval`].
    Tick,
    /// A host answered a heartbeat.
    HeartbeatAnswered(HostId),
    /// A heartbeat could not be sent to a host.
    HeartbeatFailed {
        /// Which host.
        host: HostId,
        /// Why.
        cause: String,
    },
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
    /// Send a heartbeat to a host, unless the last one is still unanswered.
    Heartbeat(HostId),
    /// Stop the process of this host; the host is lost, or its island is.
    StopHost(HostId),
    /// Restart an island whose hosts were stopped.
    RestartIsland(IslandId),
    /// Acknowledge a report of a host, ahead of all commands, by an empty message.
    Acknowledge {
        /// The host.
        host: HostId,
        /// Tag of the message.
        tag: TransferTag,
    },
    /// Notify a host, ahead of all commands, that a peer is lost and its outstanding messages will
    /// not arrive.
    LosePeer {
        /// The host to notify.
        host: HostId,
        /// The peer that is lost.
        lost: HostId,
        /// Messages of it with smaller tags never arrive.
        tag: TransferTag,
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
    /// Load a Python function that runs beside the hosts of its devices (`colocated_python`).
    LoadColocated {
        /// Pickled function.
        program: Vec<u8>,
        /// Devices that it runs on.
        devices: Arc<[DeviceId]>,
        /// What it is called with, and by whom.
        function: Colocated,
    },
    /// Prepare a resharding, which is then run like a program.
    PrepareResharding(Resharding),
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
        /// The stream of a Python function's run: runs of one stream follow one another.
        stream: u64,
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

impl Request {
    /// Returns whether it must be performed after all earlier requests of its client. Others, which
    /// are about programs, may overtake requests that wait.
    pub(crate) fn is_in_order(&self) -> bool {
        !matches!(
            self,
            Self::Compile { .. }
                | Self::CompileProgram { .. }
                | Self::LoadColocated { .. }
                | Self::PrepareResharding(_)
                | Self::Metadata { .. }
                | Self::CostAnalysis { .. }
                | Self::FunctionMemory { .. }
                | Self::FunctionCosts { .. }
                | Self::ProgramText { .. }
                | Self::ExecutableIsDeleted { .. }
        )
    }
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
