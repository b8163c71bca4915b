//! Encodes replies of the controller into responses of the protocol.

use std::sync::Arc;

use base::{DeviceId, Status};
use control::Reply;
use ir::ArraySpec;
use protocol::{Compiled, CompiledSharding, CostAnalysis, MemoryStats};

use crate::decode::{COMPLETE, DELETION};
use crate::proto as p;
use crate::proto::ifrt_request::Request;
use crate::proto::ifrt_response::Response;
use crate::sharding::{to_dtype, to_op_sharding, to_shape, to_sharding};

/// The kind of response that a request gets, and the handles that it returns.
pub(crate) enum Expected {
    Future,
    Deletion,
    Ready,
    Array(u64),
    ArrayShards(Vec<u64>),
    ErrorArrays(Vec<u64>),
    Assembled(u64),
    Disassembled(Vec<u64>),
    ReplicatedShard(u64),
    Remapped(Vec<u64>),
    Bitcast(Vec<u64>),
    Resharded(Vec<u64>),
    Copied(Vec<u64>),
    HostBuffer,
    DeletedArray,
    IsDeleted,
    Destructed,
    Compiled,
    Metadata,
    Executed,
    ExecuteResult,
    Costs,
    FunctionMemory,
    FunctionCosts,
    Text,
    DeletedExecutable,
    ExecutableIsDeleted,
    DestructedExecutable,
    Immediate,
}

impl Expected {
    /// Returns the kind of response to `request`.
    pub fn of(request: &Request) -> Self {
        match request {
            Request::CheckFutureRequest(r) if r.future_handle == DELETION => Self::Deletion,
            Request::CheckFutureRequest(_) => Self::Future,
            Request::CheckValueReadyRequest(_) => Self::Ready,
            Request::MakeArrayFromHostBufferRequest(r) => {
                Self::Array(r.array_handle.unwrap_or(r.host_buffer_handle))
            }
            Request::MakeArraysFromHostBufferShardsRequest(r) => {
                Self::ArrayShards(r.array_handles.clone())
            }
            Request::MakeErrorArraysRequest(r) => Self::ErrorArrays(r.array_handles.clone()),
            Request::AssembleArrayFromSingleDeviceArraysRequest(r) => {
                Self::Assembled(r.result_handle)
            }
            Request::DisassembleIntoSingleDeviceArraysRequest(r) => {
                Self::Disassembled(r.result_handles.clone())
            }
            Request::FullyReplicatedShardRequest(r) => Self::ReplicatedShard(r.result_handle),
            Request::RemapArraysRequest(r) => Self::Remapped(r.result_handles.clone()),
            Request::BitcastArraysRequest(r) => Self::Bitcast(r.result_handles.clone()),
            Request::ReshardArraysRequest(r) => Self::Resharded(r.result_handles.clone()),
            Request::CopyArraysRequest(r) => Self::Copied(r.result_handles.clone()),
            Request::CopyToHostBufferRequest(_) => Self::HostBuffer,
            Request::DeleteArrayRequest(_) => Self::DeletedArray,
            Request::IsArrayDeletedRequest(_) => Self::IsDeleted,
            Request::DestructArrayRequest(_) => Self::Destructed,
            Request::CompileRequest(_) => Self::Compiled,
            Request::LoadedExecutableMetadataRequest(_) => Self::Metadata,
            Request::LoadedExecutableExecuteRequest(_) => Self::Executed,
            Request::LoadedExecutableFetchExecuteResultRequest(_) => Self::ExecuteResult,
            Request::LoadedExecutableCostAnalysisRequest(_) => Self::Costs,
            Request::LoadedExecutableMpmdMetadataRequest(_) => Self::FunctionMemory,
            Request::LoadedExecutableMpmdCostAnalysisRequest(_) => Self::FunctionCosts,
            Request::LoadedExecutableHumanReadableProgramTextRequest(_) => Self::Text,
            Request::LoadedExecutableDeleteRequest(_) => Self::DeletedExecutable,
            Request::LoadedExecutableIsDeletedRequest(_) => Self::ExecutableIsDeleted,
            Request::LoadedExecutableDestructRequest(_) => Self::DestructedExecutable,
            Request::InitRequest(_)
            | Request::GetDefaultDeviceAssignmentRequest(_)
            | Request::GetDefaultLayoutRequest(_) => Self::Immediate,
        }
    }

