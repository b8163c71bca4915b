//! Decodes requests of the protocol into requests to the controller.

use std::sync::Arc;

use base::{Code, DeviceId, Status};
use control::{Colocated, CopySemantics, PutShard, RANK_LIMIT, Request, ShardSource};
use ir::{ArraySpec, DType};

use crate::limits;
use crate::plugin;
use crate::proto as p;
use crate::proto::ifrt_request::Request as Proto;
use crate::sharding::{dims, dtype, invalid, message, sharding, spec};

type Result<T> = std::result::Result<T, Status>;

/// Handle of the futures of batched deletions, which complete at once.
pub(crate) const DELETION: u64 = 3 << 62;
/// Handle of all other futures that are already complete; unlike for deletions, the client counts the
/// response when it checks them.
pub(crate) const COMPLETE: u64 = DELETION + 1;

/// Type of the custom-call programs that are Python functions.
const COLOCATED_PYTHON: &str = "jax_colocated_python_v0.0.1";

/// What the memory kind of a copy begins with that stands for a read.
const READBACK: &str = "fairway_readback_";

/// A decoded request, by who answers it.
pub(crate) enum Asked {
    /// A request to the controller.
    Controller(Request),
    /// A read of an array, whose bytes are kept under this host-buffer handle.
    Read { request: Request, buffer: u64 },
    /// A read of an array, whose bytes go to the client's stream for small arrays under this name.
    /// It stands for a copy, whose results are never used.
    Readback { request: Request, slot: u32, results: Vec<u64> },
    /// A request for the description of the devices.
    Init,
    /// The default device assignment of a program of this many replicas and partitions.
    DeviceAssignment { replicas: u64, partitions: u64 },
    /// The default layout of an array of this rank.
    Layout { rank: usize },
    /// A future that is already complete.
    Complete,
}

/// Decodes one request.
pub(crate) fn request(proto: Proto) -> Result<Asked> {
    check_results(&proto)?;
    let of = |r: p::ExecutableRequest| r.loaded_executable_handle;
    Ok(Asked::Controller(match proto {
        Proto::InitRequest(_) => return Ok(Asked::Init),
        Proto::GetDefaultDeviceAssignmentRequest(r) => return Ok(device_assignment(&r)),
        Proto::GetDefaultLayoutRequest(r) => return layout(r.dims.len()),
        Proto::CheckFutureRequest(r) if matches!(r.future_handle, DELETION | COMPLETE) => {
            return Ok(Asked::Complete);
        }
        Proto::CheckFutureRequest(r) => Request::Completion { status: r.future_handle },
        Proto::LoadedExecutableFetchExecuteResultRequest(r) => {
            Request::Completion { status: r.result_status_handle }
        }
        Proto::CopyToHostBufferRequest(r) => return Ok(read(r)),
        Proto::MakeArrayFromHostBufferRequest(r) => put(r)?,
        Proto::MakeArraysFromHostBufferShardsRequest(r) => return put_shards(r),
        Proto::MakeErrorArraysRequest(r) => make_errors(r)?,
        Proto::AssembleArrayFromSingleDeviceArraysRequest(r) => assemble(r)?,
        Proto::DisassembleIntoSingleDeviceArraysRequest(r) => {
            Request::Disassemble { array: r.array_handle, results: r.result_handles }
        }
        Proto::FullyReplicatedShardRequest(r) => {
            Request::FullyReplicatedShard { array: r.array_handle, result: r.result_handle }
        }
        Proto::RemapArraysRequest(r) => remap(r)?,
        Proto::BitcastArraysRequest(r) => bitcast(r)?,
        Proto::ReshardArraysRequest(r) => reshard(r)?,
        Proto::CopyArraysRequest(r) => return Ok(readback(&r).unwrap_or_else(|| copy(r))),
        Proto::CheckValueReadyRequest(r) => Request::CheckReady { arrays: r.value_handles },
        Proto::DeleteArrayRequest(r) => Request::Delete { arrays: r.array_handle },
        Proto::IsArrayDeletedRequest(r) => Request::IsDeleted { array: r.array_handle },
        Proto::DestructArrayRequest(r) => Request::Destruct { arrays: r.array_handle },
        Proto::CompileRequest(r) => compile(r)?,
        Proto::LoadedExecutableExecuteRequest(r) => execute(r),
        Proto::LoadedExecutableMetadataRequest(r) => Request::Metadata { executable: of(r) },
        Proto::LoadedExecutableMpmdMetadataRequest(r) => {
            Request::FunctionMemory { executable: of(r) }
        }
        Proto::LoadedExecutableMpmdCostAnalysisRequest(r) => {
            Request::FunctionCosts { executable: of(r) }
        }
        Proto::LoadedExecutableCostAnalysisRequest(r) => {
            Request::CostAnalysis { executable: of(r) }
        }
        Proto::LoadedExecutableHumanReadableProgramTextRequest(r) => {
            Request::ProgramText { executable: of(r) }
        }
        Proto::LoadedExecutableDeleteRequest(r) => Request::DeleteExecutable { executable: of(r) },
        Proto::LoadedExecutableIsDeletedRequest(r) => {
            Request::ExecutableIsDeleted { executable: of(r) }
        }
        Proto::LoadedExecutableDestructRequest(r) => {
            Request::DestructExecutable { executable: of(r) }
        }
    }))
}

