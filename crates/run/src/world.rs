//! The real world of the controller: feeds events in and applies effects.
//!
//! One lock guards the controller; effects are written to the hosts' buffers while it is held, so hosts
//! receive commands in the order in which the controller issued them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use base::{Channel, ClientId, Code, DeviceId, HostId, IslandId, Nanos, Status, TransferTag};
use control::{Controller, Effect, Event, Overview, Reply, RequestId, Share, Slice, SliceRequest};
use parking_lot::{Mutex, RwLock};
use protocol::{Command, HostCall, HostReply, PeerAddress, Report, UnreachablePeer};
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::time::MissedTickBehavior;
use topology::{Cluster, IslandSpec};
use transport::RemotePeer;

use crate::callbacks::{Callbacks, Caller};
use crate::channel::{CONTROLLER, DataPlane};
use crate::commands::CommandQueue;
use crate::queues::Queues;
use crate::reachability::Reachability;
use crate::readbacks::Readbacks;

/// Uploads and replies below this size, in bytes, travel in commands and reports.
pub const INLINE_BYTES: usize = 64 << 10;
/// Bytes of commands queued for one host above which back-pressure applies to clients.
const BACKLOG_BYTES: usize = 8 << 20;
/// Time within which a host that joins is reached.
const REACHING: Duration = Duration::from_secs(5);
/// Most failures of messages between hosts that are on their way.
const FAILURES_MAX: usize = 1024;
/// Time after a message to a host has failed within which the end of its connection says why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Channel for the replies to one client.
pub type Replies = mpsc::UnboundedSender<(RequestId, Result<Reply, Status>)>;

/// A connected client.
struct Session {
    replies: Replies,
    origin: ClientOrigin,
    since: Instant,
}

/// Where a client is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientOrigin {
    /// Its process id, if it is a local process of this user.
    pub process: Option<u32>,
    /// Its token and machine, if it came through the gateway.
    pub peer: Option<RemotePeer>,
}

/// A client's connection: where it is, and its age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientConnection {
    /// The client.
    pub client: ClientId,
    /// Where it is.
    pub origin: ClientOrigin,
    /// Time since it connected.
    pub age: Duration,
}

struct State {
    controller: Controller,
    sessions: HashMap<ClientId, Session>,
    next_client: u64,
}

/// The real world.
pub struct World {
    weak: Weak<Self>,
    state: Mutex<State>,
    /// Command queue by host; a reconnected host has a new queue.
    outgoing: RwLock<Vec<Arc<CommandQueue>>>,
    data: DataPlane,
    started: Instant,
    relieved: Notify,
    up: watch::Sender<bool>,
    /// Uploads by host: one that cannot be reached delays those of no other.
    uploads: Queues<HostId, Errand>,
    /// Small messages by host, which overtake uploads.
    notices: Queues<HostId, Errand>,
    /// Failures of messages of other hosts, by host.
    failures: Queues<HostId, Errand>,
    failures_under_way: Arc<Semaphore>,
    stops: mpsc::UnboundedSender<ProcessAction>,
    reachability: Reachability,
    callbacks: Callbacks,
    readbacks: Readbacks,
}

/// An action on host processes, for the launcher that started them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessAction {
    /// End a process.
    Host {
        /// The host.
        host: HostId,
        /// Its process id, if it has connected; another process may be that host by now.
        process: Option<u32>,
    },
    /// Restart an island whose processes were ended.
    Restart(IslandId),
}

/// Sends a message.
type SendNow = Box<dyn FnOnce(&DataPlane) -> Result<(), Status> + Send>;

/// A message to a host by the data plane.
struct Errand {
    /// The host's queue when the message was made: as long as it is, the host has not been replaced.
    outgoing: Arc<CommandQueue>,
    send: SendNow,
}

