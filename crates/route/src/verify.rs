//! Verifies a schedule independently of how it was made.

use base::{LinkId, Ticks, VertexId};
use thiserror::Error;
use topology::Network;

use crate::schedule::{RoutePlan, Train};
use crate::task::{Computation, RouteTransfer, Task};

/// A violation found in a schedule.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Fault {
    /// A train over no links or unknown links, or an unknown task, or a task without an end.
    #[error("task {task} is not there, or its train has no links, or some that are not there")]
    Unknown {
        /// The task.
        task: u32,
    },
    /// Two computations overlap on one chip.
    #[error("chip {chip} computes twice at once: tasks {one} and {other} in cycle {when}")]
    Busy {
        /// The chip.
        chip: VertexId,
        /// The first task.
        one: u32,
        /// The second task.
        other: u32,
        /// When the second task begins.
        when: Ticks,
    },
    /// A computation begins before its dependencies are done.
    #[error("task {task} computes from cycle {found} on; what it needs is there in {there}")]
    Begun {
        /// The task.
        task: u32,
        /// Its start.
        found: Ticks,
        /// The earliest start.
        there: Ticks,
    },
    /// Two trains overlap on one link.
    #[error(
        "link {link} is booked twice: task {one} until cycle {until}, task {other} from \
         cycle {from}"
    )]
    Booked {
        /// The link.
        link: LinkId,
        /// The first task.
        one: u32,
        /// When the first task releases the link.
        until: Ticks,
        /// The second task.
        other: u32,
        /// When the second task starts on the link.
        from: Ticks,
    },
    /// A vector departs before it has arrived, or before its dependencies are done.
    #[error("task {task} begins on link {link} in cycle {found}; it is there in {there}")]
    Early {
        /// The task.
        task: u32,
        /// The link.
        link: LinkId,
        /// Its start.
        found: Ticks,
        /// The earliest start.
        there: Ticks,
    },
    /// A path does not lead from source to target, or a forwarded transfer does not bring enough to the
    /// source.
    #[error("a train of task {task} does not go from its source to its target")]
    Path {
        /// The task.
        task: u32,
    },
    /// Vectors are missing, duplicated or out of range.
    #[error("vectors of task {task} come {found} times; expected {expected} in order")]
    Count {
        /// The task.
        task: u32,
        /// Vectors that arrive.
        found: u64,
        /// Vectors of the task.
        expected: u64,
    },
    /// A transfer is not done when the schedule says.
    #[error("task {task} is done in cycle {found}; the schedule says {said}")]
    End {
        /// The task.
        task: u32,
        /// Its actual end.
        found: Ticks,
        /// Its end by the schedule.
        said: Ticks,
    },
    /// Buffer overflow: more vectors wait at a vertex than it can hold.
    #[error(
        "vertex {vertex} holds {found} vectors for others in cycle {when}; it has room for {most}"
    )]
    Buffer {
        /// The vertex.
        vertex: VertexId,
        /// When it overflows.
        when: Ticks,
        /// Vectors that wait.
        found: u64,
        /// Capacity in vectors.
        most: u64,
    },
}

/// Verifies that no link is booked twice in any cycle, that computations on a chip do not overlap, that
/// every vector is present where it departs, that no buffer overflows, and that every transfer is
/// delivered exactly once, in order, after its dependencies, and when the schedule says. Uses nothing
/// of how the plan was made. O(trains · hops · log).
///
/// # Errors
/// Returns the first violation found.
pub fn verify(network: &Network, plan: &RoutePlan) -> Result<(), Fault> {
    let check = Check { network, plan };
    check.numbers()?;
    check.paths()?;
    check.forwarded()?;
    check.computations()?;
    check.bookings()?;
    check.deliveries()?;
    check.buffers()
}

struct Check<'a> {
    network: &'a Network,
    plan: &'a RoutePlan,
}

