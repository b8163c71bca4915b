//! Discrete-event simulation: the virtual clock, the event queue, and the modelled clients, hosts and
//! devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{
    BufferId, Bytes, Channel, ClientId, DeviceId, ExecutableId, HostId, Nanos, TransferTag,
};
use control::{Config, Controller, Effect, Event, Reply, Request};
use fabric::{Cluster, IslandSpec};
use ir::{ArraySpec, DType, Dims, Partition, Sharding};
use protocol::{
    Acknowledge, Command, Compiled, GivenGroup, GroupCollective, HostReply, MadeGroup, PeerMessage,
    RelayHop, Report,
};
use rustc_hash::FxHashMap;
use smallvec::smallvec;

use crate::binding::RunOf;
use crate::client::{ClientWork, SimClient};
use crate::costs::SimCosts;
use crate::host::{Given, Onward, SimHost, Then, Todo, UNFINISHED_LAUNCHES};
use crate::modelled::{self, read_program};
use crate::queue::EventQueue;

/// Retry interval of a client under back-pressure.
const RETRY: Nanos = Nanos(200_000);

/// A span of one computation on the devices of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimSpan {
    /// Client that launched it.
    pub client: ClientId,
    /// Host.
    pub host: HostId,
    /// Start time.
    pub start: Nanos,
    /// End time.
    pub end: Nanos,
}

/// Metrics of a dispatch simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct DispatchReport {
    /// Number of computations of each client that finished after the warm-up.
    pub computations: Vec<u64>,
    /// Length of the measured interval.
    pub measured: Nanos,
    /// Computations on the first host's devices.
    pub spans: Vec<SimSpan>,
    /// Time the controller was busy after the warm-up.
    pub controller_busy: Nanos,
    /// Number of simulation events processed.
    pub events: u64,
}

#[derive(Debug)]
enum SimEvent {
    ClientTurn(usize),
    Arrives(Event),
    AtHost(HostId, Command),
    HostTurn(HostId),
    Ended(BufferId),
    Message(HostId, TransferTag, Bytes),
}

#[derive(Debug)]
struct Running {
    client: SimClient,
    executable: u64,
    array: u64,
    next_request: u64,
    done: u64,
}

#[derive(Debug)]
struct GangState {
    /// Hosts whose devices have reached this gang's launch.
    there: Vec<HostId>,
    start: Nanos,
}

/// The simulated system: a controller, its hosts and its clients.
pub struct Simulation {
    controller: Controller,
    costs: SimCosts,
    now: Nanos,
    controller_free: Nanos,
    controller_busy: Nanos,
    queue: EventQueue<SimEvent>,
    hosts: Vec<SimHost>,
    clients: Vec<Running>,
    /// Computation time of each program, and the number of hosts it runs on.
    programs: FxHashMap<ExecutableId, (Nanos, u32)>,
    gangs: FxHashMap<BufferId, GangState>,
    replies: Vec<(ClientId, u64, Result<Reply, base::Status>)>,
    warm_up: Nanos,
    spans: Vec<SimSpan>,
    events: u64,
}

impl Simulation {
    /// Brings up the islands and connects the clients, which compile their programs.
    ///
    /// # Panics
    /// Panics if the controller rejects a client's request, which would be a defect.
    pub fn new(
        islands: &[IslandSpec],
        clients: Vec<SimClient>,
        costs: SimCosts,
        config: Config,
    ) -> Self {
        let cluster = Cluster::new(islands);
        let hosts = cluster.hosts().iter().map(|_| SimHost::default()).collect();
        let mut simulation = Self {
            controller: Controller::new(cluster, config),
            costs,
            now: Nanos(0),
            controller_free: Nanos(0),
            controller_busy: Nanos(0),
            queue: EventQueue::new(),
            hosts,
            clients: Vec::new(),
            programs: FxHashMap::default(),
            gangs: FxHashMap::default(),
            replies: Vec::new(),
            warm_up: Nanos(0),
            spans: Vec::new(),
            events: 0,
        };
        simulation.bring_up(islands);
        for client in clients {
            simulation.add_client(client);
        }
        simulation
    }

