//! The controller process: client listener, controller and connections to hosts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::{ClientId, DeviceId, HostId, IslandId};
use control::{
    ClientOverview, Config, Controller, Dispatch, HostOverview, IslandOverview, Overview,
    PlanOverview, SliceRequest,
};
use ir::{Program, ProgramError};
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use run::channel::{CONTROLLER, DataPlane};
use run::{ClientConnection, ProcessAction, World};
use tokio::sync::{mpsc, watch};
use topology::{Cluster, IslandSpec};
use transport::identity::Users;
use transport::{PeerConnection, PeerRole};

use crate::gateway::PyGateway;
use crate::{os_error, status_error};

/// Maximum number of clients of other machines that wait to be accepted.
const ARRIVALS: usize = 16;

/// A running controller with its client listener.
#[pyclass(frozen, module = "fairway._native")]
pub(crate) struct Server {
    world: Arc<World>,
    runtime: Mutex<Option<tokio::runtime::Runtime>>,
    stopped: Mutex<mpsc::UnboundedReceiver<ProcessAction>>,
    end: watch::Sender<bool>,
    address: String,
    arrivals: mpsc::Sender<PeerConnection>,
}

#[pymethods]
impl Server {
    /// Listens for clients at `listen`, from this process's user and `users`, and for hosts in
    /// `directory`.
    #[new]
    fn new(py: Python<'_>, settings: ServerSettings) -> PyResult<Self> {
        let specs: Vec<IslandSpec> = settings
            .islands
            .iter()
            .map(|&(hosts, devices)| IslandSpec::new(hosts, devices))
            .collect();
        if specs.is_empty() || specs.iter().any(|s| s.hosts == 0 || s.devices_per_host == 0) {
            return Err(PyValueError::new_err("every island needs a host and a device"));
        }
        py.detach(|| {
            raise_file_limit();
            let controller = Controller::new(Cluster::new(&specs), settings.config());
            let ServerSettings {
                listen,
                users,
                directory,
                token,
                slice_index,
                encrypt,
                client_code,
                ..
            } = settings;
            let admittance = ifrt::Admittance { users: Users::owner_and(&users), client_code };
            let path = format!("unix:{}", directory.join("controller-data.sock").display());
            let data = DataPlane::listen(CONTROLLER, &path, &[], &token, encrypt);
            let data = data.map_err(os_error)?;
            let (world, stopped) = World::new(controller, data);
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .thread_name("fairway")
                .enable_all()
                .build()
                .map_err(os_error)?;
            let presentation = ifrt::Presentation {
                slice_index,
                directory: directory.to_string_lossy().into_owned(),
            };
            let (end, ended) = watch::channel(false);
            let (arrivals, arrived) = mpsc::channel(ARRIVALS);
            let address = runtime.block_on(open(
                world.clone(),
                (&listen, admittance, arrived),
                &directory,
                token,
                presentation,
                ended,
            ))?;
            let runtime = Mutex::new(Some(runtime));
            Ok(Self { world, runtime, stopped: Mutex::new(stopped), end, address, arrivals })
        })
    }

    /// Address of the client listener, with its port.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Offers this server to clients of other machines, as the gateway's service of this name.
    fn offer(&self, gateway: &PyGateway, service: &str) {
        gateway.offer_inside(service, PeerRole::Client, self.arrivals.clone());
    }

    /// Returns whether all hosts have joined.
    fn is_up(&self) -> bool {
        self.world.inspect(Controller::is_up)
    }

