//! Communication planning: lowers collectives to motifs and schedules each motif as a unit.
//!
//! A [`Collective`](ir::Collective) is what a program requests. The algebra of [`Form`] splits it along
//! its payload (segments) and along its communication pattern (splines, rings, trees); a [`Motif`] at
//! its leaves is a group of point-to-point transfers between ranks. Whatever operators were applied,
//! the transfers together implement the collective.
//!
//! ```
//! use ir::Collective;
//! use plan::Form;
//! let asked = Collective::all_reduce(8, 1 << 20).unwrap();
//! let form = Form::of(&asked).map(|motif| motif.segment(4)).map(|motif| motif.ring());
//! assert_eq!(form.motifs().len(), 8, "four segments, each reduced and then gathered");
//! ```
//!
//! Source: SYNDICATE §4.2 and appendix A.1.

mod algebra;
mod baselines;
mod bound;
mod devices;
mod motif;
mod motif_time;
mod options;
mod order;
mod problem;
mod queue;
mod schedule;
mod script;
mod search;
mod semantics;

pub use algebra::{Form, OrderedMotif};
pub use baselines::{HandOrders, Planned, System, compare};
pub use bound::least_period;
pub use devices::apply::{PlanError, PlannedStep};
pub use devices::problem::{
    CommStrategy, DeviceProblem, DeviceProblemError, QueuePolicy, communication_kinds,
};
pub use devices::search::DevicePlan;
pub use motif::{Motif, Pattern, PayloadSegment, RankTransfer};
pub use options::{
    Execution, Place, Placed, SearchSpace, algorithm, executions, fastest_algorithm,
};
pub use order::CommPlan;
pub use problem::{Problem, ProblemError};
pub use queue::{ChannelQueue, QueueEntry};
pub use schedule::{Policy, ScheduledSpan, Slot, StepScheduler, Unrolled};
pub use script::{RankSchedule, RankScheduleError, Round, RoundPart, ScheduledCollective};
pub use search::{Found, SearchLimits, StopReason, search};
