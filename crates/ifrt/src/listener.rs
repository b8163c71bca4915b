//! Listens for clients: which users may connect, and the deadline to open a session.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use run::World;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use transport::identity::{LocalPeer, Users, is_descriptor_shortage};
use transport::{Decision, PeerConnection, Strangers};

use crate::buffers::Buffers;
use crate::callbacks;
use crate::connection::{ClientStream, ConnectionPeer, Identity, ProxyConnection};
use crate::presentation::Presentation;
use crate::proto::grpc_ifrt_service_server::GrpcIfrtServiceServer;
use crate::service::FrontDoor;

/// Timeout for a connection to open a session, no matter what it sends meanwhile.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections that have sent something and have no session; further ones wait.
const PENDING_LIMIT: usize = 512;
/// Maximum number of connections, lower where descriptors are scarce; clients have one or two each.
const CONNECTION_LIMIT: usize = 8192;
/// File descriptors reserved for other uses: hosts, their messages, files, the check of a peer.
const DESCRIPTORS_KEPT: u64 = 128;
/// Maximum number of distinct refusal reasons that are printed, each once.
const REFUSALS_SHOWN: usize = 16;
/// Maximum number of concurrent calls of a connection; clients make one per upload and read in flight.
const STREAM_LIMIT: u32 = 1024;
/// Largest request in bytes; constants of a program travel inside it.
const REQUEST_LIMIT: usize = 1 << 30;

/// HTTP/2 flow-control window of a stream: bytes that may wait unread before the client is blocked.
const STREAM_WINDOW: u32 = 4 << 20;
/// The same for all streams of a connection, which are its requests and uploads. h2 allows headers of
/// small unread frames to fill half of it in memory, 256 bytes each without their payload, and closes
/// the connection beyond. Requests have at least 20 bytes, so a window of them needs at most 12 times
/// its size: flow control blocks a client before h2 closes its connection.
const CONNECTION_WINDOW: u32 = 32 * STREAM_WINDOW;

/// Why the server cannot listen for clients.
#[derive(Debug, Error)]
pub enum DoorError {
    /// The address is malformed, or not a loopback address.
    #[error("cannot listen at {address:?}: {reason}; try 127.0.0.1:8421")]
    Address {
        /// The requested address.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The address is in use or not available.
    #[error("cannot listen at {address}: {source}; try another port, or 0 for any free one")]
    Bind {
        /// The requested address.
        address: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Who may connect, and who of them may run code of their own.
#[derive(Debug, Clone)]
pub struct Admittance {
    /// Users of this machine that may connect.
    pub users: Users,
    /// Whether all clients may run Python functions as the hosts' user, and not only its own and
    /// those with an administrator's token.
    pub client_code: bool,
}

/// The listening socket for clients.
pub struct Listener {
    listener: TcpListener,
    address: String,
    admittance: Admittance,
}

impl Listener {
    /// Listens at `HOST:PORT` on the loopback interface, for whom it admits.
    ///
    /// The stock client does not support TLS, so all other addresses are refused: clients of other
    /// machines come through the gateway. Over Unix sockets the stock client sends the escaped path in
    /// place of a host name, which HTTP/2 servers refuse.
    ///
    /// # Errors
    /// The address is malformed, not a loopback address, or in use.
    pub async fn open(address: &str, admittance: Admittance) -> Result<Self, DoorError> {
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
                "JAX's client speaks no TLS, so only loopback addresses are safe; clients of other \
                 machines come through the gateway (`fairway up --gateway`)",
            ));
        }
        let listener = TcpListener::bind(place).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?.to_string();
        Ok(Self { listener, address, admittance })
    }

