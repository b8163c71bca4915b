//! Python bindings of the data plane of host processes.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use base::{Channel, HostId, Status, TransferTag};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::{os_error, status_error};

/// A host's endpoint of the data plane.
#[pyclass(frozen, name = "DataPlane", module = "fairway._native")]
pub(crate) struct PyDataPlane(run::channel::DataPlane);

impl PyDataPlane {
    pub(crate) fn inner(&self) -> &run::channel::DataPlane {
        &self.0
    }
}

#[pymethods]
impl PyDataPlane {
    /// Listens at `address` (`unix:PATH` or `tcp:HOST:PORT`) as host `me`, and at the addresses of its
    /// channels onto the network between islands; encrypts TCP connections if `encrypt`, as all
    /// endpoints of the run must.
    #[new]
    #[pyo3(signature = (me, address, channels, token, encrypt=false))]
    #[allow(clippy::needless_pass_by_value)]
    fn new(
        me: u32,
        address: &str,
        channels: Vec<String>,
        token: &str,
        encrypt: bool,
    ) -> PyResult<Self> {
        let plane = run::channel::DataPlane::listen(HostId(me), address, &channels, token, encrypt);
        plane.map(Self).map_err(os_error)
    }

    /// Address at which peers connect.
    #[getter]
    fn address(&self) -> &str {
        self.0.address()
    }

    /// Addresses at which peers connect to its channels.
    #[getter]
    fn channels(&self) -> Vec<String> {
        self.0.channels().to_vec()
    }

    /// Registers the new process that a peer is.
    fn add_peer(&self, host: u32, address: &str) {
        self.0.add_peer(HostId(host), address);
    }

    /// Registers a peer of which messages with smaller tags never arrive: an earlier process was to
    /// send them. Returns whether the process that begins there is the newest that is known, and has
    /// not been lost.
    fn know_peer(&self, host: u32, tag: u64, address: &str) -> bool {
        self.0.know_peer(HostId(host), TransferTag(tag), address)
    }

    /// Sends the bytes of a contiguous buffer on a channel, or on any if that is 0; returns once they
    /// may be reused.
    #[pyo3(signature = (to, tag, bytes, channel = 0))]
    fn send(
        &self,
        py: Python<'_>,
        to: u32,
        tag: u64,
        bytes: PyBuffer<u8>,
        channel: u32,
    ) -> PyResult<()> {
        if !bytes.is_c_contiguous() {
            return Err(PyBufferError::new_err("a message must be contiguous"));
        }
        let (start, length) = (bytes.buf_ptr() as usize, bytes.len_bytes());
        let sent = py.detach(|| {
            // SAFETY: the caller holds the buffer for the call; as with any buffer, it must not be
            // written by other threads.
            let bytes: &[u8] = if length == 0 {
                &[]
            } else {
                unsafe { std::slice::from_raw_parts(start as *const u8, length) }
            };
            self.0.send(HostId(to), Channel(channel), TransferTag(tag), bytes)
        });
        sent.map_err(|error| status_error(&error))
    }

    /// Sets what takes failures of messages to hosts that are not reached, once: it is called with the
    /// host, the tag and the error, by any thread.
    #[allow(clippy::needless_pass_by_value)]
    fn on_undelivered(&self, take: Py<PyAny>) {
        self.0.on_undelivered(Box::new(move |to, tag, error| {
            Python::attach(|py| {
                if let Err(error) = take.call1(py, (to.0, tag.0, error.to_string())) {
                    error.write_unraisable(py, Some(take.bind(py)));
                }
            });
        }));
    }

    /// Sends an error in place of a message that will never come; to a host that is not reached, by
    /// what `on_undelivered` has set.
    ///
    /// Raises `StatusError` if the host is lost.
    fn send_failure(&self, py: Python<'_>, to: u32, tag: u64, error: &str) -> PyResult<()> {
        let error = Status::parse(error);
        py.detach(|| self.0.send_failure(HostId(to), TransferTag(tag), &error))
            .map_err(|error| status_error(&error))
    }

    /// Checks that a host is reached at all its addresses on other machines.
    ///
    /// Raises `OSError` if one is not; the text names it.
    fn reach(&self, py: Python<'_>, host: u32, timeout_s: f64) -> PyResult<()> {
        let timeout = Duration::from_secs_f64(timeout_s);
        py.detach(|| self.0.reach(HostId(host), timeout)).map_err(os_error)
    }

    /// Registers that message `tag` will come from host `sender`.
    fn expect(&self, tag: u64, sender: u32) {
        self.0.expect(TransferTag(tag), HostId(sender));
    }

