//! The controller's state machine: [`Controller::handle`] maps events to effects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{ClientId, DeviceId, ExecutableId, HostId, IslandId, Nanos, Status, TransferTag};
use ir::{ArraySpec, DType, Dims, Program, ProgramError, Sharding};
use protocol::{CommandTicket, HostInfo};
use rustc_hash::FxHashMap;
use topology::{Cluster, Device};

use crate::capture::Log;
use crate::clients::ClientState;
use crate::config::Config;
use crate::dataflow::Assembling;
use crate::events::{Effect, Event, Handle, Reply, RequestId};
use crate::incarnations::Incarnations;
use crate::islands::Removal;
use crate::liveness::Liveness;
use crate::migration::Migration;
use crate::pending::Pending;
use crate::plans::StepPlans;
use crate::reshard;
use crate::scheduler::GangScheduler;
use crate::segments::Segments;
use crate::slices::Slices;
use crate::watchdog::Watchdog;

mod answers;
mod arrays;
mod capture;
mod checks;
mod clients;
mod colocated;
mod commands;
mod dataflow;
mod executables;
mod hosts;
mod incarnations;
mod islands;
mod losses;
mod migration;
mod overview;
mod partition;
mod quota;
mod renewal;
mod requests;
mod resharding;
mod slices;
mod ticks;

/// Outcome of a request: the reply, or none yet if hosts must answer first.
type Outcome = Result<Option<Reply>, Status>;

/// The single controller of all islands.
#[derive(Debug)]
pub struct Controller {
    cluster: Cluster,
    clients: FxHashMap<ClientId, ClientState>,
    scheduler: GangScheduler,
    effects: Vec<Effect>,
    completion_spec: Arc<ArraySpec>,
    incarnations: Incarnations,
    /// Islands that were requested and whose hosts have not all joined.
    awaited: BTreeSet<IslandId>,
    removed: BTreeSet<IslandId>,
    /// Islands that are removed once no client uses them.
    removals: BTreeMap<IslandId, Removal>,
    /// Clients whose virtual devices are being migrated.
    migrations: BTreeMap<ClientId, Migration>,
    pending: FxHashMap<CommandTicket, Pending>,
    /// Whole programs whose functions are being compiled.
    assembling: FxHashMap<u64, Assembling>,
    /// Recorded operations of each client that is being captured.
    logs: FxHashMap<ClientId, Log>,
    captured: Vec<(ClientId, Result<Program, ProgramError>)>,
    slices: Slices,
    /// How whole programs are split into segments for the scheduler.
    segments: FxHashMap<ExecutableId, Segments>,
    plans: StepPlans,
    watchdog: Watchdog,
    liveness: Liveness,
    /// Clients whose backlog may have become shorter during this event.
    relieved: Vec<ClientId>,
    next_id: u64,
    now: Nanos,
    config: Config,
}

impl Controller {
    /// Creates a controller of these islands, whose hosts have not joined yet.
    pub fn new(cluster: Cluster, config: Config) -> Self {
        let scheduler = GangScheduler::new(&cluster, config.launch_window, config.dispatch);
        let incarnations = Incarnations::new(cluster.islands().len());
        let completion_spec = Arc::new(ArraySpec {
            dtype: DType::Token,
            dims: Dims::new(),
            sharding: Sharding::single(DeviceId(0), None),
        });
        Self {
            cluster,
            clients: FxHashMap::default(),
            scheduler,
            effects: Vec::new(),
            completion_spec,
            incarnations,
            awaited: BTreeSet::new(),
            removed: BTreeSet::new(),
            removals: BTreeMap::new(),
            migrations: BTreeMap::new(),
            pending: FxHashMap::default(),
            assembling: FxHashMap::default(),
            logs: FxHashMap::default(),
            slices: Slices::default(),
            captured: Vec::new(),
            segments: FxHashMap::default(),
            plans: StepPlans::default(),
            watchdog: Watchdog::default(),
            liveness: Liveness::new(config.heartbeat_limit(), config.tick_interval()),
            relieved: Vec::new(),
            next_id: 1,
            now: Nanos(0),
            config,
        }
    }