    /// Waits for the next process action: a host whose process must end, with its process id if known,
    /// and false; or an island to restart, and true; None after `timeout_s`.
    fn next_stop(&self, py: Python<'_>, timeout_s: f64) -> Option<(u32, Option<u32>, bool)> {
        py.detach(|| {
            let deadline = std::time::Instant::now() + Duration::from_secs_f64(timeout_s);
            let mut stopped = self.stopped.lock();
            loop {
                if let Ok(stop) = stopped.try_recv() {
                    return Some(match stop {
                        ProcessAction::Host { host, process } => (host.0, process, false),
                        ProcessAction::Restart(island) => (island.0, None, true),
                    });
                }
                if std::time::Instant::now() >= deadline {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        })
    }

    /// State of the cluster, as plain dictionaries and lists (metrics).
    fn overview<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        overview(py, &self.world.overview(), &self.world.connections())
    }

    /// Allocates a slice to a client; returns its virtual devices and its island.
    ///
    /// Raises `StatusError` if no island has capacity for it.
    #[pyo3(signature = (client, shape, island, memory))]
    fn allocate(
        &self,
        client: u64,
        shape: Vec<u32>,
        island: Option<u32>,
        memory: Option<u64>,
    ) -> PyResult<(Vec<u32>, u32)> {
        let wanted = SliceRequest { shape, island: island.map(IslandId), memory };
        let slice = self.world.allocate(ClientId(client), &wanted);
        let slice = slice.map_err(|error| status_error(&error))?;
        Ok((slice.devices.iter().map(|device| device.0).collect(), slice.island.0))
    }

    /// Releases a slice of a client.
    fn release(&self, client: u64, devices: Vec<u32>) {
        let devices: Vec<DeviceId> = devices.into_iter().map(DeviceId).collect();
        self.world.release(ClientId(client), &devices);
    }

    /// Adds an island whose hosts are to join; returns its number and those of its hosts.
    fn add_island(&self, hosts: u32, devices: u32) -> PyResult<(u32, Vec<u32>)> {
        if hosts == 0 || devices == 0 {
            return Err(PyValueError::new_err("every island needs a host and a device"));
        }
        let id = self.world.add_island(&IslandSpec::new(hosts, devices));
        let hosts = self.world.inspect(|controller| {
            let island = controller.cluster().island(id).expect("it was just added");
            island.hosts.iter().map(|host| host.0).collect()
        });
        Ok((id.0, hosts))
    }

    /// Starts to remove an island (drain).
    ///
    /// Raises `StatusError` if it does not exist, or if its slices cannot be migrated and `force` is
    /// false.
    fn remove_island(&self, island: u32, force: bool) -> PyResult<()> {
        self.world.remove_island(IslandId(island), force).map_err(|error| status_error(&error))
    }

    /// Returns whether the removal of an island is complete.
    ///
    /// Raises `StatusError` if the island stays.
    fn is_removed(&self, island: u32) -> PyResult<bool> {
        match self.world.removal(IslandId(island)) {
            None => Ok(false),
            Some(ended) => ended.map(|()| true).map_err(|error| status_error(&error)),
        }
    }

    /// What these hosts cannot reach: `(host, peer, error)`, the host itself as peer if the controller
    /// does not reach it; None as long as they have not tried.
    fn unreachable(&self, hosts: Vec<u32>) -> Option<Vec<(u32, u32, String)>> {
        let hosts: Vec<HostId> = hosts.into_iter().map(HostId).collect();
        let found = self.world.unreachable(&hosts)?;
        Some(found.into_iter().map(|(host, peer, error)| (host.0, peer.0, error)).collect())
    }

    /// Reports that an island's hosts could not be started.
    fn fail_island(&self, island: u32, cause: &str) {
        self.world.fail_island(IslandId(island), cause);
    }

    /// The last step of each disconnected client, if clients are captured: `(client, text, error)`,
    /// where either text or error is None.
    fn captured(&self) -> Vec<(u64, Option<String>, Option<String>)> {
        let entry = |(client, step): &(ClientId, Result<Program, ProgramError>)| match step {
            Ok(program) => (client.0, Some(program.to_string()), None),
            Err(error) => (client.0, None, Some(error.to_string())),
        };
        self.world.inspect(|controller| controller.captured().iter().map(entry).collect())
    }

    /// Closes the client listener and all connections.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let _ = self.end.send(true);
            if let Some(runtime) = self.runtime.lock().take() {
                runtime.shutdown_timeout(Duration::from_millis(500));
            }
            self.world.data().close();
        });
    }
}

async fn open(
    world: Arc<World>,
    (listen, admittance, arrivals): (&str, ifrt::Admittance, mpsc::Receiver<PeerConnection>),
    directory: &std::path::Path,
    token: String,
    presentation: ifrt::Presentation,
    mut ended: watch::Receiver<bool>,
) -> PyResult<String> {
    let hosts = tokio::net::UnixListener::bind(directory.join("control.sock")).map_err(os_error)?;
    tokio::spawn(run::accept_hosts(world.clone(), hosts, token));
    let listener = ifrt::Listener::open(listen, admittance).await.map_err(|error| match error {
        ifrt::DoorError::Address { .. } => PyValueError::new_err(error.to_string()),
        ifrt::DoorError::Bind { .. } => PyOSError::new_err(error.to_string()),
    })?;
    let address = listener.address().to_owned();
    tokio::spawn(World::tick(Arc::downgrade(&world)));
    tokio::spawn(async move {
        let until = async move {
            let _ = ended.wait_for(|&over| over).await;
        };
        if let Err(error) = listener.serve(world, presentation, arrivals, until).await {
            eprintln!("fairway: the listener for clients failed: {error}");
        }
    });
    Ok(address)
}

/// Raises the limit of file descriptors to the maximum allowed, as each client needs some.
fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls read or write the one struct.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

