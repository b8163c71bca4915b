//! A baseline server that speaks the protocol and computes nothing: an upper bound for the stock
//! client.
//!
//! It presents one CPU device. Every program has one `f32[]` result on that device, every array is
//! ready once its bytes have arrived, which are dropped, and all bytes that are read back are zero. So
//! the rates at which a client chains tiny computations and transfers bytes are limited by the client
//! and the transport only. `benchmarks/` measures Fairway beside it.
//!
//! It prints the address at which it listens, and exits when its standard input is closed.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

mod limits {
    /// The baseline has no limits on messages.
    pub use tonic_prost::ProstCodec as BoundedCodec;
}

// Most of the protocol is unused here.
#[allow(missing_docs, dead_code, clippy::all)]
mod proto {
    tonic::include_proto!("xla.ifrt.proxy");
}

use proto as p;
use proto::grpc_ifrt_service_server::{GrpcIfrtService, GrpcIfrtServiceServer};
use proto::ifrt_request::Request as Ask;
use proto::ifrt_response::Response as Answer;

/// The highest supported versions of the protocol and of serialized objects.
const VERSION: (i32, i32) = (25, 5);
/// Metadata key that describes an upload.
const STORE_METADATA: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";
/// Maximum number of responses queued for a slow client.
const RESPONSES: usize = 1024;
/// The protocol's number for `f32`.
const F32: i32 = 11;
/// The compiler's number for a sharding that keeps an array on one device.
const MAXIMAL: i32 = 1;
/// First handle that the server assigns; clients assign smaller ones.
const SERVER_NAMES: u64 = 1 << 63;
/// Handle of every future; all are complete.
const COMPLETE: u64 = 3 << 62;

/// Size of the chunks in which a client fetches bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// Bytes that travel outside the sessions' streams.
#[derive(Default)]
struct Traffic {
    /// Sizes of uploads that have arrived and are unused, by the client's handle.
    uploads: Mutex<HashMap<u64, usize>>,
    uploaded: Notify,
    /// Sizes of what clients have asked to read, by the handle of the read.
    reads: Mutex<HashMap<u64, usize>>,
}

impl Traffic {
    /// Waits for an upload and returns its size.
    async fn upload(&self, handle: u64) -> usize {
        loop {
            let next = self.uploaded.notified();
            if let Some(size) = self.uploads.lock().remove(&handle) {
                return size;
            }
            next.await;
        }
    }
}

#[derive(Default)]
struct NullServer(Arc<Traffic>);

/// State of one client's stream: the next handle and sequence number, and user contexts that have
/// ended.
struct Session {
    traffic: Arc<Traffic>,
    /// Sizes of uploaded arrays; all others are scalars.
    sizes: HashMap<u64, usize>,
    next_name: u64,
    sequence: i64,
    ended: Vec<u64>,
}

impl Session {
    async fn respond(&mut self, request: p::IfrtRequest) -> p::IfrtResponse {
        let asked = request.request_metadata.unwrap_or_default();
        if asked.user_context_id != 0 {
            self.ended.push(asked.user_context_id);
        }
        let mut metadata = p::ResponseMetadata { op_id: asked.op_id, ..Default::default() };
        let body = match request.request {
            Some(body) => self.answer(body).await,
            None => None,
        };
        match &body {
            None => metadata.status = Some(unimplemented()),
            Some(Answer::InitResponse(_)) => metadata.seq_num = -1,
            // The client does not count responses to requests that it sends in batches.
            Some(
                Answer::DeleteArrayResponse(_)
                | Answer::DestructArrayResponse(_)
                | Answer::CheckFutureResponse(_),
            ) => {}
            Some(_) => {
                metadata.seq_num = self.sequence;
                self.sequence += 1;
                metadata.destroyed_user_context_ids = std::mem::take(&mut self.ended);
            }
        }
        p::IfrtResponse { response_metadata: Some(metadata), response: body }
    }

