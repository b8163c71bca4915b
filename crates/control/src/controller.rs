//! The controller's state machine: [`Controller::handle`] maps events to effects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{
    BufferId, Bytes, ClientId, Code, DeviceId, ExecutableId, HostId, IslandId, Nanos, Status,
    TransferTag,
};
use fabric::{Cluster, Device};
use ir::{ArraySpec, DType, Dims, Program, ProgramError, Sharding};
use protocol::{Command, CommandTicket};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::capture::Log;
use crate::clients::ClientState;
use crate::config::Config;
use crate::dataflow::{Assembling, Reading};
use crate::events::{Effect, Event, Handle, Reply, Request, RequestId};
use crate::islands::Removal;
use crate::liveness::Liveness;
use crate::migration::Migration;
use crate::plans::StepPlans;
use crate::programs::{CompileSource, Compiling, Executable, Purpose, Run};
use crate::reshard;
use crate::scheduler::GangScheduler;
use crate::segments::Segments;
use crate::slices::{Slices, virtual_devices};
use crate::submissions::{LaunchRequest, Out, TransferRole};
use crate::watchdog::Watchdog;
use protocol::{HostInfo, HostReply, PeerAddress, Report};

mod arrays;
mod capture;
mod checks;
mod dataflow;
mod executables;
mod islands;
mod losses;
mod migration;
mod overview;
mod quota;
mod renewal;
mod slices;
mod ticks;

/// What to do with the answers of hosts once all have arrived.
#[derive(Debug)]
pub(crate) enum Waiting {
    /// Every host must report these buffers ready.
    Ready(SmallVec<[BufferId; 8]>),
    /// The answer of the only host, the bytes of this buffer, is the client's answer.
    Read(BufferId),
    /// The answer of the only host is the client's answer.
    Answer,
    /// A program is being compiled.
    Compile(Compiling),
    /// A host parses a whole program.
    Program(Reading),
    /// A migrating client's arrays are being copied to the new physical devices.
    Moved,
}

/// A request that is waiting for answers of hosts.
#[derive(Debug)]
pub(crate) struct Pending {
    pub client: ClientId,
    pub request: RequestId,
    /// Hosts that have not answered yet.
    pub hosts: Vec<HostId>,
    pub error: Option<Status>,
    pub waiting: Waiting,
}

/// Incarnation of an island: how often it was lost. Arrays and programs of an earlier incarnation
/// are gone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Incarnation {
    count: u32,
    /// How the previous incarnation ended.
    lost: Option<Status>,
}

/// The single controller of all islands.
#[derive(Debug)]
pub struct Controller {
    pub(crate) cluster: Cluster,
    pub(crate) clients: FxHashMap<ClientId, ClientState>,
    pub(crate) scheduler: GangScheduler,
    pub(crate) effects: Vec<Effect>,
    pub(crate) completion_spec: Arc<ArraySpec>,
    /// Incarnation of each island, indexed by island id.
    pub(crate) incarnations: Vec<Incarnation>,
    /// Islands that were requested and whose hosts have not all joined.
    pub(crate) awaited: BTreeSet<IslandId>,
    pub(crate) removed: BTreeSet<IslandId>,
    /// Islands that are removed once no client uses them.
    pub(crate) removals: BTreeMap<IslandId, Removal>,
    /// Clients whose virtual devices are being migrated.
    pub(crate) migrations: BTreeMap<ClientId, Migration>,
    pub(crate) pending: FxHashMap<CommandTicket, Pending>,
    /// Whole programs whose functions are being compiled.
    pub(crate) assembling: FxHashMap<u64, Assembling>,
    /// Recorded operations of each client that is being captured.
    pub(crate) logs: FxHashMap<ClientId, Log>,
    pub(crate) captured: Vec<(ClientId, Result<Program, ProgramError>)>,
    pub(crate) slices: Slices,
    /// How whole programs are split into segments for the scheduler.
    pub(crate) segments: FxHashMap<ExecutableId, Segments>,
    pub(crate) plans: StepPlans,
    pub(crate) watchdog: Watchdog,
    pub(crate) liveness: Liveness,
    /// Clients whose backlog may have become shorter during this event.
    relieved: Vec<ClientId>,
    next_id: u64,
    pub(crate) now: Nanos,
    pub(crate) config: Config,
}

