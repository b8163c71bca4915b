//! Sound requests of clients of every kind.

use base::Random;
use prost::Message;

use crate::proto as p;
use crate::proto::ifrt_request::Request as Body;

/// Devices of the islands.
pub(super) const DEVICES: u64 = 4;
/// Arrays that are there; requests name some more.
pub(super) const ARRAYS: u64 = 6;

pub(super) fn serialized(name: &str, message: impl Message) -> p::Serialized {
    p::Serialized { type_name: format!("xla::ifrt::{name}"), data: message.encode_to_vec().into() }
}

pub(super) fn devices(ids: impl IntoIterator<Item = i32>) -> Option<p::DeviceListProto> {
    let device_ids = ids.into_iter().collect();
    Some(p::DeviceListProto { device_ids, ..Default::default() })
}

fn shape(dims: &[i64]) -> Option<p::ShapeProto> {
    Some(p::ShapeProto { dims: dims.to_vec(), ..Default::default() })
}

pub(super) fn dtype() -> Option<p::DTypeProto> {
    Some(p::DTypeProto { kind: 11, ..Default::default() })
}

/// Returns a request that makes an array of eight numbers on one device.
pub(super) fn upload(array: u64) -> p::MakeArrayFromHostBufferRequest {
    let device_id = (array % DEVICES) as i32;
    let single = p::SingleDeviceShardingProto { device_id, ..Default::default() };
    p::MakeArrayFromHostBufferRequest {
        dtype: dtype(),
        shape: shape(&[8]),
        sharding: Some(p::ShardingProto {
            serialized_sharding: Some(serialized("SingleDeviceSharding", single)),
        }),
        host_buffer_handle: array,
        array_handle: Some(array),
        ..Default::default()
    }
}

/// Returns a sharding of an array of one axis.
fn sharding(random: &mut Random) -> Option<p::ShardingProto> {
    let all = DEVICES as i32;
    let serialized_sharding = match random.below(5) {
        0 => serialized(
            "SingleDeviceSharding",
            p::SingleDeviceShardingProto {
                device_id: random.below(DEVICES) as i32,
                memory_kind: Some("device".to_owned()),
                ..Default::default()
            },
        ),
        1 => serialized(
            "ConcreteEvenSharding",
            p::ConcreteEvenShardingProto {
                devices: devices(0..all),
                shard_shape: shape(&[2]),
                is_fully_replicated: random.below(2) == 0,
                ..Default::default()
            },
        ),
        2 => serialized(
            "ConcreteSharding",
            p::ConcreteShardingProto {
                devices: devices(0..2),
                shard_shapes: vec![shape(&[3]).unwrap(), shape(&[5]).unwrap()],
                ..Default::default()
            },
        ),
        kind => {
            let mut op = p::OpSharding {
                r#type: 3,
                tile_assignment_dimensions: vec![2, 2],
                replicate_on_last_tile_dim: true,
                ..Default::default()
            };
            if kind == 3 {
                op.tile_assignment_devices = vec![0, 2, 1, 3];
            } else {
                (op.iota_reshape_dims, op.iota_transpose_perm) = (vec![2, 2], vec![1, 0]);
            }
            serialized(
                "HloSharding",
                p::HloShardingProto {
                    devices: devices(0..all),
                    xla_op_sharding: Some(op),
                    ..Default::default()
                },
            )
        }
    };
    Some(p::ShardingProto { serialized_sharding: Some(serialized_sharding) })
}

fn spec(random: &mut Random) -> p::ArraySpecProto {
    let sharding = sharding(random);
    p::ArraySpecProto { dtype: dtype(), shape: shape(&[8]), sharding, ..Default::default() }
}

fn remap(random: &mut Random) -> p::RemapPlanProto {
    let mapping = p::remap_plan_proto::MappingProto {
        from_start: vec![0],
        from_end: vec![1],
        from_step: vec![1],
        to_start: vec![0],
        to_end: vec![1],
        to_step: vec![1],
        ..Default::default()
    };
    p::RemapPlanProto {
        input_specs: vec![spec(random)],
        output_specs: vec![spec(random)],
        mappings: vec![mapping],
        ..Default::default()
    }
}

fn compile(random: &mut Random) -> p::CompileRequest {
    use p::device_assignment_proto::ComputationDevice;
    let replica_device_ids = vec![random.below(DEVICES) as i64];
    let device_assignment = p::DeviceAssignmentProto {
        replica_count: 1,
        computation_count: 1,
        computation_devices: vec![ComputationDevice { replica_device_ids }],
    };
    let build = p::compile_options_view::BuildOptions {
        num_replicas: 1,
        num_partitions: 1,
        device_assignment: Some(device_assignment),
    };
    let view = p::CompileOptionsView { executable_build_options: Some(build) }.encode_to_vec();
    let (program, options) = match random.below(2) {
        0 => (
            p::Serialized { type_name: "xla::ifrt::XlaProgram".into(), data: vec![1; 8].into() },
            serialized(
                "XlaCompileOptions",
                p::XlaCompileOptionsProto { compile_options: view.into() },
            ),
        ),
        _ => (
            serialized("IfrtIRProgram", p::IfrtIrProgramProto { ifrt_program: vec![2; 8].into() }),
            serialized(
                "IfrtIRCompileOptions",
                p::IfrtIrCompileOptionsProto {
                    device_ids: vec![0, 1, 2],
                    compile_options: [("f".to_owned(), view.into())].into(),
                },
            ),
        ),
    };
    p::CompileRequest {
        program: Some(program),
        compile_options: Some(options),
        ..Default::default()
    }
}

