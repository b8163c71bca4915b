//! Sending to another process: the connections to it and the segments it shares with this one.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use base::{Channel, HostId, Status, TransferTag};
use parking_lot::Mutex;

use super::frame::{FrameKind, Header, TEXT_LIMIT};
use super::handshake::{ANSWER_TIMEOUT, Credentials, greet};
use super::in_use::{InUse, Using};
use super::lanes::LaneName;
use super::memory::{MemfdSegment, size_class};
use super::outage::{Outage, is_outage};
use super::socket::{SILENCE_MAX, Socket};

/// Messages below this size travel in their frame; others in a segment or over several streams.
pub(crate) const INLINE_BYTES: usize = 64 << 10;
/// With several channels: timeout of a connection attempt, time after which a connection on which
/// nothing comes through ends, and interval between attempts to reach a peer by a channel again.
const FAILOVER_CONNECT: Duration = Duration::from_secs(2);
const FAILOVER_SILENCE: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(1);
/// Pause between attempts while no endpoint reaches the peer.
const PAUSE: Duration = Duration::from_millis(200);
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

/// A frame with its payload.
#[derive(Debug, Clone, Copy)]
struct Frame<'a> {
    header: Header,
    payload: &'a [u8],
}

impl Frame<'_> {
    fn write(&self, socket: &mut Socket) -> io::Result<()> {
        socket.write_frame(&self.header.encode(), self.payload)
    }

    /// Waits until the peer, on another machine, has received all of the frame.
    fn await_receipt(&self, socket: &mut Socket) -> io::Result<()> {
        if Header::read(socket)? == self.header {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "another frame was received"))
    }
}

/// What was sent may not have been received.
#[derive(Debug)]
struct Unconfirmed {
    error: io::Error,
    was_connected: bool,
    /// Time for which the peer has not answered before it failed.
    silent: Duration,
}

/// One address of a process, and idle connections to it (a connection pool).
#[derive(Debug)]
struct Endpoint {
    address: String,
    connections: Mutex<Vec<Socket>>,
    /// Whether it did not reach the process and another one did: it is avoided until it does again.
    is_down: AtomicBool,
}

/// Another process on the data plane.
#[derive(Debug)]
pub(crate) struct Peer {
    host: HostId,
    credentials: Arc<Credentials>,
    /// The first message that this process of it may send.
    first_tag: TransferTag,
    /// Its addresses; by channel, if there are several.
    endpoints: Vec<Endpoint>,
    segments: Mutex<(u64, VecDeque<Shared>)>,
    outage: Mutex<Outage>,
    /// Connections to another machine that are being used; none may once the peer is lost.
    in_use: InUse,
}

impl Peer {
    /// Creates a peer with these addresses, of which there is at least one.
    pub fn new(
        host: HostId,
        first_tag: TransferTag,
        credentials: Arc<Credentials>,
        addresses: Vec<String>,
    ) -> Self {
        let endpoint = |address| Endpoint {
            address,
            connections: Mutex::default(),
            is_down: AtomicBool::new(false),
        };
        let endpoints = addresses.into_iter().map(endpoint).collect();
        Self {
            host,
            first_tag,
            credentials,
            endpoints,
            segments: Mutex::default(),
            outage: Mutex::default(),
            in_use: InUse::default(),
        }
    }

    /// Whether this is a process with these addresses, and this first message.
    pub fn is(&self, first_tag: TransferTag, addresses: &[String]) -> bool {
        let known = self.endpoints.iter().map(|endpoint| &endpoint.address);
        self.first_tag == first_tag && known.eq(addresses)
    }

    /// Returns the number of a channel's endpoint; the first for [`Channel::INSIDE`] and unknown channels.
    fn index(&self, channel: Channel) -> usize {
        let number = channel.0.saturating_sub(1) as usize;
        if number < self.endpoints.len() { number } else { 0 }
    }

    fn endpoint(&self, channel: Channel) -> &Endpoint {
        &self.endpoints[self.index(channel)]
    }

    /// Whether the peer is reached on this machine by a channel.
    pub fn is_local(&self, channel: Channel) -> bool {
        self.endpoint(channel).address.starts_with("unix:")
    }

    /// Sends one message; to another machine, by another channel if its own does not reach the peer
    /// (failover).
    ///
    /// # Arguments
    /// - `sent`: called once the message is on its way, or the peer is not reached at once.
    pub fn send(
        self: &Arc<Self>,
        channel: Channel,
        tag: TransferTag,
        bytes: &[u8],
        mut sent: impl FnMut(),
    ) -> io::Result<()> {
        if self.is_local(channel) {
            return self.with_connection(self.endpoint(channel), |socket| {
                if bytes.len() < INLINE_BYTES {
                    self.part(tag, bytes, 0, bytes.len()).write(socket)
                } else {
                    self.send_segment(socket, tag, bytes)
                }
            });
        }
        let mut stripes = if bytes.len() < INLINE_BYTES { 1 } else { STREAMS };
        self.deliver(self.index(channel), true, |endpoint| {
            let stripe = bytes.len().div_ceil(stripes).next_multiple_of(4096).max(4096);
            stripes = 1; // if sent again: a whole message needs no other part
            let starts = (0..bytes.len().max(1)).step_by(stripe);
            let end = |start: usize| bytes.len().min(start + stripe);
            let frame = |start| self.part(tag, &bytes[start..end(start)], start, bytes.len());
            let frames: Vec<_> = starts.map(frame).collect();
            self.transmit(endpoint, &frames, &mut sent).inspect_err(|_| sent())
        })
    }

