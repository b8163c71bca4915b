//! A program: a dataflow graph of sharded computations and transfers, one node each whatever the number
//! of shards.
//!
//! Source: PATHWAYS §4.2-4.3. Devices in a program are virtual: numbers without meaning until the
//! program is lowered with a mapping to physical devices.

use std::ops::Range;
use std::sync::Arc;

use base::{DeviceId, Nanos};
use smallvec::SmallVec;
use thiserror::Error;

use crate::{ArraySpec, CollectiveOp, Sparse};

/// A value of a program: the index of its description in [`Program::values`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ValueId(pub u32);

/// A node of a program: its index in [`Program::nodes`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

/// A compiled function of a program: its index in [`Program::functions`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FunctionId(pub u32);

/// A function that nodes call. Its code is stored elsewhere, under this name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Function {
    /// Unique within the program.
    pub name: String,
    /// Measured time of one execution on each of its devices.
    pub time: Option<Nanos>,
    /// The compiler's cost estimate of one execution on each of its devices, if there is one.
    pub work: Option<Work>,
    /// The collectives between hosts that it consists of, in order, if it is executed by teams of
    /// hosts instead of XLA. Their devices are indices into the devices of a call, one for each host of
    /// a team.
    pub collectives: Option<Vec<CollectiveOp>>,
}

/// The hardware-independent cost of a computation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes of memory that are read or written.
    pub bytes: u64,
}

/// The operation of a node.
#[derive(Clone, PartialEq, Debug)]
pub enum Operation {
    /// Execute a function on devices, all shards as one gang.
    Call {
        /// The function.
        function: FunctionId,
        /// Its devices, in the order of its device assignment.
        devices: Arc<[DeviceId]>,
        /// Indices of arguments whose memory the results may reuse (donation).
        donated: SmallVec<[u32; 4]>,
    },
    /// Transfer or reshard each argument to the sharding of the result at the same index.
    Move {
        /// Whether the arguments are donated.
        donated: bool,
    },
    /// Exchange rows with the shards that the data choose, or reduce over groups.
    Sparse(Sparse),
    /// Make an array of shards of the arguments, which stay on their devices.
    Assemble,
}

/// One sharded computation, or one transfer of sharded arrays.
#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    /// What it does.
    pub operation: Operation,
    /// The values that it reads.
    pub args: SmallVec<[ValueId; 8]>,
    /// The values that it produces, which are consecutive.
    pub results: Range<u32>,
    /// Earlier nodes that it must follow without reading their results (control dependencies).
    pub after: SmallVec<[NodeId; 2]>,
}

/// A loop-carried value, such as `x` in `x = step(x)`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Carried {
    /// The input of the next iteration.
    pub input: u32,
    /// The value that the input takes, of an earlier iteration.
    pub from: ValueId,
    /// How many iterations earlier: 1 is the previous one.
    pub steps_before: u32,
}

/// A dataflow graph whose nodes are in topological order.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// The functions that its nodes call.
    pub functions: Vec<Function>,
    /// All values: the inputs, then the results of each node in order.
    pub values: Vec<ArraySpec>,
    /// Number of inputs.
    pub inputs: u32,
    /// Inputs that are donated: they do not exist after an execution.
    pub donated: Vec<u32>,
    /// Inputs that the client sends in each iteration.
    pub uploaded: Vec<u32>,
    /// Loop-carried values, ordered by input.
    pub carried: Vec<Carried>,
    /// The nodes, in topological order.
    pub nodes: Vec<Node>,
    /// The values that an execution returns.
    pub results: Vec<ValueId>,
}

/// Why a graph is not a valid program.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ProgramError {
    /// A node reads a value that is not defined yet.
    #[error("node {node} reads value {value}, which no earlier node makes")]
    Undefined {
        /// The node; one past the last for the program's results.
        node: u32,
        /// The value.
        value: u32,
    },
    /// A node reads a value that an earlier node donated, or passes an argument twice that it donates.
    #[error("node {node} reads value {value}, which node {by} donated; keep it or copy it first")]
    Donated {
        /// The node.
        node: u32,
        /// The value.
        value: u32,
        /// The node that donated it.
        by: u32,
    },
    /// The results of a node are not the next values in order.
    #[error("the results of node {node} are values {found:?}; values must be made in order")]
    Order {
        /// The node.
        node: u32,
        /// The values of its results.
        found: Range<u32>,
    },
    /// A node refers to something that does not exist.
    #[error("node {node} names {what} {number}; there are {count} before it")]
    Unknown {
        /// The node.
        node: u32,
        /// The kind of thing.
        what: &'static str,
        /// Its number.
        number: u32,
        /// How many there are.
        count: u32,
    },
    /// The values of a computation are not on its devices.
    #[error("value {value} of node {node} lies on other devices than the node runs on; move it")]
    Elsewhere {
        /// The node.
        node: u32,
        /// The value.
        value: u32,
    },
    /// A collective of a function is not of devices of its call.
    #[error(
        "node {node} calls a function with a collective of devices {found:?} of the call; expected two \
         or more different ones, each below {count}"
    )]
    Ranks {
        /// The node.
        node: u32,
        /// The ranks of the collective.
        found: Vec<u32>,
        /// Number of devices of the call.
        count: u32,
    },
    /// An array is assembled from shards that its arguments do not have.
    #[error(
        "node {node} cannot assemble value {value}; expected shards that its arguments have, of their \
         element type and shape, on the same devices"
    )]
    Assembled {
        /// The node.
        node: u32,
        /// The value.
        value: u32,
    },
    /// An input comes from the client and from the previous iteration.
    #[error("input {input} is uploaded and carried; expected one of them")]
    Uploaded {
        /// The input.
        input: u32,
    },
    /// A transfer changes more than the sharding of an array.
    #[error("node {node} moves value {from} to value {to} of another shape or element type")]
    Changed {
        /// The node.
        node: u32,
        /// The argument.
        from: u32,
        /// The result.
        to: u32,
    },
    /// A loop-carried value does not match its input.
    #[error(
        "input {input} is carried from value {from}; expected a value of the program, of the type and \
         sharding of the input, and of an earlier step"
    )]
    Carried {
        /// The input.
        input: u32,
        /// The value that the next iteration takes.
        from: u32,
    },
    /// A node has the wrong number of arguments or results.
    #[error("node {node} has {found} {what}; expected {expected}")]
    Count {
        /// The node.
        node: u32,
        /// The kind of thing.
        what: &'static str,
        /// How many it has.
        found: u32,
        /// The expected number; in exchanges, any multiple of it.
        expected: u32,
    },
    /// A value is not valid in a sparse exchange.
    #[error("value {value} of node {node} cannot be exchanged; expected {expected}")]
    Sparse {
        /// The node.
        node: u32,
        /// The value.
        value: u32,
        /// The expected property.
        expected: &'static str,
    },
}

impl Program {
    /// Returns the description of a value.
    pub fn value(&self, value: ValueId) -> &ArraySpec {
        &self.values[value.0 as usize]
    }

    /// Returns the last node that reads each value; `None` for results and for values that are never
    /// read.
    pub fn last_uses(&self) -> Vec<Option<NodeId>> {
        let mut last = vec![None; self.values.len()];
        for (number, node) in self.nodes.iter().enumerate() {
            for arg in &node.args {
                last[arg.0 as usize] = Some(NodeId(number as u32));
            }
        }
        for result in &self.results {
            last[result.0 as usize] = None;
        }
        last
    }
}