/// Checks how many arrays a request makes.
fn check_results(proto: &Proto) -> Result<()> {
    match result_names(proto).len() {
        results if results > limits::ARRAYS => Err(invalid(format!(
            "{results} arrays in one request; at most {} are made at a time",
            limits::ARRAYS
        ))),
        _ => Ok(()),
    }
}

fn device_assignment(r: &p::GetDefaultDeviceAssignmentRequest) -> Asked {
    Asked::DeviceAssignment { replicas: r.num_replicas, partitions: r.num_partitions }
}

fn layout(rank: usize) -> Result<Asked> {
    match rank <= RANK_LIMIT {
        true => Ok(Asked::Layout { rank }),
        false => Err(invalid(format!("a layout of {rank} axes; at most {RANK_LIMIT}"))),
    }
}

fn read(r: p::CopyToHostBufferRequest) -> Asked {
    let byte_strides = r.byte_strides.map(|strides| strides.strides);
    let request = Request::Read { array: r.array_handle, byte_strides };
    Asked::Read { request, buffer: r.host_buffer_handle }
}

fn make_errors(r: p::MakeErrorArraysRequest) -> Result<Request> {
    let (specs, error) = (specs(&r.array_specs)?, status(r.error));
    Ok(Request::MakeErrors { arrays: r.array_handles, specs, error })
}

fn assemble(r: p::AssembleArrayFromSingleDeviceArraysRequest) -> Result<Request> {
    let dims = dims(r.shape.as_ref())?;
    let sharding = sharding(r.sharding.as_ref(), &dims)?;
    // The element type is that of the parts; this one is a placeholder.
    let spec = ArraySpec { dtype: DType::U8, dims, sharding };
    Ok(Request::Assemble { array: r.result_handle, spec, parts: r.single_device_array_handles })
}

fn bitcast(r: p::BitcastArraysRequest) -> Result<Request> {
    Ok(Request::Bitcast {
        arrays: r.array_handles,
        results: r.result_handles,
        specs: specs(&r.array_specs)?,
        semantics: semantics(r.copy_semantics),
    })
}

fn reshard(r: p::ReshardArraysRequest) -> Result<Request> {
    Ok(Request::Reshard {
        arrays: r.array_handles,
        results: r.result_handles,
        specs: specs(&r.array_specs)?,
        semantics: semantics(r.copy_semantics),
    })
}

/// Decodes a copy to a memory of a name that Fairway's plugin uses in place of a read.
fn readback(r: &p::CopyArraysRequest) -> Option<Asked> {
    let slot = r.memory_kind.as_ref()?.strip_prefix(READBACK)?.parse().ok()?;
    let &[array] = &r.array_handles[..] else { return None };
    let request = Request::Read { array, byte_strides: None };
    Some(Asked::Readback { request, slot, results: r.result_handles.clone() })
}

