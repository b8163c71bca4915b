//! One client's stream of requests and responses.
//!
//! Requests are submitted to the controller in the order of arrival; responses are sent as they become
//! ready. A client keeps a record of each request until the sequence numbers of responses have no gap,
//! so numbers are assigned when responses are sent, and only to those that the client counts: neither
//! batched deletions and their futures nor responses without a body.

use std::collections::HashMap;
use std::sync::Arc;

use base::{ClientId, Code, DeviceId, Status};
use control::{Event, Reply, Request, RequestId, Share};
use ir::{ArraySpec, DType, Dims, Sharding};
use parking_lot::Mutex;
use prost::Message;
use run::{CallbackKey, ClientOrigin, Readback, World};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tonic::Streaming;

use crate::buffers::Buffers;
use crate::connection::CodeRights;
use crate::decode::{self, Asked};
use crate::encode::{self, Expected};
use crate::limits;
use crate::presentation::{self, Presentation};
use crate::proto as p;
use crate::proto::ifrt_request::Request as Body;
use crate::proto::ifrt_response::Response;

/// Maximum number of responses queued for a slow client.
const RESPONSES: usize = 1024;
/// Back-pressure: maximum number of requests of a client without a response; beyond it no more are
/// read. Responses that have not been sent count too, so a client that never reads is soon blocked.
const REQUESTS: usize = 8192;
/// Maximum number of bytes of such requests; a single request may be larger.
const REQUESTS_BYTES: usize = 256 << 20;

/// Most bytes of an array that is read on the stream for small arrays.
const READBACK_BYTES: usize = 64 << 10;

/// A request without a response.
struct Open {
    op: u64,
    context: u64,
    expected: Expected,
    /// Host-buffer handle under which the bytes of a read are kept.
    buffer: Option<u64>,
    /// Name under which they go to the client's stream for small arrays.
    slot: Option<u32>,
    /// Number of bytes that the request counts as.
    bytes: usize,
}

/// All requests without a response.
#[derive(Default)]
struct Unanswered {
    by_id: HashMap<RequestId, Open>,
    bytes: usize,
}

impl Unanswered {
    fn insert(&mut self, id: RequestId, open: Open) {
        self.bytes += open.bytes;
        self.by_id.insert(id, open);
    }

    fn remove(&mut self, id: RequestId) -> Option<Open> {
        let open = self.by_id.remove(&id)?;
        self.bytes -= open.bytes;
        Some(open)
    }

    fn is_full(&self) -> bool {
        self.by_id.len() >= REQUESTS || self.bytes >= REQUESTS_BYTES
    }
}

/// A response that does not involve the controller.
type Local = (RequestId, Result<Response, Status>);

/// The state of one connected client.
struct Session {
    world: Arc<World>,
    buffers: Arc<Buffers>,
    presentation: Presentation,
    client: ClientId,
    key: u64,
    open: Mutex<Unanswered>,
    /// Signalled when a response has been sent.
    answered: Notify,
    local: mpsc::UnboundedSender<Local>,
    refusal: Option<String>,
    rights: CodeRights,
}

/// Who opens a session, and with what.
pub(crate) struct Admission {
    pub share: Share,
    pub origin: ClientOrigin,
    /// Whether the client may run Python functions on the hosts' machines.
    pub rights: CodeRights,
    /// Why the client is refused what it asks for. The description of devices says so: a stock client
    /// whose session fails at once tries for two minutes, and reports no reason.
    pub refusal: Option<String>,
    /// Key of the stream on which its process takes calls.
    pub key: Option<CallbackKey>,
    /// Held until the session ends.
    pub place: Option<OwnedSemaphorePermit>,
}

/// Responses to the client.
pub(crate) type ResponseStream = mpsc::Receiver<Result<p::IfrtResponse, tonic::Status>>;

