//! Captures (traces) a client's step as a program.
//!
//! A client's launches and transfers are logged; arrays are identified by their buffers. The end of
//! the log is searched for a step: the shortest sequence that repeats the one just before it. That
//! sequence becomes a program whose inputs are the arrays made before it.
//!
//! Source: PATHWAYS §3 (program tracing). Differs from the paper: 1. The client need not annotate
//! anything; the loop of its script is detected.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use base::{BufferId, Nanos};
use ir::{ArraySpec, Carried, Function, FunctionId, Node, NodeId, Operation, Program, ValueId};
use smallvec::SmallVec;

use crate::objects::Buffer;
use crate::programs::{Dataflow, Executable, ExecutableForm};

/// Maximum number of operations logged per client.
const LOG_LIMIT: usize = 1 << 16;
/// Maximum number of operations of a step.
const STEP_LIMIT: usize = 1 << 14;
/// Maximum number of operations after the last step, such as a final evaluation.
const TAIL_LIMIT: usize = 1 << 12;

/// An array as an operand or result of an operation.
type ArrayUse = (BufferId, Arc<ArraySpec>);

/// For each buffer that shares shards, the arrays whose shards they were made as.
type Shared = BTreeMap<BufferId, Shares>;

/// The arrays whose shards a buffer shares.
#[derive(Debug, Clone)]
enum Shares {
    /// All shards of one, in the same place.
    All(BufferId),
    /// Of successive shards up to each of these positions, the array.
    Some(Vec<(u32, ArrayUse)>),
}

impl Shares {
    /// Returns the array of the shard at a position, if the buffer shares only some of an array's.
    fn array(&self, position: u32) -> Option<&ArrayUse> {
        match self {
            Self::All(_) => None,
            Self::Some(runs) => {
                runs.iter().find(|(end, _)| position < *end).map(|(_, array)| array)
            }
        }
    }
}

/// An operation of a client.
#[derive(Debug, Clone)]
enum Action {
    Call(Arc<Executable>),
    Move,
}

#[derive(Debug, Clone)]
struct Note {
    action: Action,
    args: Vec<ArrayUse>,
    results: Vec<ArrayUse>,
    /// Arguments that are donated.
    donated: SmallVec<[u32; 4]>,
}

impl Note {
    /// Returns whether two notes are the same operation on arrays of the same specs.
    fn is_like(&self, other: &Note) -> bool {
        let same_action = match (&self.action, &other.action) {
            (Action::Call(one), Action::Call(another)) => Arc::ptr_eq(one, another),
            (Action::Move, Action::Move) => true,
            _ => false,
        };
        let alike = |one: &[ArrayUse], other: &[ArrayUse]| {
            one.len() == other.len() && one.iter().zip(other).all(|(a, b)| a.1 == b.1)
        };
        same_action && alike(&self.args, &other.args) && alike(&self.results, &other.results)
    }
}

/// A client's most recent operations.
#[derive(Debug, Default)]
pub(crate) struct Log {
    notes: VecDeque<Note>,
    /// Buffers that share shards of others, and the arrays that these were made as. A copy to where
    /// the array already is shares all shards of one.
    shared: Shared,
}

impl Log {
    /// Logs a call.
    pub fn note_call(
        &mut self,
        executable: &Arc<Executable>,
        args: &[BufferId],
        specs: Vec<Arc<ArraySpec>>,
        first: BufferId,
        keep: &[u32],
    ) {
        let outputs = executable.output_specs.iter().enumerate();
        self.add(Note {
            action: Action::Call(executable.clone()),
            args: args.iter().map(|&arg| self.made_as(arg)).zip(specs).collect(),
            results: outputs
                .map(|(index, spec)| (executable.result(first, index), spec.clone()))
                .collect(),
            donated: executable.donated(keep).collect(),
        });
    }

