//! Python bindings of the enforcer.

use std::sync::Arc;
use std::time::Duration;

use base::{BitsPerSecond, Channel, HostId, TransferTag};
use ir::DType;
use parking_lot::Mutex;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use run::enforcer::{
    CollectiveTicket, Elements, Enforcer, EnforcerError, PreparedSchedule, Reduction, Team,
    TeamChannel,
};

use crate::collectives::PyCollective;
use crate::data::{PyDataPlane, PyMemory};
use crate::scripts::PyScript;
use crate::wrong;

pyo3::create_exception!(
    fairway._native,
    TeamError,
    pyo3::exceptions::PyRuntimeError,
    "Ranks of a team do not go on together: `args` is the kind of failure, the message, and the other \
     rank that it is about or None."
);

fn team_error(error: &EnforcerError) -> PyErr {
    let debug = format!("{error:?}");
    let kind = debug.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
    TeamError::new_err((kind, error.to_string(), error.rank()))
}

/// This rank's part of a schedule.
#[pyclass(frozen, name = "ScriptPart", module = "fairway._native")]
pub(crate) struct PyPart(Arc<PreparedSchedule>);

/// A handle to a submitted collective.
#[pyclass(frozen, name = "Ticket", module = "fairway._native")]
pub(crate) struct PyTicket(Mutex<Option<CollectiveTicket>>);

/// One rank's endpoint of a team (communicator).
#[pyclass(frozen, name = "Enforcer", module = "fairway._native")]
pub(crate) struct PyEnforcer(Option<Enforcer>);

/// A rank's place in a team; `fairway.communication.membership.TeamMembership`.
#[derive(FromPyObject)]
struct TeamMembership {
    name: u64,
    rank: u32,
    /// Host of each rank.
    hosts: Vec<u32>,
    /// Channels of the data plane, with their rates in bits per second if known.
    channels: Vec<(u32, Option<f64>)>,
    /// Time limit for other ranks.
    timeout_s: f64,
    /// The same while they join, if it is another.
    meeting_s: Option<f64>,
    /// Numbers by which errors name the ranks, if not their own.
    names: Option<Vec<u32>>,
}

impl PyEnforcer {
    fn inner(&self) -> &Enforcer {
        self.0.as_ref().expect("only drop takes it")
    }
}

impl Drop for PyEnforcer {
    fn drop(&mut self) {
        let enforcer = self.0.take();
        // Its threads may release buffers, for which they need the interpreter.
        Python::attach(|py| py.detach(|| drop(enforcer)));
    }
}

fn elements_of((dtype, reduction): (&str, &str)) -> PyResult<Elements> {
    let found = DType::from_name(dtype);
    let dtype = found.ok_or_else(|| unknown("element type of numpy", dtype))?;
    Elements::new(dtype, reduction_of(reduction)?).map_err(|error| team_error(&error))
}

fn reduction_of(name: &str) -> PyResult<Reduction> {
    match name {
        "sum" => Ok(Reduction::Sum),
        "product" => Ok(Reduction::Product),
        "max" => Ok(Reduction::Max),
        "min" => Ok(Reduction::Min),
        "and" => Ok(Reduction::And),
        "or" => Ok(Reduction::Or),
        "xor" => Ok(Reduction::Xor),
        other => Err(unknown("reduction; expected sum, product, max, min, and, or, xor", other)),
    }
}

fn unknown(what: &str, name: &str) -> PyErr {
    PyValueError::new_err(format!("{name:?} is no {what}"))
}

/// The element type of a buffer, if it is numeric.
fn dtype_of(vector: &PyUntypedBuffer) -> Option<DType> {
    let found = match (vector.format().to_bytes(), vector.item_size()) {
        (b"f", _) => DType::F32,
        (b"d", _) => DType::F64,
        (b"e", _) => DType::F16,
        (b"?", _) => DType::Bool,
        (b"b" | b"h" | b"i" | b"l" | b"q", 1) => DType::S8,
        (b"b" | b"h" | b"i" | b"l" | b"q", 2) => DType::S16,
        (b"b" | b"h" | b"i" | b"l" | b"q", 4) => DType::S32,
        (b"b" | b"h" | b"i" | b"l" | b"q", 8) => DType::S64,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 1) => DType::U8,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 2) => DType::U16,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 4) => DType::U32,
        (b"B" | b"H" | b"I" | b"L" | b"Q", 8) => DType::U64,
        _ => return None,
    };
    Some(found)
}

