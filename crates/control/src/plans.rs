//! By which plan the collectives of each program go.
//!
//! Hosts make plans; which one a run goes by is said here, in the one order of its islands, so that
//! no two hosts ever go by different ones.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{ExecutableId, HostId, Nanos};
use rustc_hash::FxHashMap;

/// Programs that are gone and still shown.
const PAST_MAX: usize = 64;

/// How a program's collectives go, as `fairway status` shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanOverview {
    /// The program's name.
    pub program: Arc<str>,
    /// How many it has.
    pub collectives: u32,
    /// The number of their plan; by the first they go as they come.
    pub plan: u32,
    /// What a run was seen to take before, and what it is told to take by the plan.
    pub told: Option<(Nanos, Nanos)>,
}

#[derive(Debug)]
struct Kept {
    seen: PlanOverview,
    hosts: Arc<[HostId]>,
    /// Is there something to keep to, or do collectives go as they come?
    is_kept: bool,
}

/// All programs whose collectives go by plans.
#[derive(Debug, Default)]
pub(crate) struct StepPlans {
    kept: FxHashMap<ExecutableId, Kept>,
    past: VecDeque<PlanOverview>,
}

impl StepPlans {
    /// Begins with a program, on these hosts.
    pub fn begin(
        &mut self,
        executable: ExecutableId,
        name: &str,
        collectives: u32,
        hosts: Arc<[HostId]>,
    ) {
        let seen = PlanOverview { program: name.into(), collectives, plan: 1, told: None };
        self.kept.insert(executable, Kept { seen, hosts, is_kept: false });
    }

    /// The plan of the next run, 0 if none will be made, and whether there is something to keep to.
    pub fn current(&self, executable: ExecutableId) -> (u32, bool) {
        self.kept.get(&executable).map_or((0, false), |kept| (kept.seen.plan, kept.is_kept))
    }

    /// Goes by another plan from the next run on, unless that has happened since it was made.
    ///
    /// # Arguments
    /// - `plan`: by which runs went when it was made.
    /// - `told`: what it promises; none is what the one before did.
    /// - `is_kept`: whether there is one, or collectives go as they come again.
    ///
    /// # Returns
    /// Its number, and who must know it.
    pub fn change(
        &mut self,
        executable: ExecutableId,
        plan: u32,
        told: Option<(Nanos, Nanos)>,
        is_kept: bool,
    ) -> Option<(u32, Arc<[HostId]>)> {
        let kept = self.kept.get_mut(&executable)?;
        let seen = &mut kept.seen;
        if seen.plan != plan {
            return None;
        }
        seen.plan += 1;
        seen.told = told.or(seen.told).filter(|_| is_kept);
        kept.is_kept = is_kept;
        Some((seen.plan, kept.hosts.clone()))
    }

    /// A program is gone.
    pub fn forget(&mut self, executable: ExecutableId) {
        if let Some(Kept { seen, .. }) = self.kept.remove(&executable) {
            if self.past.len() == PAST_MAX {
                self.past.pop_front();
            }
            self.past.push_back(seen);
        }
    }

    /// What there is to see, of programs that are gone too.
    pub fn overview(&self) -> Vec<PlanOverview> {
        let mut kept: Vec<_> = self.kept.iter().collect();
        kept.sort_by_key(|(id, _)| **id);
        let kept = kept.into_iter().map(|(_, kept)| kept.seen.clone());
        self.past.iter().cloned().chain(kept).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_was_made_for_another_one_is_too_late() {
        let mut plans = StepPlans::default();
        let (id, hosts) = (ExecutableId(7), Arc::from([HostId(0), HostId(2)]));
        assert_eq!(plans.current(id), (0, false));
        plans.begin(id, "step", 3, hosts);
        assert_eq!(plans.current(id), (1, false));
        let told = Some((Nanos(20), Nanos(10)));
        let (plan, hosts) = plans.change(id, 1, told, true).unwrap();
        assert_eq!((plan, &hosts[..]), (2, &[HostId(0), HostId(2)][..]));
        assert_eq!(plans.change(id, 1, None, true), None);
        assert_eq!(plans.change(ExecutableId(8), 1, None, true), None);
        assert_eq!(plans.change(id, 2, None, true).unwrap().0, 3);
        assert_eq!(plans.current(id), (3, true));
        plans.forget(id);
        assert_eq!(plans.current(id), (0, false));
        let seen = PlanOverview { program: "step".into(), collectives: 3, plan: 3, told };
        assert_eq!(plans.overview(), std::slice::from_ref(&seen));
        plans.begin(id, "step", 3, hosts);
        plans.change(id, 1, told, true);
        plans.change(id, 2, None, false);
        assert_eq!(plans.overview(), [seen.clone(), PlanOverview { told: None, ..seen }]);
    }
}