fn copy(r: p::CopyArraysRequest) -> Asked {
    Asked::Controller(Request::Copy {
        arrays: r.array_handles,
        results: r.result_handles,
        devices: (!r.device_ids.is_empty()).then(|| device_ids(&r.device_ids)),
        memory: r.memory_kind.map(|kind| (!kind.is_empty()).then(|| Arc::from(kind))),
        semantics: semantics(r.copy_semantics),
    })
}

/// Returns the result handles that the client will use even if the request cannot be decoded.
pub(crate) fn result_names(proto: &Proto) -> Vec<u64> {
    match proto {
        Proto::MakeArrayFromHostBufferRequest(r) => r.array_handle.into_iter().collect(),
        Proto::MakeArraysFromHostBufferShardsRequest(r) => r.array_handles.clone(),
        Proto::MakeErrorArraysRequest(r) => r.array_handles.clone(),
        Proto::AssembleArrayFromSingleDeviceArraysRequest(r) => vec![r.result_handle],
        Proto::DisassembleIntoSingleDeviceArraysRequest(r) => r.result_handles.clone(),
        Proto::FullyReplicatedShardRequest(r) => vec![r.result_handle],
        Proto::RemapArraysRequest(r) => r.result_handles.clone(),
        Proto::BitcastArraysRequest(r) => r.result_handles.clone(),
        Proto::ReshardArraysRequest(r) => r.result_handles.clone(),
        Proto::CopyArraysRequest(r) => r.result_handles.clone(),
        Proto::LoadedExecutableExecuteRequest(r) => r.result_array_handle.clone(),
        _ => Vec::new(),
    }
}

fn status(proto: Option<p::StatusProto>) -> Status {
    let proto = proto.unwrap_or_default();
    Status::new(Code::from_number(proto.code), proto.message)
}

fn specs(protos: &[p::ArraySpecProto]) -> Result<Vec<ArraySpec>> {
    protos.iter().map(|proto| spec(Some(proto))).collect()
}

fn semantics(number: i32) -> CopySemantics {
    match number {
        2 => CopySemantics::ReuseInput,
        3 => CopySemantics::DonateInput,
        _ => CopySemantics::AlwaysCopy,
    }
}

/// Converts an index; one out of range becomes an index that does not exist.
fn number(given: i64) -> u32 {
    u32::try_from(given).unwrap_or(u32::MAX)
}

fn device_ids(ids: &[i32]) -> Arc<[DeviceId]> {
    ids.iter().map(|&id| DeviceId(id as u32)).collect()
}

fn put(r: p::MakeArrayFromHostBufferRequest) -> Result<Request> {
    let dims = dims(r.shape.as_ref())?;
    let sharding = sharding(r.sharding.as_ref(), &dims)?;
    if !sharding.is_replicated() {
        return Err(Status::new(
            Code::Unimplemented,
            "one host buffer cannot be cut over several devices; give one per shard",
        ));
    }
    if let Some(layout) = r.layout.and_then(|layout| layout.serialized_layout) {
        check_layout(&layout, dims.len())?;
    }
    let shard = PutShard {
        positions: (0..sharding.devices.len() as u32).collect(),
        upload: r.host_buffer_handle,
        dims: dims.clone(),
        byte_strides: r.byte_strides.map(|strides| strides.strides),
    };
    let array = r.array_handle.unwrap_or(r.host_buffer_handle);
    let spec = ArraySpec { dtype: dtype(r.dtype.as_ref())?, dims, sharding };
    Ok(Request::Put { array, spec, shards: vec![shard] })
}

/// Checks the layout of an upload: only row-major is supported.
fn check_layout(layout: &p::Serialized, rank: usize) -> Result<()> {
    if layout.type_name != "xla::ifrt::CompactLayout" {
        return Ok(());
    }
    let proto: p::CompactLayoutProto = message(&layout.data, "a layout")?;
    if proto.major_to_minor.iter().copied().eq(0..rank as i32) {
        return Ok(());
    }
    Err(Status::new(
        Code::Unimplemented,
        format!(
            "arrays are uploaded row-major; the layout {:?} can be had by a jit with that \
             out_shardings layout",
            proto.major_to_minor
        ),
    ))
}