    /// Drops messages with smaller tags, those that have arrived and all to come.
    fn drop_before(&self, tag: u64) {
        self.0.drop_before(TransferTag(tag));
    }

    /// Forwards message `tag` of host `sender` to host `to` as message `onward` when it arrives.
    fn relay(&self, tag: u64, sender: u32, onward: u64, to: u32, channel: u32) {
        let (tag, onward) = (TransferTag(tag), TransferTag(onward));
        self.0.relay((tag, HostId(sender)), onward, HostId(to), Channel(channel));
    }

    /// Allocates writable memory from a pool, to which it returns when it is released.
    fn memory(&self, length: usize) -> PyResult<PyMemory> {
        self.0.memory(length).map(PyMemory).map_err(os_error)
    }

    /// Waits for a message and takes it; fails after `timeout_s`.
    fn take(&self, py: Python<'_>, tag: u64, timeout_s: f64) -> PyResult<PyPayload> {
        let timeout = Duration::from_secs_f64(timeout_s);
        let taken = py.detach(|| self.0.take(TransferTag(tag), timeout));
        taken.map(PyPayload).map_err(|error| status_error(&error))
    }

    /// Returns whether a message has arrived or failed.
    fn is_settled(&self, tag: u64) -> bool {
        self.0.is_settled(TransferTag(tag))
    }

    /// Watches a group of messages: `arrivals` returns `name` once all have arrived or failed.
    fn watch(&self, name: u64, tags: Vec<u64>) {
        let tags: Vec<TransferTag> = tags.into_iter().map(TransferTag).collect();
        self.0.watch(name, &tags);
    }

    /// Waits until watched groups of messages have settled, and returns their names; none once this
    /// endpoint is closed.
    fn arrivals(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| self.0.arrivals())
    }

    /// Discards a message that will not be taken.
    fn discard(&self, tag: u64) {
        self.0.discard(TransferTag(tag));
    }

    /// Trims the memory pool soon.
    fn tidy(&self) {
        self.0.tidy();
    }

    /// Bytes received and sent so far, and messages that wait to be taken.
    fn traffic(&self) -> (u64, u64, usize) {
        self.0.traffic()
    }

    /// Stops listening.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// The bytes of one received message, read-only; supports the buffer protocol.
#[pyclass(frozen, name = "Payload", module = "fairway._native")]
pub(crate) struct PyPayload(run::channel::Payload);

#[pymethods]
impl PyPayload {
    fn __len__(&self) -> usize {
        self.0.as_ref().len()
    }

    /// Exports the bytes; they stay in place as long as the view lives.
    ///
    /// # Safety
    /// Called by the interpreter with a view to be filled.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = slf.get().0.as_ref();
        let start = bytes.as_ptr().cast_mut();
        // SAFETY: the exporter keeps the bytes alive and never changes them while a payload exists.
        unsafe { export(slf.as_any(), view, (start, bytes.len(), true), flags) }
    }
}

/// Host memory; supports the buffer protocol, writable.
#[pyclass(frozen, name = "Memory", module = "fairway._native")]
pub(crate) struct PyMemory(run::channel::SharedMemory);

// SAFETY: it is plain memory; threads that write it must synchronize, as with any buffer.
unsafe impl Sync for PyMemory {}

impl PyMemory {
    pub(crate) fn of(memory: run::channel::SharedMemory) -> Self {
        Self(memory)
    }
}

#[pymethods]
impl PyMemory {
    fn __len__(&self) -> usize {
        self.0.length()
    }

    /// Exports the bytes; they stay in place as long as the view lives.
    ///
    /// # Safety
    /// Called by the interpreter with a view to be filled.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let memory = &slf.get().0;
        // SAFETY: the exporter keeps the memory alive.
        unsafe { export(slf.as_any(), view, (memory.start(), memory.length(), false), flags) }
    }
}

/// Fills a view of memory from its start, its length, and whether it is read-only.
///
/// # Safety
/// The view is the interpreter's, and the memory lives as long as its exporter.
unsafe fn export(
    exporter: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    (start, length, is_constant): (*mut u8, usize, bool),
    flags: c_int,
) -> PyResult<()> {
    let (start, length) = (start.cast::<c_void>(), length as isize);
    // SAFETY: promised by the caller.
    let filled = unsafe {
        let constant = c_int::from(is_constant);
        ffi::PyBuffer_FillInfo(view, exporter.as_ptr(), start, length, constant, flags)
    };
    match filled {
        0 => Ok(()),
        _ => Err(PyErr::fetch(exporter.py())),
    }
}
