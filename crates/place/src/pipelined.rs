//! Lowers a transformer under a parallelism strategy to a step graph, so that what closed forms rank is
//! simulated, planned and scheduled like any other step.
//!
//! Device `(stage * data + copy) * tensor + part` holds one part of the layers of a stage. Stages
//! alternate forward and backward microbatches (1F1B). The all-reduces of a stage's layers are one, and
//! so are their all-to-alls: they are as many bytes, and the latencies of the messages that this saves
//! count as computation.
//!
//! Source: Narayanan et al. 2021 (arXiv:2104.04473) §2.2 for the schedule, and §3 for the order of
//! devices.

use std::ops::Range;
use std::sync::Arc;

use base::{Bytes, Nanos};
use cost::{ClosedForm, Reached};
use ir::{Collective, CollectiveError, CollectiveOp, Dependency, Devices, StepGraph, StepOp};

use crate::transformer::{
    Accelerator, PER_GRADIENT, Parallelism, Parts, Transformer, TransformerError, check,
};

/// Maximum number of nodes of a step; each message of an all-to-all counts as [`MESSAGE`] more.
const NODES_MAX: u64 = 1 << 18;
/// What a message of an all-to-all costs to simulate, in nodes.
const MESSAGE: u64 = 16;

/// Returns the step of a model under a strategy. O(copies · stages · microbatches · tensor
/// parallelism).
///
/// Computation takes what closed forms say that a layer takes without the communication which the graph
/// has as nodes of its own; what products lose to all-reduces beside them counts as computation.
///
/// # Arguments
/// - `reaches`: fraction of the rates between servers that is reached, as in
///   [`step_time`](crate::step_time).
///
/// # Errors
/// The strategy does not divide the model, or the step has too many nodes or too large messages.
///
/// ```
/// use std::collections::BTreeMap;
/// use cost::ClosedForm;
/// # use base::{BitsPerSecond, Bytes, Nanos};
/// use place::{Accelerator, Parallelism, Transformer, parallel_step};
/// let model = Transformer::dense(4, 512, 8, 128, 1024);
/// # let accelerator = Accelerator {
/// #     flops: 312e12, memory_rate: BitsPerSecond(16e12), memory: Bytes(80 << 30), efficiency: 0.8,
/// #     narrow: 1000.0, passes: 2.5, weights_passes: 13.0, launch: Nanos(3_000_000), straggle: 0.1,
/// #     unfused: Nanos(0), reduces: 1.0, head: 1.0, update: 3.5, overhead: Nanos(0), sharpness: 6.0,
/// # };
/// let cluster: topology::Topology = "elect-cluster:8".parse().unwrap();
/// let links = ClosedForm { interconnect: cluster.interconnect().clone(), measured: BTreeMap::new() };
/// let cut = Parallelism {
///     data: 2, tensor: 2, pipeline: 2, expert: 1, micro_batch: 1, batch: 8, recomputes: false,
/// };
/// let step = parallel_step(&model, &accelerator, &links, 1.0, &cut).unwrap();
/// assert_eq!(step.devices, 8);
/// step.verify().unwrap();
/// ```
pub fn parallel_step(
    model: &Transformer,
    accelerator: &Accelerator,
    links: &ClosedForm,
    reaches: f64,
    cut: &Parallelism,
) -> Result<StepGraph, TransformerError> {
    check(model, cut)?;
    let nodes = nodes_of(cut);
    if nodes > NODES_MAX {
        return Err(TransformerError::Nodes { found: nodes, most: NODES_MAX });
    }
    let mut lowering = Lowering {
        cut,
        work: Work::new(model, accelerator, links, reaches, cut)?,
        step: StepGraph::new("step", cut.devices()),
        done: vec![None; cut.pipeline as usize],
    };
    lowering.add_microbatches()?;
    lowering.add_updates()?;
    Ok(lowering.step)
}

/// Most nodes that a step has, with the messages of all-to-alls.
fn nodes_of(cut: &Parallelism) -> u64 {
    let [data, tensor, pipeline] = [cut.data, cut.tensor, cut.pipeline].map(u64::from);
    let expert = u64::from(cut.expert);
    // Of a copy: computation, all-reduce, its part of all-to-alls, and transfers to the next stage.
    let exchanged = if expert > 1 { tensor * (1 + MESSAGE * (expert - 1)) } else { 0 };
    let each = 2 + exchanged + if pipeline > 1 { tensor } else { 0 };
    let of_passes = data * pipeline * 2 * u64::from(cut.micro_batches());
    of_passes.saturating_mul(each).saturating_add(pipeline * (tensor + data))
}

/// What a microbatch takes on a stage of one copy.
struct Work {
    /// Seconds of computation, forward and backward.
    computed: [f64; 2],
    /// Seconds of the output layer on the last stage, forward and backward.
    head: [f64; 2],
    /// Bytes of the all-reduces among the devices of a layer, forward and backward.
    reduced: [f64; 2],
    /// All-to-alls among experts, forward and backward.
    exchanges: [Option<Collective>; 2],
    /// Bytes from each device to the next stage.
    passed: f64,
    /// Bytes of gradients of a device.
    gradients: f64,
    /// Seconds of the updates of parameters.
    updates: f64,
}

