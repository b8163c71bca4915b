//! The data plane: messages between hosts, and between the controller and hosts.
//!
//! The controller assigns each message a unique tag; a message is sent once and received once. On one
//! machine, large messages travel in shared memory (one copy, by the sender); between machines they are
//! striped over TCP streams. A host may have several channels onto the network between islands
//! (multi-rail); large messages on one channel are sent one after another. The data plane does no
//! routing or scheduling.

mod address;
mod detour;
mod failures;
mod frame;
mod handshake;
mod in_use;
mod inbox;
mod lanes;
mod memory;
mod outage;
mod peer;
mod receive;
mod recent;
mod relays;
mod socket;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use base::{Channel, Code, HostId, Status, TransferTag};
use parking_lot::{FairMutex, Mutex, RwLock};

use transport::Encryption;
use transport::identity::Users;

pub use memory::{Filling, Payload, SharedMemory};

pub(crate) use lanes::{LaneName, Lanes, Opened};
pub(crate) use memory::{Mapping, check_sealed, memory_file};
pub(crate) use socket::Socket;

use detour::Detour;
use handshake::Credentials;
use inbox::{Inbox, ReceiveResult};
use memory::{MemfdSegment, Pool, SharedBlock};
use peer::{INLINE_BYTES, Peer};
use recent::RecentTags;
use relays::{RelayJob, Relays, pass_on};
use socket::ChannelListener;

/// Host number of the controller on the data plane.
pub const CONTROLLER: HostId = HostId(u32::MAX);
/// Maximum number of open connections that have not authenticated; beyond it the oldest is closed.
const STRANGERS_LIMIT: usize = 256;
/// Idle memory is released when two consecutive trims find it idle. Interval between trims after a
/// request...
const SOON: Duration = Duration::from_millis(100);
/// ...and factor by which the interval is longer otherwise, so that a training step can reuse its
/// memory.
const SELDOM: u32 = 150;
/// Number of trims after a request.
const LOOKS: u32 = 9;

#[derive(Debug)]
struct Inner {
    credentials: Arc<Credentials>,
    /// Local users that may connect.
    users: Users,
    /// Address that is advertised to peers.
    address: String,
    /// Addresses of the channels.
    channels: Vec<String>,
    /// Addresses of all listeners.
    addresses: Vec<String>,
    detour: Detour,
    /// Per channel, the lock that serializes large messages; fair, so first come, first served.
    turns: Vec<FairMutex<()>>,
    peers: RwLock<HashMap<HostId, Arc<Peer>>>,
    /// Why hosts that were peers were lost.
    lost: Mutex<HashMap<HostId, Status>>,
    /// First message that the current process of each peer may send.
    first_tags: RwLock<HashMap<HostId, TransferTag>>,
    inbox: Inbox,
    relays: Relays,
    lanes: Lanes,
    partial: Mutex<HashMap<TransferTag, Partial>>,
    /// Lock order: after `partial`.
    delivered: Mutex<RecentTags>,
    segments: Mutex<HashMap<(HostId, u64), Arc<MemfdSegment>>>,
    pool: Arc<Pool>,
    /// Connections that have not authenticated, the oldest first.
    strangers: Mutex<VecDeque<Arc<Socket>>>,
    closed: AtomicBool,
    looks: AtomicU32,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

/// A message of which some stripes have been received.
#[derive(Debug)]
struct Partial {
    from: HostId,
    block: Arc<SharedBlock>,
    /// Size of the message in bytes, for which the block was allocated.
    total: u64,
    missing: u64,
    /// Start and end of the stripes that have been, or are being, received.
    claimed: BTreeMap<u64, u64>,
}

/// This process's endpoint of the data plane. Clones share the endpoint.
#[derive(Debug, Clone)]
pub struct DataPlane(Arc<Inner>);

impl DataPlane {
    /// Listens at `address` (`unix:PATH`, `tcp:HOST:PORT`, or both, comma-separated, the first for
    /// peers on this machine) for peers that know `token`, and at the addresses of this host's channels
    /// onto the network between islands.
    ///
    /// # Arguments
    /// - `encrypt`: whether TCP connections are encrypted (TLS 1.3), the same on all endpoints of a
    ///   run. Those on one machine never are.
    ///
    /// # Errors
    /// An address is malformed or already in use, or the system makes no keys.
    pub fn listen(
        me: HostId,
        address: &str,
        channels: &[String],
        token: &str,
        encrypt: bool,
    ) -> io::Result<Self> {
        let encryption = encrypt.then(Encryption::create).transpose().map_err(io::Error::other)?;
        let mut listeners = address::bind(address)?;
        let address = address::advertised(&listeners)?;
        let near = listeners.len();
        for channel in channels {
            listeners.push(ChannelListener::bind(channel)?);
        }
        let addresses: Vec<String> =
            listeners.iter().map(ChannelListener::address).collect::<io::Result<_>>()?;
        let plane = DataPlane(Arc::new(Inner {
            credentials: Arc::new(Credentials { me, token: token.to_owned(), encryption }),
            users: Users::owner_and(&[]),
            address,
            channels: addresses[near..].to_vec(),
            addresses,
            detour: Detour::default(),
            turns: channels.iter().map(|_| FairMutex::new(())).collect(),
            peers: RwLock::default(),
            lost: Mutex::default(),
            first_tags: RwLock::default(),
            inbox: Inbox::default(),
            relays: Relays::default(),
            lanes: Lanes::default(),
            partial: Mutex::default(),
            delivered: Mutex::default(),
            segments: Mutex::default(),
            pool: Arc::default(),
            strangers: Mutex::default(),
            closed: AtomicBool::new(false),
            looks: AtomicU32::new(0),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
        }));
        for listener in listeners {
            let inner = plane.0.clone();
            std::thread::Builder::new()
                .name("fairway-accept".to_owned())
                .spawn(move || receive::accept(&inner, &listener))?;
        }
        let inner = Arc::downgrade(&plane.0);
        std::thread::Builder::new().name("fairway-tidy".to_owned()).spawn(move || tidy(&inner))?;
        Ok(plane)
    }

