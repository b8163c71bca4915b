//! Islands that are removed and added again, by seed, over modelled hosts that execute commands on
//! values: checks that nothing is lost and no state leaks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use base::{BufferId, ClientId, DeviceId, ExecutableId, HostId, IslandId, Random, TransferTag};
use control::{
    Config, Controller, Effect, Event, Handle, IslandState, PutShard, Reply, Request, Share,
    SliceRequest,
};
use ir::{ArraySpec, DType, Dims, Sharding};
use protocol::{Command, Compiled, HostReply, ReceivedShard, Report};
use smallvec::smallvec;
use topology::{Cluster, IslandSpec};

use crate::binding::RunOf;
use crate::modelled;

/// Elements of the arrays; two devices hold half of them each.
const ELEMENTS: i64 = 1 << 19;
const CLIENT: ClientId = ClientId(1);

/// A modelled host: every shard of an array is one number.
#[derive(Default)]
struct Host {
    is_there: bool,
    queue: VecDeque<Command>,
    arrays: BTreeMap<BufferId, Vec<i64>>,
    programs: BTreeMap<ExecutableId, Arc<Vec<Command>>>,
    functions: BTreeSet<ExecutableId>,
    messages: BTreeMap<TransferTag, i64>,
    reports: VecDeque<Report>,
}

struct World {
    controller: Controller,
    hosts: Vec<Host>,
    replies: BTreeMap<u64, Result<Reply, base::Status>>,
    random: Random,
    next_request: u64,
    next_handle: Handle,
    /// Messages relayed by hosts that do not use them.
    relayed: usize,
}

impl World {
    fn new(islands: &[IslandSpec], seed: u64) -> Self {
        let mut world = Self {
            controller: Controller::new(Cluster::new(islands), Config::default()),
            hosts: Vec::new(),
            replies: BTreeMap::new(),
            random: Random::of(&[seed]),
            next_request: 1,
            next_handle: 1,
            relayed: 0,
        };
        for island in 0..islands.len() as u32 {
            world.bring_up(IslandId(island));
        }
        world.tell(Event::ClientJoined { client: CLIENT, share: Share::default() });
        world
    }

    fn bring_up(&mut self, island: IslandId) {
        let hosts = self.controller.cluster().island(island).expect("it is known").hosts.clone();
        let all = self.controller.cluster().hosts().len();
        self.hosts.resize_with(all, Host::default);
        for host in hosts {
            self.hosts[host.0 as usize] = Host { is_there: true, ..Host::default() };
            let devices = self.controller.cluster().devices();
            let devices = devices.filter(|device| device.host == host).count() as u32;
            let info = modelled::host_info(host.0, devices, Some(1 << 20), 1);
            self.tell(Event::HostJoined { host, info });
        }
    }

