//! TLS below the data plane: blocking and non-blocking streams between hosts of one run.
//!
//! Hosts have no certificates that others know. Each end proves the token of the run instead, and the
//! proofs are bound to the TLS session by [`EncryptedStream::binding`]: an attacker in the middle, who has
//! a session with each end, can pass no proof on.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::authority::{Trust, connecting, server_name};
use crate::token::BINDING;
use crate::{Authority, TransportError};

/// Label of what a session exports for the proofs of hosts (RFC 8446, section 7.5).
const LABEL: &[u8] = b"EXPORTER-fairway-host-proof";
/// Bytes of records that may wait to be sent.
const UNSENT: usize = 128 << 10;

/// What a host needs to encrypt its connections to others.
#[derive(Clone)]
pub struct Encryption {
    connects: Arc<ClientConfig>,
    accepts: Arc<ServerConfig>,
}

impl Encryption {
    /// Makes a certificate for this process.
    ///
    /// # Errors
    /// The system makes no keys.
    pub fn create() -> Result<Self, TransportError> {
        let mut accepts = Arc::unwrap_or_clone(Authority::create()?.listener()?);
        accepts.send_tls13_tickets = 0; // sessions are not resumed
        Ok(Self { connects: connecting(Trust::KeyAlone), accepts: Arc::new(accepts) })
    }

    /// Encrypts a connection that this end has opened; blocks until the session is made.
    ///
    /// # Errors
    /// The connection has ended, or the other end does not speak TLS 1.3.
    pub fn connect(&self, stream: TcpStream) -> io::Result<EncryptedStream> {
        let session = ClientConnection::new(self.connects.clone(), server_name());
        EncryptedStream::establish(stream, session.map_err(io::Error::other)?.into())
    }

    /// Encrypts a connection that the other end has opened; blocks until the session is made.
    ///
    /// # Errors
    /// The connection has ended, or the other end does not speak TLS 1.3.
    pub fn accept(&self, stream: TcpStream) -> io::Result<EncryptedStream> {
        let session = ServerConnection::new(self.accepts.clone()).map_err(io::Error::other)?;
        EncryptedStream::establish(stream, session.into())
    }
}

impl fmt::Debug for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Encryption")
    }
}

/// A TCP stream with TLS 1.3 on it.
///
/// On a non-blocking stream, reading and writing fail with [`io::ErrorKind::WouldBlock`] as those of
/// the stream do. Written bytes are sent at once as far as possible; the rest is by the next write or
/// [`Write::flush`], as long as [`Self::has_unsent`].
#[derive(Debug)]
pub struct EncryptedStream {
    stream: TcpStream,
    session: Box<Connection>,
    binding: [u8; BINDING],
    /// Number of bytes that were received and decrypted but not read.
    unread: usize,
    /// Whether sending has failed, so that nothing more is sent.
    is_broken: bool,
}

impl EncryptedStream {
    fn establish(mut stream: TcpStream, mut session: Connection) -> io::Result<Self> {
        session.set_buffer_limit(Some(UNSENT));
        while session.is_handshaking() {
            session.complete_io(&mut stream)?;
        }
        // What is left to send of the handshake.
        while session.wants_write() {
            session.write_tls(&mut stream)?;
        }
        let binding = session.export_keying_material([0; BINDING], LABEL, None);
        let binding = binding.map_err(io::Error::other)?;
        Ok(Self { stream, session: Box::new(session), binding, unread: 0, is_broken: false })
    }

    /// Returns the stream below, to be polled, configured and shut down.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Returns bytes that only the two ends of this session know.
    pub fn binding(&self) -> &[u8] {
        &self.binding
    }

    /// Whether written bytes wait to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.is_broken && self.session.wants_write()
    }

    /// Whether bytes have been received that were not read, so that polling the stream below would miss
    /// them.
    pub fn has_received(&self) -> bool {
        self.unread > 0
    }

    fn send(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut self.stream) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.is_broken = error.kind() != io::ErrorKind::WouldBlock;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Sends what was accepted of a write, if anything was, as far as possible.
    fn sent(&mut self, accepted: usize) -> io::Result<usize> {
        match self.send() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(accepted),
        }
    }
}

impl Read for EncryptedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // It ended without saying so; all that is sent says its own length.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Ok(count) => {
                    self.unread = self.unread.saturating_sub(count);
                    return Ok(count);
                }
                Err(error) => return Err(error),
            }
            self.session.read_tls(&mut self.stream)?;
            let processed = self.session.process_new_packets();
            let state =
                processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            self.unread = state.plaintext_bytes_to_read();
        }
    }
}

impl Write for EncryptedStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.send()?;
        let accepted = self.session.writer().write(buffer)?;
        self.sent(accepted)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send()?;
        let accepted = self.session.writer().write_vectored(parts)?;
        self.sent(accepted)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}
