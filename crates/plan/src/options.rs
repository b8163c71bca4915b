//! Execution plan options of a collective: its form, and a channel for each motif.

use std::fmt;

use base::{Bytes, Nanos};
use cost::{ChannelCost, NetworkModel};
use serde::{Deserialize, Serialize};

use crate::algebra::Form;
use crate::motif::{ASIDE_MAX, Motif, RankTransfer};
use crate::motif_time::motif_time;
use ir::{Collective, CollectiveKind, CollectiveOp};

/// The form that stages what it receives.
const ONE_SHOT: &str = "one-shot";

/// A motif on its channel.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Placed {
    /// The motif.
    pub motif: Motif,
    /// Motifs of the same collective that must be done before, by index.
    pub after: Vec<u32>,
    /// Index of the channel.
    pub channel: u32,
    /// Predicted time on that channel, alone.
    pub time: Nanos,
}

/// Channel assignment of the segments of a collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// All on one channel.
    One(u32),
    /// Striped over all channels, in proportion to their rates.
    All,
}

/// One execution option of a collective.
///
/// Source: SYNDICATE §4.3 (an execution plan option of a comm-op).
#[derive(Clone, PartialEq, Debug)]
pub struct Execution {
    /// Name of the form that is applied to each segment.
    pub form: String,
    /// Number of segments of the payload.
    pub segments: u64,
    /// Channel assignment of the segments.
    pub place: Place,
    /// Its motifs; each depends on earlier motifs only.
    pub motifs: Vec<Placed>,
}

impl fmt::Display for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.segments == 1 { "" } else { "s" };
        write!(f, "{}, {} segment{plural} ", self.form, self.segments)?;
        match self.place {
            Place::One(channel) => write!(f, "on channel {channel}"),
            Place::All => write!(f, "on all channels"),
        }
    }
}

impl Execution {
    /// Returns whether it differs from another in the number of segments at most.
    pub fn is_like(&self, other: &Execution) -> bool {
        self.form == other.form && self.place == other.place
    }

    /// Predicted makespan when nothing else runs.
    pub fn alone(&self) -> Nanos {
        let channels = self.motifs.iter().map(|motif| motif.channel + 1).max().unwrap_or(0);
        let mut free = vec![Nanos(0); channels as usize];
        let mut ends: Vec<Nanos> = Vec::with_capacity(self.motifs.len());
        for motif in &self.motifs {
            let ready = motif.after.iter().map(|&after| ends[after as usize]).max();
            let channel = &mut free[motif.channel as usize];
            *channel = (*channel).max(ready.unwrap_or_default()) + motif.time;
            ends.push(*channel);
        }
        ends.into_iter().max().unwrap_or_default()
    }
}

/// The execution options to enumerate.
#[derive(Clone, PartialEq, Debug)]
pub struct SearchSpace {
    /// Numbers of segments.
    pub segments: Vec<u64>,
    /// Limits on concurrent receivers or senders of an all-to-all, broadcast or reduction.
    pub splines: Vec<u32>,
    /// Widths of trees and of groups in hierarchies.
    pub widths: Vec<u32>,
    /// Whether segments may be striped over all channels.
    pub stripes: bool,
}

impl Default for SearchSpace {
    fn default() -> Self {
        let segments = vec![1, 2, 3, 4, 6, 8];
        Self { segments, splines: vec![1, 2, 8, 32, 64], widths: vec![2, 4], stripes: true }
    }
}

/// Enumerates the execution options of a collective; the first is the fastest alone among those on one
/// channel. O(options · transfers).
pub fn executions(
    collective: &Collective,
    element: u32,
    channels: &[ChannelCost],
    variety: &SearchSpace,
) -> Vec<Execution> {
    let mut found: Vec<Execution> = Vec::new();
    for shape in forms(collective, variety) {
        for &segments in &variety.segments {
            if shape.0 == ONE_SHOT && collective.elements().div_ceil(segments) > ASIDE_MAX {
                continue;
            }
            let of = |place, channel_of: &dyn Fn(u64) -> u32| {
                execution(collective, element, channels, &shape, (segments, place, channel_of))
            };
            found.extend((0..channels.len() as u32).map(|one| of(Place::One(one), &|_| one)));
            if variety.stripes && channels.len() > 1 && segments > 1 {
                let shares = shares(segments, channels);
                found.push(of(Place::All, &|number| shares[number as usize]));
            }
        }
    }
    let rank = |&at: &usize| (found[at].place == Place::All, found[at].alone(), at);
    let best = (0..found.len()).min_by_key(rank);
    if let Some(best) = best {
        found.swap(0, best);
    }
    found
}

