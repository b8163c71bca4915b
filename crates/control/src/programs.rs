//! Programs that clients have compiled, and what may be run with them.

use std::sync::Arc;

use base::{Code, DeviceId, ExecutableId, HostId, IslandId, Status};
use ir::{ArraySpec, Sharding};
use smallvec::SmallVec;

use crate::objects::Buffer;
use crate::seam::{Compiled, Handle};

/// A program loaded on the hosts of one island, or over several if it only exchanges.
#[derive(Debug)]
pub(crate) struct Executable {
    pub id: ExecutableId,
    /// Its islands and which life of each it belongs to.
    pub islands: Vec<(IslandId, u32)>,
    pub devices: Arc<[DeviceId]>,
    pub hosts: Arc<[HostId]>,
    pub compiled: Arc<Compiled>,
    pub outputs: Arc<[ArraySpec]>,
    /// The same specs, each on its own, as buffers carry them.
    pub output_specs: Vec<Arc<ArraySpec>>,
}

impl Executable {
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

    /// Fails unless an argument lies where its program runs.
    pub fn check_argument(&self, index: usize, buffer: &Buffer) -> Result<(), Status> {
        if self.islands.len() > 1 {
            self.check_cut(index, buffer)?;
        }
        let devices = &buffer.spec.sharding.devices;
        if Arc::ptr_eq(devices, &self.devices) || devices[..] == self.devices[..] {
            return Ok(());
        }
        Err(Status::new(
            Code::InvalidArgument,
            format!(
                "argument {index} of {} lies on devices {:?}; the program runs on {:?}; move it \
                 there with jax.device_put",
                self.compiled.name, devices, self.devices
            ),
        ))
    }

    /// An exchange takes each shard for what its program says it is; XLA is not there to check.
    fn check_cut(&self, index: usize, buffer: &Buffer) -> Result<(), Status> {
        let wanted = self.compiled.parameters.as_ref().and_then(|all| all.get(index));
        let given = &buffer.spec.sharding;
        let wanted =
            wanted.map(|cut| Sharding { partition: cut.partition.clone(), ..given.clone() });
        let agrees = wanted.is_some_and(|wanted| {
            (0..given.devices.len()).all(|position| {
                let dims = &buffer.spec.dims;
                given.region(dims, position) == wanted.region(dims, position)
            })
        });
        if agrees {
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

/// A program whose hosts have not all answered yet.
#[derive(Debug)]
pub(crate) struct Compiling {
    pub id: ExecutableId,
    pub islands: Vec<(IslandId, u32)>,
    pub devices: Arc<[DeviceId]>,
    pub hosts: Arc<[HostId]>,
    pub compiled: Option<Box<Compiled>>,
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
    pub fn finish(self) -> Executable {
        let compiled = Arc::new(*self.compiled.expect("the leader's answer carries the program"));
        let outputs: Arc<[ArraySpec]> = compiled
            .outputs
            .iter()
            .map(|output| ArraySpec {
                dtype: output.dtype,
                dims: output.dims.clone(),
                sharding: Sharding {
                    devices: self.devices.clone(),
                    memory: output.memory.clone(),
                    partition: output.cut.partition.clone(),
                },
            })
            .collect();
        let output_specs = outputs.iter().cloned().map(Arc::new).collect();
        Executable {
            id: self.id,
            islands: self.islands,
            devices: self.devices,
            hosts: self.hosts,
            compiled,
            outputs,
            output_specs,
        }
    }
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
