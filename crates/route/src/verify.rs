//! Checks a schedule, knowing nothing of how it was made.

use std::collections::BTreeMap;

use base::{LinkId, Ticks, VertexId};
use fabric::Network;
use thiserror::Error;

use crate::schedule::{Schedule, Train, Transfer};

/// What is wrong with a schedule.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Fault {
    /// Two trains on one link at once.
    #[error(
        "link {link} is booked twice: transfer {one} until cycle {until}, transfer {other} from \
         cycle {from}"
    )]
    Booked {
        /// Which link.
        link: LinkId,
        /// Who has it.
        one: u32,
        /// Until when.
        until: Ticks,
        /// Who has it too.
        other: u32,
        /// From when.
        from: Ticks,
    },
    /// A vector that leaves before it has come, or before what it waits for.
    #[error("transfer {transfer} begins on link {link} in cycle {found}; it is there in {there}")]
    Early {
        /// Which transfer.
        transfer: u32,
        /// Which link.
        link: LinkId,
        /// When it begins.
        found: Ticks,
        /// When it could.
        there: Ticks,
    },
    /// A way that does not lead from source to target.
    #[error("a train of transfer {transfer} does not go from its source to its target")]
    Way {
        /// Which transfer.
        transfer: u32,
    },
    /// Vectors that come not at all, twice, or that there are not.
    #[error("vectors of transfer {transfer} come {found} times; expected {expected} in order")]
    Count {
        /// Which transfer.
        transfer: u32,
        /// How many come.
        found: u64,
        /// How many there are.
        expected: u64,
    },
    /// It comes later than the schedule says, or earlier.
    #[error("transfer {transfer} comes in cycle {found}; the schedule says {said}")]
    End {
        /// Which transfer.
        transfer: u32,
        /// When it comes.
        found: Ticks,
        /// When it should.
        said: Ticks,
    },
    /// More waits at a vertex than it can hold.
    #[error(
        "vertex {vertex} holds {found} vectors for others in cycle {when}; it has room for {most}"
    )]
    Buffer {
        /// Where.
        vertex: VertexId,
        /// When.
        when: Ticks,
        /// How many wait.
        found: u64,
        /// How many may.
        most: u64,
    },
}

/// Checks that no link is booked twice in any cycle, that every vector is where it leaves from, that
/// no buffer overflows, and that everything comes once, in order, after what it waits for, and when
/// it is said to. O(trains · hops · log).
///
/// # Errors
/// The first thing that is wrong.
pub fn verify(network: &Network, transfers: &[Transfer], schedule: &Schedule) -> Result<(), Fault> {
    check_ways(network, transfers, schedule)?;
    check_forwarded(network, transfers, schedule)?;
    check_bookings(network, schedule)?;
    check_deliveries(network, transfers, schedule)?;
    check_buffers(network, schedule)
}

/// Time between two vectors of a train: that of its slowest link.
fn slot(network: &Network, schedule: &Schedule, train: &Train) -> u64 {
    schedule.timing.pace(network, train.links()).0
}

fn check_ways(network: &Network, transfers: &[Transfer], schedule: &Schedule) -> Result<(), Fault> {
    for train in &schedule.trains {
        let transfer = train.transfer;
        let Some(asked) = transfers.get(transfer as usize) else {
            return Err(Fault::Way { transfer });
        };
        let begins = asked.after.iter().map(|&after| schedule.ends[after as usize]);
        let mut there = begins.max().unwrap_or_default();
        let mut at = asked.source;
        for hop in &train.hops {
            let link = network.link(hop.link);
            if link.source != at {
                return Err(Fault::Way { transfer });
            }
            if hop.start < there {
                return Err(Fault::Early { transfer, link: hop.link, found: hop.start, there });
            }
            there = hop.start + schedule.timing.hop(link);
            at = link.target;
        }
        if at != asked.target {
            return Err(Fault::Way { transfer });
        }
    }
    Ok(())
}