/// Serves a client until its stream ends; returns its responses.
pub(crate) fn serve(
    world: Arc<World>,
    buffers: Arc<Buffers>,
    presentation: Presentation,
    Admission { share, origin, rights, refusal, key: callbacks, place }: Admission,
    requests: Streaming<p::IfrtRequest>,
) -> ResponseStream {
    let (replies, answered) = mpsc::unbounded_channel();
    let (local, locally) = mpsc::unbounded_channel();
    let (sender, receiver) = mpsc::channel(RESPONSES);
    let client = world.join_client(replies, share, origin);
    if let Some(key) = callbacks {
        world.callbacks().register(client, key);
    }
    let key = buffers.open(client);
    let open = Mutex::default();
    let done = Notify::new();
    let session = Arc::new(Session {
        world,
        buffers,
        presentation,
        client,
        key,
        open,
        answered: done,
        local,
        refusal,
        rights,
    });
    tokio::spawn(session.clone().answer(answered, locally, sender.clone()));
    tokio::spawn(async move {
        session.listen(requests, sender).await;
        drop(place);
    });
    receiver
}

impl Session {
    async fn listen(
        self: Arc<Self>,
        mut requests: Streaming<p::IfrtRequest>,
        responses: mpsc::Sender<Result<p::IfrtResponse, tonic::Status>>,
    ) {
        let mut next: RequestId = 0;
        loop {
            let request = match requests.message().await {
                Ok(Some(request)) => request,
                Ok(None) => break,
                Err(error) => {
                    tracing::debug!(%error, client = self.client.0, "a client's stream ended");
                    break;
                }
            };
            self.take(next, request);
            next += 1;
            // The client may disconnect while back-pressure applies.
            tokio::select! {
                () = self.until_heard(next) => {}
                () = responses.closed() => break,
            }
        }
        self.buffers.close(self.key);
        self.world.leave_client(self.client);
    }

    /// Waits while back-pressure applies: until the hosts, and the client's responses, have caught up.
    async fn until_heard(&self, requests: RequestId) {
        if requests.is_multiple_of(64) && self.world.is_congested(self.client) {
            self.world.wait_for_backpressure(self.client).await;
        }
        loop {
            let answered = self.answered.notified();
            if !self.open.lock().is_full() {
                return;
            }
            answered.await;
        }
    }

    /// Decodes one request and submits or answers it.
    fn take(&self, id: RequestId, request: p::IfrtRequest) {
        let metadata = request.request_metadata.unwrap_or_default();
        let mut open = Open {
            op: metadata.op_id,
            context: metadata.user_context_id,
            expected: request.request.as_ref().map_or(Expected::Immediate, Expected::of),
            buffer: None,
            slot: None,
            bytes: limits::weight(
                request.encoded_len(),
                matches!(request.request, Some(Body::CompileRequest(_))),
            ),
        };
        let names = request.request.as_ref().map_or_else(Vec::new, decode::result_names);
        let asked = match request.request {
            Some(body) => decode::request(body).and_then(|asked| self.authorize(asked)),
            None => Err(Status::new(
                Code::Unimplemented,
                "the server does not know this request; it is older than the client",
            )),
        };
        match asked {
            Ok(Asked::Controller(request)) => self.submit(id, open, request),
            Ok(Asked::Read { request, buffer }) => {
                open.buffer = Some(buffer);
                self.submit(id, open, request);
            }
            Ok(Asked::Readback { request, slot, results }) => {
                open.slot = Some(slot);
                // No request of the client has this number, so no response is sent.
                let unused = Status::new(Code::InvalidArgument, "a read has no other results");
                let (client, unused) = (self.client, errors(results, unused));
                self.world.submit(Event::Request { client, id: id | 1 << 63, request: unused });
                self.submit(id, open, request);
            }
            Ok(other) => {
                self.open.lock().insert(id, open);
                self.answer_locally(id, self.here(&other));
            }
            Err(error) => {
                if names.is_empty() {
                    self.open.lock().insert(id, open);
                    return self.answer_locally(id, Err(error));
                }
                self.submit(id, open, errors(names, error));
            }
        }
    }

