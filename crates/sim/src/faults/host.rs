//! A modelled host process: executes commands in order, as `fairway.host` does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use base::{BufferId, ClientId, ExecutableId, HostId, Nanos, Random, Status, TransferTag};
use protocol::{
    Acknowledge, Command, CommandTicket, CompileRole, HostReply, ReceivedShard, RelayHop, Report,
    ShardSend,
};

use super::values::{Cell, Failure, Known, Store, Value};
use crate::binding::RunOf;
use crate::host::UNFINISHED_LAUNCHES;
use crate::modelled::read_program;

/// What a process does to the rest of the system.
#[derive(Debug)]
pub(super) enum Action {
    Report(Report),
    Send {
        to: HostId,
        tag: TransferTag,
        content: Result<i64, Status>,
    },
    /// Take part in a computation, named by its first result.
    Join {
        gang: BufferId,
        executable: ExecutableId,
        input: Input,
    },
    /// Something that is to be looked at again later.
    Later(Nanos),
}

/// A host's argument of a computation.
#[derive(Debug, Clone)]
pub(super) enum Input {
    Value(Cell),
    Zeros,
}

/// An entry of the queue.
#[derive(Debug)]
enum Todo {
    Command(Command),
    EndOfRun { acknowledge: Acknowledge, completion: Option<BufferId> },
}

/// What other threads of the process wait for.
#[derive(Debug)]
enum Wait {
    Send { value: Cell, pieces: Vec<ShardSend> },
    Read { ticket: CommandTicket, value: Cell, shard: usize },
    Ready { ticket: CommandTicket, values: Vec<Cell> },
    Arrival { buffer: BufferId, value: Cell },
    Compile { ticket: CommandTicket, executable: ExecutableId, until: Nanos, role: CompileRole },
}

/// One process of a host.
#[derive(Debug)]
pub(super) struct Process {
    /// How many processes the host had before.
    pub incarnation: u64,
    pub store: Store,
    pub busy_until: Nanos,
    queue: VecDeque<Todo>,
    functions: BTreeSet<ExecutableId>,
    programs: BTreeMap<ExecutableId, Arc<Vec<Command>>>,
    relays: BTreeMap<TransferTag, Vec<RelayHop>>,
    waits: Vec<Wait>,
    /// Computations that may not have ended, and ends to report, in their order.
    unfinished: VecDeque<BufferId>,
    ends: VecDeque<Option<BufferId>>,
    last_launch: u64,
    last_gang: Option<BufferId>,
    /// The report of a lost input that the controller has not acknowledged.
    asked: Option<TransferTag>,
    acknowledged: BTreeSet<TransferTag>,
}

type Outcome<T> = Result<T, String>;

impl Process {
    pub fn new(incarnation: u64, now: Nanos) -> Self {
        Self {
            incarnation,
            store: Store::default(),
            busy_until: now,
            queue: VecDeque::new(),
            functions: BTreeSet::new(),
            programs: BTreeMap::new(),
            relays: BTreeMap::new(),
            waits: Vec::new(),
            unfinished: VecDeque::new(),
            ends: VecDeque::new(),
            last_launch: 0,
            last_gang: None,
            asked: None,
            acknowledged: BTreeSet::new(),
        }
    }

    pub fn push(&mut self, command: Command) {
        self.queue.push_back(Todo::Command(command));
    }

    /// Delivers a message, and relays it.
    pub fn arrive(
        &mut self,
        tag: TransferTag,
        content: Result<i64, Status>,
        out: &mut Vec<Action>,
    ) {
        for hop in self.relays.remove(&tag).unwrap_or_default() {
            out.push(Action::Send { to: hop.target, tag: hop.onward, content: content.clone() });
        }
        self.store.arrive(tag, content);
    }

    /// A peer is lost.
    pub fn lose(
        &mut self,
        peer: HostId,
        (first_tag, error): (TransferTag, &Status),
        out: &mut Vec<Action>,
    ) {
        for tag in self.store.lose(peer, first_tag, error) {
            self.arrive(tag, Err(error.clone()), out);
        }
    }

    /// The controller has acknowledged a report.
    pub fn acknowledge(&mut self, tag: TransferTag) {
        self.acknowledged.insert(tag);
    }

    /// Executes the next command, unless it must wait; returns whether it did.
    ///
    /// # Errors
    /// The command contradicts what the host has.
    pub fn execute(&mut self, random: &mut Random, out: &mut Vec<Action>) -> Outcome<bool> {
        match self.queue.pop_front() {
            None => Ok(false),
            Some(Todo::EndOfRun { acknowledge, completion }) => {
                if let Some(completion) = completion {
                    let last = self.unfinished.back();
                    let value = last.map_or(Value::Ready(Vec::new()), |&gang| Value::Result(gang));
                    self.store.make(completion, value)?;
                }
                self.end(acknowledge, out);
                Ok(true)
            }
            Some(Todo::Command(command)) => {
                let is_done = self.command(&command, random, out)?;
                if !is_done {
                    self.queue.push_front(Todo::Command(command));
                }
                Ok(is_done)
            }
        }
    }

