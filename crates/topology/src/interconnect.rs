//! Interconnects of devices, described by injection bandwidth and circuits: the fabrics on which
//! placements are evaluated.
//!
//! Source: SiP-ML §3.1 and §4.1.

use std::sync::Arc;

use base::{BitsPerSecond, Nanos};
use thiserror::Error;

use crate::network::RATES;
use crate::paths::LinkPaths;

/// Maximum number of devices.
const DEVICES_MAX: u32 = 1 << 16;
/// Maximum number of wavelengths of a device.
const WAVELENGTHS_MAX: f64 = 4096.0;
/// Maximum number of circuit switches.
const SWITCHES_MAX: f64 = 1024.0;
/// Minimum fraction that a fault leaves of a rate.
const PART_MIN: f64 = 1e-3;
/// Maximum of any time, in ns: a minute.
const TIME_MAX: f64 = 60e9;

/// Devices and their interconnect.
#[derive(Clone, PartialEq, Debug)]
pub struct Interconnect {
    /// Number of devices.
    pub devices: u32,
    /// Injection bandwidth of a device, in each direction.
    pub rate: BitsPerSecond,
    /// From the first bit sent to the first bit received.
    pub latency: Nanos,
    /// Topology.
    pub kind: InterconnectKind,
    /// Faults.
    pub faults: Faults,
}

/// Faults of an interconnect: slow devices and servers (stragglers), and a cut fibre.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Faults {
    /// Devices with only a fraction of their lasers or links, as (device, fraction).
    pub devices: Vec<(u32, f64)>,
    /// Servers with only a fraction of their links, as (server, fraction).
    pub servers: Vec<(u32, f64)>,
    /// Whether the fibre of a ring is cut between the last device and the first.
    pub is_cut: bool,
}

/// How members of a collective exchange data with their neighbours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Around {
    /// Each sends to the next, around a ring.
    OneWay,
    /// Each sends half to the next and half to the previous device, which has wavelengths of its own
    /// for that.
    BothWays,
    /// Each sends to both neighbours, from both ends of a row.
    Row,
}

/// Topology of an interconnect.
#[derive(Clone, PartialEq, Debug)]
pub enum InterconnectKind {
    /// A non-blocking switch.
    Flat,
    /// A switch in each server, and a network between servers.
    Cluster {
        /// Devices per server.
        per_server: u32,
        /// Bandwidth of a server to and from the others, in each direction.
        server: BitsPerSecond,
        /// Ratio of the servers' total bandwidth to that of the network between them.
        oversubscription: f64,
    },
    /// Wavelengths on a ring of fibre.
    Ring(Ring),
    /// Rings of rows and rings of columns.
    Rings {
        /// Devices per row.
        columns: u32,
        /// Parameters of each ring; half of a device's wavelengths belong to its row.
        ring: Ring,
    },
    /// Optical circuit switches, which connect each port to one other.
    Circuits {
        /// Number of switches; each device has a port at every switch.
        switches: u32,
        /// Reconfiguration interval; `None` to configure once for a whole step.
        every: Option<Nanos>,
        /// Reconfiguration delay, during which changed circuits pass no light.
        delay: Nanos,
        /// Internal Clos structure, if a switch is not monolithic.
        clos: Option<Clos>,
    },
    /// Links between devices and packet switches, with static paths.
    Links(Arc<LinkPaths>),
}

/// Circuit switches built as Clos networks of smaller ones.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Clos {
    /// Devices whose ports are on one leaf.
    pub devices: u32,
    /// Ratio of a leaf's device ports to its uplinks.
    pub oversubscription: f64,
}

impl Clos {
    /// Returns the uplinks of a leaf over all `switches` switches.
    pub fn uplinks(&self, switches: u32) -> u32 {
        (f64::from(self.devices) * f64::from(switches) / self.oversubscription) as u32
    }
}

/// A ring of fibre.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ring {
    /// Wavelengths per device, both directions together.
    pub wavelengths: u32,
    /// Reach of a circuit, in devices.
    pub reach: u32,
    /// Reconfiguration interval.
    pub every: Nanos,
    /// Reconfiguration delay, during which a reassigned wavelength passes no light.
    pub delay: Nanos,
}

/// A parameter of an interconnect is out of range.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
#[error("{what} is {found}; expected {least} to {most}")]
pub struct InterconnectError {
    /// The parameter.
    pub what: &'static str,
    /// The value found.
    pub found: f64,
    /// Minimum.
    pub least: f64,
    /// Maximum.
    pub most: f64,
}

