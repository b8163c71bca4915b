//! Programs: how hosts compile them, and what they report about them.

use std::sync::Arc;

use base::{HostId, InputId, TransferTag};
use ir::{ArraySpec, DType, Dims, Partition};

use crate::field::add_record;
use crate::{Encoder, Field, Sample, Schema};

record! { to hosts
    /// The message in which an executable travels between two hosts of an island.
    #[derive(Copy, Eq)]
    pub struct ExecutableMessage {
        /// The other host.
        pub host: HostId,
        /// The message.
        pub tag: TransferTag,
    }
}

/// Role of a host in a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CompileRole {
    /// Compile, then send the executable to these hosts.
    Leader(Vec<ExecutableMessage>),
    /// Load the executable received from this host; compile if loading fails.
    Follower(ExecutableMessage),
}

impl Field for CompileRole {
    fn python() -> String {
        "CompileRole".to_owned()
    }

    fn define(schema: &mut Schema) {
        ExecutableMessage::define(schema);
        let fields = [
            ("leads", "bool", "Whether to compile, or to load what the leader compiled."),
            ("peers", "list[ExecutableMessage]", "All followers; or the leader alone."),
        ];
        add_record(schema, "CompileRole", "Role of a host in a compilation.", &fields);
    }

    fn write(&self, out: &mut Encoder<'_>) {
        let (leads, peers) = match self {
            Self::Leader(followers) => (true, &followers[..]),
            Self::Follower(leader) => (false, std::slice::from_ref(leader)),
        };
        out.array(2);
        out.bool(leads);
        out.array(peers.len());
        peers.iter().for_each(|peer| peer.write(out));
    }
}

impl Sample for CompileRole {
    fn sample(random: &mut base::Random) -> Self {
        match bool::sample(random) {
            true => Self::Leader(Sample::sample(random)),
            false => Self::Follower(Sample::sample(random)),
        }
    }
}

/// Properties of a cost analysis, by name.
pub type CostAnalysis = Vec<(String, f64)>;

/// Memory statistics in bytes: generated code, arguments, outputs, aliases, temporaries, then the
/// same five on the host, then the peak.
pub type MemoryStats = [i64; 11];

record! { from hosts
    /// One function of a whole program.
    pub struct FunctionCode {
        /// Names under which its compile options may be found, in order of preference.
        pub options: Vec<String>,
        /// Portable artifact.
        pub artifact: Vec<u8>,
    }
}

record! { from hosts
    /// One function of a program that was partitioned over islands.
    pub struct PartitionedFunction {
        /// Whether it is a collective between islands; others are computations of each island.
        pub is_crossing: bool,
        /// Whether the first parameter of the computation is the number of the island.
        pub takes_island: bool,
        /// Portable artifact, or the collective.
        pub code: Vec<u8>,
    }
}

record! { from hosts
    /// The partition of a parameter or result, and the compiler's own encoding of it.
    pub struct CompiledSharding {
        /// How it is partitioned over the program's devices.
        pub partition: Partition,
        /// Serialized `OpSharding`, which can express more (such as partial sums that are not yet
        /// reduced); empty if there is none. The controller only forwards it.
        pub encoded: bytes::Bytes,
    }
}

record! { from hosts
    /// One result of a program.
    pub struct OutputSpec {
        /// Element type.
        pub dtype: DType,
        /// Shape of the whole array.
        pub dims: Dims,
        /// How it is partitioned over the program's devices.
        pub cut: CompiledSharding,
        /// Memory kind, if not the default.
        pub memory: Option<Arc<str>>,
    }
}

record! { from hosts
    /// A collective of hosts, in a program over several islands.
    pub struct HostCollective {
        /// Index of the program's operation that it is part of.
        pub operation: u32,
        /// The collective, as [`ir::CollectiveOp`] prints it; its ranks are a device of each host, as
        /// an index into the program's devices.
        pub text: String,
    }
}

record! { from hosts
    /// Metadata of a compiled program.
    #[derive(Default)]
    pub struct Compiled as "ProgramMetadata" {
        /// Name of the program.
        pub name: String,
        /// Digest of the compiled program, if the compiler provides one.
        pub fingerprint: Option<Vec<u8>>,
        /// Partition of each parameter; none if the compiler does not report them.
        pub parameters: Option<Vec<CompiledSharding>>,
        /// Minor-to-major axes of each parameter.
        pub parameter_layouts: Vec<Vec<i64>>,
        /// Each result.
        pub outputs: Vec<OutputSpec>,
        /// Minor-to-major axes of each result.
        pub output_layouts: Vec<Vec<i64>>,
        /// Parameters whose buffers the results may reuse.
        pub donated: Vec<u32>,
        /// Number of parameters.
        pub parameter_count: u32,
        /// Memory statistics in bytes, if the compiler reports them: generated code, arguments,
        /// outputs, aliases, temporaries, then the same five on the host, then the peak.
        pub memory: Option<MemoryStats>,
        /// Size of the generated code in bytes.
        pub code_bytes: i64,
        /// Estimated cost, by name of the property; none if it was not compiled by XLA.
        pub costs: Option<CostAnalysis>,
        /// The input whose next batch a run returns; none if it computes something.
        pub input: Option<InputId>,
        /// Collectives of this host in a program over several islands, in order.
        pub collectives: Vec<HostCollective>,
    }
}

impl Compiled {
    /// Returns the metadata of a program that takes and returns arrays as they are described.
    pub fn of_arrays(name: String, inputs: &[ArraySpec], outputs: &[ArraySpec]) -> Self {
        let cut = |spec: &ArraySpec| CompiledSharding {
            partition: spec.sharding.partition.clone(),
            encoded: bytes::Bytes::new(),
        };
        let layout = |spec: &ArraySpec| (0..spec.dims.len() as i64).rev().collect();
        let output = |spec: &ArraySpec| OutputSpec {
            dtype: spec.dtype,
            dims: spec.dims.clone(),
            cut: cut(spec),
            memory: spec.sharding.memory.clone(),
        };
        Self {
            name,
            parameters: Some(inputs.iter().map(cut).collect()),
            parameter_layouts: inputs.iter().map(layout).collect(),
            outputs: outputs.iter().map(output).collect(),
            output_layouts: outputs.iter().map(layout).collect(),
            parameter_count: inputs.len() as u32,
            ..Self::default()
        }
    }
}