    fn bring_up(&mut self, islands: &[IslandSpec]) {
        let mut number = 0;
        for island in islands {
            for _ in 0..island.hosts {
                let info = modelled::host_info(number, island.devices_per_host, None);
                self.tell(Event::HostJoined { host: HostId(number), info });
                number += 1;
            }
        }
        self.settle();
    }

    /// Connects a client, compiles its program and creates its first array.
    fn add_client(&mut self, client: SimClient) {
        let id = ClientId(self.clients.len() as u64 + 1);
        self.tell(Event::ClientJoined { client: id, share: client.share });
        let devices: Arc<[DeviceId]> =
            self.controller.cluster().devices().map(|device| device.id).collect();
        let request = self.compile_request(&client, &devices);
        self.tell(Event::Request { client: id, id: 0, request });
        self.settle();
        let executable = match self.take_reply(id, 0) {
            Ok(Reply::Compiled { executable, .. }) => executable,
            other => panic!("a modelled program was not compiled: {other:?}"),
        };
        let place = match client.work {
            ClientWork::Pipeline(_) => self.stage_devices(0),
            _ => devices,
        };
        let spec = scalar(place);
        let shards = (0..spec.sharding.devices.len() as u32).collect();
        let upload = control::PutShard {
            positions: shards,
            upload: 1,
            dims: Dims::new(),
            byte_strides: None,
        };
        let data = bytes::Bytes::from_static(&[0; 4]);
        self.tell(Event::UploadArrived { client: id, upload: 1, data });
        let request = Request::Put { array: 1, spec, shards: vec![upload] };
        self.tell(Event::Request { client: id, id: 1, request });
        self.settle();
        let made = self.take_reply(id, 1);
        assert!(made.is_ok(), "a modelled array was not made: {made:?}");
        self.clients.push(Running { client, executable, array: 1, next_request: 2, done: 0 });
    }

    /// Returns the devices of a pipeline stage: those of one host.
    fn stage_devices(&self, stage: u32) -> Arc<[DeviceId]> {
        let cluster = self.controller.cluster();
        let host = HostId(stage % cluster.hosts().len() as u32);
        cluster.devices().filter(|device| device.host == host).map(|device| device.id).collect()
    }

    fn compile_request(&self, client: &SimClient, devices: &Arc<[DeviceId]>) -> Request {
        let hosts = self.controller.cluster().hosts().len() as u32;
        let collective = self.costs.collective_over(hosts);
        let one = client.computation + collective;
        let compile = |time: Nanos| Request::Compile {
            program: time.0.to_string().into_bytes(),
            options: Vec::new(),
            devices: devices.clone(),
            grid: (1, devices.len() as u32),
        };
        let program = |text: String| Request::CompileProgram {
            program: text.into_bytes(),
            options: Vec::new(),
            devices: devices.clone(),
        };
        let list = |devices: &[DeviceId]| {
            devices.iter().map(|device| device.0.to_string()).collect::<Vec<_>>().join(",")
        };
        match client.work {
            ClientWork::OpByOp => compile(one),
            ClientWork::Fused(count) => compile(Nanos(one.0 * u64::from(count))),
            ClientWork::Chained(count) => {
                let kind = format!("float32[] on [{}]", list(devices));
                let nodes: String = (0..count)
                    .map(|n| format!("node %{}: {kind} = call @f (%{n})\n", n + 1))
                    .collect();
                let head = format!("program @{}\nfunction @f\ninput %0: {kind}\n", one.0);
                program(format!("{head}{nodes}return (%{count})\n"))
            }
            ClientWork::Pipeline(count) => {
                let local = client.computation + self.costs.collective_over(1);
                let mut text = format!("program @{}\n", local.0);
                for stage in 0..count {
                    text += &format!("function @f{stage}\n");
                }
                let kind = |stage| format!("float32[] on [{}]", list(&self.stage_devices(stage)));
                text += &format!("input %0: {}\n", kind(0));
                let mut value = 0;
                for stage in 0..count {
                    let kind = kind(stage);
                    if stage > 0 {
                        text += &format!("node %{}: {kind} = move (%{value})\n", value + 1);
                        value += 1;
                    }
                    text += &format!("node %{}: {kind} = call @f{stage} (%{value})\n", value + 1);
                    value += 1;
                }
                program(text + &format!("return (%{value})\n"))
            }
        }
    }