impl World {
    /// Creates the world of `controller`, to which no host has connected yet. The second value yields
    /// actions on host processes.
    pub fn new(
        controller: Controller,
        data: DataPlane,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<ProcessAction>) {
        let hosts = controller.cluster().hosts();
        let outgoing = RwLock::new(hosts.iter().map(|_| Arc::default()).collect());
        let (stops, stopped) = mpsc::unbounded_channel();
        let state = State { controller, sessions: HashMap::new(), next_client: 1 };
        let world = |weak: &Weak<Self>| Self {
            weak: weak.clone(),
            state: Mutex::new(state),
            outgoing,
            data,
            started: Instant::now(),
            relieved: Notify::new(),
            up: watch::Sender::new(false),
            uploads: Queues::default(),
            notices: Queues::default(),
            failures: Queues::default(),
            failures_under_way: Arc::new(Semaphore::new(FAILURES_MAX)),
            stops,
            reachability: Reachability::default(),
            callbacks: Callbacks::default(),
            readbacks: Readbacks::default(),
        };
        (Arc::new_cyclic(world), stopped)
    }

    /// Returns the time since the world was created.
    pub fn now(&self) -> Nanos {
        Nanos(self.started.elapsed().as_nanos() as u64)
    }

    /// Returns the controller's endpoint of the data plane.
    pub fn data(&self) -> &DataPlane {
        &self.data
    }

    /// Returns a summary of the controller's state.
    pub fn overview(&self) -> Overview {
        self.state.lock().controller.overview()
    }

    /// Reads the controller's state under its lock.
    pub fn inspect<T>(&self, look: impl FnOnce(&Controller) -> T) -> T {
        look(&self.state.lock().controller)
    }

    /// Waits until all hosts have joined.
    pub async fn until_up(&self) {
        let mut up = self.up.subscribe();
        drop(up.wait_for(|&up| up).await);
    }

    /// Registers a client whose replies go to `replies`.
    pub fn join_client(&self, replies: Replies, share: Share, origin: ClientOrigin) -> ClientId {
        let mut state = self.state.lock();
        let client = ClientId(state.next_client);
        state.next_client += 1;
        state.sessions.insert(client, Session { replies, origin, since: Instant::now() });
        self.step(&mut state, Event::ClientJoined { client, share });
        client
    }

    /// Unregisters a client.
    pub fn leave_client(&self, client: ClientId) {
        let mut state = self.state.lock();
        state.sessions.remove(&client);
        self.step(&mut state, Event::ClientLeft(client));
        drop(state);
        self.end_calls(self.callbacks.leave(client));
        self.readbacks.leave(client);
        self.data.tidy();
    }

    /// Returns the connected clients, ordered by number.
    pub fn connections(&self) -> Vec<ClientConnection> {
        let state = self.state.lock();
        let mut found: Vec<ClientConnection> = state
            .sessions
            .iter()
            .map(|(&client, session)| ClientConnection {
                client,
                origin: session.origin,
                age: session.since.elapsed(),
            })
            .collect();
        found.sort_by_key(|connection| connection.client);
        found
    }

    /// Allocates a slice for a client.
    ///
    /// # Errors
    /// No devices are available for it.
    pub fn allocate(&self, client: ClientId, wanted: &SliceRequest) -> Result<Slice, Status> {
        self.state.lock().controller.allocate(client, wanted)
    }

    /// Releases a slice of a client.
    pub fn release(&self, client: ClientId, devices: &[DeviceId]) {
        self.state.lock().controller.release(client, devices);
    }

    /// Adds an island; its hosts may connect from now on.
    pub fn add_island(&self, spec: &IslandSpec) -> IslandId {
        let mut state = self.state.lock();
        let id = state.controller.add_island(spec);
        let hosts = state.controller.cluster().hosts().len();
        self.outgoing.write().resize_with(hosts, Arc::default);
        id
    }

    /// Starts the removal of an island.
    ///
    /// # Errors
    /// Slices on it cannot be migrated (the error names them), or there is no such island.
    pub fn remove_island(&self, island: IslandId, force: bool) -> Result<(), Status> {
        let mut state = self.state.lock();
        for effect in state.controller.remove_island(island, force)? {
            self.apply(&mut state, effect);
        }
        Ok(())
    }

    /// Returns the outcome of an island's removal; `None` while it is in progress.
    pub fn removal(&self, island: IslandId) -> Option<Result<(), Status>> {
        self.state.lock().controller.removal(island)
    }

    /// Reports that an island's hosts cannot be started.
    pub fn fail_island(&self, island: IslandId, cause: &str) {
        let mut state = self.state.lock();
        let hosts = state.controller.cluster().island(island).map(|known| known.hosts.clone());
        for host in hosts.unwrap_or_default() {
            self.step(&mut state, Event::HostLost { host, cause: cause.to_owned() });
        }
    }