fn overview<'py>(
    py: Python<'py>,
    seen: &Overview,
    connections: &[ClientConnection],
) -> PyResult<Bound<'py, PyDict>> {
    let whole = PyDict::new(py);
    whole.set_item("plans", entries(py, &seen.plans, plan_entry)?)?;
    whole.set_item("islands", entries(py, &seen.islands, island_entry)?)?;
    let client = |entry: &Bound<'py, PyDict>, client: &ClientOverview| {
        let connection = connections.iter().find(|connection| connection.client == client.id);
        client_entry(entry, client, connection)
    };
    whole.set_item("clients", entries(py, &seen.clients, client)?)?;
    Ok(whole)
}

/// Makes a dictionary of each item.
fn entries<'py, T>(
    py: Python<'py>,
    items: &[T],
    fill: impl Fn(&Bound<'py, PyDict>, &T) -> PyResult<()>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for item in items {
        let entry = PyDict::new(py);
        fill(&entry, item)?;
        list.append(entry)?;
    }
    Ok(list)
}

fn island_entry(entry: &Bound<'_, PyDict>, island: &IslandOverview) -> PyResult<()> {
    entry.set_item("id", island.id.0)?;
    entry.set_item("state", format!("{:?}", island.state).to_lowercase())?;
    entry.set_item("hosts", entries(entry.py(), &island.hosts, host_entry)?)
}

fn host_entry(entry: &Bound<'_, PyDict>, host: &HostOverview) -> PyResult<()> {
    entry.set_item("id", host.id.0)?;
    entry.set_item("process", host.process)?;
    entry.set_item("devices", host.devices)?;
    entry.set_item("device_kind", &host.device_kind)?;
    entry.set_item("lost", host.lost.as_deref())?;
    entry.set_item("memory_bytes", host.memory.0)?;
    entry.set_item("capacity_bytes", host.capacity.map(|bytes| bytes.0))?;
    entry.set_item("spilled_bytes", host.spilled.0)?;
    entry.set_item("queued", host.queued)?;
    entry.set_item("in_flight", host.in_flight)?;
    let running = host.running.map(|(client, time)| (client.0, time.0 as f64 / 1e9));
    entry.set_item("running_client", running.map(|(client, _)| client))?;
    entry.set_item("running_s", running.map(|(_, seconds)| seconds))
}

fn client_entry(
    entry: &Bound<'_, PyDict>,
    client: &ClientOverview,
    connection: Option<&ClientConnection>,
) -> PyResult<()> {
    entry.set_item("id", client.id.0)?;
    let origin = connection.map(|connection| connection.origin).unwrap_or_default();
    entry.set_item("process", origin.process)?;
    entry.set_item("machine", origin.peer.map(|peer| peer.address.ip().to_string()))?;
    entry.set_item("token", origin.peer.map(|peer| peer.token.to_string()))?;
    entry.set_item("connected_s", connection.map(|c| c.age.as_secs_f64()))?;
    entry.set_item("buffers", client.buffers)?;
    entry.set_item("bytes", client.bytes.0)?;
    entry.set_item("executables", client.executables)?;
    entry.set_item("backlog", client.backlog)?;
    entry.set_item("queued", client.queued)?;
    entry.set_item("weight", client.share.weight)?;
    entry.set_item("priority", client.share.priority)?;
    entry.set_item("device_s", client.device_time.0 as f64 / 1e9)?;
    entry.set_item("moved_bytes", client.moved.0)
}

fn plan_entry(entry: &Bound<'_, PyDict>, plan: &PlanOverview) -> PyResult<()> {
    entry.set_item("program", &*plan.program)?;
    entry.set_item("collectives", plan.collectives)?;
    entry.set_item("plan", plan.plan)?;
    let predicted = plan
        .predicted
        .map(|(before, after)| [before, after].map(|predicted| predicted.0 as f64 / 1e9));
    entry.set_item("predicted_s", predicted)
}

/// What the controller is started with; `fairway.cluster.serving.ServerSettings`.
#[derive(FromPyObject)]
pub(crate) struct ServerSettings {
    /// Hosts, and devices of each host, by island.
    islands: Vec<(u32, u32)>,
    listen: String,
    users: Vec<u32>,
    directory: PathBuf,
    token: String,
    timeout_s: f64,
    slice_index: bool,
    launch_window: u32,
    sequential: bool,
    capture: bool,
    plan: bool,
    /// Whether streams between hosts, and to them, are encrypted.
    encrypt: bool,
    /// Whether all clients may run Python functions as the hosts' user.
    client_code: bool,
}

impl ServerSettings {
    fn config(&self) -> Config {
        let dispatch = if self.sequential { Dispatch::Sequential } else { Dispatch::Parallel };
        Config {
            launch_window: self.launch_window,
            dispatch,
            capture: self.capture,
            plan: self.plan,
            timeout: base::Nanos((self.timeout_s * 1e9) as u64),
            ..Config::default()
        }
    }
}