    /// Runs all clients.
    ///
    /// # Arguments
    /// - `warm_up`: computations that finish within this time are not counted.
    /// - `measured`: length of the measured interval that follows.
    pub fn run(&mut self, warm_up: Nanos, measured: Nanos) -> DispatchReport {
        let begin = self.now;
        self.warm_up = begin + warm_up;
        let end = self.warm_up + measured;
        for client in 0..self.clients.len() {
            let offset = Nanos(client as u64 * 1_000);
            self.at(begin + offset, SimEvent::ClientTurn(client));
        }
        let mut busy_before = self.controller_busy;
        let mut warm = false;
        while let Some(when) = self.queue.next_time().filter(|&when| when <= end) {
            if !warm && when > self.warm_up {
                warm = true;
                busy_before = self.controller_busy;
            }
            self.step();
        }
        DispatchReport {
            computations: self.clients.iter().map(|client| client.done).collect(),
            measured,
            spans: std::mem::take(&mut self.spans),
            controller_busy: self.controller_busy.since(busy_before),
            events: self.events,
        }
    }

    // Time

    fn at(&mut self, when: Nanos, what: SimEvent) {
        self.queue.push(when, what);
    }

    fn tell(&mut self, event: Event) {
        self.at(self.now, SimEvent::Arrives(event));
    }

    fn step(&mut self) {
        let Some((when, what)) = self.queue.pop() else { return };
        self.now = when;
        self.events += 1;
        match what {
            SimEvent::ClientTurn(client) => self.client_turn(client),
            SimEvent::Arrives(event) => self.control(event),
            SimEvent::AtHost(host, command) => {
                self.hosts[host.0 as usize].queue.push_back(Todo::Command(command));
                self.wake(host);
            }
            SimEvent::HostTurn(host) => self.host_turn(host),
            SimEvent::Ended(gang) => self.ended(gang),
            SimEvent::Message(host, tag, size) => {
                for onward in self.hosts[host.0 as usize].arrive(tag, size) {
                    self.then(host, Then { onward, size });
                }
                self.wake(host);
            }
        }
    }

    /// Processes events until the event queue is empty.
    fn settle(&mut self) {
        while self.queue.next_time().is_some() {
            self.step();
        }
    }

    // Controller

    /// Models the controller's service time: it handles events one at a time, each at its cost.
    fn control(&mut self, event: Event) {
        let start = self.controller_free.max(self.now);
        let base = match &event {
            Event::Host { .. } => self.costs.report,
            _ => self.costs.request,
        };
        let effects = self.controller.handle(start, event);
        let mut when = start + base;
        for effect in effects {
            match effect {
                Effect::ToHost { host, command } => {
                    when += self.costs.command;
                    self.note_program(&command);
                    let arrives = when + self.costs.network;
                    self.at(arrives, SimEvent::AtHost(host, command));
                }
                Effect::Reply { client, id, result } => self.replies.push((client, id, result)),
                // Of hosts that fail, which none does here.
                Effect::Heartbeat(_)
                | Effect::StopHost(_)
                | Effect::RestartIsland(_)
                | Effect::Acknowledge { .. }
                | Effect::LosePeer { .. } => {}
            }
        }
        self.controller_busy += when.since(start);
        self.controller_free = when;
    }

    fn note_program(&mut self, command: &Command) {
        if let Command::Compile { executable, program, .. } = command {
            let time = std::str::from_utf8(program).ok().and_then(|text| text.parse().ok());
            let entry = self.programs.entry(*executable);
            entry.or_insert((Nanos(time.unwrap_or(0)), 0)).1 += 1;
        }
    }