    /// Whether the client does not count the responses, since it sends these requests in batches.
    pub fn is_batched(&self) -> bool {
        matches!(self, Self::DeletedArray | Self::Destructed | Self::Deletion)
    }

    /// Encodes `reply` as the response.
    pub fn response(self, reply: Reply) -> Response {
        let empty = p::EmptyResponse {};
        let handle = |handle| p::HandleResponse { handle };
        let handles = |handles| p::HandlesResponse { handles };
        match self {
            Self::Future | Self::Deletion => Response::CheckFutureResponse(empty),
            Self::Ready => Response::CheckValueReadyResponse(empty),
            Self::Array(name) => Response::MakeArrayFromHostBufferResponse(handle(name)),
            Self::ArrayShards(names) => {
                Response::MakeArraysFromHostBufferShardsResponse(handles(names))
            }
            Self::ErrorArrays(names) => Response::MakeErrorArraysResponse(handles(names)),
            Self::Assembled(name) => {
                Response::AssembleArrayFromSingleDeviceArraysResponse(handle(name))
            }
            Self::Disassembled(names) => {
                Response::DisassembleIntoSingleDeviceArraysResponse(handles(names))
            }
            Self::ReplicatedShard(name) => Response::FullyReplicatedShardResponse(handle(name)),
            Self::Remapped(names) => Response::RemapArraysResponse(handles(names)),
            Self::Bitcast(names) => Response::BitcastArraysResponse(handles(names)),
            Self::Resharded(names) => Response::ReshardArraysResponse(handles(names)),
            Self::Copied(names) => Response::CopyArraysResponse(handles(names)),
            Self::HostBuffer => Response::CopyToHostBufferResponse(empty),
            Self::DeletedArray => Response::DeleteArrayResponse(handle(DELETION)),
            Self::IsDeleted => Response::IsArrayDeletedResponse(deleted(&reply)),
            Self::Destructed => Response::DestructArrayResponse(empty),
            Self::ExecuteResult => Response::LoadedExecutableFetchExecuteResultResponse(empty),
            Self::DeletedExecutable => Response::LoadedExecutableDeleteResponse(handle(COMPLETE)),
            Self::ExecutableIsDeleted => {
                Response::LoadedExecutableIsDeletedResponse(deleted(&reply))
            }
            Self::DestructedExecutable => Response::LoadedExecutableDestructResponse(empty),
            Self::Compiled
            | Self::Metadata
            | Self::Executed
            | Self::Costs
            | Self::FunctionMemory
            | Self::FunctionCosts
            | Self::Text
            | Self::Immediate => rich(reply),
        }
    }
}

fn deleted(reply: &Reply) -> p::DeletedResponse {
    p::DeletedResponse { deleted: matches!(reply, Reply::Deleted(true)) }
}

