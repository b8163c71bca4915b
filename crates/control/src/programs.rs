//! Compiled programs, and checks of their arguments.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{
    BufferId, Bytes, Code, DeviceId, ExecutableId, HostId, InputId, IslandId, Nanos, Status,
};
use ir::{ArraySpec, CollectiveOp, DType, Dims, Operation, Partition, Program, Sharding, Work};
use protocol::Command;
use smallvec::SmallVec;
use topology::Cluster;

use crate::events::{Handle, RequestId};
use crate::objects::Buffer;
use crate::reshard;
use crate::resharding::Resharding;
use crate::sources::{CompileSource, SourceKind};
use crate::submissions::Member;
use protocol::{Compiled, CompiledSharding, CostAnalysis, HostCollective, OutputSpec};

use crate::colocated::Colocated;

/// Number of transfer tags reserved for one run of an exchange.
pub(crate) const TAGS_PER_EXCHANGE: u64 = 1 << 20;

/// How a program is executed.
#[derive(Debug)]
pub(crate) enum ExecutableForm {
    /// As one gang on the devices of a single island.
    Gang,
    /// As collectives of hosts of several islands: these, in order. Their ranks are indices into the
    /// executable's devices.
    Exchange(Vec<CollectiveOp>),
    /// As the steps of a whole program.
    Dataflow(Arc<Dataflow>),
    /// As a Python function of its client, in a process beside each host.
    Colocated(Arc<Colocated>),
    /// As transfers.
    Resharding(Arc<Resharding>),
}

/// A program lowered to physical devices.
#[derive(Debug, Default)]
pub(crate) struct Lowered {
    /// Each host's steps, on slots instead of buffers. Arguments take the first slots.
    pub steps: BTreeMap<HostId, Arc<Vec<Command>>>,
    /// Number of slots that are not arguments.
    pub slots: u32,
    /// Bytes that one run transfers between hosts, without rows whose number the data determine.
    pub moved: Bytes,
    /// Number of messages of one run.
    pub tags: u64,
    /// The slot of each result.
    pub results: Vec<u32>,
    /// For each node and for the end of the program: the hosts that have steps for it, and the
    /// number of their steps up to then.
    pub ends: Vec<Vec<(HostId, u32)>>,
    /// Estimated run time of each node, and zero for the end.
    pub times: Vec<Nanos>,
    /// For each node, the input whose next batch it returns, if any.
    pub inputs: Vec<Option<InputId>>,
    /// Number of its collectives if all are between the same hosts, so that one plan can cover
    /// them; else 0.
    pub collectives: u32,
}

/// What is known of the one computation that a program was partitioned from.
#[derive(Debug)]
pub(crate) struct Partitioned {
    /// Its devices, in the order of its device assignment.
    pub devices: Arc<[DeviceId]>,
    /// Costs of a run besides those of its functions.
    pub costs: CostAnalysis,
}

/// A whole program, lowered.
#[derive(Debug)]
pub(crate) struct Dataflow {
    /// As it was parsed, on physical devices.
    pub source: Program,
    /// The same as it runs: with runs of small calls batched into one call each.
    pub program: Program,
    pub inputs: Vec<Arc<ArraySpec>>,
    pub lowered: Lowered,
    /// The executable of each function, in the program's order.
    pub functions: Vec<Arc<Executable>>,
    /// The one computation that the program was partitioned from, if it was.
    pub partitioned: Option<Arc<Partitioned>>,
}

impl Dataflow {
    /// Returns each function with its name in the program.
    pub fn named(&self) -> impl Iterator<Item = (String, &Executable)> {
        let names = self.program.functions.iter().map(|function| function.name.clone());
        names.zip(self.functions.iter().map(AsRef::as_ref))
    }

    /// Returns the functions that XLA has compiled.
    pub fn computations(&self) -> impl Iterator<Item = &Executable> {
        let functions = self.functions.iter().map(AsRef::as_ref);
        functions.filter(|function: &&Executable| matches!(function.form, ExecutableForm::Gang))
    }

    /// Returns the estimated time of its calls on the busiest device, from their costs.
    pub fn expected_time(&self) -> Nanos {
        let mut busy: BTreeMap<DeviceId, Nanos> = BTreeMap::new();
        for node in &self.program.nodes {
            if let Operation::Call { function, devices, .. } = &node.operation {
                let takes = self.functions[function.0 as usize].expected_time();
                for &device in devices.iter() {
                    *busy.entry(device).or_default() += takes;
                }
            }
        }
        busy.into_values().max().unwrap_or_default()
    }

