//! Requests of clients: which must wait, and who performs them.

use base::ClientId;

use super::{Controller, Outcome};
use crate::dataflow::Reading;
use crate::events::{Reply, Request, RequestId};
use crate::programs::{Purpose, Run};
use crate::sources::CompileSource;

impl Controller {
    /// Accepts a request; it joins the client's backlog if it must wait for an earlier one.
    pub(super) fn arrived(&mut self, client: ClientId, id: RequestId, request: Request) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let is_held = self.migrations.contains_key(&client);
        let waits = !state.backlog.is_empty() || state.must_wait(&request);
        if is_held || request.is_in_order() && waits {
            state.backlog.push_back((id, request));
        } else {
            self.perform(client, id, request);
        }
    }

    pub(super) fn drain_backlog(&mut self, client: ClientId) {
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
        match self.start(client, id, request) {
            Ok(Some(reply)) => self.reply(client, id, Ok(reply)),
            Ok(None) => {}
            Err(error) => self.reply(client, id, Err(error)),
        }
    }

    /// Starts a request; returns the reply, if no host must answer first.
    fn start(&mut self, client: ClientId, id: RequestId, request: Request) -> Outcome {
        match request {
            Request::Execute { executable, .. } if self.can_renew(client, executable) => {
                self.renew(client, (id, request), executable)
            }
            Request::Execute { executable, args, results, keep, status, devices, stream } => {
                let run = Run { executable, args, results, keep, status, devices, stream };
                self.execute(client, &run)
            }
            Request::Compile { program, options, devices, grid } => {
                self.load(client, id, CompileSource::computation(program, options, devices, grid))
            }
            Request::LoadColocated { program, devices, function } => {
                self.load(client, id, CompileSource::colocated(function, program, devices))
            }
            Request::PrepareResharding(wanted) => self.prepare_resharding(client, id, wanted),
            Request::CompileProgram { program, options, devices } => {
                self.compile_program(client, id, program, Reading { options, devices })
            }
            Request::Metadata { executable } => self.metadata(client, executable),
            Request::CostAnalysis { executable } => self.costs(client, executable),
            Request::FunctionMemory { executable } => self.function_memory(client, executable),
            Request::FunctionCosts { executable } => self.function_costs(client, executable),
            Request::ProgramText { executable } => self.program_text(client, id, executable),
            Request::Completion { status } => self.completion(client, id, status),
            Request::ExecutableIsDeleted { executable } => self.is_unloaded(client, executable),
            Request::DeleteExecutable { executable }
            | Request::DestructExecutable { executable } => {
                self.destruct_executable(client, executable)
            }
            Request::Put { array, spec, shards } => self.put(client, array, spec, shards),
            Request::MakeErrors { arrays, specs, error } => {
                self.make_errors(client, &arrays, specs, &error)
            }
            Request::Assemble { array, spec, parts } => self.assemble(client, array, spec, &parts),
            Request::Disassemble { array, results } => self.disassemble(client, array, &results),
            Request::FullyReplicatedShard { array, result } => {
                self.disassemble(client, array, &[result])
            }
            Request::Remap { arrays, results, specs, sources, semantics } => {
                self.remap(client, &arrays, &results, specs, &sources, semantics)
            }
            Request::Bitcast { arrays, results, specs, semantics } => {
                self.bitcast(client, &arrays, &results, specs, semantics)
            }
            Request::Copy { arrays, results, devices, memory, semantics } => {
                self.copy(client, &arrays, &results, devices, memory, semantics)
            }
            Request::Reshard { arrays, results, specs, semantics } => {
                self.reshard(client, &arrays, &results, specs, semantics)
            }
            Request::Read { array, byte_strides } => self.read(client, id, array, byte_strides),
            Request::CheckReady { arrays } => self.check_ready(client, id, &arrays),
            Request::Delete { arrays } => {
                self.delete(client, &arrays);
                Ok(Some(Reply::Done))
            }
            Request::IsDeleted { array } => self.is_deleted(client, array),
            Request::Destruct { arrays } => self.destruct(client, &arrays),
        }
    }
    fn load(&mut self, client: ClientId, id: RequestId, source: CompileSource) -> Outcome {
        self.compile(client, source, Purpose::Request(id)).map(|()| None)
    }
}
