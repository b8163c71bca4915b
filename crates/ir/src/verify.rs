//! Checks of programs.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use base::DeviceId;

use crate::{
    ArraySpec, Carried, DType, Dims, Function, Node, Operation, Program, ProgramError, ValueId,
};

impl Program {
    /// Checks all invariants of a program.
    ///
    /// # Errors
    /// The first violation found.
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
        for &Carried { input, from, steps_before } in &self.carried {
            let is_alike = |from: &ArraySpec| *from == self.values[input as usize];
            let is_known = input < self.inputs && steps_before > 0;
            if !is_known || !self.values.get(from.0 as usize).is_some_and(is_alike) {
                return Err(ProgramError::Carried { input, from: from.0 });
            }
            if self.uploaded.contains(&input) {
                return Err(ProgramError::Uploaded { input });
            }
        }
        match self.donated.iter().find(|&&input| input >= self.inputs) {
            None => Ok(()),
            Some(&value) => Err(ProgramError::Undefined { node: end, value }),
        }
    }
}

/// State of the verification.
struct Check<'a> {
    program: &'a Program,
    /// Number of values defined so far.
    defined: u32,
    /// For each value, the node that donated it.
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
                self.has_ranks(number, &self.program.functions[function.0 as usize], devices)?;
                self.donate(number, node, donated.iter().copied())
            }
            Operation::Move { donated } => {
                self.moves(number, node)?;
                let all = if *donated { node.args.len() as u32 } else { 0 };
                self.donate(number, node, 0..all)
            }
            Operation::Assemble => self.assembles(number, node),
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

    /// Checks that the ranks of a function's collectives are among the devices of a call.
    fn has_ranks(
        &self,
        node: u32,
        function: &Function,
        devices: &[DeviceId],
    ) -> Result<(), ProgramError> {
        let count = devices.len() as u32;
        for op in function.collectives.iter().flatten() {
            let ranks: BTreeSet<u32> = op.devices.iter().copied().collect();
            let is_distinct = ranks.len() == op.devices.len() && ranks.len() > 1;
            if !is_distinct || ranks.last().is_some_and(|&last| last >= count) {
                return Err(ProgramError::Ranks { node, found: op.devices.to_vec(), count });
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

    /// Checks that each shard of a result is one that an argument has on the same device.
    fn assembles(&self, number: u32, node: &Node) -> Result<(), ProgramError> {
        for (what, found) in [("arguments", node.args.len()), ("results", node.results.len())] {
            if found == 0 || (what == "results" && found > 1) {
                let (node, found, expected) = (number, found as u32, 1);
                return Err(ProgramError::Count { node, what, found, expected });
            }
        }
        let value = node.results.start;
        let shards = |spec: &ArraySpec| -> Vec<(DeviceId, DType, Dims)> {
            let devices = spec.sharding.devices.iter().enumerate();
            let shard = |(position, &device)| {
                (device, spec.dtype, spec.sharding.shard_dims(&spec.dims, position))
            };
            devices.map(shard).collect()
        };
        let args = node.args.iter().map(|&arg| self.program.value(arg));
        let given: HashSet<(DeviceId, DType, Dims)> = args.flat_map(shards).collect();
        let made = shards(&self.program.values[value as usize]);
        match !made.is_empty() && made.iter().all(|shard| given.contains(shard)) {
            true => Ok(()),
            false => Err(ProgramError::Assembled { node: number, value }),
        }
    }

    /// Checks that a donated argument is passed only once: otherwise two arguments would share one
    /// buffer.
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
