//! The handshake of a data-plane connection: its peer belongs to the same run.
//!
//! On a Unix socket the peer sends the token of the run. On TCP, which others may read, the token is
//! not sent: each end proves that it knows it, by a digest of the token and of what both have drawn
//! (challenge and response). A run that encrypts does so first, and the proofs are of its TLS session,
//! too; in other runs, data that follow are neither encrypted nor signed.

use std::io::{self, Read};
use std::time::Duration;

use base::{HostId, TransferTag};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use transport::Encryption;

use super::frame::{FrameKind, Header, TEXT_LIMIT};
use super::socket::{End, Socket};

/// Timeout for a new connection to authenticate.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that an acceptor may take to answer. It may be stopped for a while.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const NONCE: usize = 32;
const PROOF: usize = 32;

type Nonce = [u8; NONCE];

/// What an endpoint proves itself with, and how.
#[derive(Debug)]
pub(crate) struct Credentials {
    pub me: HostId,
    /// The token of the run.
    pub token: String,
    /// How its TCP connections are encrypted, if they are; the same on all endpoints of a run.
    pub encryption: Option<Encryption>,
}

impl Credentials {
    /// Encrypts a TCP connection, if those of this run are.
    fn encrypt(&self, socket: Socket, end: End) -> io::Result<Socket> {
        let Some(encryption) = &self.encryption else { return Ok(socket) };
        let hint = "the other end does not encrypt, or has ended the connection";
        socket.encrypted(encryption, end).map_err(|error| hinted(error, hint))
    }
}

/// Authenticates a new connection to another host, and on TCP the other host.
///
/// # Arguments
/// - `timeout`: how long to wait for an answer.
///
/// # Errors
/// The connection has ended, there is no answer, or the other end does not know the token.
pub(crate) fn greet(
    mut socket: Socket,
    credentials: &Credentials,
    timeout: Duration,
) -> io::Result<Socket> {
    let (me, token) = (credentials.me, &credentials.token);
    if socket.is_local() {
        send(&mut socket, me, token.as_bytes())?;
        return Ok(socket);
    }
    socket.set_timeout(Some(timeout))?;
    let mut socket = credentials.encrypt(socket, End::Connector)?;
    let mine = nonce()?;
    send(&mut socket, me, &mine)?;
    let received = receive(&mut socket, "the other end");
    let (_, answer): (HostId, [u8; NONCE + PROOF]) = received.map_err(|error| {
        let hint = "the other end encrypts, which this one does not, or has ended the connection";
        if credentials.encryption.is_some() { error } else { hinted(error, hint) }
    })?;
    let (theirs, proof) = answer.split_at(NONCE);
    let theirs: &Nonce = theirs.try_into().expect("it has this size");
    let binding = socket.binding().to_vec();
    let session = Session { token, connector: me, nonces: (&mine, theirs), binding };
    session.check(End::Acceptor, proof).map_err(|()| denied("the other end"))?;
    let proof = session.prove(End::Connector);
    send(&mut socket, me, proof.as_ref())?;
    socket.set_timeout(None)?;
    Ok(socket)
}

/// Authenticates the peer of an accepted connection.
///
/// # Errors
/// The connection has ended, the peer says nothing in time, or does not know the token.
pub(crate) fn admit(mut socket: Socket, credentials: &Credentials) -> io::Result<Socket> {
    let (me, token) = (credentials.me, &credentials.token);
    socket.set_timeout(Some(HELLO_TIMEOUT))?;
    if socket.is_local() {
        let hello = Header::read(&mut socket)?;
        let peer = format!("a peer that calls itself host {}", hello.from);
        if hello.kind != FrameKind::Hello || hello.length > TEXT_LIMIT {
            return Err(denied(&peer));
        }
        let mut found = vec![0; hello.length as usize];
        socket.read_exact(&mut found)?;
        if found != token.as_bytes() {
            return Err(denied(&peer));
        }
        socket.set_timeout(None)?;
        return Ok(socket);
    }
    let mut socket = credentials.encrypt(socket, End::Acceptor)?;
    let (connector, theirs): (HostId, Nonce) = receive(&mut socket, "a peer")?;
    let mine = nonce()?;
    let session =
        Session { token, connector, nonces: (&theirs, &mine), binding: socket.binding().to_vec() };
    let proof = session.prove(End::Acceptor);
    send(&mut socket, me, &[&mine, proof.as_ref()].concat())?;
    let peer = format!("a peer that calls itself host {connector}");
    let (_, proof): (HostId, [u8; PROOF]) = receive(&mut socket, &peer)?;
    session.check(End::Connector, &proof).map_err(|()| denied(&peer))?;
    socket.set_timeout(None)?;
    Ok(socket)
}

/// What the proofs of a connection are of.
struct Session<'a> {
    token: &'a str,
    connector: HostId,
    /// What the connector and the acceptor have drawn.
    nonces: (&'a Nonce, &'a Nonce),
    /// What the TLS session exports; empty without one.
    binding: Vec<u8>,
}

impl Session<'_> {
    fn prove(&self, end: End) -> hmac::Tag {
        hmac::sign(&self.key(), &self.message(end))
    }

    fn check(&self, end: End, proof: &[u8]) -> Result<(), ()> {
        hmac::verify(&self.key(), &self.message(end), proof).map_err(drop)
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, self.token.as_bytes())
    }

    fn message(&self, end: End) -> Vec<u8> {
        let (connector, acceptor) = self.nonces;
        let number = self.connector.0.to_le_bytes();
        [&[end as u8][..], &number, connector, acceptor, &self.binding].concat()
    }
}

fn send(socket: &mut Socket, me: HostId, payload: &[u8]) -> io::Result<()> {
    let header = Header {
        kind: FrameKind::Hello,
        from: me,
        tag: TransferTag(0),
        length: payload.len() as u64,
        offset: 0,
        total: 0,
    };
    socket.write_frame(&header.encode(), payload)
}

/// Receives a frame of the handshake whose payload has this size; returns its sender, too.
fn receive<const SIZE: usize>(socket: &mut Socket, peer: &str) -> io::Result<(HostId, [u8; SIZE])> {
    let header = Header::read(socket)?;
    if header.kind != FrameKind::Hello || header.length != SIZE as u64 {
        return Err(denied(peer));
    }
    let mut payload = [0; SIZE];
    socket.read_exact(&mut payload)?;
    Ok((header.from, payload))
}

/// Explains what came that is no answer, or an end that came instead of one.
fn hinted(error: io::Error, hint: &str) -> io::Error {
    match error.kind() {
        io::ErrorKind::InvalidData
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset => {
            io::Error::new(error.kind(), format!("{hint} ({error})"))
        }
        _ => error,
    }
}

fn denied(peer: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{peer} does not know the token"))
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; NONCE];
    let drawn = SystemRandom::new().fill(&mut nonce);
    drawn.map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(nonce)
}

#[cfg(test)]
mod fuzz;
