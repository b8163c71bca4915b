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
/// The least that may be left of something.
const PART_MIN: f64 = 1e-3;
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
    /// What is broken.
    pub faults: Faults,
}

/// What is broken of an interconnect.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Faults {
    /// Devices that have only a part of their lasers, or of their links.
    pub devices: Vec<(u32, f64)>,
    /// Servers that have only a part of their links.
    pub servers: Vec<(u32, f64)>,
    /// Does no light pass from the last device of a ring to the first?
    pub is_cut: bool,
}

/// How devices tell each other something, all of them alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Around {
    /// To the next, around a ring.
    OneWay,
    /// Half of it that way and half of it to the one before, who has wavelengths of its own for that.
    BothWays,
    /// To those beside, from both ends of a row.
    Row,
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
        /// Of what they are made, if not of one piece.
        clos: Option<Clos>,
    },
}

/// Switches that are Clos networks of smaller ones.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Clos {
    /// Devices whose ports are at one leaf.
    pub devices: u32,
    /// How many more of them there are than uplinks.
    pub oversubscription: f64,
}

impl Clos {
    /// Uplinks of a leaf at so many switches.
    pub fn uplinks(&self, switches: u32) -> u32 {
        (f64::from(self.devices) * f64::from(switches) / self.oversubscription) as u32
    }
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
    /// let (latency, faults) = (Nanos(1000), Default::default());
    /// let cluster = Interconnect { devices: 64, rate, latency, kind, faults };
    /// assert_eq!(cluster.ring_rate(1, 8).0, 8e12);
    /// // One of a server's devices sends to another server; then all eight do.
    /// assert_eq!(cluster.ring_rate(1, 64).0, 400e9);
    /// assert_eq!(cluster.ring_rate(8, 8).0, 50e9);
    /// ```
    pub fn ring_rate(&self, stride: u32, count: u32) -> BitsPerSecond {
        let all = u64::from(stride) * u64::from(count);
        let rate = match self.kind {
            InterconnectKind::Circuits { clos: Some(clos), .. }
                if all > u64::from(clos.devices) =>
            {
                let crossing = f64::from(stride.min(clos.devices)) * clos.oversubscription;
                self.rate.0 * (f64::from(clos.devices) / crossing).min(1.0)
            }
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

    /// How members of a collective tell each other what they have, from the lowest number to the
    /// highest: around rings of fibre, unless the way back is the way there.
    pub fn around(&self, first: u32, last: u32) -> Around {
        match self.kind {
            InterconnectKind::Ring(_) if self.faults.is_cut || last - first <= self.devices / 2 => {
                Around::Row
            }
            InterconnectKind::Ring(_) | InterconnectKind::Rings { .. } => Around::BothWays,
            InterconnectKind::Flat
            | InterconnectKind::Cluster { .. }
            | InterconnectKind::Circuits { .. } => Around::OneWay,
        }
    }

    /// The part of its rate that a device has, of those that are so many apart the one with least.
    pub fn part_of_device(&self, device: u32, apart: u32) -> f64 {
        least(&self.faults.devices, device, apart)
    }

    /// Likewise of a server.
    pub fn part_of_server(&self, server: u32, apart: u32) -> f64 {
        least(&self.faults.servers, server, apart)
    }

    /// Devices that stand together: where parts of all are alike, each has a multiple of so many.
    pub fn together(&self) -> u32 {
        match self.kind {
            InterconnectKind::Cluster { per_server, .. } => per_server,
            InterconnectKind::Rings { columns, .. } => columns,
            InterconnectKind::Circuits { clos: Some(clos), .. } => clos.devices,
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
            InterconnectKind::Circuits { switches, every, delay, clos } => {
                numbers.push(("switches", f64::from(switches), 2.0, SWITCHES_MAX));
                if let Some(Clos { devices: of_leaf, oversubscription }) = clos {
                    numbers.push(("devices of a leaf", f64::from(of_leaf), 1.0, devices));
                    let most = f64::from(of_leaf.max(1));
                    numbers.push(("oversubscription", oversubscription, 1.0, most));
                }
                numbers.extend(times("ns between decisions", every.unwrap_or(Nanos(1000)), delay));
            }
        }
        if let InterconnectKind::Rings { columns, .. } = self.kind {
            numbers.push(("devices of a row", f64::from(columns), 1.0, devices));
        }
        let servers = match self.kind {
            InterconnectKind::Cluster { per_server, .. } => {
                self.devices.div_ceil(per_server.max(1))
            }
            _ => 0,
        };
        let Faults { devices: weak, servers: slow, is_cut } = &self.faults;
        numbers.push(("the number of weak servers", slow.len() as f64, 0.0, f64::from(servers)));
        let named = [("a weak device", weak, self.devices), ("a weak server", slow, servers)];
        for (what, faults, count) in named {
            for &(number, part) in faults {
                numbers.push((what, f64::from(number), 0.0, f64::from(count) - 1.0));
                numbers.push(("what is left of it", part, PART_MIN, 1.0));
            }
        }
        let rings = f64::from(u8::from(matches!(self.kind, InterconnectKind::Ring(_))));
        numbers.push(("the number of cuts", f64::from(u8::from(*is_cut)), 0.0, rings));
        let wrong =
            numbers.into_iter().find(|&(_, found, least, most)| !(least..=most).contains(&found));
        match wrong {
            Some((what, found, least, most)) => Err(InterconnectError { what, found, least, most }),
            None => Ok(()),
        }
    }
}

fn least(faults: &[(u32, f64)], number: u32, apart: u32) -> f64 {
    let alike = faults.iter().filter(|fault| fault.0 % apart.max(1) == number % apart.max(1));
    alike.map(|fault| fault.1).fold(1.0, f64::min)
}
