//! The schedule that every rank executes: motifs of each collective of a step, and their order on
//! channels.

use base::Nanos;
use cost::ChannelCost;
use ir::{Collective, CollectiveKind, StepGraph, StepOp};
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::algebra::{Form, OrderedMotif};
use crate::motif::{ASIDE_MAX, Motif, Pattern, PayloadSegment, RankTransfer};
use crate::options::{Execution, Placed, SearchSpace, executions};
use crate::order::CommPlan;
use crate::problem::Problem;
use crate::queue::{ChannelQueue, QueueEntry};
use crate::schedule::{Policy, Slot};
use crate::semantics;

/// Most channels of a schedule.
const CHANNELS_MAX: usize = 64;
/// Most parts of a payload.
const PARTS_MAX: u64 = 1 << 24;
/// Most steps that a slot may be ahead.
const AHEAD_MAX: u32 = 8;

/// Why ranks cannot execute a schedule.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum RankScheduleError {
    /// The text cannot be parsed.
    #[error("a plan cannot be read: {0}; expected what `fairway plan` writes")]
    Text(String),
    /// Too many channels, or none.
    #[error("a plan orders {found} channels; expected 1 to {most}", most = CHANNELS_MAX)]
    Channels {
        /// Number of channels.
        found: usize,
    },
    /// A motif is not exactly once in the order of its channel.
    #[error(
        "motif {motif} of {name} stands {found} times in the order of channel {channel}; expected once"
    )]
    Order {
        /// Name of its operation.
        name: String,
        /// Index of the motif.
        motif: u32,
        /// Its channel.
        channel: u32,
        /// Number of its slots.
        found: usize,
    },
    /// A motif depends on one that its channel, or another one, carries only after it.
    #[error(
        "motif {motif} of {name} is never carried: in the order of channel {channel} it comes before \
         what it depends on"
    )]
    Deadlock {
        /// Name of its operation.
        name: String,
        /// Index of the motif.
        motif: u32,
        /// Its channel.
        channel: u32,
    },
    /// A slot is for a motif that does not exist.
    #[error(
        "channel {channel} has a slot for motif {motif} of operation {operation}, which is not there"
    )]
    Slot {
        /// Channel of the slot.
        channel: u32,
        /// Index of the operation.
        operation: u32,
        /// Index of the motif.
        motif: u32,
    },
    /// A slot is too many steps ahead.
    #[error("channel {channel} has a slot {found} steps ahead; expected at most {most}", most = AHEAD_MAX)]
    Ahead {
        /// Channel of the slot.
        channel: u32,
        /// Number of steps.
        found: u32,
    },
    /// Motifs together do not implement their collective.
    #[error("the option to carry {name} ({collective}) out {what}")]
    Meaning {
        /// Name of the operation.
        name: String,
        /// The requested collective.
        collective: String,
        /// What is wrong.
        what: String,
    },
    /// A motif is invalid.
    #[error("motif {motif} of {name} {what}")]
    Motif {
        /// Name of the operation.
        name: String,
        /// Index of the motif.
        motif: u32,
        /// What is wrong.
        what: &'static str,
    },
}

/// One collective of a step, and its motifs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ScheduledCollective {
    /// Human-readable name.
    pub name: String,
    /// The requested collective.
    pub collective: Collective,
    /// Its motifs; each depends on earlier motifs only.
    pub motifs: Vec<Placed>,
}

/// The motifs of all collectives of a step, and their order on each channel.
///
/// Operations are numbered in program order; the `task` of a slot is such a number.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RankSchedule {
    /// The collectives of a step.
    pub operations: Vec<ScheduledCollective>,
    /// By channel, the motifs that it carries in every step.
    pub order: Vec<Vec<Slot>>,
}

