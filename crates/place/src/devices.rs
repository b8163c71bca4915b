//! Places the devices of a step on those of a topology.
//!
//! Devices that communicate most come to be near each other: from the identity, exchanges of two places
//! are kept while they lower the time that all communication takes, each alone (hill climbing). It is a
//! proxy: simulate the step to account for overlap and contention.

use std::collections::BTreeMap;

use base::{Bytes, Nanos, Random};
use cost::NetworkModel;
use ir::{Placement, PlacementError, StepGraph, StepOp};

use crate::assign::PlacementLimits;

/// Most places that an exchange considers, besides those in use.
const SPARE_MAX: u32 = 1 << 12;

/// A placement, and what its communication takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacedStep {
    /// The placement.
    pub placement: Placement,
    /// Sum of the times of all communication, each alone.
    pub communication: Nanos,
    /// The same with device `i` at place `i`.
    pub communication_in_order: Nanos,
}

/// Places a step's devices on a network. O(evaluations · communication of one device).
///
/// # Errors
/// The step has more devices than the network, or stands for several parts.
///
/// ```
/// use base::Bytes;
/// use ir::{StepGraph, StepOp};
/// use place::{PlacementLimits, place_devices};
/// // Devices 0 and 8 communicate, which would be on different servers.
/// let mut step = StepGraph::new("train", 16);
/// step.add("", StepOp::Transfer { source: 0, target: 8, size: Bytes(1 << 20) }, &[]);
/// let cluster: topology::Topology = "elect-cluster:16".parse().unwrap();
/// let limits = PlacementLimits { evaluations: 1000, seed: 0 };
/// let placed = place_devices(&step, cluster.interconnect(), "elect-cluster:16", &limits).unwrap();
/// assert_eq!(placed.placement.devices[0] / 8, placed.placement.devices[8] / 8);
/// assert!(placed.communication < placed.communication_in_order);
/// ```
pub fn place_devices(
    step: &StepGraph,
    network: &dyn NetworkModel,
    topology: &str,
    limits: &PlacementLimits,
) -> Result<PlacedStep, PlacementError> {
    let (devices, places) = (step.devices, network.devices());
    let in_order: Vec<u32> = (0..devices).collect();
    let mut placement = Placement::new(step.name.clone(), topology, in_order);
    placement.verify(step, places)?;
    let demands = Demands::new(step);
    let communication_in_order = Nanos(demands.total(network, &placement.devices));
    let mut total = communication_in_order.0;
    let mut random = Random::of(&[limits.seed]);
    // Places beyond those in use may be nearer.
    let reach = places.min(devices.saturating_add(SPARE_MAX));
    let mut at: Vec<u32> = vec![u32::MAX; reach as usize];
    placement.devices.iter().for_each(|&place| at[place as usize] = place);
    let is_fixed = devices < 2 || demands.pairs.is_empty();
    let evaluations = if is_fixed { 1 } else { limits.evaluations };
    for _ in 1..evaluations {
        let one = random.below(devices.into()) as u32;
        let place = random.below(reach.into()) as u32;
        let (from, other) = (placement.devices[one as usize], at[place as usize]);
        if from == place {
            continue;
        }
        let pair = [Some(one), Some(other).filter(|&other| other != u32::MAX)];
        let before = demands.of(network, &placement.devices, pair);
        let exchange = |devices: &mut [u32], (to, back): (u32, u32)| {
            devices[one as usize] = to;
            if let Some(other) = pair[1] {
                devices[other as usize] = back;
            }
        };
        exchange(&mut placement.devices, (place, from));
        let after = demands.of(network, &placement.devices, pair);
        if after < before {
            total = total - before + after;
            at[place as usize] = one;
            at[from as usize] = other;
        } else {
            exchange(&mut placement.devices, (from, place));
        }
    }
    let communication = Nanos(total);
    Ok(PlacedStep { placement, communication, communication_in_order })
}

/// Communication between pairs of devices: transfers, and neighbours in collectives.
struct Demands {
    /// By pair in ascending order, bytes and number of messages.
    pairs: Vec<((u32, u32), (u64, u64))>,
    /// By device, its pairs.
    of: Vec<Vec<u32>>,
}

impl Demands {
    fn new(step: &StepGraph) -> Self {
        let mut sums: BTreeMap<(u32, u32), (u64, u64)> = BTreeMap::new();
        let mut add = |one: u32, other: u32, bytes: u64, messages: u64| {
            if one != other {
                let sum = sums.entry((one.min(other), one.max(other))).or_default();
                *sum = (sum.0 + bytes, sum.1 + messages);
            }
        };
        for node in step.nodes() {
            match &node.op {
                StepOp::Compute { .. } => {}
                StepOp::Transfer { source, target, size } => add(*source, *target, size.0, 1),
                StepOp::Collective(op) => {
                    let (kind, count) = (op.collective.kind(), op.devices.len() as u32);
                    let moved = (kind.ring_load(count) * op.size().0 as f64) as u64;
                    let next = op.devices.iter().cycle().skip(1);
                    for (&one, &other) in op.devices.iter().zip(next) {
                        add(one, other, moved, kind.rounds(count).into());
                    }
                }
            }
        }
        let mut of = vec![Vec::new(); step.devices as usize];
        for (number, ((one, other), _)) in (0..).zip(&sums) {
            of[*one as usize].push(number);
            of[*other as usize].push(number);
        }
        Self { pairs: sums.into_iter().collect(), of }
    }

    fn time(&self, network: &dyn NetworkModel, at: &[u32], pair: u32) -> u64 {
        let ((one, other), (bytes, messages)) = self.pairs[pair as usize];
        let (source, target) = (at[one as usize], at[other as usize]);
        let each = Bytes(bytes / messages.max(1));
        network.transfer_time(source, target, each).0 * messages
    }

    fn total(&self, network: &dyn NetworkModel, at: &[u32]) -> u64 {
        (0..self.pairs.len() as u32).map(|pair| self.time(network, at, pair)).sum()
    }

    /// Time of the communication of one or two devices.
    fn of(&self, network: &dyn NetworkModel, at: &[u32], devices: [Option<u32>; 2]) -> u64 {
        let of = |device: Option<u32>| device.map_or(&[][..], |device| &self.of[device as usize]);
        let shared = |pair: &&u32| !of(devices[0]).contains(pair);
        let pairs = of(devices[0]).iter().chain(of(devices[1]).iter().filter(shared));
        pairs.map(|&pair| self.time(network, at, pair)).sum()
    }
}
