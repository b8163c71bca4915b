//! Clients that disconnect, and hosts that join and are lost.

use base::{ClientId, HostId, Status, TransferTag};
use protocol::{Command, HostInfo};

use super::GangScheduler;
use super::gangs;
use super::queues::{ClientQueues, Item};
use crate::hosts::HostState;
use crate::submissions::{Out, SegmentPosition, TransferRole};

impl GangScheduler {
    /// A client has disconnected: its queued commands are dropped, but runs and transfers that have
    /// begun on some host are completed; otherwise other hosts would keep messages that are never
    /// received and memory that is never freed.
    pub fn drop_client(&mut self, client: ClientId, out: &mut Out) {
        self.unenqueued.remove(&client);
        self.arrivals.drop_client(client);
        let begun = gangs::begun(&self.gangs, client);
        let mut kept = ClientQueues::default();
        let mut unneeded: Vec<u64> = Vec::new();
        for (host, mut queue) in self.queues.remove(&client).unwrap_or_default().hosts {
            queue.retain(|item| match item {
                Item::Member(id) => begun.contains(id),
                Item::Command(command, link) => {
                    let has_begun = self.transfers.has_begun(*link);
                    if let (TransferRole::Sends(transfer), false) = (link, has_begun) {
                        unneeded.push(*transfer);
                    }
                    has_begun || frees(command)
                }
            });
            kept.length += queue.len();
            kept.hosts.insert(host, queue);
        }
        self.transfers.forget(&unneeded);
        self.gangs.retain(|id, gang| gang.client != client || begun.contains(id));
        for id in begun {
            let is_first = |host: HostId| matches!(kept.front(host), Some(Item::Member(first)) if *first == id);
            let gang = self.gangs.get_mut(&id).expect("listed above");
            gang.first = gang.members.iter().filter(|member| is_first(member.host)).count();
            if gang.is_in_front() {
                kept.ready.insert(id);
            }
        }
        self.queues.insert(client, kept);
        self.leaving.insert(client);
        for host in &mut self.hosts {
            host.wanted = false;
        }
        // Commands queued behind dropped launches are at the front now.
        self.drain_all(out);
        self.dispatch(out);
    }

    /// A host has joined, for the first time or again.
    pub fn join(&mut self, host: HostId, info: HostInfo, first_tag: TransferTag) {
        let state = &mut self.hosts[host.0 as usize];
        *state = HostState::new(state.island);
        self.memory.join(host, &info);
        state.info = Some(info);
        state.first_tag = first_tag;
    }

    /// A host is lost: drops everything queued for it; gangs continue without it.
    pub fn lose(&mut self, host: HostId, error: Status, out: &mut Out) {
        let state = &mut self.hosts[host.0 as usize];
        state.lost = Some(error);
        state.wanted = false;
        self.memory.lose(host);
        self.inputs.lose(host);
        self.arrivals.lose(host);
        let clients: Vec<ClientId> = self.queues.keys().copied().collect();
        for client in clients {
            let queues = self.queues.get_mut(&client).expect("listed above");
            for (place, item) in queues.lose(host).into_iter().enumerate() {
                match item {
                    Item::Member(id) => self.leave_gang(client, id, host, place == 0),
                    Item::Command(_, link) => self.on_dispatched(client, link, out),
                }
            }
        }
        self.dispatch(out);
    }

    fn leave_gang(&mut self, client: ClientId, id: u64, host: HostId, was_first: bool) {
        let gang = self.gangs.get_mut(&id).expect("members belong to gangs");
        gang.members.retain(|member| member.host != host);
        gang.first -= usize::from(was_first);
        let queues = self.queues.get_mut(&client).expect("a gang waits in queues");
        if gang.members.is_empty() {
            queues.ready.remove(&id);
            if let Some(gang) = self.gangs.remove(&id)
                && gang.position == SegmentPosition::Last
            {
                self.memory.end_segmented(client);
            }
        } else if gang.is_in_front() {
            queues.ready.insert(id);
        }
    }

    /// Removes disconnected clients whose runs in progress are fully dispatched.
    pub(super) fn reap_clients(&mut self) {
        while let Some(&client) =
            self.leaving.iter().find(|client| self.queues.get(client).is_none_or(|q| q.length == 0))
        {
            self.leaving.remove(&client);
            self.queues.remove(&client);
            self.accounts.close(client);
            self.memory.release(client);
        }
    }
}

/// Whether a command frees what earlier commands have made; nothing else would free it.
fn frees(command: &Command) -> bool {
    matches!(command, Command::Free { .. } | Command::FreeExecutable { .. })
}
