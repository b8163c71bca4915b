//! Whole programs that are being compiled, and checks of them.
//!
//! A host parses the program, as it has the compiler; the controller compiles each function on the
//! hosts where it runs, lowers the program, and sends each host its part once. A run is then one
//! message to each host.

use std::sync::Arc;

use base::{ClientId, Code, DeviceId, Status};
use ir::{ArraySpec, Operation, Program, Sharding};

use crate::lower;
use crate::programs::{Executable, Partitioned, Purpose};
use crate::sources::{CompileSource, SourceKind};
use protocol::{Compiled, FunctionCode};

/// A program that a host is parsing.
#[derive(Debug)]
pub(crate) struct Reading {
    /// Compile options and grid of each function.
    pub options: Vec<(String, Vec<u8>, (u32, u32))>,
    /// The device that each device number in the program refers to.
    pub devices: Arc<[DeviceId]>,
}

impl Reading {
    /// Returns what a function of the program, which runs on these devices, is compiled from.
    pub fn source(&self, code: FunctionCode, devices: Arc<[DeviceId]>) -> CompileSource {
        let known = |name: &String| self.options.iter().find(|known| known.0 == *name);
        let (options, grid) = match code.options.iter().find_map(known) {
            Some((_, options, grid)) => (options.clone(), *grid),
            None => (Vec::new(), (1, devices.len() as u32)),
        };
        let (program, options) = (Arc::new(code.artifact), Arc::new(options));
        CompileSource { program, options, devices, grid, kind: SourceKind::Whole }
    }
}

/// A program whose functions are being compiled.
#[derive(Debug)]
pub(crate) struct Assembling {
    pub client: ClientId,
    pub purpose: Purpose,
    /// As it was parsed, on physical devices.
    pub source: Program,
    /// The same as it runs, with runs of small calls batched.
    pub program: Program,
    /// The one computation that it was partitioned from, if it was.
    pub partitioned: Option<Arc<Partitioned>>,
    functions: Vec<Option<Executable>>,
    /// Number of functions that are not yet compiled on all their hosts.
    missing: usize,
    error: Option<Status>,
}

impl Assembling {
    /// Creates a program of `count` functions, none of which is compiled.
    pub fn new(
        client: ClientId,
        purpose: Purpose,
        (source, program): (Program, Program),
        partitioned: Option<Arc<Partitioned>>,
        count: usize,
    ) -> Self {
        let functions = std::iter::repeat_with(|| None).take(count).collect();
        Self {
            client,
            purpose,
            source,
            program,
            partitioned,
            functions,
            missing: count,
            error: None,
        }
    }

    /// A function is compiled on all its hosts.
    pub fn add(&mut self, index: usize, function: Executable) {
        self.functions[index] = Some(function);
        self.missing -= 1;
    }

    /// A function cannot be compiled.
    pub fn fail(&mut self, error: Status) {
        self.missing -= 1;
        self.error.get_or_insert(error);
    }

    /// Returns whether no function is being compiled any more.
    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Takes the functions that are compiled, and the first error of the others.
    pub fn take_functions(&mut self) -> (Vec<Arc<Executable>>, Option<Status>) {
        let functions = std::mem::take(&mut self.functions);
        (functions.into_iter().flatten().map(Arc::new).collect(), self.error.take())
    }
}

/// Returns the error of a program that cannot be run.
pub(crate) fn malformed(error: &dyn std::fmt::Display) -> Status {
    Status::new(Code::InvalidArgument, format!("the program makes no sense: {error}"))
}

/// Parses a program and binds it to physical devices.
pub(crate) fn read(text: &str, devices: &[DeviceId]) -> Result<Program, Status> {
    let mut program = Program::parse(text).map_err(|error| malformed(&error))?;
    program.verify().map_err(|error| malformed(&error))?;
    lower::bind(&mut program, devices).map_err(|number| {
        let count = devices.len();
        malformed(&format!("device {number} is named; the program was given {count} devices"))
    })?;
    Ok(program)
}

