//! Lowering of a program to a step graph: what each device computes and communicates.
//!
//! Devices that ever compute together are merged into one device of the step graph (a gang), since
//! their communication inside a computation is unknown. Collectives between gangs are nodes; arrays that
//! go from one gang to another become transfers, in equal parts if an array is on several gangs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{Bytes, DeviceId, Nanos};

use crate::gangs::GangMap;
use crate::{
    ArraySpec, Carried, Collective, Dependency, Devices, Function, Node, Operation, Program,
    Sparse, StepGraph, StepOp, ValueId,
};

/// Lowers a program that is executed repeatedly, such as a training loop, to its step graph.
///
/// A node depends on the producers of the values that it reads, on the devices where it reads them, in
/// an earlier step for loop-carried values. A node without dependencies in its step begins once its
/// device has ended the previous step.
/// The cost grows with the values, the devices of nodes, and the size of the result, which has one
/// transfer for each pair of gangs of an array and, in exchanges, for each pair of groups.
///
/// ```
/// let text = "\
/// program @step
/// function @double 1500ns
/// input %0: float32[8] on [0] carried from %2
/// node %1: float32[8] on [0] = call @double (%0)
/// node %2: float32[8] on [0] = call @double (%1)
/// return (%2)
/// ";
/// let step = ir::lower(&ir::Program::parse(text).unwrap());
/// assert_eq!(
///     step.to_string(),
///     "\
/// step @step on 1 devices
/// #0 @double = compute 1500ns on [0] after (#1@-1)
/// #1 @double = compute 1500ns on [0] after (#0)
/// "
/// );
/// ```
///
/// # Panics
/// The program is not [valid](Program::verify).
pub fn lower(program: &Program) -> StepGraph {
    let gangs = GangMap::of(program);
    let input = |input: u32| {
        let places = gangs.places(program.value(ValueId(input)));
        let inputs = places.into_iter().map(|device| (device, input)).collect();
        Made { inputs, ..Made::default() }
    };
    let values = (0..program.inputs).map(input).collect();
    let mut lowering = Lowering {
        program,
        step: StepGraph::new(program.name.clone(), gangs.count),
        gangs,
        drafts: Vec::new(),
        values,
        made: Vec::new(),
        last: BTreeMap::new(),
    };
    for node in &program.nodes {
        lowering.add(node);
    }
    lowering.finish()
}

/// Returns the devices of a program that each device of its [step graph](lower()) stands for.
///
/// ```
/// let text = "\
/// program @step
/// function @double
/// input %0: float32[8] tiled 2 on [2..4]
/// node %1: float32[8] tiled 2 on [2..4] = call @double (%0)
/// return (%1)
/// ";
/// let gangs = ir::gangs(&ir::Program::parse(text).unwrap());
/// assert_eq!(gangs, [[base::DeviceId(2), base::DeviceId(3)]]);
/// ```
pub fn gangs(program: &Program) -> Vec<Vec<DeviceId>> {
    let gangs = GangMap::of(program);
    let mut devices = vec![Vec::new(); gangs.count as usize];
    for (&device, &gang) in &gangs.of {
        devices[gang as usize].push(DeviceId(device));
    }
    devices
}

/// A node whose dependencies on earlier steps are not known yet.
struct Draft {
    name: Arc<str>,
    op: StepOp,
    /// The device on which it begins.
    begins: u32,
    after: BTreeSet<u32>,
    /// Devices and inputs that it reads there, directly or through nodes without transfers.
    inputs: BTreeSet<(u32, u32)>,
}

/// What must have ended before a value is available, or after a node of the program.
#[derive(Clone, Default)]
struct Made {
    /// Devices, and for each a node of the step that has written its part; for a node without
    /// transfers, the producers of its arguments.
    nodes: BTreeSet<(u32, u32)>,
    /// Devices, and for each an input of the program whose part is passed through.
    inputs: BTreeSet<(u32, u32)>,
    /// Nodes that must have ended whatever is read (control dependencies).
    ordered: BTreeSet<u32>,
}

impl Made {
    fn extend(&mut self, other: &Self) {
        self.nodes.extend(&other.nodes);
        self.inputs.extend(&other.inputs);
        self.ordered.extend(&other.ordered);
    }

    /// Keeps what is on these devices.
    fn retain(&mut self, is_kept: impl Fn(u32) -> bool) {
        self.nodes.retain(|(device, _)| is_kept(*device));
        self.inputs.retain(|(device, _)| is_kept(*device));
    }
}

