//! Who is at the other end of connections that the gateway carries.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio_rustls::server::TlsStream;

use crate::{BufferedStream, Grant, PeerRole, TokenId};

/// A process of another machine that has proved a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemotePeer {
    /// Its address.
    pub address: SocketAddr,
    /// The token.
    pub token: TokenId,
    /// The token's role.
    pub role: PeerRole,
    /// The most that a client of the token may ask for.
    pub grant: Grant,
}

impl fmt::Display for RemotePeer {
    /// Prints it as the line by which it is announced: address, token and role.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.address, self.token, self.role.name())
    }
}

/// A connection for a service of this process, which ends when its token is revoked.
#[derive(Debug)]
pub struct PeerConnection {
    /// Who is at the other end.
    pub peer: RemotePeer,
    stream: TlsStream<BufferedStream>,
    /// Ready once the gateway has closed the connection.
    closed: oneshot::Receiver<()>,
    /// Tells the gateway that the service has dropped the connection.
    _held: oneshot::Sender<()>,
}

impl PeerConnection {
    /// Returns an arrival, what keeps it open, and what is ready once it was dropped.
    pub(crate) fn new(
        peer: RemotePeer,
        stream: TlsStream<BufferedStream>,
    ) -> (Self, oneshot::Sender<()>, oneshot::Receiver<()>) {
        let (open, closed) = oneshot::channel();
        let (held, dropped) = oneshot::channel();
        (Self { peer, stream, closed, _held: held }, open, dropped)
    }

    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match Pin::new(&mut self.closed).poll(context) {
            Poll::Pending => Ok(()),
            Poll::Ready(_) => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

impl AsyncRead for PeerConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
