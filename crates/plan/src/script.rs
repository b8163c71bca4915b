//! What every rank keeps to: how each collective of a step is carried out, and in what order.

use base::Nanos;
use ir::{Collective, CollectiveKind, StepGraph, StepOp};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::algebra::{Form, OrderedMotif};
use crate::cost::ChannelCost;
use crate::motif::{ASIDE_MAX, Motif, Pattern, PayloadSegment, RankTransfer};
use crate::options::{Execution, Placed, SearchSpace, executions};
use crate::order::CommPlan;
use crate::problem::Problem;
use crate::schedule::{Policy, Slot};
use crate::semantics;

/// Most channels that a script may name.
const CHANNELS_MAX: usize = 64;
/// Most parts of a payload.
const PARTS_MAX: u64 = 1 << 24;
/// How many steps ahead a slot may be.
const AHEAD_MAX: u32 = 8;

/// What no rank can keep to.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum RankScheduleError {
    /// It cannot be read.
    #[error("a plan cannot be read: {0}; expected what `fairway plan` writes")]
    Text(String),
    /// More channels than there can be.
    #[error("a plan orders {found} channels; expected 1 to {most}", most = CHANNELS_MAX)]
    Channels {
        /// How many.
        found: usize,
    },
    /// Motifs are not each once in the order of their channel.
    #[error(
        "motif {motif} of {name} stands {found} times in the order of channel {channel}; expected once"
    )]
    Order {
        /// Of which operation.
        name: String,
        /// Which motif.
        motif: u32,
        /// Its channel.
        channel: u32,
        /// How often it stands there.
        found: usize,
    },
    /// A slot is of something that is not there.
    #[error(
        "channel {channel} has a slot for motif {motif} of operation {operation}, which is not there"
    )]
    Slot {
        /// In whose order.
        channel: u32,
        /// Of which operation.
        operation: u32,
        /// Which motif.
        motif: u32,
    },
    /// A slot is too far ahead.
    #[error("channel {channel} has a slot {found} steps ahead; expected at most {most}", most = AHEAD_MAX)]
    Ahead {
        /// In whose order.
        channel: u32,
        /// How many steps.
        found: u32,
    },
    /// Motifs that together are something else than their collective.
    #[error("the way to carry {name} ({collective}) out {what}")]
    Meaning {
        /// Of which operation.
        name: String,
        /// What is asked for.
        collective: String,
        /// What is wrong with it.
        what: String,
    },
    /// A motif that cannot be.
    #[error("motif {motif} of {name} {what}")]
    Motif {
        /// Of which operation.
        name: String,
        /// Which motif.
        motif: u32,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// One collective of a step, and how it is carried out.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ScheduledCollective {
    /// What people call it.
    pub name: String,
    /// What is asked for.
    pub collective: Collective,
    /// Its motifs; each waits for earlier ones only.
    pub motifs: Vec<Placed>,
}

/// How all collectives of a step are carried out, and the order of their motifs on each channel.
///
/// Operations are counted in the order in which the step asks for them; slots name those numbers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RankSchedule {
    /// What is asked for in a step.
    pub operations: Vec<ScheduledCollective>,
    /// What each channel carries in every step.
    pub order: Vec<Vec<Slot>>,
}

impl RankSchedule {
    /// What a plan of a step says.
    ///
    /// # Panics
    /// The plan is not of this step and these ways.
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

    /// One collective in the way that takes least if nothing else is going on.
    /// O(ways · transfers).
    ///
    /// # Arguments
    /// - `element`: bytes of one.
    ///
    /// # Panics
    /// There are no channels, or no numbers of segments.
    pub fn alone(
        collective: &Collective,
        element: u32,
        channels: &[ChannelCost],
        variety: &SearchSpace,
    ) -> Self {
        let ways = executions(collective, element, channels, variety);
        let best = (0..).zip(&ways).min_by_key(|(_, way)| way.alone());
        let best = best.expect("there is a channel, and a number of segments").0;
        let ranks = collective.ranks();
        let mut step = StepGraph::new("collective", ranks);
        step.add("collective", StepOp::of_ranks(collective.clone(), element), &[]);
        let problem = Problem::new(step).expect("one node depends on nothing");
        let ways = [ways];
        Self::of(&problem, &ways, &CommPlan::of(&problem, &ways, &[best], &Policy::CriticalPath))
    }

    /// One collective by one channel, as one motif.
    pub fn single(collective: &Collective, channel: u32) -> Self {
        Self::series(collective, channel, 1)
    }

    /// The same collective so many times, one after another by one channel.
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

    /// Can ranks keep to it? Every motif is once in the order of its channel, behind those it waits
    /// for on the same channel, and all motifs of a collective together do what it means.
    ///
    /// # Errors
    /// What is wrong first.
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
                // In the order of another channel it stands too often wherever it stands.
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
        Ok(())
    }

    /// The same as text.
    pub fn print(&self) -> String {
        serde_json::to_string_pretty(self).expect("a script is plain data")
    }

    /// Reads what [`RankSchedule::print`] wrote, and verifies it.
    ///
    /// # Errors
    /// It is something else, or ranks cannot keep to it.
    pub fn parse(text: &str) -> Result<Self, RankScheduleError> {
        let read: Result<Self, _> = serde_json::from_str(text);
        let script = read.map_err(|error| RankScheduleError::Text(error.to_string()))?;
        script.verify()?;
        Ok(script)
    }

    /// What one rank does: of each operation, of each motif, its rounds.
    pub fn part(&self, rank: u32) -> Vec<Vec<Vec<Round>>> {
        let of = |operation: &ScheduledCollective| {
            let rounds = |placed: &Placed| rounds_of(&placed.motif, &operation.collective, rank);
            operation.motifs.iter().map(rounds).collect()
        };
        self.operations.iter().map(of).collect()
    }
}

/// Elements that one rank sends or receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoundPart {
    /// To or from whom.
    pub peer: u32,
    /// Where they lie in the rank's vector.
    pub start: u64,
    /// Where in that of the other.
    pub there: u64,
    /// How many.
    pub count: u64,
    /// Whether what is received is added to what lies there.
    pub sums: bool,
}

/// What one rank does in one round of a motif, all at a time; it may begin when it is done with the
/// round before.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Round {
    /// Which of the motif's it is; a rank need not have something to do in each.
    pub number: u32,
    /// Whether what leaves is of the same elements as what comes, which is kept aside until all is
    /// there, and combined in the order of ranks; then it comes in that order.
    pub is_aside: bool,
    /// What leaves.
    pub sends: Vec<RoundPart>,
    /// What comes.
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

/// Why what somebody wrote down cannot be carried out.
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

/// Why a motif cannot be one of a collective.
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