    async fn answer(&mut self, request: Ask) -> Option<Answer> {
        let empty = p::EmptyResponse {};
        Some(match request {
            Ask::InitRequest(_) => Answer::InitResponse(init()),
            Ask::CheckFutureRequest(_) => Answer::CheckFutureResponse(empty),
            Ask::CompileRequest(_) => Answer::CompileResponse(self.compile()),
            Ask::LoadedExecutableMetadataRequest(_) => {
                Answer::LoadedExecutableMetadataResponse(metadata())
            }
            Ask::LoadedExecutableExecuteRequest(r) => {
                Answer::LoadedExecutableExecuteResponse(self.execute(&r))
            }
            Ask::LoadedExecutableFetchExecuteResultRequest(_) => {
                Answer::LoadedExecutableFetchExecuteResultResponse(empty)
            }
            Ask::LoadedExecutableDestructRequest(_) => {
                Answer::LoadedExecutableDestructResponse(empty)
            }
            Ask::GetDefaultLayoutRequest(r) => {
                let axes: Vec<String> =
                    (0..r.dims.len()).rev().map(|axis| axis.to_string()).collect();
                let text = format!("{{{}}}", axes.join(","));
                Answer::GetDefaultLayoutResponse(p::GetDefaultLayoutResponse {
                    serialized_pjrt_layout: text.into(),
                })
            }
            Ask::GetDefaultDeviceAssignmentRequest(_) => {
                let assignment = p::DeviceAssignmentProto {
                    replica_count: 1,
                    computation_count: 1,
                    computation_devices: vec![p::device_assignment_proto::ComputationDevice {
                        replica_device_ids: vec![0],
                    }],
                };
                Answer::GetDefaultDeviceAssignmentResponse(p::GetDefaultDeviceAssignmentResponse {
                    device_assignment: Some(assignment),
                })
            }
            other => return self.answer_about_arrays(other).await,
        })
    }

    async fn answer_about_arrays(&mut self, request: Ask) -> Option<Answer> {
        let empty = p::EmptyResponse {};
        Some(match request {
            Ask::CheckValueReadyRequest(_) => Answer::CheckValueReadyResponse(empty),
            Ask::MakeArrayFromHostBufferRequest(r) => {
                let handle = r.array_handle.unwrap_or(r.host_buffer_handle);
                let size = self.traffic.upload(r.host_buffer_handle).await;
                self.sizes.insert(handle, size);
                Answer::MakeArrayFromHostBufferResponse(p::HandleResponse { handle })
            }
            Ask::MakeArraysFromHostBufferShardsRequest(r) => {
                for (spec, &handle) in r.specs.iter().zip(&r.array_handles) {
                    for buffer in &spec.host_buffers {
                        let size = self.traffic.upload(buffer.host_buffer_handle).await;
                        self.sizes.insert(handle, size);
                    }
                }
                Answer::MakeArraysFromHostBufferShardsResponse(p::HandlesResponse {
                    handles: r.array_handles,
                })
            }
            Ask::CopyToHostBufferRequest(r) => {
                let size = self.sizes.get(&r.array_handle).copied().unwrap_or(size_of::<f32>());
                self.traffic.reads.lock().insert(r.host_buffer_handle, size);
                Answer::CopyToHostBufferResponse(empty)
            }
            Ask::FullyReplicatedShardRequest(r) => {
                if let Some(&size) = self.sizes.get(&r.array_handle) {
                    self.sizes.insert(r.result_handle, size);
                }
                let handle = r.result_handle;
                Answer::FullyReplicatedShardResponse(p::HandleResponse { handle })
            }
            Ask::DeleteArrayRequest(_) => {
                Answer::DeleteArrayResponse(p::HandleResponse { handle: COMPLETE })
            }
            Ask::IsArrayDeletedRequest(_) => {
                Answer::IsArrayDeletedResponse(p::DeletedResponse { deleted: false })
            }
            Ask::DestructArrayRequest(r) => {
                for handle in r.array_handle {
                    self.sizes.remove(&handle);
                }
                Answer::DestructArrayResponse(empty)
            }
            other => {
                eprintln!("null server: no answer to {other:?}");
                return None;
            }
        })
    }