    fn command(
        &mut self,
        command: &Command,
        random: &mut Random,
        out: &mut Vec<Action>,
    ) -> Outcome<bool> {
        match command {
            Command::Launch { .. } | Command::RunProgram { .. } => return self.run(command, out),
            Command::Put { buffer, shards, .. } => {
                let values = shards
                    .iter()
                    .flat_map(|upload| upload.positions.iter().map(|_| i64::from(upload.data[0])));
                self.store.make(*buffer, Value::Ready(values.collect()))?;
            }
            Command::AssembleShards { buffer, shards, .. } => {
                let sources =
                    shards.iter().map(|one| Ok((self.store.cell(one.source)?, one.shard as usize)));
                let sources = sources.collect::<Outcome<_>>()?;
                self.store.make(*buffer, Value::Shared(sources))?;
            }
            Command::Copy { source, buffer, .. } => {
                let cell = self.store.cell(*source)?;
                self.store.make(*buffer, Value::Shared(vec![(cell, 0)]))?;
            }
            Command::Send { source, pieces, .. } => {
                let value = self.store.cell(*source)?;
                self.waits.push(Wait::Send { value, pieces: pieces.clone() });
            }
            Command::Relay { relays } => {
                relays.iter().for_each(|hop| self.relay(*hop, out));
                relays.iter().for_each(|hop| self.store.discard(hop.tag));
            }
            Command::Receive { buffer, shards, relays, .. } => {
                relays.iter().for_each(|hop| self.relay(*hop, out));
                self.receive(*buffer, shards)?;
            }
            Command::Read { ticket, buffer, shard, .. } => {
                let (value, shard) = (self.store.cell(*buffer)?, *shard as usize);
                self.waits.push(Wait::Read { ticket: *ticket, value, shard });
            }
            Command::CheckReady { ticket, buffers } => {
                let values = buffers.iter().map(|&buffer| self.store.cell(buffer));
                let values = values.collect::<Outcome<_>>()?;
                self.waits.push(Wait::Ready { ticket: *ticket, values });
            }
            Command::ReportArrival { buffer } => {
                let value = self.store.cell(*buffer)?;
                self.waits.push(Wait::Arrival { buffer: *buffer, value });
            }
            Command::Delete { buffers } => {
                buffers.iter().try_for_each(|&buffer| self.store.cell(buffer).map(drop))?;
            }
            Command::Free { buffers } => {
                buffers.iter().try_for_each(|&buffer| self.store.free(buffer))?;
            }
            _ => self.program(command, random, out)?,
        }
        Ok(true)
    }

    fn receive(&mut self, buffer: BufferId, shards: &[ReceivedShard]) -> Outcome<()> {
        let mut all = BTreeMap::new();
        for shard in shards {
            let tags: Vec<TransferTag> = shard.pieces.iter().map(|piece| piece.tag).collect();
            shard.pieces.iter().for_each(|piece| self.store.expect(piece.tag, piece.source));
            all.extend(shard.positions.iter().map(|&position| (position, tags.clone())));
        }
        self.store.make(buffer, Value::Incoming(all.into_values().collect())).map(drop)
    }

    /// Commands about programs, and others without arrays.
    fn program(
        &mut self,
        command: &Command,
        random: &mut Random,
        out: &mut Vec<Action>,
    ) -> Outcome<()> {
        match command {
            Command::Compile { ticket, executable, role, .. } => {
                if let CompileRole::Follower(leader) = role {
                    self.store.expect(leader.tag, leader.host);
                }
                let until = Nanos(self.busy_until.0 + 200_000 + random.below(5_000_000));
                let (ticket, executable, role) = (*ticket, *executable, role.clone());
                self.waits.push(Wait::Compile { ticket, executable, until, role });
                out.push(Action::Later(until));
            }
            Command::ReadProgram { ticket, program } => {
                let reply = read_program(program);
                out.push(Action::Report(Report::CommandDone { ticket: *ticket, reply }));
            }
            Command::LoadProgram { executable, steps } => {
                self.programs.insert(*executable, steps.clone());
            }
            Command::FreeExecutable { executable } => {
                self.functions.remove(executable);
                self.programs.remove(executable);
            }
            Command::ReportEnd {} => self.ends.push_back(self.unfinished.back().copied()),
            Command::Peers { peers, first_tag } => {
                self.store.drop_before(*first_tag);
                peers.iter().for_each(|peer| self.store.find(peer.host, peer.first_tag));
            }
            Command::EndClient { .. } => {}
            other => return Err(format!("there is no model of {other:?}")),
        }
        Ok(())
    }

