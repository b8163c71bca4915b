//! Programs as text: one line for each function, input and node.
//!
//! ```
//! let text = "\
//! program @step
//! function @double 1500ns 32flops 256bytes
//! input %0: float32[8,4] tiled 2x1 on [0..2]
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
use thiserror::Error;

use crate::program::{Function, FunctionId, Node, NodeId, Operation, Program, ValueId, Work};
use crate::{ArraySpec, DType, Dims, Partition, Sharding, Sparse};

/// Most devices or tiles that a text may name at once.
const COUNT_LIMIT: u32 = 1 << 20;

/// Why a text is no program.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("line {line}: expected {expected}, found {found:?}")]
pub struct TextError {
    /// Which line, the first being 1.
    pub line: u32,
    /// What should have been there.
    pub expected: &'static str,
    /// What is there.
    pub found: String,
}

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
            writeln!(f)?;
        }
        for input in 0..self.inputs {
            let donated = if self.donated.contains(&input) { " donated" } else { "" };
            writeln!(f, "input %{input}: {}{donated}", Type(self.value(ValueId(input))))?;
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
        write!(f, "node ")?;
        for result in node.results.clone() {
            let comma = if result == node.results.start { "" } else { ", " };
            write!(f, "{comma}%{result}: {}", Type(self.value(ValueId(result))))?;
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

    /// Reads what [`Display`] writes. Empty lines and what follows `//` mean nothing.
    ///
    /// # Errors
    /// The first line that cannot be read. Whether the program makes sense, [`Program::verify`]
    /// tells.
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let mut reader = Reader::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.split("//").next().unwrap_or_default();
            let mut words = Words { rest: line.trim(), line: number as u32 + 1 };
            if !words.rest.is_empty() {
                reader.line(&mut words)?;
            }
        }
        Ok(reader.program)
    }
}

/// A name, in quotes if it needs them.
struct Name<'a>(&'a str);

impl Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.is_empty() && self.0.chars().all(is_plain) {
            return f.write_str(self.0);
        }
        let escaped = self.0.bytes().flat_map(|byte| match byte {
            b'"' | b'\\' | b'/' | b'\0'..=b' ' => format!("\\{byte:02x}").into_bytes(),
            byte => vec![byte],
        });
        write!(f, "\"{}\"", String::from_utf8_lossy(&escaped.collect::<Vec<u8>>()))
    }
}

fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '.' | '$' | '-')
}

/// Numbers in parentheses, each behind a mark.
struct List<'a>(char, &'a [u32]);

impl Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.0 == ' ' { String::new() } else { self.0.to_string() };
        let items: Vec<String> = self.1.iter().map(|number| format!("{mark}{number}")).collect();
        write!(f, "({})", items.join(", "))
    }
}

/// Numbers in brackets, runs of three or more as `first..end`.
struct Ranges<'a>(&'a [u32]);

impl Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items = Vec::new();
        let mut rest = self.0;
        while let Some(&first) = rest.first() {
            let run = rest.iter().zip(first..).take_while(|(found, next)| *found == next).count();
            if run > 2 || (run == 2 && self.0.len() == 2 && first == 0) {
                items.push(format!("{first}..{}", first + run as u32));
                rest = &rest[run..];
            } else {
                items.push(first.to_string());
                rest = &rest[1..];
            }
        }
        write!(f, "[{}]", items.join(","))
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

/// Extents with an `x` between them; `x` alone for a scalar.
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

/// What is left of a line.
struct Words<'a> {
    rest: &'a str,
    line: u32,
}

impl<'a> Words<'a> {
    fn error<T>(&self, expected: &'static str) -> Result<T, TextError> {
        let found = self.rest.chars().take(40).collect();
        Err(TextError { line: self.line, expected, found })
    }

