//! Requests about programs: compiling, running and inspecting them.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BufferId, ClientId, Code, DeviceId, ExecutableId, HostId, Nanos, Status, TransferTag};
use ir::{ArraySpec, ValueId};
use protocol::{Acknowledge, Command, CommandTicket, CompileRole, ExecutableMessage};
use smallvec::{SmallVec, smallvec};

use super::{Controller, Outcome};
use crate::clients::ClientState;
use crate::events::{Handle, Reply, RequestId};
use crate::objects::{Buffer, Storage, View};
use crate::pending::Waiting;
use crate::programs::{
    Compiling, Dataflow, Executable, ExecutableForm, Purpose, Run, TAGS_PER_EXCHANGE,
};
use crate::sources::{CompileSource, SourceKind};
use crate::submissions::{LaunchRequest, SegmentPosition};

impl Controller {
    /// Starts to compile a program on every host that owns one of its devices.
    pub(super) fn compile(
        &mut self,
        client: ClientId,
        source: CompileSource,
        purpose: Purpose,
    ) -> Result<(), Status> {
        self.check_devices(&source.devices)?;
        let islands = self.islands_of(&source.devices);
        self.check_incarnations(&islands)?;
        source.check_grid()?;
        if islands.len() > 1 && source.is_whole() {
            return self.partition(client, source, purpose);
        }
        let hosts = self.hosts_of(&source.devices);
        let compiled = self.check_colocated(&source, &hosts)?;
        let id = ExecutableId(self.next_id());
        let waiting = Waiting::Compile(Compiling {
            id,
            islands,
            source: source.clone(),
            hosts: hosts.clone(),
            compiled,
            collectives: Vec::new(),
            purpose,
        });
        let ticket = self.await_hosts(client, purpose.request(), &hosts, waiting);
        match source.kind {
            SourceKind::Colocated(ref function) => {
                self.send_colocated(client, (ticket, id), &source.program, function, &hosts);
            }
            SourceKind::Exchange { is_crossing } => {
                self.send_exchange((ticket, id), source, is_crossing, &hosts);
            }
            SourceKind::Whole | SourceKind::OfEachIsland { .. } => {
                self.send_computation(ticket, id, &source, &hosts);
            }
        }
        Ok(())
    }

    /// Sends a program over several islands to its hosts.
    fn send_exchange(
        &mut self,
        (ticket, executable): (CommandTicket, ExecutableId),
        CompileSource { program, devices, .. }: CompileSource,
        is_crossing: bool,
        hosts: &[HostId],
    ) {
        let owners: Arc<[HostId]> =
            devices.iter().map(|&device| self.device(device).host).collect();
        for &host in hosts {
            let (program, owners) = (program.clone(), owners.clone());
            self.send_now(
                host,
                Command::CompileExchange { ticket, executable, program, is_crossing, owners },
            );
        }
    }

    /// Sends a computation to its hosts: the first compiles it and sends the result to the others,
    /// also where each of several islands performs it.
    fn send_computation(
        &mut self,
        ticket: CommandTicket,
        executable: ExecutableId,
        CompileSource { program, options, devices, grid, kind }: &CompileSource,
        hosts: &[HostId],
    ) {
        let (members, takes_island) = match kind {
            SourceKind::OfEachIsland { members, takes_island } => (&members[..], *takes_island),
            _ => (std::slice::from_ref(devices), false),
        };
        let numbers = |devices: &Arc<[DeviceId]>| -> Vec<u32> {
            devices.iter().map(|&device| self.device(device).index).collect()
        };
        let mut places: BTreeMap<HostId, (u32, Vec<u32>)> = BTreeMap::new();
        for (number, devices) in (0..).zip(members) {
            for host in self.hosts_of(devices).iter() {
                places.insert(*host, (number, numbers(devices)));
            }
        }
        let leader = hosts[0];
        let followers: Vec<_> = hosts[1..]
            .iter()
            .map(|&host| ExecutableMessage { host, tag: self.next_tag() })
            .collect();
        for &host in hosts {
            let role = match followers.iter().find(|follower| follower.host == host) {
                Some(&ExecutableMessage { tag, .. }) => {
                    CompileRole::Follower(ExecutableMessage { host: leader, tag })
                }
                None => CompileRole::Leader(followers.clone()),
            };
            let (program, options) = (program.clone(), options.clone());
            let (number, devices) = places[&host].clone();
            let (island, grid) = (takes_island.then_some(number), *grid);
            self.send_now(
                host,
                Command::Compile {
                    ticket,
                    executable,
                    program,
                    options,
                    devices,
                    grid,
                    island,
                    role,
                },
            );
        }
    }

