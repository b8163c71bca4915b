//! Resources of an interconnect that transfers use: ports of devices and servers, or circuits.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use topology::{Interconnect, InterconnectKind, LinkPaths};

use super::circuits::Circuits;
use super::rates::{SharePath, Shares, bytes_per_ns};

/// The resources that join the devices of a part.
pub(crate) struct FlowResources {
    pub shares: Shares,
    /// Devices of a part, and of the interconnect.
    devices: u32,
    total: u32,
    kind: Kind,
    /// Resource that limits each device with failed lasers.
    weak: FxHashMap<u32, u32>,
}

enum Kind {
    /// Ports of each device: it sends by resource 2 n and receives by resource 2 n + 1.
    Flat,
    /// The same for devices, then for servers, and the core between servers if it is oversubscribed.
    Cluster {
        per_server: u32,
        core: Option<u32>,
    },
    Circuits(Box<Circuits>),
    /// One resource for each link.
    Links(Arc<LinkPaths>),
}

impl FlowResources {
    /// # Arguments
    /// - `devices`: devices of a part; the interconnect has a multiple of it.
    /// - `wanted`: all flows of a step from devices of the part, to allocate the first circuits.
    /// - `power`: exponent of demands when switch circuits are allocated.
    pub fn new(
        interconnect: &Interconnect,
        devices: u32,
        wanted: impl Iterator<Item = (u32, u32, f64)>,
        power: f64,
    ) -> Self {
        let mut shares = Shares::default();
        let total = interconnect.devices;
        let rate = bytes_per_ns(interconnect.rate);
        let part = |device| interconnect.part_of_device(device, devices);
        let ports = |shares: &mut Shares, count: u32, rate: f64| {
            (0..count).for_each(|device| shares.resources(2, rate * part(device)));
        };
        let mut weak = FxHashMap::default();
        let kind = match &interconnect.kind {
            InterconnectKind::Flat => {
                ports(&mut shares, devices, rate);
                Kind::Flat
            }
            &InterconnectKind::Cluster { per_server, server, oversubscription } => {
                ports(&mut shares, devices, rate);
                let servers = devices.div_ceil(per_server);
                let server = bytes_per_ns(server);
                for number in 0..servers {
                    let part = interconnect.part_of_server(number, servers);
                    shares.resources(2, server * part);
                }
                let between = f64::from(servers) * server / oversubscription;
                let core = (oversubscription > 1.0).then(|| shares.resource(between));
                Kind::Cluster { per_server, core }
            }
            InterconnectKind::Links(paths) => {
                for link in paths.fabric().network().links() {
                    shares.resource(bytes_per_ns(link.rate));
                }
                Kind::Links(paths.clone())
            }
            InterconnectKind::Ring(_)
            | InterconnectKind::Rings { .. }
            | InterconnectKind::Circuits { .. } => {
                for device in (0..devices).filter(|&device| part(device) < 1.0) {
                    weak.insert(device, shares.resource(rate * part(device)));
                }
                let circuits = Circuits::new(interconnect, devices, (wanted, power), &mut shares);
                Kind::Circuits(Box::new(circuits))
            }
        };
        Self { shares, devices, total, kind, weak }
    }

    /// Returns the resources used from a device of the part to any device; none from a device to
    /// itself.
    pub fn path(&mut self, source: u32, target: u32) -> SharePath {
        let target = target % self.total;
        let local = target % self.devices;
        if source == target {
            return SharePath::new();
        }
        match &mut self.kind {
            Kind::Flat => SharePath::from_slice(&[2 * source, 2 * local + 1]),
            Kind::Cluster { per_server, core } => {
                let mut path = SharePath::from_slice(&[2 * source, 2 * local + 1]);
                if source / *per_server != target / *per_server {
                    let first = 2 * self.devices;
                    path.push(first + 2 * (source / *per_server));
                    path.push(first + 2 * (local / *per_server) + 1);
                    path.extend(*core);
                }
                path
            }
            Kind::Links(paths) => paths.path(source, target).iter().map(|link| link.0).collect(),
            Kind::Circuits(circuits) => {
                let mut path = circuits.path(source, target, &mut self.shares);
                path.extend(self.weak.get(&source).copied());
                path
            }
        }
    }

    /// Adds demand for bytes over a path.
    pub fn offer(&mut self, path: &SharePath, bytes: f64) {
        if let Kind::Circuits(circuits) = &mut self.kind {
            circuits.offer(path, bytes);
        }
    }

    /// Removes demand for bytes that have been transferred over a path.
    pub fn done(&mut self, path: &SharePath, bytes: f64) {
        if let Kind::Circuits(circuits) = &mut self.kind {
            circuits.done(path, bytes);
        }
    }

    /// A flow over a path is done.
    pub fn close(&mut self, path: &SharePath) {
        if let Kind::Circuits(circuits) = &mut self.kind {
            circuits.close(path);
        }
    }

    /// Returns when circuits are next decided or lit; `None` for static networks.
    pub fn next(&self, now: u64) -> Option<u64> {
        match &self.kind {
            Kind::Circuits(circuits) => circuits.next(now),
            Kind::Flat | Kind::Cluster { .. } | Kind::Links(_) => None,
        }
    }

    /// Lights or decides circuits that are due.
    pub fn turn(&mut self, now: u64) {
        if let Kind::Circuits(circuits) = &mut self.kind {
            circuits.turn(now, &mut self.shares);
        }
    }

    /// Returns the number of circuit reconfigurations.
    pub fn changes(&self) -> u64 {
        match &self.kind {
            Kind::Circuits(circuits) => circuits.changes,
            Kind::Flat | Kind::Cluster { .. } | Kind::Links(_) => 0,
        }
    }
}
