//! Checks that a plan's time slots hold while clocks drift and links jitter.
//!
//! A chip sends a vector at a cycle of its own clock, and the next chip takes it off the link at a
//! cycle of its own. In between lie the link's measured latency and a margin. A vector later than that
//! is not there yet; one that is much earlier overflows the link's shallow buffer.
//!
//! Source: the multi-TSP system §2.3, §3.3, §4.4.

use base::{LinkId, Random, VertexId};
use route::RoutePlan;
use thiserror::Error;
use topology::Network;

use super::clocks::{Clocks, MEASURED, kind_of, table};

/// A plan's tolerance for clock offsets and link jitter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slack {
    /// Cycles between a vector's nominal arrival and when it is taken off the link.
    pub margin: f64,
    /// Capacity of a link's receive buffer, in vectors.
    pub buffer: u32,
    /// Cycles between resynchronisations (RUNTIME_DESKEW); `None` for no resynchronisation.
    pub deskew: Option<u64>,
    /// Random seed of the jitter.
    pub seed: u64,
}

impl Default for Slack {
    /// Assumed: a margin of 32 of the 433 cycles that a chip takes to forward a vector, which exceeds
    /// jitter and two chips' offset from the root together; 4 vectors; every 16,384 cycles.
    fn default() -> Self {
        Self { margin: 32.0, buffer: 4, deskew: Some(1 << 14), seed: 0 }
    }
}

/// The first vector that missed its time slot.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
#[error(
    "vector {vector} of task {task} came over link {link} in cycle {cycle} by {late:.1} cycles too \
     {}; resynchronise clocks more often, or leave more room", if *late > 0.0 { "late" } else { "early" }
)]
pub struct Violation {
    /// Cycle of its departure, from the start of the program.
    pub cycle: u64,
    /// The link.
    pub link: LinkId,
    /// Task number.
    pub task: u32,
    /// The vector's index within the task.
    pub vector: u64,
    /// Cycles by which it was later than the margin allows, or, if negative, earlier than the buffer
    /// allows.
    pub late: f64,
}

/// Clock skew statistics of a run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Kept {
    /// Largest skew between the two ends of a link, in cycles.
    pub apart: f64,
    /// Number of resynchronisations.
    pub deskews: u64,
}

/// The trains scheduled on one link.
struct Lane {
    link: LinkId,
    source: usize,
    target: usize,
    /// First cycle, cycles between vectors, number of vectors, task, index of its first vector.
    trains: Vec<(f64, f64, u64, u32, u64)>,
}

/// Repeats a plan for `cycles` cycles while clocks drift, and checks every time slot.
///
/// O(cycles / correction interval · links), plus the vectors of the interval in which one may miss its
/// slot. The correction interval is 4096 cycles by default.
///
/// # Errors
/// Returns the first vector that arrives too late or too early.
pub fn keep_slots(
    network: &Network,
    plan: &RoutePlan,
    clocks: &mut Clocks,
    slack: Slack,
    cycles: u64,
) -> Result<Kept, Violation> {
    let lanes = lanes(network, plan);
    let period = (plan.end().0 as f64 / 1e3).max(1.0);
    let chips = (0..network.vertices()).map(VertexId);
    let begin = clocks.now();
    // Offset of each chip's program count (SAC) ahead of the root's.
    let mut counts: Vec<f64> = chips.clone().map(|chip| clocks.ahead(chip)).collect();
    let gains: Vec<f64> = chips.clone().map(|chip| clocks.drift(chip)).collect();
    let mut kept = Kept::default();
    let mut wrong = None;
    let (mut last, mut deskewed) = (begin, begin);
    clocks.advance(cycles, |clocks| {
        let now = clocks.now();
        for (count, gain) in counts.iter_mut().zip(&gains) {
            *count += gain * (now - last) as f64;
        }
        let span = (last - begin, now - begin);
        last = now;
        for lane in &lanes {
            kept.apart = kept.apart.max((counts[lane.target] - counts[lane.source]).abs());
        }
        wrong = first_wrong(&lanes, &counts, slack, span, period);
        if slack.deskew.is_some_and(|every| now - deskewed >= every) {
            deskewed = now;
            kept.deskews += 1;
            for (count, chip) in counts.iter_mut().zip(chips.clone()) {
                *count = clocks.ahead(chip);
            }
        }
        wrong.is_none()
    });
    wrong.map_or(Ok(kept), Err)
}

fn lanes(network: &Network, plan: &RoutePlan) -> Vec<Lane> {
    let ends = network.links().iter().enumerate();
    let mut lanes: Vec<Lane> = ends
        .map(|(number, link)| Lane {
            link: LinkId(number as u32),
            source: link.source.0 as usize,
            target: link.target.0 as usize,
            trains: Vec::new(),
        })
        .collect();
    for train in &plan.schedule.trains {
        let pace = plan.schedule.timing.pace(network, train.links()).0 as f64 / 1e3;
        for hop in &train.hops {
            let start = hop.start.0 as f64 / 1e3;
            let entry = (start, pace, train.count, train.task, train.first);
            lanes[hop.link.0 as usize].trains.push(entry);
        }
    }
    lanes.retain(|lane| !lane.trains.is_empty());
    lanes
}

/// Returns the first vector sent in this span that arrives too late or too early.
fn first_wrong(
    lanes: &[Lane],
    counts: &[f64],
    slack: Slack,
    span: (u64, u64),
    period: f64,
) -> Option<Violation> {
    let slot = |lane: &Lane| lane.trains[0].1;
    let each = lanes.iter().filter_map(|lane| {
        let latency = &MEASURED[kind_of(lane.link)];
        // How much later than nominal vectors arrive, by the target's count.
        let behind = counts[lane.target] - counts[lane.source] - latency.mean;
        let (least, most) = (behind + f64::from(latency.min), behind + f64::from(latency.max));
        let early = slack.margin - f64::from(slack.buffer) * slot(lane);
        if most <= slack.margin && least >= early {
            return None;
        }
        let table = table(latency);
        let is_wrong = |late: f64| late > slack.margin || late < early;
        vectors(lane, span, period).find_map(|(cycle, task, vector)| {
            let mut random = Random::of(&[slack.seed, lane.link.0.into(), cycle]);
            let drawn = table[random.below(table.len() as u64) as usize];
            let late = behind + f64::from(latency.min + u32::from(drawn));
            let by = if late > slack.margin { late - slack.margin } else { late - early };
            is_wrong(late).then_some(Violation { cycle, link: lane.link, task, vector, late: by })
        })
    });
    each.min_by_key(|wrong| (wrong.cycle, wrong.link))
}

/// Returns the vectors sent over a link in a span of time as (cycle, task, vector), in time order.
fn vectors(
    lane: &Lane,
    span: (u64, u64),
    period: f64,
) -> impl Iterator<Item = (u64, u32, u64)> + '_ {
    let (from, until) = (span.0 as f64, span.1 as f64);
    let rounds = (from / period) as u64..=(until / period) as u64;
    let mut found: Vec<(u64, u32, u64)> = rounds
        .flat_map(|round| lane.trains.iter().map(move |train| (round as f64 * period, train)))
        .flat_map(|(base, &(start, pace, count, task, first))| {
            let place = |when: f64| ((when - base - start) / pace).ceil().clamp(0.0, count as f64);
            (place(from) as u64..place(until) as u64).map(move |number| {
                ((base + start + number as f64 * pace) as u64, task, first + number)
            })
        })
        .collect();
    found.sort_unstable();
    found.into_iter()
}