    fn tell(&mut self, event: Event) {
        let effects = self.controller.handle(base::Nanos(0), event);
        self.carry_out(effects);
    }

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::ToHost { host, command } => {
                    self.hosts[host.0 as usize].queue.push_back(command);
                }
                Effect::Reply { id, result, .. } => drop(self.replies.insert(id, result)),
                Effect::StopHost(host) => self.hosts[host.0 as usize] = Host::default(),
                Effect::Heartbeat(_)
                | Effect::RestartIsland(_)
                | Effect::Acknowledge { .. }
                | Effect::LosePeer { .. } => {}
            }
        }
    }

    fn ask(&mut self, request: Request) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.tell(Event::Request { client: CLIENT, id, request });
        id
    }

    fn handle(&mut self) -> Handle {
        self.next_handle += 1;
        self.next_handle
    }

    /// Executes one event at one of the hosts; returns `false` if there is none.
    fn step(&mut self) -> bool {
        let busy: Vec<usize> = (0..self.hosts.len()).filter(|&host| self.can_act(host)).collect();
        if busy.is_empty() {
            return false;
        }
        let host = busy[self.random.below(busy.len() as u64) as usize];
        let has_reports = !self.hosts[host].reports.is_empty();
        if has_reports && (self.random.below(2) == 0 || !self.can_obey(host)) {
            let report = self.hosts[host].reports.pop_front().expect("seen above");
            self.tell(Event::Host { host: HostId(host as u32), report });
        } else {
            let command = self.hosts[host].queue.pop_front().expect("it can act");
            self.obey(host, &command);
        }
        true
    }

    fn settle(&mut self) {
        while self.step() {}
    }

    fn can_act(&self, host: usize) -> bool {
        !self.hosts[host].reports.is_empty() || self.can_obey(host)
    }

    /// Returns whether a host has a command whose inputs have arrived.
    fn can_obey(&self, host: usize) -> bool {
        match self.hosts[host].queue.front() {
            Some(Command::Receive { shards, .. }) => shards
                .iter()
                .flat_map(|shard| &shard.pieces)
                .all(|piece| self.hosts[host].messages.contains_key(&piece.tag)),
            Some(Command::Relay { relays }) => {
                relays.iter().all(|relay| self.hosts[host].messages.contains_key(&relay.tag))
            }
            other => other.is_some(),
        }
    }

    fn done(&mut self, host: usize, ticket: u64, reply: HostReply) {
        self.hosts[host].reports.push_back(Report::CommandDone { ticket, reply });
    }

    /// Executes a command.
    fn obey(&mut self, at: usize, command: &Command) {
        let host = &mut self.hosts[at];
        match command {
            Command::Put { buffer, shards, .. } => {
                let values = shards.iter().flat_map(|upload| {
                    let value = i64::from(upload.data[0]);
                    upload.positions.iter().map(move |_| value)
                });
                host.arrays.insert(*buffer, values.collect());
            }
            Command::Launch { executable, args, first_result, acknowledge, .. } => {
                assert!(host.functions.contains(executable), "{executable:?} is not on host {at}");
                let made = host.arrays[&args[0]].iter().map(|value| value + 1).collect();
                host.arrays.insert(*first_result, made);
                if *acknowledge != protocol::Acknowledge::No {
                    host.reports.push_back(Report::Finished { busy: base::Nanos(1000) });
                }
            }
            Command::RunProgram {
                executable,
                steps,
                args,
                first_buffer,
                first_tag,
                acknowledge,
                client,
                ..
            } => {
                let run = RunOf {
                    args: args.clone(),
                    first_buffer: *first_buffer,
                    first_tag: *first_tag,
                    client: *client,
                };
                let all = &host.programs[executable][steps.start as usize..steps.end as usize];
                let bound: Vec<Command> =
                    all.iter().map(|step| run.bind(step).expect("it is modelled")).collect();
                for step in bound.into_iter().rev() {
                    host.queue.push_front(step);
                }
                if *acknowledge != protocol::Acknowledge::No {
                    host.reports.push_back(Report::Finished { busy: base::Nanos(1000) });
                }
            }
            Command::AssembleShards { buffer, shards, .. } => {
                let values = shards.iter().map(|one| host.arrays[&one.source][one.shard as usize]);
                let values = values.collect();
                host.arrays.insert(*buffer, values);
            }
            Command::Copy { source, buffer, .. } => {
                let values = host.arrays[source].clone();
                host.arrays.insert(*buffer, values);
            }
            other => self.obey_transfer(at, other),
        }
    }

    fn obey_transfer(&mut self, at: usize, command: &Command) {
        let host = &mut self.hosts[at];
        match command {
            Command::Send { source, pieces, .. } => {
                let values = host.arrays[source].clone();
                for piece in pieces {
                    let to = &mut self.hosts[piece.target.0 as usize];
                    if to.is_there {
                        to.messages.insert(piece.tag, values[piece.shard as usize]);
                    }
                }
            }
            Command::Relay { relays } => {
                self.relayed += relays.len();
                for relay in relays {
                    let value = self.hosts[at].messages.remove(&relay.tag).expect("seen before");
                    self.hosts[relay.target.0 as usize].messages.insert(relay.onward, value);
                }
            }
            Command::Receive { buffer, shards, relays, .. } => {
                let mut onward = Vec::new();
                for relay in relays {
                    onward.push((relay.onward, relay.target, host.messages[&relay.tag]));
                }
                let mut values = BTreeMap::new();
                for ReceivedShard { positions, pieces } in shards {
                    let value = host.messages[&pieces[0].tag];
                    assert!(pieces.iter().all(|piece| host.messages[&piece.tag] == value));
                    values.extend(positions.iter().map(|&position| (position, value)));
                }
                let tags = shards.iter().flat_map(|shard| &shard.pieces).map(|piece| piece.tag);
                for tag in tags.collect::<BTreeSet<_>>() {
                    host.messages.remove(&tag);
                }
                host.arrays.insert(*buffer, values.into_values().collect());
                for (tag, to, value) in onward {
                    self.hosts[to.0 as usize].messages.insert(tag, value);
                }
            }
            other => self.obey_query(at, other),
        }
    }

    fn obey_query(&mut self, at: usize, command: &Command) {
        let host = &mut self.hosts[at];
        match command {
            Command::Read { ticket, buffer, .. } => {
                let data = host.arrays[buffer][0].to_le_bytes().to_vec();
                self.done(at, *ticket, HostReply::ShardData { data: data.into() });
            }
            Command::CheckReady { ticket, buffers } => {
                assert!(buffers.iter().all(|buffer| host.arrays.contains_key(buffer)));
                self.done(at, *ticket, HostReply::Success {});
            }
            Command::Free { buffers } | Command::Delete { buffers } => {
                buffers.iter().for_each(|buffer| drop(host.arrays.remove(buffer)));
            }
            Command::Compile { ticket, executable, .. } => {
                host.functions.insert(*executable);
                self.done(
                    at,
                    *ticket,
                    HostReply::ProgramCompiled { compiled: Box::new(compiled()) },
                );
            }
            Command::ReadProgram { ticket, program } => {
                let reply = modelled::read_program(program);
                self.done(at, *ticket, reply);
            }
            Command::LoadProgram { executable, steps } => {
                host.programs.insert(*executable, steps.clone());
            }
            Command::FreeExecutable { executable } => {
                host.functions.remove(executable);
                host.programs.remove(executable);
            }
            Command::ReportEnd {} => {
                host.reports.push_back(Report::Finished { busy: base::Nanos(0) });
            }
            Command::ReportArrival { buffer } => {
                assert!(host.arrays.contains_key(buffer));
                host.reports.push_back(Report::Arrived { buffer: *buffer });
            }
            Command::Peers { .. } | Command::EndClient { .. } => {}
            other => panic!("there is no model of {other:?}"),
        }
    }
}