/// Encodes responses that depend on the reply alone.
fn rich(reply: Reply) -> Response {
    match reply {
        Reply::Compiled { executable, compiled, devices, functions } => {
            let mut response = compile(executable, &compiled, &devices);
            response.mpmd_addressable_devices = functions.map(function_devices);
            Response::CompileResponse(response)
        }
        Reply::Metadata(compiled, outputs) => {
            Response::LoadedExecutableMetadataResponse(metadata(&compiled, &outputs))
        }
        Reply::Executed { status, outputs, compiled } => {
            let outputs = outputs
                .into_iter()
                .zip(&compiled.outputs)
                .map(|((name, spec), found)| output(name, &spec, &found.cut))
                .collect();
            let response = p::LoadedExecutableExecuteResponse { status_handle: status, outputs };
            Response::LoadedExecutableExecuteResponse(response)
        }
        Reply::Costs(costs) => Response::LoadedExecutableCostAnalysisResponse(
            p::LoadedExecutableCostAnalysisResponse {
                result: Some(p::loaded_executable_cost_analysis_response::Result::Attributes(
                    attributes(costs),
                )),
            },
        ),
        Reply::FunctionMemory(functions) => {
            use p::loaded_executable_mpmd_metadata_response::MpmdCompiledMemoryStats;
            let stats = functions.into_iter().map(|(name, bytes)| (name, memory(bytes)));
            let compiled_memory_stats = stats.collect();
            Response::LoadedExecutableMpmdMetadataResponse(
                p::LoadedExecutableMpmdMetadataResponse {
                    mpmd_compiled_memory_stats: Some(MpmdCompiledMemoryStats {
                        compiled_memory_stats,
                    }),
                },
            )
        }
        Reply::FunctionCosts(functions) => {
            use p::loaded_executable_mpmd_cost_analysis_response::MpmdAttributes;
            let costs = functions.into_iter();
            let attributes = costs.map(|(name, costs)| (name, attributes(costs)));
            let attributes = Some(MpmdAttributes { attributes: attributes.collect() });
            Response::LoadedExecutableMpmdCostAnalysisResponse(
                p::LoadedExecutableMpmdCostAnalysisResponse { attributes },
            )
        }
        Reply::Text(text) => Response::LoadedExecutableHumanReadableProgramTextResponse(
            p::LoadedExecutableHumanReadableProgramTextResponse {
                result: Some(
                    p::loaded_executable_human_readable_program_text_response::Result::HumanReadableProgramText(text),
                ),
            },
        ),
        Reply::Done | Reply::Data(_) | Reply::Deleted(_) => {
            unreachable!("the controller answers each request with its own kind of reply")
        }
    }
}

fn output(
    name: u64,
    spec: &Arc<ArraySpec>,
    cut: &CompiledSharding,
) -> p::loaded_executable_execute_response::Output {
    p::loaded_executable_execute_response::Output {
        dtype: Some(to_dtype(spec.dtype)),
        shape: Some(to_shape(&spec.dims)),
        sharding: Some(to_sharding(&spec.sharding, cut)),
        array_handle: name,
    }
}

fn compile(executable: u64, compiled: &Compiled, devices: &[DeviceId]) -> p::CompileResponse {
    let ids: Vec<i32> = devices.iter().map(|device| device.0 as i32).collect();
    let fingerprint = compiled
        .fingerprint
        .clone()
        .map(|print| p::compile_response::Fingerprint::FingerprintValue(print.into()));
    p::CompileResponse {
        loaded_executable_handle: executable,
        name: compiled.name.clone(),
        num_devices: ids.len() as i32,
        addressable_device_ids: ids.clone(),
        fingerprint,
        ready_future_handle: Some(COMPLETE),
        mpmd_addressable_devices: None,
        device_ids: ids,
    }
}

fn function_devices(
    functions: Vec<(String, Arc<[DeviceId]>)>,
) -> p::compile_response::MpmdAddressableDevices {
    let ids = |devices: Arc<[DeviceId]>| p::compile_response::MpmdDeviceList {
        mpmd_addressable_device_ids: devices.iter().map(|device| device.0 as i32).collect(),
    };
    let functions = functions.into_iter().map(|(name, devices)| (name, ids(devices)));
    p::compile_response::MpmdAddressableDevices { mpmd_addressable_devices: functions.collect() }
}

