//! Cost model: times measured on real processes, or assumed where a machine is modelled.

use base::Nanos;

/// Costs of a modelled system.
#[derive(Debug, Clone, PartialEq)]
pub struct SimCosts {
    /// Controller: time to handle one client request.
    pub request: Nanos,
    /// Controller: time to send one command to one host.
    pub command: Nanos,
    /// Controller: time to handle one host report.
    pub report: Nanos,
    /// Client: time to issue one request.
    pub client: Nanos,
    /// Host: time to enqueue one launch on its devices.
    pub launch: Nanos,
    /// Host: time to execute any other command.
    pub step: Nanos,
    /// One-way network latency between client, controller and host.
    pub network: Nanos,
    /// Time of a computation's collective among the devices of one host.
    pub collective: Nanos,
    /// Additional collective time for each doubling of hosts.
    pub collective_per_doubling: Nanos,
    /// Transfer time between two hosts, in nanoseconds per byte.
    pub transfer_ns_per_byte: f64,
    /// Dispatch time of one computation in a Python process of multi-controller JAX.
    pub jax_dispatch: Nanos,
}

impl SimCosts {
    /// Returns costs measured on two cores at 2.1 GHz with CPU devices, except where marked.
    ///
    /// From `python benchmarks/controller.py`, op by op on 1 to 256 hosts: the controller's three
    /// costs, which explain the server's CPU time within 37 % at each number of hosts, sockets and
    /// wake-ups included, as if it had one core; and `client`, the time of the launching thread,
    /// without the threads that write to the network.
    ///
    /// Assumed: `launch` and `step`, of which the benchmark shows the sum on CPUs, 17 us, with the
    /// computation itself, which runs on the launching thread; `jax_dispatch`; the network, 20 us one
    /// way in a data centre; 10 us for a collective within a host and 1 us per doubling, the order of a
    /// TPU pod; 12.5 GB/s between hosts.
    pub fn measured() -> Self {
        Self {
            request: Nanos(7_600),
            command: Nanos(240),
            report: Nanos(2_200),
            client: Nanos(18_000),
            launch: Nanos(7_000),
            step: Nanos(2_000),
            network: Nanos(20_000),
            collective: Nanos(10_000),
            collective_per_doubling: Nanos(1_000),
            transfer_ns_per_byte: 0.08,
            jax_dispatch: Nanos(60_000),
        }
    }

    /// Returns the time of one collective over `hosts` hosts.
    pub fn collective_over(&self, hosts: u32) -> Nanos {
        let doublings = u64::from(hosts.max(1).next_power_of_two().trailing_zeros());
        Nanos(self.collective.0 + doublings * self.collective_per_doubling.0)
    }
}
