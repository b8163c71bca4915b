//! Modelled devices: launches on them, and gangs that begin and end together.

use base::{BufferId, ClientId, ExecutableId, HostId, Nanos};
use protocol::{Acknowledge, Report};

use super::{GangState, SimEvent, SimSpan, Simulation};
use crate::client::ClientWork;
use crate::host::{Given, UNFINISHED_LAUNCHES};

impl Simulation {
    /// Enqueues a launch on a host's devices; `None` if it must wait for a buffer or for queue space.
    pub(super) fn launch(
        &mut self,
        id: HostId,
        executable: ExecutableId,
        args: &[BufferId],
        first_result: BufferId,
        results: u32,
        client: ClientId,
    ) -> Option<()> {
        let host = &mut self.hosts[id.0 as usize];
        if host.devices.len() >= UNFINISHED_LAUNCHES || args.iter().any(|&arg| host.is_missing(arg))
        {
            return None;
        }
        host.begun.get_or_insert(self.now);
        for result in 0..u64::from(results) {
            host.computing.insert(BufferId(first_result.0 + result), Vec::new());
        }
        let given = Given { gang: first_result, executable, client, results, report_since: None };
        host.devices.push_back(given);
        if host.devices.len() == 1 {
            self.come(id);
        }
        Some(())
    }

    pub(super) fn check_order(&mut self, id: HostId, previous: u64, sequence: u64) {
        let host = &mut self.hosts[id.0 as usize];
        assert!(
            previous == host.last_launch && sequence > previous,
            "host {id} was given launch {sequence} after {previous}; its last was {}",
            host.last_launch
        );
        host.last_launch = sequence;
    }

    pub(super) fn acknowledge(&mut self, id: HostId, acknowledge: Acknowledge) {
        let host = &mut self.hosts[id.0 as usize];
        match acknowledge {
            Acknowledge::No => {}
            Acknowledge::Enqueued => self.report(id, Report::Finished { busy: Nanos(0) }),
            Acknowledge::Finished => {
                let begun = host.begun.take().unwrap_or(self.now);
                match host.devices.back_mut() {
                    Some(given) => given.report_since = Some(begun),
                    None => self.report(id, Report::Finished { busy: self.now.since(begun) }),
                }
            }
        }
    }

    /// Marks that a host's devices have reached their next launch; the last host of a gang starts it.
    fn come(&mut self, id: HostId) {
        let Some(given) = self.hosts[id.0 as usize].devices.front() else { return };
        let (gang, executable) = (given.gang, given.executable);
        let (time, members) = self.programs[&executable];
        let start = self.now + self.costs.launch;
        let state = self.gangs.entry(gang);
        let state = state.or_insert_with(|| GangState { there: Vec::new(), start });
        state.there.push(id);
        state.start = state.start.max(start);
        if state.there.len() as u32 == members {
            let end = state.start + time;
            self.at(end, SimEvent::Ended(gang));
        }
    }

    pub(super) fn ended(&mut self, gang: BufferId) {
        let state = self.gangs.remove(&gang).expect("a gang ends once");
        for (place, &id) in state.there.iter().enumerate() {
            let host = &mut self.hosts[id.0 as usize];
            let given = host.devices.pop_front().expect("devices end what they began");
            let end = self.now;
            let busy_from = given.report_since.map(|since| since.max(host.device_free_at));
            host.device_free_at =
                if given.report_since.is_some() { end } else { host.device_free_at };
            let mut next = Vec::new();
            for result in 0..u64::from(given.results) {
                next.extend(
                    host.computing.remove(&BufferId(gang.0 + result)).into_iter().flatten(),
                );
            }
            if place == 0 {
                self.count(&given, state.start, id);
            }
            if let Some(from) = busy_from {
                self.report(id, Report::Finished { busy: end.since(from) });
            }
            for then in next {
                self.then(id, then);
            }
            self.come(id);
            self.wake(id);
        }
    }

    fn count(&mut self, given: &Given, start: Nanos, host: HostId) {
        let running = &mut self.clients[given.client.0 as usize - 1];
        let per_launch = match running.client.work {
            ClientWork::Fused(count) => u64::from(count),
            _ => 1,
        };
        if self.now > self.warm_up {
            running.done += per_launch;
        }
        if host == HostId(0) {
            self.spans.push(SimSpan { client: given.client, host, start, end: self.now });
        }
    }
}
