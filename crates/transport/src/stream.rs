//! The TCP streams below TLS.

use std::io;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::TcpStream;

/// Time of silence after which the kernel asks whether the other end is there.
const SILENT: Duration = Duration::from_secs(6);
/// How often it asks before it closes a connection.
const KEEPALIVE_RETRIES: u32 = 4;
/// Bytes that are read or copied at a time: TLS itself reads one record of 16 KiB.
const AT_A_TIME: usize = 256 << 10;
/// Bytes of records that may wait to be sent, which one system call sends.
pub(crate) const UNSENT: usize = 1 << 20;

/// A TCP stream that is read in large parts.
pub type BufferedStream = BufReader<TcpStream>;

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
    Ok(BufReader::with_capacity(AT_A_TIME, stream))
}

/// Copies in both directions until both have ended, or one has failed.
pub(crate) async fn copy(
    one: &mut (impl AsyncRead + AsyncWrite + Unpin),
    other: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<()> {
    tokio::io::copy_bidirectional_with_sizes(one, other, AT_A_TIME, AT_A_TIME).await?;
    Ok(())
}