    /// Gives a compiled program a handle and replies to its client.
    pub(super) fn name_executable(
        &mut self,
        client: ClientId,
        request: RequestId,
        executable: Executable,
    ) {
        let Some(state) = self.clients.get_mut(&client) else {
            return self.unload(client, &executable);
        };
        let handle = state.mint();
        self.scheduler.memory.learn(&executable);
        let executable = Arc::new(executable);
        self.client(client).executables.insert(handle, executable.clone());
        let (compiled, devices) = (executable.compiled.clone(), executable.devices.clone());
        let functions = match &executable.form {
            ExecutableForm::Dataflow(dataflow) if dataflow.partitioned.is_none() => {
                Some(dataflow.places())
            }
            _ => None,
        };
        let reply = Reply::Compiled { executable: handle, compiled, devices, functions };
        self.reply(client, request, Ok(reply));
    }

    /// Unloads a program that no handle refers to.
    pub(super) fn unload(&mut self, client: ClientId, executable: &Executable) {
        self.free_executable(client, executable.id, &executable.hosts);
        if let ExecutableForm::Dataflow(dataflow) = &executable.form {
            for function in &dataflow.functions {
                self.free_executable(client, function.id, &function.hosts);
            }
        }
    }

    /// Unloads a program from these hosts.
    pub(super) fn free_executable(&mut self, client: ClientId, id: ExecutableId, hosts: &[HostId]) {
        if !self.config.capture {
            self.scheduler.forget(id); // a captured step includes its functions' times
        }
        self.segments.remove(&id);
        self.plans.forget(id);
        for &host in hosts {
            self.send(client, host, Command::FreeExecutable { executable: id });
        }
    }

    /// Submits one run to the scheduler and creates its results; if the run is rejected, they are
    /// poisoned.
    pub(super) fn execute(&mut self, client: ClientId, run: &Run) -> Outcome {
        let executed = self.try_execute(client, run);
        if let Err(error) = &executed {
            self.poison_results(client, run, error);
        }
        executed.map(Some)
    }

    fn try_execute(&mut self, client: ClientId, run: &Run) -> Result<Reply, Status> {
        let state = self.clients.get(&client).expect("requests come from known clients");
        let executable = state.executable(run.executable)?.clone();
        if let ExecutableForm::Resharding(resharding) = &executable.form {
            return self.run_resharding(client, run, (&executable, resharding));
        }
        executable.check_run(run)?;
        self.check_incarnations(&executable.islands)?;
        let args = arguments(state, &executable, run)?;
        let specs = match self.logs.get(&client) {
            Some(_) => run.args.iter().map(|arg| state.buffers[arg].spec.clone()).collect(),
            None => Vec::new(),
        };
        check_donated(state, &executable, run)?;
        self.check_run_fits(client, &executable, run)?;
        self.mark_donated(client, &executable, run);

        let (made, is_awaited) = (executable.buffers_made(), u64::from(run.status.is_some()));
        let first_result = BufferId(self.next_ids(made + is_awaited));
        let completion = run.status.map(|_| BufferId(first_result.0 + made));
        let made = made + is_awaited;
        let program = executable.whole_program().cloned();
        self.client(client).lineage.note_run(first_result, made, args.clone(), program);
        self.note_call(client, &executable, &args, specs, first_result, &run.keep);
        match &executable.form {
            ExecutableForm::Gang => {
                let keep = run.keep.clone();
                self.launch(client, &executable, args, first_result, completion, keep);
            }
            ExecutableForm::Exchange(_) => self.exchange(client, &executable, &args, first_result),
            ExecutableForm::Colocated(_) => {
                let results = (first_result, completion);
                self.run_colocated(client, &executable, args, results, run.stream);
            }
            ExecutableForm::Dataflow(dataflow) => {
                self.run_program(client, &executable, dataflow, &args, first_result, completion);
            }
            ExecutableForm::Resharding(_) => unreachable!("it was run above"),
        }

        let outputs = self.name_results(client, &executable, run, first_result);
        let status = match (run.status, completion) {
            (Some(wanted), Some(id)) => self.name_completion(client, &executable, wanted, id),
            _ => 0,
        };
        Ok(Reply::Executed { status, outputs, compiled: executable.compiled.clone() })
    }