impl Check<'_> {
    /// Checks that all tasks and links referred to exist.
    fn numbers(&self) -> Result<(), Fault> {
        let RoutePlan { circle, tasks, schedule } = self.plan;
        let all = tasks.len() as u64 * u64::from(circle.turns());
        for (task, asked) in (0..).zip(tasks) {
            let has_end = schedule.ends.len() > task as usize;
            if !has_end || asked.waits_for().any(|other| u64::from(other) >= all) {
                return Err(Fault::Unknown { task });
            }
        }
        for train in &schedule.trains {
            let is_asked =
                tasks.get(train.task as usize).is_some_and(|one| one.transfer().is_some());
            let links = self.network.links().len() as u32;
            let has_links = !train.hops.is_empty() && train.links().all(|link| link.0 < links);
            if !is_asked || !has_links {
                return Err(Fault::Unknown { task: train.task });
            }
        }
        Ok(())
    }

    /// Returns when a task of any part is done.
    fn end(&self, number: u32) -> Ticks {
        self.plan.schedule.ends[number as usize % self.plan.tasks.len()]
    }

    fn begin(&self, after: &[u32]) -> Ticks {
        after.iter().map(|&number| self.end(number)).max().unwrap_or_default()
    }

    fn slot(&self, train: &Train) -> u64 {
        self.plan.schedule.timing.pace(self.network, train.links()).0
    }

    /// Returns when the first vector of a train has crossed a link.
    fn over(&self, link: LinkId, start: Ticks) -> Ticks {
        start + self.plan.schedule.timing.hop(self.network.link(link))
    }

    /// Returns when the first vector of a train has arrived at its target.
    fn comes(&self, train: &Train) -> Ticks {
        train.hops.last().map_or(Ticks(0), |last| self.over(last.link, last.start))
    }

    fn transfer(&self, train: &Train) -> &RouteTransfer {
        self.plan.tasks[train.task as usize].transfer().expect("trains are of transfers")
    }

    fn paths(&self) -> Result<(), Fault> {
        for train in &self.plan.schedule.trains {
            let (task, asked) = (train.task, self.transfer(train));
            let mut there = self.begin(&asked.after);
            let mut at = asked.source;
            for hop in &train.hops {
                let link = self.network.link(hop.link);
                if link.source != at {
                    return Err(Fault::Path { task });
                }
                if hop.start < there {
                    return Err(Fault::Early { task, link: hop.link, found: hop.start, there });
                }
                there = self.over(hop.link, hop.start);
                at = link.target;
            }
            if at != asked.target {
                return Err(Fault::Path { task });
            }
        }
        Ok(())
    }

    /// Checks that forwarded vectors have arrived before they depart, vector by vector.
    fn forwarded(&self) -> Result<(), Fault> {
        let RoutePlan { circle, tasks, schedule } = self.plan;
        let mut trains: Vec<Vec<&Train>> = vec![Vec::new(); tasks.len()];
        for train in &schedule.trains {
            trains[train.task as usize].push(train);
        }
        for train in &schedule.trains {
            let task = train.task;
            let asked = self.transfer(train);
            for &number in &asked.from {
                let (turn, from) = (number / tasks.len() as u32, number as usize % tasks.len());
                let Some(brought) = tasks[from].transfer() else {
                    return Err(Fault::Path { task });
                };
                let is_enough = schedule.timing.vectors(brought.size) >= train.first + train.count;
                if circle.turn(brought.target, turn) != asked.source || !is_enough {
                    return Err(Fault::Path { task });
                }
                for other in &trains[from] {
                    self.follows(train, other)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that no vector of a train departs before `other` has brought it.
    fn follows(&self, train: &Train, other: &Train) -> Result<(), Fault> {
        let hop = train.hops[0];
        let leaves = |vector: u64| hop.start + Ticks((vector - train.first) * self.slot(train));
        let comes =
            |vector: u64| self.comes(other) + Ticks((vector - other.first) * self.slot(other));
        // Both have a constant pace, so checking the first and the last common vector suffices.
        let begin = train.first.max(other.first);
        let end = (train.first + train.count).min(other.first + other.count);
        for vector in [begin, end.saturating_sub(1)] {
            if begin < end && leaves(vector) < comes(vector) {
                let (found, there) = (leaves(vector), comes(vector));
                return Err(Fault::Early { task: train.task, link: hop.link, found, there });
            }
        }
        Ok(())
    }

    fn computations(&self) -> Result<(), Fault> {
        let RoutePlan { circle, tasks, schedule } = self.plan;
        let mut busy = Vec::new();
        for (task, asked) in (0..).zip(tasks) {
            let Task::Computation(Computation { chip, length, after }) = asked else { continue };
            let end = schedule.ends[task as usize];
            let there = self.begin(after);
            if end < there + *length {
                let found = Ticks(end.0.saturating_sub(length.0));
                return Err(Fault::Begun { task, found, there });
            }
            busy.push((circle.kind_of(*chip), end - *length, end, task));
        }
        busy.sort_unstable();
        for pair in busy.windows(2) {
            let ((kind, _, until, one), (next, when, _, other)) = (pair[0], pair[1]);
            if kind == next && when < until {
                return Err(Fault::Busy { chip: VertexId(kind), one, other, when });
            }
        }
        Ok(())
    }

    fn bookings(&self) -> Result<(), Fault> {
        let RoutePlan { circle, schedule, .. } = self.plan;
        // What one part does on a kind of link, all parts do on each link of that kind.
        let mut booked: Vec<(u32, Ticks, Ticks, u32)> = Vec::new();
        for train in schedule.trains.iter().filter(|train| train.count > 0) {
            let length = Ticks(train.count * self.slot(train));
            booked.extend(
                train.hops.iter().map(|hop| {
                    (circle.kind(hop.link).0, hop.start, hop.start + length, train.task)
                }),
            );
        }
        booked.sort_unstable();
        for pair in booked.windows(2) {
            let ((kind, _, until, one), (next, from, _, other)) = (pair[0], pair[1]);
            if kind == next && from < until {
                let link = circle.link(kind, 0);
                return Err(Fault::Booked { link, one, until, other, from });
            }
        }
        Ok(())
    }

    fn deliveries(&self) -> Result<(), Fault> {
        let RoutePlan { tasks, schedule, .. } = self.plan;
        let mut come: Vec<(u32, u64, u64)> = Vec::with_capacity(schedule.trains.len());
        let mut ends: Vec<Ticks> = vec![Ticks(0); tasks.len()];
        for train in &schedule.trains {
            come.push((train.task, train.first, train.count));
            let end = &mut ends[train.task as usize];
            *end = (*end).max(self.comes(train) + Ticks(train.count * self.slot(train)));
        }
        come.sort_unstable();
        let mut rest = come.as_slice();
        for (task, asked) in (0..).zip(tasks) {
            let count = rest.iter().take_while(|(other, _, _)| *other == task).count();
            let (mine, behind) = rest.split_at(count);
            rest = behind;
            let Some(asked) = asked.transfer() else { continue };
            let expected = schedule.timing.vectors(asked.size);
            let found: u64 = mine.iter().map(|(_, _, count)| count).sum();
            let mut next = 0;
            let in_order = mine.iter().all(|&(_, first, count)| {
                let follows = first == next;
                next += count;
                follows
            });
            if !in_order || found != expected {
                return Err(Fault::Count { task, found, expected });
            }
            let (found, said) = (ends[task as usize], schedule.ends[task as usize]);
            if expected > 0 && found != said {
                return Err(Fault::End { task, found, said });
            }
        }
        Ok(())
    }

    fn buffers(&self) -> Result<(), Fault> {
        let RoutePlan { circle, schedule, .. } = self.plan;
        // A train occupies buffer space at an intermediate vertex for the vectors that arrive while the
        // first one waits.
        let mut changes: Vec<(u32, Ticks, i64)> = Vec::new();
        for train in &schedule.trains {
            let slot = self.slot(train).max(1);
            for pair in train.hops.windows(2) {
                let there = self.over(pair[0].link, pair[0].start);
                let waits = (pair[1].start - there).0;
                let held = waits.div_ceil(slot).min(train.count) as i64;
                if held > 0 {
                    let vertex = self.network.link(pair[0].link).target;
                    let kind = circle.kind_of(vertex);
                    let until = pair[1].start + Ticks(train.count * slot);
                    changes.extend([(kind, there, held), (kind, until, -held)]);
                }
            }
        }
        changes.sort_unstable();
        let (mut at, mut held) = (None, 0);
        for (kind, when, change) in changes {
            if at != Some(kind) {
                (at, held) = (Some(kind), 0);
            }
            held += change;
            if held > schedule.timing.buffer as i64 {
                let (found, most) = (held as u64, schedule.timing.buffer);
                return Err(Fault::Buffer { vertex: VertexId(kind), when, found, most });
            }
        }
        Ok(())
    }
}