/// Returns the devices whose data an operation changes.
fn written(op: &StepOp) -> BTreeSet<u32> {
    match op {
        StepOp::Transfer { target, .. } => [*target].into(),
        op => op.devices().collect(),
    }
}

/// Returns the devices whose data an operation reads.
fn read(op: &StepOp) -> BTreeSet<u32> {
    match op {
        StepOp::Transfer { source, .. } => [*source].into(),
        op => op.devices().collect(),
    }
}

struct Lowering<'a> {
    program: &'a Program,
    step: StepGraph,
    gangs: GangMap,
    drafts: Vec<Draft>,
    /// By value of the program.
    values: Vec<Made>,
    /// By node of the program.
    made: Vec<Made>,
    /// Last node that computes on each device.
    last: BTreeMap<u32, u32>,
}

impl Lowering<'_> {
    fn add(&mut self, node: &Node) {
        let mut before = Made::default();
        for after in &node.after {
            let made = &self.made[after.0 as usize];
            before.extend(made);
            before.ordered.extend(made.nodes.iter().map(|(_, node)| node));
        }
        if let Operation::Move { .. } = node.operation {
            return self.add_move(node, &before);
        }
        for arg in &node.args {
            before.extend(&self.values[arg.0 as usize]);
        }
        let made = match &node.operation {
            Operation::Call { function, devices, .. } => {
                let function = &self.program.functions[function.0 as usize];
                if function.collectives.is_none() {
                    self.compute(function, devices, before)
                } else {
                    self.communicate(function, devices, before)
                }
            }
            Operation::Sparse(Sparse::Reduce) => self.reduce(node, before),
            Operation::Sparse(sparse) => self.exchange(node, sparse, before),
            Operation::Assemble | Operation::Move { .. } => before,
        };
        for result in node.results.clone() {
            let value = self.value(result, &made);
            self.values.push(value);
        }
        self.made.push(made);
    }

    fn compute(&mut self, function: &Function, devices: &[DeviceId], before: Made) -> Made {
        let first = self.drafts.len() as u32;
        if let Some(device) = devices.first() {
            let device = self.gangs.of[&device.0];
            let op = StepOp::compute(device, function.time.unwrap_or(Nanos(0)));
            self.last.insert(device, first);
            self.draft(&function.name, op, device, &before);
        }
        self.made_since(first, before)
    }

    /// Lowers a call of a function that consists of collectives; returns when its results are there.
    fn communicate(&mut self, function: &Function, devices: &[DeviceId], before: Made) -> Made {
        let stages = self.gangs.stages(function, devices);
        stages.into_iter().fold(before, |before, stage| {
            let first = self.drafts.len() as u32;
            for op in stage {
                let begins = op.devices[0];
                self.draft(&function.name, StepOp::Collective(Box::new(op)), begins, &before);
            }
            self.made_since(first, before)
        })
    }

    /// Lowers a transfer of several arrays; each result is available once its own array has arrived.
    fn add_move(&mut self, node: &Node, ordered: &Made) {
        let mut all = Made::default();
        for (arg, result) in node.args.iter().zip(node.results.clone()) {
            let (from, to) = (self.program.value(*arg), self.program.value(ValueId(result)));
            let mut before = ordered.clone();
            before.extend(&self.values[arg.0 as usize]);
            let first = self.drafts.len() as u32;
            self.transfer("transfer", (from, to), from.bytes(), &before);
            let made = self.made_since(first, before);
            all.extend(&made);
            self.values.push(self.value(result, &made));
        }
        self.made.push(all);
    }

    /// Returns the drafts from `first` on, and what is on devices that they do not write.
    fn made_since(&self, first: u32, mut before: Made) -> Made {
        let drafts = (first..).zip(&self.drafts[first as usize..]);
        let nodes: BTreeSet<(u32, u32)> = drafts
            .flat_map(|(node, draft)| written(&draft.op).into_iter().map(move |on| (on, node)))
            .collect();
        if !nodes.is_empty() {
            let devices: BTreeSet<u32> = nodes.iter().map(|(device, _)| *device).collect();
            before.retain(|device| !devices.contains(&device));
            before.ordered.clear();
            before.nodes.extend(nodes);
        }
        before
    }

    /// Returns what a value is made by, of all that its node has made.
    fn value(&self, value: u32, made: &Made) -> Made {
        let places = self.gangs.places(self.program.value(ValueId(value)));
        let mut made = made.clone();
        made.retain(|device| places.contains(&device));
        made
    }

    /// Lowers an exchange to transfers between all pairs of groups; data-dependent rows count as equal
    /// parts.
    fn exchange(&mut self, node: &Node, sparse: &Sparse, before: Made) -> Made {
        let first = self.drafts.len() as u32;
        let program = self.program;
        let (taken, made) = sparse.widths();
        let args: Vec<u32> = node.args.iter().map(|arg| arg.0).step_by(taken).collect();
        let results: Vec<u32> = node.results.clone().step_by(made).collect();
        let parts = if *sparse == Sparse::Gather { 1 } else { results.len() as u64 };
        for from in args.iter().map(|&arg| program.value(ValueId(arg))) {
            for to in results.iter().map(|&result| program.value(ValueId(result))) {
                if from.sharding.devices != to.sharding.devices {
                    let size = Bytes(from.bytes().0 / parts);
                    self.transfer(&sparse.to_string(), (from, to), size, &before);
                }
            }
        }
        self.made_since(first, before)
    }

    /// Lowers a sum over groups to an all-reduce.
    fn reduce(&mut self, node: &Node, before: Made) -> Made {
        let first = self.drafts.len() as u32;
        let specs = node.args.iter().map(|&arg| self.program.value(arg));
        let devices: BTreeSet<u32> = specs.flat_map(|spec| self.gangs.places(spec)).collect();
        let size = self.program.value(node.args[0]).bytes();
        let devices: Devices = devices.into_iter().collect();
        let begins = devices.first().copied().unwrap_or(0);
        if devices.len() > 1
            && let Ok(op) = StepOp::collective(Collective::all_reduce, devices, size)
        {
            self.draft("reduce", op, begins, &before);
        }
        self.made_since(first, before)
    }

    fn transfer(
        &mut self,
        name: &str,
        (from, to): (&ArraySpec, &ArraySpec),
        size: Bytes,
        before: &Made,
    ) {
        let (sources, targets) = (self.gangs.places(from), self.gangs.places(to));
        let pairs = (sources.len() * targets.len()) as u64;
        for &source in &sources {
            for &target in targets.iter().filter(|&&target| target != source) {
                let size = Bytes(size.0 / pairs);
                self.draft(name, StepOp::Transfer { source, target, size }, source, before);
            }
        }
    }

    fn draft(&mut self, name: &str, op: StepOp, begins: u32, before: &Made) {
        let devices = read(&op);
        let mut before = before.clone();
        before.retain(|device| devices.contains(&device));
        let Made { nodes, inputs, ordered: mut after } = before;
        after.extend(nodes.into_iter().map(|(_, node)| node));
        self.drafts.push(Draft { name: name.into(), op, begins, after, inputs });
    }

    /// Adds the dependencies on earlier steps, now that all producers are known.
    fn finish(mut self) -> StepGraph {
        let carried: BTreeMap<u32, Carried> =
            self.program.carried.iter().map(|&carried| (carried.input, carried)).collect();
        for draft in std::mem::take(&mut self.drafts) {
            let mut after: BTreeSet<Dependency> =
                draft.after.iter().copied().map(Dependency::on).collect();
            // A value passed through a step was produced in an earlier one; of each node, the latest
            // step counts.
            let (mut reached, mut found) = (BTreeSet::new(), BTreeSet::new());
            let from_inputs = |passed: u32, inputs: &BTreeSet<(u32, u32)>| {
                inputs.iter().map(move |&(device, input)| (passed, device, input)).collect()
            };
            let mut open: BTreeSet<(u32, u32, u32)> = from_inputs(0, &draft.inputs);
            while let Some((passed, device, input)) = open.pop_first() {
                let Some(&Carried { from, steps_before, .. }) = carried.get(&input) else {
                    continue;
                };
                if !reached.insert((device, input)) {
                    continue;
                }
                let steps_before = passed.saturating_add(steps_before);
                let mut made = self.values[from.0 as usize].clone();
                made.retain(|other| other == device);
                let nodes = made.nodes.iter().filter(|(_, node)| found.insert(*node));
                after.extend(nodes.map(|&(_, node)| Dependency { node, steps_before }));
                open.append(&mut from_inputs(steps_before, &made.inputs));
            }
            if draft.after.is_empty()
                && let Some(&node) = self.last.get(&draft.begins)
            {
                after.insert(Dependency { node, steps_before: 1 });
            }
            let after: Vec<Dependency> = after.into_iter().collect();
            self.step.add(draft.name, draft.op, &after);
        }
        self.step
    }
}