impl RankSchedule {
    /// The schedule of a plan of a step.
    ///
    /// # Panics
    /// The plan is not of this step and these options.
    pub fn of(problem: &Problem, executions: &[Vec<Execution>], plan: &CommPlan) -> Self {
        let mut numbers = vec![0; problem.nodes().len()];
        let mut operations = Vec::new();
        for (task, one) in problem.nodes().iter().enumerate() {
            let StepOp::Collective(op) = &one.op else { continue };
            numbers[task] = operations.len() as u32;
            operations.push(ScheduledCollective {
                name: one.name.to_string(),
                collective: op.collective.clone(),
                motifs: executions[task][plan.chosen[task] as usize].motifs.clone(),
            });
        }
        let renumber = |slot: &Slot| Slot { task: numbers[slot.task as usize], ..*slot };
        let order = plan.order.iter().map(|line| line.iter().map(renumber).collect()).collect();
        Self { operations, order }
    }

    /// One collective, by the option that is fastest when nothing else runs. O(options · transfers).
    ///
    /// # Arguments
    /// - `element`: size of an element in bytes.
    ///
    /// # Panics
    /// There are no channels, or no numbers of segments.
    pub fn alone(
        collective: &Collective,
        element: u32,
        channels: &[ChannelCost],
        variety: &SearchSpace,
    ) -> Self {
        let options = executions(collective, element, channels, variety);
        let best = (0..).zip(&options).min_by_key(|(_, option)| option.alone());
        let best = best.expect("there is a channel, and a number of segments").0;
        let ranks = collective.ranks();
        let mut step = StepGraph::new("collective", ranks);
        step.add("collective", StepOp::of_ranks(collective.clone(), element), &[]);
        let problem = Problem::new(step).expect("one node depends on nothing");
        let options = [options];
        Self::of(
            &problem,
            &options,
            &CommPlan::of(&problem, &options, &[best], &Policy::CriticalPath),
        )
    }

    /// One collective on one channel, as a single motif.
    pub fn single(collective: &Collective, channel: u32) -> Self {
        Self::series(collective, channel, 1)
    }

    /// The same collective `count` times, one after another on one channel.
    pub fn series(collective: &Collective, channel: u32, count: u32) -> Self {
        let place = |ordered: OrderedMotif| Placed {
            motif: ordered.motif,
            after: ordered.after,
            channel,
            time: Nanos(0),
        };
        let operation = |number: u32| ScheduledCollective {
            name: format!("collective {number}"),
            collective: collective.clone(),
            motifs: Form::of(collective).motifs().into_iter().map(place).collect(),
        };
        let operations = (0..count).map(operation).collect();
        let mut order = vec![Vec::new(); channel as usize + 1];
        order[channel as usize] =
            (0..count).map(|task| Slot { ahead: 0, task, motif: 0 }).collect();
        Self { operations, order }
    }

    /// Checks the schedule: every motif is exactly once in the order of its channel and depends on
    /// earlier motifs of its collective only, the motifs of a collective together implement it, and
    /// the orders of all channels respect the dependencies, so that none waits forever.
    ///
    /// # Errors
    /// The first fault found.
    pub fn verify(&self) -> Result<(), RankScheduleError> {
        let found = self.order.len();
        if !(1..=CHANNELS_MAX).contains(&found) {
            return Err(RankScheduleError::Channels { found });
        }
        let none = |one: &ScheduledCollective| vec![0_usize; one.motifs.len()];
        let mut counts: Vec<Vec<usize>> = self.operations.iter().map(none).collect();
        for (channel, slots) in (0..).zip(&self.order) {
            for &Slot { ahead, task: operation, motif } in slots {
                let owner = self.operations.get(operation as usize);
                if owner.is_none_or(|owner| motif as usize >= owner.motifs.len()) {
                    return Err(RankScheduleError::Slot { channel, operation, motif });
                }
                if ahead > AHEAD_MAX {
                    return Err(RankScheduleError::Ahead { channel, found: ahead });
                }
                let placed = &self.operations[operation as usize].motifs[motif as usize];
                let count = &mut counts[operation as usize][motif as usize];
                // A slot on another channel counts twice, so it is always an error.
                *count += if placed.channel == channel { 1 } else { 2 };
            }
        }
        for (operation, one) in self.operations.iter().enumerate() {
            for (motif, placed) in (0..).zip(&one.motifs) {
                let (name, channel) = (|| one.name.clone(), placed.channel);
                let found = counts[operation][motif as usize];
                if found != 1 {
                    return Err(RankScheduleError::Order { name: name(), motif, channel, found });
                }
                if let Some(what) = fault(&placed.motif, &one.collective) {
                    return Err(RankScheduleError::Motif { name: name(), motif, what });
                }
                if placed.after.iter().any(|&after| after >= motif) {
                    let what = "waits for one that is not before it";
                    return Err(RankScheduleError::Motif { name: name(), motif, what });
                }
            }
            if let Some(what) = semantics::fault(&one.collective, &one.motifs) {
                let (name, collective) = (one.name.clone(), one.collective.to_string());
                return Err(RankScheduleError::Meaning { name, collective, what });
            }
        }
        for knows_all in [false, true] {
            if let Some((channel, entry)) = self.deadlock(knows_all) {
                let (name, motif) =
                    (self.operations[entry.operation as usize].name.clone(), entry.motif);
                return Err(RankScheduleError::Deadlock { name, motif, channel });
            }
        }
        Ok(())
    }