    /// Returns the address at which peers reach this endpoint.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Returns the addresses of its channels.
    pub fn channels(&self) -> &[String] {
        &self.0.channels
    }

    /// Registers the new process that a peer is.
    pub fn add_peer(&self, host: HostId, address: &str) {
        self.0.replace_peer(host, TransferTag(0), address::choose(address));
    }

    /// Registers a peer, of which messages with smaller tags were for an earlier process to send: they
    /// never arrive. Returns whether the process that begins there is the newest that is known, and has
    /// not been lost; it may have been registered before.
    pub fn know_peer(&self, host: HostId, tag: TransferTag, address: &str) -> bool {
        let is_newest = self.begins_at(host, tag);
        let addresses = address::choose(address);
        let known = self.0.peers.read().get(&host).cloned();
        if is_newest && !known.is_some_and(|known| known.is(tag, &addresses)) {
            self.0.replace_peer(host, tag, addresses);
        }
        is_newest
    }

    /// Sends one message; returns once `bytes` may be reused.
    ///
    /// # Errors
    /// The peer is unknown or unreachable.
    pub fn send(
        &self,
        to: HostId,
        channel: Channel,
        tag: TransferTag,
        bytes: &[u8],
    ) -> Result<(), Status> {
        if to == self.0.credentials.me {
            let payload = self.copy(bytes).map_err(|error| out_of_memory(bytes.len(), &error))?;
            self.0.arrive(tag, Ok(payload));
            return Ok(());
        }
        self.0.send(to, channel, tag, bytes)
    }

    /// Checks that a peer responds (heartbeat).
    ///
    /// # Errors
    /// It does not respond within `timeout`.
    pub fn ping(&self, host: HostId, timeout: Duration) -> io::Result<()> {
        let peer = self.0.peers.read().get(&host).cloned();
        peer.ok_or(io::ErrorKind::NotConnected)?.ping(timeout)
    }

    /// Checks that a peer is reached at all its addresses on other machines.
    ///
    /// # Errors
    /// One is not; the text names it.
    pub fn reach(&self, host: HostId, timeout: Duration) -> io::Result<()> {
        let peer = self.0.peers.read().get(&host).cloned();
        peer.map_or(Ok(()), |peer| peer.reach(timeout)) // it has been lost meanwhile
    }

    /// Registers that `tag` will come from `from`, so that the loss of `from` fails it.
    pub fn expect(&self, tag: TransferTag, from: HostId) {
        self.0.inbox.expect(tag, from);
        if let Some(error) = self.0.never_comes(tag, from) {
            self.0.arrive(tag, Err(error));
        }
    }

    /// Drops messages with smaller tags, those that have arrived and all to come: they are for an
    /// earlier process of this host.
    pub fn drop_before(&self, tag: TransferTag) {
        self.0.inbox.drop_before(tag);
    }

