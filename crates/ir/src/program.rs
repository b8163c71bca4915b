//! A program: a dataflow graph of sharded computations and moves, one node each whatever the
//! number of shards.
//!
//! Source: PATHWAYS §4.2-4.3. Devices in a program are virtual: numbers that mean nothing until
//! the program is lowered with a mapping to real ones.

use std::ops::Range;
use std::sync::Arc;

use base::{DeviceId, Nanos};
use smallvec::SmallVec;
use thiserror::Error;

use crate::{ArraySpec, Sparse};

/// A value of a program: the position of its description in [`Program::values`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ValueId(pub u32);

/// A node of a program: its position in [`Program::nodes`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

/// A compiled function of a program: its position in [`Program::functions`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FunctionId(pub u32);

/// What a node calls. The code lies elsewhere, under this name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Function {
    /// Unique within the program.
    pub name: String,
    /// Measured time of one run on each of its devices.
    pub time: Option<Nanos>,
    /// What one run is for each of its devices, as the compiler counts; none if it does not.
    pub work: Option<Work>,
}

/// How much a computation is, whatever computes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes of memory that are read and written.
    pub bytes: u64,
}

/// What a node does.
#[derive(Clone, PartialEq, Debug)]
pub enum Operation {
    /// Run a function on devices, all shards as one gang.
    Call {
        /// Which function.
        function: FunctionId,
        /// Its devices, in the order of its device assignment.
        devices: Arc<[DeviceId]>,
        /// Arguments whose memory its results may take.
        donated: SmallVec<[u32; 4]>,
    },
    /// Move each argument to the sharding of the result at its place.
    Move {
        /// May the arguments be gone afterwards?
        donated: bool,
    },
    /// Send rows to the shards that the data choose, or back.
    Sparse(Sparse),
}

/// One sharded computation, or one move of sharded arrays.
#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    /// What it does.
    pub operation: Operation,
    /// What it reads.
    pub args: SmallVec<[ValueId; 8]>,
    /// What it makes: consecutive values.
    pub results: Range<u32>,
    /// Earlier nodes that it must follow although it reads nothing of theirs.
    pub after: SmallVec<[NodeId; 2]>,
}

/// A loop-carried value: what `x` is in `x = step(x)`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Carried {
    /// The input of the next run.
    pub input: u32,
    /// The value of this run that it takes.
    pub from: ValueId,
}

/// A dataflow graph whose nodes are in an order in which they can run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// What its nodes call.
    pub functions: Vec<Function>,
    /// Every value: the inputs, then the results of each node in turn.
    pub values: Vec<ArraySpec>,
    /// How many values are inputs.
    pub inputs: u32,
    /// Inputs that are gone after a run.
    pub donated: Vec<u32>,
    /// Inputs that the next run of a loop takes from a value of this one, by input.
    pub carried: Vec<Carried>,
    /// Computations and moves.
    pub nodes: Vec<Node>,
    /// What a run returns.
    pub results: Vec<ValueId>,
}

/// Why a graph is no program.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ProgramError {
    /// A node reads what is not there yet.
    #[error("node {node} reads value {value}, which no earlier node makes")]
    Undefined {
        /// Which node; one past the last for the program's results.
        node: u32,
        /// What it reads.
        value: u32,
    },
    /// A node reads what an earlier one gave away.
    #[error("node {node} reads value {value}, which node {by} donated; keep it or copy it first")]
    Donated {
        /// Which node.
        node: u32,
        /// What it reads.
        value: u32,
        /// Who gave it away.
        by: u32,
    },
    /// The numbers of a node's results are not the next ones.
    #[error("the results of node {node} are values {found:?}; values must be made in order")]
    Order {
        /// Which node.
        node: u32,
        /// The numbers it gives its results.
        found: Range<u32>,
    },
    /// A node calls or follows something that does not exist.
    #[error("node {node} names {what} {number}; there are {count} before it")]
    Unknown {
        /// Which node.
        node: u32,
        /// What kind of thing.
        what: &'static str,
        /// Its number.
        number: u32,
        /// How many there are.
        count: u32,
    },
    /// A computation's values do not lie on its devices.
    #[error("value {value} of node {node} lies on other devices than the node runs on; move it")]
    Elsewhere {
        /// Which node.
        node: u32,
        /// Which value.
        value: u32,
    },
    /// A move changes more than the place of an array.
    #[error("node {node} moves value {from} to value {to} of another shape or element type")]
    Changed {
        /// Which node.
        node: u32,
        /// The argument.
        from: u32,
        /// The result.
        to: u32,
    },
    /// What the next run takes cannot be that of its input.
    #[error(
        "input {input} is carried from value {from}; expected a value of the program, of the type and \
         sharding of the input"
    )]
    Carried {
        /// Which input.
        input: u32,
        /// The value that the next run takes.
        from: u32,
    },
    /// A node has not as many of something as it needs.
    #[error("node {node} has {found} {what}; expected {expected}")]
    Count {
        /// Which node.
        node: u32,
        /// What kind of thing.
        what: &'static str,
        /// How many it has.
        found: u32,
        /// How many it needs, or a multiple.
        expected: u32,
    },
    /// A value cannot be what a sparse exchange takes or makes.
    #[error("value {value} of node {node} cannot be exchanged; expected {expected}")]
    Sparse {
        /// Which node.
        node: u32,
        /// Which value.
        value: u32,
        /// What it should have.
        expected: &'static str,
    },
}