impl Work {
    fn new(
        model: &Transformer,
        accelerator: &Accelerator,
        links: &ClosedForm,
        reaches: f64,
        cut: &Parallelism,
    ) -> Result<Self, CollectiveError> {
        let parts = Parts::new(model, accelerator, &Reached { links, part: reaches }, cut);
        let layers = f64::from(model.layers / cut.pipeline);
        let again = cut.passes_again();
        let [size, routed] = parts.sizes;
        // Forward is one of three passes, or of four with recomputation.
        let forward = 1.0 / (3.0 * again);
        let shares = |value: f64| [forward * value, (1.0 - forward) * value];
        // Two collectives of a layer are forward.
        let sent = |bytes: f64| [2.0 * layers * bytes, (4.0 * again - 2.0) * layers * bytes];
        let (reduced, exchanged) = (sent(size), sent(routed));
        let links = Reached { links, part: 1.0 };
        let communication: f64 = reduced
            .iter()
            .zip(&exchanged)
            .map(|(&sum, &routed)| {
                links.reduce_s(cut.tensor, sum) + links.exchange_s(cut.tensor, cut.expert, routed)
            })
            .sum();
        let mut computed = shares((layers * parts.layer - communication).max(0.0));
        computed[0] += accelerator.overhead.0 as f64 / 1e9;
        let exchange = |each: f64| match cut.expert {
            1 => Ok(None),
            count => Collective::all_to_all(count, bytes(each).0).map(Some),
        };
        Ok(Self {
            computed,
            head: shares(parts.head),
            reduced: if cut.tensor > 1 { reduced } else { [0.0; 2] },
            exchanges: [exchange(exchanged[0])?, exchange(exchanged[1])?],
            passed: size / f64::from(cut.tensor),
            gradients: parts.own * PER_GRADIENT,
            updates: parts.updates,
        })
    }
}

/// A forward or backward pass of a microbatch.
#[derive(Clone, Copy)]
struct Pass {
    micro_batch: u32,
    is_backward: bool,
}

/// The passes of a stage in order: as many forward as there are stages behind it, then one backward for
/// each forward.
fn one_f_one_b(cut: &Parallelism, stage: u32) -> Vec<Pass> {
    let count = cut.micro_batches();
    let ahead = (cut.pipeline - 1 - stage).min(count);
    let pass = |micro_batch, is_backward| Pass { micro_batch, is_backward };
    let mut passes: Vec<Pass> = (0..ahead).map(|number| pass(number, false)).collect();
    for number in 0..count {
        if ahead + number < count {
            passes.push(pass(ahead + number, false));
        }
        passes.push(pass(number, true));
    }
    passes
}

/// Nodes after which something begins, by copy: one of all its devices, or one of each.
type After = Vec<Vec<Dependency>>;

/// Returns the node of a device of a copy, among those of the copy.
fn of_part(after: &[Dependency], part: u32) -> Dependency {
    if after.len() == 1 { after[0] } else { after[part as usize] }
}

struct Lowering<'a> {
    cut: &'a Parallelism,
    work: Work,
    step: StepGraph,
    /// By stage, what its last pass ended with.
    done: Vec<Option<After>>,
}

