//! Topologies by name: one grammar for packet networks and for electrical and optical interconnects.
//!
//! A name is `KIND:SIZE`, with options behind commas: `dragonfly:264`, `torus:8x8,rate=200Gbit/s`,
//! `sip-ring:1024,wavelengths=64`. From a topology, views are made: the links
//! that packets take ([`Topology::links`]), and the shares of resources that flows get, from which
//! closed forms follow too ([`Topology::interconnect`]).

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use base::{BitsPerSecond, Nanos};
use thiserror::Error;

use crate::dragonfly::{Dragonfly, DragonflyError};
use crate::fabric::Fabric;
use crate::interconnect::{Clos, Faults, Interconnect, InterconnectError, InterconnectKind, Ring};
use crate::network::NetworkError;
use crate::paths::LinkPaths;
use crate::topologies::{clusters, fat_tree, ring, switch, torus};
use crate::wiring::LinkModel;

/// Maximum number of endpoints of a packet network.
const ENDPOINTS_MAX: u64 = 1 << 20;
/// Maximum length of a name, in bytes.
const NAME_MAX: usize = 4096;

/// Kinds of packet network, and the form of their size.
const LINKED: [(&str, &str); 6] = [
    ("dragonfly", "CHIPS"),
    ("torus", "8x8"),
    ("ring", "CHIPS[xCABLES]"),
    ("switch", "CHIPS"),
    ("fattree", "PORTS"),
    ("cluster", "NODESxCHIPS"),
];
/// Kinds of electrical and optical interconnect, likewise.
const SHARED: [(&str, &str); 5] = [
    ("elect-flat", "DEVICES"),
    ("elect-cluster", "DEVICES"),
    ("sip-ring", "DEVICES"),
    ("sip-rings", "ROWSxCOLUMNS"),
    ("sip-ocs", "DEVICES"),
];

