//! What a placed step comes to: what each device computes, and what goes between which of them.

use std::sync::Arc;

use base::{Bytes, Nanos};
use thiserror::Error;

/// What devices tell each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CollectiveKind {
    /// Vectors are added up, and all get the sum.
    AllReduce,
    /// All get the parts that others have.
    AllGather,
    /// Vectors are added up, and each gets a part of the sum.
    ReduceScatter,
}

impl CollectiveKind {
    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
        }
    }

    /// How many messages there are one after another among so many, by trees.
    pub fn rounds(self, members: u32) -> u32 {
        self.passes() * members.max(1).next_power_of_two().ilog2()
    }

    /// How often what is told goes around a ring of its members.
    pub fn passes(self) -> u32 {
        match self {
            Self::AllReduce => 2,
            Self::AllGather | Self::ReduceScatter => 1,
        }
    }
}

/// What a task does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Job {
    /// Keeps a device busy for so long.
    Compute {
        /// Which.
        device: u32,
        /// How long.
        time: Nanos,
    },
    /// Brings so much from one device to another.
    Transfer {
        /// From which.
        source: u32,
        /// To which.
        target: u32,
        /// How much.
        size: Bytes,
    },
    /// Something that these devices tell each other, around a ring in this order.
    Collective {
        /// What.
        kind: CollectiveKind,
        /// Who.
        members: Arc<[u32]>,
        /// How much it is in all: of one vector.
        size: Bytes,
    },
}

impl Job {
    /// One more than the greatest device that it names.
    pub fn devices(&self) -> u32 {
        match self {
            Job::Compute { device, .. } => device + 1,
            Job::Transfer { source, target, .. } => source.max(target) + 1,
            Job::Collective { members, .. } => members.iter().max().map_or(0, |last| last + 1),
        }
    }
}

/// What cannot be a step.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum TaskError {
    /// A device that is not there.
    #[error("task {task} is of device {found}; there are {devices} devices")]
    Device {
        /// Which task.
        task: u32,
        /// The device it names.
        found: u32,
        /// How many there are.
        devices: u32,
    },
    /// It waits for what is not there, or for itself.
    #[error("task {task} waits for task {found}; expected one of {tasks} others")]
    After {
        /// Which task.
        task: u32,
        /// What it waits for.
        found: u32,
        /// How many tasks there are.
        tasks: u32,
    },
    /// Tasks that wait for each other.
    #[error("task {task} waits for itself, by others")]
    Cycle {
        /// One of them.
        task: u32,
    },
}

/// A step of several devices.
///
/// Where all parts of a machine do the same, one part stands for them: `devices` are those of the
/// part, and transfers to devices from there on go to the parts that follow.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TaskGraph {
    /// Devices of one part.
    pub devices: u32,
    /// How many parts there are; 1 where each device does something of its own.
    pub parts: u32,
    jobs: Vec<Job>,
    /// What each waits for: `after[starts[task]..starts[task + 1]]`.
    after: Vec<u32>,
    starts: Vec<u32>,
    /// Of each task, how urgent it is; none where nobody has said so of any.
    urgencies: Vec<u64>,
}

impl TaskGraph {
    /// A step of so many devices, in which nothing is done yet.
    pub fn new(devices: u32, parts: u32) -> Self {
        Self { devices, parts, starts: vec![0], ..Self::default() }
    }

    /// Adds what is done when all of these are; its number.
    pub fn add(&mut self, job: Job, after: &[u32]) -> u32 {
        self.jobs.push(job);
        self.after.extend_from_slice(after);
        self.starts.push(self.after.len() as u32);
        self.jobs.len() as u32 - 1
    }

    /// Says how urgent a task is where its device could compute several; 0 unless somebody does.
    pub fn urge(&mut self, task: u32, urgency: u64) {
        self.urgencies.resize(self.jobs.len(), 0);
        self.urgencies[task as usize] = urgency;
    }

    /// How urgent a task is, if that has been said of any.
    pub fn urgency(&self, task: u32) -> Option<u64> {
        (!self.urgencies.is_empty())
            .then(|| self.urgencies.get(task as usize).copied().unwrap_or(0))
    }

    /// How many tasks there are.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether there is no task.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// What each does.
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// What a task waits for.
    pub fn after(&self, task: u32) -> &[u32] {
        let task = task as usize;
        &self.after[self.starts[task] as usize..self.starts[task + 1] as usize]
    }

    /// Tasks, each behind all that it waits for. O(tasks + dependencies).
    ///
    /// # Errors
    /// A task names a device or a task that is not there, or waits for itself.
    pub fn order(&self) -> Result<Vec<u32>, TaskError> {
        let tasks = self.jobs.len() as u32;
        let devices = self.devices * self.parts;
        let mut waits = Vec::with_capacity(self.jobs.len());
        for (task, job) in (0..).zip(&self.jobs) {
            if job.devices() > devices {
                return Err(TaskError::Device { task, found: job.devices() - 1, devices });
            }
            let after = self.after(task);
            if let Some(&found) = after.iter().find(|&&other| other >= tasks || other == task) {
                return Err(TaskError::After { task, found, tasks });
            }
            waits.push(after.len() as u32);
        }
        let next = self.next();
        let mut order: Vec<u32> = (0..tasks).filter(|&task| waits[task as usize] == 0).collect();
        let mut at = 0;
        while let Some(&task) = order.get(at) {
            at += 1;
            for &other in next.of(task) {
                waits[other as usize] -= 1;
                if waits[other as usize] == 0 {
                    order.push(other);
                }
            }
        }
        match waits.iter().position(|&count| count > 0) {
            Some(task) => Err(TaskError::Cycle { task: task as u32 }),
            None => Ok(order),
        }
    }

    /// Which tasks wait for each.
    pub fn next(&self) -> Next {
        let mut starts = vec![0; self.jobs.len() + 1];
        for &task in &self.after {
            starts[task as usize + 1] += 1;
        }
        for task in 0..self.jobs.len() {
            starts[task + 1] += starts[task];
        }
        let mut filled = starts.clone();
        let mut tasks = vec![0; self.after.len()];
        for task in 0..self.jobs.len() as u32 {
            for &other in self.after(task) {
                tasks[filled[other as usize] as usize] = task;
                filled[other as usize] += 1;
            }
        }
        Next { tasks, starts }
    }
}

/// Of each task, those that wait for it.
#[derive(Clone, Debug)]
pub struct Next {
    tasks: Vec<u32>,
    starts: Vec<u32>,
}

impl Next {
    /// Those that wait for this one.
    pub fn of(&self, task: u32) -> &[u32] {
        let task = task as usize;
        &self.tasks[self.starts[task] as usize..self.starts[task + 1] as usize]
    }
}
