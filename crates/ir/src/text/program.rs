//! Text format of programs: one line for each function, input and node.
//!
//! ```
//! let text = "\
//! program @step
//! function @double 1500ns 32flops 256bytes
//! function @sum collectives (all_reduce 8 of 4bytes on [0..2])
//! input %0: float32[8,4] tiled 2x1 on [0..2] carried from %1
//! node %1: float32[8,4] tiled 2x1 on [0..2] = call @double (%0)
//! node %2: float32[8,4] on [4,5] = move (%1) after (#0)
//! return (%2)
//! ";
//! let program = ir::Program::parse(text).unwrap();
//! assert_eq!(program.nodes.len(), 2);
//! assert_eq!(program.to_string(), text);
//! ```

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::sync::Arc;

use base::{DeviceId, Nanos};
use smallvec::SmallVec;

use super::step::read_collective;
use super::{List, Name, Ranges, TextError, Words, read_lines};
use crate::program::{
    Carried, Function, FunctionId, Node, NodeId, Operation, Program, ValueId, Work,
};
use crate::{ArraySpec, CollectiveOp, DType, Dims, Partition, Sharding, Sparse};

impl Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program @{}", Name(&self.name))?;
        for function in &self.functions {
            write!(f, "function @{}", Name(&function.name))?;
            if let Some(time) = function.time {
                write!(f, " {}ns", time.0)?;
            }
            if let Some(work) = function.work {
                write!(f, " {}flops {}bytes", work.flops, work.bytes)?;
            }
            if let Some(collectives) = &function.collectives {
                let collectives: Vec<String> =
                    collectives.iter().map(CollectiveOp::to_string).collect();
                write!(f, " collectives ({})", collectives.join(", "))?;
            }
            writeln!(f)?;
        }
        for input in 0..self.inputs {
            let donated = if self.donated.contains(&input) { " donated" } else { "" };
            let uploaded = if self.uploaded.contains(&input) { " uploaded" } else { "" };
            write!(f, "input %{input}: {}{donated}{uploaded}", Type(self.value(ValueId(input))))?;
            if let Some(carried) = self.carried.iter().find(|carried| carried.input == input) {
                write!(f, " carried from %{}", carried.from.0)?;
                if carried.steps_before != 1 {
                    write!(f, "@-{}", carried.steps_before)?;
                }
            }
            writeln!(f)?;
        }
        for node in &self.nodes {
            self.write_node(f, node)?;
        }
        let results: Vec<u32> = self.results.iter().map(|result| result.0).collect();
        writeln!(f, "return {}", List('%', &results))
    }
}

impl Program {
    fn write_node(&self, f: &mut fmt::Formatter<'_>, node: &Node) -> fmt::Result {
        write!(f, "node")?;
        for result in node.results.clone() {
            let space = if result == node.results.start { " " } else { ", " };
            write!(f, "{space}%{result}: {}", Type(self.value(ValueId(result))))?;
        }
        let args: Vec<u32> = node.args.iter().map(|arg| arg.0).collect();
        match &node.operation {
            Operation::Call { function, devices, donated } => {
                let name = Name(&self.functions[function.0 as usize].name);
                write!(f, " = call @{name} {}", List('%', &args))?;
                // The devices are those of the values, if there are any.
                if args.is_empty() && node.results.is_empty() {
                    write!(f, " on {}", Ranges(&devices.iter().map(|d| d.0).collect::<Vec<_>>()))?;
                }
                if !donated.is_empty() {
                    write!(f, " donating {}", List(' ', donated))?;
                }
            }
            Operation::Move { donated } => {
                let donating = if *donated { " donating" } else { "" };
                write!(f, " = move {}{donating}", List('%', &args))?;
            }
            Operation::Assemble => write!(f, " = assemble {}", List('%', &args))?,
            Operation::Sparse(sparse) => {
                write!(f, " = {sparse} {}", List('%', &args))?;
                if let Sparse::Dispatch { bins, credit, round } = sparse {
                    write!(f, " bins {bins} credit {credit} round {round}")?;
                }
            }
        }
        if !node.after.is_empty() {
            let after: Vec<u32> = node.after.iter().map(|after| after.0).collect();
            write!(f, " after {}", List('#', &after))?;
        }
        writeln!(f)
    }

