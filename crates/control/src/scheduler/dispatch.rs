//! Which gangs and commands are dispatched next.

use std::collections::BTreeSet;

use base::{ClientId, HostId, Nanos};
use smallvec::SmallVec;

use super::GangScheduler;
use super::gangs::Gang;
use super::queues::Item;
use crate::config::Dispatch;
use crate::hosts::{LaunchShare, Reporting};
use crate::submissions::{Member, Out, SegmentPosition};

/// Lower bound of the estimate of a program that was never measured.
const UNKNOWN: Nanos = Nanos(1_000_000);

impl GangScheduler {
    /// Issues a gang to all its hosts and charges its client.
    pub(super) fn issue_gang(&mut self, gang: Gang, out: &mut Out) {
        let Gang { client, executable, position, expected, .. } = gang;
        self.inputs.take(&gang.inputs);
        // A gang queued before its program was measured is charged by the measurement.
        let factor = self.run_times.factor(executable);
        let estimate = factor.map_or(expected.max(UNKNOWN), |factor| expected.times(factor));
        for &island in &gang.islands {
            let all = f64::from(self.island_devices[island.0 as usize].max(1));
            let here = gang.members.iter().filter(|member| self.host(member.host).island == island);
            let taken: u32 = here.map(|member| member.devices).sum();
            let cost = estimate.times(f64::from(taken) / all);
            self.accounts.charge(client, island, cost);
            self.sequences[island.0 as usize] += 1;
        }
        // The first measurement of a program is requested at once, as all earlier decisions rest on
        // guesses.
        let is_measured = factor.is_some();
        for Member { host, devices, mut command } in gang.members {
            let launches = 1;
            let part = LaunchShare {
                client,
                executable,
                devices,
                launches,
                expected,
                estimate,
                is_measured,
            };
            let state = &mut self.hosts[host.0 as usize];
            let sequence = self.sequences[state.island.0 as usize];
            let reporting = match self.mode {
                Dispatch::Sequential => Reporting::Each,
                Dispatch::Parallel if self.arrivals.is_shared(state.island) => Reporting::Often,
                Dispatch::Parallel => Reporting::Seldom,
            };
            let is_launch = state.issue(&mut command, sequence, part, self.window, reporting);
            if is_launch && reporting == Reporting::Each {
                *self.unenqueued.entry(client).or_default() += 1;
            }
            self.dispatch_command(client, host, command, out);
        }
        if position == SegmentPosition::Last {
            self.memory.end_segmented(client);
        }
    }

    /// Dispatches everything that is ready.
    pub fn dispatch(&mut self, out: &mut Out) {
        loop {
            let before = out.len();
            self.dispatch_gangs(out);
            if !std::mem::take(&mut self.is_short) {
                break;
            }
            self.drain_all(out);
            if out.len() == before {
                break;
            }
        }
        self.reap_clients();
    }

    /// Dispatches ready gangs, each with the commands behind it.
    fn dispatch_gangs(&mut self, out: &mut Out) {
        while let Some(id) = self.next_to_leave() {
            let gang = self.gangs.remove(&id).expect("gangs that are ready exist");
            let client = gang.client;
            let hosts: SmallVec<[HostId; 8]> =
                gang.members.iter().map(|member| member.host).collect();
            self.issue_gang(gang, out);
            for host in hosts {
                // Host by host: the drain of one may drain others, whose next gang counts once.
                let queues = self.queues.get_mut(&client).expect("a gang waits in queues");
                queues.pop_gang(id, host);
                self.drain(client, host, out);
            }
        }
    }

    /// Returns the next gang to dispatch, if any can be. Marks hosts where a gang waits for window
    /// space.
    fn next_to_leave(&mut self) -> Option<u64> {
        let mut ready: SmallVec<[u64; 16]> =
            self.queues.values().flat_map(|queues| queues.ready.iter().copied()).collect();
        if ready.is_empty() {
            return None;
        }
        let rank = |id: &u64| {
            let gang = &self.gangs[id];
            self.accounts.rank(gang.client, &gang.islands)
        };
        ready.sort_by(|a, b| rank(a).compare(&rank(b)).then(a.cmp(b)));
        let mut kept: BTreeSet<HostId> = BTreeSet::new();
        // While a gang waits for device memory on a host, no other segmented run begins there, or
        // it might starve.
        let mut short: BTreeSet<HostId> = BTreeSet::new();
        for id in ready {
            let gang = &self.gangs[&id];
            let hosts = || gang.members.iter().map(|member| member.host);
            let overtakes = hosts().any(|host| kept.contains(&host))
                || gang.position == SegmentPosition::First
                    && hosts().any(|host| short.contains(&host));
            let is_missing = !self.inputs.have(&gang.inputs) || self.is_delayed(gang);
            if overtakes || self.is_held(gang.client) || is_missing {
                continue;
            }
            let full = |host: &HostId| !self.hosts[host.0 as usize].has_window(self.window);
            if let Some(host) = hosts().find(full) {
                kept.extend(hosts());
                self.hosts[host.0 as usize].wanted = true;
            } else if self.fits(gang) {
                return Some(id);
            } else {
                short.extend(hosts());
                self.is_short = true;
            }
        }
        None
    }

    /// Dispatches commands of one queue up to the next launch or the next command that must wait.
    pub(super) fn drain(&mut self, client: ClientId, host: HostId, out: &mut Out) {
        while let Some(queues) = self.queues.get_mut(&client) {
            match queues.front(host) {
                None => return,
                Some(&Item::Member(id)) => {
                    let gang = self.gangs.get_mut(&id).expect("members belong to gangs");
                    gang.first += 1;
                    if gang.is_in_front() {
                        queues.ready.insert(id);
                    }
                    return;
                }
                Some(&Item::Command(ref command, link)) => {
                    if !self.memory.fits(host, command) {
                        self.is_short = true;
                        return;
                    }
                    if self.arrivals.delay(host, command) || self.transfers.must_wait(link) {
                        return;
                    }
                    let command = queues.pop_command(host, &self.gangs);
                    self.dispatch_command(client, host, command, out);
                    self.on_dispatched(client, link, out);
                }
            }
        }
    }

    /// Drains all queues that have a command at the front.
    pub(super) fn drain_all(&mut self, out: &mut Out) {
        let fronts = self.queues.iter().flat_map(|(&client, queues)| {
            queues.commands_in_front().map(move |host| (client, host))
        });
        for (client, host) in fronts.collect::<Vec<_>>() {
            self.drain(client, host, out);
        }
    }
}
