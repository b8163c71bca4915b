//! The plan that the collectives of each program follow.
//!
//! Hosts make the plans; the controller decides which plan a run follows, in the launch order of
//! its islands, so that no two hosts ever follow different plans in the same run.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{ExecutableId, HostId, Nanos};
use rustc_hash::FxHashMap;

/// Maximum number of unloaded programs that are still shown.
const PAST_MAX: usize = 64;

/// The state of a program's collectives, as shown by `fairway status`.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanOverview {
    /// The program's name.
    pub program: Arc<str>,
    /// Number of its collectives.
    pub collectives: u32,
    /// Number of its plan; plan 1 is unplanned: collectives run as they arrive.
    pub plan: u32,
    /// Measured time of a run under the previous plan, and its predicted time under this plan.
    pub predicted: Option<(Nanos, Nanos)>,
}

#[derive(Debug)]
struct Kept {
    seen: PlanOverview,
    hosts: Arc<[HostId]>,
    /// Whether there is a plan to follow, or collectives run as they arrive.
    is_kept: bool,
}

/// Plans of all programs with planned collectives.
#[derive(Debug, Default)]
pub(crate) struct StepPlans {
    kept: FxHashMap<ExecutableId, Kept>,
    past: VecDeque<PlanOverview>,
}

impl StepPlans {
    /// Registers a program on these hosts.
    pub fn begin(
        &mut self,
        executable: ExecutableId,
        name: &str,
        collectives: u32,
        hosts: Arc<[HostId]>,
    ) {
        let seen = PlanOverview { program: name.into(), collectives, plan: 1, predicted: None };
        self.kept.insert(executable, Kept { seen, hosts, is_kept: false });
    }

    /// Returns the plan of the next run, 0 if none will be made, and whether there is a plan to
    /// follow.
    pub fn current(&self, executable: ExecutableId) -> (u32, bool) {
        self.kept.get(&executable).map_or((0, false), |kept| (kept.seen.plan, kept.is_kept))
    }

    /// Switches to another plan from the next run on, unless the plan has changed since it was
    /// made.
    ///
    /// # Arguments
    /// - `plan`: the plan in use when the new one was made.
    /// - `predicted`: measured and predicted time of a run; `None` keeps those of the previous plan.
    /// - `is_kept`: whether there is a plan to follow, or collectives run as they arrive again.
    ///
    /// # Returns
    /// The number of the new plan, and the hosts that must receive it.
    pub fn change(
        &mut self,
        executable: ExecutableId,
        plan: u32,
        predicted: Option<(Nanos, Nanos)>,
        is_kept: bool,
    ) -> Option<(u32, Arc<[HostId]>)> {
        let kept = self.kept.get_mut(&executable)?;
        let seen = &mut kept.seen;
        if seen.plan != plan {
            return None;
        }
        seen.plan += 1;
        seen.predicted = predicted.or(seen.predicted).filter(|_| is_kept);
        kept.is_kept = is_kept;
        Some((seen.plan, kept.hosts.clone()))
    }

    /// A program is unloaded.
    pub fn forget(&mut self, executable: ExecutableId) {
        if let Some(Kept { seen, .. }) = self.kept.remove(&executable) {
            if self.past.len() == PAST_MAX {
                self.past.pop_front();
            }
            self.past.push_back(seen);
        }
    }

    /// Returns the plans of all programs, including recently unloaded ones.
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
        let predicted = Some((Nanos(20), Nanos(10)));
        let (plan, hosts) = plans.change(id, 1, predicted, true).unwrap();
        assert_eq!((plan, &hosts[..]), (2, &[HostId(0), HostId(2)][..]));
        assert_eq!(plans.change(id, 1, None, true), None);
        assert_eq!(plans.change(ExecutableId(8), 1, None, true), None);
        assert_eq!(plans.change(id, 2, None, true).unwrap().0, 3);
        assert_eq!(plans.current(id), (3, true));
        plans.forget(id);
        assert_eq!(plans.current(id), (0, false));
        let seen = PlanOverview { program: "step".into(), collectives: 3, plan: 3, predicted };
        assert_eq!(plans.overview(), std::slice::from_ref(&seen));
        plans.begin(id, "step", 3, hosts);
        plans.change(id, 1, predicted, true);
        plans.change(id, 2, None, false);
        assert_eq!(plans.overview(), [seen.clone(), PlanOverview { predicted: None, ..seen }]);
    }
}