impl Interconnect {
    /// Returns the latency between two devices: of the links of its path, or the same for all pairs.
    pub fn latency_between(&self, source: u32, target: u32) -> Nanos {
        match &self.kind {
            _ if source == target => Nanos(0),
            InterconnectKind::Links(paths) => paths.along_path(source, target).1,
            _ => self.latency,
        }
    }

    /// Returns the bandwidth of each of `count` devices to its neighbour `stride` devices on, when all
    /// of them communicate around a ring, and the `stride` interleaved rings likewise.
    ///
    /// ```
    /// use base::{BitsPerSecond, Nanos};
    /// use topology::{Interconnect, InterconnectKind};
    /// let server = BitsPerSecond(400e9);
    /// let kind = InterconnectKind::Cluster { per_server: 8, server, oversubscription: 1.0 };
    /// let rate = BitsPerSecond(8e12);
    /// let (latency, faults) = (Nanos(1000), Default::default());
    /// let cluster = Interconnect { devices: 64, rate, latency, kind, faults };
    /// assert_eq!(cluster.ring_rate(1, 8).0, 8e12);
    /// // One of a server's devices sends to another server; then all eight do.
    /// assert_eq!(cluster.ring_rate(1, 64).0, 400e9);
    /// assert_eq!(cluster.ring_rate(8, 8).0, 50e9);
    /// ```
    pub fn ring_rate(&self, stride: u32, count: u32) -> BitsPerSecond {
        let all = u64::from(stride) * u64::from(count);
        let rate = match &self.kind {
            InterconnectKind::Links(paths) => paths.ring_rate(stride, count).0,
            &InterconnectKind::Circuits { clos: Some(clos), .. }
                if all > u64::from(clos.devices) =>
            {
                let crossing = f64::from(stride.min(clos.devices)) * clos.oversubscription;
                self.rate.0 * (f64::from(clos.devices) / crossing).min(1.0)
            }
            InterconnectKind::Flat | InterconnectKind::Circuits { .. } => self.rate.0,
            &InterconnectKind::Cluster { per_server, server, oversubscription } => {
                if all <= u64::from(per_server) {
                    self.rate.0
                } else {
                    let share = f64::from(stride.min(per_server));
                    self.rate.0.min(server.0 / share / oversubscription)
                }
            }
            // Half goes each way; the interleaved rings share segments.
            InterconnectKind::Ring(_) => self.rate.0 / f64::from(stride),
            &InterconnectKind::Rings { columns, .. } => {
                let stride = if stride < columns { stride } else { stride / columns };
                self.rate.0 / 2.0 / f64::from(stride.max(1))
            }
        };
        BitsPerSecond(rate)
    }

    /// Returns how a collective exchanges data among members from `first` to `last`: on fibre, around a
    /// ring in both directions, or along a row where the way back is the same as the way there.
    pub fn around(&self, first: u32, last: u32) -> Around {
        match self.kind {
            InterconnectKind::Ring(_) if self.faults.is_cut || last - first <= self.devices / 2 => {
                Around::Row
            }
            InterconnectKind::Ring(_) | InterconnectKind::Rings { .. } => Around::BothWays,
            InterconnectKind::Flat
            | InterconnectKind::Cluster { .. }
            | InterconnectKind::Links(_)
            | InterconnectKind::Circuits { .. } => Around::OneWay,
        }
    }

    /// Returns the fraction of its rate that a device has: the least of all devices that are a multiple
    /// of `apart` away.
    pub fn part_of_device(&self, device: u32, apart: u32) -> f64 {
        least(&self.faults.devices, device, apart)
    }

    /// Returns the fraction of its rate that a server has, likewise.
    pub fn part_of_server(&self, server: u32, apart: u32) -> f64 {
        least(&self.faults.servers, server, apart)
    }

    /// Returns the granularity of parts: where parts of the interconnect are alike, each has a multiple
    /// of this many devices.
    pub fn together(&self) -> u32 {
        match self.kind {
            InterconnectKind::Cluster { per_server, .. } => per_server,
            InterconnectKind::Rings { columns, .. } => columns,
            InterconnectKind::Circuits { clos: Some(clos), .. } => clos.devices,
            InterconnectKind::Links(_) => self.devices,
            InterconnectKind::Flat
            | InterconnectKind::Ring(_)
            | InterconnectKind::Circuits { .. } => 1,
        }
    }

