//! A training step: what is computed and communicated, and what waits for what.

use base::Nanos;
use thiserror::Error;

use crate::collective::Collective;
use crate::cost::ChannelCost;

/// Most tasks of a step.
const TASKS_MAX: usize = 1 << 20;

/// What cannot be a step.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum StepError {
    /// It waits for what is not there, or for what comes after it.
    #[error(
        "task {task} ({name}) waits for task {after} of {before} steps before; tasks of the same step \
         wait for earlier ones only, and there are {tasks}"
    )]
    After {
        /// Which task.
        task: u32,
        /// What it is called.
        name: String,
        /// What it waits for.
        after: u32,
        /// Of how many steps before.
        before: u32,
        /// How many there are.
        tasks: usize,
    },
    /// It waits for what was too long ago.
    #[error("task {task} ({name}) waits for something of {before} steps before; expected 0 or 1")]
    Before {
        /// Which task.
        task: u32,
        /// What it is called.
        name: String,
        /// How many steps before.
        before: u32,
    },
    /// More than can be planned.
    #[error("a step has {found} tasks; expected 1 to {most}", most = TASKS_MAX)]
    Tasks {
        /// How many.
        found: usize,
    },
}

/// What a task waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dependency {
    /// Which task.
    pub task: u32,
    /// Of how many steps before: 0 is the same one.
    pub before: u32,
}

/// What a task does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Work {
    /// Keeps the devices of every rank busy for so long.
    Compute(Nanos),
    /// Moves vectors of elements of so many bytes.
    Communicate {
        /// What.
        collective: Collective,
        /// Bytes of one element.
        element: u32,
    },
}

/// One thing that every rank does in a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Task {
    /// What people call it.
    pub name: String,
    /// What it does.
    pub work: Work,
    /// What must be done before it begins.
    pub after: Vec<Dependency>,
}

/// What every rank does again and again; it computes in the order of its tasks.
///
/// Source: SYNDICATE §3.1.1, Figure 13.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    tasks: Vec<Task>,
    /// Of each channel and each other one, how much longer motifs take on the first while the other
    /// carries one too, in millionths.
    overlap: Vec<Vec<u32>>,
}

impl Step {
    /// A step of these tasks.
    ///
    /// # Errors
    /// A task waits for what is not there or comes later, or there are none or too many.
    pub fn new(tasks: Vec<Task>) -> Result<Self, StepError> {
        if !(1..=TASKS_MAX).contains(&tasks.len()) {
            return Err(StepError::Tasks { found: tasks.len() });
        }
        for (number, task) in (0..).zip(&tasks) {
            for &Dependency { task: after, before } in &task.after {
                let name = || task.name.clone();
                if before > 1 {
                    return Err(StepError::Before { task: number, name: name(), before });
                }
                if after as usize >= tasks.len() || (before == 0 && after >= number) {
                    let tasks = tasks.len();
                    let name = name();
                    return Err(StepError::After { task: number, name, after, before, tasks });
                }
            }
        }
        Ok(Self { tasks, overlap: Vec::new() })
    }

    /// The same step on these channels, which may share something.
    #[must_use]
    pub fn on(mut self, channels: &[ChannelCost]) -> Self {
        let millionths = |part: &f64| (part * 1e6).round() as u32;
        let of = |channel: &ChannelCost| channel.overlap.iter().map(millionths).collect();
        self.overlap = channels.iter().map(of).collect();
        self
    }

    /// How much longer motifs take on a channel while another one carries one, in millionths.
    pub(crate) fn overlap(&self, channel: usize, other: usize) -> u32 {
        self.overlap.get(channel).and_then(|of| of.get(other)).copied().unwrap_or(0)
    }

    /// Its tasks, in the order in which they are asked for.
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }
}