    fn take_reply(&mut self, client: ClientId, id: u64) -> Result<Reply, base::Status> {
        let position = self.replies.iter().position(|reply| (reply.0, reply.1) == (client, id));
        self.replies.swap_remove(position.expect("the controller answers every request")).2
    }

    // Clients

    fn client_turn(&mut self, index: usize) {
        let id = ClientId(index as u64 + 1);
        self.replies.clear();
        // Back-pressure: the client retries while its queue is congested or the controller is behind.
        let behind = self.controller_free.since(self.now) > RETRY;
        if behind || self.controller.is_congested(id) {
            return self.at(self.now + RETRY, SimEvent::ClientTurn(index));
        }
        let running = &mut self.clients[index];
        // A pipeline's result is on its last stage, so each call starts from the first array.
        let is_pipeline = matches!(running.client.work, ClientWork::Pipeline(_));
        let from = if is_pipeline { 1 } else { running.array };
        let (executable, made) = (running.executable, running.array + 1);
        running.array += 1;
        let request = running.next_request;
        running.next_request += 2;
        let execute = Request::Execute {
            executable,
            args: smallvec![from],
            results: smallvec![made],
            keep: smallvec![],
            status: None,
            devices: Vec::new(),
        };
        let arrives = self.now + self.costs.client + self.costs.network;
        let event =
            |id: ClientId, number, request| Event::Request { client: id, id: number, request };
        self.at(arrives, SimEvent::Arrives(event(id, request, execute)));
        let destruct = Request::Destruct { arrays: vec![if is_pipeline { made } else { from }] };
        self.at(arrives, SimEvent::Arrives(event(id, request + 1, destruct)));
        self.at(self.now + self.costs.client, SimEvent::ClientTurn(index));
    }

    // Hosts

    fn wake(&mut self, id: HostId) {
        let host = &mut self.hosts[id.0 as usize];
        if !host.awake && !host.queue.is_empty() {
            host.awake = true;
            let when = host.free_at.max(self.now);
            self.at(when, SimEvent::HostTurn(id));
        }
    }

    fn host_turn(&mut self, id: HostId) {
        let host = &mut self.hosts[id.0 as usize];
        host.awake = false;
        let Some(todo) = host.queue.pop_front() else { return };
        match self.do_next(id, &todo) {
            Some(cost) => self.hosts[id.0 as usize].free_at = self.now + cost,
            // The event that it waits for wakes the host again.
            None => return self.hosts[id.0 as usize].queue.push_front(todo),
        }
        self.wake(id);
    }

    /// Executes one queue entry and returns its cost, or `None` if it must wait.
    fn do_next(&mut self, id: HostId, todo: &Todo) -> Option<Nanos> {
        match todo {
            Todo::Command(command) => self.command(id, command),
            Todo::EndOfRun { acknowledge } => {
                self.acknowledge(id, *acknowledge);
                Some(Nanos(0))
            }
            Todo::Step { program, index, run } => {
                let steps = self.hosts[id.0 as usize].programs[program].clone();
                self.run_step(id, &steps[*index as usize], run)
            }
        }
    }

