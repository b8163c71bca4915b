//! The TCP streams below TLS.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Time of silence after which the kernel asks whether the other end is there.
const SILENT: Duration = Duration::from_secs(6);
/// How often it asks before it closes a connection.
const KEEPALIVE_RETRIES: u32 = 4;
/// Bytes that are read at a time from a peer that has proved nothing yet, or copied for services whose
/// messages are short.
pub(crate) const SHORT: usize = 16 << 10;
/// Bytes that are read or copied at a time where arrays are: TLS itself reads one record of 16 KiB.
pub(crate) const LONG: usize = 256 << 10;
/// Bytes of records that may wait to be sent, which one system call sends.
pub(crate) const UNSENT: usize = 1 << 20;

/// A TCP stream that is read in parts of one size, which may grow.
#[derive(Debug)]
pub struct BufferedStream {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The bytes that were received and not read.
    unread: std::ops::Range<usize>,
}

impl BufferedStream {
    /// Returns the address of this end.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Reads in large parts from now on.
    pub(crate) fn widen(&mut self) {
        let mut wide = vec![0; LONG];
        let left = self.unread.len();
        wide[..left].copy_from_slice(&self.buffer[self.unread.clone()]);
        (self.buffer, self.unread) = (wide, 0..left);
    }
}

impl AsyncRead for BufferedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.unread.is_empty() {
            let mut received = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut received))?;
            this.unread = 0..received.filled().len();
        }
        let count = buffer.remaining().min(this.unread.len());
        buffer.put_slice(&this.buffer[this.unread.start..this.unread.start + count]);
        this.unread.start += count;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for BufferedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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

/// Prepares a new connection. The kernel notices within half a minute that the other machine has
/// vanished.
pub(crate) fn prepared(stream: TcpStream) -> io::Result<BufferedStream> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, SILENT)?;
    sockopt::set_tcp_keepintvl(&stream, SILENT)?;
    sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_RETRIES)?;
    let unacknowledged = (SILENT * (KEEPALIVE_RETRIES + 1)).as_millis();
    sockopt::set_tcp_user_timeout(&stream, unacknowledged as u32)?;
    Ok(BufferedStream { stream, buffer: vec![0; SHORT], unread: 0..0 })
}

/// Copies in both directions until both have ended, or one has failed; `part` bytes at a time.
pub(crate) async fn copy(
    one: &mut (impl AsyncRead + AsyncWrite + Unpin),
    other: &mut (impl AsyncRead + AsyncWrite + Unpin),
    part: usize,
) -> io::Result<()> {
    tokio::io::copy_bidirectional_with_sizes(one, other, part, part).await?;
    Ok(())
}
