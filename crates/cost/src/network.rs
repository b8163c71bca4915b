//! The contract between networks and what places and plans steps on them.

use std::collections::BTreeMap;

use base::{BitsPerSecond, Bytes, Nanos};
use ir::CollectiveKind;
use topology::{Interconnect, InterconnectKind};

/// What a device has of a network: its injection bandwidth, and the latency to a neighbour.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Port {
    /// Rate of sending and of receiving.
    pub rate: BitsPerSecond,
    /// From the first bit sent to the first bit received.
    pub latency: Nanos,
}

impl Port {
    /// Time until all of a message has been received.
    pub fn time(&self, size: Bytes) -> Nanos {
        self.latency + Nanos((size.0 as f64 * 8e9 / self.rate.0).round() as u64)
    }
}

/// Predicts how long communication takes on a network where nothing else happens.
///
/// ```
/// use base::{Bytes, Nanos};
/// use cost::NetworkModel;
/// use ir::CollectiveKind;
/// let topology: topology::Topology = "elect-cluster:16,server=80Gbit/s,latency=1us".parse().unwrap();
/// let model = topology.interconnect();
/// assert_eq!(model.transfer_time(0, 1, Bytes(1_000_000)), Nanos(2_000));
/// assert_eq!(model.transfer_time(0, 8, Bytes(1_000_000)), Nanos(101_000));
/// // 14 rounds of a ring over two servers, each as long as between servers.
/// let all: Vec<u32> = (4..12).collect();
/// let time = model.collective_time(&CollectiveKind::AllReduce, &all, Bytes(8_000_000));
/// assert_eq!(time, Nanos(14 * 101_000));
/// ```
pub trait NetworkModel: Send + Sync {
    /// Number of devices that it joins.
    fn devices(&self) -> u32;

    /// What each device has of it.
    fn port(&self) -> Port;

    /// Time of a transfer from one device to another; zero from a device to itself.
    fn transfer_time(&self, source: u32, target: u32, size: Bytes) -> Nanos;

    /// Time of transfers that are sent together, as (source, target, size): by default until the busiest
    /// port has sent and received its own, and the farthest has arrived. O(transfers · log devices).
    fn round_time(&self, transfers: &[(u32, u32, Bytes)]) -> Nanos {
        let ports = Loads::of_ports(transfers.iter().copied());
        self.farthest(transfers) + ports.time(self.port().rate)
    }

    /// Latency of the transfer that takes longest to arrive.
    fn farthest(&self, transfers: &[(u32, u32, Bytes)]) -> Nanos {
        let latency = |&(source, target, _)| self.transfer_time(source, target, Bytes(0));
        transfers.iter().map(latency).max().unwrap_or_default()
    }

    /// Time of a collective on vectors of `size` bytes; for an all-to-all, that is of all blocks of all
    /// ranks. By default around a ring of the devices in rank order, whose rounds take as long as the
    /// slowest transfer to a neighbour; a broadcast or reduction passes along it in pieces, one behind
    /// the other. O(devices).
    fn collective_time(&self, kind: &CollectiveKind, devices: &[u32], size: Bytes) -> Nanos {
        let count = devices.len() as u64;
        if count < 2 {
            return Nanos(0);
        }
        let next = devices.iter().cycle().skip(1);
        let around = devices.iter().zip(next);
        let slowest = |size: Bytes| {
            let times = around.clone().map(|(&one, &other)| self.transfer_time(one, other, size));
            times.max().unwrap_or_default().0
        };
        if matches!(kind, CollectiveKind::Broadcast { .. } | CollectiveKind::Reduce { .. }) {
            return Nanos((count - 2) * slowest(Bytes(0)) + slowest(size));
        }
        let block = match kind {
            CollectiveKind::AllToAll { .. } => size.0.div_ceil(count * count),
            _ => size.0.div_ceil(count),
        };
        Nanos(u64::from(kind.passes()) * (count - 1) * slowest(Bytes(block)))
    }
}

/// Bytes by what carries them.
#[derive(Default)]
struct Loads(BTreeMap<u64, u64>);

impl Loads {
    /// What each port sends and receives of transfers.
    fn of_ports(transfers: impl Iterator<Item = (u32, u32, Bytes)>) -> Self {
        let mut loads = Self::default();
        for (source, target, size) in transfers.filter(|one| one.0 != one.1) {
            loads.add(u64::from(source) << 1, size);
            loads.add(u64::from(target) << 1 | 1, size);
        }
        loads
    }

    fn add(&mut self, carrier: u64, size: Bytes) {
        *self.0.entry(carrier).or_default() += size.0;
    }

    /// Time until the busiest carrier is done, at a rate that all have.
    fn time(&self, rate: BitsPerSecond) -> Nanos {
        let most = self.0.values().copied().max().unwrap_or_default();
        Port { rate, latency: Nanos(0) }.time(Bytes(most))
    }
}

impl NetworkModel for Interconnect {
    /// Until the busiest link, or the busiest device and server, has carried its own.
    fn round_time(&self, transfers: &[(u32, u32, Bytes)]) -> Nanos {
        let ports = || Loads::of_ports(transfers.iter().copied()).time(self.rate);
        let busiest = match &self.kind {
            InterconnectKind::Links(paths) => {
                let (mut links, mut slowest) = (Loads::default(), f64::INFINITY);
                for &(source, target, size) in transfers.iter().filter(|one| one.0 != one.1) {
                    for &link in paths.path(source, target).iter() {
                        links.add(u64::from(link.0), size);
                        slowest = slowest.min(paths.fabric().network().link(link).rate.0);
                    }
                }
                links.time(BitsPerSecond(slowest))
            }
            InterconnectKind::Cluster { per_server, server, .. } => {
                let across = transfers.iter().map(|&(source, target, size)| {
                    (source / per_server, target / per_server, size)
                });
                ports().max(Loads::of_ports(across).time(*server))
            }
            _ => ports(),
        };
        self.farthest(transfers) + busiest
    }

    fn devices(&self) -> u32 {
        self.devices
    }

    fn port(&self) -> Port {
        let link = match &self.kind {
            InterconnectKind::Links(paths) => paths.fabric().network().links().first(),
            _ => None,
        };
        let (rate, latency) =
            link.map_or((self.rate, self.latency), |link| (link.rate, link.latency));
        Port { rate, latency }
    }

    fn transfer_time(&self, source: u32, target: u32, size: Bytes) -> Nanos {
        if source == target {
            return Nanos(0);
        }
        let at = |rate: BitsPerSecond, latency: Nanos| Port { rate, latency }.time(size);
        match &self.kind {
            InterconnectKind::Links(paths) => {
                let (rate, latency) = paths.along_path(source, target);
                at(rate, latency)
            }
            InterconnectKind::Cluster { per_server, server, .. }
                if source / per_server != target / per_server =>
            {
                at(BitsPerSecond(self.rate.0.min(server.0)), self.latency)
            }
            InterconnectKind::Ring(ring) => {
                let up = (target + self.devices - source) % self.devices;
                let hops = up.min(self.devices - up).div_ceil(ring.reach.max(1));
                // Half of a device's wavelengths are of each direction.
                at(BitsPerSecond(self.rate.0 / 2.0), Nanos(self.latency.0 * u64::from(hops)))
            }
            _ => at(self.rate, self.latency),
        }
    }
}
