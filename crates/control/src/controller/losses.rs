//! Lost hosts, and what is lost with them.
//!
//! A host may be lost while it sends an array to another island. Some hosts of that island have then
//! received their parts and start the next computation; a host that has not cannot leave it out,
//! since the others wait for it in collectives that do not recover (gloo's). So it reports its lost
//! input, and takes part with zeros once the controller has made errors of all that derives from it.

use std::sync::Arc;

use base::{BufferId, ClientId, Code, HostId, IslandId, Status, TransferTag};
use protocol::CommandTicket;

use super::Controller;
use crate::events::Effect;
use crate::lineage::Derived;
use crate::pending::Waiting;
use crate::submissions::Out;

impl Controller {
    pub(super) fn host_lost(&mut self, host: HostId, cause: &str) {
        // A host that is lost already: an earlier process has ended late. Its island may be starting.
        if self.cluster.host(host).is_some() && self.scheduler.host(host).lost.is_none() {
            self.fail_host(host, cause);
        }
    }

    /// Loses the island of a host that has ended, or that may not join.
    pub(super) fn fail_host(&mut self, host: HostId, cause: &str) {
        let known = self.cluster.host(host).expect("hosts are known").clone();
        self.awaited.remove(&known.island);
        let error = Status::new(
            Code::DataLoss,
            format!(
                "host {} of island {} is lost ({cause}); arrays and programs of island {} are \
                 gone; restore them from a checkpoint once the island is back",
                known.rank, known.island, known.island
            ),
        );
        self.lose_island(known.island, &error);
    }

    /// Loses an island: everything it held is gone, and its hosts are stopped.
    pub(super) fn lose_island(&mut self, id: IslandId, error: &Status) {
        let island = self.cluster.island(id).expect("islands are known").clone();
        self.incarnations.lose(id, error);
        for &member in &island.hosts {
            self.liveness.forget(member);
            let mut out = Out::new();
            self.scheduler.lose(member, error.clone(), &mut out);
            self.flush_commands(out);
            self.effects.push(Effect::StopHost(member));
        }
        self.poison_island(&island.hosts, error);
        self.fail_pending(&island.hosts, error);
        let tag = self.next_tag();
        let survivors = self.cluster.hosts().iter().filter(|host| host.island != island.id);
        for (survivor, &lost) in
            survivors.flat_map(|survivor| island.hosts.iter().map(move |lost| (survivor, lost)))
        {
            let error = error.clone();
            self.effects.push(Effect::LosePeer { host: survivor.id, lost, tag, error });
        }
    }

    fn poison_island(&mut self, lost: &[HostId], error: &Status) {
        let error = Arc::new(error.clone());
        for client in self.clients.values_mut() {
            let buffers = client.buffers.values_mut().chain(client.completions.values_mut());
            for buffer in buffers.filter(|buffer| buffer.hosts.iter().any(|h| lost.contains(h))) {
                buffer.error = Some(error.clone());
                // There is nothing to free there, even once the island is back.
                let left = |host: &&HostId| !lost.contains(host);
                buffer.hosts = buffer.hosts.iter().filter(left).copied().collect();
            }
        }
    }

    fn fail_pending(&mut self, lost: &[HostId], error: &Status) {
        let mut failed: Vec<CommandTicket> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.hosts.iter().any(|host| lost.contains(host)))
            .map(|(&ticket, _)| ticket)
            .collect();
        failed.sort_unstable();
        self.fail_all(failed, error);
    }

    /// Fails these requests.
    pub(super) fn fail_all(&mut self, tickets: Vec<CommandTicket>, error: &Status) {
        for ticket in tickets {
            let pending = self.pending.remove(&ticket).expect("collected above");
            self.conclude(pending, Err(error.clone()));
        }
    }

    /// Makes errors of all buffers that derive from those that a host has lost, and acknowledges
    /// that to the host.
    pub(super) fn buffers_lost(
        &mut self,
        host: HostId,
        (client, first, count): (ClientId, BufferId, u64),
        tag: TransferTag,
        error: Status,
    ) {
        if let Some(state) = self.clients.get_mut(&client) {
            let derived = state.lineage.derived(first.0..first.0 + count);
            let shared = Arc::new(error.clone());
            let buffers = state.buffers.values_mut().chain(state.completions.values_mut());
            let copies = self.migrations.get_mut(&client).into_iter();
            for buffer in buffers.chain(copies.flat_map(|migration| migration.copies_mut())) {
                if derived.contains(buffer.id) {
                    buffer.error.get_or_insert_with(|| shared.clone());
                }
            }
            self.fail_derived(client, &derived, &error);
        }
        self.effects.push(Effect::Acknowledge { host, tag });
    }

    /// Fails what a client waits for if it derives from a lost input, once all hosts have answered: the
    /// input may be lost because another host of its island is, which is then the error.
    fn fail_derived(&mut self, client: ClientId, derived: &Derived, error: &Status) {
        for pending in self.pending.values_mut().filter(|pending| pending.client == client) {
            let is_derived = match &pending.waiting {
                Waiting::Ready(buffers) => buffers.iter().any(|&buffer| derived.contains(buffer)),
                &Waiting::Read(buffer) => derived.contains(buffer),
                _ => false,
            };
            if is_derived {
                pending.error.get_or_insert_with(|| error.clone());
            }
        }
    }
}
