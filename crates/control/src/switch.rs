//! How all hosts change from one plan to another at the same step.
//!
//! Whoever proposes a plan sends it to every host. A host that can keep to it says so, and promises to
//! begin no step from a certain one on before it knows the outcome. The plan holds from the greatest of
//! these steps, which no host can have begun; or, if one host cannot, is lost or does not answer in time,
//! it never does. The step that hosts promise to wait at is some steps ahead, so that nobody waits unless
//! the outcome takes longer than those.
//!
//! A host that begins a step also says for how many more the plan surely holds, and all say the same: it
//! begins none that might say something else once the outcome is known.
//!
//! Neither side knows of sockets or clocks; both are tried with every order of messages, losses and
//! crashes in this module's tests.
//!
//! Source: SYNDICATE §5 (two-phase commit). Differs from the paper: it says "the subsequent iteration";
//! hosts that are dispatched asynchronously are in different ones, so they agree on which.

use std::collections::{BTreeMap, BTreeSet};

/// How many more steps a host begins before it waits for an outcome.
pub const LEAD: u64 = 2;

/// Names a plan that was proposed; later ones are greater. 0 is what hosts begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PlanId(pub u64);

/// What whoever proposes says to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CoordinatorMessage {
    /// Can you keep to this plan?
    Prepare(PlanId),
    /// It holds from this step on.
    Commit(PlanId, u64),
    /// It never will.
    Abort(PlanId),
}

/// What a host answers to [`CoordinatorMessage::Prepare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// It can, and says of no step from this one on that it follows before it knows the outcome.
    Ready(PlanId, u64),
    /// It cannot.
    Refused(PlanId),
}

/// Whoever proposes plans to hosts, one at a time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Proposer {
    last: PlanId,
    hosts: BTreeSet<u32>,
    /// What is open: the plan, and where those hosts wait that are ready.
    open: Option<(PlanId, BTreeMap<u32, u64>)>,
}

impl Proposer {
    /// One for these hosts.
    pub fn new(hosts: impl IntoIterator<Item = u32>) -> Self {
        Self { hosts: hosts.into_iter().collect(), ..Self::default() }
    }

    /// Is a plan being proposed?
    pub fn is_busy(&self) -> bool {
        self.open.is_some()
    }

    /// Proposes a plan, if none is open; returns what it is called and what to say to each host.
    pub fn propose(&mut self) -> Option<(PlanId, Vec<(u32, CoordinatorMessage)>)> {
        if self.is_busy() {
            return None;
        }
        self.last.0 += 1;
        self.open = Some((self.last, BTreeMap::new()));
        Some((self.last, self.to_all(CoordinatorMessage::Prepare(self.last))))
    }

    /// Hears a host; returns what to say once that decides it.
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

    /// A host is lost; the others go on without a plan that it has not agreed to.
    pub fn lose(&mut self, host: u32) -> Vec<(u32, CoordinatorMessage)> {
        self.hosts.remove(&host);
        self.give_up()
    }

    /// It has taken too long.
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

/// A host that keeps to plans.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Participant {
    /// For how many steps after one it may be asked whether the plan holds.
    ahead: u32,
    /// The step that it begins next.
    next: u64,
    /// The plan that holds, and the one that will from a step on.
    plan: PlanId,
    coming: Option<(PlanId, u64)>,
    /// The plan whose outcome it waits for, at which step.
    promised: Option<(PlanId, u64)>,
    /// Plans up to this one are decided.
    decided: PlanId,
}

impl Participant {
    /// One that says for at most so many steps after each that the plan holds; the same on all hosts.
    pub fn new(ahead: u32) -> Self {
        let (plan, decided) = (PlanId(0), PlanId(0));
        Self { ahead, next: 0, plan, coming: None, promised: None, decided }
    }

    /// Hears whoever proposes; `can_keep` says whether it could keep to a plan.
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

    /// The plan of the next step, if it may begin, and for how many steps after it the same plan surely
    /// holds, at most as many as asked for; it then has begun.
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

    /// A step begins that is of no such plan.
    pub fn pass(&mut self) {
        self.next += 1;
    }

    /// The plan that holds, the one that will, and the one that may.
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

