//! Faults by seed, and what starts and stops host processes, as the launcher of a run does.

use base::{HostId, IslandId, Nanos};
use control::{Event, IslandState};

use super::{FaultySystem, HOSTS, ISLANDS, island_of};
use crate::faults::event::{InjectedFault, SimEvent};
use crate::faults::host::Process;
use crate::faults::network::latency;
use crate::modelled;

impl FaultySystem {
    /// Decides what goes wrong and when.
    pub(super) fn schedule_faults(&mut self) {
        for _ in 0..self.random.below(5) {
            let when = Nanos(self.now.0 + self.random.below(12_000_000_000));
            let fault = self.choose();
            self.at(when, SimEvent::Fault(fault));
        }
    }

    fn choose(&mut self) -> InjectedFault {
        let host = HostId(self.random.below(self.machines.len() as u64) as u32);
        let user = self.random.below(self.users.len() as u64) as usize;
        let island = self.random.below(ISLANDS.into()) as usize;
        // Some are over before the host is lost, some after.
        let span = Nanos(1_000_000 + self.random.below(14_000_000_000));
        match self.random.below(12) {
            0..=3 => InjectedFault::Kill(host),
            4..=6 => InjectedFault::Stop(host, span),
            7 | 8 => InjectedFault::Cut(host, span),
            9 => InjectedFault::Depart(user),
            10 => InjectedFault::Freeze(span),
            _ => InjectedFault::Remove(island, self.random.below(3) == 0),
        }
    }

    pub(super) fn inject(&mut self, fault: InjectedFault) {
        if self.now < self.frozen_until {
            return self.at(self.frozen_until, SimEvent::Fault(fault));
        }
        let is_of_supervisor = matches!(
            fault,
            InjectedFault::End(..) | InjectedFault::Restart(_) | InjectedFault::Start(_)
        );
        if self.is_ending && !is_of_supervisor {
            return;
        }
        self.note(|| format!("{fault:?}"));
        match fault {
            InjectedFault::Kill(host) => {
                self.counts.kills += 1;
                self.kill(host);
            }
            InjectedFault::Stop(host, span) => {
                self.counts.stalls += 1;
                let until = self.now + span;
                let machine = &mut self.machines[host.0 as usize];
                machine.stopped_until = until.max(machine.stopped_until);
                self.slow(host, until);
            }
            InjectedFault::Cut(host, span) => {
                self.counts.partitions += 1;
                let until = self.now + span;
                let machine = &mut self.machines[host.0 as usize];
                machine.cut_until = until.max(machine.cut_until);
                self.slow(host, until);
            }
            InjectedFault::Depart(user) => {
                self.counts.departures += 1;
                self.depart(user);
            }
            InjectedFault::Freeze(span) => {
                self.counts.freezes += 1;
                self.frozen_until = self.now + span;
                for island in 0..ISLANDS as usize {
                    self.troubles.slow(island, self.frozen_until);
                }
            }
            InjectedFault::Remove(island, by_force) => self.remove(island, by_force),
            InjectedFault::End(host, process) => {
                if self.machines[host.0 as usize].is_running(process) {
                    self.machines[host.0 as usize].process = None;
                }
            }
            InjectedFault::Restart(island) => {
                self.restarting.remove(&island);
                self.start_island(island);
                // Another that was lost before may have come back in its place.
                let id = IslandId(island as u32);
                if is_gone(self.controller.island_state(id)) {
                    self.restart(island);
                }
            }
            InjectedFault::Start(host) => self.start(host),
        }
    }

    fn remove(&mut self, island: usize, by_force: bool) {
        match self.controller.remove_island(IslandId(island as u32), by_force) {
            Ok(effects) => {
                self.counts.removals += 1;
                self.troubles.slow(island, self.now);
                self.apply(effects);
            }
            Err(error) => self.note(|| format!("it is not removed: {error}")),
        }
    }

    fn slow(&mut self, host: HostId, until: Nanos) {
        self.troubles.slow(island_of(host), until);
    }

