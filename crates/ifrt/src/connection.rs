//! One client connection: the identity of its peer, and its deadline to open a session.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use run::ClientOrigin;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tonic::transport::server::Connected;
use transport::identity::{LocalPeer, process_of};
use transport::{PeerConnection, PeerRole, RemotePeer};

/// Maximum number of concurrent sessions of a connection; clients use one.
pub(crate) const SESSIONS: usize = 8;
/// Concurrent searches of /proc, each of which occupies a thread for some milliseconds.
static SEARCHES: Semaphore = Semaphore::const_new(2);

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ConnectionPeer {
    /// A process of this machine.
    Local(LocalPeer),
    /// One of another machine, behind the gateway.
    Carried(RemotePeer),
}

/// Whether a client may run Python functions on the hosts' machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodeRights {
    /// As the hosts' own user.
    Owner,
    /// As this user of the machine, where hosts can.
    User(u32),
    /// Not at all.
    None,
}

impl ConnectionPeer {
    /// Returns the rights of a client.
    ///
    /// # Arguments
    /// - `all`: whether every client is trusted.
    fn code_rights(self, all: bool) -> CodeRights {
        match self {
            _ if all => CodeRights::Owner,
            Self::Local(peer) if peer.user == rustix::process::geteuid().as_raw() => {
                CodeRights::Owner
            }
            Self::Local(peer) => CodeRights::User(peer.user),
            Self::Carried(peer) if peer.role == PeerRole::Admin => CodeRights::Owner,
            Self::Carried(_) => CodeRights::None,
        }
    }
}

/// The peer of a connection; each call of the connection carries it.
#[derive(Debug)]
pub(crate) struct Identity {
    peer: ConnectionPeer,
    process: OnceCell<Option<u32>>,
    sessions: Arc<Semaphore>,
    established: AtomicBool,
    /// Released once a session is opened.
    pending: Mutex<Option<OwnedSemaphorePermit>>,
    _open: OwnedSemaphorePermit,
}

impl Identity {
    /// Creates an identity. `open` is held until the connection ends.
    pub fn new(peer: ConnectionPeer, open: OwnedSemaphorePermit) -> Self {
        Self {
            peer,
            process: OnceCell::new(),
            sessions: Arc::new(Semaphore::new(SESSIONS)),
            established: AtomicBool::new(false),
            pending: Mutex::new(None),
            _open: open,
        }
    }

    /// Takes a place among connections without a session, which it has until one is opened.
    pub fn take_place(&self, pending: OwnedSemaphorePermit) {
        *self.pending.lock() = Some(pending);
    }

    /// Returns where the client is: its process, if it can be found, or its machine.
    pub async fn origin(&self) -> ClientOrigin {
        let local = match self.peer {
            ConnectionPeer::Local(peer) => peer,
            ConnectionPeer::Carried(peer) => {
                return ClientOrigin { process: None, peer: Some(peer) };
            }
        };
        let search = async || {
            let _turn = SEARCHES.acquire().await;
            tokio::task::spawn_blocking(move || process_of(local)).await.ok().flatten()
        };
        ClientOrigin { process: *self.process.get_or_init(search).await, peer: None }
    }

    /// Returns whether the client may run Python functions; see [`ConnectionPeer`].
    pub fn code_rights(&self, all: bool) -> CodeRights {
        self.peer.code_rights(all)
    }

    /// Returns a permit for one more session, to be held until it ends; `None` if there are too many.
    pub fn open_session(&self) -> Option<OwnedSemaphorePermit> {
        let place = self.sessions.clone().try_acquire_owned().ok()?;
        self.establish();
        Some(place)
    }

    /// Marks the connection as established: a session was opened or used.
    pub fn establish(&self) {
        self.established.store(true, Ordering::Relaxed);
        self.pending.lock().take();
    }
}

/// The bytes of a connection.
#[derive(Debug)]
pub(crate) enum ClientStream {
    /// From this machine.
    Local(TcpStream),
    /// From another one, by the gateway.
    Carried(Box<PeerConnection>),
}

/// Calls a method of the stream in a pinned connection.
macro_rules! delegate {
    ($connection:expr, $method:ident $(, $argument:expr)*) => {
        match &mut $connection.stream {
            ClientStream::Local(stream) => Pin::new(stream).$method($($argument),*),
            ClientStream::Carried(stream) => Pin::new(stream.as_mut()).$method($($argument),*),
        }
    };
}

/// A connection that is closed unless a session is opened before a deadline.
#[derive(Debug)]
pub(crate) struct ProxyConnection {
    stream: ClientStream,
    /// A byte that was read and is to be read again.
    first: Option<u8>,
    identity: Arc<Identity>,
    deadline: Pin<Box<Sleep>>,
}

impl ProxyConnection {
    /// Wraps a connection, on which a session must be opened before `deadline`.
    pub fn new(stream: ClientStream, identity: Arc<Identity>, deadline: Instant) -> Self {
        let deadline = Box::pin(tokio::time::sleep_until(deadline));
        Self { stream, first: None, identity, deadline }
    }

    /// Reads the first byte, which is read again by the next reader.
    ///
    /// # Errors
    /// The connection has ended, or the deadline has expired.
    pub async fn peek(&mut self) -> io::Result<u8> {
        let first = self.read_u8().await?;
        self.first = Some(first);
        Ok(first)
    }

    /// Fails once the deadline has expired. Reads and writes both check it: a peer must not be able to
    /// keep the connection by not reading.
    fn check_deadline(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if !self.identity.established.load(Ordering::Relaxed)
            && self.deadline.as_mut().poll(context).is_ready()
        {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no session was opened in time"));
        }
        Ok(())
    }
}

impl Connected for ProxyConnection {
    type ConnectInfo = Arc<Identity>;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.identity.clone()
    }
}

impl AsyncRead for ProxyConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_deadline(context)?;
        if buffer.remaining() > 0
            && let Some(first) = self.first.take()
        {
            buffer.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        delegate!(self, poll_read, context, buffer)
    }
}

impl AsyncWrite for ProxyConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_deadline(context)?;
        delegate!(self, poll_write, context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_deadline(context)?;
        delegate!(self, poll_write_vectored, context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            ClientStream::Local(stream) => stream.is_write_vectored(),
            ClientStream::Carried(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, poll_flush, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, poll_shutdown, context)
    }
}