/// A program that adds one to an array.
fn compiled() -> Compiled {
    modelled::compiled("add_one", DType::U8, &[ELEMENTS], modelled::halves())
}

fn halves(devices: &[DeviceId]) -> ArraySpec {
    let sharding =
        Sharding { devices: devices.into(), memory: None, partition: modelled::halves() };
    ArraySpec { dtype: DType::U8, dims: Dims::from_slice(&[ELEMENTS]), sharding }
}

/// A client on two slices, whose islands are removed while it runs.
struct User {
    slices: [Vec<DeviceId>; 2],
    add: [Handle; 2],
    program: Handle,
    /// An array on each slice, and its expected value.
    arrays: [(Handle, i64); 2],
}

impl User {
    fn new(world: &mut World) -> Self {
        let mut slices = Vec::new();
        let mut add = Vec::new();
        let mut arrays = Vec::new();
        for slice in 0..2_u8 {
            let wanted = SliceRequest { shape: vec![2], island: None, memory: None };
            let devices =
                world.controller.allocate(CLIENT, &wanted).expect("there is room").devices;
            let compile = Request::Compile {
                program: Vec::new(),
                options: Vec::new(),
                devices: devices.clone().into(),
                grid: (1, 2),
            };
            let asked = world.ask(compile);
            world.settle();
            let Some(Ok(Reply::Compiled { executable, .. })) = world.replies.remove(&asked) else {
                panic!("a program was not compiled")
            };
            add.push(executable);
            let array = world.handle();
            let put = |position, upload| PutShard {
                positions: vec![position],
                upload,
                dims: Dims::from_slice(&[ELEMENTS / 2]),
                byte_strides: None,
            };
            for upload in [1, 2] {
                let data = bytes::Bytes::from(vec![slice; ELEMENTS as usize / 2]);
                world.tell(Event::UploadArrived { client: CLIENT, upload, data });
            }
            let (spec, shards) = (halves(&devices), vec![put(0, 1), put(1, 2)]);
            world.ask(Request::Put { array, spec, shards });
            arrays.push((array, i64::from(slice)));
            slices.push(devices);
        }
        let slices: [Vec<DeviceId>; 2] = slices.try_into().expect("there are two");
        let both: Vec<DeviceId> = slices.iter().flatten().copied().collect();
        let kind = format!("uint8[{ELEMENTS}] tiled 2 on");
        let text = format!(
            "program @there_and_back\nfunction @f\nfunction @g\n\
             input %0: {kind} [0,1]\n\
             node %1: {kind} [0,1] = call @f (%0)\n\
             node %2: {kind} [2,3] = move (%1)\n\
             node %3: {kind} [2,3] = call @g (%2)\n\
             node %4: {kind} [0,1] = move (%3)\n\
             return (%4)\n"
        );
        let asked = world.ask(Request::CompileProgram {
            program: text.as_bytes().to_vec(),
            options: Vec::new(),
            devices: both.into(),
        });
        world.settle();
        let program = match world.replies.remove(&asked) {
            Some(Ok(Reply::Compiled { executable, .. })) => executable,
            other => panic!("a whole program was not compiled: {other:?}"),
        };
        let (add, arrays) = ([add[0], add[1]], [arrays[0], arrays[1]]);
        Self { slices, add, program, arrays }
    }

