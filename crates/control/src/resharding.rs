//! Reshardings that clients prepare once and run many times.

use std::sync::Arc;

use base::ExecutableId;
use bytes::Bytes;
use ir::{DType, Dims, Sharding};
use protocol::{Compiled, CompiledSharding, OutputSpec};

use crate::programs::{Executable, ExecutableForm};

/// A resharding of arrays of any shapes.
#[derive(Debug)]
pub struct Resharding {
    /// Sharding of each result.
    pub outputs: Vec<Sharding>,
    /// Whether the arguments are deleted.
    pub donates: bool,
}

impl Resharding {
    /// Returns it as an executable, which no host has to load.
    pub(crate) fn executable(self: Arc<Self>, id: ExecutableId) -> Executable {
        // What else is known of a result is that of its argument.
        let output = |sharding: &Sharding| OutputSpec {
            dtype: DType::Token,
            dims: Dims::new(),
            cut: CompiledSharding { partition: sharding.partition.clone(), encoded: Bytes::new() },
            memory: sharding.memory.clone(),
        };
        let compiled = Compiled {
            name: "reshard".to_owned(),
            outputs: self.outputs.iter().map(output).collect(),
            parameter_count: self.outputs.len() as u32,
            ..Compiled::default()
        };
        let devices = self.outputs.first().map_or_else(Arc::default, |first| first.devices.clone());
        Executable {
            id,
            form: ExecutableForm::Resharding(self),
            source: None,
            islands: Vec::new(),
            devices,
            hosts: Arc::default(),
            host_devices: Arc::default(),
            compiled: Arc::new(compiled),
            outputs: Arc::default(),
            output_specs: Vec::new(),
            output_hosts: Vec::new(),
        }
    }
}
