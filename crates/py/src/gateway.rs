//! Python bindings of connections between machines.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use pyo3::exceptions::{PyConnectionError, PyOSError, PyPermissionError, PyValueError};
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use transport::{
    Authority, Carrier, Gateway, Grant, PeerConnection, PeerRole, Refusal, Remote, Service,
    ServiceAddress, StoredToken, Token, TokenId, Tokens, TransportError,
};

use crate::{os_error, wrong};

fn failed(error: TransportError) -> PyErr {
    let text = error.to_string();
    match error {
        TransportError::NotAToken(_) => PyValueError::new_err(text),
        TransportError::GivenCertificate(_) => PyValueError::new_err(text),
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
    builder.worker_threads(2).thread_name("fairway-gateway").enable_all();
    builder.build().map_err(os_error)
}

/// A token as its controller keeps it, with its secret.
#[derive(Clone, FromPyObject, IntoPyObject)]
pub(crate) struct TokenEntry {
    #[pyo3(item)]
    id: String,
    #[pyo3(item)]
    role: String,
    #[pyo3(item)]
    weight: u32,
    #[pyo3(item)]
    priority: i32,
    /// Seconds since 1970.
    #[pyo3(item)]
    expires_s: Option<f64>,
    #[pyo3(item)]
    secret: String,
}

impl TokenEntry {
    fn of(token: &StoredToken) -> Self {
        let since = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            id: token.id.to_string(),
            role: token.role.name().to_owned(),
            weight: token.grant.weight,
            priority: token.grant.priority,
            expires_s: token.expires.map(|time| since(time).as_secs_f64()),
            secret: token.secret(),
        }
    }

    fn restore(&self) -> PyResult<StoredToken> {
        let time = |seconds| -> PyResult<SystemTime> {
            Ok(UNIX_EPOCH + Duration::try_from_secs_f64(seconds).map_err(wrong)?)
        };
        let named = (self.id.parse::<TokenId>().map_err(failed)?, role(&self.role)?);
        let grant = Grant { weight: self.weight, priority: self.priority };
        let expires = self.expires_s.map(time).transpose()?;
        StoredToken::restore(named, grant, expires, &self.secret).map_err(failed)
    }
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
    /// Listens at a host and port.
    ///
    /// `refused` is called with a sentence on each refused connection. `authority` is what
    /// [`Self::authority`] returned before; None makes a new one. `certificate` is instead a chain of
    /// certificates and a private key that the owner has from elsewhere.
    #[new]
    #[pyo3(signature = (address, refused, authority=None, certificate=None))]
    fn new(
        py: Python<'_>,
        address: &str,
        refused: Py<PyAny>,
        authority: Option<&str>,
        certificate: Option<(String, String)>,
    ) -> PyResult<Self> {
        py.detach(|| {
            let runtime = runtime()?;
            let authority = match (certificate, authority) {
                (Some((chain, key)), _) => Authority::given(&chain, &key),
                (None, Some(kept)) => Authority::from_pem(kept),
                (None, None) => Authority::create(),
            };
            let authority = authority.map_err(failed)?;
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

    /// Certificate and private key of its own authority, as text; None where a certificate was given.
    #[getter]
    fn authority(&self) -> Option<String> {
        self.authority.to_pem()
    }

    /// Offers a service to a role: `unix:PATH`, or `announced:PATH` where a line comes first that says
    /// who the peer is.
    fn offer(&self, name: &str, role_name: &str, address: &str) -> PyResult<()> {
        let address = match address.split_once(':') {
            Some(("unix", path)) => ServiceAddress::Unix(PathBuf::from(path)),
            Some(("announced", path)) => ServiceAddress::Announced(PathBuf::from(path)),
            _ => return Err(PyValueError::new_err("expected unix:PATH or announced:PATH")),
        };
        if let Some((gateway, _)) = &*self.open.lock() {
            gateway.offer(name, Service { role: role(role_name)?, address });
        }
        Ok(())
    }

    /// Makes a token; `lifetime_s` is None for one that is valid until it is revoked.
    #[pyo3(signature = (role_name, lifetime_s, weight=1, priority=0))]
    fn create_token(
        &self,
        role_name: &str,
        lifetime_s: Option<f64>,
        weight: u32,
        priority: i32,
    ) -> PyResult<String> {
        let lifetime = lifetime_s.map(Duration::try_from_secs_f64).transpose().map_err(wrong)?;
        let (role, grant) = (role(role_name)?, Grant { weight, priority });
        Ok(self.tokens.create(role, &self.authority, grant, lifetime).to_string())
    }

    /// The tokens that are valid, with their secrets.
    fn tokens(&self) -> Vec<TokenEntry> {
        self.tokens.all().iter().map(TokenEntry::of).collect()
    }

    /// Admits a token that [`Self::tokens`] returned before.
    fn keep_token(&self, token: TokenEntry) -> PyResult<()> {
        self.tokens.keep(token.restore()?);
        Ok(())
    }

    /// Makes a token invalid, given its id, and closes its connections; returns whether it was valid.
    fn revoke_token(&self, token: &str) -> PyResult<bool> {
        let token = token.parse::<TokenId>().map_err(failed)?;
        Ok(self.open.lock().as_ref().is_some_and(|(gateway, _)| gateway.revoke(token)))
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

impl PyGateway {
    /// Offers a service of this process to a role.
    pub(crate) fn offer_inside(
        &self,
        name: &str,
        role: PeerRole,
        arrivals: mpsc::Sender<PeerConnection>,
    ) {
        if let Some((gateway, _)) = &*self.open.lock() {
            gateway.offer(name, Service { role, address: ServiceAddress::Inside(arrivals) });
        }
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
            let address = stream.get_ref().0.local_address().map_err(os_error)?;
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

    /// Listens at a free port of the loopback interface, and carries connections of this user to a
    /// service until this is closed; returns `HOST:PORT`.
    fn carry_tcp(&self, py: Python<'_>, service: &str) -> PyResult<String> {
        py.detach(|| {
            let mut open = self.open.lock();
            let Some((carriers, runtime)) = &mut *open else { return Err(closed()) };
            let (carrier, address) =
                runtime.block_on(self.remote.carry_tcp(service)).map_err(failed)?;
            carriers.push(carrier);
            Ok(address.to_string())
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