    /// Returns name and devices of each function.
    pub fn places(&self) -> Vec<(String, Arc<[DeviceId]>)> {
        self.named().map(|(name, function)| (name, function.devices.clone())).collect()
    }
}

/// A program loaded on the hosts of its devices.
#[derive(Debug)]
pub(crate) struct Executable {
    pub id: ExecutableId,
    pub form: ExecutableForm,
    /// Its source; `None` for a whole program, which is assembled from its functions.
    pub source: Option<CompileSource>,
    /// Its islands, and the incarnation of each that it belongs to.
    pub islands: Vec<(IslandId, u32)>,
    pub devices: Arc<[DeviceId]>,
    pub hosts: Arc<[HostId]>,
    /// Number of its devices on each of its hosts.
    pub host_devices: Arc<[u32]>,
    pub compiled: Arc<Compiled>,
    pub outputs: Arc<[ArraySpec]>,
    /// The same specs, individually shared with buffers.
    pub output_specs: Vec<Arc<ArraySpec>>,
    /// The hosts that hold each result.
    pub output_hosts: Vec<Arc<[HostId]>>,
}

impl Executable {
    /// Returns a resharding as an executable, which no host has to load.
    pub fn resharding(resharding: Arc<Resharding>, id: ExecutableId) -> Self {
        // What else is known of a result is that of its argument.
        let output = |sharding: &Sharding| OutputSpec {
            dtype: DType::Token,
            dims: Dims::new(),
            cut: CompiledSharding {
                partition: sharding.partition.clone(),
                encoded: bytes::Bytes::new(),
            },
            memory: sharding.memory.clone(),
        };
        let compiled = Compiled {
            name: "reshard".to_owned(),
            outputs: resharding.outputs.iter().map(output).collect(),
            parameter_count: resharding.outputs.len() as u32,
            ..Compiled::default()
        };
        Self {
            id,
            devices: resharding.devices.clone(),
            form: ExecutableForm::Resharding(resharding),
            source: None,
            islands: Vec::new(),
            hosts: Arc::default(),
            host_devices: Arc::default(),
            compiled: Arc::new(compiled),
            outputs: Arc::default(),
            output_specs: Vec::new(),
            output_hosts: Vec::new(),
        }
    }

    /// Returns the indices of arguments that a run donates: those the program may overwrite, except
    /// the ones to keep.
    pub fn donated<'a>(&'a self, keep: &'a [u32]) -> impl Iterator<Item = u32> + Clone + 'a {
        self.compiled.donated.iter().copied().filter(|index| !keep.contains(index))
    }

    /// Returns the gang's members: `command` on each host, with the number of its devices.
    pub fn members(&self, command: &Command) -> SmallVec<[Member; 2]> {
        let hosts = self.hosts.iter().zip(&*self.host_devices);
        hosts.map(|(&host, &devices)| Member { host, devices, command: command.clone() }).collect()
    }

    /// Fails unless the program takes this number of arguments and runs on the requested devices.
    pub fn check_run(&self, run: &Run) -> Result<(), Status> {
        let compiled = &self.compiled;
        if run.args.len() != compiled.parameter_count as usize {
            return Err(Status::new(
                Code::InvalidArgument,
                format!(
                    "{} takes {} arguments; {} are given",
                    compiled.name,
                    compiled.parameter_count,
                    run.args.len()
                ),
            ));
        }
        if let Some(kept) = run.keep.iter().find(|&&index| index >= compiled.parameter_count) {
            return Err(Status::new(
                Code::InvalidArgument,
                format!("{} has no argument {kept} to keep", compiled.name),
            ));
        }
        if run.devices.is_empty() || run.devices[..] == self.devices[..] {
            return Ok(());
        }
        Err(Status::new(
            Code::Unimplemented,
            format!(
                "{} was compiled for devices {:?} and cannot run on {:?}; compile it for those",
                compiled.name, self.devices, run.devices
            ),
        ))
    }

    /// Returns whether it takes batches of an input, itself or in one of its functions.
    pub fn takes_input(&self) -> bool {
        let functions = match &self.form {
            ExecutableForm::Dataflow(dataflow) => &dataflow.functions[..],
            _ => &[],
        };
        self.compiled.input.is_some() || functions.iter().any(|function| function.takes_input())
    }