/// The memory of a vector, kept alive by its buffer.
fn work_of(
    vector: PyUntypedBuffer,
    elements: Elements,
) -> PyResult<run::enforcer::CollectiveBuffer> {
    let (start, length) = (vector.buf_ptr().cast::<u8>(), vector.len_bytes());
    let is_aligned = start.align_offset(elements.size()) == 0;
    if vector.readonly() || !vector.is_c_contiguous() || !is_aligned {
        return Err(PyBufferError::new_err(
            "the vector of a collective must be writable, contiguous and aligned",
        ));
    }
    // SAFETY: the buffer keeps the range alive, which was just checked to be writable and aligned; that
    // no other thread accesses it before the end is the caller's duty, as the docstrings say.
    Ok(unsafe { run::enforcer::CollectiveBuffer::borrowed(start, length, Box::new(vector)) })
}

#[pymethods]
impl PyEnforcer {
    /// Joins a team, and waits for all other ranks to join (rendezvous).
    #[new]
    fn new(py: Python<'_>, plane: &PyDataPlane, membership: TeamMembership) -> PyResult<Self> {
        let TeamMembership { name, rank, hosts, channels, timeout_s, meeting_s, names } =
            membership;
        let hosts: Vec<HostId> = hosts.into_iter().map(HostId).collect();
        let of = |(channel, rate): (u32, Option<f64>)| TeamChannel {
            channel: Channel(channel),
            rate: rate.map(BitsPerSecond),
        };
        let channels: Vec<TeamChannel> = channels.into_iter().map(of).collect();
        let timeout = Duration::try_from_secs_f64(timeout_s).map_err(wrong)?;
        let meeting = Duration::try_from_secs_f64(meeting_s.unwrap_or(timeout_s)).map_err(wrong)?;
        let (name, hosts, channels) = (TransferTag(name), &hosts, &channels);
        let (plane, names) = (plane.inner(), names.as_deref());
        let team = Team { plane, name, rank, hosts, names, channels, timeout, meeting };
        let enforcer = py.detach(|| Enforcer::join(&team));
        enforcer.map(|enforcer| Self(Some(enforcer))).map_err(|error| team_error(&error))
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.inner().rank()
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.inner().ranks()
    }

    /// Prepares this rank's part of a schedule.
    fn prepare(&self, py: Python<'_>, script: &PyScript) -> PyResult<PyPart> {
        let script = script.0.clone();
        let part = py.detach(|| self.inner().prepare(script));
        part.map(PyPart).map_err(|error| team_error(&error))
    }

    /// Begins a step, after which at least `following` more of the same follow; returns its number.
    fn begin(&self, py: Python<'_>, part: &PyPart, following: u32) -> PyResult<u64> {
        py.detach(|| self.inner().begin(&part.0, following)).map_err(|error| team_error(&error))
    }

    /// Executes a schedule from the next step on, until another one is agreed on.
    fn follow(&self, part: &PyPart) -> PyResult<()> {
        self.inner().follow(&part.0).map_err(|error| team_error(&error))
    }

    /// Begins a step of the plan in force; returns its number, and that of the plan.
    fn begin_planned(&self, py: Python<'_>, following: u32) -> PyResult<(u64, u64)> {
        py.detach(|| self.inner().begin_planned(following)).map_err(|error| team_error(&error))
    }

    /// Proposes a schedule to all ranks; returns the step from which on all execute it.
    fn propose(&self, py: Python<'_>, script: &PyScript) -> PyResult<u64> {
        py.detach(|| self.inner().propose(&script.0)).map_err(|error| team_error(&error))
    }

