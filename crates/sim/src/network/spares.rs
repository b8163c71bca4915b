//! Replay, and nodes that stand by: what becomes of a run when links err or nodes die.
//!
//! A run in which a vector came damaged, or not at all, is replayed from its inputs. If the same node
//! is to blame again, another one takes its place, everything is planned anew on what is left, and the
//! run is replayed there.
//!
//! Source: the multi-TSP system §4.5.

use std::collections::BTreeMap;

use base::{Bytes, LinkId, VertexId};
use fabric::{Dragonfly, Network, NetworkError};
use route::{Fault, RouteError, RoutePlan, Timing, all_reduce, verify};
use thiserror::Error;

use super::code::VECTOR;
use super::machine::{
    ChipMemory, Compute, Incident, Machine, MachineError, MachineReport, Nothing, SumType,
};
use super::noise::Noise;

/// What cannot be saved.
#[derive(Debug, Error)]
pub enum SpareError {
    /// No node is left to take another's place.
    #[error("node {node} failed and no spare is left; {replaced} were used up")]
    Exhausted {
        /// Which node.
        node: u32,
        /// How many have been replaced.
        replaced: usize,
    },
    /// It goes wrong again and again.
    #[error("{attempts} runs went wrong, the last one with {incidents} incidents")]
    Attempts {
        /// How many runs.
        attempts: u32,
        /// What went wrong in the last one.
        incidents: usize,
    },
    /// Too few nodes to have a spare.
    #[error("a system of {nodes} nodes has none to spare; expected at least 2")]
    Nodes {
        /// How many there are.
        nodes: u32,
    },
    /// What is left is not connected.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// It cannot be planned on what is left.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The plan does not hold.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// It cannot be carried out.
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// Where nodes stand by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Provision {
    /// The last node of each rack of nine.
    PerRack,
    /// The last node of all.
    PerSystem,
}

/// A Dragonfly of which some nodes stand by.
#[derive(Clone, Debug)]
pub struct Spares<'a> {
    dragonfly: &'a Dragonfly,
    /// The node that does the work of each.
    nodes: Vec<u32>,
    standby: Vec<u32>,
    replaced: Vec<u32>,
}

/// What became of it.
#[derive(Clone, PartialEq, Debug)]
pub struct SpareReport {
    /// Of the run that went well.
    pub outcome: MachineReport,
    /// How often it ran.
    pub attempts: u32,
    /// Nodes whose place others took.
    pub replaced: Vec<u32>,
}

/// Nodes of a rack.
const RACK: u32 = 9;
/// Runs after which nothing helps.
const ATTEMPTS_MAX: u32 = 16;

impl<'a> Spares<'a> {
    /// # Errors
    /// There is only one node.
    pub fn new(dragonfly: &'a Dragonfly, provision: Provision) -> Result<Self, SpareError> {
        let count = dragonfly.nodes();
        let stands_by = |node: u32| match provision {
            Provision::PerRack => node % RACK == RACK - 1 || (count < RACK && node + 1 == count),
            Provision::PerSystem => node + 1 == count,
        };
        let (standby, nodes): (Vec<u32>, Vec<u32>) = (0..count).partition(|node| stands_by(*node));
        if nodes.is_empty() {
            return Err(SpareError::Nodes { nodes: count });
        }
        Ok(Self { dragonfly, nodes, standby, replaced: Vec::new() })
    }

    /// Which part of all nodes stood by at first.
    pub fn overhead(&self) -> f64 {
        let spare = self.standby.len() + self.replaced.len();
        spare as f64 / f64::from(self.dragonfly.nodes())
    }

    /// Chips that work, in the order in which programs number them.
    pub fn chips(&self) -> Vec<VertexId> {
        let each = self.dragonfly.chips_per_node();
        self.nodes.iter().flat_map(|node| (node * each..(node + 1) * each).map(VertexId)).collect()
    }

    /// The network of the chips that work, and which link of all each of its links is.
    ///
    /// # Errors
    /// They are not connected without the others.
    pub fn network(&self) -> Result<(Network, Vec<LinkId>), NetworkError> {
        self.dragonfly.network().of(&self.chips())
    }

