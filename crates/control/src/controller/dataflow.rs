//! Whole programs: parsing them, compiling their functions, running them.

use std::ops::Range;
use std::sync::Arc;

use base::{BufferId, ClientId, Code, DeviceId, ExecutableId, HostId, Nanos, Status, TransferTag};
use ir::{ArraySpec, Program};
use protocol::{Acknowledge, Command, FunctionCode};
use smallvec::SmallVec;

use super::{Controller, Outcome};
use crate::config::Dispatch;
use crate::dataflow::{self, Assembling, Reading, malformed};
use crate::events::{Handle, Reply, RequestId};
use crate::lower;
use crate::pending::Waiting;
use crate::programs::{Dataflow, Executable, ExecutableForm, Lowered, Partitioned, Purpose};
use crate::reshard;
use crate::segments::{ProgramSegment, Segments};
use crate::sources::CompileSource;
use crate::submissions::{LaunchRequest, Member, SegmentPosition};

impl Controller {
    /// Sends a whole program to a host to be parsed.
    pub(super) fn compile_program(
        &mut self,
        client: ClientId,
        request: RequestId,
        program: Vec<u8>,
        reading: Reading,
    ) -> Outcome {
        self.check_devices(&reading.devices)?;
        let islands = self.islands_of(&reading.devices);
        self.check_incarnations(&islands)?;
        let reader = self.device(reading.devices[0]).host;
        let ticket = self.await_hosts(client, request, &[reader], Waiting::Program(reading));
        self.send_now(reader, Command::ReadProgram { ticket, program: Arc::new(program) });
        Ok(None)
    }

    /// Starts to compile the functions of a parsed program.
    pub(super) fn compile_functions(
        &mut self,
        client: ClientId,
        request: RequestId,
        reading: &Reading,
        (text, batched): (&str, &str),
        codes: Vec<FunctionCode>,
    ) -> Result<(), Status> {
        let source = dataflow::read(text, &reading.devices)?;
        let program = dataflow::read(batched, &reading.devices)?;
        let places = dataflow::function_places(&program)?;
        if codes.len() != places.len() {
            return Err(malformed(&format!(
                "{} functions are called; the code of {} is given",
                places.len(),
                codes.len()
            )));
        }
        for value in &program.values {
            self.check_spec(value)?;
        }
        let functions = codes.into_iter().zip(places);
        let functions = functions.map(|(code, devices)| reading.source(code, devices)).collect();
        let purpose = Purpose::Request(request);
        self.assemble_functions(client, purpose, (source, program), None, functions);
        Ok(())
    }

    /// Compiles the functions of a program, and assembles the program once all are compiled.
    pub(super) fn assemble_functions(
        &mut self,
        client: ClientId,
        purpose: Purpose,
        texts: (Program, Program),
        partitioned: Option<Arc<Partitioned>>,
        codes: Vec<CompileSource>,
    ) {
        let id = self.next_id();
        let assembling = Assembling::new(client, purpose, texts, partitioned, codes.len());
        self.assembling.insert(id, assembling);
        self.assemble_program(id);
        for (index, code) in codes.into_iter().enumerate() {
            if let Err(error) = self.compile(client, code, Purpose::Function(id, index)) {
                self.function_failed(id, error);
            }
        }
    }

    /// A function of a program is compiled on all its hosts.
    pub(super) fn function_compiled(
        &mut self,
        client: ClientId,
        (program, index): (u64, usize),
        function: Executable,
    ) {
        if let ExecutableForm::Dataflow(_) = function.form {
            let name = &function.compiled.name;
            let error = format!(
                "{name} computes on several islands, which a function of a program cannot yet; call \
                 it outside of the program"
            );
            self.unload(client, &function);
            return self.function_failed(program, Status::new(Code::Unimplemented, error));
        }
        let assembling = self.assembling.get_mut(&program).expect("it waits for its functions");
        assembling.add(index, function);
        self.assemble_program(program);
    }

