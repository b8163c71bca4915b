//! The controller's listener for other machines.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use rustls::{ServerConfig, ServerConnection};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::stream::{BufferedStream, SHORT, UNSENT, copy, prepared};
use crate::token::{BINDING, LABEL};
use crate::{
    Authority, Decision, PeerConnection, PeerRole, RemotePeer, STRANGERS_MAX, StoredToken,
    Strangers, TokenId, Tokens, TransportError,
};

/// Time within which a peer has proved its token.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum number of connections that are served.
const CONNECTIONS_MAX: usize = 1 << 14;
/// Maximum number of connections of one token of a client, so that it leaves room for others. A
/// client makes a few.
const TOKEN_CONNECTIONS_MAX: usize = 512;
/// Maximum size of a request in bytes.
const REQUEST_MAX: usize = 256;
/// The answer where a service is gone.
const ENDED: &str = "refused the service has ended\n";
/// What a request begins with.
const VERSION: &str = "fairway/1";

/// Where a service takes connections.
#[derive(Clone, Debug)]
pub enum ServiceAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A Unix socket where a line comes first that says who the peer is, as [`RemotePeer`] is printed.
    Announced(PathBuf),
    /// In this process.
    Inside(mpsc::Sender<PeerConnection>),
}

/// A part of the controller that peers may be connected to.
#[derive(Clone, Debug)]
pub struct Service {
    /// The role of its peers.
    pub role: PeerRole,
    /// Where it listens.
    pub address: ServiceAddress,
}

/// A connection that was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The peer's address.
    pub peer: SocketAddr,
    /// Why.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "refused {}: {}", self.peer, self.reason)
    }
}

/// What all connections share.
struct Shared {
    tls: TlsAcceptor,
    tokens: Arc<Tokens>,
    services: RwLock<BTreeMap<String, Service>>,
    serving_by: Mutex<BTreeMap<TokenId, Vec<AbortHandle>>>,
    serving: Semaphore,
    refused: Box<dyn Fn(Refusal) + Send + Sync>,
}

impl Shared {
    fn serving_by(&self) -> MutexGuard<'_, BTreeMap<TokenId, Vec<AbortHandle>>> {
        self.serving_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many connections of a token are served.
    fn served(&self, token: TokenId) -> usize {
        let mut serving = self.serving_by();
        let tasks = serving.entry(token).or_default();
        tasks.retain(|task| !task.is_finished());
        tasks.len()
    }

    /// Notes that a task serves a token, so that it ends when the token is revoked.
    fn note_serving(&self, token: TokenId, task: AbortHandle) {
        self.serving_by().entry(token).or_default().push(task);
    }
}

/// A listener that is open as long as the value lives.
pub struct Gateway {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

impl Gateway {
    /// Listens at an address of any interface.
    ///
    /// # Arguments
    /// - `address`: host and port; port 0 takes any that is free.
    /// - `refused`: called for each connection that is refused.
    ///
    /// # Errors
    /// The address is taken, or the authority makes no certificate.
    pub async fn open(
        address: &str,
        authority: &Authority,
        tokens: Arc<Tokens>,
        refused: impl Fn(Refusal) + Send + Sync + 'static,
    ) -> Result<Self, TransportError> {
        let tls: Arc<ServerConfig> = authority.listener()?;
        let bind = |source| TransportError::Bind { address: address.to_owned(), source };
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let shared = Arc::new(Shared {
            tls: TlsAcceptor::from(tls),
            tokens,
            services: RwLock::default(),
            serving_by: Mutex::default(),
            serving: Semaphore::new(CONNECTIONS_MAX),
            refused: Box::new(refused),
        });
        let accepting = tokio::spawn(accept(listener, shared.clone())).abort_handle();
        Ok(Self { address, shared, accepting })
    }

    /// Returns where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Offers a service under a name, instead of what had that name.
    pub fn offer(&self, name: &str, service: Service) {
        let mut services = self.shared.services.write().unwrap_or_else(PoisonError::into_inner);
        services.insert(name.to_owned(), service);
    }

