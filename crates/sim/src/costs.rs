//! What things cost: measured on real processes, or assumed where a machine is modelled.

use base::Nanos;

/// The times of a modelled system.
#[derive(Debug, Clone, PartialEq)]
pub struct SimCosts {
    /// The controller takes a request of a client.
    pub request: Nanos,
    /// The controller sends one command to one host.
    pub command: Nanos,
    /// The controller takes one report of a host.
    pub report: Nanos,
    /// A client makes one request.
    pub client: Nanos,
    /// A host hands one launch to its devices.
    pub launch: Nanos,
    /// A host carries out any other command.
    pub step: Nanos,
    /// A message travels between client, controller and host.
    pub network: Nanos,
    /// The collective of a computation, among the devices of one host.
    pub collective: Nanos,
    /// What it takes longer for each doubling of hosts.
    pub collective_per_doubling: Nanos,
    /// A byte travels between two hosts.
    pub transfer_ns_per_byte: f64,
    /// A Python process of multi-controller JAX launches one computation.
    pub jax_dispatch: Nanos,
}

impl SimCosts {
    /// Measured on two cores at 2.1 GHz with CPU devices, except what is marked.
    ///
    /// From `python benchmarks/controller.py`, op by op on 1 to 256 hosts: the controller's three,
    /// which explain the server's processor time within 37 % at each number of hosts, sockets and
    /// wake-ups included, as if it had one core; and `client`, the thread that launches, without
    /// those that write to the network.
    ///
    /// Assumed: `launch` and `step`, of which it shows the sum on CPUs, 17 us, with the computation
    /// itself, which runs on the thread that launches; `jax_dispatch`; the network, 20 us one way in
    /// a data centre; 10 us for a collective in a host and 1 us for each doubling, which are a TPU
    /// pod's order; 12.5 GB/s between hosts.
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

    /// One collective over so many hosts.
    pub fn collective_over(&self, hosts: u32) -> Nanos {
        let doublings = u64::from(hosts.max(1).next_power_of_two().trailing_zeros());
        Nanos(self.collective.0 + doublings * self.collective_per_doubling.0)
    }
}