impl Lowering<'_> {
    fn device(&self, stage: u32, copy: u32, part: u32) -> u32 {
        (stage * self.cut.data + copy) * self.cut.tensor + part
    }

    fn of_copy(&self, stage: u32, copy: u32) -> Range<u32> {
        let first = self.device(stage, copy, 0);
        first..first + self.cut.tensor
    }

    /// Adds the passes of all stages, each once what it needs from its neighbours is there.
    fn add_microbatches(&mut self) -> Result<(), TransformerError> {
        let (stages, count) = (self.cut.pipeline, self.cut.micro_batches());
        let orders: Vec<Vec<Pass>> = (0..stages).map(|at| one_f_one_b(self.cut, at)).collect();
        let mut next = vec![0; stages as usize];
        // By direction, stage and microbatch, what arrives from the stage before.
        let mut arrived: [Vec<Vec<Option<After>>>; 2] =
            [(); 2].map(|()| vec![vec![None; count as usize]; stages as usize]);
        let names: Vec<[Arc<str>; 2]> = (0..count)
            .map(|number| ["forward", "backward"].map(|pass| format!("{pass} {number}").into()))
            .collect();
        let mut left: usize = orders.iter().map(Vec::len).sum();
        while left > 0 {
            for stage in 0..stages {
                let at = stage as usize;
                while let Some(&pass) = orders[at].get(next[at]) {
                    let Pass { micro_batch, is_backward } = pass;
                    let number = micro_batch as usize;
                    let is_first = if is_backward { stage + 1 == stages } else { stage == 0 };
                    let came = arrived[usize::from(is_backward)][at][number].take();
                    if came.is_none() && !is_first {
                        break;
                    }
                    let name = &names[number][usize::from(is_backward)];
                    let ended = self.add_pass(stage, pass, name, came)?;
                    let to = if is_backward { stage.checked_sub(1) } else { Some(stage + 1) };
                    if let Some(to) = to.filter(|&to| to < stages) {
                        let sent = self.add_transfers(stage, to, name, &ended);
                        arrived[usize::from(is_backward)][to as usize][number] = Some(sent);
                    }
                    self.done[at] = Some(ended);
                    next[at] += 1;
                    left -= 1;
                }
            }
        }
        Ok(())
    }

    /// Adds a pass of all copies of a stage; returns the nodes that end it.
    fn add_pass(
        &mut self,
        stage: u32,
        pass: Pass,
        name: &Arc<str>,
        came: Option<After>,
    ) -> Result<After, TransformerError> {
        let at = usize::from(pass.is_backward);
        let is_last = stage + 1 == self.cut.pipeline;
        let seconds = self.work.computed[at] + if is_last { self.work.head[at] } else { 0.0 };
        let before = self.done[stage as usize].take();
        let mut ended: After = Vec::with_capacity(self.cut.data as usize);
        for copy in 0..self.cut.data {
            let of = |after: &Option<After>| after.as_ref().map(|by| by[copy as usize].clone());
            let after: Vec<Dependency> =
                [of(&before), of(&came)].into_iter().flatten().flatten().collect();
            let devices: Devices = self.of_copy(stage, copy).collect();
            let computed = StepOp::compute(devices.clone(), nanos(seconds));
            let mut node = self.step.add(name.clone(), computed, &after);
            let reduced = bytes(self.work.reduced[at]);
            if reduced.0 > 0 {
                let sum = StepOp::collective(Collective::all_reduce, devices, reduced)?;
                node = self.step.add(name.clone(), sum, &[Dependency::on(node)]);
            }
            ended.push(vec![Dependency::on(node)]);
        }
        Ok(self.add_exchanges(stage, at, name, ended))
    }

    /// Adds the all-to-alls among the copies that share experts; returns the nodes that end them.
    fn add_exchanges(&mut self, stage: u32, at: usize, name: &Arc<str>, ended: After) -> After {
        let Some(collective) = self.work.exchanges[at].clone() else { return ended };
        let count = self.cut.expert;
        let mut exchanged: After = vec![Vec::new(); self.cut.data as usize];
        for first in (0..self.cut.data).step_by(count as usize) {
            let copies = first as usize..(first + count) as usize;
            let after: Vec<Dependency> = ended[copies.clone()].iter().flatten().copied().collect();
            for part in 0..self.cut.tensor {
                let devices: Devices =
                    (first..first + count).map(|copy| self.device(stage, copy, part)).collect();
                let op = CollectiveOp { collective: collective.clone(), devices, element_bytes: 1 };
                let node = self.step.add(name.clone(), StepOp::Collective(Box::new(op)), &after);
                for copy in copies.clone() {
                    exchanged[copy].push(Dependency::on(node));
                }
            }
        }
        exchanged
    }

    /// Adds the transfers of activations or their gradients between neighbouring stages.
    fn add_transfers(&mut self, from: u32, to: u32, name: &Arc<str>, ended: &After) -> After {
        let (cut, size) = (self.cut, bytes(self.work.passed));
        let mut arrived: After = Vec::with_capacity(cut.data as usize);
        for (copy, after) in (0..).zip(ended) {
            let transfers = (0..cut.tensor).map(|part| {
                let (source, target) = (self.device(from, copy, part), self.device(to, copy, part));
                let op = StepOp::Transfer { source, target, size };
                Dependency::on(self.step.add(name.clone(), op, &[of_part(after, part)]))
            });
            arrived.push(transfers.collect());
        }
        arrived
    }

    /// Adds the all-reduces of gradients among copies, and the updates of parameters.
    fn add_updates(&mut self) -> Result<(), TransformerError> {
        let size = bytes(self.work.gradients);
        for stage in 0..self.cut.pipeline {
            let ended = self.done[stage as usize].take().unwrap_or_default();
            let mut sums: Vec<Dependency> = Vec::new();
            if self.cut.data > 1 {
                for part in 0..self.cut.tensor {
                    let after: Vec<Dependency> =
                        ended.iter().map(|of_copy| of_part(of_copy, part)).collect();
                    let devices: Devices =
                        (0..self.cut.data).map(|copy| self.device(stage, copy, part)).collect();
                    let sum = StepOp::collective(Collective::all_reduce, devices, size)?;
                    sums.push(Dependency::on(self.step.add("gradients", sum, &after)));
                }
            }
            for copy in 0..self.cut.data {
                let after = if sums.is_empty() { &ended[copy as usize] } else { &sums };
                let devices: Devices = self.of_copy(stage, copy).collect();
                self.step.add("update", StepOp::compute(devices, nanos(self.work.updates)), after);
            }
        }
        Ok(())
    }
}

fn nanos(seconds: f64) -> Nanos {
    Nanos((1e9 * seconds).round() as u64)
}

fn bytes(value: f64) -> Bytes {
    Bytes(value.round() as u64)
}