    /// Handles one event.
    pub fn submit(&self, event: Event) {
        let mut state = self.state.lock();
        self.step(&mut state, event);
    }

    /// Waits while back-pressure applies to a client (admission of its next requests).
    pub async fn wait_for_backpressure(&self, client: ClientId) {
        loop {
            let notified = self.relieved.notified();
            if !self.is_congested(client) {
                return;
            }
            drop(tokio::time::timeout(Duration::from_millis(20), notified).await);
        }
    }

    /// Whether back-pressure applies to a client.
    pub fn is_congested(&self, client: ClientId) -> bool {
        self.state.lock().controller.is_congested(client)
            || self.outgoing.read().iter().any(|out| out.frames.lock().len() > BACKLOG_BYTES)
    }

    pub(crate) fn outgoing(&self, host: HostId) -> Arc<CommandQueue> {
        self.outgoing.read()[host.0 as usize].clone()
    }

    /// Registers a new connection of a host, and where messages reach it; later commands go to it and
    /// not to the previous connection.
    pub(crate) fn open_outgoing(&self, host: HostId, address: &str) -> Option<Arc<CommandQueue>> {
        let fresh: Arc<CommandQueue> = Arc::default();
        let mut outgoing = self.outgoing.write();
        *outgoing.get_mut(host.0 as usize)? = fresh.clone();
        self.data.add_peer(host, address); // under the lock: one does not go without the other
        drop(outgoing);
        self.reachability.forget(host);
        Some(fresh)
    }

    /// Checks that the controller reaches a host that joins; blocks.
    pub(crate) fn try_host(&self, host: HostId) {
        let error = self.data.reach(host, REACHING).err().map(|error| error.to_string());
        self.reachability.tried(host, error);
    }

    /// Notes what a host cannot reach, unless another connection has replaced the one that it came by.
    pub(crate) fn peers_tried(
        &self,
        host: HostId,
        outgoing: &Arc<CommandQueue>,
        unreachable: Vec<UnreachablePeer>,
    ) {
        if self.is_current(host, outgoing) {
            self.reachability.peers_tried(host, unreachable);
        }
    }

    /// Returns which of these hosts and their peers do not reach each other, and which the controller
    /// does not reach (the host itself as peer); `None` as long as that is not known.
    pub fn unreachable(&self, hosts: &[HostId]) -> Option<Vec<(HostId, HostId, String)>> {
        let found = self.reachability.unreachable(hosts)?;
        Some(found.into_iter().map(|(host, peer)| (host, peer.host, peer.error)).collect())
    }

    /// Handles a report of a host, unless another connection has replaced the one that it came by.
    pub(crate) fn report(&self, host: HostId, outgoing: &Arc<CommandQueue>, report: Report) {
        if self.is_current(host, outgoing) {
            self.submit(Event::Host { host, report });
        }
    }

    /// Handles the end of a host's connection, unless another connection has replaced it.
    pub(crate) fn lose_host(&self, host: HostId, outgoing: &Arc<CommandQueue>, cause: String) {
        if self.is_current(host, outgoing) {
            self.submit(Event::HostLost { host, cause });
        }
    }

    /// Whether no other connection has replaced this one of a host.
    fn is_current(&self, host: HostId, outgoing: &Arc<CommandQueue>) -> bool {
        Arc::ptr_eq(outgoing, &self.outgoing(host))
    }

