//! Text format of scheduled steps: timing, then each task, and the trains of each transfer.
//!
//! Times are in thousandths of a cycle. See [`StepSchedule::parse`].

use std::fmt::{self, Display};
use std::str::FromStr;

use base::{Bytes, LinkId, Nanos, Ticks, VertexId};
use thiserror::Error;
use topology::{Network, RotationalSymmetry};

use crate::schedule::{Hop, RoutePlan, Schedule, Timing, Train};
use crate::step::StepSchedule;
use crate::task::{Computation, RouteTransfer, Task, Tasks};
use crate::verify::{Fault, verify};

/// A scheduled step cannot be parsed.
#[derive(Debug, Error, PartialEq)]
pub enum ScheduleTextError {
    /// A line is malformed.
    #[error("line {line}: expected {expected}, found {found:?}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What was expected.
        expected: &'static str,
        /// The line found.
        found: String,
    },
    /// The schedule is not valid on the network.
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl Display for StepSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RoutePlan { tasks, schedule, .. } = &self.plan;
        let Timing { clock_hz, vector, encoded, forward, buffer } = schedule.timing;
        let (vector, encoded, forward) = (vector.0, encoded.0, forward.0);
        writeln!(f, "timing {clock_hz} {vector} {encoded} {forward} {buffer}")?;
        let mut trains = schedule.trains.iter().peekable();
        for (node, (range, algorithm)) in self.tasks.iter().zip(&self.algorithms).enumerate() {
            let algorithm = algorithm.as_deref().unwrap_or("-");
            writeln!(f, "node {node} {} {} {algorithm}", range.start, range.end)?;
        }
        for (number, (task, end)) in (0..).zip(tasks.iter().zip(&schedule.ends)) {
            match task {
                Task::Computation(Computation { chip, length, after }) => {
                    write!(f, "compute {} {} {}", chip.0, length.0, end.0)?;
                    listed(f, " after", after)?;
                }
                Task::Transfer(transfer) => {
                    let RouteTransfer { source, target, size, after, .. } = transfer;
                    write!(f, "send {} {} {} {}", source.0, target.0, size.0, end.0)?;
                    listed(f, " after", after)?;
                }
            }
            writeln!(f)?;
            while let Some(train) = trains.next_if(|train| train.task == number) {
                write!(f, "train {} {}", train.first, train.count)?;
                for hop in &train.hops {
                    write!(f, " {}@{}", hop.link.0, hop.start.0)?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

fn listed(f: &mut fmt::Formatter<'_>, mark: &str, tasks: &Tasks) -> fmt::Result {
    if tasks.is_empty() {
        return Ok(());
    }
    write!(f, "{mark}")?;
    tasks.iter().try_for_each(|task| write!(f, " {task}"))
}

impl StepSchedule {
    /// Parses what [`Display`] prints, and verifies it on the network.
    ///
    /// ```
    /// use base::Bytes;
    /// use ir::{StepGraph, StepOp};
    /// use route::{StepSchedule, Timing, route_step};
    /// let ring: topology::Topology = "ring:4".parse().unwrap();
    /// let network = ring.links().unwrap().network();
    /// let mut step = StepGraph::new("train", 4);
    /// step.add("", StepOp::Transfer { source: 0, target: 2, size: Bytes(4096) }, &[]);
    /// let step = plan::PlannedStep::unplanned(step);
    /// let schedule = route_step(network, &step, Timing::default()).unwrap();
    /// assert_eq!(StepSchedule::parse(&schedule.to_string(), network).unwrap(), schedule);
    /// ```
    ///
    /// # Errors
    /// A line is malformed, or the schedule is not valid on the network.
    pub fn parse(text: &str, network: &Network) -> Result<Self, ScheduleTextError> {
        let mut read = Reader::default();
        for (number, line) in text.lines().enumerate() {
            read.line(line).map_err(|expected| {
                let found = line.chars().take(80).collect();
                ScheduleTextError::Line { line: number + 1, expected, found }
            })?;
        }
        let Reader { timing, nodes, tasks, ends, trains, .. } = read;
        let timing = timing.ok_or(ScheduleTextError::Line {
            line: 1,
            expected: "timing",
            found: String::new(),
        })?;
        let schedule = Schedule { timing, trains, ends };
        let plan = RoutePlan { circle: RotationalSymmetry::trivial(network), tasks, schedule };
        verify(network, &plan)?;
        let (ranges, algorithms) = nodes.into_iter().unzip();
        Ok(Self { plan, tasks: ranges, algorithms })
    }
}

type NodeLine = (std::ops::Range<u32>, Option<std::sync::Arc<str>>);

#[derive(Default)]
struct Reader {
    timing: Option<Timing>,
    nodes: Vec<NodeLine>,
    tasks: Vec<Task>,
    ends: Vec<Ticks>,
    trains: Vec<Train>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), &'static str> {
        let (head, after) = line.split_once(" after ").unwrap_or((line, ""));
        let mut words = head.split(' ');
        let after = || -> Result<Tasks, &'static str> {
            let numbers = after.split(' ').filter(|word| !word.is_empty());
            numbers.map(|word| word.parse().map_err(|_| "numbers of tasks")).collect()
        };
        match words.next() {
            Some("timing") => {
                self.timing = Some(Timing {
                    clock_hz: next(&mut words)?,
                    vector: Bytes(next(&mut words)?),
                    encoded: Bytes(next(&mut words)?),
                    forward: Nanos(next(&mut words)?),
                    buffer: next(&mut words)?,
                });
            }
            Some("node") => {
                if next::<usize>(&mut words)? != self.nodes.len() {
                    return Err("the next node");
                }
                let range = next(&mut words)?..next(&mut words)?;
                let algorithm = words.next().ok_or("an algorithm")?;
                let algorithm = Some(algorithm).filter(|name| *name != "-").map(Into::into);
                self.nodes.push((range, algorithm));
            }
            Some("compute") => {
                let chip = VertexId(next(&mut words)?);
                let length = Ticks(next(&mut words)?);
                self.ends.push(Ticks(next(&mut words)?));
                let after = after()?;
                self.tasks.push(Computation { chip, length, after }.into());
            }
            Some("send") => {
                let ends = [next(&mut words)?, next(&mut words)?].map(VertexId);
                let transfer = RouteTransfer::new(ends[0], ends[1], Bytes(next(&mut words)?));
                self.ends.push(Ticks(next(&mut words)?));
                self.tasks.push(RouteTransfer { after: after()?, ..transfer }.into());
            }
            Some("train") => {
                let task = (self.tasks.len() as u32).checked_sub(1).ok_or("a transfer first")?;
                let (first, count) = (next(&mut words)?, next(&mut words)?);
                let hop = |word: &str| {
                    let (link, start) = word.split_once('@')?;
                    let link = LinkId(link.parse().ok()?);
                    Some(Hop { link, start: Ticks(start.parse().ok()?) })
                };
                let hops: Option<_> = words.by_ref().map(hop).collect();
                let hops = hops.ok_or("links and their starts, LINK@START")?;
                self.trains.push(Train { task, first, count, hops });
            }
            _ => return Err("timing, node, compute, send or train"),
        }
        if words.next().is_some() { Err("the end of the line") } else { Ok(()) }
    }
}

fn next<'a, T: FromStr>(words: &mut impl Iterator<Item = &'a str>) -> Result<T, &'static str> {
    words.next().and_then(|word| word.parse().ok()).ok_or("a number")
}