    /// Notes a buffer that shares shards of others.
    pub fn note_shared(
        &mut self,
        (buffer, spec): (BufferId, &ArraySpec),
        sources: &[(Buffer, u32)],
    ) {
        let [(whole, _), ..] = sources else { return };
        let is_next = |(position, (source, from)): (u32, &(Buffer, u32))| {
            source.id == whole.id && *from == position
        };
        let is_all = whole.spec.dims == spec.dims
            && whole.spec.sharding.devices.len() == sources.len()
            && (0..).zip(sources).all(is_next);
        let shares = if is_all {
            self.shared.get(&whole.id).cloned().unwrap_or(Shares::All(whole.id))
        } else {
            let mut runs: Vec<(u32, ArrayUse)> = Vec::new();
            for (end, (source, from)) in (1..).zip(sources) {
                let shared = self.shared.get(&source.id);
                let array = match shared.and_then(|shares| shares.array(*from)) {
                    Some(array) => array.clone(),
                    None => (self.made_as(source.id), source.spec.clone()),
                };
                match runs.last_mut().filter(|(_, last)| last.0 == array.0) {
                    Some((last, _)) => *last = end,
                    None => runs.push((end, array)),
                }
            }
            Shares::Some(runs)
        };
        if self.shared.len() == LOG_LIMIT {
            self.shared.pop_first();
        }
        self.shared.insert(buffer, shares);
    }

    /// Logs a transfer of an array.
    pub fn note_move(&mut self, source: &Buffer, target: (BufferId, &Arc<ArraySpec>)) {
        self.add(Note {
            action: Action::Move,
            args: vec![(self.made_as(source.id), source.spec.clone())],
            results: vec![(target.0, target.1.clone())],
            donated: SmallVec::new(),
        });
    }

    /// Converts the last step to a program; `None` if nothing is logged.
    ///
    /// # Arguments
    /// - `time`: returns the measured run time of a program, if it was measured.
    pub fn into_program(
        mut self,
        name: String,
        time: &dyn Fn(&Executable) -> Option<Nanos>,
    ) -> Option<Program> {
        let (begin, end) = self.last_step();
        let notes: Vec<Note> = self.notes.into();
        if begin == end {
            return None;
        }
        let program = Program { name, ..Program::default() };
        let mut writer = Writer { program, shared: self.shared, ..Writer::default() };
        let (earlier, step) = (&notes[..begin], &notes[begin..end]);
        let alike =
            |other: &&[Note]| step.iter().zip(*other).all(|(one, other)| one.is_like(other));
        let repetitions: Vec<&[Note]> =
            earlier.rchunks_exact(step.len()).take_while(alike).collect();
        writer.inputs(earlier, &repetitions, step);
        for note in step {
            writer.add(note, time);
        }
        writer.results(step, &notes[end..]);
        writer.carry(&repetitions, step);
        Some(writer.program)
    }

    fn add(&mut self, note: Note) {
        if self.notes.len() == LOG_LIMIT {
            self.notes.pop_front();
        }
        self.notes.push_back(note);
    }

    /// Returns the buffer that the array was made as, if it is one.
    fn made_as(&self, buffer: BufferId) -> BufferId {
        match self.shared.get(&buffer) {
            Some(&Shares::All(whole)) => whole,
            _ => buffer,
        }
    }

    /// Returns the range of the last step; the whole log if nothing repeats.
    fn last_step(&mut self) -> (usize, usize) {
        let notes = self.notes.make_contiguous();
        let count = notes.len();
        for end in (count.saturating_sub(TAIL_LIMIT)..=count).rev() {
            for period in 1..=STEP_LIMIT.min(end / 2) {
                let repeats = (0..period)
                    .all(|back| notes[end - 1 - back].is_like(&notes[end - 1 - period - back]));
                if repeats {
                    return (end - period, end);
                }
            }
        }
        (0, count)
    }
}

/// Builds a program from notes.
#[derive(Default)]
struct Writer {
    program: Program,
    shared: Shared,
    values: HashMap<BufferId, ValueId>,
    functions: BTreeMap<u64, FunctionId>,
}

impl Writer {
    fn value(&mut self, seen: &ArrayUse) -> ValueId {
        let id = ValueId(self.program.values.len() as u32);
        self.program.values.push(seen.1.as_ref().clone());
        self.values.insert(seen.0, id);
        id
    }

    /// Declares arrays that are read and not made here as inputs. Those of a repetition that nothing
    /// has made or read before come from the client.
    fn inputs(&mut self, earlier: &[Note], repetitions: &[&[Note]], notes: &[Note]) {
        let mut known: HashSet<BufferId> = HashSet::new();
        for note in earlier {
            known.extend(note.results.iter().map(|result| result.0));
        }
        known.extend(self.arrays_read(earlier).iter().map(|array| array.0));
        let mut made: HashSet<BufferId> = HashSet::new();
        for note in notes {
            for arg in self.arrays_read(std::slice::from_ref(note)) {
                if !made.contains(&arg.0) && !self.values.contains_key(&arg.0) {
                    let input = self.value(&arg);
                    self.program.inputs += 1;
                    if !repetitions.is_empty() && !known.contains(&arg.0) {
                        self.program.uploaded.push(input.0);
                    }
                }
            }
            made.extend(note.results.iter().map(|result| result.0));
        }
    }