    /// Parses the format that [`Display`] prints. Empty lines and `//` comments are ignored.
    ///
    /// # Errors
    /// The first line that cannot be parsed. [`Program::verify`] checks whether the program is valid.
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let mut reader = Reader::default();
        read_lines(text, |words| reader.line(words))?;
        Ok(reader.program)
    }
}

/// `float32[8,4] tiled 2x1 by [1,0] in "pinned_host" on [0..2]`.
struct Type<'a>(&'a ArraySpec);

impl Display for Type<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ArraySpec { dtype, dims, sharding } = self.0;
        let extents: Vec<String> = dims.iter().map(i64::to_string).collect();
        write!(f, "{}[{}]", dtype.name(), extents.join(","))?;
        match &sharding.partition {
            Partition::Replicated => {}
            Partition::Tiled { counts, tile_of } => {
                write!(f, " tiled {}", Shape(counts))?;
                if !tile_of.iter().copied().eq(0..tile_of.len() as u32) {
                    write!(f, " by {}", Ranges(tile_of))?;
                }
            }
            Partition::Even { shard } => write!(f, " even {}", Shape(shard))?,
            Partition::Uneven { shards } => {
                let shapes: Vec<String> = shards.iter().map(|s| Shape(s).to_string()).collect();
                write!(f, " uneven ({})", shapes.join(", "))?;
            }
        }
        if let Some(memory) = &sharding.memory {
            write!(f, " in @{}", Name(memory))?;
        }
        let devices: Vec<u32> = sharding.devices.iter().map(|device| device.0).collect();
        write!(f, " on {}", Ranges(&devices))
    }
}

/// Extents joined by `x`; `x` alone for a scalar.
struct Shape<'a>(&'a [i64]);

impl Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("x");
        }
        let extents: Vec<String> = self.0.iter().map(i64::to_string).collect();
        f.write_str(&extents.join("x"))
    }
}

/// State of the parser.
#[derive(Default)]
struct Reader {
    program: Program,
    functions: HashMap<String, FunctionId>,
    /// Device lists, shared by values.
    devices: HashMap<Vec<u32>, Arc<[DeviceId]>>,
}

/// Parses `(%1, %2)`.
fn values(words: &mut Words<'_>) -> Result<SmallVec<[ValueId; 8]>, TextError> {
    Ok(words.list("%")?.into_iter().map(ValueId).collect())
}

impl Reader {
    fn line(&mut self, words: &mut Words<'_>) -> Result<(), TextError> {
        if words.take("program") {
            self.program.name = words.name()?;
        } else if words.take("function") {
            let name = words.name()?;
            let time = words.quantity("ns").map(Nanos);
            let work = match words.quantity("flops") {
                Some(flops) => {
                    let bytes = words.number()?;
                    words.expect("bytes")?;
                    Some(Work { flops, bytes })
                }
                None => None,
            };
            let is_timed = time.is_some() || work.is_some();
            let collectives = match !is_timed && words.take("collectives") {
                true => Some(words.items("(", ")", read_collective)?),
                false => None,
            };
            let id = FunctionId(self.program.functions.len() as u32);
            self.functions.insert(name.clone(), id);
            self.program.functions.push(Function { name, time, work, collectives });
        } else if words.take("input") {
            if !self.program.nodes.is_empty() {
                return words.error("inputs before nodes");
            }
            self.value(words)?;
            let input = self.program.inputs;
            while !words.rest.is_empty() {
                if words.take("donated") {
                    self.program.donated.push(input);
                } else if words.take("uploaded") {
                    self.program.uploaded.push(input);
                } else if words.take("carried") {
                    words.expect("from")?;
                    words.expect("%")?;
                    let from = ValueId(words.number()?);
                    let steps_before = if words.take("@-") { words.number()? } else { 1 };
                    self.program.carried.push(Carried { input, from, steps_before });
                } else {
                    return words.error("donated, uploaded, carried from, or the end of the line");
                }
            }
            self.program.inputs += 1;
        } else if words.take("node") {
            self.node(words)?;
        } else if words.take("return") {
            self.program.results = words.list("%")?.into_iter().map(ValueId).collect();
        } else {
            return words.error("program, function, input, node or return");
        }
        Ok(())
    }

    /// Parses `%3: float32[8] on [0..2]`, which must be the next value.
    fn value(&mut self, words: &mut Words<'_>) -> Result<(), TextError> {
        words.expect("%")?;
        let number: usize = words.number()?;
        if number != self.program.values.len() {
            return words.error("values in order");
        }
        words.expect(":")?;
        let spec = self.spec(words)?;
        self.program.values.push(spec);
        Ok(())
    }

