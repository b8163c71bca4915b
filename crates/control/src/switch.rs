//! Two-phase commit by which all hosts switch from one plan to another at the same step.
//!
//! The coordinator sends a new plan to every host (prepare). A host that can follow it votes yes,
//! and promises not to begin a certain step before it knows the outcome. The plan is committed from
//! the greatest of these steps, which no host can have begun; or, if a host votes no, is lost or
//! does not answer in time, it is aborted. The promised step is some steps ahead, so that hosts
//! wait only if the outcome takes longer than those steps.
//!
//! A host that begins a step also says for how many more steps the plan surely holds, and all hosts
//! say the same: a host begins no step for which its statement might be contradicted by the
//! outcome.
//!
//! Neither side knows of sockets or clocks; this module's tests model-check both under every
//! interleaving of messages, losses and crashes.
//!
//! Source: SYNDICATE §5 (two-phase commit). Differs from the paper: It says "the subsequent
//! iteration"; hosts that are dispatched asynchronously are in different ones, so they agree on
//! which.

use std::collections::{BTreeMap, BTreeSet};

/// Number of further steps that a host begins before it waits for an outcome.
pub const LEAD: u64 = 2;

/// Identifies a proposed plan; later plans are greater. 0 is the initial plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PlanId(pub u64);

/// A message of the coordinator to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CoordinatorMessage {
    /// Prepare: asks whether the host can follow this plan.
    Prepare(PlanId),
    /// Commit: the plan holds from this step on.
    Commit(PlanId, u64),
    /// Abort: the plan never holds.
    Abort(PlanId),
}

/// A host's vote on [`CoordinatorMessage::Prepare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// Yes. Before it knows the outcome, the host makes no statement about this step or later ones.
    Ready(PlanId, u64),
    /// No: it cannot follow the plan.
    Refused(PlanId),
}

/// The coordinator, which proposes plans to hosts, one at a time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Proposer {
    last: PlanId,
    hosts: BTreeSet<u32>,
    /// The open proposal: the plan, and the step at which each host that voted yes waits.
    open: Option<(PlanId, BTreeMap<u32, u64>)>,
}

impl Proposer {
    /// Creates a coordinator of these hosts.
    pub fn new(hosts: impl IntoIterator<Item = u32>) -> Self {
        Self { hosts: hosts.into_iter().collect(), ..Self::default() }
    }

    /// Returns whether a proposal is open.
    pub fn is_busy(&self) -> bool {
        self.open.is_some()
    }

    /// Proposes a plan, if no proposal is open; returns its id and a message to each host.
    pub fn propose(&mut self) -> Option<(PlanId, Vec<(u32, CoordinatorMessage)>)> {
        if self.is_busy() {
            return None;
        }
        self.last.0 += 1;
        self.open = Some((self.last, BTreeMap::new()));
        Some((self.last, self.to_all(CoordinatorMessage::Prepare(self.last))))
    }

    /// Handles a vote; returns the messages of the decision, once there is one.
    pub fn hear(&mut self, host: u32, answer: Answer) -> Vec<(u32, CoordinatorMessage)> {
        let Some((plan, ready)) = &mut self.open else { return Vec::new() };
        match answer {
            Answer::Ready(about, waits_at) if about == *plan => {
                ready.insert(host, waits_at);
                if ready.len() < self.hosts.len() {
                    return Vec::new();
                }
                let (plan, from) = (*plan, ready.values().copied().max().unwrap_or(0));
                self.open = None;
                self.to_all(CoordinatorMessage::Commit(plan, from))
            }
            Answer::Refused(about) if about == *plan => self.give_up(),
            _ => Vec::new(),
        }
    }

    /// Removes a lost host and aborts the open proposal.
    pub fn lose(&mut self, host: u32) -> Vec<(u32, CoordinatorMessage)> {
        self.hosts.remove(&host);
        self.give_up()
    }