/// Makes an execution option of a form, of segments that are placed by their number. The payload is split
/// first, so that segments can take different channels.
fn execution(
    collective: &Collective,
    element: u32,
    channels: &[ChannelCost],
    (name, form): &Shape,
    (segments, place, channel_of): (u64, Place, &dyn Fn(u64) -> u32),
) -> Execution {
    let mut motifs: Vec<Placed> = Vec::new();
    for number in 0..segments {
        let channel = channel_of(number);
        let first = motifs.len() as u32;
        let part = Form::of(collective).map(|motif| match motif.segment(segments) {
            Form::Beside(mut parts) => parts.swap_remove(number as usize),
            whole => whole,
        });
        for ordered in part.map(form).motifs() {
            let after = ordered.after.iter().map(|after| after + first).collect();
            let cost = &channels[channel as usize];
            let time = motif_time(cost, collective, &ordered.motif, element);
            motifs.push(Placed { motif: ordered.motif, after, channel, time });
        }
    }
    Execution { form: name.clone(), segments, place, motifs }
}

/// The algorithms that are compared for a collective in one piece on one channel. With many ranks,
/// direct ones have too many transfers.
fn algorithms(collective: &Collective) -> SearchSpace {
    let space = SearchSpace { segments: vec![1], stripes: false, ..SearchSpace::default() };
    if collective.ranks() > 64 { SearchSpace { splines: vec![], ..space } } else { space }
}

/// The algorithm that is fastest alone on a network, whole. O(algorithms · transfers).
pub fn fastest_algorithm(op: &CollectiveOp, network: &dyn NetworkModel) -> Execution {
    let port = network.port();
    let channel = ChannelCost::of(port.rate, port.latency);
    let space = algorithms(&op.collective);
    let options =
        executions(&op.collective, op.element_bytes, std::slice::from_ref(&channel), &space);
    let fastest = options.into_iter().min_by_key(|option| time_on(op, option, network));
    fastest.expect("every collective has an algorithm")
}

/// Time of an algorithm alone on a network, one round after another.
fn time_on(op: &CollectiveOp, option: &Execution, network: &dyn NetworkModel) -> Nanos {
    let at = |rank: u32| op.devices[rank as usize];
    let round = |round: Vec<RankTransfer>| {
        let sent = |one: &RankTransfer| {
            let size = Bytes(one.count * u64::from(op.element_bytes));
            (at(one.source), at(one.target), size)
        };
        network.round_time(&round.iter().map(sent).collect::<Vec<_>>())
    };
    let rounds = option.motifs.iter().flat_map(|placed| placed.motif.rounds(&op.collective));
    rounds.map(round).sum()
}

/// The algorithm of a name on a channel, whole; `None` if a collective of this kind has none of it.
pub fn algorithm(op: &CollectiveOp, channel: &ChannelCost, name: &str) -> Option<Execution> {
    let shape = forms(&op.collective, &algorithms(&op.collective));
    let shape = shape.into_iter().find(|(form, _)| form == name)?;
    let channels = std::slice::from_ref(channel);
    let whole = (1, Place::One(0), &(|_| 0_u32) as &dyn Fn(u64) -> u32);
    Some(execution(&op.collective, op.element_bytes, channels, &shape, whole))
}

type Shape = (String, Box<dyn Fn(&Motif) -> Form>);

/// Forms that can be applied to each segment.
fn forms(collective: &Collective, variety: &SearchSpace) -> Vec<Shape> {
    let plain = || -> Shape { ("whole".to_owned(), Box::new(|motif| motif.clone().into())) };
    let mut forms = vec![plain()];
    let ranks = collective.ranks();
    match collective.kind() {
        CollectiveKind::AllReduce => {
            forms.push(("ring".to_owned(), Box::new(Motif::ring)));
            forms.push(("two-shot".to_owned(), Box::new(Motif::direct)));
            forms.push((ONE_SHOT.to_owned(), Box::new(Motif::one_shot)));
            for &width in variety.widths.iter().filter(|&&width| width < ranks) {
                let tree = move |motif: &Motif| motif.tree(width).map(|motif| motif.tree(width));
                forms.push((format!("tree {width}"), Box::new(tree)));
                if ranks.is_multiple_of(width) {
                    let groups = move |motif: &Motif| motif.hierarchical(width);
                    forms.push((format!("groups {width}"), Box::new(groups)));
                }
            }
        }
        CollectiveKind::AllToAll { .. }
        | CollectiveKind::Broadcast { .. }
        | CollectiveKind::Reduce { .. } => {
            for &most in variety.splines.iter().filter(|&&most| most + 1 < ranks) {
                let spline = move |motif: &Motif| motif.spline(most);
                forms.push((format!("spline {most}"), Box::new(spline)));
            }
        }
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather => {
            forms.push(("direct".to_owned(), Box::new(Motif::direct)));
        }
    }
    forms
}

/// Assigns a channel to each segment in turn, by earliest finish time.
fn shares(segments: u64, channels: &[ChannelCost]) -> Vec<u32> {
    let mut given = vec![0_u32; channels.len()];
    let next = |_| {
        let done = |&at: &usize| f64::from(given[at] + 1) / channels[at].rate.0;
        let at = (0..channels.len()).min_by(|a, b| done(a).total_cmp(&done(b)));
        let at = at.expect("there is a channel");
        given[at] += 1;
        at as u32
    };
    (0..segments).map(next).collect()
}
