//! The other end of a gateway: connections to a controller on another machine.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustls::ClientConnection;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::authority::{Trust, connecting, server_name};
use crate::gateway::{read_line, request};
use crate::identity::Users;
use crate::stream::{BufferedStream, LONG, UNSENT, copy, prepared};
use crate::token::{BINDING, LABEL};
use crate::{Token, TransportError};

/// Time within which a controller answers.
const ANSWER: Duration = Duration::from_secs(10);
/// What the answer to a connection that is not carried begins with.
const REFUSAL: &str = "fairway: ";
/// Time that the other end has to read it.
const LINGER: Duration = Duration::from_secs(2);
/// Stands for no address, as long as none has answered.
const NONE: usize = usize::MAX;
/// Maximum number of local connections that are carried at a time.
const CARRIED_MAX: usize = 256;

/// A controller on another machine, and the token that admits to it.
#[derive(Clone)]
pub struct Remote {
    addresses: Arc<[String]>,
    /// The address that has answered first.
    answered: Arc<AtomicUsize>,
    token: Token,
    connector: TlsConnector,
}

impl Remote {
    /// Names a controller; nothing is sent yet.
    ///
    /// # Arguments
    /// - `addresses`: host and port of its gateway; several with commas between them are tried at
    ///   once, and the first that proves to be the controller is used from then on.
    pub fn new(addresses: &str, token: Token) -> Self {
        let connector = TlsConnector::from(connecting(Trust::Authority(*token.pin())));
        let addresses = addresses.split(',').map(|one| one.trim().to_owned()).collect();
        Self { addresses, answered: Arc::new(AtomicUsize::new(NONE)), token, connector }
    }

    /// Returns the address of the gateway: all that may be, until one has answered.
    fn address(&self) -> String {
        let answered = self.addresses.get(self.answered.load(Ordering::Relaxed));
        answered.cloned().unwrap_or_else(|| self.addresses.join(","))
    }

    /// Connects to a service.
    ///
    /// # Errors
    /// The address does not answer, is another controller's, or refuses the token.
    pub async fn connect(
        &self,
        service: &str,
    ) -> Result<TlsStream<BufferedStream>, TransportError> {
        let connecting = tokio::time::timeout(ANSWER, self.connect_now(service)).await;
        connecting.unwrap_or_else(|_| {
            let late = format!("no answer within {} s", ANSWER.as_secs());
            Err(self.unreachable(io::Error::new(io::ErrorKind::TimedOut, late)))
        })
    }

    async fn connect_now(
        &self,
        service: &str,
    ) -> Result<TlsStream<BufferedStream>, TransportError> {
        let (_, mut stream) = self.prove(service).await?;
        let answer = read_line(&mut stream).await.map_err(|error| self.unreachable(error))?;
        match answer.split_once(' ') {
            None => Ok(stream),
            Some((_, reason)) => {
                let (address, reason) = (self.address(), reason.to_owned());
                Err(TransportError::Refused { address, reason })
            }
        }
    }

    /// Connects, and checks that the other end is the controller.
    #[doc(hidden)]
    pub async fn handshake(&self) -> Result<TlsStream<BufferedStream>, TransportError> {
        let known = self.answered.load(Ordering::Relaxed);
        if let Some(address) = self.addresses.get(known) {
            return reach(address.clone(), self.connector.clone()).await;
        }
        let mut attempts = JoinSet::new();
        for (number, address) in self.addresses.iter().cloned().enumerate() {
            let connector = self.connector.clone();
            attempts.spawn(async move { (number, reach(address, connector).await) });
        }
        let mut failures = Vec::new();
        while let Some(Ok((number, reached))) = attempts.join_next().await {
            match reached {
                Ok(stream) => {
                    self.answered.store(number, Ordering::Relaxed);
                    return Ok(stream);
                }
                Err(error) => failures.push(error),
            }
        }
        // Another controller at an address says more than an address that does not answer.
        let telling = |error: &TransportError| matches!(error, TransportError::Connect { .. });
        failures.sort_by_key(telling);
        let first = failures.into_iter().next();
        Err(first.unwrap_or_else(|| self.unreachable(io::ErrorKind::NotFound.into())))
    }

    /// Connects and asks for a service; returns what was sent, too.
    #[doc(hidden)]
    pub async fn prove(
        &self,
        service: &str,
    ) -> Result<(String, TlsStream<BufferedStream>), TransportError> {
        let mut stream = self.handshake().await?;
        let binding = stream.get_ref().1.export_keying_material([0; BINDING], LABEL, None);
        let binding = binding.map_err(|error| self.unreachable(io::Error::other(error)))?;
        let line = request(&self.token, &binding, service);
        let sent = async {
            stream.write_all(line.as_bytes()).await?;
            stream.flush().await
        };
        sent.await.map_err(|error| self.unreachable(error))?;
        Ok((line, stream))
    }