    /// Reports that a message has failed; tries on while nothing reaches the peer only if it `insists`.
    pub fn send_failure(
        self: &Arc<Self>,
        tag: TransferTag,
        error: &Status,
        insists: bool,
    ) -> io::Result<()> {
        self.send_text(self.header(FrameKind::Failure, tag, 0), error, insists)
    }

    /// Reports that a host is lost: its messages with tags below `tag` never arrive.
    pub fn send_loss(
        self: &Arc<Self>,
        lost: HostId,
        tag: TransferTag,
        error: &Status,
    ) -> io::Result<()> {
        let header = self.header(FrameKind::Loss, tag, 0);
        self.send_text(Header { offset: u64::from(lost.0), ..header }, error, true)
    }

    fn send_text(
        self: &Arc<Self>,
        header: Header,
        error: &Status,
        insists: bool,
    ) -> io::Result<()> {
        let mut text = error.to_string();
        let mut end = text.len().min(TEXT_LIMIT as usize);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        let length = text.len() as u64;
        let frame =
            Frame { header: Header { length, total: length, ..header }, payload: text.as_bytes() };
        if self.is_local(Channel::INSIDE) {
            return self.with_connection(&self.endpoints[0], |socket| frame.write(socket));
        }
        self.deliver(0, insists, |endpoint| self.transmit(endpoint, &[frame], &mut || ()))
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

    /// Ends all that is being delivered: the process is lost, or this one ends.
    pub fn give_up(&self) {
        self.in_use.lose();
    }

    /// Delivers something to a peer on another machine: by an endpoint, or by another that reaches it,
    /// or, if it `insists`, by the first that does again.
    ///
    /// # Errors
    /// Nothing has reached it for a minute, or the peer is lost; the error is that of the preferred
    /// endpoint. Or its machine refuses connections.
    fn deliver(
        self: &Arc<Self>,
        preferred: usize,
        insists: bool,
        mut by: impl FnMut(&Endpoint) -> Result<(), Unconfirmed>,
    ) -> io::Result<()> {
        loop {
            if let Some(error) = self.outage.lock().verdict(Instant::now(), insists) {
                return Err(error);
            }
            let (error, silent) = match self.deliver_once(preferred, &mut by) {
                Ok(()) => {
                    self.outage.lock().end(Instant::now());
                    return Ok(());
                }
                Err(failed) => failed,
            };
            let is_worth_another = is_outage(&error)
                && self.outage.lock().note(Instant::now(), silent, &error)
                && insists;
            if !is_worth_another || self.in_use.is_lost() {
                return Err(error);
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn deliver_once(
        self: &Arc<Self>,
        preferred: usize,
        by: &mut impl FnMut(&Endpoint) -> Result<(), Unconfirmed>,
    ) -> Result<(), (io::Error, Duration)> {
        let is_down = |&index: &usize| self.endpoints[index].is_down.load(Ordering::Relaxed);
        let others = (0..self.endpoints.len()).filter(|&index| index != preferred);
        let mut order: VecDeque<usize> = std::iter::once(preferred).chain(others).collect();
        order.make_contiguous().sort_by_key(is_down);
        let mut failed: BTreeMap<usize, io::Error> = BTreeMap::new();
        let mut all_silent = Duration::ZERO;
        while let Some(index) = order.pop_front() {
            match by(&self.endpoints[index]) {
                Ok(()) => {
                    failed.remove(&index);
                    for (other, error) in failed {
                        self.avoid(other, index, &error);
                    }
                    return Ok(());
                }
                Err(Unconfirmed { error, .. })
                    if error.kind() == io::ErrorKind::PermissionDenied =>
                {
                    return Err((error, all_silent));
                }
                Err(Unconfirmed { error, was_connected, silent }) => {
                    all_silent += silent;
                    // The connection may have been an idle one that ended; connect once more.
                    if failed.insert(index, error).is_none() && was_connected {
                        order.push_back(index);
                    }
                }
            }
        }
        // One that may be reached again counts most.
        let weight = |(index, error): &(usize, io::Error)| (is_outage(error), *index == preferred);
        let (_, error) = failed.into_iter().max_by_key(weight).expect("one was tried");
        Err((error, all_silent))
    }

    /// Sends frames at once, each by a connection of its own, and waits until the peer has all.
    fn transmit(
        &self,
        endpoint: &Endpoint,
        frames: &[Frame<'_>],
        sent: &mut impl FnMut(),
    ) -> Result<(), Unconfirmed> {
        let began = Instant::now();
        let failed = |error| Unconfirmed { error, was_connected: false, silent: began.elapsed() };
        let connect = |_: &Frame<'_>| self.connection(endpoint);
        let sockets: io::Result<Vec<Socket>> = frames.iter().map(connect).collect();
        let mut sockets = sockets.map_err(failed)?;
        let using: io::Result<Vec<Using<'_>>> =
            sockets.iter().map(|socket| self.in_use.begin(socket)).collect();
        let using = using.map_err(failed)?;
        let began = Instant::now();
        let received = (|| {
            std::thread::scope(|scope| {
                let mut pairs = frames.iter().zip(&mut sockets);
                let first = pairs.next();
                let others: Vec<_> =
                    pairs.map(|(frame, socket)| scope.spawn(move || frame.write(socket))).collect();
                let first = first.map_or(Ok(()), |(frame, socket)| frame.write(socket));
                let join =
                    |other: ScopedJoinHandle<'_, _>| other.join().expect("a stream panicked");
                others.into_iter().map(join).fold(first, io::Result::and)
            })?;
            sent();
            let mut pairs = frames.iter().zip(&mut sockets);
            pairs.try_for_each(|(frame, socket)| frame.await_receipt(socket))
        })();
        drop(using);
        if let Err(error) = received {
            endpoint.connections.lock().clear(); // they may be as dead
            let silence = if self.endpoints.len() < 2 { SILENCE_MAX } else { FAILOVER_SILENCE };
            let silent =
                if is_outage(&error) { began.elapsed().min(silence) } else { Duration::ZERO };
            return Err(Unconfirmed { error, was_connected: true, silent });
        }
        endpoint.connections.lock().append(&mut sockets);
        Ok(())
    }

    /// Returns which endpoints are avoided.
    #[cfg(test)]
    pub fn avoided(&self) -> Vec<bool> {
        self.endpoints.iter().map(|endpoint| endpoint.is_down.load(Ordering::Relaxed)).collect()
    }

    /// Avoids an endpoint that does not reach the peer, as another one does, until it does again.
    fn avoid(self: &Arc<Self>, down: usize, instead: usize, error: &io::Error) {
        if self.endpoints[down].is_down.swap(true, Ordering::Relaxed) {
            return;
        }
        let (host, channel, instead) = (self.host, down + 1, instead + 1);
        tracing::warn!(%error, "channel {channel} does not reach host {host}; channel {instead} carries its messages");
        let weak = Arc::downgrade(self);
        let watch = move || {
            loop {
                std::thread::sleep(RETRY);
                let Some(peer) = weak.upgrade() else { return };
                let endpoint = &peer.endpoints[down];
                if peer.try_address(&endpoint.address, FAILOVER_CONNECT).is_ok() {
                    endpoint.is_down.store(false, Ordering::Relaxed);
                    tracing::info!("channel {channel} reaches host {host} again");
                    return;
                }
            }
        };
        let watching = std::thread::Builder::new().name("fairway-channel".to_owned()).spawn(watch);
        if watching.is_err() {
            self.endpoints[down].is_down.store(false, Ordering::Relaxed);
        }
    }

    fn header(&self, kind: FrameKind, tag: TransferTag, length: usize) -> Header {
        let length = length as u64;
        Header { kind, from: self.credentials.me, tag, length, offset: 0, total: length }
    }

    /// Runs `use_it` on an exclusive connection; a connection that fails is not reused.
    fn with_connection<T>(
        &self,
        endpoint: &Endpoint,
        use_it: impl FnOnce(&mut Socket) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut socket = self.connection(endpoint)?;
        let result = use_it(&mut socket)?;
        endpoint.connections.lock().push(socket);
        Ok(result)
    }

    /// Takes an idle connection, or opens one.
    fn connection(&self, endpoint: &Endpoint) -> io::Result<Socket> {
        let idle = || endpoint.connections.lock().pop();
        match std::iter::from_fn(idle).find(|socket| !socket.is_ended()) {
            Some(socket) => Ok(socket),
            None => self.connect(endpoint),
        }
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

    /// Connects to an endpoint; for not as long if there are others, and the connection ends sooner
    /// when nothing comes through.
    fn connect(&self, endpoint: &Endpoint) -> io::Result<Socket> {
        let socket = if self.endpoints.len() < 2 {
            Socket::connect(&endpoint.address)?
        } else {
            let socket = Socket::connect_within(&endpoint.address, FAILOVER_CONNECT)?;
            socket.set_silence(FAILOVER_SILENCE)?;
            socket
        };
        let _using = self.in_use.begin(&socket)?;
        self.greet(socket, ANSWER_TIMEOUT)
    }

    fn greet(&self, socket: Socket, timeout: Duration) -> io::Result<Socket> {
        greet(socket, &self.credentials, timeout)
    }

    /// Returns the frame of a part of a message.
    fn part<'a>(&self, tag: TransferTag, part: &'a [u8], offset: usize, total: usize) -> Frame<'a> {
        let header = self.header(FrameKind::Inline, tag, part.len());
        let header = Header { offset: offset as u64, total: total as u64, ..header };
        Frame { header, payload: part }
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