    /// Returns the slots of a channel; none if the schedule does not use it.
    pub fn slots(&self, channel: usize) -> &[Slot] {
        self.order.get(channel).map_or(&[], Vec::as_slice)
    }

    /// Carries out as many steps as one slot may be ahead, and two more; returns the channel that gets
    /// stuck, and at what. Ranks may know of the next step only, or of all.
    fn deadlock(&self, knows_all: bool) -> Option<(u32, QueueEntry)> {
        let ahead = self.order.iter().flatten().map(|slot| slot.ahead).max().unwrap_or(0);
        let steps = ahead + 2;
        let mut queues: Vec<ChannelQueue> =
            self.order.iter().map(|_| ChannelQueue::new()).collect();
        let mut done: FxHashSet<(u64, u32, u32)> = FxHashSet::default();
        for step in 0..steps {
            let following = if knows_all { steps - 1 - step } else { 0 };
            for (slots, queue) in self.order.iter().zip(&mut queues) {
                queue.announce(slots, following);
            }
            let mut advances = true;
            while advances {
                advances = false;
                for queue in &mut queues {
                    while let Some(QueueEntry { step, operation, motif }) = queue.peek() {
                        let placed = &self.operations[operation as usize].motifs[motif as usize];
                        let is_done = |&after: &u32| done.contains(&(step, operation, after));
                        if !placed.after.iter().all(is_done) {
                            break;
                        }
                        done.insert((step, operation, motif));
                        queue.next();
                        advances = true;
                    }
                }
            }
        }
        (0..).zip(&queues).find_map(|(channel, queue)| Some((channel, queue.peek()?)))
    }

    /// Returns the schedule as JSON text.
    pub fn print(&self) -> String {
        serde_json::to_string_pretty(self).expect("a script is plain data")
    }

    /// Parses the text of [`RankSchedule::print`], and verifies it.
    ///
    /// # Errors
    /// The text is not a schedule, or [`RankSchedule::verify`] fails.
    pub fn parse(text: &str) -> Result<Self, RankScheduleError> {
        let read: Result<Self, _> = serde_json::from_str(text);
        let script = read.map_err(|error| RankScheduleError::Text(error.to_string()))?;
        script.verify()?;
        Ok(script)
    }

    /// Returns the part of one rank: rounds, by operation and motif.
    pub fn part(&self, rank: u32) -> Vec<Vec<Vec<Round>>> {
        let of = |operation: &ScheduledCollective| {
            let rounds = |placed: &Placed| rounds_of(&placed.motif, &operation.collective, rank);
            operation.motifs.iter().map(rounds).collect()
        };
        self.operations.iter().map(of).collect()
    }
}

/// A range of elements that one rank sends or receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoundPart {
    /// The other rank: target of a send, source of a receive.
    pub peer: u32,
    /// First element in the rank's vector.
    pub start: u64,
    /// First element in the other rank's vector.
    pub there: u64,
    /// Number of elements.
    pub count: u64,
    /// Whether received elements are added to those in place.
    pub sums: bool,
}

