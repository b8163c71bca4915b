//! Computations over several hosts.

use base::{BufferId, HostId, Nanos};

use super::FaultySystem;
use crate::faults::event::SimEvent;
use crate::faults::host::Input;
use crate::faults::user::computed;
use crate::faults::values::Known;

impl FaultySystem {
    /// Begins a computation once all its hosts take part and have its argument.
    pub(super) fn begin(&mut self, gang: BufferId) {
        let known = &self.gangs[&gang];
        if known.outcome.is_some() || known.members.len() < self.members[&known.executable].len() {
            return;
        }
        let members: Vec<(HostId, u64, Input)> = known
            .members
            .iter()
            .map(|(&host, (process, input))| (host, *process, input.clone()))
            .collect();
        let mut values = Vec::new();
        for (host, process, input) in members {
            let machine = &mut self.machines[host.0 as usize];
            let Some(running) = machine.process.as_mut().filter(|one| one.incarnation == process)
            else {
                return;
            };
            match input {
                Input::Zeros => values.push(0),
                Input::Value(cell) => match running.store.know(cell) {
                    Known::Ready(found) => values.push(found[0]),
                    _ => return,
                },
            }
        }
        let Ok(values) = values.try_into() else {
            return self.violate(format!("computation {gang} is not over two hosts"));
        };
        let takes = Nanos(10_000 + self.random.below(400_000));
        self.gangs.get_mut(&gang).expect("seen above").outcome = Some(computed(values));
        self.at(self.now + takes, SimEvent::Ended(gang));
    }

    pub(super) fn ended(&mut self, gang: BufferId) {
        let known = &self.gangs[&gang];
        let members: Vec<(HostId, u64)> =
            known.members.iter().map(|(&host, (process, _))| (host, *process)).collect();
        let outcome = known.outcome.expect("it has begun");
        let mut ready = self.now;
        for &(host, process) in &members {
            match self.reachable(host, process, true) {
                Some(when) => ready = ready.max(when),
                None => return, // its island is lost
            }
        }
        if ready > self.now {
            return self.at(ready, SimEvent::Ended(gang));
        }
        for (&(host, _), value) in members.iter().zip(outcome) {
            let machine = &mut self.machines[host.0 as usize];
            let running = machine.process.as_mut().expect("reachable");
            running.store.results.insert(gang, vec![value]);
        }
        self.gangs.remove(&gang);
        let waiting: Vec<BufferId> = self.gangs.keys().copied().collect();
        waiting.into_iter().for_each(|other| self.begin(other));
        for (host, process) in members {
            self.turn_of_host(host, process);
        }
    }
}