fn put_shards(mut r: p::MakeArraysFromHostBufferShardsRequest) -> Result<Asked> {
    // The stock client sends one array per request.
    let (Some(proto), Some(&array), 1) =
        (r.specs.pop(), r.array_handles.first(), r.array_handles.len())
    else {
        return Err(Status::new(
            Code::Unimplemented,
            format!("{} arrays in one request of shards; send one", r.array_handles.len()),
        ));
    };
    let spec = spec(proto.array_spec.as_ref())?;
    let mut shards = Vec::with_capacity(proto.host_buffers.len());
    for (buffer, indices) in proto.host_buffers.into_iter().zip(proto.addressable_shard_indices) {
        shards.push(PutShard {
            positions: indices.indices.iter().map(|&index| number(index)).collect(),
            upload: buffer.host_buffer_handle,
            dims: dims(buffer.shape.as_ref())?,
            byte_strides: buffer.byte_strides.map(|strides| strides.strides),
        });
    }
    let covered: usize = shards.iter().map(|shard| shard.positions.len()).sum();
    if covered != spec.sharding.devices.len() {
        return Err(invalid(format!(
            "host buffers are given for {covered} of {} shards",
            spec.sharding.devices.len()
        )));
    }
    Ok(Asked::Controller(Request::Put { array, spec, shards }))
}

fn remap(r: p::RemapArraysRequest) -> Result<Request> {
    let plan = r.plan.unwrap_or_default();
    let specs = specs(&plan.output_specs)?;
    let mut sources: Vec<Vec<Option<ShardSource>>> =
        specs.iter().map(|spec| vec![None; spec.sharding.devices.len()]).collect();
    let bad = || invalid("a remapping names an array or shard that does not exist");
    let inputs = r.array_handles.len();
    for mapping in &plan.mappings {
        if mapping.in_array < 0 || mapping.in_array as usize >= inputs {
            return Err(bad());
        }
        let target = sources.get_mut(mapping.out_array as usize).ok_or_else(bad)?;
        let from = intervals(&mapping.from_start, &mapping.from_end, &mapping.from_step)?;
        let to = intervals(&mapping.to_start, &mapping.to_end, &mapping.to_step)?;
        for (from, to) in from.zip(to) {
            let source = ShardSource { array: mapping.in_array as u32, position: from };
            // A shard that is filled again and again would take as long as the client likes.
            if target.get_mut(to as usize).ok_or_else(bad)?.replace(source).is_some() {
                return Err(invalid("a remapping gives a shard two sources"));
            }
        }
    }
    let sources: Option<Vec<Vec<ShardSource>>> =
        sources.into_iter().map(|shards| shards.into_iter().collect()).collect();
    Ok(Request::Remap {
        arrays: r.array_handles,
        results: r.result_handles,
        specs,
        sources: sources.ok_or_else(|| invalid("a remapping leaves a shard without a source"))?,
        semantics: semantics(r.copy_semantics),
    })
}

/// Chains the numbers of several intervals.
fn intervals<'a>(
    starts: &'a [i64],
    ends: &'a [i64],
    steps: &'a [i64],
) -> Result<impl Iterator<Item = u32> + 'a> {
    if starts.len() != ends.len() || ends.len() != steps.len() || steps.iter().any(|&step| step < 1)
    {
        return Err(invalid("a remapping has malformed intervals"));
    }
    let all = starts.iter().zip(ends).zip(steps);
    Ok(all
        .flat_map(|((&start, &end), &step)| (start.max(0)..end).step_by(step as usize).map(number)))
}

fn compile(r: p::CompileRequest) -> Result<Request> {
    if !r.host_callbacks.is_empty() {
        return Err(Status::new(
            Code::Unimplemented,
            "host callbacks cannot cross the proxy protocol; return the value instead",
        ));
    }
    let program = r.program.unwrap_or_default();
    let options = r.compile_options.unwrap_or_default();
    if options.data.len() > limits::OPTIONS_BYTES {
        return Err(invalid(format!(
            "compile options of {} bytes; at most {} are taken",
            options.data.len(),
            limits::OPTIONS_BYTES
        )));
    }
    match program.type_name.as_str() {
        "xla::ifrt::XlaProgram" => compile_function(program.data.to_vec(), &options.data),
        "xla::ifrt::IfrtIRProgram" => compile_program(&program.data, &options.data),
        "xla::ifrt::CustomCallProgram" => load_colocated(&program.data),
        "xla::ifrt::PluginProgram" => plugin::request(&program.data),
        other => Err(Status::new(
            Code::Unimplemented,
            format!("programs of type {other} are unknown here; use jax.jit or mpmd.jit"),
        )),
    }
}