    /// Handles one event and returns its effects, in order.
    pub fn handle(&mut self, now: Nanos, event: Event) -> Vec<Effect> {
        self.now = now;
        match event {
            Event::ClientJoined { client, share } => self.client_joined(client, share),
            Event::ClientLeft(client) => self.client_left(client),
            Event::Request { client, id, request } => self.arrived(client, id, request),
            Event::UploadArrived { client, upload, data } => {
                if let Some(state) = self.clients.get_mut(&client) {
                    state.uploads.insert(upload, data);
                    self.drain_backlog(client);
                }
            }
            Event::UploadDropped { client, upload } => {
                if let Some(state) = self.clients.get_mut(&client) {
                    state.uploads.remove(&upload);
                }
            }
            Event::ReadFetched { client, read } => {
                if let Some(state) = self.clients.get_mut(&client) {
                    state.reads.remove(read);
                    self.drain_backlog(client);
                }
            }
            Event::Tick => self.tick(),
            Event::HeartbeatAnswered(host) => self.liveness.answered(host, now),
            Event::HeartbeatFailed { host, cause } => self.liveness.unreachable(host, cause),
            Event::HostJoined { host, info } => self.host_joined(host, info),
            Event::HostLost { host, cause } => self.host_lost(host, &cause),
            Event::Host { host, report } => self.report(host, report),
        }
        while let Some(client) = self.relieved.pop() {
            self.drain_backlog(client);
        }
        self.advance_migrations();
        std::mem::take(&mut self.effects)
    }

    /// Returns the settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the islands, hosts and devices.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns the description that a host sent when it joined.
    pub fn host_info(&self, host: HostId) -> Option<&HostInfo> {
        self.scheduler.host(host).info.as_ref()
    }

    /// Returns whether all hosts have joined.
    pub fn is_up(&self) -> bool {
        self.scheduler.all_joined()
    }

    /// Returns whether the oldest waiting request of this client needs this upload.
    pub fn awaits_upload(&self, client: ClientId, upload: Handle) -> bool {
        self.clients.get(&client).is_some_and(|state| state.awaits_upload(upload))
    }

    /// Returns whether back-pressure applies: requests of this client are not read until hosts
    /// catch up.
    pub fn is_congested(&self, client: ClientId) -> bool {
        let is_held = self.clients.get(&client).is_some_and(|state| state.renewal.is_some());
        is_held
            || self.migrations.contains_key(&client)
            || self.scheduler.queued(client) > self.config.queue_limit
    }

    fn next_id(&mut self) -> u64 {
        self.next_ids(1)
    }

    /// Reserves `count` consecutive numbers and returns the first.
    fn next_ids(&mut self, count: u64) -> u64 {
        let first = self.next_id;
        self.next_id += count;
        first
    }

    /// Marks numbers up to and including `last` as used.
    fn advance_ids(&mut self, last: u64) {
        self.next_id = self.next_id.max(last + 1);
    }

    fn next_tag(&mut self) -> TransferTag {
        TransferTag(self.next_id())
    }

    fn reply(&mut self, client: ClientId, id: RequestId, result: Result<Reply, Status>) {
        if result.is_err()
            && let Some(state) = self.clients.get_mut(&client)
        {
            state.reads.remove(id); // there is nothing to fetch
            if !state.backlog.is_empty() {
                self.relieved.push(client);
            }
        }
        self.effects.push(Effect::Reply { client, id, result });
    }

    fn device(&self, device: DeviceId) -> &Device {
        self.cluster.device(device).expect("device ids are checked where they enter")
    }

    /// Hosts that own any of `devices`, in the order in which they first appear.
    fn hosts_of(&self, devices: &[DeviceId]) -> Arc<[HostId]> {
        reshard::hosts_of(&self.cluster, devices).into()
    }

    /// Returns the state of the client that an event comes from.
    fn client(&mut self, client: ClientId) -> &mut ClientState {
        self.clients.get_mut(&client).expect("requests come from known clients")
    }
}