    fn relay(&mut self, hop: RelayHop, out: &mut Vec<Action>) {
        self.store.expect(hop.tag, hop.source);
        match self.store.message(hop.tag).cloned() {
            Some(content) => out.push(Action::Send { to: hop.target, tag: hop.onward, content }),
            None => self.relays.entry(hop.tag).or_default().push(hop),
        }
    }

    /// Executes a launch, or begins a run; returns whether it did.
    fn run(&mut self, command: &Command, out: &mut Vec<Action>) -> Outcome<bool> {
        match command {
            Command::Launch {
                sequence,
                previous,
                acknowledge,
                executable,
                args,
                first_result,
                results,
                completion,
                client,
                ..
            } => {
                let results = (*first_result, *results, *completion);
                if !self.launch(*executable, (args, *client), results, out)? {
                    return Ok(false);
                }
                // A step of a program has no place of its own in the order.
                if *sequence != 0 {
                    self.begin(*sequence, *previous)?;
                    self.end(*acknowledge, out);
                }
            }
            Command::RunProgram {
                sequence,
                previous,
                acknowledge,
                executable,
                steps,
                args,
                first_buffer,
                first_tag,
                completion,
                client,
                ..
            } => {
                self.begin(*sequence, *previous)?;
                let run = RunOf {
                    args: args.clone(),
                    first_buffer: *first_buffer,
                    first_tag: *first_tag,
                    client: *client,
                };
                let program = self.programs.get(executable);
                let program =
                    program.ok_or_else(|| format!("program {executable} is not there"))?;
                let bound = program[steps.start as usize..steps.end as usize].iter();
                let bound = bound.map(|step| run.bind(step)).collect::<Outcome<Vec<_>>>()?;
                let (acknowledge, completion) = (*acknowledge, *completion);
                self.queue.push_front(Todo::EndOfRun { acknowledge, completion });
                for step in bound.into_iter().rev() {
                    self.queue.push_front(Todo::Command(step));
                }
            }
            _ => unreachable!("only these run"),
        }
        Ok(true)
    }

    fn begin(&mut self, sequence: u64, previous: u64) -> Outcome<()> {
        let last = std::mem::replace(&mut self.last_launch, sequence);
        if previous != last || sequence <= previous {
            return Err(format!(
                "launch {sequence} is to follow {previous}, but {last} was the last"
            ));
        }
        Ok(())
    }

    fn end(&mut self, acknowledge: Acknowledge, out: &mut Vec<Action>) {
        match acknowledge {
            Acknowledge::No => {}
            Acknowledge::Enqueued => {
                out.push(Action::Report(Report::Finished { busy: Nanos(0) }));
            }
            Acknowledge::Finished => self.ends.push_back(self.last_gang),
        }
    }

    fn launch(
        &mut self,
        executable: ExecutableId,
        (args, client): (&[BufferId], ClientId),
        (first_result, results, completion): (BufferId, u32, Option<BufferId>),
        out: &mut Vec<Action>,
    ) -> Outcome<bool> {
        if !self.functions.contains(&executable) {
            return Err(format!("function {executable} is not there"));
        }
        self.unfinished.retain(|gang| !self.store.results.contains_key(gang));
        let &[argument] = args else { return Err("a modelled function has one argument".into()) };
        let value = self.store.cell(argument)?;
        let (input, made) = match self.store.know(value) {
            Known::Missing => return Ok(false),
            Known::Failed(failure) => {
                if !failure.is_noted && !self.is_noted((argument, value), client, &failure, out) {
                    return Ok(false);
                }
                (Input::Zeros, Value::Failed(Failure { is_noted: true, ..failure }))
            }
            Known::Computing | Known::Ready(_) => {
                (Input::Value(value), Value::Result(first_result))
            }
        };
        if self.unfinished.len() >= UNFINISHED_LAUNCHES {
            return Ok(false);
        }
        for number in 0..u64::from(results) {
            self.store.make(BufferId(first_result.0 + number), made.clone())?;
        }
        if let Some(completion) = completion {
            self.store.make(completion, made)?;
        }
        self.unfinished.push_back(first_result);
        self.last_gang = Some(first_result);
        out.push(Action::Join { gang: first_result, executable, input });
        Ok(true)
    }

    /// Returns whether the controller knows of a lost input; reports it once.
    fn is_noted(
        &mut self,
        (buffer, value): (BufferId, Cell),
        client: ClientId,
        failure: &Failure,
        out: &mut Vec<Action>,
    ) -> bool {
        let tag = TransferTag(buffer.0);
        if self.asked.is_none() {
            let error = failure.error.clone();
            out.push(Action::Report(Report::BuffersLost { client, buffer, count: 1, tag, error }));
            self.asked = Some(tag);
        }
        let is_noted = self.acknowledged.remove(&tag);
        if is_noted {
            self.asked = None;
            self.store.note(value);
        }
        is_noted
    }

