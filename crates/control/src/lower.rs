//! Lowers a program to each host's steps: calls, copies and messages, in one order.
//!
//! Source: PATHWAYS §4.2 (progressive lowering to physical devices), §4.5 (one message describes
//! all work that is known in advance).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{BufferId, Bytes, ClientId, Code, DeviceId, HostId, Nanos, Status, TransferTag};
use ir::{ArraySpec, Ends, Node, NodeId, Operation, Program, Sparse, ValueId};
use protocol::{Acknowledge, Command};
use smallvec::SmallVec;
use topology::Cluster;

use crate::collective_deps::Waits;
use crate::programs::{Executable, ExecutableForm, Lowered, TAGS_PER_EXCHANGE};
use crate::reshard::{self, ShardMove};
use crate::sparse;

/// Lowers a program to physical devices.
///
/// # Arguments
/// - `program`: verified, on physical devices.
/// - `functions`: the executable of each function.
///
/// # Errors
/// A move that cannot be planned.
pub(crate) fn lower(
    cluster: &Cluster,
    program: &Program,
    functions: &[Arc<Executable>],
) -> Result<Lowered, Status> {
    let specs: Vec<Arc<ArraySpec>> = program.values.iter().cloned().map(Arc::new).collect();
    let mut lowering = Lowering {
        cluster,
        program,
        specs,
        last_uses: program.last_uses(),
        next_tag: 0,
        moved: Bytes(0),
        steps: BTreeMap::new(),
        touched: BTreeSet::new(),
        waits: Waits::new(program),
        joined: BTreeMap::new(),
    };
    let (mut ends, mut times, mut inputs) = (Vec::new(), Vec::new(), Vec::new());
    for (number, node) in program.nodes.iter().enumerate() {
        lowering.node(NodeId(number as u32), node, functions)?;
        ends.push(lowering.ends());
        let function = match &node.operation {
            Operation::Call { function, .. } => Some(&functions[function.0 as usize]),
            Operation::Assemble | Operation::Move { .. } | Operation::Sparse(_) => None,
        };
        times.push(function.map_or(Nanos(0), |function| function.expected_time()));
        inputs.push(function.and_then(|function| function.compiled.input));
    }
    let results = lowering.results();
    ends.push(lowering.ends());
    times.push(Nanos(0));
    inputs.push(None);
    let steps = lowering.steps.into_iter().map(|(host, steps)| (host, Arc::new(steps))).collect();
    let made = program.values.len() as u32 + results.1 - program.inputs;
    let (moved, tags, results) = (lowering.moved, lowering.next_tag, results.0);
    let joined: Vec<u32> = lowering.joined.into_values().collect();
    let collectives = if let [all] = joined[..] { all } else { 0 };
    Ok(Lowered { steps, slots: made, moved, tags, results, ends, times, inputs, collectives })
}

/// Binds a program to physical devices: replaces each device number by `devices[number]`.
///
/// # Errors
/// The first number that is not an index of `devices`.
pub(crate) fn bind(program: &mut Program, devices: &[DeviceId]) -> Result<(), u32> {
    let mut known: BTreeMap<Arc<[DeviceId]>, Arc<[DeviceId]>> = BTreeMap::new();
    let mut bound = |list: &mut Arc<[DeviceId]>| -> Result<(), u32> {
        if !known.contains_key(list) {
            let find = |device: &DeviceId| devices.get(device.0 as usize).copied().ok_or(device.0);
            known.insert(list.clone(), list.iter().map(find).collect::<Result<_, _>>()?);
        }
        *list = known[list].clone();
        Ok(())
    };
    for spec in &mut program.values {
        bound(&mut spec.sharding.devices)?;
    }
    for node in &mut program.nodes {
        if let Operation::Call { devices, .. } = &mut node.operation {
            bound(devices)?;
        }
    }
    Ok(())
}