    /// Takes `mark` if it comes next.
    fn take(&mut self, mark: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(mark) else { return false };
        let word = mark.ends_with(|c: char| c.is_ascii_alphanumeric());
        if word && rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
            return false;
        }
        self.rest = rest.trim_start();
        true
    }

    fn expect(&mut self, mark: &'static str) -> Result<(), TextError> {
        if self.take(mark) { Ok(()) } else { self.error(mark) }
    }

    fn while_(&mut self, test: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !test(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T, TextError> {
        let before = self.rest;
        match self.while_(|c| c.is_ascii_digit() || c == '-').parse() {
            Ok(number) => {
                self.rest = self.rest.trim_start();
                Ok(number)
            }
            Err(_) => {
                self.rest = before;
                self.error("a number")
            }
        }
    }

    /// A number of this unit, if that comes next.
    fn quantity(&mut self, unit: &str) -> Option<u64> {
        let before = self.rest;
        let number = self.number().ok();
        let found = number.filter(|_| self.take(unit));
        if found.is_none() {
            self.rest = before;
        }
        found
    }

    fn name(&mut self) -> Result<String, TextError> {
        if !self.rest.starts_with('@') {
            return self.error("@name");
        }
        self.rest = &self.rest[1..];
        if !self.rest.starts_with('"') {
            let name = self.while_(is_plain).to_owned();
            self.rest = self.rest.trim_start();
            return Ok(name);
        }
        self.rest = &self.rest[1..];
        let quoted = self.while_(|c| c != '"');
        self.expect("\"")?;
        let mut bytes = Vec::new();
        let mut rest = quoted.as_bytes();
        while let [first, after @ ..] = rest {
            let code = after.get(..2).and_then(|code| std::str::from_utf8(code).ok());
            match (first, code.and_then(|code| u8::from_str_radix(code, 16).ok())) {
                (b'\\', Some(byte)) => {
                    bytes.push(byte);
                    rest = &after[2..];
                }
                (byte, _) => {
                    bytes.push(*byte);
                    rest = after;
                }
            }
        }
        String::from_utf8(bytes).or_else(|_| self.error("a name in UTF-8"))
    }

    /// `(%1, %2)`: numbers behind marks.
    fn list(&mut self, mark: &str) -> Result<Vec<u32>, TextError> {
        self.items("(", ")", |words| {
            if mark.is_empty() || words.take(mark) {
                words.number()
            } else {
                words.error("a value or node")
            }
        })
    }

    /// `(%1, %2)`.
    fn values(&mut self) -> Result<SmallVec<[ValueId; 8]>, TextError> {
        Ok(self.list("%")?.into_iter().map(ValueId).collect())
    }

    fn items<T>(
        &mut self,
        open: &'static str,
        close: &'static str,
        mut item: impl FnMut(&mut Self) -> Result<T, TextError>,
    ) -> Result<Vec<T>, TextError> {
        self.expect(open)?;
        let mut items = Vec::new();
        while !self.take(close) {
            if !items.is_empty() {
                self.expect(",")?;
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// `[0..4,7]`.
    fn ranges(&mut self) -> Result<Vec<u32>, TextError> {
        let mut numbers = Vec::new();
        self.items("[", "]", |words| {
            let first: u32 = words.number()?;
            let end = if words.take("..") { words.number()? } else { first.saturating_add(1) };
            if end.saturating_sub(first) > COUNT_LIMIT || numbers.len() as u32 > COUNT_LIMIT {
                return words.error("fewer numbers");
            }
            numbers.extend(first..end);
            Ok(())
        })?;
        Ok(numbers)
    }

    fn shape(&mut self) -> Result<Dims, TextError> {
        let mut dims = Dims::new();
        if self.take("x") {
            return Ok(dims);
        }
        loop {
            dims.push(self.number()?);
            if !self.rest.starts_with('x') {
                return Ok(dims);
            }
            self.rest = &self.rest[1..];
        }
    }
}

/// What has been read so far.
#[derive(Default)]
struct Reader {
    program: Program,
    functions: HashMap<String, FunctionId>,
    /// Values share their device lists.
    devices: HashMap<Vec<u32>, Arc<[DeviceId]>>,
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
            let id = FunctionId(self.program.functions.len() as u32);
            self.functions.insert(name.clone(), id);
            self.program.functions.push(Function { name, time, work });
        } else if words.take("input") {
            if !self.program.nodes.is_empty() {
                return words.error("inputs before nodes");
            }
            self.value(words)?;
            if words.take("donated") {
                self.program.donated.push(self.program.inputs);
            }
            self.program.inputs += 1;
        } else if words.take("node") {
            self.node(words)?;
        } else if words.take("return") {
            self.program.results = words.list("%")?.into_iter().map(ValueId).collect();
        } else {
            return words.error("program, function, input, node or return");
        }
        if words.rest.is_empty() { Ok(()) } else { words.error("the end of the line") }
    }

    /// `%3: float32[8] on [0..2]`, which must be the next value.
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
            let args = words.values()?;
            let devices = self.call_devices(words, &args, start)?;
            let donated =
                if words.take("donating") { words.list("")?.into() } else { SmallVec::new() };
            (Operation::Call { function, devices, donated }, args)
        } else if words.take("move") {
            let args = words.values()?;
            (Operation::Move { donated: words.take("donating") }, args)
        } else if words.take("collect") {
            (Operation::Sparse(Sparse::Collect), words.values()?)
        } else if words.take("reduce") {
            (Operation::Sparse(Sparse::Reduce), words.values()?)
        } else if words.take("gather") {
            (Operation::Sparse(Sparse::Gather), words.values()?)
        } else if words.take("scatter") {
            (Operation::Sparse(Sparse::Scatter), words.values()?)
        } else if words.take("dispatch") {
            let args = words.values()?;
            let mut field = |name| {
                words.expect(name)?;
                words.number()
            };
            let (bins, credit, round) = (field("bins")?, field("credit")?, field("round")?);
            (Operation::Sparse(Sparse::Dispatch { bins, credit, round }), args)
        } else {
            return words.error("call, move, dispatch, collect, reduce, gather or scatter");
        };
        let after = if words.take("after") { words.list("#")? } else { Vec::new() };
        let after = after.into_iter().map(NodeId).collect();
        self.program.nodes.push(Node { operation, args, results, after });
        Ok(())
    }

    /// The devices of a call: those of its values, or named where it has none.
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
