//! Sending to another process: the connections to it and the segments it shares with this one.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use base::{Channel, HostId, Status, TransferTag};
use parking_lot::Mutex;

use super::frame::{FrameKind, Header};
use super::handshake::{ANSWER_TIMEOUT, Credentials, greet};
use super::lanes::LaneName;
use super::memory::{MemfdSegment, size_class};
use super::socket::Socket;

/// Messages below this size travel in their frame; others in a segment or over several streams.
pub(crate) const INLINE_BYTES: usize = 64 << 10;
/// Number of streams over which a large message between machines is striped.
const STREAMS: usize = 2;
/// Timeout of a check whether a peer still listens.
const LOOKING: Duration = Duration::from_millis(500);
/// Maximum size, in bytes, of the segments that are kept for one peer, unless they are busy.
const KEPT_BYTES: usize = 1 << 30;

#[derive(Debug)]
struct Shared {
    number: u64,
    segment: MemfdSegment,
    /// Whether it was idle at the last trim.
    seen_idle: bool,
}

/// One address of a process, and idle connections to it (a connection pool).
#[derive(Debug)]
struct Endpoint {
    address: String,
    connections: Mutex<Vec<Socket>>,
}

/// Another process on the data plane.
#[derive(Debug)]
pub(crate) struct Peer {
    credentials: Arc<Credentials>,
    /// Its addresses; by channel, if there are several.
    endpoints: Vec<Endpoint>,
    segments: Mutex<(u64, VecDeque<Shared>)>,
}

impl Peer {
    /// Creates a peer with these addresses, of which there is at least one.
    pub fn new(credentials: Arc<Credentials>, addresses: Vec<String>) -> Self {
        let endpoint = |address| Endpoint { address, connections: Mutex::default() };
        let endpoints = addresses.into_iter().map(endpoint).collect();
        Self { credentials, endpoints, segments: Mutex::default() }
    }

    /// Returns the endpoint of a channel; the first for [`Channel::INSIDE`] and unknown channels.
    fn endpoint(&self, channel: Channel) -> &Endpoint {
        let number = channel.0.saturating_sub(1) as usize;
        self.endpoints.get(number).unwrap_or(&self.endpoints[0])
    }

    /// Whether the peer is reached on this machine by a channel.
    pub fn is_local(&self, channel: Channel) -> bool {
        self.endpoint(channel).address.starts_with("unix:")
    }

    /// Sends one message.
    pub fn send(&self, channel: Channel, tag: TransferTag, bytes: &[u8]) -> io::Result<()> {
        let endpoint = self.endpoint(channel);
        self.with_connection(endpoint, |socket| {
            if bytes.len() < INLINE_BYTES {
                self.send_part(socket, tag, bytes, 0, bytes.len())
            } else if socket.is_local() {
                self.send_segment(socket, tag, bytes)
            } else {
                self.send_striped(endpoint, socket, tag, bytes)
            }
        })
    }

    /// Reports that a message has failed.
    pub fn send_failure(&self, tag: TransferTag, error: &Status) -> io::Result<()> {
        self.send_text(self.header(FrameKind::Failure, tag, 0), error)
    }

    /// Reports that a host is lost: its messages with tags below `tag` never arrive.
    pub fn send_loss(&self, lost: HostId, tag: TransferTag, error: &Status) -> io::Result<()> {
        let header = self.header(FrameKind::Loss, tag, 0);
        self.send_text(Header { offset: u64::from(lost.0), ..header }, error)
    }

    fn send_text(&self, header: Header, error: &Status) -> io::Result<()> {
        let text = error.to_string();
        let by = |endpoint: &Endpoint| {
            self.with_connection(endpoint, |socket| {
                let length = text.len() as u64;
                let header = Header { length, total: length, ..header };
                socket.write_frame(&header.encode(), text.as_bytes())
            })
        };
        // One of the endpoints may be down, so try all.
        let (last, others) = self.endpoints.split_last().expect("there is a endpoint");
        others.iter().find_map(|endpoint| by(endpoint).ok()).map_or_else(|| by(last), Ok)
    }