impl Controller {
    /// Creates a controller of these islands, whose hosts have not joined yet.
    pub fn new(cluster: Cluster, config: Config) -> Self {
        let scheduler = GangScheduler::new(&cluster, config.launch_window, config.dispatch);
        let incarnations = vec![Incarnation::default(); cluster.islands().len()];
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
            Event::ClientJoined { client, share } => {
                let virtual_devices = virtual_devices(&self.cluster);
                self.clients.insert(client, ClientState::new(virtual_devices));
                self.scheduler.accounts.open(client, share);
                if self.config.capture {
                    self.logs.insert(client, Log::default());
                }
            }
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

    pub(crate) fn next_id(&mut self) -> u64 {
        self.next_ids(1)
    }

    /// Reserves `count` consecutive numbers and returns the first.
    pub(crate) fn next_ids(&mut self, count: u64) -> u64 {
        let first = self.next_id;
        self.next_id += count;
        first
    }

    /// Marks numbers up to and including `last` as used.
    pub(crate) fn advance_ids(&mut self, last: u64) {
        self.next_id = self.next_id.max(last + 1);
    }

    pub(crate) fn next_tag(&mut self) -> TransferTag {
        TransferTag(self.next_id())
    }

    pub(crate) fn reply(&mut self, client: ClientId, id: RequestId, result: Result<Reply, Status>) {
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

    pub(crate) fn device(&self, device: DeviceId) -> &Device {
        self.cluster.device(device).expect("device ids are checked where they enter")
    }

    /// Hosts that own any of `devices`, in the order in which they first appear.
    pub(crate) fn hosts_of(&self, devices: &[DeviceId]) -> Arc<[HostId]> {
        reshard::hosts_of(&self.cluster, devices).into()
    }

    /// Returns the islands that hold `devices`, each with its current incarnation.
    pub(crate) fn islands_of(&self, devices: &[DeviceId]) -> Vec<(IslandId, u32)> {
        let mut islands: Vec<(IslandId, u32)> = Vec::new();
        for &device in devices {
            let island = self.device(device).island;
            if !islands.iter().any(|known| known.0 == island) {
                islands.push((island, self.incarnations[island.0 as usize].count));
            }
        }
        islands
    }

    /// Fails if a host of the island is lost, or if the island is still starting.
    pub(crate) fn check_island(&self, island: IslandId) -> Result<(), Status> {
        let hosts = &self.cluster.island(island).expect("islands are known").hosts;
        match hosts.iter().find_map(|&host| self.scheduler.host(host).lost.as_ref()) {
            Some(error) => Err(error.clone()),
            None if self.awaited.contains(&island) => {
                let message = format!("island {island} is starting; try again once it is up");
                // Users of Pathways retry after DATA_LOSS only, not after other codes.
                let was_lost = self.incarnations[island.0 as usize].lost.is_some();
                let code = if was_lost { Code::DataLoss } else { Code::Unavailable };
                Err(Status::new(code, message))
            }
            None => Ok(()),
        }
    }

    /// Returns whether one of these incarnations was lost and all of the islands are up again.
    pub(crate) fn was_lost(&self, islands: &[(IslandId, u32)]) -> bool {
        let ended = |&(island, count): &(IslandId, u32)| {
            let known = &self.incarnations[island.0 as usize];
            known.count != count && known.lost.is_some()
        };
        islands.iter().any(ended) && islands.iter().all(|known| self.check_island(known.0).is_ok())
    }

    /// Fails if an island is lost, or was lost since this incarnation, even if it is up again.
    pub(crate) fn check_incarnations(&self, islands: &[(IslandId, u32)]) -> Result<(), Status> {
        for &(island, count) in islands {
            let known = &self.incarnations[island.0 as usize];
            match &known.lost {
                Some(error) if known.count != count => return Err(error.clone()),
                _ => self.check_island(island)?,
            }
        }
        Ok(())
    }

    /// Returns the state of the client that an event comes from.
    pub(crate) fn client(&mut self, client: ClientId) -> &mut ClientState {
        self.clients.get_mut(&client).expect("requests come from known clients")
    }

    /// Sends a command of a client to a host, after all its earlier ones.
    pub(crate) fn send(&mut self, client: ClientId, host: HostId, command: Command) {
        self.send_linked(client, host, command, TransferRole::None);
    }

    /// Sends a command that may be a part of a transfer between hosts.
    pub(crate) fn send_linked(
        &mut self,
        client: ClientId,
        host: HostId,
        command: Command,
        link: TransferRole,
    ) {
        let mut out = Out::new();
        self.scheduler.send(client, host, command, link, &mut out);
        self.flush_commands(out);
    }

    /// Sends a command to a host ahead of all queued commands of clients.
    pub(crate) fn send_now(&mut self, host: HostId, command: Command) {
        if self.scheduler.host(host).lost.is_none() {
            let mut out = Out::new();
            self.scheduler.memory.on_dispatch(host, command, &mut out);
            self.flush_commands(out);
        }
    }

    /// Submits launches that form one gang to the scheduler of their islands.
    pub(crate) fn submit(&mut self, wanted: LaunchRequest) {
        let mut out = Out::new();
        self.scheduler.submit(wanted, &mut out);
        self.flush_commands(out);
    }

    fn flush_commands(&mut self, out: Out) {
        for (host, command) in out {
            if let Command::FreeExecutable { executable: program } = command {
                self.scheduler.inputs.close(program); // all launches of it have been dispatched
            }
            self.effects.push(Effect::ToHost { host, command });
        }
    }

    /// Registers a request that `hosts` must answer.
    pub(crate) fn await_hosts(
        &mut self,
        client: ClientId,
        request: RequestId,
        hosts: &[HostId],
        waiting: Waiting,
    ) -> CommandTicket {
        let ticket = self.next_id();
        let hosts = hosts.to_vec();
        self.pending.insert(ticket, Pending { client, request, hosts, error: None, waiting });
        ticket
    }

    fn client_left(&mut self, client: ClientId) {
        let Some(mut state) = self.clients.remove(&client) else { return };
        self.forget_migration(client);
        self.finish_log(client);
        let mut out = Out::new();
        self.scheduler.drop_client(client, &mut out);
        self.flush_commands(out);
        let mut per_host: std::collections::BTreeMap<HostId, Vec<BufferId>> =
            std::collections::BTreeMap::new();
        let completions = std::mem::take(&mut state.completions);
        for buffer in state.buffers.into_values().chain(completions.into_values()) {
            for &host in buffer.hosts.iter() {
                per_host.entry(host).or_default().push(buffer.id);
            }
        }
        for (host, mut buffers) in per_host {
            buffers.sort_unstable();
            self.send(client, host, Command::Free { buffers });
        }
        let mut executables: Vec<_> = state.executables.into_values().collect();
        executables.sort_by_key(|executable| executable.id);
        for executable in executables {
            self.unload(client, &executable);
        }
        // Launches that had begun do not wait for batches of inputs that are no longer made.
        let mut out = Out::new();
        self.scheduler.dispatch(&mut out);
        self.flush_commands(out);
        self.release_all(client);
        for number in 0..self.cluster.hosts().len() as u32 {
            self.send_now(HostId(number), Command::TrimPool {});
        }
    }

    /// Checks that a host matches its island: its hosts share compiled programs and run collectives
    /// together.
    fn check_alike(&self, host: HostId, info: &HostInfo) -> Result<(), String> {
        let known = self.cluster.host(host).expect("the world lets known hosts in");
        let island = self.cluster.island(known.island).expect("islands are known");
        for &other in island.hosts.iter().filter(|&&other| other != host) {
            let Some(theirs) = &self.scheduler.host(other).info else { continue };
            let differs = |what: &str, mine: &str, their: &str| {
                format!(
                    "its {what} is {mine}, that of host {} is {their}; the hosts of an island \
                     must be alike",
                    self.cluster.host(other).expect("islands have known hosts").rank
                )
            };
            if theirs.jaxlib != info.jaxlib {
                return Err(differs("jaxlib", &info.jaxlib, &theirs.jaxlib));
            }
            if theirs.platform != info.platform {
                return Err(differs("platform", &info.platform, &theirs.platform));
            }
        }
        Ok(())
    }

    fn host_joined(&mut self, host: HostId, info: HostInfo) {
        if let Err(difference) = self.check_alike(host, &info) {
            return self.host_lost(host, &difference);
        }
        self.cluster.describe(host, &info.device_kind, &info.memories);
        self.scheduler.join(host, info);
        self.liveness.watch(host, self.now);
        let island = self.cluster.host(host).expect("the world lets known hosts in").island;
        self.island_joins(island);
        if self.scheduler.nobody_is_missing() {
            self.broadcast_peers();
        }
    }

    /// Sends every host the data-plane addresses of all its peers.
    fn broadcast_peers(&mut self) {
        let there: Vec<(HostId, IslandId, HostInfo)> = self
            .cluster
            .hosts()
            .iter()
            .filter(|peer| self.scheduler.host(peer.id).lost.is_none())
            .filter_map(|peer| {
                let info = self.scheduler.host(peer.id).info.clone()?;
                Some((peer.id, peer.island, info))
            })
            .collect();
        for (host, home, own) in &there {
            let address = |(peer, island, info): &(HostId, IslandId, HostInfo)| {
                let afar = island != home && !own.channels.is_empty() && !info.channels.is_empty();
                let address =
                    if afar { info.channels.join(",") } else { info.data_address.clone() };
                PeerAddress { host: *peer, address }
            };
            let peers = there.iter().map(address).collect();
            self.send_now(*host, Command::Peers { peers });
        }
    }

    fn report(&mut self, host: HostId, report: Report) {
        match report {
            Report::Finished { busy } => {
                let mut out = Out::new();
                self.scheduler.finished(host, busy, &mut out);
                self.flush_commands(out);
            }
            Report::CommandDone { ticket, reply } => self.done(host, ticket, Ok(reply)),
            Report::CommandFailed { ticket, error } => self.done(host, ticket, Err(error)),
            Report::BatchMade { input, end } => {
                let mut out = Out::new();
                self.scheduler.batch_made(host, input, end, &mut out);
                self.flush_commands(out);
            }
            Report::Arrived { buffer } => {
                let mut out = Out::new();
                self.scheduler.arrived(host, buffer, &mut out);
                self.flush_commands(out);
            }
            Report::InputLost { client, buffer, tag, error } => {
                self.input_lost(host, (client, buffer), tag, error);
            }
            Report::Moved { client, bytes } => self.scheduler.accounts.note_moved(client, bytes),
            Report::PlanProposed { executable, plan, script, predicted } => {
                self.adopt_plan(executable, plan, &script, predicted);
            }
            Report::OrderBroken { message } => self.host_lost(host, &message),
        }
    }

    fn done(&mut self, host: HostId, ticket: CommandTicket, result: Result<HostReply, Status>) {
        let Some(pending) = self.pending.get_mut(&ticket) else { return };
        pending.hosts.retain(|&waited| waited != host);
        let mut reply = HostReply::Success {};
        match result {
            Ok(HostReply::ProgramCompiled { compiled: found }) => {
                if let (Waiting::Compile(compiling), Some(input)) = (&pending.waiting, found.input)
                {
                    self.scheduler.inputs.open(input, compiling.id, &compiling.hosts);
                }
                if let Waiting::Compile(compiling) = &mut pending.waiting
                    && (compiling.compiled.is_none() || compiling.hosts[0] == host)
                {
                    compiling.compiled = Some(found);
                }
            }
            Ok(other) => reply = other,
            Err(error) => pending.error = pending.error.take().or(Some(error)),
        }
        if !pending.hosts.is_empty() {
            return;
        }
        let mut pending = self.pending.remove(&ticket).expect("found above");
        let result = pending.error.take().map_or(Ok(reply), Err);
        self.conclude(pending, result);
    }

    /// Passes a compiled program, or why compilation failed, to whatever requested it.
    pub(crate) fn compiled(
        &mut self,
        client: ClientId,
        purpose: Purpose,
        made: Result<Executable, Status>,
    ) {
        match (purpose, made) {
            (Purpose::Request(request), Ok(made)) => self.name_executable(client, request, made),
            (Purpose::Request(request), Err(error)) => self.reply(client, request, Err(error)),
            (Purpose::Function(program, index), Ok(made)) => {
                self.function_compiled(program, index, made);
            }
            (Purpose::Function(program, _), Err(error)) => self.function_failed(program, error),
            (Purpose::Move(number, name), made) => {
                self.program_moved(client, (number, name), made);
            }
            (Purpose::Renewal(number), made) => self.renewed(client, number, made),
        }
    }

    /// Completes a request: all hosts have answered, or one has failed.
    fn conclude(&mut self, pending: Pending, result: Result<HostReply, Status>) {
        let Pending { client, request, waiting, .. } = pending;
        match (waiting, result) {
            (Waiting::Compile(compiling), Err(mut error)) => {
                self.free_executable(client, compiling.id, &compiling.hosts);
                compiling.explain(&mut error);
                self.compiled(client, compiling.purpose, Err(error));
            }
            (Waiting::Compile(compiling), Ok(_)) => {
                self.compiled(client, compiling.purpose, Ok(compiling.finish(&self.cluster)));
            }
            (Waiting::Moved, result) => self.arrays_moved(client, result.err()),
            (
                Waiting::Program(reading),
                Ok(HostReply::ProgramRead { text, batched, functions }),
            ) => {
                let texts = (&*text, &*batched);
                if let Err(error) =
                    self.compile_functions(client, request, &reading, texts, functions)
                {
                    self.reply(client, request, Err(error));
                }
            }
            (_, Ok(reply)) => {
                if let HostReply::ShardData { data } = &reply {
                    self.scheduler.accounts.note_moved(client, Bytes(data.len() as u64));
                }
                self.reply(client, request, Ok(answer(reply)));
            }
            (_, Err(error)) => self.reply(client, request, Err(error)),
        }
    }

    /// Accepts a request; it joins the client's backlog if it must wait for an earlier one.
    fn arrived(&mut self, client: ClientId, id: RequestId, request: Request) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let in_order = !matches!(
            request,
            Request::Compile { .. }
                | Request::CompileProgram { .. }
                | Request::Metadata { .. }
                | Request::CostAnalysis { .. }
                | Request::FunctionMemory { .. }
                | Request::FunctionCosts { .. }
                | Request::ProgramText { .. }
                | Request::ExecutableIsDeleted { .. }
        );
        let is_held = self.migrations.contains_key(&client);
        let waits = !state.backlog.is_empty() || state.must_wait(&request);
        if is_held || in_order && waits {
            state.backlog.push_back((id, request));
        } else {
            self.perform(client, id, request);
        }
    }

    pub(crate) fn drain_backlog(&mut self, client: ClientId) {
        while let Some(state) = self.clients.get_mut(&client) {
            match state.backlog.front() {
                Some((_, request))
                    if !state.must_wait(request)
                        && state.renewal.is_none()
                        && !self.migrations.contains_key(&client) => {}
                _ => return,
            }
            let (id, request) = state.backlog.pop_front().expect("seen above");
            self.perform(client, id, request);
        }
    }

    /// Performs a request and replies, at once or when hosts have answered.
    fn perform(&mut self, client: ClientId, id: RequestId, request: Request) {
        let done = |result: Result<(), Status>| result.map(|()| Some(Reply::Done));
        let result = match request {
            Request::Execute { executable, .. } if self.can_renew(client, executable) => {
                return self.renew(client, (id, request), executable);
            }
            Request::Execute { executable, args, results, keep, status, devices } => {
                let run = Run { executable, args, results, keep, status, devices };
                let result = self.execute(client, &run);
                if let Err(error) = &result {
                    self.poison_results(client, &run, error);
                }
                result.map(Some)
            }
            Request::Compile { program, options, devices, grid } => {
                let (program, options) = (Arc::new(program), Arc::new(options));
                let source = CompileSource { program, options, devices, grid };
                self.compile(client, source, Purpose::Request(id)).map(|()| None)
            }
            Request::CompileProgram { program, options, devices } => {
                let reading = Reading { options, devices };
                self.compile_program(client, id, program, reading).map(|()| None)
            }
            Request::Metadata { executable } => self.clients[&client]
                .executable(executable)
                .map(|found| Some(Reply::Metadata(found.compiled.clone(), found.outputs.clone()))),
            Request::CostAnalysis { executable } => self.costs(client, executable).map(Some),
            Request::FunctionMemory { executable } => {
                self.function_memory(client, executable).map(Some)
            }
            Request::FunctionCosts { executable } => {
                self.function_costs(client, executable).map(Some)
            }
            Request::ProgramText { executable } => {
                let question = |ticket, executable| Command::ProgramText { ticket, executable };
                self.ask_about(client, id, executable, question).map(|()| None)
            }
            Request::Completion { status } => self.completion(client, id, status).map(|()| None),
            Request::ExecutableIsDeleted { executable } => {
                Ok(Some(Reply::Deleted(self.clients[&client].executable(executable).is_err())))
            }
            Request::DeleteExecutable { executable }
            | Request::DestructExecutable { executable } => {
                self.destruct_executable(client, executable);
                Ok(Some(Reply::Done))
            }
            Request::Put { array, spec, shards } => done(self.put(client, array, spec, shards)),
            Request::MakeErrors { arrays, specs, error } => {
                let specs = specs.into_iter().map(Arc::new).collect();
                self.poison(client, &arrays, specs, &error);
                Ok(Some(Reply::Done))
            }
            Request::Assemble { array, spec, parts } => {
                done(self.assemble(client, array, spec, &parts))
            }
            Request::Disassemble { array, results } => {
                done(self.disassemble(client, array, &results))
            }
            Request::FullyReplicatedShard { array, result } => {
                done(self.disassemble(client, array, &[result]))
            }
            Request::Remap { arrays, results, specs, sources, semantics } => {
                done(self.remap(client, &arrays, &results, specs, &sources, semantics))
            }
            Request::Bitcast { arrays, results, specs, semantics } => {
                done(self.bitcast(client, &arrays, &results, specs, semantics))
            }
            Request::Copy { arrays, results, devices, memory, semantics } => {
                done(self.copy(client, &arrays, &results, devices, memory, semantics))
            }
            Request::Reshard { arrays, results, specs, semantics } => {
                done(self.reshard(client, &arrays, &results, specs, semantics))
            }
            Request::Read { array, byte_strides } => {
                self.read(client, id, array, byte_strides).map(|()| None)
            }
            Request::CheckReady { arrays } => self.check_ready(client, id, &arrays),
            Request::Delete { arrays } => {
                self.delete(client, &arrays);
                Ok(Some(Reply::Done))
            }
            Request::IsDeleted { array } => self.clients[&client]
                .buffer(array)
                .map(|buffer| Some(Reply::Deleted(buffer.is_deleted()))),
            Request::Destruct { arrays } => done(self.destruct(client, &arrays)),
        };
        match result {
            Ok(Some(reply)) => self.reply(client, id, Ok(reply)),
            Ok(None) => {}
            Err(error) => self.reply(client, id, Err(error)),
        }
    }
}

/// Converts a host's answer into a client's reply.
fn answer(reply: HostReply) -> Reply {
    match reply {
        HostReply::Success {}
        | HostReply::ShardDataSent {}
        | HostReply::ProgramCompiled { .. }
        | HostReply::ProgramRead { .. } => Reply::Done,
        HostReply::ShardData { data } => Reply::Data(data),
        HostReply::OptimisedText { text } => Reply::Text(text),
    }
}