    /// Ends a process; its connection is closed.
    fn kill(&mut self, host: HostId) {
        let machine = &mut self.machines[host.0 as usize];
        if let Some(process) = machine.process.take() {
            let incarnation = process.incarnation;
            machine.stopped_until = Nanos(0);
            self.troubles.lost(island_of(host));
            self.soon(SimEvent::ConnectionLost(host, incarnation));
        }
    }

    /// The controller gives a host up: its connection is closed, and its process is ended.
    pub(super) fn stop_host(&mut self, host: HostId) {
        let island = island_of(host);
        self.note(|| format!("host {host} is given up"));
        self.troubles.lost(island);
        self.counts.losses += u64::from(host.0.is_multiple_of(HOSTS));
        let machine = &mut self.machines[host.0 as usize];
        machine.is_connected = false;
        let process = machine.incarnation;
        let ends = Nanos(self.now.0 + self.random.below(5_000_000));
        self.at(ends, SimEvent::Fault(InjectedFault::End(host, process)));
        self.restart(island);
    }

    /// Starts an island again after a while.
    pub(super) fn restart(&mut self, island: usize) {
        if self.restarting.insert(island) {
            let when = Nanos(self.now.0 + 200_000_000 + self.random.below(3_000_000_000));
            self.at(when, SimEvent::Fault(InjectedFault::Restart(island)));
        }
    }

    /// Starts the processes of an island.
    pub(super) fn start_island(&mut self, mut island: usize) {
        if self.now > Nanos(0) {
            let state = |island| self.controller.island_state(IslandId(island as u32));
            if !(0..ISLANDS as usize).any(|island| is_gone(state(island))) {
                return;
            }
            // All are of one shape, so another that was lost before may come back for it.
            island = self.controller.add_island(&Self::island()).0 as usize;
        }
        let first = island * HOSTS as usize;
        for host in first..first + HOSTS as usize {
            let when = Nanos(self.now.0 + 1_000_000 + self.random.below(300_000_000));
            self.machines[host].process = None;
            self.machines[host].stopped_until = Nanos(0);
            self.at(when, SimEvent::Fault(InjectedFault::Start(HostId(host as u32))));
        }
    }

    fn start(&mut self, host: HostId) {
        let now = self.now;
        let takes = latency(&mut self.random);
        let machine = &mut self.machines[host.0 as usize];
        machine.incarnation += 1;
        machine.is_connected = true;
        machine.process = Some(Process::new(machine.incarnation, now));
        (machine.to_host, machine.to_controller) = (now + takes, now + takes);
        let number = host.0 + 100 * machine.incarnation as u32;
        let info = modelled::host_info(number, 1, None, 1);
        self.submit(Event::HostJoined { host, info });
        let id = IslandId(island_of(host) as u32);
        if self.controller.island_state(id) == IslandState::Up {
            self.note(|| format!("island {id} is up"));
            self.troubles.restored(id.0 as usize, self.now);
        }
    }

    /// Takes note of removals that have ended.
    pub(super) fn end_removals(&mut self) {
        for island in 0..ISLANDS as usize {
            if let Some(Err(error)) = self.controller.removal(IslandId(island as u32)) {
                self.note(|| format!("island {island} is not removed: {error}"));
            }
        }
    }

    /// Whether all islands are up, and nothing is stopped, cut off or frozen.
    pub(super) fn is_whole(&self) -> bool {
        let is_up =
            |island| self.controller.island_state(IslandId(island as u32)) == IslandState::Up;
        let is_free = |until: Nanos| until <= self.now;
        is_free(self.frozen_until)
            && self.restarting.is_empty()
            && (0..ISLANDS as usize).all(is_up)
            && self.machines.iter().all(|one| is_free(one.cut_until) && is_free(one.stopped_until))
    }
}

fn is_gone(state: IslandState) -> bool {
    matches!(state, IslandState::Lost | IslandState::Removed)
}