    /// Relays message `tag` from `from` to `to` under another tag, when it arrives or now if it has.
    /// Messages to one host on one channel are relayed in the order in which they arrive.
    pub fn relay(
        &self,
        (tag, from): (TransferTag, HostId),
        onward: TransferTag,
        to: HostId,
        channel: Channel,
    ) {
        let relay = RelayJob { from, onward, to, channel };
        let mut open = self.0.relays.open.lock();
        match self.0.inbox.look(tag) {
            Some(outcome) => {
                drop(open);
                pass_on(&self.0, relay, outcome);
            }
            None => {
                open.entry(tag).or_default().push(relay);
                drop(open);
                if let Some(error) = self.0.never_comes(tag, from) {
                    self.0.arrive(tag, Err(error));
                }
            }
        }
    }

    /// Waits for a message and takes it.
    ///
    /// # Errors
    /// The message has failed, or did not arrive within `timeout`.
    pub fn take(&self, tag: TransferTag, timeout: Duration) -> Result<Payload, Status> {
        self.0.inbox.take(tag, timeout)
    }

    /// Whether a message has settled: it has arrived or failed.
    pub fn is_settled(&self, tag: TransferTag) -> bool {
        self.0.inbox.look(tag).is_some()
    }

    /// Watches a group of messages: [`DataPlane::arrivals`] returns `name` once all of them have
    /// settled.
    pub fn watch(&self, name: u64, tags: &[TransferTag]) {
        self.0.inbox.watch(name, tags);
    }

    /// Waits until watched groups have settled, and returns their names; empty once this endpoint is
    /// closed.
    pub fn arrivals(&self) -> Vec<u64> {
        self.0.inbox.ended()
    }

    /// Discards a message, now or when it arrives.
    pub fn discard(&self, tag: TransferTag) {
        self.0.inbox.discard(tag);
    }

    /// Connects to a peer for a lane of a team, of which `taken` bytes have been read; the channel need
    /// not be the lane's own (failover).
    ///
    /// # Errors
    /// The peer is unknown, or cannot be reached within `timeout`.
    pub(crate) fn open_lane(
        &self,
        to: HostId,
        lane: LaneName,
        taken: u64,
        timeout: Duration,
    ) -> Result<Socket, Status> {
        let peer = self.0.peers.read().get(&to).cloned().ok_or_else(|| self.0.gone(to))?;
        peer.lane(lane, taken, timeout).map_err(|error| {
            Status::new(Code::Unavailable, format!("host {to} cannot be reached: {error}"))
        })
    }

    /// Whether this host and all of `hosts` are reached on this machine by a channel, or by their only
    /// addresses if they have no channels.
    pub(crate) fn is_local(&self, hosts: &[HostId], channel: Channel) -> bool {
        let own = match channel.0 {
            0 => self.0.addresses.first(),
            number => self.0.channels.get(number as usize - 1),
        };
        let peers = self.0.peers.read();
        let is_near = |host: &HostId| {
            *host == self.0.credentials.me
                || peers.get(host).is_some_and(|peer| peer.is_local(channel))
        };
        own.is_some_and(|own| own.starts_with("unix:")) && hosts.iter().all(is_near)
    }

    /// Whether the process that a peer was when this tag was assigned has been reported lost; another
    /// one, which knows nothing of what the tag names, may have its place.
    pub(crate) fn has_lost(&self, host: HostId, tag: TransferTag) -> bool {
        self.0.never_comes(tag, host).is_some()
    }

    /// Whether a peer's machine refuses connections to all its addresses. A timeout does not count.
    pub(crate) fn is_gone(&self, host: HostId) -> bool {
        let peer = self.0.peers.read().get(&host).cloned();
        peer.is_some_and(|peer| peer.is_gone())
    }

    /// Whether a peer can be reached by a channel.
    pub(crate) fn probe(&self, to: HostId, by: Channel, timeout: Duration) -> bool {
        let peer = self.0.peers.read().get(&to).cloned();
        peer.is_some_and(|peer| peer.probe(by, timeout).is_ok())
    }

    /// The lanes that peers have opened for teams.
    pub(crate) fn lanes(&self) -> &Lanes {
        &self.0.lanes
    }

    /// Requests trims of idle memory soon, for example because a client with much of it has left.
    pub fn tidy(&self) {
        self.0.looks.store(LOOKS, Ordering::Relaxed);
    }

    /// Allocates memory of `length` bytes to be appended to.
    ///
    /// # Errors
    /// No memory is available.
    pub fn buffer(&self, length: usize) -> io::Result<Filling> {
        Ok(Filling::new(self.0.pool.take(length)?, length))
    }

    /// Allocates memory of `length` bytes for random access.
    ///
    /// # Errors
    /// No memory is available.
    pub fn memory(&self, length: usize) -> io::Result<SharedMemory> {
        Ok(SharedMemory::new(self.0.pool.take(length)?, length))
    }