impl Program {
    /// Description of a value.
    pub fn value(&self, value: ValueId) -> &ArraySpec {
        &self.values[value.0 as usize]
    }

    /// The last node that reads each value; none for results and for what nobody reads.
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

    /// Checks everything that must hold of a program.
    ///
    /// # Errors
    /// The first thing found that does not hold.
    pub fn verify(&self) -> Result<(), ProgramError> {
        let mut check = Check { program: self, defined: self.inputs, given: Vec::new() };
        check.given.resize(self.values.len(), None);
        for (number, node) in self.nodes.iter().enumerate() {
            check.node(number as u32, node)?;
        }
        let end = self.nodes.len() as u32;
        for result in &self.results {
            check.read(end, *result)?;
        }
        if check.defined != self.values.len() as u32 {
            let found = check.defined..self.values.len() as u32;
            return Err(ProgramError::Order { node: end, found });
        }
        for &Carried { input, from } in &self.carried {
            let is_alike = |from: &ArraySpec| *from == self.values[input as usize];
            let is_known = input < self.inputs;
            if !is_known || !self.values.get(from.0 as usize).is_some_and(is_alike) {
                return Err(ProgramError::Carried { input, from: from.0 });
            }
        }
        match self.donated.iter().find(|&&input| input >= self.inputs) {
            None => Ok(()),
            Some(&value) => Err(ProgramError::Undefined { node: end, value }),
        }
    }
}

/// A walk along the nodes.
struct Check<'a> {
    program: &'a Program,
    /// Values made so far.
    defined: u32,
    /// Who gave each value away.
    given: Vec<Option<u32>>,
}

impl Check<'_> {
    fn read(&self, node: u32, value: ValueId) -> Result<(), ProgramError> {
        if value.0 >= self.defined {
            return Err(ProgramError::Undefined { node, value: value.0 });
        }
        match self.given[value.0 as usize] {
            None => Ok(()),
            Some(by) => Err(ProgramError::Donated { node, value: value.0, by }),
        }
    }

    fn node(&mut self, number: u32, node: &Node) -> Result<(), ProgramError> {
        for &arg in &node.args {
            self.read(number, arg)?;
        }
        let results = node.results.clone();
        let made = self.program.values.len() as u32;
        if results.start != self.defined || results.end < results.start || results.end > made {
            return Err(ProgramError::Order { node: number, found: results });
        }
        if let Some(after) = node.after.iter().find(|after| after.0 >= number) {
            let (number, node) = (after.0, number);
            return Err(ProgramError::Unknown { node, what: "node", number, count: node });
        }
        self.defined = results.end;
        match &node.operation {
            Operation::Call { function, devices, donated } => {
                self.given_once(number, node, donated)?;
                let count = self.program.functions.len() as u32;
                if function.0 >= count {
                    let (what, number, node) = ("function", function.0, number);
                    return Err(ProgramError::Unknown { node, what, number, count });
                }
                self.on_devices(number, node, devices)?;
                self.donate(number, node, donated.iter().copied())
            }
            Operation::Move { donated } => {
                self.moves(number, node)?;
                let all = if *donated { node.args.len() as u32 } else { 0 };
                self.donate(number, node, 0..all)
            }
            Operation::Sparse(sparse) => sparse.ends(self.program, number, node).map(drop),
        }
    }

    fn on_devices(
        &self,
        number: u32,
        node: &Node,
        devices: &Arc<[DeviceId]>,
    ) -> Result<(), ProgramError> {
        let values = node.args.iter().map(|arg| arg.0).chain(node.results.clone());
        for value in values {
            let found = &self.program.values[value as usize].sharding.devices;
            if !Arc::ptr_eq(found, devices) && found != devices {
                return Err(ProgramError::Elsewhere { node: number, value });
            }
        }
        Ok(())
    }

    fn moves(&self, number: u32, node: &Node) -> Result<(), ProgramError> {
        let (found, expected) = (node.results.len() as u32, node.args.len() as u32);
        if found != expected {
            return Err(ProgramError::Count { node: number, what: "results", found, expected });
        }
        for (arg, result) in node.args.iter().zip(node.results.clone()) {
            let (from, to) = (self.program.value(*arg), self.program.value(ValueId(result)));
            if from.dims != to.dims || from.dtype != to.dtype {
                return Err(ProgramError::Changed { node: number, from: arg.0, to: result });
            }
        }
        Ok(())
    }

    /// What a call gives away is none of its other arguments: both would be one memory.
    fn given_once(&self, number: u32, node: &Node, donated: &[u32]) -> Result<(), ProgramError> {
        for &index in donated {
            let Some(&arg) = node.args.get(index as usize) else { continue };
            if node.args.iter().filter(|&&other| other == arg).count() > 1 {
                return Err(ProgramError::Donated { node: number, value: arg.0, by: number });
            }
        }
        Ok(())
    }

    fn donate(
        &mut self,
        number: u32,
        node: &Node,
        donated: impl Iterator<Item = u32>,
    ) -> Result<(), ProgramError> {
        for index in donated {
            let count = node.args.len() as u32;
            let Some(arg) = node.args.get(index as usize) else {
                let (what, number, node) = ("argument", index, number);
                return Err(ProgramError::Unknown { node, what, number, count });
            };
            self.given[arg.0 as usize] = Some(number);
        }
        Ok(())
    }
}
