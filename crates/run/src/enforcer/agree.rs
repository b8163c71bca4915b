//! Agreement of all ranks on another plan while steps continue under the current one.
//!
//! Rank 0 coordinates the two-phase commit (prepare, then commit or abort). Its messages and the
//! answers use lanes of their own, which fail over to other channels as those of channels do; no
//! collective waits for them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::switch::{Answer, CoordinatorMessage, PlanId};
use plan::RankSchedule;

use super::agreed::{AgreementState, Letter, SCRIPT_MAX, Says};
use super::stream::{MessageKind, Subject};
use super::transport::{ChannelTransport, usable};
use super::{EnforcerError, Inner, PreparedSchedule, ring};

/// Polling interval if no event occurs.
const LOOK: Duration = Duration::from_secs(1);
/// What errors call this activity.
const DOING: &str = "agreeing on a plan";

impl Inner {
    /// Follows a plan from the next step on, until another one is agreed on.
    pub(super) fn follow(&self, part: &Arc<PreparedSchedule>) -> Result<(), EnforcerError> {
        let mut plans = self.plans.state.lock();
        let mut known = plans.keeper.plans();
        let (Some(plan), None) = (known.next(), known.next()) else {
            return Err(EnforcerError::Undecided { seconds: 0.0 });
        };
        drop(known);
        plans.parts.insert(plan, part.clone());
        Ok(())
    }

    /// Begins a step with a plan of its own.
    pub(super) fn begin(
        &self,
        part: &Arc<PreparedSchedule>,
        following: u32,
    ) -> Result<u64, EnforcerError> {
        self.wait_for_room()?;
        let mut plans = self.plans.state.lock();
        let step = self.start(part, following)?;
        plans.keeper.pass();
        Ok(step)
    }

    /// Begins a step with a plan of its own, which the calling thread executes and completes, if no
    /// other step is in flight; returns its number.
    pub(super) fn begin_alone(
        &self,
        part: &Arc<PreparedSchedule>,
    ) -> Result<Option<u64>, EnforcerError> {
        let mut plans = self.plans.state.lock();
        let mut state = self.state.lock();
        state.check()?;
        if !state.steps.is_empty() || state.promised > 0 {
            return Ok(None);
        }
        let step = state.first;
        state.announced.push_back((part.clone(), 0));
        state.first += 1;
        plans.keeper.pass();
        Ok(Some(step))
    }

    /// Begins a step of the plan in force; returns its number and the plan's.
    pub(super) fn begin_planned(&self, most: u32) -> Result<(u64, u64), EnforcerError> {
        self.wait_for_room()?;
        let deadline = Instant::now() + self.timeout;
        let mut plans = self.plans.state.lock();
        loop {
            self.state.lock().check()?;
            if let Some((plan, following)) = plans.keeper.begin(most) {
                let part = plans.parts.get(&plan).cloned().ok_or(EnforcerError::NoPlan)?;
                return Ok((self.start(&part, following)?, plan.0));
            }
            if self.plans.changed.wait_until(&mut plans, deadline).timed_out() {
                let seconds = self.timeout.as_secs_f64();
                return Err(EnforcerError::Undecided { seconds });
            }
        }
    }

    /// Proposes a plan; returns the first step to which it applies.
    pub(super) fn propose(&self, script: &RankSchedule) -> Result<u64, EnforcerError> {
        let text: Arc<[u8]> = script.print().into_bytes().into();
        if text.len() > SCRIPT_MAX {
            let reason = format!("it has {} bytes; expected at most {SCRIPT_MAX}", text.len());
            return Err(EnforcerError::Refused { reason });
        }
        let deadline = Instant::now() + self.timeout;
        let mut plans = self.plans.state.lock();
        let rank = plans.rank;
        let proposer = plans.proposer.as_mut().ok_or(EnforcerError::Proposer { rank })?;
        let Some((plan, words)) = proposer.propose() else {
            let reason = "another one is being decided on".to_owned();
            return Err(EnforcerError::Refused { reason });
        };
        (plans.proposed, plans.refusal) = (text, None);
        self.say(&mut plans, words);
        self.wake_agreement();
        loop {
            self.state.lock().check()?;
            match plans.outcome {
                Some((about, Some(from))) if about == plan => return Ok(from),
                Some((about, None)) if about == plan => {
                    let reason = plans.refusal.take();
                    let reason = reason.unwrap_or_else(|| "ranks do not answer in time".to_owned());
                    return Err(EnforcerError::Refused { reason });
                }
                _ => {}
            }
            let late = self.plans.changed.wait_until(&mut plans, deadline).timed_out();
            if late && let Some(proposer) = &mut plans.proposer {
                let words = proposer.give_up();
                self.say(&mut plans, words);
                self.wake_agreement();
            }
        }
    }

