//! Answers of hosts to requests of clients.

use base::{Bytes, ClientId, Code, HostId, Status};
use protocol::{CommandTicket, HostReply};

use super::Controller;
use crate::events::{Reply, RequestId};
use crate::pending::{Pending, Waiting};
use crate::programs::{Executable, Purpose};

impl Controller {
    /// Registers a request that `hosts` must answer.
    pub(super) fn await_hosts(
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

    pub(super) fn done(
        &mut self,
        host: HostId,
        ticket: CommandTicket,
        result: Result<HostReply, Status>,
    ) {
        let Some(pending) = self.pending.get_mut(&ticket) else { return };
        pending.hosts.retain(|&waited| waited != host);
        let mut reply = HostReply::Success {};
        match result {
            Ok(HostReply::ProgramCompiled { compiled: found }) => {
                if let (Waiting::Compile(compiling), Some(input)) = (&pending.waiting, found.input)
                {
                    self.scheduler.inputs.open(input, compiling.id, &compiling.hosts);
                }
                if let Waiting::Compile(compiling) = &mut pending.waiting {
                    compiling.add(host, found);
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
    pub(super) fn compiled(
        &mut self,
        client: ClientId,
        purpose: Purpose,
        made: Result<Executable, Status>,
    ) {
        match (purpose, made) {
            (Purpose::Request(request), Ok(made)) => self.name_executable(client, request, made),
            (Purpose::Request(request), Err(error)) => self.reply(client, request, Err(error)),
            (Purpose::Function(program, index), Ok(made)) => {
                self.function_compiled(client, (program, index), made);
            }
            (Purpose::Function(program, _), Err(error)) => self.function_failed(program, error),
            (Purpose::Move(number, name), made) => {
                self.program_moved(client, (number, name), made);
            }
            (Purpose::Renewal(number), made) => self.renewed(client, number, made),
        }
    }

    /// Completes a request: all hosts have answered, or one has failed.
    pub(super) fn conclude(&mut self, pending: Pending, result: Result<HostReply, Status>) {
        let Pending { client, request, waiting, .. } = pending;
        // What was compiled for a client that is gone may name devices that went with it.
        let is_here = self.clients.contains_key(&client);
        let gone = || Err(Status::new(Code::Aborted, format!("client {client} has disconnected")));
        let result = match &waiting {
            Waiting::Compile(compiling) if result.is_ok() && compiling.compiled.is_none() => {
                let message =
                    "a host says that it has compiled a program, and does not describe it";
                Err(Status::new(Code::Internal, message))
            }
            _ => result,
        };
        match (waiting, if is_here { result } else { gone() }) {
            (Waiting::Compile(compiling), Err(error)) => {
                self.free_executable(client, compiling.id, &compiling.hosts);
                self.compiled(client, compiling.purpose, Err(error));
            }
            (Waiting::Compile(compiling), Ok(_)) => {
                self.compiled(client, compiling.purpose, Ok(compiling.finish(&self.cluster)));
            }
            (Waiting::Partition(partitioning), result) => {
                self.partitioned(client, partitioning, result);
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
}

/// Converts a host's answer into a client's reply.
fn answer(reply: HostReply) -> Reply {
    match reply {
        HostReply::Success {}
        | HostReply::ShardDataSent {}
        | HostReply::ProgramCompiled { .. }
        | HostReply::OnlyCollectives {}
        | HostReply::ProgramPartitioned { .. }
        | HostReply::ProgramRead { .. } => Reply::Done,
        HostReply::ShardData { data } => Reply::Data(data),
        HostReply::OptimisedText { text } => Reply::Text(text),
    }
}