    /// Makes a token invalid and closes its connections; returns whether it was known.
    pub fn revoke(&self, token: TokenId) -> bool {
        let known = self.shared.tokens.revoke(token);
        for connection in self.shared.serving_by().remove(&token).unwrap_or_default() {
            connection.abort();
        }
        known
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Accepts connections; all end when this future is dropped.
async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    let mut unproved: Strangers<SocketAddr> = Strangers::default();
    // Evicted connections take their place until their task has been dropped, which may be later than
    // others come.
    let places = Arc::new(Semaphore::new(2 * STRANGERS_MAX));
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    for peer in unproved.make_room() {
                        let reason = "evicted by many others before it had proved a token";
                        (shared.refused)(Refusal { peer, reason: reason.to_owned() });
                    }
                    let place = places.clone().acquire_owned().await.expect("it is never closed");
                    let decision = Decision::default();
                    let serving = serve(stream, (peer, place), decision.clone(), shared.clone());
                    unproved.add(peer, connections.spawn(serving), decision);
                }
                // No file descriptors are left, for now.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }
}

async fn serve(
    stream: TcpStream,
    (peer, place): (SocketAddr, OwnedSemaphorePermit),
    decision: Decision,
    shared: Arc<Shared>,
) {
    let refuse = |reason: String| (shared.refused)(Refusal { peer, reason });
    let proved = tokio::time::timeout(HANDSHAKE, prove(stream, &shared)).await;
    drop(place);
    if !decision.decide() {
        return; // it was evicted
    }
    let (mut stream, Admitted { peer, service, expires }) = match proved {
        Ok(Ok(found)) => found,
        Ok(Err(reason)) => return refuse(reason),
        Err(_) => return refuse(format!("it proved no token within {} s", HANDSHAKE.as_secs())),
    };
    let Ok(_serving) = shared.serving.try_acquire() else {
        let _ = answer(&mut stream, "refused too many connections\n").await;
        return refuse("too many connections".to_owned());
    };
    if shared.served(peer.token) >= TOKEN_CONNECTIONS_MAX && peer.role != PeerRole::Host {
        let _ = answer(&mut stream, "refused too many connections of one token\n").await;
        return refuse(format!("too many connections of token {}", peer.token));
    }
    let connection = tokio::spawn(carry(stream, peer, service));
    let _end = EndWith(connection.abort_handle());
    shared.note_serving(peer.token, connection.abort_handle());
    let left = expires.map(|time| time.duration_since(SystemTime::now()).unwrap_or_default());
    // Without an end it may last as long as it likes.
    let _ = tokio::time::timeout(left.unwrap_or(Duration::MAX), connection).await;
}

/// A peer that has proved a token, and what it asked for.
struct Admitted {
    peer: RemotePeer,
    service: ServiceAddress,
    /// When its token ends, and with it the connection.
    expires: Option<SystemTime>,
}

/// Ends a task when it is dropped.
struct EndWith(AbortHandle);

impl Drop for EndWith {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Connects a peer to a service until either end closes or vanishes.
async fn carry(
    mut stream: TlsStream<BufferedStream>,
    peer: RemotePeer,
    service: ServiceAddress,
) -> io::Result<()> {
    match service {
        ServiceAddress::Unix(path) => join(stream, reach(&path).await).await,
        ServiceAddress::Announced(path) => {
            let mut service = reach(&path).await;
            if let Ok(service) = &mut service {
                service.write_all(format!("{peer}\n").as_bytes()).await?;
            }
            join(stream, service).await
        }
        ServiceAddress::Inside(arrivals) => {
            let Ok(place) = arrivals.reserve().await else {
                return answer(&mut stream, ENDED).await;
            };
            answer(&mut stream, "ok\n").await?;
            stream.get_mut().0.widen();
            let (arrival, _open, dropped) = PeerConnection::new(peer, stream);
            place.send(arrival);
            let _ = dropped.await;
            Ok(())
        }
    }
}

/// Connects to a Unix socket; while its backlog is full, which fails at once, it tries again.
async fn reach(path: &Path) -> io::Result<UnixStream> {
    let until = Instant::now() + HANDSHAKE;
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            connected => return connected,
        }
    }
}

