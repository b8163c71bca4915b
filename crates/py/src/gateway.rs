//! Python bindings of connections between machines.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::exceptions::{PyConnectionError, PyOSError, PyPermissionError, PyValueError};
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};
use transport::{
    Authority, Carrier, Gateway, PeerRole, Refusal, Remote, Service, ServiceAddress, Token,
    TokenId, Tokens, TransportError,
};

use crate::{os_error, wrong};

fn failed(error: TransportError) -> PyErr {
    let text = error.to_string();
    match error {
        TransportError::NotAToken(_) => PyValueError::new_err(text),
        TransportError::Bind { .. } | TransportError::Certificate(_) => PyOSError::new_err(text),
        TransportError::Connect { .. } => PyConnectionError::new_err(text),
        TransportError::NotTheController { .. } | TransportError::Refused { .. } => {
            PyPermissionError::new_err(text)
        }
    }
}

fn role(name: &str) -> PyResult<PeerRole> {
    let unknown = || PyValueError::new_err(format!("there is no role {name:?}"));
    PeerRole::from_name(name).ok_or_else(unknown)
}

fn runtime() -> PyResult<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).thread_name("fairway-gateway").enable_all();
    builder.build().map_err(os_error)
}

/// The controller's listener for other machines.
#[pyclass(frozen, name = "Gateway", module = "fairway._native")]
pub(crate) struct PyGateway {
    authority: Authority,
    tokens: Arc<Tokens>,
    address: String,
    open: Mutex<Option<(Gateway, Runtime)>>,
}

#[pymethods]
impl PyGateway {
    /// Listens at a host and port; `refused` is called with a sentence on each refused connection.
    #[new]
    fn new(py: Python<'_>, address: &str, refused: Py<PyAny>) -> PyResult<Self> {
        py.detach(|| {
            let runtime = runtime()?;
            let authority = Authority::create().map_err(failed)?;
            let tokens = Arc::new(Tokens::default());
            let report = move |refusal: Refusal| {
                Python::attach(|py| {
                    if let Err(error) = refused.call1(py, (refusal.to_string(),)) {
                        error.write_unraisable(py, None);
                    }
                });
            };
            let opening = Gateway::open(address, &authority, tokens.clone(), report);
            let gateway = runtime.block_on(opening).map_err(failed)?;
            let address = gateway.address().to_string();
            Ok(Self { authority, tokens, address, open: Mutex::new(Some((gateway, runtime))) })
        })
    }

    /// Where it listens.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Offers a service to a role: `unix:PATH`, or `tcp:ADDRESS:PORT` of the loopback interface.
    fn offer(&self, name: &str, role_name: &str, address: &str) -> PyResult<()> {
        let address = match address.split_once(':') {
            Some(("unix", path)) => ServiceAddress::Unix(PathBuf::from(path)),
            Some(("tcp", place)) => {
                ServiceAddress::Tcp(place.parse::<SocketAddr>().map_err(wrong)?)
            }
            _ => return Err(PyValueError::new_err("expected unix:PATH or tcp:ADDRESS:PORT")),
        };
        if let Some((gateway, _)) = &*self.open.lock() {
            gateway.offer(name, Service { role: role(role_name)?, address });
        }
        Ok(())
    }

    /// Makes a token; `lifetime_s` is None for one that is valid until it is revoked.
    fn create_token(&self, role_name: &str, lifetime_s: Option<f64>) -> PyResult<String> {
        let lifetime = lifetime_s.map(Duration::try_from_secs_f64).transpose().map_err(wrong)?;
        Ok(self.tokens.create(role(role_name)?, &self.authority, lifetime).to_string())
    }

    /// Makes a token invalid, given its id; returns whether it was valid.
    fn revoke_token(&self, token: &str) -> PyResult<bool> {
        Ok(self.tokens.revoke(token.parse::<TokenId>().map_err(failed)?))
    }

    /// Closes the listener and all of its connections.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            if let Some((gateway, runtime)) = self.open.lock().take() {
                drop(gateway);
                runtime.shutdown_timeout(Duration::from_secs(1));
            }
        });
    }
}

/// A controller on another machine, and the token that admits to it.
#[pyclass(frozen, name = "Remote", module = "fairway._native")]
pub(crate) struct PyRemote {
    remote: Remote,
    open: Mutex<Option<(Vec<Carrier>, Runtime)>>,
}

#[pymethods]
impl PyRemote {
    /// Names a controller; nothing is sent yet. Raises `ValueError` if the token is none.
    #[new]
    fn new(address: &str, token: &str) -> PyResult<Self> {
        let remote = Remote::new(address, token.parse::<Token>().map_err(failed)?);
        Ok(Self { remote, open: Mutex::new(Some((Vec::new(), runtime()?))) })
    }

    /// Connects to a service and leaves it; returns the address of this end.
    ///
    /// Raises `ConnectionError` if the controller does not answer, and `PermissionError` if it refuses
    /// or is another one.
    fn check(&self, py: Python<'_>, service: &str) -> PyResult<String> {
        py.detach(|| {
            let open = self.open.lock();
            let Some((_, runtime)) = &*open else { return Err(closed()) };
            let stream = runtime.block_on(self.remote.connect(service)).map_err(failed)?;
            let address = stream.get_ref().0.local_addr().map_err(os_error)?;
            Ok(address.ip().to_string())
        })
    }

    /// Listens at a Unix socket, and carries each connection to a service until this is closed.
    fn carry(&self, py: Python<'_>, path: PathBuf, service: &str) -> PyResult<()> {
        py.detach(|| {
            let mut open = self.open.lock();
            let Some((carriers, runtime)) = &mut *open else { return Err(closed()) };
            let _inside = runtime.enter();
            carriers.push(self.remote.carry_unix(&path, service).map_err(failed)?);
            Ok(())
        })
    }

    /// Ends all connections.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            if let Some((carriers, runtime)) = self.open.lock().take() {
                drop(carriers);
                runtime.shutdown_timeout(Duration::from_secs(1));
            }
        });
    }
}

fn closed() -> PyErr {
    PyConnectionError::new_err("the connections to this controller are closed")
}