/// What one rank does in one round of a motif, all concurrently; it may begin a round when it is done
/// with the one before.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Round {
    /// Index of the round in its motif; a rank may take no part in some rounds.
    pub number: u32,
    /// Whether it receives into the elements that it sends: receives are staged until all have arrived,
    /// and combined in the order of ranks; `receives` is in that order.
    pub is_aside: bool,
    /// Elements to send.
    pub sends: Vec<RoundPart>,
    /// Elements to receive.
    pub receives: Vec<RoundPart>,
}

fn rounds_of(motif: &Motif, collective: &Collective, rank: u32) -> Vec<Round> {
    let mut rounds = Vec::new();
    let is_aside = motif.pattern == Pattern::OneShot;
    for (number, transfers) in (0..).zip(motif.rounds(collective)) {
        let mut round = Round { number, is_aside, ..Round::default() };
        for transfer in transfers {
            let RankTransfer { source, target, read, write, count, sums } = transfer;
            if source == rank {
                round.sends.push(RoundPart {
                    peer: target,
                    start: read,
                    there: write,
                    count,
                    sums,
                });
            }
            if target == rank {
                round.receives.push(RoundPart {
                    peer: source,
                    start: write,
                    there: read,
                    count,
                    sums,
                });
            }
        }
        if is_aside {
            round.receives.sort_unstable_by_key(|part| part.peer);
        }
        if !round.sends.is_empty() || !round.receives.is_empty() {
            rounds.push(round);
        }
    }
    rounds
}

/// Why explicit transfers cannot be executed, if they cannot.
fn written_fault(motif: &Motif, collective: &Collective) -> Option<&'static str> {
    let transfers = motif.written.iter().flatten();
    let inside = |rank: u32, start: u64, count: u64| {
        start.checked_add(count).is_some_and(|end| end <= collective.work(rank))
    };
    let is_there = |transfer: &RankTransfer| {
        let &RankTransfer { source, target, read, write, count, .. } = transfer;
        let ranks = collective.ranks();
        source < ranks
            && target < ranks
            && source != target
            && inside(source, read, count)
            && inside(target, write, count)
    };
    if !transfers.clone().all(is_there) {
        return Some("moves what is not there");
    }
    let is_exchange = matches!(collective.kind(), CollectiveKind::AllToAll { .. });
    let stays = |transfer: &RankTransfer| transfer.read == transfer.write;
    if !is_exchange && !transfers.clone().all(stays) {
        return Some("moves elements to another place of the vector");
    }
    None
}

/// Why a motif is invalid for a collective, if it is.
fn fault(motif: &Motif, collective: &Collective) -> Option<&'static str> {
    let is_part = |segment: &PayloadSegment| segment.number < segment.of && segment.of <= PARTS_MAX;
    if !is_part(&motif.area) || !is_part(&motif.part) {
        return Some("is about a part that is not there");
    }
    let mut members: Vec<u32> = motif.group.to_vec();
    members.sort_unstable();
    members.dedup();
    let last = members.last().copied();
    if last.is_none_or(|last| last >= collective.ranks()) || members.len() != motif.group.len() {
        return Some("is of ranks that are not there, or are there twice");
    }
    if motif.pattern == Pattern::Written {
        return written_fault(motif, collective);
    }
    match (motif.pattern, collective.kind()) {
        (Pattern::Exchange { first, count }, CollectiveKind::AllToAll { .. }) => {
            let fits = u64::from(first) + u64::from(count) <= members.len() as u64;
            (!fits).then_some("goes to more than there are")
        }
        (Pattern::Exchange { .. }, _) | (_, CollectiveKind::AllToAll { .. }) => {
            Some("has a pattern that does not suit its collective")
        }
        (Pattern::OneShot, _) => {
            let mut counts = motif.rounds(collective).into_iter().flatten().map(|one| one.count);
            counts.any(|count| count > ASIDE_MAX).then_some("keeps too much aside")
        }
        _ => None,
    }
}