    /// Creates the results of a run; returns handle and spec of those that the client has not
    /// named.
    fn name_results(
        &mut self,
        client: ClientId,
        executable: &Executable,
        run: &Run,
        first_result: BufferId,
    ) -> Vec<(Handle, Arc<ArraySpec>)> {
        let shared = match &executable.form {
            ExecutableForm::Dataflow(dataflow) => self.result_storage(client, dataflow, run),
            _ => Vec::new(),
        };
        let mut outputs = Vec::new();
        for (index, spec) in executable.output_specs.iter().enumerate() {
            let handle = run.results.get(index).copied().unwrap_or_else(|| {
                let handle = self.client(client).mint();
                outputs.push((handle, spec.clone()));
                handle
            });
            let id = executable.result(first_result, index);
            let hosts = executable.output_hosts[index].clone();
            let buffer = match shared.get(index).cloned() {
                Some(storage) => Buffer { id, spec: spec.clone(), hosts, storage, error: None },
                None => Buffer::new(id, spec.clone(), hosts, self.charge_made(client, spec)),
            };
            self.keep(client, handle, buffer);
        }
        outputs
    }

    /// Creates the completion of a run; returns its handle, a new one if the client wants 0.
    fn name_completion(
        &mut self,
        client: ClientId,
        executable: &Executable,
        wanted: Handle,
        id: BufferId,
    ) -> Handle {
        let name = if wanted == 0 { self.client(client).mint() } else { wanted };
        let spec = self.completion_spec.clone();
        let buffer = Buffer::new(id, spec, executable.hosts.clone(), None);
        let old = self.client(client).completions.insert(name, buffer);
        self.free(client, old);
        name
    }

    /// Returns the storage of each result of a whole program: a result that is an argument shares
    /// the argument's storage, unless it was donated, and a result that is returned twice is the
    /// same storage.
    fn result_storage(&self, client: ClientId, dataflow: &Dataflow, run: &Run) -> Vec<Arc<[View]>> {
        let program = &dataflow.program;
        let mut known: BTreeMap<ValueId, Arc<[View]>> = BTreeMap::new();
        let storage = |value: ValueId| {
            let handle = run.args.get(value.0 as usize).filter(|_| value.0 < program.inputs);
            let argument = handle.map(|handle| &self.clients[&client].buffers[handle]);
            match argument.filter(|buffer| !buffer.is_deleted()) {
                Some(buffer) => buffer.storage.clone(),
                None => {
                    let spec = program.value(value);
                    Storage::of(spec, self.charge_made(client, spec))
                }
            }
        };
        let results = program.results.iter();
        results.map(|&value| known.entry(value).or_insert_with(|| storage(value)).clone()).collect()
    }

    fn mark_donated(&mut self, client: ClientId, executable: &Executable, run: &Run) {
        let state = &self.clients[&client];
        for index in executable.donated(&run.keep) {
            if let Some(handle) = run.args.get(index as usize) {
                state.buffers[handle].mark_deleted();
            }
        }
    }

    fn launch(
        &mut self,
        client: ClientId,
        executable: &Executable,
        args: SmallVec<[BufferId; 8]>,
        first_result: BufferId,
        completion: Option<BufferId>,
        keep: SmallVec<[u32; 4]>,
    ) {
        let launch = Command::Launch {
            sequence: 0,
            previous: 0,
            acknowledge: Acknowledge::No,
            executable: executable.id,
            args,
            first_result,
            results: executable.outputs.len() as u32,
            keep,
            completion,
            client,
        };
        self.submit_whole(client, executable, &launch, executable.expected_time());
    }

    /// Submits a run that is this one command on each host of its program.
    pub(super) fn submit_whole(
        &mut self,
        client: ClientId,
        executable: &Executable,
        command: &Command,
        expected: Nanos,
    ) {
        self.submit(LaunchRequest {
            client,
            executable: executable.id,
            position: SegmentPosition::Whole,
            members: executable.members(command),
            expected,
            inputs: executable.compiled.input.into_iter().collect(),
        });
    }

    fn exchange(
        &mut self,
        client: ClientId,
        executable: &Executable,
        args: &SmallVec<[BufferId; 8]>,
        first_result: BufferId,
    ) {
        let first_tag = TransferTag(self.next_ids(TAGS_PER_EXCHANGE));
        let exchange = Command::RunExchange {
            executable: executable.id,
            args: args.clone(),
            first_result,
            results: executable.output_specs.clone(),
            first_tag,
            client,
        };
        self.submit_whole(client, executable, &exchange, Nanos(0));
    }

    /// After a run was rejected, poisons its results with the error.
    pub(super) fn poison_results(&mut self, client: ClientId, run: &Run, error: &Status) {
        let specs = match self.clients[&client].executable(run.executable) {
            Ok(found) if !found.output_specs.is_empty() => found.output_specs.clone(),
            _ => vec![self.completion_spec.clone(); run.results.len()],
        };
        self.poison(client, &run.results, specs, error);
        if let Some(name) = run.status.filter(|&name| name != 0) {
            let buffer = Buffer::poisoned(
                BufferId(self.next_id()),
                self.completion_spec.clone(),
                Arc::new(error.clone()),
            );
            let old = self.client(client).completions.insert(name, buffer);
            self.free(client, old);
        }
    }

