//! Modelled hosts: the commands that they execute, and the messages between them.

use std::sync::Arc;

use base::{BufferId, Bytes, Channel, HostId, Nanos, TransferTag};
use control::Event;
use ir::{DType, Partition};
use protocol::{
    Acknowledge, Command, Compiled, GivenGroup, GroupCollective, HostReply, MadeGroup, PeerMessage,
    RelayHop, Report,
};

use super::{SimEvent, Simulation};
use crate::binding::RunOf;
use crate::host::{Onward, Then, Todo};
use crate::modelled::{self, read_program};

impl Simulation {
    pub(super) fn wake(&mut self, id: HostId) {
        let host = &mut self.hosts[id.0 as usize];
        if !host.awake && !host.queue.is_empty() {
            host.awake = true;
            let when = host.free_at.max(self.now);
            self.at(when, SimEvent::HostTurn(id));
        }
    }

    pub(super) fn host_turn(&mut self, id: HostId) {
        let host = &mut self.hosts[id.0 as usize];
        host.awake = false;
        let Some(todo) = host.queue.pop_front() else { return };
        match self.do_next(id, &todo) {
            Some(cost) => self.hosts[id.0 as usize].free_at = self.now + cost,
            // The event that it waits for wakes the host again.
            None => return self.hosts[id.0 as usize].queue.push_front(todo),
        }
        self.wake(id);
    }

    /// Executes one queue entry and returns its cost, or `None` if it must wait.
    fn do_next(&mut self, id: HostId, todo: &Todo) -> Option<Nanos> {
        match todo {
            Todo::Command(command) => self.command(id, command),
            Todo::EndOfRun { acknowledge } => {
                self.acknowledge(id, *acknowledge);
                Some(Nanos(0))
            }
            Todo::Step { program, index, run } => {
                let steps = self.hosts[id.0 as usize].programs[program].clone();
                self.run_step(id, &steps[*index as usize], run)
            }
        }
    }

    fn command(&mut self, id: HostId, command: &Command) -> Option<Nanos> {
        match command {
            Command::Launch { .. } | Command::RunProgram { .. } => {
                return self.dispatch(id, command);
            }
            Command::Compile { ticket, .. } => {
                let reply = HostReply::ProgramCompiled { compiled: Box::new(compiled()) };
                self.report(id, Report::CommandDone { ticket: *ticket, reply });
            }
            Command::ReadProgram { ticket, program } => {
                let reply = read_program(program);
                self.report(id, Report::CommandDone { ticket: *ticket, reply });
            }
            Command::LoadProgram { executable, steps } => {
                let host = &mut self.hosts[id.0 as usize];
                host.programs.insert(*executable, steps.clone());
            }
            Command::ReportEnd {} => {
                self.acknowledge(id, Acknowledge::Finished);
            }
            // Arrays that clients transfer themselves are modelled as arriving at once.
            Command::ReportArrival { buffer } => {
                self.report(id, Report::Arrived { buffer: *buffer });
            }
            _ => {}
        }
        Some(self.costs.step)
    }

    /// Executes a launch or a program; `None` if it must wait.
    fn dispatch(&mut self, id: HostId, command: &Command) -> Option<Nanos> {
        match command {
            Command::Launch {
                previous,
                sequence,
                acknowledge,
                executable,
                args,
                first_result,
                results,
                client,
                ..
            } => {
                self.launch(id, *executable, args, *first_result, *results, *client)?;
                self.check_order(id, *previous, *sequence);
                self.acknowledge(id, *acknowledge);
                Some(self.costs.launch)
            }
            Command::RunProgram {
                previous,
                sequence,
                acknowledge,
                executable,
                steps,
                args,
                first_buffer,
                first_tag,
                client,
                ..
            } => {
                self.check_order(id, *previous, *sequence);
                let run = Arc::new(RunOf {
                    args: args.clone(),
                    first_buffer: *first_buffer,
                    first_tag: *first_tag,
                    client: *client,
                });
                let host = &mut self.hosts[id.0 as usize];
                host.queue.push_front(Todo::EndOfRun { acknowledge: *acknowledge });
                for index in steps.clone().rev() {
                    host.queue.push_front(Todo::Step {
                        program: *executable,
                        index,
                        run: run.clone(),
                    });
                }
                Some(self.costs.step)
            }
            _ => Some(self.costs.step),
        }
    }

    fn run_step(&mut self, id: HostId, step: &Command, run: &RunOf) -> Option<Nanos> {
        match step {
            Command::Launch { executable, args, first_result, results, .. } => {
                let args: Vec<BufferId> = args.iter().map(|&slot| run.buffer(slot)).collect();
                let first = run.buffer(*first_result);
                self.launch(id, *executable, &args, first, *results, run.client)?;
                Some(self.costs.launch)
            }
            Command::Send { source, pieces, .. } => {
                let source = run.buffer(*source);
                for piece in pieces {
                    let tag = TransferTag(piece.tag.0 + run.first_tag.0);
                    let onward = Onward { tag, to: piece.target, channel: piece.channel };
                    let size = Bytes(piece.region.elements() * 4);
                    self.send_after(id, source, Then { onward, size });
                }
                Some(self.costs.step)
            }
            Command::Relay { relays } => {
                self.relay(id, relays, run);
                Some(self.costs.step)
            }
            Command::Collective { given, made, targets, sources, .. }
            | Command::RowExchange { given, made, targets, sources, .. } => {
                self.exchange(id, step, (given, targets), (made, sources), run);
                Some(self.costs.step)
            }
            Command::Receive { buffer, shards, relays, .. } => {
                self.relay(id, relays, run);
                let pieces = shards.iter().flat_map(|shard| &shard.pieces);
                let tags = pieces.map(|piece| TransferTag(piece.tag.0 + run.first_tag.0));
                self.hosts[id.0 as usize].expect(&[run.buffer(*buffer)], tags);
                Some(self.costs.step)
            }
            _ => Some(self.costs.step),
        }
    }