    /// Sends a request.
    fn act(&mut self, world: &mut World) {
        let slice = world.random.below(2) as usize;
        let made = world.handle();
        let (old, value) = self.arrays[slice];
        match world.random.below(4) {
            0 if slice == 0 => {
                self.execute(world, self.program, old, made);
                self.arrays[slice] = (made, value + 2);
            }
            1 => {
                // Transfers from one slice to the other.
                let to = 1 - slice;
                world.ask(Request::Reshard {
                    arrays: vec![old],
                    results: vec![made],
                    specs: vec![halves(&self.slices[to])],
                    semantics: control::CopySemantics::AlwaysCopy,
                });
                world.ask(Request::Destruct { arrays: vec![self.arrays[to].0] });
                self.arrays[to] = (made, value);
                return;
            }
            _ => {
                self.execute(world, self.add[slice], old, made);
                self.arrays[slice] = (made, value + 1);
            }
        }
        world.ask(Request::Destruct { arrays: vec![old] });
    }

    fn execute(&self, world: &mut World, executable: Handle, arg: Handle, made: Handle) {
        world.ask(Request::Execute {
            stream: 0,
            executable,
            args: smallvec![arg],
            results: smallvec![made],
            keep: smallvec![],
            status: None,
            devices: Vec::new(),
        });
    }

    /// Reads both halves of both arrays.
    fn check(&self, world: &mut World, when: &str) {
        for &(array, value) in &self.arrays {
            let parts = [world.handle(), world.handle()];
            world.ask(Request::Disassemble { array, results: parts.to_vec() });
            for part in parts {
                let asked = world.ask(Request::Read { array: part, byte_strides: None });
                world.settle();
                match world.replies.remove(&asked) {
                    Some(Ok(Reply::Data(data))) => {
                        let found = i64::from_le_bytes(data[..].try_into().expect("eight bytes"));
                        assert_eq!(found, value, "{when}");
                    }
                    other => panic!("{when}: the array cannot be read: {other:?}"),
                }
            }
            world.ask(Request::Destruct { arrays: parts.to_vec() });
        }
    }
}

/// Removes an island, whose slices are in use and migrate, and adds it again, `times` times.
fn live_through(seed: u64, times: usize) {
    let islands = [(2, 2), (2, 1), (2, 2)].map(|(hosts, devices)| IslandSpec::new(hosts, devices));
    let mut world = World::new(&islands, seed);
    let mut user = User::new(&mut world);
    for turn in 0..times {
        for _ in 0..world.random.below(30) {
            user.act(&mut world);
            for _ in 0..world.random.below(4) {
                world.step();
            }
        }
        let up: Vec<IslandId> = (0..3)
            .map(IslandId)
            .filter(|&id| world.controller.island_state(id) == IslandState::Up)
            .collect();
        let gone = up[world.random.below(up.len() as u64) as usize];
        let effects = world.controller.remove_island(gone, false).expect("slices can move");
        world.carry_out(effects);
        while world.controller.removal(gone).is_none() {
            if world.random.below(8) == 0 {
                user.act(&mut world);
            }
            assert!(world.step() || world.controller.removal(gone).is_some(), "it hangs");
        }
        assert_eq!(world.controller.island_state(gone), IslandState::Removed);
        if world.random.below(4) == 0 {
            user.check(&mut world, &format!("seed {seed}, turn {turn}"));
        }
        let spec = &islands[gone.0 as usize];
        assert_eq!(world.controller.add_island(spec), gone);
        world.bring_up(gone);
    }
    user.check(&mut world, &format!("seed {seed}, at the end"));
    let failed: Vec<_> = world.replies.values().filter_map(|reply| reply.as_ref().err()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    world.tell(Event::ClientLeft(CLIENT));
    world.settle();
    for (number, host) in world.hosts.iter().enumerate() {
        assert!(host.arrays.is_empty(), "host {number} still has {:?}", host.arrays);
        assert!(host.messages.is_empty(), "host {number} still has {:?}", host.messages);
        assert!(host.functions.is_empty() && host.programs.is_empty(), "host {number}");
    }
    assert!(world.relayed > 0, "some of it goes through hosts beside");
    let overview = world.controller.overview();
    let hosts = overview.islands.iter().flat_map(|island| &island.hosts);
    assert!(hosts.into_iter().all(|host| host.memory.0 == 0 && host.spilled.0 == 0));
}

#[test]
fn islands_come_and_go_a_hundred_times() {
    for seed in 0..10 {
        live_through(seed, 100);
    }
}