    /// Returns the arrays of which notes read shards, in order.
    fn arrays_read(&self, notes: &[Note]) -> Vec<ArrayUse> {
        let args = notes.iter().flat_map(|note| &note.args);
        args.flat_map(|arg| arrays(&self.shared, arg)).collect()
    }

    /// Returns the value of an argument; assembles it if it is of shards of others.
    fn read(&mut self, arg: &ArrayUse) -> ValueId {
        if let Some(&value) = self.values.get(&arg.0) {
            return value;
        }
        let parts = arrays(&self.shared, arg);
        let args = parts.iter().map(|part| self.values[&part.0]).collect();
        let results = self.make(std::slice::from_ref(arg));
        let value = ValueId(results.start);
        self.push(Operation::Assemble, args, results, SmallVec::new());
        value
    }

    fn add(&mut self, note: &Note, time: &dyn Fn(&Executable) -> Option<Nanos>) {
        let args: SmallVec<[ValueId; 8]> = note.args.iter().map(|arg| self.read(arg)).collect();
        for &index in &note.donated {
            let value = args[index as usize].0;
            if value < self.program.inputs {
                self.program.donated.push(value);
            }
        }
        match &note.action {
            Action::Move => {
                let results = self.make(&note.results);
                self.push(Operation::Move { donated: false }, args, results, SmallVec::new());
            }
            Action::Call(executable) => match &executable.form {
                ExecutableForm::Dataflow(dataflow) => {
                    self.inline(note, &args, dataflow, time(executable));
                }
                _ => {
                    let function = self.function(executable, time(executable));
                    let results = self.make(&note.results);
                    let devices = executable.devices.clone();
                    let operation =
                        Operation::Call { function, devices, donated: note.donated.clone() };
                    self.push(operation, args, results, SmallVec::new());
                }
            },
        }
    }

    fn make(&mut self, results: &[ArrayUse]) -> std::ops::Range<u32> {
        let start = self.program.values.len() as u32;
        for result in results {
            self.value(result);
        }
        start..self.program.values.len() as u32
    }

    fn push(
        &mut self,
        operation: Operation,
        args: SmallVec<[ValueId; 8]>,
        results: std::ops::Range<u32>,
        after: SmallVec<[NodeId; 2]>,
    ) {
        self.program.nodes.push(Node { operation, args, results, after });
    }

    fn function(&mut self, executable: &Executable, time: Option<Nanos>) -> FunctionId {
        if let Some(&known) = self.functions.get(&executable.id.0) {
            return known;
        }
        let id = self.add_function(&executable.compiled.name, executable, time);
        self.functions.insert(executable.id.0, id);
        id
    }

    fn add_function(
        &mut self,
        name: &str,
        executable: &Executable,
        time: Option<Nanos>,
    ) -> FunctionId {
        let (name, work) = (self.unique(name), executable.work());
        let collectives = match &executable.form {
            ExecutableForm::Exchange(collectives) => Some(collectives.clone()),
            _ => None,
        };
        self.program.functions.push(Function { name, time, work, collectives });
        FunctionId(self.program.functions.len() as u32 - 1)
    }

    fn unique(&self, name: &str) -> String {
        let taken = |name: &str| self.program.functions.iter().any(|known| known.name == name);
        let mut candidate = name.to_owned();
        let mut turn = 1;
        while taken(&candidate) {
            candidate = format!("{name}:{turn}");
            turn += 1;
        }
        candidate
    }

