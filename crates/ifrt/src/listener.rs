//! Listening for clients: which users may connect, and until when they must have opened a session.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use run::World;
use run::identity::{LocalPeer, Users, is_descriptor_shortage};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

use crate::connection::{Identity, ProxyConnection};

use crate::buffers::Buffers;
use crate::presentation::Presentation;
use crate::proto::grpc_ifrt_service_server::GrpcIfrtServiceServer;
use crate::service::FrontDoor;

/// How long a connection may take to open a session; what it sends meanwhile does not count.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections without a session at once; the next ones wait in the kernel's queue.
const PENDING_LIMIT: usize = 512;
/// Most connections in all, fewer where descriptors run short; clients have one or two each.
const CONNECTION_LIMIT: usize = 8192;
/// Descriptors that are left to everything else: hosts, their messages, files, one check of a peer.
const DESCRIPTORS_KEPT: u64 = 128;
/// Reasons for refusals that are shown, each once.
const REFUSALS_SHOWN: usize = 16;
/// Calls of one connection at once; clients make one for each upload and read on its way.
const STREAM_LIMIT: u32 = 1024;
/// Largest request; constants of a program travel inside it.
const REQUEST_LIMIT: usize = 1 << 30;

/// Bytes of a client's requests that may wait unread, before it must wait itself.
const STREAM_WINDOW: u32 = 4 << 20;
/// The same for all streams of a connection, which are its requests and uploads. h2 takes half of
/// it as the memory that headers of small unread frames may fill, 256 bytes each without what they
/// bring, and hangs up on who needs more. Requests are of 20 bytes and more, so a window of them
/// needs 12 times itself at most: a client must wait before it is hung up on.
const CONNECTION_WINDOW: u32 = 32 * STREAM_WINDOW;

/// Why clients cannot be listened to.
#[derive(Debug, Error)]
pub enum DoorError {
    /// The address is not of a known form, or not of this machine alone.
    #[error("cannot listen at {address:?}: {reason}; try 127.0.0.1:8421")]
    Address {
        /// What was given.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The address is taken or cannot be used.
    #[error("cannot listen at {address}: {source}; try another port, or 0 for any free one")]
    Bind {
        /// What was given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Where clients connect.
pub struct Listener {
    listener: TcpListener,
    address: String,
    users: Users,
}

impl Listener {
    /// Listens at `HOST:PORT` on the loopback interface, for these users of this machine.
    ///
    /// The stock client speaks no TLS, so any wider address is refused. Over Unix sockets it puts
    /// the escaped path where a host's name belongs, which HTTP/2 servers refuse.
    ///
    /// # Errors
    /// The address is malformed, not of this machine alone, or taken.
    pub async fn open(address: &str, users: Users) -> Result<Self, DoorError> {
        let bind = |source| DoorError::Bind { address: address.to_owned(), source };
        let refuse = |reason: &str| DoorError::Address {
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let place: SocketAddr = address
            .replace("localhost", "127.0.0.1")
            .parse()
            .map_err(|_| refuse("expected HOST:PORT with a numeric host"))?;
        if !place.ip().is_loopback() {
            return Err(refuse(
                "JAX's client speaks no TLS, so only loopback addresses are safe; tunnel to reach \
                 it from elsewhere",
            ));
        }
        let listener = TcpListener::bind(place).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?.to_string();
        Ok(Self { listener, address, users })
    }

    /// The address that was bound, with its port.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Serves clients until `until` completes.
    ///
    /// # Errors
    /// The transport fails.
    pub async fn serve(
        self,
        world: Arc<World>,
        presentation: Presentation,
        until: impl Future<Output = ()>,
    ) -> Result<(), tonic::transport::Error> {
        let service = FrontDoor { world, buffers: Arc::new(Buffers::default()), presentation };
        let service = GrpcIfrtServiceServer::new(service)
            .max_decoding_message_size(REQUEST_LIMIT)
            .max_encoding_message_size(REQUEST_LIMIT);
        let (sender, receiver) = mpsc::channel(16);
        let accepting = tokio::spawn(accept(self.listener, self.users, sender));
        let served = Server::builder()
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(1 << 20)
            .max_concurrent_streams(STREAM_LIMIT)
            .tcp_nodelay(true)
            .add_service(service)
            .serve_with_incoming_shutdown(ReceiverStream::new(receiver), until)
            .await;
        accepting.abort();
        served
    }
}

/// Checks who connects, which takes a descriptor: waits for a free one as long as a client may take to
/// begin.
async fn check(users: &Users, stream: &TcpStream, peer: SocketAddr) -> io::Result<LocalPeer> {
    let own = stream.local_addr()?;
    let until = Instant::now() + HANDSHAKE_TIMEOUT;
    loop {
        match users.check_tcp(own, peer) {
            Err(error) if is_descriptor_shortage(&error) && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            checked => return checked,
        }
    }
}

/// How many connections there are descriptors for.
fn connection_limit() -> usize {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let left = most.map_or(u64::MAX, |most| most.saturating_sub(DESCRIPTORS_KEPT).max(most / 4));
    usize::try_from(left).map_or(CONNECTION_LIMIT, |left| left.clamp(1, CONNECTION_LIMIT))
}

async fn accept(
    listener: TcpListener,
    users: Users,
    sender: mpsc::Sender<io::Result<ProxyConnection>>,
) {
    let pending = Arc::new(Semaphore::new(PENDING_LIMIT));
    let open = Arc::new(Semaphore::new(connection_limit()));
    let mut refusals = BTreeSet::new();
    loop {
        let slot = open.clone().acquire_owned().await.expect("never closed");
        let permit = pending.clone().acquire_owned().await.expect("never closed");
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let checked = check(&users, &stream, peer).await;
        let peer = match checked.and_then(|peer| stream.set_nodelay(true).map(|()| peer)) {
            Ok(peer) => peer,
            // Whoever only looks whether there is a listener is gone by now.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                let text = error.to_string();
                if refusals.len() < REFUSALS_SHOWN && refusals.insert(text.clone()) {
                    eprintln!("fairway: a client's connection was refused: {text}");
                }
                continue;
            }
        };
        let identity = Arc::new(Identity::new(peer, permit, slot));
        let connection = ProxyConnection::new(stream, identity, HANDSHAKE_TIMEOUT);
        if sender.send(Ok(connection)).await.is_err() {
            return;
        }
    }
}