    fn command(&mut self, id: HostId, command: &Command) -> Option<Nanos> {
        match command {
            Command::Launch {
                previous,
                sequence,
                acknowledge,
                executable,
                args,
                first_result,
                results,
                client,
                ..
            } => {
                self.launch(id, *executable, args, *first_result, *results, *client)?;
                self.check_order(id, *previous, *sequence);
                self.acknowledge(id, *acknowledge);
                Some(self.costs.launch)
            }
            Command::RunProgram {
                previous,
                sequence,
                acknowledge,
                executable,
                steps,
                args,
                first_buffer,
                first_tag,
                client,
                ..
            } => {
                self.check_order(id, *previous, *sequence);
                let run = Arc::new(RunOf {
                    args: args.clone(),
                    first_buffer: *first_buffer,
                    first_tag: *first_tag,
                    client: *client,
                });
                let host = &mut self.hosts[id.0 as usize];
                host.queue.push_front(Todo::EndOfRun { acknowledge: *acknowledge });
                for index in steps.clone().rev() {
                    host.queue.push_front(Todo::Step {
                        program: *executable,
                        index,
                        run: run.clone(),
                    });
                }
                Some(self.costs.step)
            }
            Command::Compile { ticket, .. } => {
                let reply = HostReply::ProgramCompiled { compiled: Box::new(compiled()) };
                self.report(id, Report::CommandDone { ticket: *ticket, reply });
                Some(self.costs.step)
            }
            Command::ReadProgram { ticket, program } => {
                let reply = read_program(program);
                self.report(id, Report::CommandDone { ticket: *ticket, reply });
                Some(self.costs.step)
            }
            Command::LoadProgram { executable, steps } => {
                let host = &mut self.hosts[id.0 as usize];
                host.programs.insert(*executable, steps.clone());
                Some(self.costs.step)
            }
            Command::ReportEnd {} => {
                self.acknowledge(id, Acknowledge::Finished);
                Some(self.costs.step)
            }
            // Arrays that clients transfer themselves are modelled as arriving at once.
            Command::ReportArrival { buffer } => {
                self.report(id, Report::Arrived { buffer: *buffer });
                Some(self.costs.step)
            }
            _ => Some(self.costs.step),
        }
    }

    fn run_step(&mut self, id: HostId, step: &Command, run: &RunOf) -> Option<Nanos> {
        match step {
            Command::Launch { executable, args, first_result, results, .. } => {
                let args: Vec<BufferId> = args.iter().map(|&slot| run.buffer(slot)).collect();
                let first = run.buffer(*first_result);
                self.launch(id, *executable, &args, first, *results, run.client)?;
                Some(self.costs.launch)
            }
            Command::Send { source, pieces, .. } => {
                let source = run.buffer(*source);
                for piece in pieces {
                    let tag = TransferTag(piece.tag.0 + run.first_tag.0);
                    let onward = Onward { tag, to: piece.target, channel: piece.channel };
                    let size = Bytes(piece.region.elements() * 4);
                    self.send_after(id, source, Then { onward, size });
                }
                Some(self.costs.step)
            }
            Command::Relay { relays } => {
                self.relay(id, relays, run);
                Some(self.costs.step)
            }
            Command::Collective { given, made, targets, sources, .. }
            | Command::RowExchange { given, made, targets, sources, .. } => {
                self.exchange(id, step, (given, targets), (made, sources), run);
                Some(self.costs.step)
            }
            Command::Receive { buffer, shards, relays, .. } => {
                self.relay(id, relays, run);
                let pieces = shards.iter().flat_map(|shard| &shard.pieces);
                let tags = pieces.map(|piece| TransferTag(piece.tag.0 + run.first_tag.0));
                self.hosts[id.0 as usize].expect(&[run.buffer(*buffer)], tags);
                Some(self.costs.step)
            }
            _ => Some(self.costs.step),
        }
    }

    /// Relays messages: those that have arrived now, others on arrival.
    fn relay(&mut self, id: HostId, relays: &[RelayHop], run: &RunOf) {
        for relay in relays {
            let at = |tag: TransferTag| TransferTag(tag.0 + run.first_tag.0);
            let onward = Onward { tag: at(relay.onward), to: relay.target, channel: relay.channel };
            let host = &mut self.hosts[id.0 as usize];
            match host.early.get(&at(relay.tag)) {
                Some(&size) => self.then(id, Then { onward, size }),
                None => host.relays.entry(at(relay.tag)).or_default().push(onward),
            }
        }
    }

    /// Sends a message once its source buffer is computed.
    fn send_after(&mut self, id: HostId, source: BufferId, then: Then) {
        match self.hosts[id.0 as usize].computing.get_mut(&source) {
            Some(waiting) => waiting.push(then),
            None => self.then(id, then),
        }
    }

