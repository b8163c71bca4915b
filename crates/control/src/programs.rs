//! Programs that clients have compiled, and what may be run with them.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BufferId, Code, DeviceId, ExecutableId, HostId, IslandId, Nanos, Status};
use fabric::Cluster;
use ir::{ArraySpec, Operation, Program, Sharding, Work};
use smallvec::SmallVec;

use crate::command::Command;
use crate::lower::Lowered;
use crate::objects::Buffer;
use crate::protocol::{Compiled, CostAnalysis, Handle, RequestId};
use crate::reshard;
use crate::scheduler::Member;

/// How a program is run.
#[derive(Debug)]
pub(crate) enum ExecutableForm {
    /// As one gang on the devices of one island.
    Gang,
    /// As messages between the hosts of several islands.
    Exchange,
    /// As the steps of a whole program.
    Dataflow(Box<Dataflow>),
}

/// A whole program, lowered.
#[derive(Debug)]
pub(crate) struct Dataflow {
    /// As it was read, on physical devices.
    pub source: Program,
    /// The same as it runs: with runs of small calls made one call each.
    pub program: Program,
    pub inputs: Vec<Arc<ArraySpec>>,
    pub lowered: Lowered,
    /// What it calls, in the program's order.
    pub functions: Vec<Arc<Executable>>,
}

impl Dataflow {
    /// Each function with its name in the program.
    pub fn named(&self) -> impl Iterator<Item = (String, &Executable)> {
        let names = self.program.functions.iter().map(|function| function.name.clone());
        names.zip(self.functions.iter().map(AsRef::as_ref))
    }

    /// How long its calls may take on the device that has most to do, from their costs.
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

    /// Name and devices of each function.
    pub fn places(&self) -> Vec<(String, Arc<[DeviceId]>)> {
        self.named().map(|(name, function)| (name, function.devices.clone())).collect()
    }
}

/// A program loaded on the hosts of its devices.
#[derive(Debug)]
pub(crate) struct Executable {
    pub id: ExecutableId,
    pub form: ExecutableForm,
    /// What it was compiled from; a whole program was put together from its functions.
    pub source: Option<CompileSource>,
    /// Its islands and which life of each it belongs to.
    pub islands: Vec<(IslandId, u32)>,
    pub devices: Arc<[DeviceId]>,
    pub hosts: Arc<[HostId]>,
    /// How many devices it runs on, of each of them.
    pub host_devices: Arc<[u32]>,
    pub compiled: Arc<Compiled>,
    pub outputs: Arc<[ArraySpec]>,
    /// The same specs, each on its own, as buffers carry them.
    pub output_specs: Vec<Arc<ArraySpec>>,
    /// Hosts that hold each result.
    pub output_hosts: Vec<Arc<[HostId]>>,
}

impl Executable {
    /// What each host is to do, and on how many of its devices.
    pub fn members(&self, command: &Command) -> SmallVec<[Member; 2]> {
        let hosts = self.hosts.iter().zip(&*self.host_devices);
        hosts.map(|(&host, &devices)| Member { host, devices, command: command.clone() }).collect()
    }

    /// Fails unless a program can run on the devices that are asked for, with this many arguments.
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

    /// Does it take batches that hosts make, itself or in a function of it?
    pub fn takes_input(&self) -> bool {
        let functions = match &self.form {
            ExecutableForm::Dataflow(dataflow) => &dataflow.functions[..],
            _ => &[],
        };
        self.compiled.input.is_some() || functions.iter().any(|function| function.takes_input())
    }

    /// The whole program that it is.
    pub fn dataflow(&self) -> Result<&Dataflow, Status> {
        match &self.form {
            ExecutableForm::Dataflow(dataflow) => Ok(dataflow),
            _ => Err(Status::new(
                Code::InvalidArgument,
                format!("{} is one computation, not a whole program", self.compiled.name),
            )),
        }
    }

    /// What a run costs; for a whole program, the sum over its calls.
    pub fn costs(&self) -> Result<CostAnalysis, Status> {
        let ExecutableForm::Dataflow(dataflow) = &self.form else {
            return self.compiled.costs.clone().ok_or_else(|| {
                let why = "a program over several islands is not compiled by XLA";
                Status::new(Code::Unimplemented, why)
            });
        };
        let mut sum: BTreeMap<String, f64> = BTreeMap::new();
        for node in &dataflow.program.nodes {
            if let Operation::Call { function, .. } = &node.operation {
                for (name, cost) in dataflow.functions[function.0 as usize].costs()? {
                    *sum.entry(name).or_default() += cost;
                }
            }
        }
        Ok(sum.into_iter().collect())
    }