struct Lowering<'a> {
    cluster: &'a Cluster,
    program: &'a Program,
    specs: Vec<Arc<ArraySpec>>,
    last_uses: Vec<Option<NodeId>>,
    next_tag: u64,
    moved: Bytes,
    steps: BTreeMap<HostId, Vec<Command>>,
    /// Hosts that got steps since `ends` was last called.
    touched: BTreeSet<HostId>,
    waits: Waits,
    /// Number of collectives between each set of hosts.
    joined: BTreeMap<Vec<HostId>, u32>,
}

impl Lowering<'_> {
    fn add(&mut self, host: HostId, step: Command) {
        self.steps.entry(host).or_default().push(step);
        self.touched.insert(host);
    }

    fn ends(&mut self) -> Vec<(HostId, u32)> {
        let touched = std::mem::take(&mut self.touched);
        touched.into_iter().map(|host| (host, self.steps[&host].len() as u32)).collect()
    }

    fn node(
        &mut self,
        number: NodeId,
        node: &Node,
        functions: &[Arc<Executable>],
    ) -> Result<(), Status> {
        match &node.operation {
            Operation::Call { function, donated, .. } => {
                self.call(node, &functions[function.0 as usize], donated);
            }
            Operation::Move { .. } => {
                for (&arg, result) in node.args.iter().zip(node.results.clone()) {
                    self.move_one(number, arg, ValueId(result))?;
                }
                let values = node.args.iter().map(|arg| arg.0).chain(node.results.clone());
                // Hosts that only relay messages are among the touched ones.
                let mut hosts = self.touched.clone();
                hosts.extend(values.flat_map(|value| self.hosts(value)));
                self.waits.pass(node, &Vec::from_iter(hosts));
            }
            Operation::Assemble => {
                let message = "a program to be run assembles no arrays from shards";
                return Err(Status::new(Code::Unimplemented, message.to_owned()));
            }
            Operation::Sparse(sparse) => {
                let ends = sparse.ends(self.program, number.0, node);
                self.sparse(node, (*sparse, ends.expect("the program is verified")));
            }
        }
        self.free_after(number, node);
        Ok(())
    }

    fn call(&mut self, node: &Node, executable: &Executable, donated: &[u32]) {
        if let ExecutableForm::Exchange(_) = executable.form {
            return self.exchange(node, executable);
        }
        let kept = executable.compiled.donated.iter().filter(|index| !donated.contains(index));
        let launch = Command::Launch {
            sequence: 0,
            previous: 0,
            acknowledge: Acknowledge::No,
            executable: executable.id,
            args: node.args.iter().map(|arg| slot(*arg)).collect(),
            first_result: BufferId(u64::from(node.results.start)),
            results: node.results.len() as u32,
            keep: kept.copied().collect::<SmallVec<_>>(),
            completion: None,
            client: ClientId(0),
        };
        for &host in executable.hosts.iter() {
            self.add(host, launch.clone());
        }
        self.waits.pass(node, &executable.hosts);
    }

    fn exchange(&mut self, node: &Node, executable: &Executable) {
        let results = node.results.clone().map(|value| self.specs[value as usize].clone());
        let exchange = Command::RunExchange {
            executable: executable.id,
            args: node.args.iter().map(|arg| slot(*arg)).collect(),
            first_result: BufferId(u64::from(node.results.start)),
            results: results.collect(),
            first_tag: TransferTag(self.next_tag),
            client: ClientId(0),
        };
        self.next_tag += TAGS_PER_EXCHANGE;
        for &host in executable.hosts.iter() {
            self.add(host, exchange.clone());
        }
        self.waits.pass(node, &executable.hosts);
    }

    fn sparse(&mut self, node: &Node, exchange: (Sparse, Ends)) {
        let value = |value: u32| (BufferId(u64::from(value)), &self.specs[value as usize]);
        let args: Vec<_> = node.args.iter().map(|arg| value(arg.0)).collect();
        let results: Vec<_> = node.results.clone().map(value).collect();
        let next_tag = &mut self.next_tag;
        let parts = sparse::plan(self.cluster, exchange, &args, &results, || {
            *next_tag += 1;
            TransferTag(*next_tag - 1)
        });
        let hosts: Vec<HostId> = parts.iter().map(|(host, _)| *host).collect();
        let found = self.waits.pass(node, &hosts);
        if found.is_some() {
            *self.joined.entry(hosts).or_default() += 1;
        }
        let (number, after) = found.unwrap_or_default();
        for (host, part) in parts {
            self.add(host, part.command(number, after.clone()));
        }
    }

    /// Returns the hosts that hold shards of a value.
    fn hosts(&self, value: u32) -> Vec<HostId> {
        reshard::hosts_of(self.cluster, &self.specs[value as usize].sharding.devices)
    }

    fn move_one(&mut self, number: NodeId, from: ValueId, to: ValueId) -> Result<(), Status> {
        // Buffers that share memory are deleted together, so a value that is still needed is
        // copied.
        let may_share =
            from.0 >= self.program.inputs && self.last_uses[from.0 as usize] == Some(number);
        let (source, target) = (&self.specs[from.0 as usize], &self.specs[to.0 as usize]);
        let next_tag = &mut self.next_tag;
        // A placeholder: each run supplies its client.
        let whose = (ClientId(0), may_share);
        let planned =
            reshard::plan(self.cluster, (slot(from), source), (slot(to), target), whose, || {
                *next_tag += 1;
                TransferTag(*next_tag - 1)
            })?;
        match planned {
            ShardMove::Share => self.share(from, to.0, to.0),
            ShardMove::Commands(commands) => {
                for (host, step) in commands {
                    self.moved += reshard::brought(&step);
                    self.add(host, step);
                }
            }
        }
        Ok(())
    }

    /// Makes slot `to`, with the spec of value `described`, share the buffers of a value.
    fn share(&mut self, from: ValueId, to: u32, described: u32) {
        let source = self.specs[from.0 as usize].clone();
        let target = self.specs[described as usize].clone();
        let positions = 0..target.sharding.devices.len() as u32;
        let shards: Vec<_> = positions.map(|position| (slot(from), &*source, position)).collect();
        let target = (BufferId(u64::from(to)), &target);
        for (host, step) in reshard::share(self.cluster, target, &shards) {
            self.add(host, step);
        }
    }

    /// Frees the arguments for which a node is the last use.
    fn free_after(&mut self, number: NodeId, node: &Node) {
        let mut freed: BTreeMap<HostId, Vec<BufferId>> = BTreeMap::new();
        for &arg in &node.args {
            if arg.0 < self.program.inputs || self.last_uses[arg.0 as usize] != Some(number) {
                continue;
            }
            let devices = &self.specs[arg.0 as usize].sharding.devices;
            for host in reshard::hosts_of(self.cluster, devices) {
                let buffers = freed.entry(host).or_default();
                if !buffers.contains(&slot(arg)) {
                    buffers.push(slot(arg));
                }
            }
        }
        for (host, buffers) in freed {
            self.add(host, Command::Free { buffers });
        }
    }

    /// Returns the slot of each result, and the number of slots added for results that are
    /// arguments or are returned twice.
    fn results(&mut self) -> (Vec<u32>, u32) {
        let program = self.program;
        let mut slots: Vec<u32> = Vec::with_capacity(program.results.len());
        let first = program.values.len() as u32;
        let mut added = 0;
        for &result in &program.results {
            if result.0 >= program.inputs && !slots.contains(&result.0) {
                slots.push(result.0);
                continue;
            }
            self.share(result, first + added, result.0);
            slots.push(first + added);
            added += 1;
        }
        self.free_unread();
        (slots, added)
    }

    /// Frees results of nodes that are never read.
    fn free_unread(&mut self) {
        let program = self.program;
        for value in program.inputs..program.values.len() as u32 {
            let value = ValueId(value);
            if self.last_uses[value.0 as usize].is_some() || program.results.contains(&value) {
                continue;
            }
            let spec = self.specs[value.0 as usize].clone();
            for host in reshard::hosts_of(self.cluster, &spec.sharding.devices) {
                self.add(host, Command::Free { buffers: vec![slot(value)] });
            }
        }
    }
}

fn slot(value: ValueId) -> BufferId {
    BufferId(u64::from(value.0))
}