    /// Does what other threads of the process waited for and can now do.
    pub fn poll(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let waits = std::mem::take(&mut self.waits);
        for wait in waits {
            if !self.try_end(&wait, now, out) {
                self.waits.push(wait);
            }
        }
        while let Some(end) = self.ends.front() {
            if end.is_some_and(|gang| !self.store.results.contains_key(&gang)) {
                break;
            }
            self.ends.pop_front();
            out.push(Action::Report(Report::Finished { busy: Nanos(1000) }));
        }
    }

    fn try_end(&mut self, wait: &Wait, now: Nanos, out: &mut Vec<Action>) -> bool {
        let failed = |ticket: CommandTicket, error: Status| {
            Action::Report(Report::CommandFailed { ticket, error })
        };
        let done = |ticket, reply| Action::Report(Report::CommandDone { ticket, reply });
        match wait {
            Wait::Send { value, pieces } => {
                let known = self.store.know(*value);
                for piece in pieces {
                    let content = match &known {
                        Known::Missing | Known::Computing => return false,
                        Known::Ready(values) => Ok(values[piece.shard as usize]),
                        Known::Failed(failure) => Err(failure.error.clone()),
                    };
                    if !self.store.is_lost(piece.target) {
                        out.push(Action::Send { to: piece.target, tag: piece.tag, content });
                    }
                }
            }
            Wait::Read { ticket, value, shard } => match self.store.know(*value) {
                Known::Missing | Known::Computing => return false,
                Known::Ready(values) => {
                    let data = values[*shard].to_le_bytes().to_vec().into();
                    out.push(done(*ticket, HostReply::ShardData { data }));
                }
                Known::Failed(failure) => out.push(failed(*ticket, failure.error)),
            },
            Wait::Ready { ticket, values } => {
                let known: Vec<Known> =
                    values.iter().map(|&value| self.store.know(value)).collect();
                let error = known.iter().find_map(|known| match known {
                    Known::Failed(failure) => Some(failure.error.clone()),
                    _ => None,
                });
                let is_open = |known: &Known| matches!(known, Known::Missing | Known::Computing);
                match error {
                    Some(error) => out.push(failed(*ticket, error)),
                    None if known.iter().any(is_open) => return false,
                    None => out.push(done(*ticket, HostReply::Success {})),
                }
            }
            Wait::Arrival { buffer, value } => {
                if matches!(self.store.know(*value), Known::Missing) {
                    return false;
                }
                out.push(Action::Report(Report::Arrived { buffer: *buffer }));
            }
            Wait::Compile { ticket, executable, until, role } => {
                return now >= *until && self.load(*ticket, *executable, role, out);
            }
        }
        true
    }

    /// Ends a compilation, unless the leader's program has not arrived; returns whether it has ended.
    fn load(
        &mut self,
        ticket: CommandTicket,
        executable: ExecutableId,
        role: &CompileRole,
        out: &mut Vec<Action>,
    ) -> bool {
        let loaded = match role {
            CompileRole::Leader(followers) => {
                for to in followers {
                    out.push(Action::Send { to: to.host, tag: to.tag, content: Ok(0) });
                }
                Ok(())
            }
            CompileRole::Follower(leader) => {
                let Some(content) = self.store.message(leader.tag).cloned() else { return false };
                self.store.discard(leader.tag);
                content.map(drop)
            }
        };
        out.push(Action::Report(match loaded {
            Ok(()) => {
                self.functions.insert(executable);
                let compiled = Box::new(super::user::compiled());
                Report::CommandDone { ticket, reply: HostReply::ProgramCompiled { compiled } }
            }
            Err(error) => Report::CommandFailed { ticket, error },
        }));
        true
    }

    /// Returns what the process waits for, for the log.
    pub fn waiting(&self) -> String {
        let next = self.queue.front();
        format!(
            "next {next:?}, waits {:?}, unfinished {:?}, reported {:?}",
            self.waits, self.unfinished, self.asked
        )
    }

    /// Returns what is left once all clients have gone, if anything.
    pub fn left(&mut self) -> Option<String> {
        self.store.collect();
        if let Some(left) = self.store.left() {
            return Some(left);
        }
        let counts = [
            ("commands", self.queue.len()),
            ("waits", self.waits.len()),
            ("functions", self.functions.len()),
            ("programs", self.programs.len()),
            ("relays", self.relays.len()),
        ];
        counts.iter().find(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}"))
    }
}