/// Returns a request of arrays; `given` and `made` are handles of some.
fn of_arrays(random: &mut Random, (given, made): (u64, u64)) -> Body {
    let (array_handles, result_handles, copy_semantics) = (vec![given], vec![made], 1);
    match random.below(7) {
        0 => Body::RemapArraysRequest(p::RemapArraysRequest {
            plan: Some(remap(random)),
            array_handles,
            copy_semantics,
            result_handles,
        }),
        1 => Body::BitcastArraysRequest(p::BitcastArraysRequest {
            array_handles,
            array_specs: vec![spec(random)],
            copy_semantics,
            result_handles,
        }),
        2 => Body::ReshardArraysRequest(p::ReshardArraysRequest {
            array_handles,
            array_specs: vec![spec(random)],
            copy_semantics,
            result_handles,
        }),
        3 => Body::CopyArraysRequest(p::CopyArraysRequest {
            array_handles,
            device_ids: vec![random.below(DEVICES) as i32],
            memory_kind: None,
            copy_semantics,
            result_handles,
        }),
        4 => Body::DisassembleIntoSingleDeviceArraysRequest(
            p::DisassembleIntoSingleDeviceArraysRequest {
                array_handle: given,
                copy_semantics,
                result_handles,
            },
        ),
        5 => Body::AssembleArrayFromSingleDeviceArraysRequest(
            p::AssembleArrayFromSingleDeviceArraysRequest {
                shape: shape(&[32]),
                sharding: sharding(random),
                single_device_array_handles: (0..DEVICES).collect(),
                result_handle: made,
                ..Default::default()
            },
        ),
        _ => Body::MakeErrorArraysRequest(p::MakeErrorArraysRequest {
            error: Some(p::StatusProto { code: 3, message: "no".to_owned() }),
            array_specs: vec![spec(random)],
            array_handles: result_handles,
        }),
    }
}

fn of_shards(random: &mut Random, array: u64) -> p::MakeArraysFromHostBufferShardsRequest {
    use p::make_arrays_from_host_buffer_shards_request::{HostBuffer, ShardIndices, Spec};
    let buffer = |host_buffer_handle| HostBuffer {
        dtype: dtype(),
        shape: shape(&[4]),
        host_buffer_handle,
        ..Default::default()
    };
    let indices = |indices: &[i64]| ShardIndices { indices: indices.to_vec() };
    let spec = Spec {
        addressable_shard_indices: vec![indices(&[0, 1]), indices(&[2, 3])],
        host_buffers: vec![buffer(0), buffer(1)],
        array_spec: Some(spec(random)),
    };
    p::MakeArraysFromHostBufferShardsRequest { specs: vec![spec], array_handles: vec![array] }
}

/// Returns a sound request of any kind.
pub(super) fn body(random: &mut Random) -> Body {
    let (given, made) = (random.below(ARRAYS + 1), ARRAYS + random.below(2));
    let executable = p::ExecutableRequest { loaded_executable_handle: random.below(3) };
    match random.below(20) {
        0 => Body::InitRequest(p::InitRequest {}),
        1 => Body::CheckFutureRequest(p::CheckFutureRequest { future_handle: made }),
        2 => Body::MakeArrayFromHostBufferRequest(p::MakeArrayFromHostBufferRequest {
            byte_strides: Some(p::ByteStrides { strides: vec![4] }),
            sharding: sharding(random),
            ..upload(made)
        }),
        3 | 4 => Body::MakeArraysFromHostBufferShardsRequest(of_shards(random, made)),
        5 => Body::CopyToHostBufferRequest(p::CopyToHostBufferRequest {
            host_buffer_handle: made,
            array_handle: given,
            byte_strides: Some(p::ByteStrides { strides: vec![4] }),
        }),
        6 => Body::CheckValueReadyRequest(p::CheckValueReadyRequest { value_handles: vec![given] }),
        7 => Body::DeleteArrayRequest(p::DeleteArrayRequest { array_handle: vec![given, made] }),
        8 => Body::DestructArrayRequest(p::DestructArrayRequest { array_handle: vec![given] }),
        9 => Body::GetDefaultDeviceAssignmentRequest(p::GetDefaultDeviceAssignmentRequest {
            num_replicas: 2,
            num_partitions: 2,
        }),
        10 => Body::GetDefaultLayoutRequest(p::GetDefaultLayoutRequest {
            dims: vec![8, 8],
            ..Default::default()
        }),
        11 => Body::LoadedExecutableMetadataRequest(executable),
        12 => Body::LoadedExecutableExecuteRequest(p::LoadedExecutableExecuteRequest {
            loaded_executable_handle: executable.loaded_executable_handle,
            args_handles: vec![given],
            result_array_handle: vec![made],
            ..Default::default()
        }),
        13 | 14 => Body::CompileRequest(compile(random)),
        _ => of_arrays(random, (given, made)),
    }
}

pub(super) fn encoded(body: Body) -> Vec<u8> {
    p::IfrtRequest { request: Some(body), ..Default::default() }.encode_to_vec()
}

pub(super) fn valid(seed: u64) -> Vec<u8> {
    encoded(body(&mut Random::of(&[seed])))
}