    fn unreachable(&self, source: io::Error) -> TransportError {
        TransportError::Connect { address: self.address(), source }
    }

    /// Listens at a Unix socket, and carries each connection to a service.
    ///
    /// The socket is reachable by all who may open the path; its folder must be of this user alone.
    ///
    /// # Errors
    /// The path is taken.
    pub fn carry_unix(&self, path: &Path, service: &str) -> Result<Carrier, TransportError> {
        let listener = UnixListener::bind(path).map_err(|source| TransportError::Bind {
            address: path.display().to_string(),
            source,
        })?;
        Ok(self.carry(listener, service))
    }

    /// Listens at a free port of the loopback interface, and carries each connection to a service;
    /// returns the port, too.
    ///
    /// Connections of other users of this machine are closed.
    ///
    /// # Errors
    /// There is no free port.
    pub async fn carry_tcp(&self, service: &str) -> Result<(Carrier, SocketAddr), TransportError> {
        let bind = |source| TransportError::Bind { address: "127.0.0.1".to_owned(), source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let listener = OwnersListener { listener, address, users: Users::owner_and(&[]) };
        Ok((self.carry(listener, service), address))
    }

    fn carry(&self, listener: impl LocalListener, service: &str) -> Carrier {
        let (remote, service) = (self.clone(), Arc::from(service));
        Carrier { carrying: tokio::spawn(carry(listener, remote, service)).abort_handle() }
    }
}

/// A listener of this machine.
trait LocalListener: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send;

    /// Returns the next connection; `None` if it is not admitted.
    fn next(&self) -> impl Future<Output = io::Result<Option<Self::Stream>>> + Send;
}

impl LocalListener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<Option<UnixStream>> {
        Ok(Some(self.accept().await?.0))
    }
}

/// A listener at a loopback port that admits the owner of this process alone.
struct OwnersListener {
    listener: TcpListener,
    address: SocketAddr,
    users: Users,
}

impl LocalListener for OwnersListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<Option<TcpStream>> {
        let (stream, peer) = self.listener.accept().await?;
        let is_owner = self.users.check_tcp(self.address, peer).is_ok();
        Ok((is_owner && stream.set_nodelay(true).is_ok()).then_some(stream))
    }
}

/// Connects to an address, and checks that the other end is the controller.
async fn reach(
    address: String,
    connector: TlsConnector,
) -> Result<TlsStream<BufferedStream>, TransportError> {
    let unreachable = |source| TransportError::Connect { address: address.clone(), source };
    let stream = TcpStream::connect(&address).await.map_err(unreachable)?;
    let mut stream = prepared(stream).map_err(unreachable)?;
    let unsent = |tls: &mut ClientConnection| tls.set_buffer_limit(Some(UNSENT));
    stream.widen();
    let connected = connector.connect_with(server_name(), stream, unsent).await;
    connected.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => {
            TransportError::NotTheController { address: address.clone(), reason: error.to_string() }
        }
        // A controller with many peers at a time may close a connection before it has answered.
        _ => unreachable(error),
    })
}

/// A local listener whose connections are carried, as long as the value lives.
pub struct Carrier {
    carrying: AbortHandle,
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.carrying.abort();
    }
}

/// Accepts local connections and carries them; all end when this future is dropped.
async fn carry<L: LocalListener>(listener: L, remote: Remote, service: Arc<str>) {
    let places = Arc::new(Semaphore::new(CARRIED_MAX));
    let mut connections = JoinSet::new();
    loop {
        let place = places.clone().acquire_owned().await.expect("it is never closed");
        while connections.try_join_next().is_some() {}
        match listener.next().await {
            Ok(Some(mut local)) => {
                let (remote, service) = (remote.clone(), service.clone());
                connections.spawn(async move {
                    let _place = place;
                    // Either end may close or vanish; the other one is closed then.
                    let _ = match remote.connect(&service).await {
                        Ok(mut far) => copy(&mut local, &mut far, LONG).await,
                        Err(error) => refuse(&mut local, &error).await,
                    };
                });
            }
            Ok(None) => {} // another user's
            // No file descriptors are left, for now.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Says why a connection is not carried. Fairway's plugin understands it, and other clients fail.
async fn refuse(
    local: &mut (impl AsyncRead + AsyncWrite + Unpin),
    error: &TransportError,
) -> io::Result<()> {
    let said = match error {
        TransportError::Refused { reason, .. } => format!("refuses: {reason}"),
        other => format!("cannot be reached: {other}"),
    };
    local.write_all(format!("{REFUSAL}{said}\n").as_bytes()).await?;
    local.shutdown().await?;
    // What has come unread would reset the connection before the other end has read the answer.
    let mut unread = [0; 1024];
    let reading = async { while local.read(&mut unread).await.is_ok_and(|count| count > 0) {} };
    let _ = tokio::time::timeout(LINGER, reading).await;
    Ok(())
}