    /// Returns the whole program, or an error if it is a single computation.
    pub fn dataflow(&self) -> Result<&Dataflow, Status> {
        match &self.form {
            ExecutableForm::Dataflow(dataflow) => Ok(dataflow),
            _ => Err(Status::new(
                Code::InvalidArgument,
                format!("{} is one computation, not a whole program", self.compiled.name),
            )),
        }
    }

    /// Returns the cost of a run; for a whole program, the sum over its calls.
    pub fn costs(&self) -> Result<CostAnalysis, Status> {
        let dataflow = match &self.form {
            ExecutableForm::Dataflow(dataflow) => dataflow,
            // These communicate only, or compute what no compiler sees.
            ExecutableForm::Exchange(_)
            | ExecutableForm::Colocated(_)
            | ExecutableForm::Resharding(_) => {
                return Ok(CostAnalysis::new());
            }
            ExecutableForm::Gang => {
                let unknown = || Status::new(Code::Unimplemented, "the compiler gives no costs");
                return self.compiled.costs.clone().ok_or_else(unknown);
            }
        };
        let mut sum: BTreeMap<String, f64> = BTreeMap::new();
        for node in &dataflow.program.nodes {
            if let Operation::Call { function, .. } = &node.operation {
                for (name, cost) in dataflow.functions[function.0 as usize].costs()? {
                    *sum.entry(name).or_default() += cost;
                }
            }
        }
        let partitioned = dataflow.partitioned.as_deref();
        sum.extend(partitioned.into_iter().flat_map(|partitioned| partitioned.costs.clone()));
        Ok(sum.into_iter().collect())
    }

    /// Returns the compiler's operation counts per device; `None` if it was not compiled by XLA.
    pub fn work(&self) -> Option<Work> {
        let costs = self.compiled.costs.as_deref()?;
        // The compiler reports -1 for what it cannot count; the cast saturates that to 0.
        let cost = |name: &str| costs.iter().find(|cost| cost.0 == name).map_or(0.0, |cost| cost.1);
        Some(Work { flops: cost("flops") as u64, bytes: cost("bytes accessed") as u64 })
    }

    /// Returns the estimated time of one run on each of its devices, from its costs; soon replaced
    /// by measurements.
    ///
    /// Assumed: 2e10 operations and 1e10 bytes a second, and ten microseconds to start, as on a CPU
    /// core; until it is measured, a few launches too many or too few are in flight.
    pub fn expected_time(&self) -> Nanos {
        let work = self.work().unwrap_or(Work { flops: 0, bytes: 0 });
        let seconds = (work.flops as f64 / 2e10).max(work.bytes as f64 / 1e10);
        Nanos(((seconds * 1e9) as u64).saturating_add(10_000))
    }

    /// Returns the whole program that it is, if it is one.
    pub fn whole_program(&self) -> Option<&Arc<Dataflow>> {
        match &self.form {
            ExecutableForm::Dataflow(dataflow) => Some(dataflow),
            _ => None,
        }
    }

    /// Returns the number of buffers that a run makes.
    pub fn buffers_made(&self) -> u64 {
        match &self.form {
            ExecutableForm::Dataflow(dataflow) => u64::from(dataflow.lowered.slots),
            _ => self.outputs.len() as u64,
        }
    }

    /// Returns the buffer of a result of a run whose new buffers begin at `first`.
    pub fn result(&self, first: BufferId, index: usize) -> BufferId {
        match &self.form {
            ExecutableForm::Dataflow(dataflow) => {
                let slot = dataflow.lowered.results[index] - dataflow.inputs.len() as u32;
                BufferId(first.0 + u64::from(slot))
            }
            _ => BufferId(first.0 + index as u64),
        }
    }

