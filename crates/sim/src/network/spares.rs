//! Fault tolerance by replay and hot-spare nodes: recovery of a run when links err or nodes fail.
//!
//! A run in which a vector was damaged or lost is replayed from its inputs. If the same node is the
//! cause again, a spare replaces it, the working network is planned anew, and the run is replayed on
//! it.
//!
//! Source: the multi-TSP system §4.5.

use std::collections::BTreeMap;

use base::{Bytes, LinkId, VertexId};
use route::{Fault, RouteError, RoutePlan, Timing, all_reduce, verify};
use thiserror::Error;
use topology::{Dragonfly, Network, NetworkError};

use super::code::VECTOR;
use super::machine::{Incident, Machine, MachineError, MachineReport};
use super::memory::{ChipMemory, Compute, Nothing, SumType};
use super::noise::Noise;

/// Why a run cannot be recovered.
#[derive(Debug, Error)]
pub enum SpareError {
    /// No spare node is left.
    #[error("node {node} failed and no spare is left; {replaced} were used up")]
    Exhausted {
        /// The node that failed.
        node: u32,
        /// Number of nodes replaced so far.
        replaced: usize,
    },
    /// Every attempt failed.
    #[error("{attempts} runs went wrong, the last one with {incidents} incidents")]
    Attempts {
        /// Number of runs.
        attempts: u32,
        /// Number of incidents in the last run.
        incidents: usize,
    },
    /// The system has too few nodes for a spare.
    #[error("a system of {nodes} nodes has none to spare; expected at least 2")]
    Nodes {
        /// Number of nodes.
        nodes: u32,
    },
    /// The working nodes are not connected.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The collective cannot be planned on the working nodes.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The plan fails verification.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The plan cannot be executed.
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// Placement of spare nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Provision {
    /// The last node of each rack of nine, or of the system if it has fewer nodes.
    PerRack,
    /// The last node of the system.
    PerSystem,
}

/// A Dragonfly with hot-spare nodes.
#[derive(Clone, Debug)]
pub struct Spares<'a> {
    dragonfly: &'a Dragonfly,
    /// Physical node of each logical node.
    nodes: Vec<u32>,
    standby: Vec<u32>,
    replaced: Vec<u32>,
}

/// Report of a recovered run.
#[derive(Clone, PartialEq, Debug)]
pub struct SpareReport {
    /// Report of the successful run.
    pub outcome: MachineReport,
    /// Number of runs.
    pub attempts: u32,
    /// Nodes replaced by spares.
    pub replaced: Vec<u32>,
}

/// Nodes per rack.
const RACK: u32 = 9;
/// Maximum number of runs.
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

    /// Returns the fraction of nodes that were spares initially.
    pub fn overhead(&self) -> f64 {
        let spare = self.standby.len() + self.replaced.len();
        spare as f64 / f64::from(self.dragonfly.nodes())
    }

    /// Returns the working chips, in the order of their logical numbers.
    pub fn chips(&self) -> Vec<VertexId> {
        let each = self.dragonfly.chips_per_node();
        self.nodes.iter().flat_map(|node| (node * each..(node + 1) * each).map(VertexId)).collect()
    }

    /// Returns the network of the working chips, and for each of its links the physical link.
    ///
    /// # Errors
    /// The working chips are not connected without the others.
    pub fn network(&self) -> Result<(Network, Vec<LinkId>), NetworkError> {
        self.dragonfly.network().of(&self.chips())
    }

    /// Replaces a node by a spare.
    ///
    /// # Errors
    /// No spare is left.
    pub fn replace(&mut self, node: u32) -> Result<(), SpareError> {
        let exhausted = SpareError::Exhausted { node, replaced: self.replaced.len() };
        let spare = self.standby.pop().ok_or(exhausted)?;
        for working in self.nodes.iter_mut().filter(|working| **working == node) {
            *working = spare;
        }
        self.replaced.push(node);
        Ok(())
    }

    /// Runs a plan, with replay and node replacement, until a run succeeds.
    ///
    /// # Arguments
    /// - `plan`: plans for the working network.
    /// - `inputs`: initial memories of chips.
    /// - `noise`: faults of physical chips and links; each attempt draws other random errors.
    ///
    /// # Errors
    /// The network cannot be planned or the plan executed, no spare is left, or every attempt failed.
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

    /// All-reduces over the working chips a tensor of one vector per chip, of values that identify
    /// chips; also returns whether every chip got the right sums.
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

    /// Returns the node to blame: the physical node that sent the first faulty vector.
    fn to_blame(&self, network: &Network, incident: &Incident) -> u32 {
        let source = network.link(incident.link).source;
        self.nodes[(source.0 / self.dragonfly.chips_per_node()) as usize]
    }

    /// Translates faults to the logical numbers of working chips and links.
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

/// Plans, expands the plan to all chips and verifies it.
fn planned(
    network: &Network,
    plan: &impl Fn(&Network) -> Result<RoutePlan, RouteError>,
) -> Result<RoutePlan, SpareError> {
    let plan = plan(network)?.whole(network);
    verify(network, &plan)?;
    Ok(plan)
}