/// Decodes a program of one computation.
fn compile_function(program: Vec<u8>, options: &[u8]) -> Result<Request> {
    let options: p::XlaCompileOptionsProto = message(options, "compile options")?;
    let build = build_options(&options.compile_options)?;
    let mut devices = Vec::new();
    for computation in build.device_assignment.iter().flat_map(|a| &a.computation_devices) {
        devices.extend(computation.replica_device_ids.iter().map(|&id| DeviceId(id as u32)));
    }
    if devices.is_empty() {
        devices.push(DeviceId(0));
    }
    Ok(Request::Compile {
        program,
        grid: grid(&build),
        options: options.compile_options.to_vec(),
        devices: devices.into(),
    })
}

/// Decodes a multi-computation (MPMD) program: a graph of computations and the options of each.
fn compile_program(program: &[u8], options: &[u8]) -> Result<Request> {
    let program: p::IfrtIrProgramProto = message(program, "an IFRT IR program")?;
    let given: p::IfrtIrCompileOptionsProto = message(options, "IFRT IR compile options")?;
    let mut options = Vec::with_capacity(given.compile_options.len());
    for (name, serialized) in given.compile_options {
        let grid = grid(&build_options(&serialized)?);
        options.push((name, serialized.to_vec(), grid));
    }
    options.sort_unstable();
    let devices = given.device_ids.iter().map(|&id| DeviceId(id as u32)).collect();
    Ok(Request::CompileProgram { program: program.ifrt_program.to_vec(), options, devices })
}

/// Decodes a Python function that runs beside the hosts of its devices.
fn load_colocated(program: &[u8]) -> Result<Request> {
    let program: p::CustomCallProgramProto = message(program, "a custom-call program")?;
    if program.r#type != COLOCATED_PYTHON {
        return Err(Status::new(
            Code::Unimplemented,
            format!(
                "custom-call programs of type {:?} are unknown here; those of \
                 jax.experimental.colocated_python are of type {COLOCATED_PYTHON:?}",
                program.r#type
            ),
        ));
    }
    let devices = program.devices.as_ref().map_or(&[][..], |devices| &devices.device_ids);
    let function = Colocated {
        name: program.name,
        inputs: specs(&program.input_specs)?,
        outputs: specs(&program.output_specs)?,
        takes_any_type: false,
        user: None,
    };
    let devices = device_ids(devices);
    Ok(Request::LoadColocated {
        program: program.serialized_program_text.to_vec(),
        devices,
        function,
    })
}

fn build_options(options: &[u8]) -> Result<p::compile_options_view::BuildOptions> {
    let view: p::CompileOptionsView = message(options, "compile options")?;
    Ok(view.executable_build_options.unwrap_or_default())
}

fn grid(build: &p::compile_options_view::BuildOptions) -> (u32, u32) {
    let count = |number: i64| u32::try_from(number.max(1)).unwrap_or(u32::MAX);
    (count(build.num_replicas), count(build.num_partitions))
}

fn execute(r: p::LoadedExecutableExecuteRequest) -> Request {
    let options = r.execute_options.unwrap_or_default();
    let kept = options.non_donatable_input_indices.iter();
    Request::Execute {
        executable: r.loaded_executable_handle,
        args: r.args_handles.into(),
        results: r.result_array_handle.into(),
        keep: kept.map(|&index| number(index.into())).collect(),
        status: options.fill_status.then_some(r.result_status_handle),
        devices: r.device_ids.iter().map(|&id| DeviceId(id as u32)).collect(),
        stream: options.execution_stream_id as u64,
    }
}
