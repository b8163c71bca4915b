//! The data plane for host processes.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use base::{Channel, HostId, Status, TransferTag};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::{os_error, status_error};

/// A host's end of the data plane.
#[pyclass(frozen, module = "fairway._native")]
pub(crate) struct DataPlane(run::channel::DataPlane);

#[pymethods]
impl DataPlane {
    /// Listens at `address` (`unix:PATH` or `tcp:HOST:PORT`) as host `me`, and at the addresses of
    /// its channels onto the network between islands.
    #[new]
    #[allow(clippy::needless_pass_by_value)]
    fn new(me: u32, address: &str, channels: Vec<String>, token: &str) -> PyResult<Self> {
        let plane = run::channel::DataPlane::listen(HostId(me), address, &channels, token);
        plane.map(Self).map_err(os_error)
    }

    /// Where peers reach this end.
    #[getter]
    fn address(&self) -> &str {
        self.0.address()
    }

    /// Where they reach its channels.
    #[getter]
    fn channels(&self) -> Vec<String> {
        self.0.channels().to_vec()
    }

    /// Names a peer.
    fn add_peer(&self, host: u32, address: &str) {
        self.0.add_peer(HostId(host), address);
    }

    /// Sends the bytes of a contiguous buffer by a channel, of which 0 is none in particular;
    /// returns once they may be reused.
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
            // SAFETY: the buffer is held by the caller for the call; writers on other threads
            // are the caller's duty to avoid, as with any buffer.
            let bytes: &[u8] = if length == 0 {
                &[]
            } else {
                unsafe { std::slice::from_raw_parts(start as *const u8, length) }
            };
            self.0.send(HostId(to), Channel(channel), TransferTag(tag), bytes)
        });
        sent.map_err(|error| status_error(&error))
    }

    /// Says that a message will never come.
    fn send_failure(&self, py: Python<'_>, to: u32, tag: u64, error: &str) -> PyResult<()> {
        let error = Status::parse(error);
        py.detach(|| self.0.send_failure(HostId(to), TransferTag(tag), &error))
            .map_err(|error| status_error(&error))
    }

    /// Notes that `tag` will come from host `sender`.
    fn expect(&self, tag: u64, sender: u32) {
        self.0.expect(TransferTag(tag), HostId(sender));
    }

    /// Passes message `tag` of host `sender` on to host `to` under `onward` when it arrives.
    fn relay(&self, tag: u64, sender: u32, onward: u64, to: u32, channel: u32) {
        let (tag, onward) = (TransferTag(tag), TransferTag(onward));
        self.0.relay((tag, HostId(sender)), onward, HostId(to), Channel(channel));
    }

    /// Waits for a message and takes it.
    fn take(&self, py: Python<'_>, tag: u64, timeout_s: f64) -> PyResult<Payload> {
        let timeout = Duration::from_secs_f64(timeout_s);
        let taken = py.detach(|| self.0.take(TransferTag(tag), timeout));
        taken.map(Payload).map_err(|error| status_error(&error))
    }

    /// Is a message there, or known never to come?
    fn is_settled(&self, tag: u64) -> bool {
        self.0.is_settled(TransferTag(tag))
    }

    /// Nobody will take this message.
    fn discard(&self, tag: u64) {
        self.0.discard(TransferTag(tag));
    }

    /// Gives idle memory back soon.
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
#[pyclass(frozen, module = "fairway._native")]
pub(crate) struct Payload(run::channel::Payload);

#[pymethods]
impl Payload {
    fn __len__(&self) -> usize {
        self.0.as_ref().len()
    }

    /// Exports the bytes; they stay where they are as long as the view lives.
    ///
    /// # Safety
    /// Called by the interpreter with a view to be filled.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = slf.get().0.as_ref();
        // SAFETY: the view is the interpreter's; the exporter keeps the bytes alive and never
        // changes them while a payload exists.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                bytes.as_ptr().cast_mut().cast::<c_void>(),
                bytes.len() as isize,
                1,
                flags,
            )
        };
        match filled {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}
