//! Python functions of clients that run beside the hosts of their devices (`colocated_python`).

use bytes::Bytes;
use ir::ArraySpec;
use protocol::{Compiled, CompiledSharding, OutputSpec};

/// What a client's Python function takes and returns.
#[derive(Debug, Clone)]
pub struct Colocated {
    /// Its name.
    pub name: String,
    /// Its arguments.
    pub inputs: Vec<ArraySpec>,
    /// Its results.
    pub outputs: Vec<ArraySpec>,
    /// Whether its arguments may be of any element type, and not only of those of `inputs`.
    pub takes_any_type: bool,
    /// The user that it runs as; `None` for the hosts' own.
    pub user: Option<u32>,
}

impl Colocated {
    /// Returns its metadata, as of a compiled program.
    pub(crate) fn metadata(&self) -> Compiled {
        let cut = |spec: &ArraySpec| CompiledSharding {
            partition: spec.sharding.partition.clone(),
            encoded: Bytes::new(),
        };
        let layout = |spec: &ArraySpec| (0..spec.dims.len() as i64).rev().collect();
        let output = |spec: &ArraySpec| OutputSpec {
            dtype: spec.dtype,
            dims: spec.dims.clone(),
            cut: cut(spec),
            memory: spec.sharding.memory.clone(),
        };
        Compiled {
            name: self.name.clone(),
            parameters: Some(self.inputs.iter().map(cut).collect()),
            parameter_layouts: self.inputs.iter().map(layout).collect(),
            outputs: self.outputs.iter().map(output).collect(),
            output_layouts: self.outputs.iter().map(layout).collect(),
            parameter_count: self.inputs.len() as u32,
            ..Compiled::default()
        }
    }
}