    /// Runs one host's part in a collective or row exchange.
    fn exchange(
        &mut self,
        id: HostId,
        step: &Command,
        (given, targets): (&[GivenGroup], &[PeerMessage]),
        (made, sources): (&[MadeGroup], &[PeerMessage]),
        run: &RunOf,
    ) {
        let tag = |tag: TransferTag| TransferTag(tag.0 + run.first_tag.0);
        if let Some(group) = given.first() {
            for PeerMessage { host, tag: message, shards } in targets {
                let bytes = exchanged(step, given, targets, shards.len() as u64);
                let size = Bytes(if *host == id { 0 } else { bytes });
                let onward = Onward { tag: tag(*message), to: *host, channel: Channel::INSIDE };
                self.send_after(id, run.buffer(group.buffers[0]), Then { onward, size });
            }
        }
        let made = made.iter().flat_map(|group| &group.values);
        let buffers: Vec<BufferId> = made.map(|value| run.buffer(value.buffer)).collect();
        if !buffers.is_empty() {
            let tags = sources.iter().map(|message| tag(message.tag));
            self.hosts[id.0 as usize].expect(&buffers, tags);
        }
    }

    /// Enqueues a launch on a host's devices; `None` if it must wait for a buffer or for queue space.
    fn launch(
        &mut self,
        id: HostId,
        executable: ExecutableId,
        args: &[BufferId],
        first_result: BufferId,
        results: u32,
        client: ClientId,
    ) -> Option<()> {
        let host = &mut self.hosts[id.0 as usize];
        if host.devices.len() >= UNFINISHED_LAUNCHES || args.iter().any(|&arg| host.is_missing(arg))
        {
            return None;
        }
        host.begun.get_or_insert(self.now);
        for result in 0..u64::from(results) {
            host.computing.insert(BufferId(first_result.0 + result), Vec::new());
        }
        let given = Given { gang: first_result, executable, client, results, report_since: None };
        host.devices.push_back(given);
        if host.devices.len() == 1 {
            self.come(id);
        }
        Some(())
    }

    fn check_order(&mut self, id: HostId, previous: u64, sequence: u64) {
        let host = &mut self.hosts[id.0 as usize];
        assert!(
            previous == host.last_launch && sequence > previous,
            "host {id} was given launch {sequence} after {previous}; its last was {}",
            host.last_launch
        );
        host.last_launch = sequence;
    }

    fn acknowledge(&mut self, id: HostId, acknowledge: Acknowledge) {
        let host = &mut self.hosts[id.0 as usize];
        match acknowledge {
            Acknowledge::No => {}
            Acknowledge::Enqueued => self.report(id, Report::Finished { busy: Nanos(0) }),
            Acknowledge::Finished => {
                let begun = host.begun.take().unwrap_or(self.now);
                match host.devices.back_mut() {
                    Some(given) => given.report_since = Some(begun),
                    None => self.report(id, Report::Finished { busy: self.now.since(begun) }),
                }
            }
        }
    }

    /// Marks that a host's devices have reached their next launch; the last host of a gang starts it.
    fn come(&mut self, id: HostId) {
        let Some(given) = self.hosts[id.0 as usize].devices.front() else { return };
        let (gang, executable) = (given.gang, given.executable);
        let (time, members) = self.programs[&executable];
        let start = self.now + self.costs.launch;
        let state = self.gangs.entry(gang);
        let state = state.or_insert_with(|| GangState { there: Vec::new(), start });
        state.there.push(id);
        state.start = state.start.max(start);
        if state.there.len() as u32 == members {
            let end = state.start + time;
            self.at(end, SimEvent::Ended(gang));
        }
    }

    fn ended(&mut self, gang: BufferId) {
        let state = self.gangs.remove(&gang).expect("a gang ends once");
        for (place, &id) in state.there.iter().enumerate() {
            let host = &mut self.hosts[id.0 as usize];
            let given = host.devices.pop_front().expect("devices end what they began");
            let end = self.now;
            let busy_from = given.report_since.map(|since| since.max(host.device_free_at));
            host.device_free_at =
                if given.report_since.is_some() { end } else { host.device_free_at };
            let mut next = Vec::new();
            for result in 0..u64::from(given.results) {
                next.extend(
                    host.computing.remove(&BufferId(gang.0 + result)).into_iter().flatten(),
                );
            }
            if place == 0 {
                self.count(&given, state.start, id);
            }
            if let Some(from) = busy_from {
                self.report(id, Report::Finished { busy: end.since(from) });
            }
            for then in next {
                self.then(id, then);
            }
            self.come(id);
            self.wake(id);
        }
    }

