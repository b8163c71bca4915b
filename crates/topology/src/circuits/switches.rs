//! Allocation of circuit switch ports.
//!
//! Every device has a port at every switch, and a switch connects each device to at most one other.
//! Circuits are allocated min-max fair: the largest size per circuit over all demands is made as small
//! as ports allow. Demands for which no ports are left get none; their bytes are relayed over other
//! circuits.
//!
//! Source: SiP-ML §3.3. Differs from the paper: allocated greedily, which is exact where every demand
//! can have a circuit, instead of by an integer program.

use std::collections::BinaryHeap;

use base::Ordered;

use super::Demand;

/// Switches that are Clos networks of smaller ones: a circuit that leaves a leaf takes one of its
/// uplinks, and likewise at the leaf where it arrives. As long as no leaf exceeds its uplinks, there is
/// always a middle switch for each circuit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaves {
    /// Devices per leaf.
    pub devices: u32,
    /// Uplinks per leaf over all switches, in each direction.
    pub uplinks: u32,
}

/// For each switch and source device, the target that its port is connected to.
pub type Permutations = Vec<Vec<Option<u32>>>;

/// Allocates circuits to demands and assigns each to a switch. O(demands · log demands + circuits ·
/// switches).
///
/// # Arguments
/// - `demands`: demands between different devices, with sizes above 0.
pub fn permutations(devices: u32, switches: u32, demands: &[Demand]) -> Permutations {
    let counts = circuits(devices, switches, demands, None);
    coloured(devices, switches, demands, &counts)
}

/// Returns the number of circuits of each demand. O(demands · log demands + circuits · log demands).
///
/// # Arguments
/// - `demands`: demands between different devices, with sizes above 0.
/// - `leaves`: the leaves, if any, and whether each demand leaves its leaf.
pub fn circuits(
    devices: u32,
    switches: u32,
    demands: &[Demand],
    leaves: Option<(Leaves, &[bool])>,
) -> Vec<u32> {
    let mut left = Ports::new(devices, switches, leaves.map(|(leaves, _)| leaves));
    let leaves_leaf = |number: usize| leaves.is_some_and(|(_, is_so)| is_so[number]);
    let mut counts = vec![0; demands.len()];
    // One circuit per demand, the largest first, while there are ports.
    let mut order: Vec<usize> = (0..demands.len()).collect();
    order.sort_by(|&a, &b| demands[b].size.total_cmp(&demands[a].size));
    for &number in &order {
        counts[number] = u32::from(left.take(&demands[number], leaves_leaf(number)));
    }
    // Then repeatedly one more for the demand with the largest size per circuit, while there are ports.
    let need = |counts: &[u32], number: usize| demands[number].size / f64::from(counts[number]);
    let mut heap: BinaryHeap<(Ordered, usize)> = (0..demands.len())
        .filter(|&number| counts[number] > 0)
        .map(|number| (Ordered(need(&counts, number)), number))
        .collect();
    while let Some((_, number)) = heap.pop() {
        if left.take(&demands[number], leaves_leaf(number)) {
            counts[number] += 1;
            heap.push((Ordered(need(&counts, number)), number));
        }
    }
    counts
}

/// Free ports: outgoing and incoming ports of devices, and uplinks of leaves in both directions.
struct Ports {
    out: Vec<u32>,
    into: Vec<u32>,
    of_leaf: u32,
    up: Vec<u32>,
    down: Vec<u32>,
}

impl Ports {
    fn new(devices: u32, switches: u32, leaves: Option<Leaves>) -> Self {
        let Leaves { devices: of_leaf, uplinks } =
            leaves.unwrap_or(Leaves { devices: devices.max(1), uplinks: 0 });
        let each = vec![switches; devices as usize];
        let uplinks = vec![uplinks; devices.div_ceil(of_leaf) as usize];
        Self { out: each.clone(), into: each, of_leaf, up: uplinks.clone(), down: uplinks }
    }

    /// Takes a port at both ends, and uplinks if the circuit leaves its leaf; returns whether all were
    /// free.
    fn take(&mut self, demand: &Demand, leaves_leaf: bool) -> bool {
        let (out, into) = (demand.source as usize, demand.target as usize);
        let (up, down) = (out / self.of_leaf as usize, into / self.of_leaf as usize);
        let is_there = self.out[out].min(self.into[into]) > 0
            && !(leaves_leaf && self.up[up].min(self.down[down]) == 0);
        if !is_there {
            return false;
        }
        self.out[out] -= 1;
        self.into[into] -= 1;
        if leaves_leaf {
            self.up[up] -= 1;
            self.down[down] -= 1;
        }
        true
    }
}

/// Assigns every circuit a switch at which both of its ports are free (bipartite edge colouring). After
/// recolouring there always is one, since no device has more circuits than there are switches (Kőnig's
/// theorem).
fn coloured(devices: u32, switches: u32, demands: &[Demand], counts: &[u32]) -> Permutations {
    let (devices, switches) = (devices as usize, switches as usize);
    let mut out: Permutations = vec![vec![None; devices]; switches];
    let mut into: Permutations = out.clone();
    let free = |side: &Permutations, device: usize| {
        side.iter().position(|switch| switch[device].is_none()).expect("a port is free")
    };
    for (demand, &count) in demands.iter().zip(counts) {
        let (source, target) = (demand.source as usize, demand.target as usize);
        for _ in 0..count {
            let (mine, other) = (free(&out, source), free(&into, target));
            if mine != other {
                exchange(&mut out, &mut into, (mine, other), target);
            }
            out[mine][source] = Some(demand.target);
            into[mine][target] = Some(demand.source);
        }
    }
    out
}

/// Frees a target's port at switch `mine` by swapping the two switches along the alternating chain of
/// circuits that starts there.
fn exchange(
    out: &mut Permutations,
    into: &mut Permutations,
    (mine, other): (usize, usize),
    target: usize,
) {
    let mut chain = Vec::new();
    let (mut at, mut side, mut switch) = (target, true, mine);
    loop {
        let next = if side { into[switch][at] } else { out[switch][at] };
        let Some(next) = next else { break };
        let ends = if side { (next as usize, at) } else { (at, next as usize) };
        chain.push((switch, ends));
        at = next as usize;
        side = !side;
        switch = if switch == mine { other } else { mine };
    }
    for &(switch, (source, target)) in &chain {
        out[switch][source] = None;
        into[switch][target] = None;
    }
    for &(switch, (source, target)) in &chain {
        let switch = if switch == mine { other } else { mine };
        out[switch][source] = Some(target as u32);
        into[switch][target] = Some(source as u32);
    }
}