/// Checks that what another transfer brings is there, vector by vector.
fn check_forwarded(
    network: &Network,
    transfers: &[Transfer],
    schedule: &Schedule,
) -> Result<(), Fault> {
    if transfers.iter().all(|transfer| transfer.from.is_none()) {
        return Ok(());
    }
    let mut trains: Vec<Vec<&Train>> = vec![Vec::new(); transfers.len()];
    for train in &schedule.trains {
        trains[train.transfer as usize].push(train);
    }
    for train in &schedule.trains {
        let transfer = train.transfer;
        let asked = &transfers[transfer as usize];
        let (Some(from), Some(hop)) = (asked.from, train.hops.first()) else { continue };
        let brought = &transfers[from as usize];
        let is_enough = schedule.timing.vectors(brought.size) >= train.first + train.count;
        if brought.target != asked.source || !is_enough {
            return Err(Fault::Way { transfer });
        }
        let leaves = |vector: u64| {
            hop.start + Ticks((vector - train.first) * slot(network, schedule, train))
        };
        for other in &trains[from as usize] {
            let Some(last) = other.hops.last() else { continue };
            let comes = last.start + schedule.timing.hop(network.link(last.link));
            let comes = |vector: u64| {
                comes + Ticks((vector - other.first) * slot(network, schedule, other))
            };
            // Both go at a steady pace, so the first and the last one tell of all between.
            let begin = train.first.max(other.first);
            let end = (train.first + train.count).min(other.first + other.count);
            for vector in [begin, end.saturating_sub(1)] {
                if begin < end && leaves(vector) < comes(vector) {
                    let (found, there) = (leaves(vector), comes(vector));
                    return Err(Fault::Early { transfer, link: hop.link, found, there });
                }
            }
        }
    }
    Ok(())
}

fn check_bookings(network: &Network, schedule: &Schedule) -> Result<(), Fault> {
    let mut booked: BTreeMap<(LinkId, Ticks), (Ticks, u32)> = BTreeMap::new();
    for train in &schedule.trains {
        let length = train.count * slot(network, schedule, train);
        for hop in &train.hops {
            let (from, until) = (hop.start, hop.start + Ticks(length));
            let clash = |link, one: u32, until, other: u32, from| {
                Err(Fault::Booked { link, one, until, other, from })
            };
            let before = booked.range(..=(hop.link, from)).next_back();
            if let Some((&(link, _), &(end, one))) = before
                && link == hop.link
                && end > from
            {
                return clash(link, one, end, train.transfer, from);
            }
            let behind = booked.range((hop.link, from)..).next();
            if let Some((&(link, start), &(_, other))) = behind
                && link == hop.link
                && start < until
            {
                return clash(link, train.transfer, until, other, start);
            }
            booked.insert((hop.link, from), (until, train.transfer));
        }
    }
    Ok(())
}

fn check_deliveries(
    network: &Network,
    transfers: &[Transfer],
    schedule: &Schedule,
) -> Result<(), Fault> {
    let mut come: Vec<Vec<(u64, u64)>> = vec![Vec::new(); transfers.len()];
    let mut ends: Vec<Ticks> = vec![Ticks(0); transfers.len()];
    for train in &schedule.trains {
        let place = train.transfer as usize;
        come[place].push((train.first, train.count));
        if let Some(hop) = train.hops.last() {
            let hop = hop.start + schedule.timing.hop(network.link(hop.link));
            let end = hop + Ticks(train.count * slot(network, schedule, train));
            ends[place] = ends[place].max(end);
        }
    }
    for (transfer, (asked, come)) in (0..).zip(transfers.iter().zip(&mut come)) {
        come.sort_unstable();
        let expected = schedule.timing.vectors(asked.size);
        let found: u64 = come.iter().map(|(_, count)| count).sum();
        let mut next = 0;
        let in_order = come.iter().all(|&(first, count)| {
            let follows = first == next;
            next += count;
            follows
        });
        if !in_order || found != expected {
            return Err(Fault::Count { transfer, found, expected });
        }
        let (found, said) = (ends[transfer as usize], schedule.ends[transfer as usize]);
        if expected > 0 && found != said {
            return Err(Fault::End { transfer, found, said });
        }
    }
    Ok(())
}

fn check_buffers(network: &Network, schedule: &Schedule) -> Result<(), Fault> {
    // A train holds room on the way for as many vectors as come while the first one waits.
    let mut changes: Vec<(VertexId, Ticks, i64)> = Vec::new();
    for train in &schedule.trains {
        let slot = slot(network, schedule, train).max(1);
        for pair in train.hops.windows(2) {
            let link = network.link(pair[0].link);
            let there = pair[0].start + schedule.timing.hop(link);
            let waits = (pair[1].start - there).0;
            let held = waits.div_ceil(slot).min(train.count) as i64;
            if held > 0 {
                let until = pair[1].start + Ticks(train.count * slot);
                changes.extend([(link.target, there, held), (link.target, until, -held)]);
            }
        }
    }
    changes.sort_unstable();
    let (mut at, mut held) = (None, 0);
    for (vertex, when, change) in changes {
        if at != Some(vertex) {
            (at, held) = (Some(vertex), 0);
        }
        held += change;
        if held > schedule.timing.buffer as i64 {
            let (found, most) = (held as u64, schedule.timing.buffer);
            return Err(Fault::Buffer { vertex, when, found, most });
        }
    }
    Ok(())
}
