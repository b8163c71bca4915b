//! Listening for clients, and turning away what does not speak.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use run::World;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::buffers::Buffers;
use crate::presentation::Presentation;
use crate::proto::grpc_ifrt_service_server::GrpcIfrtServiceServer;
use crate::service::FrontDoor;

/// How long a connection may be silent before it has said anything.
const SILENCE: Duration = Duration::from_secs(10);
/// Connections that may be silent at once; the next ones wait in the kernel's queue.
const SILENT_LIMIT: usize = 512;
/// Largest request; constants of a program travel inside it.
const REQUEST_LIMIT: usize = 1 << 30;

/// Why clients cannot be listened to.
#[derive(Debug, Error)]
pub enum DoorError {
    /// The address is not of a known form, or not of this machine alone.
    #[error("cannot listen at {address:?}: {reason}; try 127.0.0.1:8421 or unix:PATH")]
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

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// Where clients connect.
pub struct Door {
    listener: Listener,
    address: String,
}

impl Door {
    /// Listens at `HOST:PORT` on the loopback interface or `unix:PATH`.
    ///
    /// The stock client speaks no TLS, so any wider address is refused.
    ///
    /// # Errors
    /// The address is malformed, not of this machine alone, or taken.
    pub async fn open(address: &str) -> Result<Self, DoorError> {
        let bind = |source| DoorError::Bind { address: address.to_owned(), source };
        if let Some(path) = address.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            remove_stale(&path).await;
            let listener = UnixListener::bind(&path).map_err(bind)?;
            return Ok(Self { listener: Listener::Unix(listener, path), address: address.into() });
        }
        let refuse = |reason: &str| DoorError::Address {
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let place: SocketAddr = address
            .replace("localhost", "127.0.0.1")
            .parse()
            .map_err(|_| refuse("expected HOST:PORT with a numeric host, or unix:PATH"))?;
        if !place.ip().is_loopback() {
            return Err(refuse(
                "JAX's client speaks no TLS, so only loopback addresses are safe; tunnel to reach \
                 it from elsewhere",
            ));
        }
        let listener = TcpListener::bind(place).await.map_err(bind)?;
        let place = listener.local_addr().map_err(bind)?;
        Ok(Self { listener: Listener::Tcp(listener), address: place.to_string() })
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
        let accepting = tokio::spawn(accept(self.listener, sender));
        let served = Server::builder()
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(16 << 20)
            .max_frame_size(1 << 20)
            .tcp_nodelay(true)
            .add_service(service)
            .serve_with_incoming_shutdown(ReceiverStream::new(receiver), until)
            .await;
        accepting.abort();
        served
    }
}

/// Removes a socket file that nobody listens at any more.
async fn remove_stale(path: &Path) {
    let is_socket = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket && UnixStream::connect(path).await.is_err() {
        let _ = std::fs::remove_file(path);
    }
}

/// A connection of either kind.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

async fn accept(listener: Listener, sender: mpsc::Sender<io::Result<Stream>>) {
    let silent = Arc::new(Semaphore::new(SILENT_LIMIT));
    let _socket_file = match &listener {
        Listener::Unix(_, path) => Some(RemoveOnDrop(path.clone())),
        Listener::Tcp(_) => None,
    };
    loop {
        let permit = silent.clone().acquire_owned().await.expect("never closed");
        let accepted = match &listener {
            Listener::Tcp(listener) => listener.accept().await.map(|(stream, _)| {
                let _ = stream.set_nodelay(true);
                Stream::Tcp(stream)
            }),
            Listener::Unix(listener, _) => {
                listener.accept().await.map(|(stream, _)| Stream::Unix(stream))
            }
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let sender = sender.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let spoke = tokio::time::timeout(SILENCE, stream.readable()).await;
            if matches!(spoke, Ok(Ok(()))) {
                let _ = sender.send(Ok(stream)).await;
            }
        });
    }
}

struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Stream {
    async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.ready(Interest::READABLE).await.map(drop),
            Self::Unix(stream) => stream.ready(Interest::READABLE).await.map(drop),
        }
    }
}

impl Connected for Stream {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

macro_rules! forward {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Tcp(inner) => {
                let $stream = Pin::new(inner);
                $call
            }
            Stream::Unix(inner) => {
                let $stream = Pin::new(inner);
                $call
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        forward!(self, stream => stream.poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_shutdown(context))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        forward!(self, stream => stream.poll_write_vectored(context, parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