    /// A function of a program cannot be compiled, so the program fails.
    pub(super) fn function_failed(&mut self, program: u64, error: Status) {
        let assembling = self.assembling.get_mut(&program).expect("it waits for its functions");
        assembling.fail(error);
        self.assemble_program(program);
    }

    /// Lowers a program once all its functions are compiled, and passes it on.
    fn assemble_program(&mut self, id: u64) {
        if !self.assembling[&id].is_complete() {
            return;
        }
        let mut assembling = self.assembling.remove(&id).expect("seen above");
        let (functions, error) = assembling.take_functions();
        let Assembling { client, purpose, source, program, partitioned, .. } = assembling;
        let made = match error {
            Some(error) => Err(error),
            // An island may have been lost, and be back, since its functions were compiled.
            None => functions
                .iter()
                .try_for_each(|function| self.check_incarnations(&function.islands))
                .and_then(|()| self.lower_program(source, program, partitioned, functions.clone())),
        };
        match made {
            Ok(executable) => self.compiled(client, purpose, Ok(executable)),
            Err(error) => {
                for function in functions {
                    self.free_executable(client, function.id, &function.hosts);
                }
                self.compiled(client, purpose, Err(error));
            }
        }
    }

    fn lower_program(
        &mut self,
        source: Program,
        program: Program,
        partitioned: Option<Arc<Partitioned>>,
        functions: Vec<Arc<Executable>>,
    ) -> Result<Executable, Status> {
        dataflow::check_functions(&program, &functions)?;
        let lowered = lower::lower(&self.cluster, &program, &functions)?;
        let id = ExecutableId(self.next_id());
        for (&host, steps) in &lowered.steps {
            self.send_now(host, Command::LoadProgram { executable: id, steps: steps.clone() });
        }
        let mut devices: Vec<DeviceId> =
            program.values.iter().flat_map(|spec| spec.sharding.devices.iter().copied()).collect();
        devices.sort_unstable();
        devices.dedup();
        let hosts: Arc<[HostId]> = lowered.steps.keys().copied().collect();
        if self.config.plan && lowered.collectives > 1 {
            self.plans.begin(id, &program.name, lowered.collectives, hosts.clone());
        }
        let outputs: Arc<[ArraySpec]> =
            program.results.iter().map(|&result| program.value(result).clone()).collect();
        let inputs = &program.values[..program.inputs as usize];
        let hosts_of = |spec: &ArraySpec| reshard::hosts_of(&self.cluster, &spec.sharding.devices);
        let output_hosts = outputs.iter().map(|spec| hosts_of(spec).into()).collect();
        Ok(Executable {
            id,
            source: None,
            islands: self.islands_of(&devices),
            host_devices: reshard::devices_of_each(&self.cluster, &devices, &hosts),
            hosts,
            devices: match &partitioned {
                Some(partitioned) => partitioned.devices.clone(),
                None => devices.into(),
            },
            compiled: Arc::new(dataflow::describe(&program, inputs, &outputs)),
            output_specs: outputs.iter().cloned().map(Arc::new).collect(),
            outputs,
            output_hosts,
            form: ExecutableForm::Dataflow(Arc::new(Dataflow {
                inputs: inputs.iter().cloned().map(Arc::new).collect(),
                lowered,
                functions,
                source,
                program,
                partitioned,
            })),
        })
    }

    /// Returns the memory that each function of a whole program needs.
    pub(super) fn function_memory(&self, client: ClientId, handle: Handle) -> Outcome {
        let executable = self.clients[&client].executable(handle)?;
        let memory = executable.dataflow()?.named().map(|(name, function)| {
            let found = function.compiled.memory;
            let missing =
                || Status::new(Code::Unimplemented, "the compiler gives no memory statistics");
            found.map(|memory| (name, memory)).ok_or_else(missing)
        });
        memory.collect::<Result<_, _>>().map(|all| Some(Reply::FunctionMemory(all)))
    }

    /// Returns the estimated cost of each function of a whole program.
    pub(super) fn function_costs(&self, client: ClientId, handle: Handle) -> Outcome {
        let executable = self.clients[&client].executable(handle)?;
        let costs = executable
            .dataflow()?
            .named()
            .map(|(name, function)| function.costs().map(|costs| (name, costs)));
        costs.collect::<Result<_, _>>().map(|all| Some(Reply::FunctionCosts(all)))
    }

