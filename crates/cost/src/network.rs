//! The contract between networks and what places steps on them.

use base::{BitsPerSecond, Bytes, Nanos};
use topology::{Interconnect, InterconnectKind};

/// Predicts how long communication takes on a network where nothing else happens.
///
/// ```
/// use base::{Bytes, Nanos};
/// use cost::NetworkModel;
/// let topology: topology::Topology = "elect-cluster:16,server=80Gbit/s,latency=1us".parse().unwrap();
/// let model = topology.interconnect();
/// assert_eq!(model.transfer_time(0, 1, Bytes(1_000_000)), Nanos(2_000));
/// assert_eq!(model.transfer_time(0, 8, Bytes(1_000_000)), Nanos(101_000));
/// ```
pub trait NetworkModel {
    /// Number of devices that it joins.
    fn devices(&self) -> u32;

    /// Time of a transfer from one device to another; zero from a device to itself.
    fn transfer_time(&self, source: u32, target: u32, size: Bytes) -> Nanos;
}

impl NetworkModel for Interconnect {
    fn devices(&self) -> u32 {
        self.devices
    }

    fn transfer_time(&self, source: u32, target: u32, size: Bytes) -> Nanos {
        if source == target {
            return Nanos(0);
        }
        let at = |rate: BitsPerSecond, latency: Nanos| {
            latency + Nanos((size.0 as f64 * 8e9 / rate.0) as u64)
        };
        match &self.kind {
            InterconnectKind::Links(paths) => {
                let network = paths.fabric().network();
                let path = paths.path(source, target);
                let links = || path.iter().map(|&link| network.link(link));
                let rate = links().map(|link| link.rate.0).fold(f64::INFINITY, f64::min);
                at(BitsPerSecond(rate), links().map(|link| link.latency).sum())
            }
            InterconnectKind::Cluster { per_server, server, .. }
                if source / per_server != target / per_server =>
            {
                at(BitsPerSecond(self.rate.0.min(server.0)), self.latency)
            }
            InterconnectKind::Ring(ring) => {
                let up = (target + self.devices - source) % self.devices;
                let hops = up.min(self.devices - up).div_ceil(ring.reach.max(1));
                at(self.rate, Nanos(self.latency.0 * u64::from(hops)))
            }
            _ => at(self.rate, self.latency),
        }
    }
}