    /// What the compiler counts for each of its devices; none if it was not compiled by XLA.
    pub fn work(&self) -> Option<Work> {
        let costs = self.compiled.costs.as_deref()?;
        // The compiler says -1 of what it cannot count.
        let cost = |name: &str| costs.iter().find(|cost| cost.0 == name).map_or(0.0, |cost| cost.1);
        Some(Work { flops: cost("flops") as u64, bytes: cost("bytes accessed") as u64 })
    }

    /// How long one run may take on each of its devices, from its costs; measured soon.
    ///
    /// Assumed: 2e10 operations and 1e10 bytes a second, and ten microseconds to start, which are
    /// a CPU core's; a program is run a few times too few or too many ahead until it is measured.
    pub fn expected_time(&self) -> Nanos {
        let work = self.work().unwrap_or(Work { flops: 0, bytes: 0 });
        let seconds = (work.flops as f64 / 2e10).max(work.bytes as f64 / 1e10);
        Nanos(10_000 + (seconds * 1e9) as u64)
    }

    /// The buffer of a result of a run whose new buffers begin at `first`.
    pub fn result(&self, first: BufferId, index: usize) -> BufferId {
        match &self.form {
            ExecutableForm::Dataflow(dataflow) => {
                let slot = dataflow.lowered.results[index] - dataflow.inputs.len() as u32;
                BufferId(first.0 + u64::from(slot))
            }
            _ => BufferId(first.0 + index as u64),
        }
    }

    /// Fails unless an argument lies where its program runs.
    pub fn check_argument(&self, index: usize, buffer: &Buffer) -> Result<(), Status> {
        let devices = &buffer.spec.sharding.devices;
        let wanted = match &self.form {
            ExecutableForm::Gang => &self.devices,
            ExecutableForm::Exchange => {
                self.check_cut(index, buffer)?;
                &self.devices
            }
            ExecutableForm::Dataflow(dataflow) => {
                check_input(&self.compiled.name, index, buffer, &dataflow.inputs[index])?;
                &dataflow.inputs[index].sharding.devices
            }
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

    /// An exchange takes each shard for what its program says it is; XLA is not there to check.
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

/// Fails unless an argument of a whole program is what the program says it is.
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

/// A program whose hosts have not all answered yet.
#[derive(Debug)]
pub(crate) struct Compiling {
    pub id: ExecutableId,
    pub islands: Vec<(IslandId, u32)>,
    pub source: CompileSource,
    pub hosts: Arc<[HostId]>,
    pub compiled: Option<Box<Compiled>>,
    pub purpose: Purpose,
}

/// Who wants a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A client, in this request.
    Request(RequestId),
    /// A whole program that is being assembled: its number, and which function it is.
    Function(u64, usize),
    /// Nobody new: in this move, it takes the place of the program of this name.
    Move(u64, Handle),
    /// A run that is held: in this renewal, it takes the place of the program that was lost.
    Renewal(u64),
}

impl Compiling {
    /// Says why a program over several islands was read so closely.
    pub fn explain(&self, error: &mut Status) {
        if let [(first, _), (second, _), ..] = self.islands[..]
            && error.code == Code::InvalidArgument
        {
            error.message = format!(
                "one computation names devices of island {first} and of island {second}; a \
                 computation runs inside one island unless it is nothing but collectives, and \
                 {}; run one per island and move arrays with jax.device_put",
                error.message
            );
        }
    }

    /// The program, once all hosts have it.
    pub fn finish(self, cluster: &Cluster) -> Executable {
        let compiled = Arc::new(*self.compiled.expect("the leader's answer carries the program"));
        let outputs: Arc<[ArraySpec]> = compiled
            .outputs
            .iter()
            .map(|output| ArraySpec {
                dtype: output.dtype,
                dims: output.dims.clone(),
                sharding: Sharding {
                    devices: self.source.devices.clone(),
                    memory: output.memory.clone(),
                    partition: output.cut.partition.clone(),
                },
            })
            .collect();
        let output_specs: Vec<_> = outputs.iter().cloned().map(Arc::new).collect();
        let output_hosts = vec![self.hosts.clone(); outputs.len()];
        let form =
            if self.islands.len() > 1 { ExecutableForm::Exchange } else { ExecutableForm::Gang };
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

/// What a program is compiled from.
#[derive(Debug, Clone)]
pub(crate) struct CompileSource {
    /// Portable artifact.
    pub program: Arc<Vec<u8>>,
    /// Serialized compile options.
    pub options: Arc<Vec<u8>>,
    /// Devices in the order of the device assignment.
    pub devices: Arc<[DeviceId]>,
    /// Replicas and partitions, whose product is the device count.
    pub grid: (u32, u32),
}

/// Everything an `Execute` request carries.
pub(crate) struct Run {
    pub executable: Handle,
    pub args: SmallVec<[Handle; 8]>,
    pub results: SmallVec<[Handle; 8]>,
    pub keep: SmallVec<[u32; 4]>,
    pub status: Option<Handle>,
    pub devices: Vec<DeviceId>,
}