    /// Sends a ping and waits at most `timeout` for the answer.
    pub fn ping(&self, timeout: Duration) -> io::Result<()> {
        self.with_connection(&self.endpoints[0], |socket| {
            socket.set_timeout(Some(timeout))?;
            let header = self.header(FrameKind::Ping, TransferTag(0), 0);
            header.write(socket)?;
            Header::read(socket)?;
            socket.set_timeout(None)
        })
    }

    fn header(&self, kind: FrameKind, tag: TransferTag, length: usize) -> Header {
        let length = length as u64;
        Header { kind, from: self.credentials.me, tag, length, offset: 0, total: length }
    }

    /// Runs `use_it` on an exclusive connection; a connection that fails is not reused.
    fn with_connection<T>(
        &self,
        endpoint: &Endpoint,
        use_it: impl Fn(&mut Socket) -> io::Result<T>,
    ) -> io::Result<T> {
        let idle = || endpoint.connections.lock().pop();
        let mut socket = match std::iter::from_fn(idle).find(|socket| !socket.is_ended()) {
            Some(socket) => socket,
            None => self.connect(endpoint)?,
        };
        let result = use_it(&mut socket)?;
        endpoint.connections.lock().push(socket);
        Ok(result)
    }

    /// Opens a connection for a lane, of which `taken` bytes have been read. The peer may still refuse
    /// it.
    pub fn lane(&self, lane: LaneName, taken: u64, timeout: Duration) -> io::Result<Socket> {
        let address = &self.endpoint(Channel(lane.via)).address;
        let mut socket = self.greet(Socket::connect_within(address, timeout)?, timeout)?;
        lane.header(self.credentials.me, taken).write(&mut socket)?;
        Ok(socket)
    }

    /// Whether connections to all addresses are refused.
    pub fn is_gone(&self) -> bool {
        self.endpoints.iter().all(|endpoint| {
            let refused = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
            let tried = Socket::connect_within(&endpoint.address, LOOKING);
            tried.is_err_and(|error| refused.contains(&error.kind()))
        })
    }

    /// Connects by a channel to check that it reaches the peer.
    pub fn probe(&self, by: Channel, timeout: Duration) -> io::Result<()> {
        self.try_address(&self.endpoint(by).address, timeout)
    }

    /// Connects to each address on another machine, or in another network, to check that it is
    /// reached.
    ///
    /// # Errors
    /// One is not; the text names it.
    pub fn reach(&self, timeout: Duration) -> io::Result<()> {
        let remote = |endpoint: &&Endpoint| !endpoint.address.starts_with("unix:");
        let mut remote = self.endpoints.iter().filter(remote);
        remote.try_for_each(|endpoint| self.try_address(&endpoint.address, timeout))
    }