/// Connects a peer to a service.
async fn join(
    mut peer: TlsStream<BufferedStream>,
    service: io::Result<impl AsyncRead + AsyncWrite + Unpin>,
) -> io::Result<()> {
    match service {
        Ok(mut service) => {
            answer(&mut peer, "ok\n").await?;
            copy(&mut peer, &mut service, SHORT).await
        }
        Err(error) => {
            answer(&mut peer, ENDED).await?;
            Err(error)
        }
    }
}

/// Returns the connection once its peer has proved a token that admits it to the service.
async fn prove(
    stream: TcpStream,
    shared: &Shared,
) -> Result<(TlsStream<BufferedStream>, Admitted), String> {
    let address = stream.peer_addr().map_err(|error| error.to_string())?;
    let stream = prepared(stream).map_err(|error| error.to_string())?;
    let unsent = |tls: &mut ServerConnection| tls.set_buffer_limit(Some(UNSENT));
    let accepting = shared.tls.accept_with(stream, unsent).await;
    let mut stream = accepting.map_err(|error| format!("no TLS: {error}"))?;
    let request = read_line(&mut stream).await.map_err(|error| format!("no request: {error}"))?;
    let binding = stream.get_ref().1.export_keying_material([0; BINDING], LABEL, None);
    let found = match binding {
        Ok(binding) => admit(&request, address, &binding, shared),
        Err(error) => Err(error.to_string()),
    };
    match found {
        Ok(admitted) => Ok((stream, admitted)),
        Err(reason) => {
            let _ = answer(&mut stream, &format!("refused {reason}\n")).await;
            Err(reason)
        }
    }
}

/// Returns the service that a request asks for, if its token admits it.
fn admit(
    request: &str,
    address: SocketAddr,
    binding: &[u8; BINDING],
    shared: &Shared,
) -> Result<Admitted, String> {
    let parts: Vec<&str> = request.split(' ').collect();
    let [version, id, proof, service] = parts[..] else {
        return Err(format!("expected {VERSION}, a token's id, a proof and a service"));
    };
    if version != VERSION {
        return Err(format!(
            "expected {VERSION}; found {:?}",
            version.get(..16).unwrap_or(version)
        ));
    }
    let id = id.parse().map_err(|_| "the token's id is malformed")?;
    let StoredToken { role, grant, expires, .. } = shared.tokens.check(id, proof, binding)?;
    let peer = RemotePeer { address, token: id, role, grant };
    let services = shared.services.read().unwrap_or_else(PoisonError::into_inner);
    match services.get(service) {
        Some(Service { role: wanted, address }) if role.includes(*wanted) => {
            Ok(Admitted { peer, service: address.clone(), expires })
        }
        Some(Service { role: wanted, .. }) => Err(format!(
            "{service} is for tokens of role {}; token {id} has role {}",
            wanted.name(),
            role.name()
        )),
        None => Err(format!("there is no service {service:?}")),
    }
}

/// Returns what a peer sends to prove its token.
pub(crate) fn request(token: &crate::Token, binding: &[u8; BINDING], service: &str) -> String {
    format!("{VERSION} {} {} {service}\n", token.id(), token.proof(binding))
}

/// Reads a line without its end, byte by byte: what follows belongs to the service.
pub(crate) async fn read_line(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<String> {
    let mut line = Vec::new();
    while line.len() < REQUEST_MAX {
        match stream.read_u8().await? {
            b'\n' => return String::from_utf8(line).map_err(io::Error::other),
            byte => line.push(byte),
        }
    }
    Err(io::Error::other("the line is too long"))
}

async fn answer(stream: &mut TlsStream<BufferedStream>, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes()).await?;
    stream.flush().await
}

#[cfg(test)]
mod fuzz;