    /// Aborts the open proposal, for example after a timeout.
    pub fn give_up(&mut self) -> Vec<(u32, CoordinatorMessage)> {
        match self.open.take() {
            Some((plan, _)) => self.to_all(CoordinatorMessage::Abort(plan)),
            None => Vec::new(),
        }
    }

    fn to_all(&self, word: CoordinatorMessage) -> Vec<(u32, CoordinatorMessage)> {
        self.hosts.iter().map(|&host| (host, word)).collect()
    }
}

/// A participant: a host that follows plans.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Participant {
    /// Maximum number of further steps for which it says that the plan holds.
    ahead: u32,
    /// The step that it begins next.
    next: u64,
    /// The current plan, and the committed one with its first step.
    plan: PlanId,
    coming: Option<(PlanId, u64)>,
    /// The plan whose outcome is unknown, and the step at which it waits for that.
    promised: Option<(PlanId, u64)>,
    /// All plans up to this one are decided.
    decided: PlanId,
}

impl Participant {
    /// Creates a host that looks at most `ahead` steps ahead of each step; the same on all hosts.
    pub fn new(ahead: u32) -> Self {
        let (plan, decided) = (PlanId(0), PlanId(0));
        Self { ahead, next: 0, plan, coming: None, promised: None, decided }
    }

    /// Handles a message of the coordinator; `can_keep` says whether the host can follow a new
    /// plan.
    pub fn hear(&mut self, word: CoordinatorMessage, can_keep: bool) -> Option<Answer> {
        match word {
            CoordinatorMessage::Prepare(plan) if plan <= self.decided => None,
            CoordinatorMessage::Prepare(plan) if !can_keep || self.coming.is_some() => {
                Some(Answer::Refused(plan))
            }
            CoordinatorMessage::Prepare(plan) => {
                let waits_at = self.next + u64::from(self.ahead) + LEAD;
                self.promised = Some((plan, waits_at));
                Some(Answer::Ready(plan, waits_at))
            }
            CoordinatorMessage::Commit(plan, from) => {
                self.decide(plan);
                self.coming = Some((plan, from));
                None
            }
            CoordinatorMessage::Abort(plan) => {
                self.decide(plan);
                None
            }
        }
    }

    fn decide(&mut self, plan: PlanId) {
        self.decided = self.decided.max(plan);
        if self.promised.is_some_and(|(about, _)| about <= plan) {
            self.promised = None;
        }
    }

    /// Begins the next step, unless it must wait for an outcome. Returns its plan, and for how many
    /// further steps the same plan surely holds, at most `most`.
    pub fn begin(&mut self, most: u32) -> Option<(PlanId, u32)> {
        let last = self.next + u64::from(self.ahead);
        if self.promised.is_some_and(|(_, waits_at)| last >= waits_at) {
            return None;
        }
        if let Some((plan, from)) = self.coming
            && self.next >= from
        {
            (self.plan, self.coming) = (plan, None);
        }
        self.next += 1;
        let left = self.coming.map_or(u64::MAX, |(_, from)| from - self.next);
        let most = most.min(self.ahead);
        Some((self.plan, u32::try_from(left).unwrap_or(u32::MAX).min(most)))
    }

    /// Begins a step that follows no such plan.
    pub fn pass(&mut self) {
        self.next += 1;
    }

