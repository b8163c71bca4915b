//! The handshake of a data-plane connection: its peer belongs to the same run.
//!
//! On a Unix socket the peer sends the token of the run. On TCP, which others may read, the token is
//! not sent: each end proves that it knows it, by a digest of the token and of what both have drawn
//! (challenge and response). Data that follow are neither encrypted nor signed.

use std::io::{self, Read};
use std::time::Duration;

use base::{HostId, TransferTag};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use super::frame::{FrameKind, Header, TEXT_LIMIT};
use super::socket::Socket;

/// Timeout for a new connection to authenticate.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that an acceptor may take to answer. It may be stopped for a while.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const NONCE: usize = 32;
const PROOF: usize = 32;

type Nonce = [u8; NONCE];

/// Which end proves that it knows the token.
#[derive(Clone, Copy)]
enum End {
    Connector,
    Acceptor,
}

/// Authenticates a new connection to another host, and on TCP the other host.
///
/// # Arguments
/// - `timeout`: how long to wait for an answer.
///
/// # Errors
/// The connection has ended, there is no answer, or the other end does not know the token.
pub(crate) fn greet(
    socket: &mut Socket,
    me: HostId,
    token: &str,
    timeout: Duration,
) -> io::Result<()> {
    if socket.is_local() {
        return send(socket, me, token.as_bytes());
    }
    let mine = nonce()?;
    send(socket, me, &mine)?;
    socket.set_timeout(Some(timeout))?;
    let answer: [u8; NONCE + PROOF] = receive(socket, "the other end").map(|(_, answer)| answer)?;
    let (theirs, proof) = answer.split_at(NONCE);
    let theirs: &Nonce = theirs.try_into().expect("it has this size");
    let session = Session { token, connector: me, nonces: (&mine, theirs) };
    session.check(End::Acceptor, proof).map_err(|()| denied("the other end"))?;
    send(socket, me, session.prove(End::Connector).as_ref())?;
    socket.set_timeout(None)
}

/// Authenticates the peer of an accepted connection.
///
/// # Errors
/// The connection has ended, the peer says nothing in time, or does not know the token.
pub(crate) fn admit(socket: &mut Socket, me: HostId, token: &str) -> io::Result<()> {
    socket.set_timeout(Some(HELLO_TIMEOUT))?;
    if socket.is_local() {
        let hello = Header::read(socket)?;
        let peer = format!("a peer that calls itself host {}", hello.from);
        if hello.kind != FrameKind::Hello || hello.length > TEXT_LIMIT {
            return Err(denied(&peer));
        }
        let mut found = vec![0; hello.length as usize];
        socket.read_exact(&mut found)?;
        if found != token.as_bytes() {
            return Err(denied(&peer));
        }
        return socket.set_timeout(None);
    }
    let (connector, theirs): (HostId, Nonce) = receive(socket, "a peer")?;
    let mine = nonce()?;
    let session = Session { token, connector, nonces: (&theirs, &mine) };
    let proof = session.prove(End::Acceptor);
    send(socket, me, &[&mine, proof.as_ref()].concat())?;
    let peer = format!("a peer that calls itself host {connector}");
    let (_, proof): (HostId, [u8; PROOF]) = receive(socket, &peer)?;
    session.check(End::Connector, &proof).map_err(|()| denied(&peer))?;
    socket.set_timeout(None)
}

/// What the proofs of a connection are of.
struct Session<'a> {
    token: &'a str,
    connector: HostId,
    /// What the connector and the acceptor have drawn.
    nonces: (&'a Nonce, &'a Nonce),
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
        [&[end as u8][..], &number, connector, acceptor].concat()
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

fn denied(peer: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{peer} does not know the token"))
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; NONCE];
    let drawn = SystemRandom::new().fill(&mut nonce);
    drawn.map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(nonce)
}