    fn count(&mut self, given: &Given, start: Nanos, host: HostId) {
        let running = &mut self.clients[given.client.0 as usize - 1];
        let per_launch = match running.client.work {
            ClientWork::Fused(count) => u64::from(count),
            _ => 1,
        };
        if self.now > self.warm_up {
            running.done += per_launch;
        }
        if host == HostId(0) {
            self.spans.push(SimSpan { client: given.client, host, start, end: self.now });
        }
    }

    fn then(&mut self, id: HostId, then: Then) {
        let Then { onward: Onward { tag, to, channel }, size } = then;
        let takes = Nanos((size.0 as f64 * self.per_byte(id, channel)) as u64);
        let free_at = self.hosts[id.0 as usize].channels_free_at.entry(channel).or_default();
        *free_at = (*free_at).max(self.now) + takes;
        let arrives = *free_at + self.costs.network;
        self.at(arrives, SimEvent::Message(to, tag, size));
    }

    /// Returns the transfer time per byte on a host's channel, in nanoseconds.
    fn per_byte(&self, host: HostId, channel: Channel) -> f64 {
        let cluster = self.controller.cluster();
        let island = cluster.host(host).and_then(|host| cluster.island(host.island));
        let number = channel.0.checked_sub(1);
        let rate = number.and_then(|number| island?.channels.get(number as usize));
        rate.map_or(self.costs.transfer_ns_per_byte, |rate| 8e9 / rate.0)
    }

    fn report(&mut self, host: HostId, report: Report) {
        let arrives = self.now + self.costs.network;
        self.at(arrives, SimEvent::Arrives(Event::Host { host, report }));
    }

    /// Returns each client's device time in consecutive windows; `spans` are those of the first host.
    pub fn windows(spans: &[SimSpan], window: Nanos) -> Vec<BTreeMap<ClientId, Nanos>> {
        let mut windows: Vec<BTreeMap<ClientId, Nanos>> = Vec::new();
        for span in spans {
            let index = (span.end.0 / window.0) as usize;
            windows.resize_with(windows.len().max(index + 1), BTreeMap::new);
            *windows[index].entry(span.client).or_default() += span.end.since(span.start);
        }
        windows
    }
}

fn scalar(devices: Arc<[DeviceId]>) -> ArraySpec {
    let sharding = Sharding { devices, memory: None, partition: Partition::Replicated };
    ArraySpec { dtype: DType::F32, dims: Dims::new(), sharding }
}

/// Returns the bytes that one host sends another, which holds `shards` shards.
///
/// Assumed: the data choose all target shards equally often.
fn exchanged(step: &Command, given: &[GivenGroup], targets: &[PeerMessage], shards: u64) -> u64 {
    let given: u64 = given.iter().map(|group| group.shards.len() as u64).sum();
    match *step {
        Command::Collective { kind, differing, groups, shard_bytes, .. } => {
            let held = given.min(u64::from(differing)) * shard_bytes.0;
            match kind {
                // A reduce-scatter pass and an all-gather pass.
                GroupCollective::Reduce => 2 * held / u64::from(groups),
                GroupCollective::Scatter => held / u64::from(groups),
                GroupCollective::Gather => held,
            }
        }
        Command::RowExchange { rows, choices, row_bytes, .. } => {
            let all: u64 = targets.iter().map(|message| message.shards.len() as u64).sum();
            given * u64::from(rows) * u64::from(choices) * shards / all * row_bytes.0
        }
        _ => 0,
    }
}

/// Returns the description of a program with one scalar parameter and one scalar result.
fn compiled() -> Compiled {
    modelled::compiled("modelled", DType::F32, &[], Partition::Replicated)
}
