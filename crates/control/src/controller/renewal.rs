//! Recompilation of a program whose island was lost and is up again.
//!
//! A client keeps the names of its programs when an island is lost. The first run of such a program
//! after the island has restarted waits for the compiler, and all later requests of the client wait
//! with it; then the new program replaces the old one under the same name.

use std::sync::Arc;

use base::{ClientId, ExecutableId, Status};

use super::{Controller, Outcome};
use crate::clients::Renewal;
use crate::events::{Handle, Request, RequestId};
use crate::programs::{Executable, ExecutableForm, Purpose, Run};

impl Controller {
    /// Returns whether a program was lost with an island that is up again. A program that takes
    /// batches of an input stays lost, since the position in its data is unknown.
    pub(super) fn can_renew(&self, client: ClientId, name: Handle) -> bool {
        let Ok(found) = self.clients[&client].executable(name) else { return false };
        self.was_lost(&found.islands) && !found.takes_input()
    }

    /// Recompiles a program and holds `run`, a request to run it, until that is done.
    pub(super) fn renew(
        &mut self,
        client: ClientId,
        run: (RequestId, Request),
        name: Handle,
    ) -> Outcome {
        let number = self.next_id();
        let state = self.client(client);
        state.backlog.push_front(run);
        state.renewal = Some(Renewal { number, name });
        let program = state.executables[&name].clone();
        self.compile_again(client, &program, Purpose::Renewal(number));
        Ok(None)
    }

    /// Starts to compile a program again from its source.
    pub(super) fn compile_again(
        &mut self,
        client: ClientId,
        program: &Executable,
        purpose: Purpose,
    ) {
        match &program.form {
            ExecutableForm::Dataflow(dataflow) => {
                let texts = (dataflow.source.clone(), dataflow.program.clone());
                let functions = dataflow.functions.iter();
                let codes = functions.filter_map(|function| function.source.clone()).collect();
                let partitioned = dataflow.partitioned.clone();
                self.assemble_functions(client, purpose, texts, partitioned, codes);
            }
            ExecutableForm::Resharding(resharding) => {
                let id = ExecutableId(self.next_id());
                let made = Executable::resharding(resharding.clone(), id);
                self.compiled(client, purpose, Ok(made));
            }
            ExecutableForm::Gang | ExecutableForm::Exchange(_) | ExecutableForm::Colocated(_) => {
                let source = program.source.clone().expect("only whole programs have none");
                if let Err(error) = self.compile(client, source, purpose) {
                    self.compiled(client, purpose, Err(error));
                }
            }
        }
    }

    /// A recompilation is finished, or has failed.
    pub(super) fn renewed(
        &mut self,
        client: ClientId,
        number: u64,
        made: Result<Executable, Status>,
    ) {
        let state = self.clients.get_mut(&client);
        let renewal = state.and_then(|state| state.renewal.take_if(|own| own.number == number));
        let Some(Renewal { name, .. }) = renewal else {
            if let Ok(made) = made {
                self.unload(client, &made);
            }
            return;
        };
        match made {
            Ok(made) => self.replace_executable(client, name, made),
            Err(error) => self.fail_held_run(client, &error),
        }
        self.drain_backlog(client);
    }

    /// Replaces the program of this name and unloads the old one.
    pub(super) fn replace_executable(
        &mut self,
        client: ClientId,
        name: Handle,
        program: Executable,
    ) {
        self.scheduler.memory.learn(&program);
        let old = self.client(client).executables.insert(name, Arc::new(program));
        if let Some(old) = old {
            self.unload(client, &old);
        }
    }

    /// Fails the held run; the requests behind it proceed.
    fn fail_held_run(&mut self, client: ClientId, error: &Status) {
        let held = self.client(client).backlog.pop_front();
        let Some((id, request)) = held else {
            unreachable!("the run that a renewal is for is first in the backlog");
        };
        let Request::Execute { executable, args, results, keep, status, devices, stream } = request
        else {
            unreachable!("only runs are held for a renewal");
        };
        let run = Run { executable, args, results, keep, status, devices, stream };
        self.poison_results(client, &run, error);
        self.reply(client, id, Err(error.clone()));
    }
}