    /// One way that things may be.
    #[derive(Clone, PartialEq, Eq, Hash)]
    struct World {
        proposer: Option<Proposer>,
        keepers: Vec<Option<Participant>>,
        /// What is under way to each host and from it, in order.
        to: Vec<Vec<CoordinatorMessage>>,
        from: Vec<Vec<Answer>>,
        /// What the proposer has not noticed.
        lost: BTreeSet<u32>,
        /// Under which plan each step was begun by anybody, and how many were said to follow.
        plans: Vec<Option<(PlanId, u32)>>,
        /// Plans that are yet to be proposed, and crashes that are yet to happen.
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

        /// No host begins a step before all others that live have begun the one before last: a step
        /// communicates.
        fn may_begin(&self, host: usize) -> bool {
            let next = self.keepers[host].as_ref().map_or(0, |keeper| keeper.next);
            let others = self.keepers.iter().flatten().map(|keeper| keeper.next);
            next < self.plans.len() as u64 && others.min().is_some_and(|least| next <= least + 1)
        }

        /// Everything that may happen next.
        fn next(&self) -> Vec<World> {
            let mut found = Vec::new();
            let mut happens = |act: &dyn Fn(&mut World) -> bool| {
                let mut world = self.clone();
                if act(&mut world) {
                    found.push(world);
                }
            };
            happens(&|world| {
                let Some(proposer) = &mut world.proposer else { return false };
                if world.proposals == 0 {
                    return false;
                }
                let Some((_, words)) = proposer.propose() else { return false };
                world.proposals -= 1;
                world.say(words);
                true
            });
            // It may give up at any time: that is what any delay comes to.
            happens(&|world| {
                let Some(proposer) = &mut world.proposer else { return false };
                let words = proposer.give_up();
                let any = !words.is_empty();
                world.say(words);
                any
            });
            for host in 0..self.keepers.len() {
                let number = host as u32;
                for can_keep in [true, false] {
                    happens(&|world| {
                        if world.keepers[host].is_none() || world.to[host].is_empty() {
                            return false;
                        }
                        let word = world.to[host].remove(0);
                        let is_asked = matches!(word, CoordinatorMessage::Prepare(_));
                        let keeper = world.keepers[host].as_mut().expect("it lives");
                        let answer = keeper.hear(word, can_keep);
                        world.from[host].extend(answer);
                        can_keep || is_asked
                    });
                }
                happens(&|world| {
                    let Some(proposer) = &mut world.proposer else { return false };
                    if world.from[host].is_empty() {
                        return false;
                    }
                    let answer = world.from[host].remove(0);
                    let words = proposer.hear(number, answer);
                    world.say(words);
                    true
                });
                happens(&|world| {
                    if !world.may_begin(host) {
                        return false;
                    }
                    let Some(keeper) = &mut world.keepers[host] else { return false };
                    let step = keeper.next as usize;
                    let Some(plan) = keeper.begin(AHEAD) else { return false };
                    let begun = world.plans[step].get_or_insert(plan);
                    assert_eq!(*begun, plan, "step {step} has two plans");
                    if let Some(before) = step.checked_sub(1) {
                        let (other, following) = world.plans[before].expect("it was begun");
                        assert!(other == plan.0 || following == 0, "step {step} was promised");
                    }
                    true
                });
                happens(&|world| {
                    if world.crashes == 0 || world.keepers[host].take().is_none() {
                        return false;
                    }
                    world.crashes -= 1;
                    world.to[host].clear();
                    world.lost.insert(number);
                    true
                });
                happens(&|world| {
                    let Some(proposer) = &mut world.proposer else { return false };
                    if !world.lost.remove(&number) {
                        return false;
                    }
                    let words = proposer.lose(number);
                    world.say(words);
                    true
                });
            }
            // Whoever proposes may end in the middle of what it says.
            if self.crashes > 0 && self.proposer.is_some() {
                let under_way: usize = self.to.iter().map(Vec::len).sum();
                for host in 0..=self.keepers.len() {
                    happens(&|world| {
                        world.proposer = None;
                        world.crashes -= 1;
                        if host < world.to.len() {
                            return world.to[host].pop().is_some();
                        }
                        under_way > 0 || host == world.to.len()
                    });
                }
            }
            found
        }

        /// Nothing can happen any more: all hosts that live have done all steps, or whoever proposes is
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

    /// What tells a world from others in which hosts have other numbers or something else is so.
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

    /// Visits all that can come of a world; of those visited only a digest is kept.
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