    /// Inlines the nodes of a whole program, as it runs, instead of one call of it.
    ///
    /// Its time was measured as a whole and is divided among its calls in proportion to the
    /// compiler's estimates.
    fn inline(&mut self, note: &Note, args: &[ValueId], dataflow: &Dataflow, time: Option<Nanos>) {
        let source = &dataflow.program;
        let scale = time.map(|time| time.0 as f64 / dataflow.expected_time().0.max(1) as f64);
        let functions: Vec<FunctionId> = dataflow
            .named()
            .map(|(name, executable)| {
                let time = scale.map(|scale| executable.expected_time().times(scale));
                self.add_function(&name, executable, time)
            })
            .collect();
        let first_node = self.program.nodes.len() as u32;
        let mut places: Vec<ValueId> = args.to_vec();
        for node in &source.nodes {
            let results = node.results.clone().map(|value| {
                let id = ValueId(self.program.values.len() as u32);
                self.program.values.push(source.values[value as usize].clone());
                id
            });
            let results: Vec<ValueId> = results.collect();
            let start = results.first().map_or(self.program.values.len() as u32, |value| value.0);
            let end = start + results.len() as u32;
            let operation = match &node.operation {
                Operation::Call { function, devices, donated } => Operation::Call {
                    function: functions[function.0 as usize],
                    devices: devices.clone(),
                    donated: donated.clone(),
                },
                other => other.clone(),
            };
            let read = node.args.iter().map(|arg| places[arg.0 as usize]).collect();
            let after = node.after.iter().map(|after| NodeId(first_node + after.0)).collect();
            self.push(operation, read, start..end, after);
            places.extend(results);
        }
        for (result, value) in note.results.iter().zip(&source.results) {
            self.values.insert(result.0, places[value.0 as usize]);
        }
    }

    /// Declares inputs made by earlier repetitions as loop-carried, from the values in the same place
    /// here.
    ///
    /// # Arguments
    /// - `repetitions`: the previous one first.
    fn carry(&mut self, repetitions: &[&[Note]], notes: &[Note]) {
        let mut made: HashMap<BufferId, (u32, ValueId)> = HashMap::new();
        for (steps_before, before) in (1..).zip(repetitions) {
            for (earlier, note) in before.iter().zip(notes) {
                for (earlier, result) in earlier.results.iter().zip(&note.results) {
                    let from = self.values[&result.0];
                    made.entry(earlier.0).or_insert((steps_before, from));
                }
            }
        }
        let now = self.arrays_read(notes);
        // What the previous repetition has read in the same places, if that is as much.
        let previous = repetitions.first().map(|before| self.arrays_read(before));
        let previous = previous.filter(|previous| previous.len() == now.len());
        let mut carried: Vec<Carried> = Vec::new();
        for (place, (buffer, _)) in now.iter().enumerate() {
            let input = self.values[buffer].0;
            let Some(&(steps_before, from)) = made.get(buffer) else { continue };
            // An array that an earlier repetition made may also have been kept since.
            let kept = || {
                let read = previous.as_ref().and_then(|previous| made.get(&previous[place].0));
                read != Some(&(steps_before + 1, from))
            };
            let is_alike = self.program.values[input as usize] == *self.program.value(from);
            if input < self.program.inputs && is_alike && (steps_before == 1 || !kept()) {
                carried.push(Carried { input, from, steps_before });
            }
        }
        carried.sort_unstable();
        carried.dedup_by_key(|carried| carried.input);
        self.program.carried = carried;
    }

    /// The results are the values that are read after the step. If there are none, they are all
    /// values that the step makes and does not read itself.
    fn results(&mut self, notes: &[Note], later: &[Note]) {
        let made = |seen: &ArrayUse| self.values.get(&seen.0).copied();
        let mut results: Vec<ValueId> = Vec::new();
        let read_later = self.arrays_read(later);
        let read_later = read_later.iter().filter_map(made);
        results.extend(read_later.filter(|value| value.0 >= self.program.inputs));
        if results.is_empty() {
            let read: HashSet<BufferId> =
                self.arrays_read(notes).iter().map(|array| array.0).collect();
            let ends = notes.iter().flat_map(|note| &note.results);
            results.extend(ends.filter(|seen| !read.contains(&seen.0)).filter_map(made));
        }
        results.sort_unstable();
        results.dedup();
        self.program.results = results;
        self.program.donated.sort_unstable();
        self.program.donated.dedup();
    }
}

/// Returns the arrays of whose shards an argument consists: itself, unless it shares shards.
fn arrays(shared: &Shared, arg: &ArrayUse) -> Vec<ArrayUse> {
    let Some(Shares::Some(runs)) = shared.get(&arg.0) else { return vec![arg.clone()] };
    let mut found: Vec<ArrayUse> = runs.iter().map(|(_, array)| array.clone()).collect();
    found.sort_by_key(|array| array.0);
    found.dedup_by_key(|array| array.0);
    found
}