    fn wake_agreement(&self) {
        self.wakes.last().into_iter().for_each(ring);
    }

    /// Queues messages of the coordinator to other ranks, and handles those to this rank.
    fn say(&self, plans: &mut AgreementState, words: Vec<(u32, CoordinatorMessage)>) {
        for (to, word) in words {
            let own = to == plans.rank;
            let (says, plan, step) = match word {
                CoordinatorMessage::Prepare(plan) => (Says::Prepare, plan, 0),
                CoordinatorMessage::Commit(plan, from) => (Says::Commit, plan, from),
                CoordinatorMessage::Abort(plan) => (Says::Abort, plan, 0),
            };
            if says != Says::Prepare {
                plans.outcome = Some((plan, (says == Says::Commit).then_some(step)));
            }
            let text = plans.proposed.clone();
            if own {
                self.hear(plans, word, &text);
            } else {
                let text = if says == Says::Prepare { &text[..] } else { &[] };
                plans.letters.push((to, Letter::new(says, plan, step, text)));
            }
        }
    }

    /// Handles a message of the coordinator (rank 0).
    fn hear(&self, plans: &mut AgreementState, word: CoordinatorMessage, text: &[u8]) {
        let (mut part, mut reason) = (None, String::new());
        if let CoordinatorMessage::Prepare(_) = word {
            match self.part_of(plans, text) {
                Ok(found) => part = Some(found),
                Err(error) => reason = error.to_string(),
            }
        }
        let answer = plans.keeper.hear(word, part.is_some());
        if let (Some(Answer::Ready(plan, _)), Some(part)) = (answer, part) {
            plans.parts.insert(plan, part);
        }
        let AgreementState { keeper, parts, .. } = plans;
        parts.retain(|plan, _| keeper.plans().any(|known| known == *plan));
        if let Some(answer) = answer {
            if reason.is_empty() {
                "another plan is about to begin".clone_into(&mut reason);
            }
            self.answer(plans, answer, &reason);
        }
        self.plans.changed.notify_all();
    }

    fn answer(&self, plans: &mut AgreementState, answer: Answer, reason: &str) {
        if plans.rank == 0 {
            return self.hear_answer(plans, 0, answer, reason);
        }
        let letter = match answer {
            Answer::Ready(plan, step) => Letter::new(Says::Ready, plan, step, &[]),
            Answer::Refused(plan) => Letter::new(Says::Refused, plan, 0, reason.as_bytes()),
        };
        plans.letters.push((0, letter));
    }

    fn hear_answer(&self, plans: &mut AgreementState, from: u32, answer: Answer, reason: &str) {
        let Some(proposer) = &mut plans.proposer else { return };
        let words = proposer.hear(from, answer);
        if matches!(answer, Answer::Refused(_)) && !words.is_empty() {
            plans.refusal = Some(format!("rank {from}: {reason}"));
        }
        self.say(plans, words);
        self.plans.changed.notify_all();
    }

    /// Prepares this rank's part of a proposed plan, which must be of the same collectives.
    fn part_of(
        &self,
        plans: &AgreementState,
        text: &[u8],
    ) -> Result<Arc<PreparedSchedule>, EnforcerError> {
        let text = std::str::from_utf8(text).map_err(|error| {
            let reason = format!("it is no text: {error}");
            EnforcerError::Refused { reason }
        })?;
        let part = self.prepare(Arc::new(RankSchedule::parse(text)?))?;
        let now = plans.keeper.plans().next().and_then(|plan| plans.parts.get(&plan));
        let now = now.ok_or(EnforcerError::NoPlan)?;
        let [known, found] = [now, &part].map(|part| &part.script.operations);
        let other = known.iter().zip(found).position(|(a, b)| a.collective != b.collective);
        if let Some(operation) = other {
            let [expected, found] = [known, found].map(|one| one[operation].collective.to_string());
            let name = known[operation].name.clone();
            return Err(EnforcerError::Different {
                operation: operation as u32,
                name,
                expected,
                found,
            });
        }
        if known.len() != found.len() {
            let (operation, operations) = (found.len() as u32, known.len());
            return Err(EnforcerError::Operation { operation, operations });
        }
        Ok(part)
    }

    /// Runs the agreement until the enforcer is closed.
    pub(super) fn serve_agreement(&self, mut line: ChannelTransport) {
        let ranks = line.lanes.len();
        let mut desk = Desk {
            leaving: (0..ranks).map(|_| VecDeque::new()).collect(),
            coming: (0..ranks).map(|_| None).collect(),
        };
        while let Ok(()) = self.agree(&mut line, &mut desk) {}
        line.give_up("it has ended");
    }

