//! Commands to hosts: through the scheduler, or ahead of it.

use base::{ClientId, HostId};
use protocol::Command;

use super::Controller;
use crate::events::Effect;
use crate::submissions::{LaunchRequest, Out, TransferRole};

impl Controller {
    /// Sends a command of a client to a host, after all its earlier ones.
    pub(super) fn send(&mut self, client: ClientId, host: HostId, command: Command) {
        self.send_linked(client, host, command, TransferRole::None);
    }

    /// Sends a command that may be a part of a transfer between hosts.
    pub(super) fn send_linked(
        &mut self,
        client: ClientId,
        host: HostId,
        command: Command,
        link: TransferRole,
    ) {
        let mut out = Out::new();
        self.scheduler.send(client, host, command, link, &mut out);
        self.flush_commands(out);
    }

    /// Sends a command to a host ahead of all queued commands of clients.
    pub(super) fn send_now(&mut self, host: HostId, command: Command) {
        if self.scheduler.host(host).lost.is_none() {
            let mut out = Out::new();
            self.scheduler.memory.on_dispatch(host, command, &mut out);
            self.flush_commands(out);
        }
    }

    /// Submits launches that form one gang to the scheduler of their islands.
    pub(super) fn submit(&mut self, wanted: LaunchRequest) {
        let mut out = Out::new();
        self.scheduler.submit(wanted, &mut out);
        self.flush_commands(out);
    }

    pub(super) fn flush_commands(&mut self, out: Out) {
        for (host, command) in out {
            if let Command::FreeExecutable { executable: program } = command {
                self.scheduler.inputs.close(program); // all launches of it have been dispatched
            }
            self.effects.push(Effect::ToHost { host, command });
        }
    }
}