    /// Checks that all parameters are in range.
    ///
    /// # Errors
    /// Returns the first parameter that is out of range.
    pub fn check(&self) -> Result<(), InterconnectError> {
        let mut bounds = vec![
            ("the number of devices", f64::from(self.devices), 1.0, f64::from(DEVICES_MAX)),
            ("bits a second of a device", self.rate.0, *RATES.start(), *RATES.end()),
            ("the latency in ns", self.latency.0 as f64, 0.0, TIME_MAX),
        ];
        bounds.extend(self.bounds_of_kind());
        bounds.extend(self.bounds_of_faults());
        let wrong =
            bounds.into_iter().find(|&(_, found, least, most)| !(least..=most).contains(&found));
        match wrong {
            Some((what, found, least, most)) => Err(InterconnectError { what, found, least, most }),
            None => Ok(()),
        }
    }

    fn bounds_of_kind(&self) -> Vec<Bound> {
        let devices = f64::from(self.devices);
        let times = |what, every: Nanos, delay: Nanos| {
            [
                (what, every.0 as f64, 1e3, TIME_MAX),
                ("ns without light", delay.0 as f64, 0.0, TIME_MAX),
            ]
        };
        let mut bounds = Vec::new();
        match self.kind {
            InterconnectKind::Flat | InterconnectKind::Links(_) => {}
            InterconnectKind::Cluster { per_server, server, oversubscription } => bounds.extend([
                ("devices of a server", f64::from(per_server), 1.0, devices),
                ("bits a second of a server", server.0, *RATES.start(), *RATES.end()),
                ("oversubscription", oversubscription, 1.0, 1e3),
            ]),
            InterconnectKind::Ring(ring) | InterconnectKind::Rings { ring, .. } => {
                bounds.extend([
                    ("wavelengths of a device", f64::from(ring.wavelengths), 2.0, WAVELENGTHS_MAX),
                    ("the reach of a wavelength", f64::from(ring.reach), 1.0, devices.max(1.0)),
                ]);
                bounds.extend(times("ns between decisions", ring.every, ring.delay));
            }
            InterconnectKind::Circuits { switches, every, delay, clos } => {
                bounds.push(("switches", f64::from(switches), 2.0, SWITCHES_MAX));
                if let Some(Clos { devices: of_leaf, oversubscription }) = clos {
                    bounds.push(("devices of a leaf", f64::from(of_leaf), 1.0, devices));
                    let most = f64::from(of_leaf.max(1));
                    bounds.push(("oversubscription", oversubscription, 1.0, most));
                }
                bounds.extend(times("ns between decisions", every.unwrap_or(Nanos(1000)), delay));
            }
        }
        if let InterconnectKind::Rings { columns, .. } = self.kind {
            bounds.push(("devices of a row", f64::from(columns), 1.0, devices));
        }
        bounds
    }

    fn bounds_of_faults(&self) -> Vec<Bound> {
        let servers = match self.kind {
            InterconnectKind::Cluster { per_server, .. } => {
                self.devices.div_ceil(per_server.max(1))
            }
            _ => 0,
        };
        let Faults { devices: weak, servers: slow, is_cut } = &self.faults;
        let mut bounds =
            vec![("the number of weak servers", slow.len() as f64, 0.0, f64::from(servers))];
        let named = [("a weak device", weak, self.devices), ("a weak server", slow, servers)];
        for (what, faults, count) in named {
            for &(number, part) in faults {
                bounds.push((what, f64::from(number), 0.0, f64::from(count) - 1.0));
                bounds.push(("what is left of it", part, PART_MIN, 1.0));
            }
        }
        let rings = f64::from(u8::from(matches!(self.kind, InterconnectKind::Ring(_))));
        bounds.push(("the number of cuts", f64::from(u8::from(*is_cut)), 0.0, rings));
        bounds
    }
}

/// What a number is of, the number, and the least and the greatest that it may be.
type Bound = (&'static str, f64, f64, f64);

fn least(faults: &[(u32, f64)], number: u32, apart: u32) -> f64 {
    let alike = faults.iter().filter(|fault| fault.0 % apart.max(1) == number % apart.max(1));
    alike.map(|fault| fault.1).fold(1.0, f64::min)
}