    /// Returns the bound address, including its port.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Serves clients until `until` completes.
    ///
    /// # Arguments
    /// - `arrivals`: clients of other machines, from the gateway.
    ///
    /// # Errors
    /// The transport fails.
    pub async fn serve(
        self,
        world: Arc<World>,
        presentation: Presentation,
        arrivals: mpsc::Receiver<PeerConnection>,
        until: impl Future<Output = ()>,
    ) -> Result<(), tonic::transport::Error> {
        let Admittance { users, client_code } = self.admittance;
        let buffers = Arc::new(Buffers::default());
        let service = FrontDoor { world: world.clone(), buffers, presentation, client_code };
        let service = GrpcIfrtServiceServer::new(service)
            .max_decoding_message_size(REQUEST_LIMIT)
            .max_encoding_message_size(REQUEST_LIMIT);
        let (sender, receiver) = mpsc::channel(16);
        let accepting = tokio::spawn(accept(self.listener, users, arrivals, sender, world));
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

/// Checks the user of a peer, which needs a file descriptor; if there is none left, retries until the
/// handshake timeout.
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

/// Returns the number of connections for which there are file descriptors.
fn connection_limit() -> usize {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let left = most.map_or(u64::MAX, |most| most.saturating_sub(DESCRIPTORS_KEPT).max(most / 4));
    usize::try_from(left).map_or(CONNECTION_LIMIT, |left| left.clamp(1, CONNECTION_LIMIT))
}

async fn accept(
    listener: TcpListener,
    users: Users,
    mut arrivals: mpsc::Receiver<PeerConnection>,
    sender: mpsc::Sender<io::Result<ProxyConnection>>,
    world: Arc<World>,
) {
    let onward = Onward { sender, world, pending: Arc::new(Semaphore::new(PENDING_LIMIT)) };
    let mut silent = Strangers::default();
    let open = Arc::new(Semaphore::new(connection_limit()));
    let mut refusals = Refusals::default();
    loop {
        let slot = open.clone().acquire_owned().await.expect("never closed");
        let accepted = tokio::select! {
            accepted = listener.accept() => admit(accepted, &users, &mut refusals).await,
            Some(arrival) = arrivals.recv() => {
                let peer = ConnectionPeer::Carried(arrival.peer);
                Some((ClientStream::Carried(Box::new(arrival)), peer))
            }
        };
        let Some((stream, peer)) = accepted else { continue };
        for () in silent.make_room() {
            tracing::debug!("a client's connection was evicted by others before its first byte");
        }
        let deadline = tokio::time::Instant::now() + HANDSHAKE_TIMEOUT;
        let connection =
            ProxyConnection::new(stream, Arc::new(Identity::new(peer, slot)), deadline);
        let decision = Decision::default();
        let task = tokio::spawn(onward.clone().pass(connection, deadline, decision.clone()));
        silent.add((), task.abort_handle(), decision);
    }
}

/// Where connections go once their peers have sent something.
#[derive(Clone)]
struct Onward {
    sender: mpsc::Sender<io::Result<ProxyConnection>>,
    world: Arc<World>,
    pending: Arc<Semaphore>,
}

impl Onward {
    /// Passes a connection on to what it begins with: a session, or the calls of a client.
    async fn pass(
        self,
        mut connection: ProxyConnection,
        deadline: tokio::time::Instant,
        decision: Decision,
    ) {
        let Ok(first) = connection.peek().await else { return };
        if !decision.decide() {
            return; // it was evicted
        }
        let place = tokio::time::timeout_at(deadline, self.pending.acquire_owned()).await;
        let Ok(Ok(place)) = place else { return };
        connection.connect_info().take_place(place);
        if first == callbacks::GREETING[0] {
            return callbacks::serve(connection, self.world).await;
        }
        // Ignored: the server is ending.
        drop(self.sender.send(Ok(connection)).await);
    }
}

/// The reasons of refusals that were printed.
type Refusals = BTreeSet<String>;

/// Returns a connection of this machine if its user is admitted.
async fn admit(
    accepted: io::Result<(TcpStream, SocketAddr)>,
    users: &Users,
    refusals: &mut Refusals,
) -> Option<(ClientStream, ConnectionPeer)> {
    let (stream, peer) = match accepted {
        Ok(accepted) => accepted,
        Err(error) => {
            tracing::warn!(%error, "a connection could not be accepted");
            tokio::time::sleep(Duration::from_millis(50)).await;
            return None;
        }
    };
    let checked = check(users, &stream, peer).await;
    match checked.and_then(|peer| stream.set_nodelay(true).map(|()| peer)) {
        Ok(peer) => Some((ClientStream::Local(stream), ConnectionPeer::Local(peer))),
        // A port probe: the peer has already closed the connection.
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            let text = error.to_string();
            if refusals.len() < REFUSALS_SHOWN && refusals.insert(text.clone()) {
                tracing::warn!("a client's connection was refused: {text}");
            }
            None
        }
    }
}
