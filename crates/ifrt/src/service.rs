//! The gRPC service that JAX's stock proxy client connects to.

use std::pin::Pin;
use std::sync::Arc;

use base::Status;
use bytes::Bytes;
use control::{Event, Share};
use prost::Message;
use run::{ClientOrigin, World};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Streaming};
use transport::{PeerRole, RemotePeer};

use crate::buffers::{Buffers, NoRoom, Reservation};
use crate::callbacks;
use crate::connection::{CodeRights, Identity, SESSIONS};
use crate::presentation::Presentation;
use crate::proto as p;
use crate::proto::grpc_ifrt_service_server::GrpcIfrtService;
use crate::session::{self, Admission};

/// Supported versions of the protocol.
pub(crate) const PROTOCOL: std::ops::RangeInclusive<i32> = 16..=25;
/// Supported versions of serialized objects. Each side reads its own and older versions; clients of
/// jaxlib 0.10 cannot compile below 3, and offer more.
pub(crate) const SERDES: std::ops::RangeInclusive<i32> = 0..=5;
/// Size of the chunks in which a client fetches bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// Largest upload in bytes.
const UPLOAD_LIMIT: i64 = 64 << 30;

const SESSION_METADATA: &str = "ifrt-proxy-grpc-ifrt-session-metadata-bin";
const STORE_METADATA: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";

/// A chunk of the bytes that a client fetches.
type Chunk = Result<p::GrpcHostBufferLookupResponse, tonic::Status>;

/// The implementation of the service.
pub(crate) struct FrontDoor {
    pub world: Arc<World>,
    pub buffers: Arc<Buffers>,
    pub presentation: Presentation,
    /// Whether all clients may run Python functions as the hosts' user.
    pub client_code: bool,
}

fn invalid(message: impl Into<String>) -> tonic::Status {
    tonic::Status::invalid_argument(message)
}

fn header<M: Message + Default>(metadata: &MetadataMap, key: &str) -> Result<M, tonic::Status> {
    let value = metadata.get_bin(key).ok_or_else(|| invalid(format!("no {key} is given")))?;
    let bytes = value.to_bytes().map_err(|_| invalid(format!("{key} is not base64")))?;
    M::decode(bytes).map_err(|error| invalid(format!("{key} is malformed: {error}")))
}

/// Fails on unsupported versions. Clients repeat the version request until it succeeds, so the error is
/// reported here, where it reaches the user.
pub(crate) fn check_version(version: &p::IfrtProxyVersion) -> Result<(), tonic::Status> {
    let spoken = [
        ("protocol", &PROTOCOL, version.protocol_version),
        ("serialization version", &SERDES, version.ifrt_serdes_version_number),
    ];
    match spoken.into_iter().find(|(_, ours, theirs)| !ours.contains(theirs)) {
        None => Ok(()),
        Some((what, ours, theirs)) => Err(tonic::Status::failed_precondition(format!(
            "the client's jaxlib speaks {what} {theirs}; this server speaks {} to {}; use a \
             jaxlib from 0.8 on",
            ours.start(),
            ours.end()
        ))),
    }
}

/// Returns the share that a client gets, and why it is not the one that it asks for.
pub(crate) fn share(given: &p::AttributeMap, peer: Option<RemotePeer>) -> (Share, Option<String>) {
    let asked = match asked_share(given) {
        Ok(share) => share,
        Err(reason) => return (Share::default(), Some(reason)),
    };
    let Some(RemotePeer { role: PeerRole::Client, grant, token, .. }) = peer else {
        return (asked, None);
    };
    if asked.weight <= grant.weight && asked.priority <= grant.priority {
        return (asked, None);
    }
    let refusal = format!(
        "the client asks for weight {} and priority {}; token {token} grants at most {} and {}",
        asked.weight, asked.priority, grant.weight, grant.priority
    );
    (Share { weight: grant.weight, priority: grant.priority }, Some(refusal))
}