    /// Handles the outcome of a heartbeat, unless another connection has replaced the host's.
    pub(crate) fn heartbeat(
        &self,
        host: HostId,
        outgoing: &Arc<CommandQueue>,
        outcome: std::io::Result<()>,
    ) {
        if !self.is_current(host, outgoing) {
            return;
        }
        match outcome {
            Ok(()) => self.submit(Event::HeartbeatAnswered(host)),
            // A frozen host is silent; one that is cut off cannot be reached.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => {
                self.submit(Event::HeartbeatFailed { host, cause: error.to_string() });
            }
        }
    }

    /// Sends tick events to the controller for as long as it exists.
    pub async fn tick(world: Weak<Self>) {
        let Some(interval) = world.upgrade().map(|world| world.tick_interval()) else { return };
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(world) = world.upgrade() else { return };
            world.submit(Event::Tick);
        }
    }

    fn tick_interval(&self) -> Duration {
        Duration::from_nanos(self.inspect(|controller| controller.config().tick_interval()).0)
    }

    /// Takes a reply whose bytes travel on the data plane.
    pub(crate) fn data_sent(self: &Arc<Self>, host: HostId, ticket: u64) {
        let report = match self.data.take(TransferTag(ticket), Duration::from_secs(60)) {
            Ok(payload) => {
                let data = bytes::Bytes::from_owner(payload);
                Report::CommandDone { ticket, reply: HostReply::ShardData { data } }
            }
            Err(error) => Report::CommandFailed { ticket, error },
        };
        self.submit(Event::Host { host, report });
    }

    /// Returns the streams on which clients take the calls of hosts.
    pub fn callbacks(&self) -> &Callbacks {
        &self.callbacks
    }

    /// Returns the clients' streams for small arrays.
    pub fn readbacks(&self) -> &Readbacks {
        &self.readbacks
    }

    /// Takes the call of a host to a client's function; waits for operands that travel on the data
    /// plane.
    pub(crate) fn call_client(
        &self,
        (host, outgoing): (HostId, &Arc<CommandQueue>),
        HostCall { client, function, tag, result_bytes, operands }: HostCall,
    ) {
        let caller = Caller { host, outgoing: outgoing.clone(), tag };
        let operands = match operands {
            Some(operands) => Ok(operands),
            None => self.data.take(tag, Duration::from_secs(60)).map(bytes::Bytes::from_owner),
        };
        let called = operands.and_then(|operands| {
            self.callbacks.call(client, function, operands, caller.clone(), result_bytes)
        });
        if let Err(error) = called {
            self.answer_call(caller, Err(error));
        }
    }

    /// Passes a client's answer to the host that waits for it; an answer that no host waits for is
    /// dropped.
    pub fn answer(&self, client: ClientId, call: u64, answer: bytes::Bytes) {
        if let Some(caller) = self.callbacks.take(client, call) {
            self.answer_call(caller, Ok(answer));
        }
    }

    /// Ends a client's stream for calls: those that are not answered fail.
    pub fn close_calls(&self, client: ClientId, stream: u64) {
        self.end_calls(self.callbacks.close(client, stream));
    }

    fn end_calls(&self, callers: Vec<Caller>) {
        for caller in callers {
            let text = "the client's process has ended while it ran a host callback";
            self.answer_call(caller, Err(Status::new(Code::Unavailable, text)));
        }
    }

    fn answer_call(&self, caller: Caller, answer: Result<bytes::Bytes, Status>) {
        let Caller { host, outgoing, tag } = caller;
        if !self.is_current(host, &outgoing) {
            return; // another process is that host now
        }
        let is_small = answer.as_ref().is_ok_and(|answer| answer.len() < INLINE_BYTES);
        let queue = if is_small || answer.is_err() { &self.notices } else { &self.uploads };
        self.send(queue, host, move |data| match answer {
            Ok(answer) => data
                .send(host, Channel::INSIDE, tag, &answer)
                .or_else(|error| data.send_failure(host, tag, &error)),
            Err(error) => data.send_failure(host, tag, &error),
        });
    }

    fn step(&self, state: &mut State, event: Event) {
        let eases = matches!(
            event,
            Event::Host { report: Report::Finished { .. } | Report::BatchMade { .. }, .. }
        );
        let effects = state.controller.handle(self.now(), event);
        for effect in effects {
            self.apply(state, effect);
        }
        if eases {
            self.relieved.notify_waiters();
        }
        if !*self.up.borrow() && state.controller.is_up() {
            self.up.send_replace(true);
        }
    }

    fn apply(&self, state: &mut State, effect: Effect) {
        match effect {
            Effect::ToHost { host, command } => {
                self.write(state.controller.cluster(), host, &command);
            }
            Effect::Reply { client, id, result } => {
                if let Some(session) = state.sessions.get(&client) {
                    // Ignored: a session that is closing needs no replies.
                    drop(session.replies.send((id, result)));
                }
            }
            Effect::Heartbeat(host) => {
                if let Some(ask) = &*self.outgoing(host).heartbeat.lock() {
                    let _ = ask.try_send(()); // full: the last one is still unanswered
                }
            }
            Effect::StopHost(host) => {
                let lost = Status::new(Code::DataLoss, format!("host {host} is lost"));
                self.data.lose_peer(host, TransferTag(0), &lost);
                let outgoing = self.outgoing(host);
                *outgoing.closed.lock() = true;
                outgoing.heartbeat.lock().take();
                outgoing.written.notify_one();
                // Ignore the end of its connection from now on, even after the island has restarted.
                self.outgoing.write()[host.0 as usize] = Arc::default();
                let process = state.controller.host_info(host).map(|info| info.process);
                let _ = self.stops.send(ProcessAction::Host { host, process });
            }
            Effect::RestartIsland(island) => {
                let _ = self.stops.send(ProcessAction::Restart(island));
            }
            // By the data plane: the host's interpreter may be blocked on the very messages that a loss
            // fails.
            Effect::Acknowledge { host, tag } => {
                self.send(&self.notices, host, move |data| {
                    data.send(host, Channel::INSIDE, tag, &[])
                });
            }
            Effect::LosePeer { host, lost, tag, error } => {
                self.send(&self.notices, host, move |data| {
                    data.send_loss(host, (lost, tag), &error)
                });
            }
        }
    }

    /// Reports to a host that a message to it has failed, which its sender does not reach; waits while
    /// too many such reports are on their way.
    pub(crate) async fn undelivered(
        &self,
        outgoing: &Arc<CommandQueue>,
        from: HostId,
        (to, tag): (HostId, TransferTag),
        error: Status,
    ) {
        if !self.is_current(from, outgoing) || self.outgoing.read().len() <= to.0 as usize {
            return;
        }
        let permit = self.failures_under_way.clone().acquire_owned().await;
        self.send(&self.failures, to, move |data| {
            let _until_it_is_sent = permit;
            data.send_failure(to, tag, &error)
        });
    }

    /// Queues a message to the process that a host is now, if it is one. One that cannot be reached by
    /// messages is lost, even if it answers heartbeats.
    fn send(
        &self,
        queue: &Queues<HostId, Errand>,
        host: HostId,
        send: impl FnOnce(&DataPlane) -> Result<(), Status> + Send + 'static,
    ) {
        let errand = Errand { outgoing: self.outgoing(host), send: Box::new(send) };
        let world = self.weak.clone();
        queue.submit(host, errand, move |Errand { outgoing, send }| {
            let is_there =
                |world: &Self| world.is_current(host, &outgoing) && world.data.is_peer(host);
            let current = || world.upgrade().filter(|world| is_there(world));
            let Some(data) = current().map(|world| world.data.clone()) else { return };
            if let Err(error) = send(&data) {
                std::thread::sleep(LAST_WORDS);
                current().inspect(|world| world.lose_host(host, &outgoing, error.message));
            }
        });
    }

    fn write(&self, cluster: &Cluster, host: HostId, command: &Command) {
        if let Command::Put { shards, .. } = command {
            for source in shards.iter().filter(|shard| shard.data.len() >= INLINE_BYTES) {
                let (tag, bytes) = (source.tag, source.data.clone());
                self.send(&self.uploads, host, move |data| {
                    // One that the host refuses, such as for want of memory, fails alone.
                    data.send(host, Channel::INSIDE, tag, &bytes)
                        .or_else(|error| data.send_failure(host, tag, &error))
                });
            }
        }
        let outgoing = self.outgoing(host);
        let mut frames = outgoing.frames.lock();
        let was_empty = frames.is_empty();
        match command {
            Command::Peers { peers, first_tag } => {
                let mut peers = peers.clone();
                let address = self.data.address().to_owned();
                let own = PeerAddress { host: CONTROLLER, address, first_tag: TransferTag(0) };
                peers.push(own);
                frames.push(
                    &Command::Peers { peers, first_tag: *first_tag },
                    host,
                    cluster,
                    INLINE_BYTES,
                );
            }
            other => frames.push(other, host, cluster, INLINE_BYTES),
        }
        drop(frames);
        if was_empty {
            outgoing.written.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