    fn try_address(&self, address: &str, timeout: Duration) -> io::Result<()> {
        let socket = Socket::connect_within(address, timeout)?;
        let greeted = self.greet(socket, timeout).map(drop);
        greeted.map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))
    }

    fn connect(&self, endpoint: &Endpoint) -> io::Result<Socket> {
        self.greet(Socket::connect(&endpoint.address)?, ANSWER_TIMEOUT)
    }

    fn greet(&self, socket: Socket, timeout: Duration) -> io::Result<Socket> {
        greet(socket, &self.credentials, timeout)
    }

    fn send_part(
        &self,
        socket: &mut Socket,
        tag: TransferTag,
        part: &[u8],
        offset: usize,
        total: usize,
    ) -> io::Result<()> {
        let mut header = self.header(FrameKind::Inline, tag, part.len());
        header.offset = offset as u64;
        header.total = total as u64;
        socket.write_frame(&header.encode(), part)
    }

    fn send_striped(
        &self,
        endpoint: &Endpoint,
        first: &mut Socket,
        tag: TransferTag,
        bytes: &[u8],
    ) -> io::Result<()> {
        let stripe = bytes.len().div_ceil(STREAMS).next_multiple_of(4096);
        std::thread::scope(|scope| {
            let mut others = Vec::new();
            for (index, part) in bytes.chunks(stripe).enumerate().skip(1) {
                others.push(scope.spawn(move || {
                    self.with_connection(endpoint, |socket| {
                        self.send_part(socket, tag, part, index * stripe, bytes.len())
                    })
                }));
            }
            let part = &bytes[..stripe.min(bytes.len())];
            self.send_part(first, tag, part, 0, bytes.len())?;
            others.into_iter().try_for_each(|other| other.join().expect("a stream panicked"))
        })
    }

    fn send_segment(&self, socket: &mut Socket, tag: TransferTag, bytes: &[u8]) -> io::Result<()> {
        let idle = {
            let mut segments = self.segments.lock();
            let wanted = size_class(bytes.len());
            let fits =
                |shared: &Shared| shared.segment.capacity() == wanted && !shared.segment.is_busy();
            let index = segments.1.iter().position(fits);
            index.and_then(|index| segments.1.remove(index))
        };
        let is_new = idle.is_none();
        let mut shared = match idle {
            Some(shared) => shared,
            None => self.new_segment(bytes.len())?,
        };
        shared.segment.fill(bytes);
        shared.seen_idle = false;
        let mut header = self.header(FrameKind::Segment, tag, bytes.len());
        header.total = shared.number;
        // The receiver identifies the segment by sender and number; only the first frame that names it
        // carries the descriptor, which `offset` 1 indicates.
        header.offset = u64::from(is_new);
        let encoded = header.encode();
        if is_new {
            socket.write_with_descriptor(&encoded, shared.segment.file.as_fd())?;
        } else {
            socket.write_all(&encoded)?;
        }
        self.keep(socket, shared)
    }

    fn new_segment(&self, payload: usize) -> io::Result<Shared> {
        let number = {
            let mut segments = self.segments.lock();
            segments.0 += 1;
            segments.0
        };
        let segment = MemfdSegment::create(size_class(payload))?;
        Ok(Shared { number, segment, seen_idle: false })
    }

    /// Keeps a segment for later messages, and frees the oldest idle ones beyond [`KEPT_BYTES`].
    fn keep(&self, socket: &mut Socket, shared: Shared) -> io::Result<()> {
        let mut forgotten = Vec::new();
        {
            let mut segments = self.segments.lock();
            segments.1.push_back(shared);
            let mut kept: usize = segments.1.iter().map(|shared| shared.segment.capacity()).sum();
            while kept > KEPT_BYTES {
                let Some(idle) = segments.1.iter().position(|s| !s.segment.is_busy()) else {
                    break;
                };
                let shared = segments.1.remove(idle).expect("found above");
                kept -= shared.segment.capacity();
                forgotten.push(shared.number);
            }
        }
        self.forget(socket, &forgotten)
    }

    /// Frees segments that have been idle since the last trim.
    pub fn tidy(&self) -> io::Result<()> {
        let mut forgotten = Vec::new();
        self.segments.lock().1.retain_mut(|shared| {
            let idle = !shared.segment.is_busy();
            if idle && shared.seen_idle {
                forgotten.push(shared.number);
                return false;
            }
            shared.seen_idle = idle;
            true
        });
        if forgotten.is_empty() {
            return Ok(());
        }
        self.with_connection(&self.endpoints[0], |socket| self.forget(socket, &forgotten))
    }

    /// Notifies the peer that these segments will not be used again.
    fn forget(&self, socket: &mut Socket, numbers: &[u64]) -> io::Result<()> {
        for &number in numbers {
            let mut header = self.header(FrameKind::Forget, TransferTag(0), 0);
            header.total = number;
            header.write(socket)?;
        }
        Ok(())
    }
}