    /// Puts a node that stands by in another's place.
    ///
    /// # Errors
    /// None is left.
    pub fn replace(&mut self, node: u32) -> Result<(), SpareError> {
        let exhausted = SpareError::Exhausted { node, replaced: self.replaced.len() };
        let spare = self.standby.pop().ok_or(exhausted)?;
        for working in self.nodes.iter_mut().filter(|working| **working == node) {
            *working = spare;
        }
        self.replaced.push(node);
        Ok(())
    }

    /// Runs what is planned until it goes well.
    ///
    /// # Arguments
    /// - `plan`: makes a plan for the network that works.
    /// - `inputs`: what chips have in memory at first.
    /// - `noise`: what goes wrong, of all chips and links; each attempt meets other random errors.
    ///
    /// # Errors
    /// It cannot be planned or carried out, or errors do not end.
    pub fn run(
        &mut self,
        plan: impl Fn(&Network) -> Result<RoutePlan, RouteError>,
        inputs: &[ChipMemory],
        compute: &dyn Compute,
        sum: SumType,
        noise: &Noise,
    ) -> Result<(SpareReport, Vec<ChipMemory>), SpareError> {
        let mut blamed: BTreeMap<u32, u32> = BTreeMap::new();
        let (mut network, mut were) = self.network()?;
        let mut made = planned(&network, &plan)?;
        for attempt in 1..=ATTEMPTS_MAX {
            let mut memories = inputs.to_vec();
            let here = self.seen(noise, &were, attempt);
            let machine = Machine::new(&network, &made, compute)?.adding(sum).with_noise(here);
            let outcome = machine.run(&mut memories, |_| true)?;
            let Some(first) = outcome.incidents.first() else {
                let replaced = self.replaced.clone();
                return Ok((SpareReport { outcome, attempts: attempt, replaced }, memories));
            };
            if attempt == ATTEMPTS_MAX {
                let incidents = outcome.incidents.len();
                return Err(SpareError::Attempts { attempts: attempt, incidents });
            }
            let node = self.to_blame(&network, first);
            let times = blamed.entry(node).or_default();
            *times += 1;
            if *times > 1 {
                self.replace(node)?;
                (network, were) = self.network()?;
                made = planned(&network, &plan)?;
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Reduces a vector for each chip that works, of numbers that tell chips apart, to all of them; and
    /// whether every chip got every sum.
    ///
    /// # Errors
    /// As for [`Spares::run`].
    pub fn try_all_reduce(&mut self, noise: &Noise) -> Result<(SpareReport, bool), SpareError> {
        let chips = self.nodes.len() * self.dragonfly.chips_per_node() as usize;
        let memory =
            |value: usize| ChipMemory((value as i32).to_le_bytes().repeat(chips * VECTOR / 4));
        let inputs: Vec<ChipMemory> = (1..=chips).map(memory).collect();
        let plan = |network: &Network| {
            let tensor = Bytes(u64::from(network.endpoints()) * VECTOR as u64);
            Ok(all_reduce(network, tensor, Timing::default())?.plan)
        };
        let (saved, found) = self.run(plan, &inputs, &Nothing, SumType::I32, noise)?;
        let sums = memory(chips * (chips + 1) / 2);
        Ok((saved, found.iter().all(|memory| *memory == sums)))
    }

    /// The node whose vector went wrong first.
    fn to_blame(&self, network: &Network, incident: &Incident) -> u32 {
        let source = network.link(incident.link).source;
        self.nodes[(source.0 / self.dragonfly.chips_per_node()) as usize]
    }

    /// What goes wrong among those that work, by their own numbers.
    fn seen(&self, noise: &Noise, were: &[LinkId], attempt: u32) -> Noise {
        let chips = self.chips();
        let dead = (0..).map(VertexId).zip(&chips).filter(|(_, chip)| noise.dead.contains(chip));
        let broken = (0..).map(LinkId).zip(were).filter(|(_, link)| noise.broken.contains(link));
        Noise {
            seed: noise.seed.wrapping_add(u64::from(attempt)),
            dead: dead.map(|(place, _)| place).collect(),
            broken: broken.map(|(place, _)| place).collect(),
            ..noise.clone()
        }
    }
}

/// A whole plan that was checked.
fn planned(
    network: &Network,
    plan: &impl Fn(&Network) -> Result<RoutePlan, RouteError>,
) -> Result<RoutePlan, SpareError> {
    let plan = plan(network)?.whole(network);
    verify(network, &plan)?;
    Ok(plan)
}