    /// Submits one run of a whole program to the scheduler of its islands.
    pub(super) fn run_program(
        &mut self,
        client: ClientId,
        executable: &Executable,
        dataflow: &Dataflow,
        args: &SmallVec<[BufferId; 8]>,
        first_buffer: BufferId,
        completion: Option<BufferId>,
    ) {
        let first_tag = TransferTag(self.next_ids(dataflow.lowered.tags));
        self.scheduler.accounts.note_moved(client, dataflow.lowered.moved);
        let args: Arc<[BufferId]> = args[..].into();
        let mut segments = self.segments_of(executable.id, &dataflow.lowered);
        // The dependencies between collectives are computed for distinct arguments; other runs are
        // unplanned.
        let (plan, is_kept) = match self.plans.current(executable.id) {
            (1.., _) if has_twice(&args) => (0, false),
            current => current,
        };
        // A planned run is one launch: a plan may begin with the last collective of the program.
        if segments.len() > 1
            && (is_kept || !self.scheduler.memory.begin_segmented(client, executable.id))
        {
            segments = Segments::whole(&dataflow.lowered, &segments);
        }
        let last = segments.len().saturating_sub(1);
        for (number, segment) in segments.iter().enumerate() {
            let member = |(&host, steps): (&HostId, &Range<u32>)| {
                let is_last = dataflow.lowered.steps[&host].len() as u32 == steps.end;
                let command = Command::RunProgram {
                    sequence: 0,
                    previous: 0,
                    acknowledge: Acknowledge::No,
                    executable: executable.id,
                    steps: steps.clone(),
                    args: args.clone(),
                    first_buffer,
                    first_tag,
                    completion: completion.filter(|_| is_last),
                    plan,
                    client,
                };
                // Hosts of a whole program are in ascending order.
                let place = executable.hosts.binary_search(&host);
                let devices = place.map_or(0, |place| executable.host_devices[place]);
                Member { host, devices, command }
            };
            let position = match number {
                _ if last == 0 => SegmentPosition::Whole,
                0 => SegmentPosition::First,
                _ if number == last => SegmentPosition::Last,
                _ => SegmentPosition::Middle,
            };
            self.submit(LaunchRequest {
                client,
                executable: executable.id,
                position,
                members: segment.steps.iter().map(member).collect(),
                expected: segment.expected,
                inputs: segment.inputs.clone(),
            });
        }
    }

    /// Switches the collectives of a program to another plan from the next run on.
    ///
    /// # Arguments
    /// - `plan`: the plan in use when the new one was made; if it is no longer current, the new one
    ///   is stale and is ignored.
    pub(super) fn adopt_plan(
        &mut self,
        executable: ExecutableId,
        plan: u32,
        script: &str,
        predicted: Option<(Nanos, Nanos)>,
    ) {
        let changed = self.plans.change(executable, plan, predicted, !script.is_empty());
        let Some((plan, hosts)) = changed else { return };
        let command = Command::AdoptPlan { executable, plan, script: script.into() };
        for &host in hosts.iter() {
            self.send_now(host, command.clone());
        }
    }

    /// Returns the segments of a program, split by the measured time of its runs.
    fn segments_of(&mut self, id: ExecutableId, lowered: &Lowered) -> Arc<[ProgramSegment]> {
        let one_by_one = self.config.dispatch == Dispatch::Sequential;
        let factor = self.scheduler.factor(id);
        let known =
            self.segments.entry(id).or_insert_with(|| Segments::cut(lowered, 1.0, one_by_one));
        if let Some(factor) = factor
            && known.is_stale(factor)
            && !one_by_one
        {
            *known = Segments::cut(lowered, factor, one_by_one);
        }
        known.segments()
    }
}

/// Returns whether a buffer occurs twice in `args`.
fn has_twice(args: &[BufferId]) -> bool {
    let mut sorted = args.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).any(|pair| pair[0] == pair[1])
}
