//! Python functions of clients: loading and running them on the hosts of their devices.

use std::sync::Arc;

use base::{BufferId, ClientId, ExecutableId, HostId, Nanos, Status};
use protocol::{Command, CommandTicket, Compiled};
use smallvec::SmallVec;

use super::Controller;
use crate::checks::invalid;
use crate::colocated::Colocated;
use crate::programs::Executable;
use crate::sources::{CompileSource, SourceKind};

impl Controller {
    /// Returns the metadata of a Python function; `None` for programs that a host compiles.
    ///
    /// # Errors
    /// It takes or returns arrays that are not on the hosts of its devices.
    pub(super) fn check_colocated(
        &self,
        source: &CompileSource,
        hosts: &[HostId],
    ) -> Result<Option<Box<Compiled>>, Status> {
        let SourceKind::Colocated(function) = &source.kind else { return Ok(None) };
        for spec in function.inputs.iter().chain(&function.outputs) {
            let holders = self.check_spec(spec)?;
            if let Some(other) = holders.iter().find(|host| !hosts.contains(host)) {
                return Err(invalid(format!(
                    "the colocated function {} has an argument or result on host {other}, and runs \
                     on the hosts {hosts:?}; give it arrays of the devices it is specialized for",
                    function.name
                )));
            }
        }
        let (name, inputs, outputs) = (function.name.clone(), &function.inputs, &function.outputs);
        Ok(Some(Box::new(Compiled::of_arrays(name, inputs, outputs))))
    }

    /// Sends a Python function to its hosts.
    pub(super) fn send_colocated(
        &mut self,
        client: ClientId,
        (ticket, executable): (CommandTicket, ExecutableId),
        program: &Arc<Vec<u8>>,
        function: &Colocated,
        hosts: &[HostId],
    ) {
        let devices: Vec<u32> = self.cluster.devices().map(|device| device.id.0).collect();
        for &host in hosts {
            let mut own: Vec<(u32, u32)> = self
                .cluster
                .devices()
                .filter(|device| device.host == host)
                .map(|device| (device.local, device.id.0))
                .collect();
            own.sort_unstable();
            let command = Command::LoadColocated {
                ticket,
                executable,
                name: function.name.clone(),
                program: program.clone(),
                devices: devices.clone(),
                own: own.into_iter().map(|(_, device)| device).collect(),
                client,
                user: function.user,
            };
            self.send_now(host, command);
        }
    }

    /// Submits a run of a Python function.
    pub(super) fn run_colocated(
        &mut self,
        client: ClientId,
        executable: &Executable,
        args: SmallVec<[BufferId; 8]>,
        (first_result, completion): (BufferId, Option<BufferId>),
        stream: u64,
    ) {
        let run = Command::RunColocated {
            executable: executable.id,
            args,
            first_result,
            results: executable.output_specs.clone(),
            completion,
            client,
            stream,
        };
        self.submit_whole(client, executable, &run, Nanos(0));
    }
}