    fn name(&mut self) -> u64 {
        self.next_name += 1;
        self.next_name
    }

    fn compile(&mut self) -> p::CompileResponse {
        p::CompileResponse {
            loaded_executable_handle: self.name(),
            name: "nothing".to_owned(),
            num_devices: 1,
            addressable_device_ids: vec![0],
            fingerprint: None,
            ready_future_handle: Some(COMPLETE),
            device_ids: vec![0],
            mpmd_addressable_devices: None,
        }
    }

    fn execute(
        &mut self,
        request: &p::LoadedExecutableExecuteRequest,
    ) -> p::LoadedExecutableExecuteResponse {
        let wants_status =
            request.execute_options.as_ref().is_some_and(|options| options.fill_status);
        let mut outputs = Vec::new();
        if request.result_array_handle.is_empty() {
            outputs.push(output(self.name()));
        }
        p::LoadedExecutableExecuteResponse {
            status_handle: if wants_status { COMPLETE } else { 0 },
            outputs,
        }
    }
}

fn unimplemented() -> p::StatusProto {
    let message = "this server only lets tiny computations be chained".to_owned();
    p::StatusProto { code: tonic::Code::Unimplemented as i32, message }
}

fn init() -> p::InitResponse {
    let device = p::init_response::Device {
        device_kind: "cpu".to_owned(),
        debug_string: "cpu:0".to_owned(),
        to_string: "CpuDevice(id=0)".to_owned(),
        default_memory_id: Some(0),
        memory_ids: vec![0],
        platform_name: "cpu".to_owned(),
        ..Default::default()
    };
    let memory = p::init_response::Memory {
        memory_space_kind: "device".to_owned(),
        device_ids: vec![0],
        debug_string: "memory device of device 0".to_owned(),
        to_string: "device:0".to_owned(),
        ..Default::default()
    };
    p::InitResponse {
        platform_name: "cpu".to_owned(),
        platform_version: "none".to_owned(),
        platform_id: 1,
        runtime_type: "null".to_owned(),
        all_devices: vec![device],
        addressable_device_ids: vec![0],
        session_id: 1,
        memories: vec![memory],
        primary_device_ids: vec![0],
        ..Default::default()
    }
}

fn on_one_device() -> p::OpSharding {
    p::OpSharding {
        r#type: MAXIMAL,
        tile_assignment_dimensions: vec![1],
        tile_assignment_devices: vec![0],
        ..Default::default()
    }
}

fn metadata() -> p::LoadedExecutableMetadataResponse {
    use p::loaded_executable_metadata_response as m;
    let shardings = || m::ShardingList { shardings: vec![on_one_device()] };
    let layouts = || m::LayoutList { layouts: vec![p::LayoutProto { minor_to_major: vec![] }] };
    let kinds = m::MemoryKindList { memory_kinds: vec!["device".to_owned()] };
    p::LoadedExecutableMetadataResponse {
        parameter_shardings: Some(shardings()),
        output_shardings: Some(shardings()),
        output_memory_kinds: Some(m::OutputMemoryKind {
            status: None,
            memory_kind_lists: vec![kinds],
        }),
        parameter_layouts: Some(m::ParameterLayouts::ParameterLayoutsList(layouts())),
        output_layouts: Some(m::OutputLayouts::OutputLayoutsList(layouts())),
        donated_input_indices_oneof: Some(m::DonatedInputIndicesOneof::DonatedInputIndices(
            m::DonatedInputIndices { donated_input_indices: vec![] },
        )),
        compiled_memory_stats_oneof: Some(m::CompiledMemoryStatsOneof::CompiledMemoryStatsError(
            unimplemented(),
        )),
        size_of_generated_code_in_bytes: 0,
    }
}

fn output(array_handle: u64) -> p::loaded_executable_execute_response::Output {
    let sharding = p::SingleDeviceShardingProto {
        memory_kind: Some("device".to_owned()),
        ..Default::default()
    };
    p::loaded_executable_execute_response::Output {
        dtype: Some(p::DTypeProto { version_number: 0, kind: F32 }),
        shape: Some(p::ShapeProto::default()),
        sharding: Some(p::ShardingProto {
            serialized_sharding: Some(p::Serialized {
                type_name: "xla::ifrt::SingleDeviceSharding".into(),
                data: sharding.encode_to_vec().into(),
            }),
        }),
        array_handle,
    }
}

