//! What joins devices, as what each may send and receive, and by which circuits: the fabrics that
//! placements are judged on.
//!
//! Source: SiP-ML §3.1 and §4.1.

use base::{BitsPerSecond, Nanos};
use thiserror::Error;

use crate::network::RATES;

/// Most devices.
const DEVICES_MAX: u32 = 1 << 16;
/// Most wavelengths of a device.
const WAVELENGTHS_MAX: f64 = 4096.0;
/// Most circuit switches.
const SWITCHES_MAX: f64 = 1024.0;
/// The longest time of any kind, in ns: a minute.
const TIME_MAX: f64 = 60e9;

/// Devices, and what joins them.
#[derive(Clone, PartialEq, Debug)]
pub struct Interconnect {
    /// How many there are.
    pub devices: u32,
    /// What each sends, and receives, at most.
    pub rate: BitsPerSecond,
    /// From the first bit sent to the first bit received.
    pub latency: Nanos,
    /// How they are joined.
    pub kind: InterconnectKind,
}

/// How devices are joined.
#[derive(Clone, PartialEq, Debug)]
pub enum InterconnectKind {
    /// By a switch that is never in the way.
    Flat,
    /// By a switch in each server, and a network between servers.
    Cluster {
        /// Devices of a server.
        per_server: u32,
        /// What a server sends to others, and receives from them.
        server: BitsPerSecond,
        /// How much more servers send together than the network between them carries.
        oversubscription: f64,
    },
    /// By wavelengths on a ring of fibre.
    Ring(Ring),
    /// By rings of rows and rings of columns.
    Rings {
        /// Devices of a row.
        columns: u32,
        /// Of each ring; half of a device's wavelengths are of its row.
        ring: Ring,
    },
    /// By switches that join each of their ports to one other.
    Circuits {
        /// How many; each device has a port at every one.
        switches: u32,
        /// How often ports are joined anew; never, if nobody says: once for all of a step.
        every: Option<Nanos>,
        /// How long a switch passes no light meanwhile.
        delay: Nanos,
    },
}

/// A ring of fibre.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ring {
    /// Of each device, in both directions together.
    pub wavelengths: u32,
    /// How far a wavelength may go, in devices.
    pub reach: u32,
    /// How often wavelengths are given out anew.
    pub every: Nanos,
    /// How long a wavelength that is given to others passes no light.
    pub delay: Nanos,
}

/// Numbers of an interconnect that make no sense.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
#[error("{what} is {found}; expected {least} to {most}")]
pub struct InterconnectError {
    /// Which number.
    pub what: &'static str,
    /// As given.
    pub found: f64,
    /// The least it may be.
    pub least: f64,
    /// The most.
    pub most: f64,
}

impl Interconnect {
    /// What each of so many devices gets to its neighbours, that many devices on, when all of them tell
    /// each other something around a ring, and all that lie between likewise.
    ///
    /// ```
    /// use base::{BitsPerSecond, Nanos};
    /// use fabric::{Interconnect, InterconnectKind};
    /// let server = BitsPerSecond(400e9);
    /// let kind = InterconnectKind::Cluster { per_server: 8, server, oversubscription: 1.0 };
    /// let rate = BitsPerSecond(8e12);
    /// let cluster = Interconnect { devices: 64, rate, latency: Nanos(1000), kind };
    /// assert_eq!(cluster.ring_rate(1, 8).0, 8e12);
    /// // One of a server's devices sends to another server; then all eight do.
    /// assert_eq!(cluster.ring_rate(1, 64).0, 400e9);
    /// assert_eq!(cluster.ring_rate(8, 8).0, 50e9);
    /// ```
    pub fn ring_rate(&self, stride: u32, count: u32) -> BitsPerSecond {
        let all = u64::from(stride) * u64::from(count);
        let rate = match self.kind {
            InterconnectKind::Flat | InterconnectKind::Circuits { .. } => self.rate.0,
            InterconnectKind::Cluster { per_server, server, oversubscription } => {
                if all <= u64::from(per_server) {
                    self.rate.0
                } else {
                    let share = f64::from(stride.min(per_server));
                    self.rate.0.min(server.0 / share / oversubscription)
                }
            }
            // Half goes each way; those of all between share a segment.
            InterconnectKind::Ring(_) => self.rate.0 / f64::from(stride),
            InterconnectKind::Rings { columns, .. } => {
                let stride = if stride < columns { stride } else { stride / columns };
                self.rate.0 / 2.0 / f64::from(stride.max(1))
            }
        };
        BitsPerSecond(rate)
    }

    /// Whether what goes up a ring leaves what goes down it alone: then half of what is told around a
    /// ring goes each way.
    pub fn has_directions(&self) -> bool {
        matches!(self.kind, InterconnectKind::Ring(_) | InterconnectKind::Rings { .. })
    }

    /// Devices that stand together: where parts of all are alike, each has a multiple of so many.
    pub fn together(&self) -> u32 {
        match self.kind {
            InterconnectKind::Cluster { per_server, .. } => per_server,
            InterconnectKind::Rings { columns, .. } => columns,
            InterconnectKind::Flat
            | InterconnectKind::Ring(_)
            | InterconnectKind::Circuits { .. } => 1,
        }
    }

    /// Checks that all numbers make sense.
    ///
    /// # Errors
    /// Says which does not.
    pub fn check(&self) -> Result<(), InterconnectError> {
        let devices = f64::from(self.devices);
        let mut numbers = vec![
            ("the number of devices", devices, 1.0, f64::from(DEVICES_MAX)),
            ("bits a second of a device", self.rate.0, *RATES.start(), *RATES.end()),
            ("the latency in ns", self.latency.0 as f64, 0.0, TIME_MAX),
        ];
        let times = |what, every: Nanos, delay: Nanos| {
            [
                (what, every.0 as f64, 1e3, TIME_MAX),
                ("ns without light", delay.0 as f64, 0.0, TIME_MAX),
            ]
        };
        match self.kind {
            InterconnectKind::Flat => {}
            InterconnectKind::Cluster { per_server, server, oversubscription } => numbers.extend([
                ("devices of a server", f64::from(per_server), 1.0, devices),
                ("bits a second of a server", server.0, *RATES.start(), *RATES.end()),
                ("oversubscription", oversubscription, 1.0, 1e3),
            ]),
            InterconnectKind::Ring(ring) | InterconnectKind::Rings { ring, .. } => {
                numbers.extend([
                    ("wavelengths of a device", f64::from(ring.wavelengths), 2.0, WAVELENGTHS_MAX),
                    ("the reach of a wavelength", f64::from(ring.reach), 1.0, devices.max(1.0)),
                ]);
                numbers.extend(times("ns between decisions", ring.every, ring.delay));
            }
            InterconnectKind::Circuits { switches, every, delay } => {
                numbers.push(("switches", f64::from(switches), 2.0, SWITCHES_MAX));
                numbers.extend(times("ns between decisions", every.unwrap_or(Nanos(1000)), delay));
            }
        }
        if let InterconnectKind::Rings { columns, .. } = self.kind {
            numbers.push(("devices of a row", f64::from(columns), 1.0, devices));
        }
        let wrong =
            numbers.into_iter().find(|&(_, found, least, most)| !(least..=most).contains(&found));
        match wrong {
            Some((what, found, least, most)) => Err(InterconnectError { what, found, least, most }),
            None => Ok(()),
        }
    }
}