/// Returns the devices of each function; each function runs on one list of devices only.
pub(crate) fn function_places(program: &Program) -> Result<Vec<Arc<[DeviceId]>>, Status> {
    let mut places: Vec<Option<Arc<[DeviceId]>>> = vec![None; program.functions.len()];
    for node in &program.nodes {
        let Operation::Call { function, devices, .. } = &node.operation else { continue };
        let place = places[function.0 as usize].get_or_insert_with(|| devices.clone());
        if place != devices {
            let name = &program.functions[function.0 as usize].name;
            let error = format!("function {name} is called on devices {place:?} and {devices:?}");
            return Err(malformed(&error));
        }
    }
    places
        .into_iter()
        .zip(&program.functions)
        .map(|(place, function)| {
            place.ok_or_else(|| malformed(&format!("no node calls function {}", function.name)))
        })
        .collect()
}

/// Fails unless each compiled function matches the program's description of its values.
pub(crate) fn check_functions(
    program: &Program,
    functions: &[Arc<Executable>],
) -> Result<(), Status> {
    for node in &program.nodes {
        let Operation::Call { function, .. } = &node.operation else { continue };
        let function = &functions[function.0 as usize];
        let name = &function.compiled.name;
        let is_whole = function.source.as_ref().is_none_or(|source| source.is_whole());
        let counts = (function.compiled.parameter_count as usize, function.outputs.len());
        if counts != (node.args.len(), node.results.len()) {
            return Err(malformed(&format!(
                "{name} has {} parameters and {} results; it is called with {} and for {}",
                counts.0,
                counts.1,
                node.args.len(),
                node.results.len()
            )));
        }
        for (arg, index) in node.args.iter().zip(0..).filter(|_| is_whole) {
            let cuts = function.compiled.parameters.as_ref();
            let wanted = program.value(*arg);
            let Some(cut) = cuts.and_then(|cuts| cuts.get(index)) else { continue };
            let sharding = Sharding { partition: cut.partition.clone(), ..wanted.sharding.clone() };
            check_cut(name, arg.0, wanted, &ArraySpec { sharding, ..wanted.clone() })?;
        }
        for (result, made) in node.results.clone().zip(function.outputs.iter()) {
            let described = &program.values[result as usize];
            if is_whole {
                check_cut(name, result, described, made)?;
            } else {
                check_shard(name, result, described, made)?;
            }
        }
    }
    Ok(())
}

/// Fails unless a computation of each island makes shards of the shape in the program.
fn check_shard(
    function: &str,
    value: u32,
    described: &ArraySpec,
    compiled: &ArraySpec,
) -> Result<(), Status> {
    let shard = |spec: &ArraySpec| spec.sharding.shard_dims(&spec.dims, 0);
    if described.dtype == compiled.dtype && shard(described) == shard(compiled) {
        return Ok(());
    }
    Err(malformed(&format!(
        "shards of value {value} are {:?} of {}; {function} makes {:?} of {}",
        shard(described),
        described.dtype.name(),
        shard(compiled),
        compiled.dtype.name(),
    )))
}

/// Fails unless a compiled function takes or makes a value with the spec in the program.
fn check_cut(
    function: &str,
    value: u32,
    described: &ArraySpec,
    compiled: &ArraySpec,
) -> Result<(), Status> {
    let same = described.dims == compiled.dims
        && described.dtype == compiled.dtype
        && described.sharding.cuts_like(&compiled.sharding, &described.dims);
    if same {
        return Ok(());
    }
    Err(malformed(&format!(
        "value {value} is {:?} of {} cut {:?}; {function} was compiled for {:?} of {} cut {:?}",
        described.dims,
        described.dtype.name(),
        described.sharding.partition,
        compiled.dims,
        compiled.dtype.name(),
        compiled.sharding.partition
    )))
}

/// Returns the metadata of a whole program for clients.
pub(crate) fn describe(program: &Program, inputs: &[ArraySpec], outputs: &[ArraySpec]) -> Compiled {
    Compiled {
        donated: program.donated.clone(),
        ..Compiled::of_arrays(program.name.clone(), inputs, outputs)
    }
}