    /// Relays messages: those that have arrived now, others on arrival.
    fn relay(&mut self, id: HostId, relays: &[RelayHop], run: &RunOf) {
        for relay in relays {
            let at = |tag: TransferTag| TransferTag(tag.0 + run.first_tag.0);
            let onward = Onward { tag: at(relay.onward), to: relay.target, channel: relay.channel };
            let host = &mut self.hosts[id.0 as usize];
            match host.early.get(&at(relay.tag)) {
                Some(&size) => self.then(id, Then { onward, size }),
                None => host.relays.entry(at(relay.tag)).or_default().push(onward),
            }
        }
    }

    /// Sends a message once its source buffer is computed.
    fn send_after(&mut self, id: HostId, source: BufferId, then: Then) {
        match self.hosts[id.0 as usize].computing.get_mut(&source) {
            Some(waiting) => waiting.push(then),
            None => self.then(id, then),
        }
    }

    /// Runs one host's part in a collective or row exchange.
    fn exchange(
        &mut self,
        id: HostId,
        step: &Command,
        (given, targets): (&[GivenGroup], &[PeerMessage]),
        (made, sources): (&[MadeGroup], &[PeerMessage]),
        run: &RunOf,
    ) {
        let tag = |tag: TransferTag| TransferTag(tag.0 + run.first_tag.0);
        if let Some(group) = given.first() {
            for PeerMessage { host, tag: message, shards } in targets {
                let bytes = exchanged(step, given, targets, shards.len() as u64);
                let size = Bytes(if *host == id { 0 } else { bytes });
                let onward = Onward { tag: tag(*message), to: *host, channel: Channel::INSIDE };
                self.send_after(id, run.buffer(group.buffers[0]), Then { onward, size });
            }
        }
        let made = made.iter().flat_map(|group| &group.values);
        let buffers: Vec<BufferId> = made.map(|value| run.buffer(value.buffer)).collect();
        if !buffers.is_empty() {
            let tags = sources.iter().map(|message| tag(message.tag));
            self.hosts[id.0 as usize].expect(&buffers, tags);
        }
    }

    pub(super) fn then(&mut self, id: HostId, then: Then) {
        let Then { onward: Onward { tag, to, channel }, size } = then;
        let takes = Nanos((size.0 as f64 * self.per_byte(id, channel)) as u64);
        let free_at = self.hosts[id.0 as usize].channels_free_at.entry(channel).or_default();
        *free_at = (*free_at).max(self.now) + takes;
        let arrives = *free_at + self.costs.network;
        self.at(arrives, SimEvent::Message(to, tag, size));
    }

    /// Returns the transfer time per byte on a host's channel, in nanoseconds.
    fn per_byte(&self, host: HostId, channel: Channel) -> f64 {
        let cluster = self.controller.cluster();
        let island = cluster.host(host).and_then(|host| cluster.island(host.island));
        let number = channel.0.checked_sub(1);
        let rate = number.and_then(|number| island?.channels.get(number as usize));
        rate.map_or(self.costs.transfer_ns_per_byte, |rate| 8e9 / rate.0)
    }

    pub(super) fn report(&mut self, host: HostId, report: Report) {
        let arrives = self.now + self.costs.network;
        self.at(arrives, SimEvent::Arrives(Event::Host { host, report }));
    }
}

/// Returns the bytes that one host sends another, which holds `shards` shards.
///
/// Assumed: the data choose all target shards equally often.
fn exchanged(step: &Command, given: &[GivenGroup], targets: &[PeerMessage], shards: u64) -> u64 {
    let given: u64 = given.iter().map(|group| group.shards.len() as u64).sum();
    match *step {
        Command::Collective { kind, differing, groups, shard_bytes, .. } => {
            let held = given.min(u64::from(differing)) * shard_bytes.0;
            match kind {
                // A reduce-scatter pass and an all-gather pass.
                GroupCollective::Reduce => 2 * held / u64::from(groups),
                GroupCollective::Scatter => held / u64::from(groups),
                GroupCollective::Gather => held,
            }
        }
        Command::RowExchange { rows, choices, row_bytes, .. } => {
            let all: u64 = targets.iter().map(|message| message.shards.len() as u64).sum();
            given * u64::from(rows) * u64::from(choices) * shards / all * row_bytes.0
        }
        _ => 0,
    }
}

/// Returns the description of a program with one scalar parameter and one scalar result.
fn compiled() -> Compiled {
    modelled::compiled("modelled", DType::F32, &[], Partition::Replicated)
}