    /// Returns metrics: bytes received and sent so far, and messages that wait to be taken.
    pub fn traffic(&self) -> (u64, u64, usize) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (load(&self.0.bytes_in), load(&self.0.bytes_out), self.0.inbox.waiting())
    }

    /// Closes the listeners.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::Relaxed);
        self.0.inbox.close();
        self.0.peers.read().values().for_each(|peer| peer.give_up());
        for address in &self.0.addresses {
            drop(Socket::connect(address));
            if let Some(path) = address.strip_prefix("unix:") {
                drop(std::fs::remove_file(path));
            }
        }
    }

    fn copy(&self, bytes: &[u8]) -> io::Result<Payload> {
        let block = self.0.pool.take(bytes.len())?;
        // SAFETY: the block is new, so no other reference exists.
        unsafe { block.slice_mut(0, bytes.len()) }.copy_from_slice(bytes);
        Ok(Payload::of_block(Arc::new(block), bytes.len()))
    }
}

fn out_of_memory(bytes: usize, error: &io::Error) -> Status {
    Status::new(
        Code::ResourceExhausted,
        format!("no memory for a message of {bytes} bytes: {error}"),
    )
}

impl Inner {
    fn send(
        &self,
        to: HostId,
        channel: Channel,
        tag: TransferTag,
        bytes: &[u8],
    ) -> Result<(), Status> {
        let is_large = bytes.len() >= INLINE_BYTES && channel != Channel::INSIDE;
        let turns = if is_large { self.turns.get(channel.0 as usize - 1) } else { None };
        let mut turn = turns.map(FairMutex::lock);
        self.bytes_out.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.to_peer(to, |peer| peer.send(channel, tag, bytes, || drop(turn.take())))
    }

    fn replace_peer(&self, host: HostId, first_tag: TransferTag, addresses: Vec<String>) {
        let peer = Peer::new(host, first_tag, self.credentials.clone(), addresses);
        let before = self.peers.write().insert(host, Arc::new(peer));
        before.inspect(|peer| peer.give_up());
    }

    fn to_peer(
        &self,
        to: HostId,
        send: impl FnOnce(&Arc<Peer>) -> io::Result<()>,
    ) -> Result<(), Status> {
        let peer = self.peers.read().get(&to).cloned().ok_or_else(|| self.gone(to))?;
        send(&peer).map_err(|error| {
            Status::new(Code::Unavailable, format!("sending to host {to} failed: {error}"))
        })
    }

    /// Registers a connection that has not authenticated; closes the oldest if there are too many.
    fn meet(&self, stranger: Arc<Socket>) {
        let mut strangers = self.strangers.lock();
        strangers.push_back(stranger);
        if strangers.len() > STRANGERS_LIMIT
            && let Some(oldest) = strangers.pop_front()
        {
            oldest.shut_down();
        }
    }

    /// Unregisters a connection that has authenticated or ended.
    fn know(&self, known: &Arc<Socket>) {
        self.strangers.lock().retain(|stranger| !Arc::ptr_eq(stranger, known));
    }

    /// Delivers a message of a peer, unless that process of it was lost: its receiver has an error.
    fn arrive_from(self: &Arc<Self>, from: HostId, tag: TransferTag, outcome: ReceiveResult) {
        if !self.is_of_earlier(tag, from) {
            self.arrive(tag, outcome);
        }
    }

    /// Delivers a message to the inbox, and relays it where that was requested.
    fn arrive(self: &Arc<Self>, tag: TransferTag, outcome: ReceiveResult) {
        let mut open = self.relays.open.lock();
        let wanted = open.remove(&tag);
        // Delivered under the lock: a concurrent `relay` sees either the message or its absence.
        self.inbox.deliver(tag, outcome.clone());
        drop(open);
        for relay in wanted.into_iter().flatten() {
            pass_on(self, relay, outcome.clone());
        }
    }
}

/// Trims idle memory periodically until the data plane is closed or dropped.
fn tidy(inner: &Weak<Inner>) {
    for turn in 1_u32.. {
        std::thread::sleep(SOON);
        let Some(inner) = inner.upgrade() else { return };
        if inner.closed.load(Ordering::Relaxed) {
            return;
        }
        let asked = inner.looks.load(Ordering::Relaxed);
        inner.looks.store(asked.saturating_sub(1), Ordering::Relaxed);
        if asked == 0 && !turn.is_multiple_of(SELDOM) {
            continue;
        }
        inner.pool.tidy();
        let peers: Vec<_> = inner.peers.read().values().cloned().collect();
        for peer in peers {
            if let Err(error) = peer.tidy() {
                tracing::debug!(%error, "a peer did not hear of segments that are gone");
            }
        }
    }
}

#[cfg(test)]
mod tests;