    /// Notes for whom a Python function runs.
    ///
    /// # Errors
    /// The client may run none.
    fn authorize(&self, mut asked: Asked) -> Result<Asked, Status> {
        if let Asked::Controller(Request::LoadColocated { function, .. }) = &mut asked {
            function.user = match self.rights {
                CodeRights::Owner => None,
                CodeRights::User(user) => Some(user),
                CodeRights::None => {
                    return Err(Status::new(
                        Code::PermissionDenied,
                        "a client's token does not allow to run Python functions on the hosts \
                         (colocated_python); the controller's owner allows it by the setting \
                         client_code, or gives the client an administrator's token",
                    ));
                }
            };
        }
        Ok(asked)
    }

    fn submit(&self, id: RequestId, open: Open, request: Request) {
        self.open.lock().insert(id, open);
        self.world.submit(Event::Request { client: self.client, id, request });
    }

    fn answer_locally(&self, id: RequestId, result: Result<Response, Status>) {
        // Ignored: the receiver is only dropped when the client has disconnected.
        let _ = self.local.send((id, result));
    }

    /// Answers a request that does not involve the controller.
    fn here(&self, asked: &Asked) -> Result<Response, Status> {
        let response = match asked {
            Asked::Init => {
                let describe = |c: &_| self.presentation.init(c, self.key, self.client);
                let mut init = self.world.inspect(describe);
                if let Some(reason) = &self.refusal {
                    presentation::refuse(&mut init, reason);
                }
                Response::InitResponse(init)
            }
            Asked::DeviceAssignment { replicas, partitions } => {
                let devices = self.world.inspect(|c| c.cluster().devices().count()) as u64;
                let device_assignment = default_assignment(*replicas, *partitions, devices)?;
                Response::GetDefaultDeviceAssignmentResponse(
                    p::GetDefaultDeviceAssignmentResponse {
                        device_assignment: Some(device_assignment),
                    },
                )
            }
            Asked::Layout { rank } => {
                let axes: Vec<String> = (0..*rank).rev().map(|axis| axis.to_string()).collect();
                let text = format!("{{{}}}", axes.join(","));
                Response::GetDefaultLayoutResponse(p::GetDefaultLayoutResponse {
                    serialized_pjrt_layout: text.into(),
                })
            }
            Asked::Complete => Response::CheckFutureResponse(p::EmptyResponse {}),
            Asked::Controller(_) | Asked::Read { .. } | Asked::Readback { .. } => {
                unreachable!("these are submitted to the controller")
            }
        };
        Ok(response)
    }

    /// Sends responses until the client has disconnected.
    async fn answer(
        self: Arc<Self>,
        mut answered: mpsc::UnboundedReceiver<(RequestId, Result<Reply, Status>)>,
        mut locally: mpsc::UnboundedReceiver<Local>,
        sender: mpsc::Sender<Result<p::IfrtResponse, tonic::Status>>,
    ) {
        let mut books = Books::default();
        loop {
            let (id, result) = tokio::select! {
                reply = answered.recv() => match reply {
                    Some((id, result)) => (id, result.map(Answer::Reply)),
                    None => return, // the controller has forgotten this client
                },
                Some((id, result)) = locally.recv() => {
                    (id, result.map(|response| Answer::Response(Box::new(response))))
                }
            };
            // Until the client reads, a response still counts as unanswered.
            let Ok(slot) = sender.reserve().await else { return };
            let Some(open) = self.open.lock().remove(id) else { continue };
            slot.send(Ok(self.respond(id, open, result, &mut books)));
            self.answered.notify_one();
        }
    }

