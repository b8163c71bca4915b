//! Computations over several islands: a host partitions them, and they become whole programs.

use std::sync::Arc;

use base::{ClientId, Status};
use protocol::{Command, HostReply};

use super::Controller;
use crate::dataflow;
use crate::partition::Partitioning;
use crate::pending::Waiting;
use crate::programs::{Partitioned, Purpose};
use crate::sources::{CompileSource, SourceKind};

impl Controller {
    /// Sends a computation over several islands to one of its hosts to be partitioned.
    pub(super) fn partition(
        &mut self,
        client: ClientId,
        source: CompileSource,
        purpose: Purpose,
    ) -> Result<(), Status> {
        let leader = self.device(source.devices[0]).host;
        let islands: Vec<u32> =
            source.devices.iter().map(|&device| self.device(device).island.0).collect();
        let program = source.program.clone();
        let waiting = Waiting::Partition(Partitioning { source, purpose });
        let ticket = self.await_hosts(client, purpose.request(), &[leader], waiting);
        self.send_now(leader, Command::PartitionProgram { ticket, program, islands });
        Ok(())
    }

    /// A host has partitioned a computation, or has found why it cannot be.
    pub(super) fn partitioned(
        &mut self,
        client: ClientId,
        partitioning: Partitioning,
        reply: Result<HostReply, Status>,
    ) {
        let purpose = partitioning.purpose;
        if let Err(error) = self.compile_parts(client, partitioning, reply) {
            self.compiled(client, purpose, Err(error));
        }
    }

    fn compile_parts(
        &mut self,
        client: ClientId,
        partitioning: Partitioning,
        reply: Result<HostReply, Status>,
    ) -> Result<(), Status> {
        let (text, functions, members, costs) = match reply? {
            HostReply::ProgramPartitioned { text, functions, members, costs } => {
                (text, functions, members, costs)
            }
            HostReply::OnlyCollectives {} => {
                let Partitioning { mut source, purpose } = partitioning;
                source.kind = SourceKind::Exchange { is_crossing: false };
                return self.compile(client, source, purpose);
            }
            _ => return Err(dataflow::malformed(&"a host partitions it into nothing")),
        };
        let devices = partitioning.source.devices.clone();
        let mut program = dataflow::read(&text, &devices)?;
        let memory = self.device(devices[0]).memories.first().cloned();
        for value in &mut program.values {
            value.sharding.memory.clone_from(&memory);
        }
        let places = dataflow::function_places(&program)?;
        for value in &program.values {
            self.check_spec(value)?;
        }
        let is_everywhere = places.iter().all(|place| place[..] == devices[..]);
        if places.len() != functions.len() || !is_everywhere {
            return Err(dataflow::malformed(&"its functions are not those of its parts"));
        }
        let island_of = |device| self.device(device).island;
        let functions = partitioning.functions(functions, &members, island_of)?;
        let texts = (program.clone(), program);
        let purpose = partitioning.purpose;
        let partitioned = Arc::new(Partitioned { devices, costs });
        self.assemble_functions(client, purpose, texts, Some(partitioned), functions);
        Ok(())
    }
}
