//! Text format of step graphs: one line for each node.
//!
//! ```
//! let text = "\
//! step @train on 4 devices
//! #0 @backward = compute 1500ns on [0..4] after (#3@-1)
//! #1 @gradients = all_reduce 1000 of 4bytes on [0..4] after (#0)
//! #2 = transfer 4096bytes from 0 to 3 after (#0)
//! #3 @update = compute 20ns on [0..4] after (#1, #2) priority 7
//! ";
//! let step = ir::StepGraph::parse(text).unwrap();
//! assert_eq!(step.to_string(), text);
//! ```

use std::fmt::{self, Display};
use std::sync::Arc;

use base::{Bytes, Nanos};

use super::{Name, Ranges, TextError, Words, read_lines};
use crate::collective::{Collective, CollectiveKind};
use crate::step::{CollectiveOp, Dependency, Devices, StepGraph, StepNode, StepOp};

/// Maximum size of a collective's vector in bytes.
const SIZE_MAX: u64 = 1 << 56;

impl Display for StepGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step @{} on {} devices", Name(&self.name), self.devices)?;
        if self.parts != 1 {
            write!(f, " in each of {} parts", self.parts)?;
        }
        writeln!(f)?;
        for (number, node) in (0..).zip(self.nodes()) {
            write!(f, "#{number}")?;
            if !node.name.is_empty() {
                write!(f, " @{}", Name(&node.name))?;
            }
            write!(f, " = {}", node.op)?;
            let after: Vec<String> =
                self.dependencies(number).iter().map(Dependency::to_string).collect();
            if !after.is_empty() {
                write!(f, " after ({})", after.join(", "))?;
            }
            if let Some(priority) = node.priority {
                write!(f, " priority {priority}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Display for Dependency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.steps_before {
            0 => write!(f, "#{}", self.node),
            steps => write!(f, "#{}@-{steps}", self.node),
        }
    }
}

impl Display for StepOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compute { devices, time } => {
                write!(f, "compute {}ns on {}", time.0, Ranges(devices))
            }
            Self::Transfer { source, target, size } => {
                write!(f, "transfer {}bytes from {source} to {target}", size.0)
            }
            Self::Collective(op) => op.fmt(f),
        }
    }
}

impl Display for CollectiveOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, elements) = (self.collective.kind(), self.collective.elements());
        write!(f, "{} ", kind.name())?;
        match kind {
            CollectiveKind::AllToAll { sizes } => {
                let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
                write!(f, "({})", sizes.join(", "))?;
            }
            CollectiveKind::Broadcast { root } | CollectiveKind::Reduce { root } => {
                write!(f, "{elements} root {root}")?;
            }
            _ => write!(f, "{elements}")?,
        }
        write!(f, " of {}bytes on {}", self.element_bytes, Ranges(&self.devices))
    }
}

impl StepGraph {
    /// Parses the format that [`Display`] prints. Empty lines and `//` comments are ignored.
    ///
    /// # Errors
    /// The first line that cannot be parsed. [`StepGraph::verify`] checks whether the step is valid.
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let mut step: Option<Self> = None;
        read_lines(text, |words| match &mut step {
            None => {
                step = Some(read_head(words)?);
                Ok(())
            }
            Some(step) => read_node(words, step),
        })?;
        let (line, expected) = (1, "step");
        step.ok_or(TextError { line, expected, found: String::new() })
    }
}

fn read_head(words: &mut Words<'_>) -> Result<StepGraph, TextError> {
    words.expect("step")?;
    let name = words.name()?;
    words.expect("on")?;
    let devices = words.number()?;
    words.expect("devices")?;
    let mut parts = 1;
    if words.take("in") {
        words.expect("each")?;
        words.expect("of")?;
        parts = words.number()?;
        words.expect("parts")?;
    }
    Ok(StepGraph::of_parts(name, devices, parts))
}