    /// Sends the bytes of a read, or why there are none, on the stream for small arrays; returns
    /// what the copy is answered with that stands for it.
    fn read_back(
        &self,
        read: RequestId,
        slot: u32,
        result: Result<Answer, Status>,
    ) -> Result<Answer, Status> {
        let value = match result {
            Ok(Answer::Reply(Reply::Data(data))) if data.len() <= READBACK_BYTES => Ok(data),
            Ok(Answer::Reply(Reply::Data(_))) => {
                Err(Status::new(Code::InvalidArgument, "the array is not small"))
            }
            Ok(_) => Err(Status::new(Code::Internal, "a read has no bytes")),
            Err(error) => Err(error),
        };
        let readback = Readback { slot, read, value };
        if self.world.readbacks().pass(self.client, readback).is_err() {
            self.world.submit(Event::ReadFetched { client: self.client, read });
        }
        Ok(Answer::Reply(Reply::Done))
    }

    fn respond(
        &self,
        id: RequestId,
        open: Open,
        result: Result<Answer, Status>,
        books: &mut Books,
    ) -> p::IfrtResponse {
        let batched = open.expected.is_batched();
        if open.context != 0 {
            books.ended.push(open.context);
        }
        let result = match open.slot {
            Some(slot) => self.read_back(id, slot, result),
            None => result,
        };
        let (body, status) = match result {
            Ok(Answer::Response(response)) => (Some(*response), None),
            Ok(Answer::Reply(Reply::Data(data))) => {
                if let Some(handle) = open.buffer
                    && let Some(read) = self.buffers.keep(self.key, handle, id, data)
                {
                    self.world.submit(Event::ReadFetched { client: self.client, read });
                }
                (Some(open.expected.response(Reply::Done)), None)
            }
            Ok(Answer::Reply(reply)) => (Some(open.expected.response(reply)), None),
            Err(error) => (None, Some(encode::status(&error))),
        };
        let mut metadata = p::ResponseMetadata { op_id: open.op, status, ..Default::default() };
        if matches!(body, Some(Response::InitResponse(_))) {
            metadata.seq_num = -1;
        } else if body.is_some() && !batched {
            metadata.seq_num = books.sequence;
            books.sequence += 1;
            metadata.destroyed_user_context_ids = std::mem::take(&mut books.ended);
        }
        p::IfrtResponse { response_metadata: Some(metadata), response: body }
    }
}

enum Answer {
    Reply(Reply),
    Response(Box<Response>),
}

/// State of the client's bookkeeping: the next sequence number, and user contexts that have ended.
#[derive(Default)]
struct Books {
    sequence: i64,
    ended: Vec<u64>,
}

/// Returns the request that makes arrays of a request that cannot be decoded into errors: the client
/// goes on to use these handles, and each use must report the error.
pub(crate) fn errors(mut arrays: Vec<u64>, error: Status) -> Request {
    // More are never made; uses of the others report that there is no such array.
    arrays.truncate(limits::ARRAYS);
    let specs = arrays.iter().map(|_| unknown_spec()).collect();
    Request::MakeErrors { arrays, specs, error }
}

fn unknown_spec() -> ArraySpec {
    ArraySpec {
        dtype: DType::Token,
        dims: Dims::new(),
        sharding: Sharding::single(DeviceId(0), None),
    }
}

pub(crate) fn default_assignment(
    replicas: u64,
    partitions: u64,
    devices: u64,
) -> Result<p::DeviceAssignmentProto, Status> {
    let (replicas, partitions) = (replicas.max(1), partitions.max(1));
    if replicas.checked_mul(partitions).is_none_or(|wanted| wanted > devices) {
        return Err(Status::new(
            Code::InvalidArgument,
            format!(
                "{replicas} replicas x {partitions} partitions are wanted; there are {devices} \
                 devices"
            ),
        ));
    }
    let computation_devices = (0..partitions)
        .map(|partition| p::device_assignment_proto::ComputationDevice {
            replica_device_ids: (0..replicas)
                .map(|replica| (replica * partitions + partition) as i64)
                .collect(),
        })
        .collect();
    Ok(p::DeviceAssignmentProto {
        replica_count: replicas as i32,
        computation_count: partitions as i32,
        computation_devices,
    })
}