    /// Fails unless an argument is on the devices where its program takes it.
    pub fn check_argument(&self, index: usize, buffer: &Buffer) -> Result<(), Status> {
        let devices = &buffer.spec.sharding.devices;
        let wanted = match &self.form {
            ExecutableForm::Gang => &self.devices,
            ExecutableForm::Exchange(_) => {
                self.check_cut(index, buffer)?;
                &self.devices
            }
            ExecutableForm::Dataflow(dataflow) => {
                let wanted = &dataflow.inputs[index];
                if !dataflow.partitioned.as_ref().is_some_and(|_| is_alike(buffer, wanted)) {
                    check_input(&self.compiled.name, index, buffer, wanted)?;
                }
                &dataflow.inputs[index].sharding.devices
            }
            ExecutableForm::Colocated(function) => {
                let mut wanted = function.inputs[index].clone();
                if function.takes_any_type {
                    wanted.dtype = buffer.spec.dtype;
                }
                check_input(&self.compiled.name, index, buffer, &wanted)?;
                &function.inputs[index].sharding.devices
            }
            ExecutableForm::Resharding(_) => return Ok(()),
        };
        if Arc::ptr_eq(devices, wanted) || devices[..] == wanted[..] {
            return Ok(());
        }
        Err(Status::new(
            Code::InvalidArgument,
            format!(
                "argument {index} of {} lies on devices {:?}; the program runs on {:?}; move it \
                 there with jax.device_put",
                self.compiled.name, devices, wanted
            ),
        ))
    }

    /// Fails unless an argument of an exchange is partitioned as its program says; XLA does not
    /// check it here.
    fn check_cut(&self, index: usize, buffer: &Buffer) -> Result<(), Status> {
        let wanted = self.compiled.parameters.as_ref().and_then(|all| all.get(index));
        let given = &buffer.spec.sharding;
        let wanted =
            wanted.map(|cut| Sharding { partition: cut.partition.clone(), ..given.clone() });
        if wanted.is_some_and(|wanted| given.cuts_like(&wanted, &buffer.spec.dims)) {
            return Ok(());
        }
        Err(Status::new(
            Code::InvalidArgument,
            format!(
                "argument {index} of {} is cut otherwise than the program's shard_map; over \
                 several islands it must come as its in_specs say; move it with jax.device_put",
                self.compiled.name
            ),
        ))
    }
}

/// Returns whether an argument has shards of the wanted shape, and does not say of which region each
/// is: then what its client says is taken for true, as XLA does.
fn is_alike(buffer: &Buffer, wanted: &ArraySpec) -> bool {
    let given = &buffer.spec;
    let is_unknown = matches!(given.sharding.partition, Partition::Even { .. });
    let shard = |spec: &ArraySpec| spec.sharding.shard_dims(&spec.dims, 0);
    is_unknown
        && given.dims == wanted.dims
        && given.dtype == wanted.dtype
        && shard(given) == shard(wanted)
}

/// Fails unless an argument of a whole program matches the program's spec.
fn check_input(
    name: &str,
    index: usize,
    buffer: &Buffer,
    wanted: &ArraySpec,
) -> Result<(), Status> {
    let given = &buffer.spec;
    let same_cut = || {
        given.sharding.partition == wanted.sharding.partition
            || given.sharding.devices.len() == wanted.sharding.devices.len()
                && given.sharding.cuts_like(&wanted.sharding, &wanted.dims)
    };
    if given.dims == wanted.dims && given.dtype == wanted.dtype && same_cut() {
        return Ok(());
    }
    Err(Status::new(
        Code::InvalidArgument,
        format!(
            "argument {index} of {name} is {:?} of {}, cut {:?}; the program wants {:?} of {}, \
             cut {:?}; move it with jax.device_put",
            given.dims,
            given.dtype.name(),
            given.sharding.partition,
            wanted.dims,
            wanted.dtype.name(),
            wanted.sharding.partition
        ),
    ))
}

/// A program that is being compiled: not all hosts have answered yet.
#[derive(Debug)]
pub(crate) struct Compiling {
    pub id: ExecutableId,
    pub islands: Vec<(IslandId, u32)>,
    pub source: CompileSource,
    pub hosts: Arc<[HostId]>,
    pub compiled: Option<Box<Compiled>>,
    /// Collectives of the hosts that have answered.
    pub collectives: Vec<HostCollective>,
    pub purpose: Purpose,
}

/// What a program is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// For this request of a client.
    Request(RequestId),
    /// For a whole program that is being assembled: its number, and the index of the function.
    Function(u64, usize),
    /// For this migration: replaces the program of this handle.
    Move(u64, Handle),
    /// For this renewal: replaces the lost program that a held run needs.
    Renewal(u64),
}

impl Purpose {
    /// Returns the request that is replied to; 0 if none is.
    pub fn request(self) -> RequestId {
        match self {
            Self::Request(request) => request,
            Self::Function(..) | Self::Move(..) | Self::Renewal(_) => 0,
        }
    }
}