    fn agree(&self, line: &mut ChannelTransport, desk: &mut Desk) -> Result<(), EnforcerError> {
        for (to, letter) in std::mem::take(&mut self.plans.state.lock().letters) {
            desk.leaving[to as usize].push_back(letter);
        }
        let others: Vec<u32> = line.lanes.iter().flatten().map(|lane| lane.peer).collect();
        let mut moved = false;
        for &rank in &others {
            match desk.exchange(line, rank) {
                Ok((any, letters)) => {
                    moved |= any;
                    letters.into_iter().for_each(|letter| self.read(rank, &letter));
                }
                Err(_) => self.lose(line, rank),
            }
        }
        match line.mend(&others, &DOING) {
            Ok(any) => moved |= any,
            Err(EnforcerError::Lost { rank, .. }) => self.lose(line, rank),
            Err(error) => return Err(error),
        }
        let more = !self.plans.state.lock().letters.is_empty();
        if moved || more { Ok(()) } else { line.wait(&others, LOOK) }
    }

    fn read(&self, from: u32, letter: &Letter) {
        let Subject { step, operation, motif, .. } = letter.subject;
        let plan = PlanId(u64::from(motif));
        let text = &letter.text[..letter.text.len() - 1];
        let kinds = [Says::Prepare, Says::Commit, Says::Abort, Says::Ready, Says::Refused];
        let says = kinds.into_iter().find(|&says| says as u32 == operation);
        let mut plans = self.plans.state.lock();
        match says {
            Some(Says::Prepare) if from == 0 => {
                self.hear(&mut plans, CoordinatorMessage::Prepare(plan), text)
            }
            Some(Says::Commit) if from == 0 => {
                self.hear(&mut plans, CoordinatorMessage::Commit(plan, step), &[])
            }
            Some(Says::Abort) if from == 0 => {
                self.hear(&mut plans, CoordinatorMessage::Abort(plan), &[])
            }
            Some(Says::Ready) => self.hear_answer(&mut plans, from, Answer::Ready(plan, step), ""),
            Some(Says::Refused) => {
                let reason = String::from_utf8_lossy(text);
                self.hear_answer(&mut plans, from, Answer::Refused(plan), &reason);
            }
            _ => tracing::warn!(from, operation, "a letter that means nothing came"),
        }
    }

    fn lose(&self, line: &mut ChannelTransport, rank: u32) {
        line.lanes[rank as usize] = None;
        let mut plans = self.plans.state.lock();
        if let Some(proposer) = &mut plans.proposer {
            let words = proposer.lose(rank);
            if !words.is_empty() {
                plans.refusal = Some(format!("rank {rank} is lost"));
            }
            self.say(&mut plans, words);
        }
        self.plans.changed.notify_all();
    }
}

/// Messages in transit, by peer.
struct Desk {
    leaving: Vec<VecDeque<Letter>>,
    coming: Vec<Option<Letter>>,
}

impl Desk {
    /// Sends and receives without blocking; returns whether any bytes moved, and the received messages.
    fn exchange(
        &mut self,
        line: &mut ChannelTransport,
        rank: u32,
    ) -> Result<(bool, Vec<Letter>), EnforcerError> {
        let lane = line.lanes[rank as usize].as_mut().expect("it is one of the others");
        let (mut moved, mut letters) = (false, Vec::new());
        loop {
            let head = lane.frame();
            let Some(head) = usable(lane, head, &DOING)?.flatten() else { break };
            if head.kind != MessageKind::Data {
                return Err(EnforcerError::Reported { rank, reason: lane.take_text() });
            }
            let letter = &mut self.coming[rank as usize];
            if letter.as_ref().is_none_or(|letter| letter.subject != head.subject) {
                *letter = usable(lane, Letter::of(head.subject), &DOING)?;
            }
            let Some(one) = letter else { break };
            let count = lane.read_payload(&mut one.text[one.done..]);
            let count = usable(lane, count, &DOING)?.unwrap_or(0);
            one.done += count;
            moved |= count > 0;
            if one.is_done() {
                letters.extend(letter.take());
            } else if count == 0 {
                break;
            }
        }
        let leaving = &mut self.leaving[rank as usize];
        while let Some(letter) = leaving.front_mut() {
            let put = lane.put(letter.subject, &letter.text[letter.done..]);
            letter.done += put;
            moved |= put > 0;
            if !letter.is_done() {
                break;
            }
            leaving.pop_front();
        }
        let flushed = lane.flush();
        moved |= usable(lane, flushed, &DOING)?.unwrap_or(false);
        Ok((moved, letters))
    }
}