/// Parses the scheduling weight and priority that a client asks for.
fn asked_share(given: &p::AttributeMap) -> Result<Share, String> {
    use p::attribute_map::value::Value;
    let number = |name: &str, default: i64, allowed: std::ops::RangeInclusive<i64>| {
        let value = given.attributes.get(name).and_then(|value| value.value.as_ref());
        match value {
            None => Ok(default),
            Some(Value::Int64Value(number)) if allowed.contains(number) => Ok(*number),
            Some(other) => Err(format!(
                "{name} is {other:?}; expected {} to {}",
                allowed.start(),
                allowed.end()
            )),
        }
    };
    Ok(Share {
        weight: number("fairway_weight", 1, 1..=1_000_000)? as u32,
        priority: number("fairway_priority", 0, -100..=100)? as i32,
    })
}

impl FrontDoor {
    /// Collects the chunks of an upload, which must add up to `wanted` bytes.
    async fn collect(
        &self,
        mut chunks: Streaming<p::GrpcHostBufferStoreRequest>,
        wanted: usize,
        room: Reservation,
    ) -> Result<Bytes, tonic::Status> {
        let short = |received: usize| {
            invalid(format!("an upload of {wanted} bytes ended after {received}"))
        };
        let long = || invalid(format!("an upload brings more than its {wanted} bytes"));
        let first = chunks.message().await?.map_or_else(Bytes::new, |chunk| chunk.data);
        if first.len() >= wanted {
            return match chunks.message().await? {
                None if first.len() == wanted => Ok(room.fill(first)),
                _ => Err(long()),
            };
        }
        let mut whole = self.world.data().buffer(wanted).map_err(|error| {
            let message = format!("no memory for an upload of {wanted} bytes: {error}");
            tonic::Status::resource_exhausted(message)
        })?;
        whole.append(&first);
        drop(first);
        while let Some(chunk) = chunks.message().await? {
            if !whole.append(&chunk.data) {
                return Err(long());
            }
        }
        match whole.filled() {
            filled if filled < wanted => Err(short(filled)),
            _ => Ok(room.fill(whole.finish())),
        }
    }
}

#[tonic::async_trait]
impl GrpcIfrtService for FrontDoor {
    async fn get_version(
        &self,
        request: Request<p::GrpcGetVersionRequest>,
    ) -> Result<Response<p::GrpcGetVersionResponse>, tonic::Status> {
        let newest = request.into_inner().max_version.unwrap_or_default();
        let version = p::IfrtProxyVersion {
            protocol_version: newest.protocol_version.min(*PROTOCOL.end()),
            ifrt_serdes_version_number: newest.ifrt_serdes_version_number.min(*SERDES.end()),
        };
        Ok(Response::new(p::GrpcGetVersionResponse { version: Some(version) }))
    }

    type IfrtSessionStream = ReceiverStream<Result<p::IfrtResponse, tonic::Status>>;

    async fn ifrt_session(
        &self,
        request: Request<Streaming<p::IfrtRequest>>,
    ) -> Result<Response<Self::IfrtSessionStream>, tonic::Status> {
        let session: p::GrpcIfrtSessionMetadata = header(request.metadata(), SESSION_METADATA)?;
        check_version(&session.version.unwrap_or_default())?;
        let (origin, rights, slot) = match request.extensions().get::<Arc<Identity>>() {
            None => (ClientOrigin::default(), CodeRights::None, None),
            Some(identity) => {
                let slot = identity.open_session().ok_or_else(too_many_sessions)?;
                (identity.origin().await, identity.code_rights(self.client_code), Some(slot))
            }
        };
        let given = session.initialization_data.unwrap_or_default();
        let (share, refusal) = share(&given, origin.peer);
        self.world.until_up().await;
        let responses = session::serve(
            self.world.clone(),
            self.buffers.clone(),
            self.presentation.clone(),
            Admission { share, origin, rights, refusal, key: callbacks::key(&given), place: slot },
            request.into_inner(),
        );
        Ok(Response::new(ReceiverStream::new(responses)))
    }