    /// Returns the current plan, the committed one, and the one whose outcome is unknown.
    pub fn plans(&self) -> impl Iterator<Item = PlanId> + use<> {
        let others = [self.coming.map(|(plan, _)| plan), self.promised.map(|(plan, _)| plan)];
        std::iter::once(self.plan).chain(others.into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::{Hash, Hasher};

    use super::*;

    const AHEAD: u32 = 1;

    /// A state of the model checker.
    #[derive(Clone, PartialEq, Eq, Hash)]
    struct World {
        proposer: Option<Proposer>,
        keepers: Vec<Option<Participant>>,
        /// Messages in flight to each host and from it, in order.
        to: Vec<Vec<CoordinatorMessage>>,
        from: Vec<Vec<Answer>>,
        /// Lost hosts that the coordinator has not detected.
        lost: BTreeSet<u32>,
        /// The plan under which each step was begun, and the number of further steps it was said to
        /// hold.
        plans: Vec<Option<(PlanId, u32)>>,
        /// Remaining proposals, and remaining crashes.
        proposals: u32,
        crashes: u32,
    }

    impl World {
        fn new(hosts: u32, steps: usize, proposals: u32, crashes: u32) -> Self {
            Self {
                proposer: Some(Proposer::new(0..hosts)),
                keepers: vec![Some(Participant::new(AHEAD)); hosts as usize],
                to: vec![Vec::new(); hosts as usize],
                from: vec![Vec::new(); hosts as usize],
                lost: BTreeSet::new(),
                plans: vec![None; steps],
                proposals,
                crashes,
            }
        }

        fn say(&mut self, words: Vec<(u32, CoordinatorMessage)>) {
            for (host, word) in words {
                self.to[host as usize].push(word);
            }
        }

        /// A host begins a step only once all other live hosts have begun the one before last,
        /// since each step communicates.
        fn may_begin(&self, host: usize) -> bool {
            let next = self.keepers[host].as_ref().map_or(0, |keeper| keeper.next);
            let others = self.keepers.iter().flatten().map(|keeper| keeper.next);
            next < self.plans.len() as u64 && others.min().is_some_and(|least| next <= least + 1)
        }

        /// The coordinator proposes a plan.
        fn propose(&mut self) -> bool {
            let Some(proposer) = &mut self.proposer else { return false };
            if self.proposals == 0 {
                return false;
            }
            let Some((_, words)) = proposer.propose() else { return false };
            self.proposals -= 1;
            self.say(words);
            true
        }

        /// The coordinator gives up, which it may do at any time; this models arbitrary delays.
        fn give_up(&mut self) -> bool {
            let Some(proposer) = &mut self.proposer else { return false };
            let words = proposer.give_up();
            let any = !words.is_empty();
            self.say(words);
            any
        }

        /// A host receives the next message to it.
        fn reach_host(&mut self, host: usize, can_keep: bool) -> bool {
            let Some(keeper) = &mut self.keepers[host] else { return false };
            if self.to[host].is_empty() {
                return false;
            }
            let word = self.to[host].remove(0);
            let is_asked = matches!(word, CoordinatorMessage::Prepare(_));
            let answer = keeper.hear(word, can_keep);
            self.from[host].extend(answer);
            can_keep || is_asked
        }

        /// The coordinator receives the next message from a host.
        fn reach_coordinator(&mut self, host: usize) -> bool {
            let Some(proposer) = &mut self.proposer else { return false };
            if self.from[host].is_empty() {
                return false;
            }
            let answer = self.from[host].remove(0);
            let words = proposer.hear(host as u32, answer);
            self.say(words);
            true
        }

        /// A host begins its next step.
        ///
        /// # Panics
        /// It does so under another plan than other hosts, or than was said.
        fn begin_step(&mut self, host: usize) -> bool {
            if !self.may_begin(host) {
                return false;
            }
            let Some(keeper) = &mut self.keepers[host] else { return false };
            let step = keeper.next as usize;
            let Some(plan) = keeper.begin(AHEAD) else { return false };
            let begun = self.plans[step].get_or_insert(plan);
            assert_eq!(*begun, plan, "step {step} has two plans");
            if let Some(before) = step.checked_sub(1) {
                let (other, following) = self.plans[before].expect("it was begun");
                assert!(other == plan.0 || following == 0, "step {step} was promised");
            }
            true
        }

        /// A host crashes.
        fn crash_host(&mut self, host: usize) -> bool {
            if self.crashes == 0 || self.keepers[host].take().is_none() {
                return false;
            }
            self.crashes -= 1;
            self.to[host].clear();
            self.lost.insert(host as u32);
            true
        }

        /// The coordinator detects that a host has crashed.
        fn detect_loss(&mut self, host: usize) -> bool {
            let Some(proposer) = &mut self.proposer else { return false };
            if !self.lost.remove(&(host as u32)) {
                return false;
            }
            let words = proposer.lose(host as u32);
            self.say(words);
            true
        }

        /// The coordinator crashes; it has not sent its last message to `unsent`, if that is a host.
        fn crash_coordinator(&mut self, unsent: usize) -> bool {
            if self.crashes == 0 || self.proposer.take().is_none() {
                return false;
            }
            self.crashes -= 1;
            self.to.get_mut(unsent).is_none_or(|words| words.pop().is_some())
        }

        /// Returns all successor states.
        fn next(&self) -> Vec<World> {
            let mut found = Vec::new();
            let mut happens = |act: &dyn Fn(&mut World) -> bool| {
                let mut world = self.clone();
                if act(&mut world) {
                    found.push(world);
                }
            };
            happens(&World::propose);
            happens(&World::give_up);
            for host in 0..self.keepers.len() {
                for can_keep in [true, false] {
                    happens(&|world| world.reach_host(host, can_keep));
                }
                happens(&|world| world.reach_coordinator(host));
                happens(&|world| world.begin_step(host));
                happens(&|world| world.crash_host(host));
                happens(&|world| world.detect_loss(host));
            }
            for unsent in 0..=self.keepers.len() {
                happens(&|world| world.crash_coordinator(unsent));
            }
            found
        }

        /// Checks a terminal state: all live hosts have done all steps, unless the coordinator is
        /// gone, which ends a run anyway.
        fn check_end(&self) {
            if self.proposer.is_none() {
                return;
            }
            let mut plans = BTreeSet::new();
            for keeper in self.keepers.iter().flatten() {
                assert_eq!(keeper.next, self.plans.len() as u64, "a host waits for ever");
                assert_eq!(keeper.promised, None);
                plans.insert(keeper.plan);
            }
            assert!(plans.len() <= 1, "hosts end with different plans: {plans:?}");
        }
    }

    /// Hashes a state up to a permutation of the hosts.
    fn digest(world: &World) -> u64 {
        let open = world.proposer.as_ref().and_then(|proposer| proposer.open.as_ref());
        let of = |host: usize| {
            let number = host as u32;
            let is_known =
                world.proposer.as_ref().is_some_and(|proposer| proposer.hosts.contains(&number));
            let is_ready = open.and_then(|(_, ready)| ready.get(&number));
            let (to, from) = (&world.to[host], &world.from[host]);
            (&world.keepers[host], to, from, world.lost.contains(&number), is_known, is_ready)
        };
        let mut hosts: Vec<u64> = (0..world.keepers.len()).map(|host| hash(&of(host))).collect();
        hosts.sort_unstable();
        let proposer = world.proposer.as_ref().map(|proposer| proposer.last);
        let counts = (world.proposals, world.crashes);
        hash(&(hosts, proposer, open.map(|(plan, _)| plan), &world.plans, counts))
    }

    fn hash(value: &impl Hash) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        value.hash(&mut hasher);
        hasher.finish()
    }

    /// Explores all states reachable from `first`, keeping only a digest of each; returns their
    /// number.
    fn try_everything(first: World) -> usize {
        let mut seen = HashSet::from([digest(&first)]);
        let mut open = vec![first];
        while let Some(world) = open.pop() {
            let next = world.next();
            if next.is_empty() {
                world.check_end();
            }
            open.extend(next.into_iter().filter(|world| seen.insert(digest(world))));
        }
        seen.len()
    }

    #[test]
    fn never_two_plans_in_one_step_and_nobody_waits_for_ever() {
        for (hosts, steps, proposals, crashes) in
            [(2, 5, 2, 1), (2, 5, 1, 2), (3, 5, 1, 0), (3, 4, 1, 1), (4, 4, 1, 0)]
        {
            let worlds = try_everything(World::new(hosts, steps, proposals, crashes));
            println!(
                "{hosts} hosts, {steps} steps, {proposals} plans, {crashes} crashes: {worlds}"
            );
            assert!(worlds > 1000);
        }
    }
}