    /// Waits for the completion of a run.
    pub(super) fn completion(
        &mut self,
        client: ClientId,
        request: RequestId,
        name: Handle,
    ) -> Outcome {
        let state = self.client(client);
        let awaited = state.completions.remove(&name);
        let Some(buffer) = awaited.filter(|end| end.error.is_some() || !end.hosts.is_empty())
        else {
            // The run had completed when it was named, as a compilation has, or before its devices
            // migrated.
            return Ok(Some(Reply::Done));
        };
        if let Some(error) = buffer.error {
            return Err(error.as_ref().clone());
        }
        let ticket =
            self.await_hosts(client, request, &buffer.hosts, Waiting::Ready(smallvec![buffer.id]));
        for &host in buffer.hosts.iter() {
            self.send(client, host, Command::CheckReady { ticket, buffers: vec![buffer.id] });
            self.send(client, host, Command::Free { buffers: vec![buffer.id] });
        }
        Ok(None)
    }

    /// Replies with the estimated cost of a program.
    pub(super) fn costs(&self, client: ClientId, handle: Handle) -> Outcome {
        let executable = self.clients[&client].executable(handle)?;
        executable.costs().map(|costs| Some(Reply::Costs(costs)))
    }

    /// Replies with what a client must know of a program.
    pub(super) fn metadata(&self, client: ClientId, handle: Handle) -> Outcome {
        let executable = self.clients[&client].executable(handle)?;
        Ok(Some(Reply::Metadata(executable.compiled.clone(), executable.outputs.clone())))
    }

    /// Replies with the text of a program, for which its first host is asked unless it is a whole
    /// program.
    pub(super) fn program_text(
        &mut self,
        client: ClientId,
        request: RequestId,
        handle: Handle,
    ) -> Outcome {
        let executable = self.clients[&client].executable(handle)?.clone();
        let executables = match &executable.form {
            ExecutableForm::Dataflow(dataflow) if dataflow.partitioned.is_some() => {
                dataflow.computations().map(|function| function.id).collect()
            }
            ExecutableForm::Dataflow(dataflow) => {
                return Ok(Some(Reply::Text(dataflow.source.to_string())));
            }
            _ => vec![executable.id],
        };
        self.check_incarnations(&executable.islands)?;
        let ticket = self.await_hosts(client, request, &executable.hosts[..1], Waiting::Answer);
        self.send_now(executable.hosts[0], Command::ProgramText { ticket, executables });
        Ok(None)
    }

    /// Replies with whether a program is unloaded.
    pub(super) fn is_unloaded(&self, client: ClientId, handle: Handle) -> Outcome {
        Ok(Some(Reply::Deleted(self.clients[&client].executable(handle).is_err())))
    }

    /// Removes a client's handle of a program and unloads the program.
    pub(super) fn destruct_executable(&mut self, client: ClientId, handle: Handle) -> Outcome {
        let state = self.client(client);
        if let Some(executable) = state.executables.remove(&handle) {
            self.unload(client, &executable);
        }
        Ok(Some(Reply::Done))
    }
}

/// Returns the buffers of a run's arguments, each of which its program can take.
fn arguments(
    state: &ClientState,
    executable: &Executable,
    run: &Run,
) -> Result<SmallVec<[BufferId; 8]>, Status> {
    let mut args: SmallVec<[BufferId; 8]> = SmallVec::with_capacity(run.args.len());
    for (index, &handle) in run.args.iter().enumerate() {
        let buffer = state.live(handle)?;
        executable.check_argument(index, buffer)?;
        args.push(buffer.id);
    }
    Ok(args)
}

/// Fails if a donated argument shares memory with another argument: XLA would abort the process of
/// a host.
fn check_donated(state: &ClientState, executable: &Executable, run: &Run) -> Result<(), Status> {
    let donated: SmallVec<[u32; 8]> = executable.donated(&run.keep).collect();
    if donated.is_empty() {
        return Ok(());
    }
    let args: SmallVec<[&Buffer; 8]> = run.args.iter().map(|arg| &state.buffers[arg]).collect();
    let is_donated = |at: usize| donated.contains(&(at as u32));
    let Some((one, other)) = Buffer::donated_twice(&args, is_donated) else { return Ok(()) };
    let name = &executable.compiled.name;
    Err(Status::new(
        Code::InvalidArgument,
        format!(
            "argument {one} of {name} is donated, and argument {other} has the same memory; donate a \
             copy (jnp.copy), or none"
        ),
    ))
}