#[tonic::async_trait]
impl GrpcIfrtService for NullServer {
    async fn get_version(
        &self,
        request: Request<p::GrpcGetVersionRequest>,
    ) -> Result<Response<p::GrpcGetVersionResponse>, Status> {
        let high = request.into_inner().max_version.unwrap_or_default();
        let version = p::IfrtProxyVersion {
            protocol_version: high.protocol_version.min(VERSION.0),
            ifrt_serdes_version_number: high.ifrt_serdes_version_number.min(VERSION.1),
        };
        Ok(Response::new(p::GrpcGetVersionResponse { version: Some(version) }))
    }

    type IfrtSessionStream = ReceiverStream<Result<p::IfrtResponse, Status>>;

    async fn ifrt_session(
        &self,
        request: Request<Streaming<p::IfrtRequest>>,
    ) -> Result<Response<Self::IfrtSessionStream>, Status> {
        let (sender, receiver) = mpsc::channel(RESPONSES);
        let mut session = Session {
            traffic: self.0.clone(),
            sizes: HashMap::new(),
            next_name: SERVER_NAMES,
            sequence: 0,
            ended: Vec::new(),
        };
        let mut requests = request.into_inner();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                if sender.send(Ok(session.respond(request).await)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn host_buffer_store(
        &self,
        request: Request<Streaming<p::GrpcHostBufferStoreRequest>>,
    ) -> Result<Response<p::GrpcHostBufferStoreResponse>, Status> {
        let metadata = request.metadata().get_bin(STORE_METADATA);
        let metadata = metadata.and_then(|value| value.to_bytes().ok()).unwrap_or_default();
        let upload = p::GrpcHostBufferStoreMetadata::decode(metadata)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let mut chunks = request.into_inner();
        while chunks.message().await?.is_some() {}
        self.0.uploads.lock().insert(upload.handle, upload.buffer_size as usize);
        self.0.uploaded.notify_waiters();
        Ok(Response::new(p::GrpcHostBufferStoreResponse {}))
    }

    type HostBufferLookupStream = ReceiverStream<Result<p::GrpcHostBufferLookupResponse, Status>>;

    async fn host_buffer_lookup(
        &self,
        request: Request<p::GrpcHostBufferLookupRequest>,
    ) -> Result<Response<Self::HostBufferLookupStream>, Status> {
        let size = self.0.reads.lock().get(&request.into_inner().handle).copied();
        let size = size.ok_or_else(|| Status::not_found("nothing was read under this name"))?;
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            let zeros = Bytes::from(vec![0; size.min(CHUNK_BYTES)]);
            let mut left = size;
            loop {
                let data = zeros.slice(..left.min(CHUNK_BYTES));
                left -= data.len();
                let response = p::GrpcHostBufferLookupResponse { data };
                if sender.send(Ok(response)).await.is_err() || left == 0 {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn host_buffer_delete(
        &self,
        request: Request<p::GrpcHostBufferDeleteRequest>,
    ) -> Result<Response<p::GrpcHostBufferDeleteResponse>, Status> {
        self.0.reads.lock().remove(&request.into_inner().handle);
        Ok(Response::new(p::GrpcHostBufferDeleteResponse {}))
    }
}

async fn until_input_ends() {
    let ended = tokio::task::spawn_blocking(|| {
        let mut input = std::io::stdin();
        while input.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
    });
    // Ignored: a reader that panicked has ended too.
    drop(ended.await);
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    // Transport settings follow `src/listener.rs`, except for its limit on streams, so that little but
    // the server's work differs.
    Server::builder()
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(128 << 20)
        .max_frame_size(1 << 20)
        .add_service(GrpcIfrtServiceServer::new(NullServer::default()))
        .serve_with_incoming_shutdown(incoming, until_input_ends())
        .await?;
    Ok(())
}