fn metadata(compiled: &Compiled, outputs: &[ArraySpec]) -> p::LoadedExecutableMetadataResponse {
    use p::loaded_executable_metadata_response as m;
    let count = outputs.first().map_or(1, |output| output.sharding.devices.len());
    let layouts = |layouts: &[Vec<i64>]| m::LayoutList {
        layouts: layouts
            .iter()
            .map(|axes| p::LayoutProto { minor_to_major: axes.clone() })
            .collect(),
    };
    let parameters = compiled.parameters.as_ref().map(|cuts| m::ShardingList {
        shardings: cuts.iter().map(|cut| to_op_sharding(cut, count)).collect(),
    });
    let results = compiled.outputs.iter().enumerate().map(|(index, result)| {
        let devices = outputs.get(index).map_or(count, |output| output.sharding.devices.len());
        to_op_sharding(&result.cut, devices)
    });
    let kinds = outputs.iter().map(|output| {
        output.sharding.memory.as_ref().map_or_else(String::new, |memory| memory.to_string())
    });
    p::LoadedExecutableMetadataResponse {
        parameter_shardings: parameters,
        output_shardings: Some(m::ShardingList { shardings: results.collect() }),
        output_memory_kinds: Some(m::OutputMemoryKind {
            status: None,
            memory_kind_lists: vec![m::MemoryKindList { memory_kinds: kinds.collect() }],
        }),
        parameter_layouts: Some(m::ParameterLayouts::ParameterLayoutsList(layouts(
            &compiled.parameter_layouts,
        ))),
        output_layouts: Some(if compiled.output_layouts.len() == compiled.outputs.len() {
            m::OutputLayouts::OutputLayoutsList(layouts(&compiled.output_layouts))
        } else {
            // A resharding is of arrays of any rank.
            let unknown = Status::new(base::Code::Unimplemented, "the layouts are not known");
            m::OutputLayouts::OutputLayoutsError(status(&unknown))
        }),
        donated_input_indices_oneof: Some(m::DonatedInputIndicesOneof::DonatedInputIndices(
            m::DonatedInputIndices { donated_input_indices: compiled.donated.clone() },
        )),
        compiled_memory_stats_oneof: Some(memory_stats(compiled)),
        size_of_generated_code_in_bytes: compiled.code_bytes,
    }
}

fn memory_stats(
    compiled: &Compiled,
) -> p::loaded_executable_metadata_response::CompiledMemoryStatsOneof {
    use p::loaded_executable_metadata_response::CompiledMemoryStatsOneof as Stats;
    let Some(bytes) = compiled.memory else {
        let error =
            Status::new(base::Code::Unimplemented, "the compiler gives no memory statistics");
        return Stats::CompiledMemoryStatsError(status(&error));
    };
    Stats::CompiledMemoryStats(memory(bytes))
}

fn memory(bytes: MemoryStats) -> p::CompiledMemoryStatsProto {
    p::CompiledMemoryStatsProto {
        generated_code_size_in_bytes: bytes[0],
        argument_size_in_bytes: bytes[1],
        output_size_in_bytes: bytes[2],
        alias_size_in_bytes: bytes[3],
        temp_size_in_bytes: bytes[4],
        host_generated_code_size_in_bytes: bytes[5],
        host_argument_size_in_bytes: bytes[6],
        host_output_size_in_bytes: bytes[7],
        host_alias_size_in_bytes: bytes[8],
        host_temp_size_in_bytes: bytes[9],
        peak_memory_in_bytes: bytes[10],
    }
}

/// Encodes named numbers as an attribute map.
fn attributes(costs: CostAnalysis) -> p::AttributeMap {
    use p::attribute_map::value::Value;
    let value = |cost: f64| p::attribute_map::Value { value: Some(Value::FloatValue(cost as f32)) };
    let attributes = costs.into_iter().map(|(name, cost)| (name, value(cost))).collect();
    p::AttributeMap { version_number: 0, attributes }
}

/// Encodes an error.
pub(crate) fn status(error: &Status) -> p::StatusProto {
    p::StatusProto { code: error.code as i32, message: error.message.clone() }
}