/// Why a name does not describe a topology.
#[derive(Debug, Error, PartialEq)]
pub enum TopologyError {
    /// There is no such kind, or its size is malformed.
    #[error("cannot read a fabric from {found:?}; expected {}", kinds())]
    Unknown {
        /// The name.
        found: String,
    },
    /// A kind without its size.
    #[error(
        "cannot read a fabric from {kind:?} without a size; give a size, as in {kind}:{example}"
    )]
    Size {
        /// The kind.
        kind: String,
        /// A size to try.
        example: &'static str,
    },
    /// An option that the kind does not have.
    #[error("{kind} has no {found:?}; there are {}", known.join(", "))]
    Option {
        /// The kind.
        kind: String,
        /// The option found.
        found: String,
        /// Options of that kind.
        known: Vec<&'static str>,
    },
    /// The value of an option is malformed.
    #[error("{option} of {kind} is {found:?}; expected {expected}")]
    Value {
        /// The kind.
        kind: String,
        /// The option.
        option: &'static str,
        /// The value found.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
    /// No switch is left.
    #[error("{failed} of {switches} switches failed; expected one that is left")]
    Switches {
        /// Failed switches.
        failed: u32,
        /// Switches.
        switches: u32,
    },
    /// Oversubscription of switches that have no leaves.
    #[error("oversubscription of sip-ocs is that of a leaf; expected leaf=DEVICES")]
    Leaf,
    /// A parameter is out of range.
    #[error("{name:?} cannot be: {error}")]
    Range {
        /// The name.
        name: String,
        /// The parameter.
        error: InterconnectError,
    },
    /// No such Dragonfly can be wired.
    #[error(transparent)]
    Dragonfly(#[from] DragonflyError),
    /// The parameters do not form a valid network.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

fn kinds() -> String {
    let all = LINKED.iter().chain(&SHARED);
    let forms: Vec<String> = all.map(|(kind, size)| format!("{kind}:{size}")).collect();
    format!("{}, of at most {ENDPOINTS_MAX} chips", forms.join(", "))
}

/// What joins devices, with the name that describes it.
///
/// ```
/// use topology::Topology;
/// let torus: Topology = "torus:4x4,rate=200Gbit/s".parse().unwrap();
/// assert_eq!((torus.devices(), torus.to_string().as_str()), (16, "torus:4x4,rate=200Gbit/s"));
/// assert!(torus.links().is_some());
/// let ring: Topology = "sip-ring:1024,wavelengths=64".parse().unwrap();
/// assert!(ring.links().is_none(), "light takes circuits, not links");
/// assert_eq!(ring.interconnect().devices, 1024);
/// ```
#[derive(Clone, Debug)]
pub struct Topology {
    name: Arc<str>,
    interconnect: Interconnect,
}

impl Topology {
    /// A topology of links, for instance of a file.
    pub fn of_links(name: &str, fabric: Fabric) -> Self {
        let devices = fabric.network().endpoints();
        let paths = Arc::new(LinkPaths::new(fabric));
        let interconnect = Interconnect {
            devices,
            rate: paths.injection_rate(),
            latency: paths.latency(),
            kind: InterconnectKind::Links(paths),
            faults: Faults::default(),
        };
        Self { name: name.into(), interconnect }
    }

    /// Number of devices that it joins.
    pub fn devices(&self) -> u32 {
        self.interconnect.devices
    }

    /// The links that packets take; `None` of interconnects that are modelled by shares of bandwidth
    /// or circuits.
    pub fn links(&self) -> Option<&Fabric> {
        match &self.interconnect.kind {
            InterconnectKind::Links(paths) => Some(paths.fabric()),
            _ => None,
        }
    }

    /// The shares of resources that flows get.
    pub fn interconnect(&self) -> &Interconnect {
        &self.interconnect
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl FromStr for Topology {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        let (head, given) = text.split_once(',').unwrap_or((text, ""));
        let known = head.split_once(':').filter(|_| text.len() <= NAME_MAX);
        let Some((kind, size)) = known else {
            return Err(match LINKED.iter().chain(&SHARED).any(|(kind, _)| *kind == head) {
                true => TopologyError::Size { kind: head.to_owned(), example: example(head) },
                false => unknown(head),
            });
        };
        let extents: Result<Vec<u32>, _> = size.split('x').map(str::parse).collect();
        let extents = extents.map_err(|_| unknown(head))?;
        let mut options = Options::new(kind, given);
        let interconnect = match linked(head, kind, &extents, &mut options)? {
            Some(fabric) => Self::of_links(text, fabric).interconnect,
            None => {
                let made = shared(kind, &extents, &mut options)?.ok_or_else(|| unknown(head))?;
                let made = with_faults(made, &mut options)?;
                let range = |error| TopologyError::Range { name: shown(text), error };
                made.check().map_err(range)?;
                made
            }
        };
        options.check()?;
        Ok(Self { name: text.into(), interconnect })
    }
}

fn unknown(found: &str) -> TopologyError {
    TopologyError::Unknown { found: shown(found) }
}

/// The beginning of a text that may be long.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

fn example(kind: &str) -> &'static str {
    match kind {
        "torus" | "sip-rings" | "cluster" => "8x8",
        "fattree" => "8",
        _ => "64",
    }
}

/// The packet network of a kind and size; `None` if the kind is none.
fn linked(
    name: &str,
    kind: &str,
    extents: &[u32],
    options: &mut Options<'_>,
) -> Result<Option<Fabric>, TopologyError> {
    if !LINKED.iter().any(|(known, _)| *known == kind) {
        return Ok(None);
    }
    let usual = LinkModel::default();
    let rate = options.rate("rate", usual.rate)?;
    let latency = options.time("latency", usual.latency)?;
    let model = LinkModel { rate, latency };
    let check = |count: u64| if count <= ENDPOINTS_MAX { Ok(()) } else { Err(unknown(name)) };
    let product = extents.iter().try_fold(1_u64, |all, &one| all.checked_mul(u64::from(one)));
    check(product.ok_or_else(|| unknown(name))?)?;
    let network = match (kind, extents) {
        ("dragonfly", &[chips]) => {
            return Ok(Some(Fabric::Dragonfly(Box::new(Dragonfly::new(chips, model)?))));
        }
        ("torus", extents) => torus(extents, model)?,
        ("ring", &[chips]) => ring(chips, 1, model)?,
        ("ring", &[chips, cables]) => ring(chips, cables, model)?,
        ("switch", &[chips]) => switch(chips, 1, model)?,
        ("fattree", &[ports]) => {
            check(u64::from(ports).pow(3) / 4)?;
            fat_tree(ports, model)?
        }
        ("cluster", &[nodes, per_node]) => {
            let between = options.rate("between", rate)?;
            clusters(nodes, per_node, model, LinkModel { rate: between, latency })?
        }
        _ => return Err(unknown(name)),
    };
    Ok(Some(Fabric::Network(network)))
}

/// The electrical or optical interconnect of a kind and size, without faults; `None` if there is none.
///
/// Source of the defaults: SiP-ML §4.1; the latency is assumed.
fn shared(
    kind: &str,
    extents: &[u32],
    options: &mut Options<'_>,
) -> Result<Option<Interconnect>, TopologyError> {
    let (rows, columns) = match (kind, extents) {
        ("sip-rings", &[rows, columns]) => (rows, columns),
        ("sip-rings", _) => return Ok(None),
        (_, &[devices]) => (devices, 1),
        _ => return Ok(None),
    };
    let Some(devices) = rows.checked_mul(columns) else { return Ok(None) };
    let whole = BitsPerSecond(8e12);
    let (rate, kind) = match kind {
        "elect-flat" => (options.rate("rate", whole)?, InterconnectKind::Flat),
        "elect-cluster" => {
            let rate = options.rate("rate", whole)?;
            let per_server = options.count("per-server", devices.min(8))?;
            let server = options.rate("server", BitsPerSecond(400e9))?;
            let oversubscription = options.number("oversubscription", 1.0)?;
            (rate, InterconnectKind::Cluster { per_server, server, oversubscription })
        }
        "sip-ring" | "sip-rings" => {
            let wavelengths = options.count("wavelengths", 320)?;
            let each = options.rate("wavelength", BitsPerSecond(25e9))?;
            let reach = options.count("reach", 16.min(devices.saturating_sub(1).max(1)))?;
            let every = options.time("every", Nanos(100_000))?;
            let ring =
                Ring { wavelengths, reach, every, delay: options.time("delay", Nanos(25_000))? };
            let kind = match kind {
                "sip-ring" => InterconnectKind::Ring(ring),
                _ => InterconnectKind::Rings { columns, ring },
            };
            (BitsPerSecond(f64::from(wavelengths) * each.0), kind)
        }
        "sip-ocs" => switches(options)?,
        _ => return Ok(None),
    };
    let latency = options.time("latency", Nanos(1000))?;
    Ok(Some(Interconnect { devices, rate, latency, kind, faults: Faults::default() }))
}

/// Circuit switches, less those that failed, and the rate of a device over all of them.
fn switches(options: &mut Options<'_>) -> Result<(BitsPerSecond, InterconnectKind), TopologyError> {
    let rate = options.rate("rate", BitsPerSecond(8e12))?;
    let every = if options.has("every") { Some(options.time("every", Nanos(0))?) } else { None };
    let delay = options.time("delay", Nanos::from_millis(30))?;
    let switches = options.count("switches", 16)?;
    let failed = options.count("failed-switches", 0)?;
    if failed >= switches {
        return Err(TopologyError::Switches { failed, switches });
    }
    let left = switches - failed;
    let oversubscription = options.number("oversubscription", 1.0)?;
    let clos = match options.has("leaf") {
        true => Some(Clos { devices: options.count("leaf", 0)?, oversubscription }),
        false if options.has("oversubscription") => return Err(TopologyError::Leaf),
        false => None,
    };
    let rate = BitsPerSecond(rate.0 * f64::from(left) / f64::from(switches));
    Ok((rate, InterconnectKind::Circuits { switches: left, every, delay, clos }))
}

/// The interconnect with the faults of its options.
fn with_faults(
    made: Interconnect,
    options: &mut Options<'_>,
) -> Result<Interconnect, TopologyError> {
    let (has_fibre, has_servers) = match made.kind {
        InterconnectKind::Ring(_) => (true, false),
        InterconnectKind::Cluster { .. } => (false, true),
        _ => (false, false),
    };
    let is_cut = has_fibre && options.has("cut");
    let behind = if is_cut { options.count("cut", 0)? } else { 0 };
    let mut devices = options.parts("weak")?;
    let servers = if has_servers { options.parts("weak-servers")? } else { Vec::new() };
    // Devices are numbered from the cut; its position makes no other difference.
    if is_cut && made.devices > 0 {
        let first = behind.wrapping_add(1) % made.devices;
        for (number, _) in &mut devices {
            if *number < made.devices {
                *number = (*number + made.devices - first) % made.devices;
            }
        }
    }
    Ok(Interconnect { faults: Faults { devices, servers, is_cut }, ..made })
}

/// The options of a name; any that is never asked for is an error.
struct Options<'a> {
    kind: &'a str,
    given: Vec<(&'a str, &'a str)>,
    known: Vec<&'static str>,
}

impl<'a> Options<'a> {
    fn new(kind: &'a str, text: &'a str) -> Self {
        let texts = text.split(',').map(str::trim).filter(|text| !text.is_empty());
        let given = texts.map(|text| text.split_once('=').unwrap_or((text, ""))).collect();
        Self { kind, given, known: Vec::new() }
    }

    fn get(&mut self, option: &'static str) -> Option<&'a str> {
        if !self.known.contains(&option) {
            self.known.push(option);
        }
        self.given.iter().rev().find(|(key, _)| *key == option).map(|&(_, value)| value)
    }

    fn has(&mut self, option: &'static str) -> bool {
        self.get(option).is_some()
    }

    fn read<T>(
        &mut self,
        option: &'static str,
        usual: T,
        (parse, expected): (impl Fn(&str) -> Option<T>, &'static str),
    ) -> Result<T, TopologyError> {
        let Some(found) = self.get(option) else { return Ok(usual) };
        parse(found).ok_or_else(|| {
            let (kind, found) = (self.kind.to_owned(), shown(found));
            TopologyError::Value { kind, option, found, expected }
        })
    }

    fn rate(
        &mut self,
        option: &'static str,
        usual: BitsPerSecond,
    ) -> Result<BitsPerSecond, TopologyError> {
        let in_range = |rate: &BitsPerSecond| crate::network::RATES.contains(&rate.0);
        let parse = |text: &str| BitsPerSecond::parse(text).filter(in_range);
        self.read(option, usual, (parse, "1Mbit/s to 1000Tbit/s, like '10Gbit/s'"))
    }

    fn time(&mut self, option: &'static str, usual: Nanos) -> Result<Nanos, TopologyError> {
        self.read(option, usual, (Nanos::parse, "a time such as '50us'"))
    }

    fn count(&mut self, option: &'static str, usual: u32) -> Result<u32, TopologyError> {
        let is_count =
            |text: &&str| text.len() <= 9 && text.bytes().all(|one| one.is_ascii_digit());
        let parse = |text: &str| Some(text).filter(is_count)?.parse().ok();
        self.read(option, usual, (parse, "a count"))
    }

    fn number(&mut self, option: &'static str, usual: f64) -> Result<f64, TopologyError> {
        self.read(option, usual, (|text: &str| text.parse().ok(), "a number"))
    }

    /// Numbers with the fraction that is left of each, such as `3:0.5+7:0.9`.
    fn parts(&mut self, option: &'static str) -> Result<Vec<(u32, f64)>, TopologyError> {
        let part = |text: &str| {
            let (number, part) = text.split_once(':')?;
            Some((number.parse().ok()?, part.parse().ok()?))
        };
        let parse = |text: &str| match text {
            "" => Some(Vec::new()),
            text => text.split('+').map(part).collect(),
        };
        let expected = "what is weak and the part that is left of it, such as 3:0.5+7:0.9";
        self.read(option, Vec::new(), (parse, expected))
    }

    fn check(self) -> Result<(), TopologyError> {
        let is_strange = |(key, _): &&(&str, &str)| !self.known.contains(key);
        match self.given.iter().find(is_strange) {
            None => Ok(()),
            Some((key, _)) => {
                let (kind, found) = (self.kind.to_owned(), shown(key));
                Err(TopologyError::Option { kind, found, known: self.known })
            }
        }
    }
}