impl Compiling {
    /// Adds what a host has compiled; the metadata is the leader's.
    pub fn add(&mut self, host: HostId, mut found: Box<Compiled>) {
        self.collectives.append(&mut found.collectives);
        if self.compiled.is_none() || self.hosts[0] == host {
            self.compiled = Some(found);
        }
    }

    /// Returns the executable, once all hosts have it.
    pub fn finish(self, cluster: &Cluster) -> Executable {
        let collectives = collectives_of(self.collectives, self.source.devices.len());
        let mut compiled = *self.compiled.expect("the leader's answer carries the program");
        if let SourceKind::OfEachIsland { members, .. } = &self.source.kind {
            spread(&mut compiled, &members[0]);
        }
        let compiled = Arc::new(compiled);
        let of_program = |output: &OutputSpec| ArraySpec {
            dtype: output.dtype,
            dims: output.dims.clone(),
            sharding: Sharding {
                devices: self.source.devices.clone(),
                memory: output.memory.clone(),
                partition: output.cut.partition.clone(),
            },
        };
        let (form, outputs, output_hosts): (_, Arc<[ArraySpec]>, _) = match &self.source.kind {
            SourceKind::Colocated(function) => {
                let hosts = |spec: &ArraySpec| {
                    Arc::from(reshard::hosts_of(cluster, &spec.sharding.devices))
                };
                let output_hosts = function.outputs.iter().map(hosts).collect();
                let form = ExecutableForm::Colocated(function.clone());
                (form, function.outputs.iter().cloned().collect(), output_hosts)
            }
            kind => {
                let form = match kind {
                    SourceKind::Exchange { .. } => ExecutableForm::Exchange(collectives),
                    _ => ExecutableForm::Gang,
                };
                let outputs: Arc<[ArraySpec]> = compiled.outputs.iter().map(of_program).collect();
                let output_hosts = vec![self.hosts.clone(); outputs.len()];
                (form, outputs, output_hosts)
            }
        };
        let output_specs: Vec<_> = outputs.iter().cloned().map(Arc::new).collect();
        Executable {
            id: self.id,
            form,
            host_devices: reshard::devices_of_each(cluster, &self.source.devices, &self.hosts),
            output_hosts,
            islands: self.islands,
            devices: self.source.devices.clone(),
            source: Some(self.source),
            hosts: self.hosts,
            compiled,
            outputs,
            output_specs,
        }
    }
}

/// Makes the metadata of an island's computation those of the computation on all islands: results
/// are shards of a shape, of no array that the controller knows.
fn spread(compiled: &mut Compiled, devices: &Arc<[DeviceId]>) {
    compiled.parameters = None;
    for output in &mut compiled.outputs {
        let partition = output.cut.partition.clone();
        let sharding = Sharding { devices: devices.clone(), memory: None, partition };
        let shard = sharding.shard_dims(&output.dims, 0);
        output.cut.partition = Partition::Even { shard };
        output.cut.encoded = bytes::Bytes::new();
    }
}

/// Returns the distinct collectives that hosts report, each of which several may take part in.
///
/// # Arguments
/// - `devices`: number of the program's devices; collectives of others are left out.
fn collectives_of(reported: Vec<HostCollective>, devices: usize) -> Vec<CollectiveOp> {
    let mut distinct: Vec<(u32, CollectiveOp)> = Vec::new();
    for HostCollective { operation, text } in reported {
        let Ok(op) = CollectiveOp::parse(&text) else { continue };
        let is_here = op.devices.iter().all(|&rank| (rank as usize) < devices);
        let found = (operation, op);
        if is_here && !distinct.contains(&found) {
            distinct.push(found);
        }
    }
    distinct.sort_by(|(one, a), (other, b)| {
        one.cmp(other).then_with(|| a.devices.iter().cmp(b.devices.iter()))
    });
    distinct.into_iter().map(|(_, op)| op).collect()
}

/// The fields of an `Execute` request.
pub(crate) struct Run {
    pub executable: Handle,
    pub args: SmallVec<[Handle; 8]>,
    pub results: SmallVec<[Handle; 8]>,
    pub keep: SmallVec<[u32; 4]>,
    pub status: Option<Handle>,
    pub devices: Vec<DeviceId>,
    /// The stream of a Python function's run.
    pub stream: u64,
}