    fn spec(&mut self, words: &mut Words<'_>) -> Result<ArraySpec, TextError> {
        let Some(dtype) = DType::from_name(words.while_(|c| c.is_ascii_alphanumeric() || c == '_'))
        else {
            return words.error("an element type");
        };
        let dims: Dims = words.items("[", "]", |words| words.number())?.into();
        let mut tiles: Option<Dims> = None;
        let mut partition = Partition::Replicated;
        let mut tile_of = None;
        if words.take("tiled") {
            tiles = Some(words.shape()?);
            if words.take("by") {
                tile_of = Some(words.ranges()?);
            }
        } else if words.take("even") {
            partition = Partition::Even { shard: words.shape()? };
        } else if words.take("uneven") {
            partition = Partition::Uneven { shards: words.items("(", ")", Words::shape)?.into() };
        }
        let memory = if words.take("in") { Some(words.name()?.into()) } else { None };
        words.expect("on")?;
        let devices = self.devices(words.ranges()?);
        if let Some(counts) = tiles {
            let tile_of = tile_of.unwrap_or_else(|| (0..devices.len() as u32).collect()).into();
            partition = Partition::Tiled { counts, tile_of };
        }
        Ok(ArraySpec { dtype, dims, sharding: Sharding { devices, memory, partition } })
    }

    fn devices(&mut self, numbers: Vec<u32>) -> Arc<[DeviceId]> {
        let devices = self.devices.entry(numbers);
        let known = devices.or_insert_with_key(|all| all.iter().copied().map(DeviceId).collect());
        known.clone()
    }

    fn node(&mut self, words: &mut Words<'_>) -> Result<(), TextError> {
        let start = self.program.values.len() as u32;
        while !words.take("=") {
            if self.program.values.len() as u32 > start {
                words.expect(",")?;
            }
            self.value(words)?;
        }
        let results = start..self.program.values.len() as u32;
        let (operation, args) = if words.take("call") {
            let Some(&function) = self.functions.get(&words.name()?) else {
                return words.error("the name of a function");
            };
            let args = values(words)?;
            let devices = self.call_devices(words, &args, start)?;
            let donated =
                if words.take("donating") { words.list("")?.into() } else { SmallVec::new() };
            (Operation::Call { function, devices, donated }, args)
        } else if words.take("move") {
            let args = values(words)?;
            (Operation::Move { donated: words.take("donating") }, args)
        } else if words.take("assemble") {
            (Operation::Assemble, values(words)?)
        } else if words.take("collect") {
            (Operation::Sparse(Sparse::Collect), values(words)?)
        } else if words.take("reduce") {
            (Operation::Sparse(Sparse::Reduce), values(words)?)
        } else if words.take("gather") {
            (Operation::Sparse(Sparse::Gather), values(words)?)
        } else if words.take("scatter") {
            (Operation::Sparse(Sparse::Scatter), values(words)?)
        } else if words.take("dispatch") {
            let args = values(words)?;
            let mut field = |name| {
                words.expect(name)?;
                words.number()
            };
            let (bins, credit, round) = (field("bins")?, field("credit")?, field("round")?);
            (Operation::Sparse(Sparse::Dispatch { bins, credit, round }), args)
        } else {
            return words
                .error("call, move, assemble, dispatch, collect, reduce, gather or scatter");
        };
        let after = if words.take("after") { words.list("#")? } else { Vec::new() };
        let after = after.into_iter().map(NodeId).collect();
        self.program.nodes.push(Node { operation, args, results, after });
        Ok(())
    }

    /// Parses the devices of a call: those of its values, or explicit if there are none.
    fn call_devices(
        &mut self,
        words: &mut Words<'_>,
        args: &[ValueId],
        start: u32,
    ) -> Result<Arc<[DeviceId]>, TextError> {
        if words.take("on") {
            let numbers = words.ranges()?;
            return Ok(self.devices(numbers));
        }
        let read = args.first().filter(|arg| arg.0 < start);
        match self.program.values.get(read.map_or(start, |arg| arg.0) as usize) {
            Some(spec) => Ok(spec.sharding.devices.clone()),
            None => words.error("on [devices]"),
        }
    }
}
