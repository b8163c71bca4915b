//! What hosts report: launches that have ended, batches that are made, arrays that have arrived.

use base::{BufferId, HostId, InputId, IslandId, Nanos, Status};
use protocol::Command;

use super::GangScheduler;
use super::queues::Item;
use crate::config::Dispatch;
use crate::submissions::Out;

impl GangScheduler {
    /// A buffer sent by other islands has arrived at a host: dispatches what waited for it.
    pub fn arrived(&mut self, host: HostId, buffer: BufferId, out: &mut Out) {
        let Some(client) = self.arrivals.arrived(host, buffer) else { return };
        let Some(queues) = self.queues.get(&client) else { return };
        match queues.front(host) {
            Some(Item::Command(..)) => self.drain(client, host, out),
            Some(Item::Member(id)) if !self.is_delayed(&self.gangs[id]) => {
                // While it waited, its client was not backlogged on the island.
                for &island in &self.gangs[id].islands {
                    self.accounts.reactivate(client, island);
                }
            }
            _ => return,
        }
        self.dispatch(out);
    }

    /// A host has finished its oldest batch of acknowledged launches, which kept it busy for
    /// `busy`.
    pub fn finished(&mut self, host: HostId, busy: Nanos, out: &mut Out) {
        let state = &mut self.hosts[host.0 as usize];
        let Some(batch) = state.finished() else { return };
        let island = state.island;
        let wanted = std::mem::take(&mut state.wanted);
        let all = f64::from(self.island_devices[island.0 as usize].max(1));
        let total = batch.estimate.0.max(1) as f64;
        for part in &batch.parts {
            if let Some(count) = self.unenqueued.get_mut(&part.client) {
                *count = count.saturating_sub(part.launches);
            }
            if self.mode == Dispatch::Sequential {
                continue; // only the enqueueing was reported, not the end of the work
            }
            let devices = f64::from(part.devices);
            let mut actual = part.estimate;
            // Zero means that they ended before the host was asked, so nothing was measured.
            if busy > Nanos(0) {
                actual = busy.times(part.estimate.0 as f64 / total);
                self.run_times.learn(part.executable, part.expected, actual);
                let share = |time: Nanos| time.times(devices / all);
                self.accounts.settle(part.client, island, share(part.estimate), share(actual));
            }
            self.accounts.note_use(part.client, actual.times(devices));
        }
        if wanted || self.mode == Dispatch::Sequential {
            self.dispatch(out);
        }
        if self.host(host).in_flight() == 0 && self.is_idle(island) {
            self.accounts.sync_virtual_time(island);
        }
    }

    /// Returns whether an island has nothing in flight and nothing queued.
    fn is_idle(&self, island: IslandId) -> bool {
        let is_empty = |host| self.queues.values().all(|queues| queues.is_empty_at(host));
        // The last host first: hosts finish roughly in order, so a busy one is found early.
        let mut hosts = self.hosts.iter().enumerate().rev().filter(|(_, s)| s.island == island);
        hosts.all(|(host, state)| state.in_flight() == 0 && is_empty(HostId(host as u32)))
    }

    /// A host has made the next batch of an input, or cannot make more.
    pub fn batch_made(&mut self, host: HostId, input: InputId, end: Option<Status>, out: &mut Out) {
        let ready = self.queues.values().flat_map(|queues| queues.ready.iter().copied());
        let waits = |id: &u64| {
            let wanted = &self.gangs[id].inputs;
            wanted.contains(&input) && !self.inputs.have(wanted)
        };
        let waiting: Vec<u64> = ready.filter(waits).collect();
        match end {
            None => self.inputs.made(input, host),
            Some(error) => {
                let (batches, others) = self.inputs.ended(input, host).unwrap_or_default();
                let end = || Command::EndInput { input, batches, error: error.clone() };
                out.extend(others.into_iter().map(|other| (other, end())));
            }
        }
        for gang in waiting.iter().map(|id| &self.gangs[id]) {
            if self.inputs.have(&gang.inputs) {
                // While it waited, its client was not backlogged on the island.
                for &island in &gang.islands {
                    self.accounts.reactivate(gang.client, island);
                }
            }
        }
        self.dispatch(out);
    }
}