fn read_node(words: &mut Words<'_>, step: &mut StepGraph) -> Result<(), TextError> {
    words.expect("#")?;
    let before = words.rest;
    if words.number::<usize>()? != step.len() {
        words.rest = before;
        return words.error("nodes in order");
    }
    let name = if words.rest.starts_with('@') { words.name()?.into() } else { Arc::from("") };
    words.expect("=")?;
    let op = read_op(words)?;
    let after = match words.take("after") {
        true => words.items("(", ")", read_dependency)?,
        false => Vec::new(),
    };
    let priority = if words.take("priority") { Some(words.number()?) } else { None };
    step.add_node(StepNode { name, op, priority }, &after);
    Ok(())
}

fn read_dependency(words: &mut Words<'_>) -> Result<Dependency, TextError> {
    words.expect("#")?;
    let node = words.number()?;
    let steps_before = if words.take("@-") { words.number()? } else { 0 };
    Ok(Dependency { node, steps_before })
}

fn read_op(words: &mut Words<'_>) -> Result<StepOp, TextError> {
    if words.take("compute") {
        let time = Nanos(words.number()?);
        words.expect("ns")?;
        return Ok(StepOp::Compute { devices: read_devices(words)?, time });
    }
    if words.take("transfer") {
        let size = Bytes(words.number()?);
        words.expect("bytes")?;
        words.expect("from")?;
        let source = words.number()?;
        words.expect("to")?;
        return Ok(StepOp::Transfer { source, target: words.number()?, size });
    }
    Ok(StepOp::Collective(Box::new(read_collective(words)?)))
}

impl CollectiveOp {
    /// Parses the format that [`Display`] prints.
    ///
    /// # Errors
    /// Where the text cannot be parsed.
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let mut words = Words { rest: text, line: 1 };
        let collective = read_collective(&mut words)?;
        if words.rest.is_empty() { Ok(collective) } else { words.error("the end of the text") }
    }
}

pub(super) fn read_collective(words: &mut Words<'_>) -> Result<CollectiveOp, TextError> {
    let start = words.rest;
    let kind = words.while_(|c| c.is_ascii_alphabetic() || c == '_');
    words.rest = words.rest.trim_start();
    let mut sizes = Vec::new();
    let (mut elements, mut root) = (0, 0);
    if kind == "all_to_all" {
        sizes = words.items("(", ")", Words::number)?;
    } else {
        elements = words.number()?;
    }
    if words.take("root") {
        root = words.number()?;
    }
    words.expect("of")?;
    let element_bytes = words.number()?;
    words.expect("bytes")?;
    let devices = read_devices(words)?;
    let ranks = devices.len() as u32;
    let collective = match kind {
        "all_reduce" => Collective::all_reduce(ranks, elements),
        "reduce_scatter" => Collective::reduce_scatter(ranks, elements),
        "all_gather" => Collective::all_gather(ranks, elements),
        "broadcast" => Collective::broadcast(ranks, elements, root),
        "reduce" => Collective::reduce(ranks, elements, root),
        "all_to_all" => Collective::all_to_all_of(ranks, sizes.into()),
        _ => {
            words.rest = start;
            return words.error("compute, transfer or a collective");
        }
    };
    let is_small = |op: &Collective| {
        let bytes = op.elements().checked_mul(u64::from(element_bytes));
        bytes.is_some_and(|bytes| bytes <= SIZE_MAX)
    };
    match collective {
        Ok(collective) if is_small(&collective) => {
            Ok(CollectiveOp { collective, devices, element_bytes })
        }
        _ => {
            words.rest = start;
            words.error(
                "a collective whose root is a rank, with a block for each pair, of at most 2^48 \
                 elements and 2^56 bytes",
            )
        }
    }
}

fn read_devices(words: &mut Words<'_>) -> Result<Devices, TextError> {
    words.expect("on")?;
    Ok(words.ranges()?.into())
}