    /// Allocates memory for vectors; shared by all ranks if they are on one machine.
    fn memory(&self, length: usize) -> PyResult<PyMemory> {
        self.inner().memory(length).map(PyMemory::of).map_err(Into::into)
    }

    /// Executes the one collective of a schedule as a step of its own, and waits for its end; returns
    /// the range of the vector that holds the result, or None if that is all of it. Without `dtype` the
    /// element type is that of the buffer.
    #[pyo3(signature = (part, vector, reduction, dtype = None))]
    fn call(
        &self,
        py: Python<'_>,
        part: &PyPart,
        vector: &Bound<'_, PyAny>,
        reduction: &str,
        dtype: Option<&str>,
    ) -> PyResult<Option<(u64, u64)>> {
        let vector = PyUntypedBuffer::get(vector)?;
        let elements = match dtype {
            Some(dtype) => elements_of((dtype, reduction))?,
            None => {
                let dtype = dtype_of(&vector).ok_or_else(|| {
                    PyValueError::new_err("elements that are no numbers cannot be combined")
                })?;
                Elements::new(dtype, reduction_of(reduction)?)
                    .map_err(|error| team_error(&error))?
            }
        };
        let size = elements.size();
        let work = work_of(vector, elements)?;
        let length = (work.length() / size) as u64;
        let done = py.detach(|| self.inner().call(&part.0, elements, work));
        let result = done.map_err(|error| team_error(&error))?;
        Ok((result != (0..length)).then_some((result.start, result.end)))
    }

    /// Submits a collective of a step. Its vector is the buffer, which may not be accessed before the
    /// end.
    #[pyo3(signature = (at, collective, elements, vector, poison = None))]
    #[allow(clippy::needless_pass_by_value)]
    fn submit(
        &self,
        py: Python<'_>,
        at: (u64, u32),
        collective: &PyCollective,
        elements: (&str, &str),
        vector: &Bound<'_, PyAny>,
        poison: Option<String>,
    ) -> PyResult<PyTicket> {
        let elements = elements_of(elements)?;
        let work = work_of(PyUntypedBuffer::get(vector)?, elements)?;
        let ticket = py.detach(|| self.inner().submit(at, (&collective.0, elements), work, poison));
        let ticket = ticket.map_err(|error| team_error(&error))?;
        Ok(PyTicket(Mutex::new(Some(ticket))))
    }

    /// Waits for the end of a collective; its result is in the submitted vector.
    fn wait(&self, py: Python<'_>, ticket: &PyTicket) -> PyResult<()> {
        let Some(ticket) = ticket.0.lock().take() else {
            return Err(PyValueError::new_err("a collective is waited for twice"));
        };
        let work = py.detach(|| self.inner().wait(ticket)).map_err(|error| team_error(&error))?;
        drop(work);
        Ok(())
    }

    /// Returns whether a collective has ended, with success or failure.
    fn is_done(&self, ticket: &PyTicket) -> bool {
        ticket.0.lock().as_ref().is_none_or(|ticket| self.inner().is_done(ticket))
    }

    /// Motifs executed since the last call: step, operation, motif, channel, and when it was ready,
    /// started and ended (ns).
    #[allow(clippy::type_complexity)]
    fn take_spans(&self) -> Vec<(u64, u32, u32, u32, u64, u64, u64)> {
        let of = |one: run::enforcer::MotifSpan| {
            let plan::QueueEntry { step, operation, motif } = one.stop;
            (step, operation, motif, one.channel, one.ready_ns, one.start_ns, one.end_ns)
        };
        self.inner().take_spans().into_iter().map(of).collect()
    }

    /// Non-fatal notices since the last call.
    fn take_notices(&self) -> Vec<String> {
        self.inner().take_notices()
    }

    /// Nanoseconds since the enforcer began, as in spans.
    fn now_ns(&self) -> u64 {
        self.inner().now_ns()
    }

    /// Closes this endpoint: ranks that wait for this one fail with an error.
    fn close(&self) {
        self.inner().close();
    }
}
