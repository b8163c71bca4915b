//! Discrete-event simulation: the virtual clock, the event queue, and the modelled clients, hosts and
//! devices.

mod devices;
mod hosts;

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BufferId, Bytes, ClientId, DeviceId, ExecutableId, HostId, Nanos, TransferTag};
use control::{Config, Controller, Effect, Event, Reply, Request};
use ir::{ArraySpec, DType, Dims, Partition, Sharding};
use protocol::Command;
use rustc_hash::FxHashMap;
use smallvec::smallvec;
use topology::{Cluster, IslandSpec};

use crate::client::{ClientWork, SimClient};
use crate::costs::SimCosts;
use crate::host::{SimHost, Then, Todo};
use crate::modelled;
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
                let info = modelled::host_info(number, island.devices_per_host, None, 0);
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
            stream: 0,
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
