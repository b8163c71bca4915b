//! Clients that connect and disconnect.

use std::collections::BTreeMap;

use base::{BufferId, ClientId, HostId};
use protocol::Command;

use super::Controller;
use crate::accounts::Share;
use crate::capture::Log;
use crate::clients::ClientState;
use crate::slices;
use crate::submissions::Out;

impl Controller {
    pub(super) fn client_joined(&mut self, client: ClientId, share: Share) {
        let virtual_devices = slices::virtual_devices(&self.cluster);
        self.clients.insert(client, ClientState::new(virtual_devices));
        self.scheduler.accounts.open(client, share);
        if self.config.capture {
            self.logs.insert(client, Log::default());
        }
    }

    pub(super) fn client_left(&mut self, client: ClientId) {
        let Some(mut state) = self.clients.remove(&client) else { return };
        self.forget_migration(client);
        self.finish_log(client);
        let mut out = Out::new();
        self.scheduler.drop_client(client, &mut out);
        self.flush_commands(out);
        let mut per_host: BTreeMap<HostId, Vec<BufferId>> = BTreeMap::new();
        let completions = std::mem::take(&mut state.completions);
        for buffer in state.buffers.into_values().chain(completions.into_values()) {
            for &host in buffer.hosts.iter() {
                per_host.entry(host).or_default().push(buffer.id);
            }
        }
        for (host, mut buffers) in per_host {
            buffers.sort_unstable();
            self.send(client, host, Command::Free { buffers });
        }
        let mut executables: Vec<_> = state.executables.into_values().collect();
        executables.sort_by_key(|executable| executable.id);
        for executable in executables {
            self.unload(client, &executable);
        }
        // Launches that had begun do not wait for batches of inputs that are no longer made.
        let mut out = Out::new();
        self.scheduler.dispatch(&mut out);
        self.flush_commands(out);
        self.release_all(client);
        for number in 0..self.cluster.hosts().len() as u32 {
            self.send_now(HostId(number), Command::EndClient { client });
        }
    }
}