    async fn host_buffer_store(
        &self,
        request: Request<Streaming<p::GrpcHostBufferStoreRequest>>,
    ) -> Result<Response<p::GrpcHostBufferStoreResponse>, tonic::Status> {
        let upload: p::GrpcHostBufferStoreMetadata = header(request.metadata(), STORE_METADATA)?;
        let client = self.buffers.client(upload.session_id).ok_or_else(unknown_session)?;
        establish(&request);
        if !(0..=UPLOAD_LIMIT).contains(&upload.buffer_size) {
            return Err(invalid(format!(
                "an upload of {} bytes; at most {UPLOAD_LIMIT} are taken",
                upload.buffer_size
            )));
        }
        let is_awaited =
            || self.world.inspect(|controller| controller.awaits_upload(client, upload.handle));
        let size = upload.buffer_size as u64;
        let name = (upload.session_id, upload.handle);
        let room = self.buffers.reserve(name, size, is_awaited).await;
        let room = room.map_err(|reason| match reason {
            NoRoom::Ended => unknown_session(),
            NoRoom::Twice => invalid(format!("upload {} is sent twice", upload.handle)),
        })?;
        let data = self.collect(request.into_inner(), size as usize, room).await?;
        self.world.submit(Event::UploadArrived { client, upload: upload.handle, data });
        Ok(Response::new(p::GrpcHostBufferStoreResponse {}))
    }

    type HostBufferLookupStream = Pin<Box<dyn Stream<Item = Chunk> + Send>>;

    async fn host_buffer_lookup(
        &self,
        request: Request<p::GrpcHostBufferLookupRequest>,
    ) -> Result<Response<Self::HostBufferLookupStream>, tonic::Status> {
        let (key, handle) = (request.get_ref().session_id, request.get_ref().handle);
        // Held until the last chunk has been sent, or the client has cancelled the call.
        let permit = self.buffers.fetch(key).await.ok_or_else(unknown_session)?;
        let data = self
            .buffers
            .read(key, handle)
            .ok_or_else(|| tonic::Status::not_found(format!("no bytes are kept under {handle}")))?;
        establish(&request);
        let mut rest = Some(data);
        let pieces = std::iter::from_fn(move || {
            let _held = &permit;
            let mut data = rest.take()?;
            let piece = data.split_to(data.len().min(CHUNK_BYTES));
            rest = Some(data).filter(|data| !data.is_empty());
            Some(Ok(p::GrpcHostBufferLookupResponse { data: piece }))
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(pieces))))
    }

    async fn host_buffer_delete(
        &self,
        request: Request<p::GrpcHostBufferDeleteRequest>,
    ) -> Result<Response<p::GrpcHostBufferDeleteResponse>, tonic::Status> {
        let request = request.into_inner();
        match self.buffers.forget(request.session_id, request.handle) {
            Some((client, read)) => self.world.submit(Event::ReadFetched { client, read }),
            None => {
                let client = self.buffers.client(request.session_id);
                let client = client.ok_or_else(unknown_session)?;
                self.world.submit(Event::UploadDropped { client, upload: request.handle });
            }
        }
        Ok(Response::new(p::GrpcHostBufferDeleteResponse {}))
    }
}

/// Marks the connection as established by a call of a known session, which may use another connection.
fn establish<T>(request: &Request<T>) {
    if let Some(identity) = request.extensions().get::<Arc<Identity>>() {
        identity.establish();
    }
}

fn too_many_sessions() -> tonic::Status {
    tonic::Status::resource_exhausted(format!(
        "a connection has at most {SESSIONS} sessions at a time; end one, or connect anew"
    ))
}

fn unknown_session() -> tonic::Status {
    tonic::Status::from(Refused::unknown_session())
}

/// Errors of calls without a session.
struct Refused(Status);

impl Refused {
    fn unknown_session() -> Self {
        Self(Status::new(base::Code::NotFound, "no session has this key; it has ended"))
    }
}

impl From<Refused> for tonic::Status {
    fn from(refused: Refused) -> Self {
        tonic::Status::new(tonic::Code::from(refused.0.code as i32), refused.0.message)
    }
}
