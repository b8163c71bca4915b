//! Python bindings of programs.

use std::collections::{BTreeMap, BTreeSet};

use ir::{Operation, Program, Sparse, ValueId};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::wrong;

/// Parses a program, and summarizes it as plain dictionaries and lists.
///
/// `functions` are those that compute; of the others, `collectives` has a tuple for each collective:
/// function, kind, a device of each host, bytes, calls. `uploaded` has the bytes of each input that the
/// client sends in each iteration.
///
/// Raises `ValueError` if the text cannot be parsed or the program is invalid.
#[pyfunction]
pub(crate) fn read_program<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyDict>> {
    let program = parse_program(text)?;
    let mut calls = Calls::new();
    let mut exchanges: BTreeMap<(&str, BTreeSet<u32>, BTreeSet<u32>), u64> = BTreeMap::new();
    let moves = PyList::empty(py);
    for node in &program.nodes {
        match &node.operation {
            Operation::Call { function, devices, .. } => {
                let devices = devices.iter().map(|device| device.0).collect();
                calls.entry(function.0).or_insert((0, devices)).0 += 1;
            }
            Operation::Sparse(sparse) => {
                let name = match sparse {
                    Sparse::Dispatch { .. } => "dispatch",
                    Sparse::Collect => "collect",
                    Sparse::Reduce => "reduce",
                    Sparse::Gather => "gather",
                    Sparse::Scatter => "scatter",
                };
                let numbers = |values: &mut dyn Iterator<Item = u32>| -> BTreeSet<u32> {
                    let specs = values.map(|value| &program.values[value as usize]);
                    specs.flat_map(|spec| spec.sharding.devices.iter().map(|d| d.0)).collect()
                };
                let from = numbers(&mut node.args.iter().map(|arg| arg.0));
                let to = numbers(&mut node.results.clone());
                *exchanges.entry((name, from, to)).or_default() += 1;
            }
            Operation::Assemble => {}
            Operation::Move { .. } => {
                for (arg, result) in node.args.iter().zip(node.results.clone()) {
                    let (from, to) = (program.value(*arg), &program.values[result as usize]);
                    moves.append((from.bytes().0, devices(from), devices(to)))?;
                }
            }
        }
    }
    let (functions, collectives) = called(py, &program, calls)?;
    let whole = PyDict::new(py);
    whole.set_item("name", &program.name)?;
    whole.set_item("inputs", program.inputs)?;
    whole.set_item("results", program.results.len())?;
    whole.set_item("nodes", program.nodes.len())?;
    whole.set_item("functions", functions)?;
    let uploaded = program.uploaded.iter().map(|&input| program.value(ValueId(input)).bytes().0);
    whole.set_item("uploaded", uploaded.collect::<Vec<u64>>())?;
    whole.set_item("collectives", collectives)?;
    whole.set_item("moves", moves)?;
    let listed = |set: BTreeSet<u32>| set.into_iter().collect::<Vec<_>>();
    let exchanges = exchanges.into_iter();
    let exchanges =
        exchanges.map(|((name, from, to), times)| (name, listed(from), listed(to), times));
    whole.set_item("exchanges", exchanges.collect::<Vec<_>>())?;
    let numbers = |gang: Vec<base::DeviceId>| gang.iter().map(|device| device.0).collect();
    let gangs: Vec<Vec<u32>> = ir::gangs(&program).into_iter().map(numbers).collect();
    whole.set_item("gangs", gangs)?;
    Ok(whole)
}

/// How often each function is called, and its devices.
type Calls = BTreeMap<u32, (u64, Vec<u32>)>;

/// Returns the functions that compute, and the collectives of the others.
fn called<'py>(
    py: Python<'py>,
    program: &Program,
    calls: Calls,
) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
    let (functions, collectives) = (PyList::empty(py), PyList::empty(py));
    for (number, (count, devices)) in calls {
        let function = &program.functions[number as usize];
        let Some(ops) = &function.collectives else {
            let entry = PyDict::new(py);
            entry.set_item("name", &function.name)?;
            entry.set_item("calls", count)?;
            entry.set_item("devices", devices)?;
            entry.set_item("time_ns", function.time.map(|time| time.0))?;
            functions.append(entry)?;
            continue;
        };
        for op in ops {
            let ranks = op.devices.iter().map(|&rank| devices[rank as usize]);
            let (kind, ranks) = (op.collective.kind().name(), ranks.collect::<Vec<u32>>());
            collectives.append((&function.name, kind, ranks, op.size().0, count))?;
        }
    }
    Ok((functions, collectives))
}

/// Name, time in ns, operations and bytes on each of its devices, and whether it consists of
/// collectives, of a function.
type Called = (String, Option<u64>, Option<(u64, u64)>, bool);
/// The called function, if any; devices; values that are read, written, and donated.
type Does = (Option<u32>, Vec<u32>, Vec<u32>, Vec<u32>, Vec<u32>);
/// Bytes of a value, and of all its shards together.
type Sizes = (u64, u64);
/// Functions, values, number of inputs among these, and nodes.
type Nodes = (Vec<Called>, Vec<Sizes>, u32, Vec<Does>);

/// Parses a program into functions, values and nodes; a reshard has as many arguments as results.
#[pyfunction]
pub(crate) fn program_nodes(text: &str) -> PyResult<Nodes> {
    let program = parse_program(text)?;
    let functions = program.functions.iter().map(|function| {
        let work = function.work.map(|work| (work.flops, work.bytes));
        let is_collectives = function.collectives.is_some();
        (function.name.clone(), function.time.map(|time| time.0), work, is_collectives)
    });
    let values = program.values.iter().map(|value| (value.bytes().0, value.device_bytes().0));
    let nodes = program.nodes.iter().map(|node| {
        let args: Vec<u32> = node.args.iter().map(|arg| arg.0).collect();
        let results = node.results.clone().collect();
        match &node.operation {
            Operation::Call { function, devices, donated } => {
                let given = donated.iter().map(|&index| args[index as usize]).collect();
                let devices = devices.iter().map(|device| device.0).collect();
                (Some(function.0), devices, args, results, given)
            }
            Operation::Assemble | Operation::Move { .. } | Operation::Sparse(_) => {
                (None, Vec::new(), args, results, Vec::new())
            }
        }
    });
    Ok((functions.collect(), values.collect(), program.inputs, nodes.collect()))
}

pub(crate) fn parse_program(text: &str) -> PyResult<Program> {
    let program = Program::parse(text).map_err(wrong)?;
    program.verify().map_err(wrong)?;
    Ok(program)
}

/// Devices of an array.
fn devices(spec: &ir::ArraySpec) -> Vec<u32> {
    spec.sharding.devices.iter().map(|device| device.0).collect()
}
