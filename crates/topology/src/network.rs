//! A network graph: chips and switches, and the links between them.
//!
//! Every topology is represented as a [`Network`], so that routing, scheduling and simulation do not
//! depend on how it was built. Links are directed; a cable is two of them.

use std::collections::{BTreeMap, VecDeque};

use base::{BitsPerSecond, LinkId, Nanos, VertexId};
use thiserror::Error;

/// Maximum number of vertices.
const VERTICES_MAX: u32 = 1 << 22;
/// Maximum latency of a link: a minute.
const LATENCY_MAX: Nanos = Nanos::from_millis(60_000);
/// Valid bandwidths of links in bits per second; times on others would be out of range.
pub const RATES: std::ops::RangeInclusive<f64> = 1e6..=1e15;

/// Why vertices and links do not form a valid network.
#[derive(Debug, Error, PartialEq)]
pub enum NetworkError {
    /// No endpoints.
    #[error("a network has no endpoints; expected at least 1")]
    Empty,
    /// Half of the ports of a switch of a fat tree lead up.
    #[error("switches have {ports} ports; expected an even number, such as {}", .ports.saturating_add(1))]
    OddPorts {
        /// Ports of a switch.
        ports: u32,
    },
    /// A link has an unknown vertex.
    #[error("a link joins {found}; the network has vertices 0 to {last}")]
    Vertex {
        /// The unknown vertex.
        found: VertexId,
        /// The last vertex of the network.
        last: u32,
    },
    /// A link from a vertex to itself.
    #[error("a link joins vertex {vertex} to itself")]
    Loop {
        /// The vertex.
        vertex: VertexId,
    },
    /// Too many vertices.
    #[error("a network has {found} vertices; expected at most {most}")]
    Large {
        /// Number of vertices.
        found: u64,
        /// Maximum number of vertices.
        most: u32,
    },
    /// The latency of a link is too long.
    #[error("the link from {from} to {to} takes {} ns; expected at most {} ns", latency.0, most.0)]
    Latency {
        /// Source.
        from: VertexId,
        /// Target.
        to: VertexId,
        /// The value found.
        latency: Nanos,
        /// Maximum latency.
        most: Nanos,
    },
    /// The bandwidth of a link is out of range.
    #[error("the link from {from} to {to} moves {rate:e} bit/s; expected 1e6 to 1e15")]
    Rate {
        /// Source.
        from: VertexId,
        /// Target.
        to: VertexId,
        /// The value found.
        rate: f64,
    },
    /// An endpoint cannot be reached from another.
    #[error("endpoint {to} cannot be reached from endpoint {from}; add a link between them")]
    Disconnected {
        /// The endpoint to start from.
        from: VertexId,
        /// The endpoint that it does not reach.
        to: VertexId,
    },
}

/// Cable type of a link, from cheap to expensive.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Cable {
    /// Inside a chassis, or on a board.
    Chassis,
    /// Electrical, within a rack.
    Rack,
    /// Optical, between racks.
    Optical,
}

/// A directed link: one direction of a cable.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Source.
    pub source: VertexId,
    /// Target.
    pub target: VertexId,
    /// Bandwidth, encoding overhead included.
    pub rate: BitsPerSecond,
    /// From the first bit sent to the first bit received.
    pub latency: Nanos,
    /// Cable type.
    pub cable: Cable,
}

/// Vertices and links. Endpoints, which compute and forward, come first, followed by switches, which
/// only forward.
#[derive(Clone, PartialEq, Debug)]
pub struct Network {
    endpoints: u32,
    links: Vec<Link>,
    out: Ends,
    into: Ends,
}

/// Links grouped by the vertex at one end: those of vertex `v` are `links[starts[v]..starts[v + 1]]`.
#[derive(Clone, PartialEq, Debug)]
struct Ends {
    links: Vec<LinkId>,
    starts: Vec<u32>,
}

impl Ends {
    fn new(vertices: u32, links: &[Link], end: impl Fn(&Link) -> VertexId) -> Self {
        let mut order: Vec<LinkId> = (0..links.len() as u32).map(LinkId).collect();
        order.sort_by_key(|link| end(&links[link.0 as usize]));
        let mut starts = vec![0; vertices as usize + 1];
        for link in links {
            starts[end(link).0 as usize + 1] += 1;
        }
        for vertex in 0..vertices as usize {
            starts[vertex + 1] += starts[vertex];
        }
        Self { links: order, starts }
    }

    fn of(&self, vertex: VertexId) -> &[LinkId] {
        let vertex = vertex.0 as usize;
        &self.links[self.starts[vertex] as usize..self.starts[vertex + 1] as usize]
    }
}

impl Network {
    /// Creates a network of `endpoints` endpoints and `switches` switches.
    ///
    /// # Errors
    /// There is no endpoint or too many vertices, a link is invalid, or some endpoint does not reach
    /// another.
    pub fn new(endpoints: u32, switches: u32, links: Vec<Link>) -> Result<Self, NetworkError> {
        if endpoints == 0 {
            return Err(NetworkError::Empty);
        }
        let found = u64::from(endpoints) + u64::from(switches);
        let vertices = u32::try_from(found).ok().filter(|count| *count <= VERTICES_MAX);
        let vertices = vertices.ok_or(NetworkError::Large { found, most: VERTICES_MAX })?;
        for &Link { source, target, rate, latency, .. } in &links {
            if let Some(found) = [source, target].into_iter().find(|vertex| vertex.0 >= vertices) {
                return Err(NetworkError::Vertex { found, last: vertices - 1 });
            }
            if source == target {
                return Err(NetworkError::Loop { vertex: source });
            }
            if latency > LATENCY_MAX {
                let (from, to, most) = (source, target, LATENCY_MAX);
                return Err(NetworkError::Latency { from, to, latency, most });
            }
            if !RATES.contains(&rate.0) {
                return Err(NetworkError::Rate { from: source, to: target, rate: rate.0 });
            }
        }
        let out = Ends::new(vertices, &links, |link| link.source);
        let into = Ends::new(vertices, &links, |link| link.target);
        let network = Self { endpoints, links, out, into };
        network.check_connected()?;
        Ok(network)
    }

    /// Returns the subnetwork of these endpoints, in this order, and all switches; and for each of its
    /// links the original link.
    ///
    /// # Errors
    /// No endpoint is given, one is unknown or given twice, or they are not connected without the
    /// others.
    pub fn of(&self, endpoints: &[VertexId]) -> Result<(Self, Vec<LinkId>), NetworkError> {
        let mut places: Vec<Option<VertexId>> = vec![None; self.vertices() as usize];
        let count = endpoints.len() as u32;
        for (place, &found) in (0..).zip(endpoints) {
            let is_new = found.0 < self.endpoints && places[found.0 as usize].is_none();
            if !is_new {
                return Err(NetworkError::Vertex { found, last: self.endpoints - 1 });
            }
            places[found.0 as usize] = Some(VertexId(place));
        }
        for (number, switch) in (self.endpoints..self.vertices()).enumerate() {
            places[switch as usize] = Some(VertexId(count + number as u32));
        }
        let kept = self.links.iter().zip((0..).map(LinkId)).filter_map(|(link, id)| {
            let ends = [link.source, link.target].map(|end| places[end.0 as usize]);
            let [Some(source), Some(target)] = ends else { return None };
            Some((Link { source, target, ..*link }, id))
        });
        let (links, were): (Vec<Link>, Vec<LinkId>) = kept.unzip();
        let network = Self::new(count, self.vertices() - self.endpoints, links)?;
        Ok((network, were))
    }

    /// Returns the number of endpoints.
    pub fn endpoints(&self) -> u32 {
        self.endpoints
    }

    /// Returns the number of vertices, switches included.
    pub fn vertices(&self) -> u32 {
        self.out.starts.len() as u32 - 1
    }

    /// Returns all links, by number.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Returns the link with this number.
    pub fn link(&self, id: LinkId) -> &Link {
        &self.links[id.0 as usize]
    }

    /// Returns the outgoing links of a vertex.
    pub fn out_of(&self, vertex: VertexId) -> &[LinkId] {
        self.out.of(vertex)
    }

    /// Returns the incoming links of a vertex.
    pub fn into(&self, vertex: VertexId) -> &[LinkId] {
        self.into.of(vertex)
    }

    /// Returns hops from a vertex to every vertex, `None` where there is no path. O(vertices + links).
    pub fn hops_from(&self, source: VertexId) -> Vec<Option<u32>> {
        self.hops(source, |vertex| self.out_of(vertex), |link| link.target)
    }

    /// Returns hops from every vertex to this one, `None` where there is no path. O(vertices + links).
    pub fn hops_to(&self, target: VertexId) -> Vec<Option<u32>> {
        self.hops(target, |vertex| self.into(vertex), |link| link.source)
    }

    fn hops<'a>(
        &'a self,
        from: VertexId,
        links: impl Fn(VertexId) -> &'a [LinkId],
        end: impl Fn(&Link) -> VertexId,
    ) -> Vec<Option<u32>> {
        let mut hops = vec![None; self.vertices() as usize];
        hops[from.0 as usize] = Some(0);
        let mut next = VecDeque::from([(from, 0)]);
        while let Some((vertex, count)) = next.pop_front() {
            for &link in links(vertex) {
                let other = end(self.link(link));
                let known = &mut hops[other.0 as usize];
                if known.is_none() {
                    *known = Some(count + 1);
                    next.push_back((other, count + 1));
                }
            }
        }
        hops
    }

    /// Returns at most `most` shortest paths from one vertex to another, as links in order. O(vertices
    /// + links).
    pub fn shortest_paths(
        &self,
        source: VertexId,
        target: VertexId,
        most: usize,
    ) -> Vec<Vec<LinkId>> {
        let left = self.hops_to(target);
        let mut paths = Vec::new();
        let mut open = vec![(source, Vec::new())];
        while let Some((at, path)) = open.pop() {
            if at == target {
                paths.push(path);
                if paths.len() == most {
                    break;
                }
                continue;
            }
            let Some(hops) = left[at.0 as usize] else { continue };
            for &link in self.out_of(at).iter().rev() {
                let next = self.link(link).target;
                if left[next.0 as usize].is_some_and(|left| left + 1 == hops) {
                    open.push((next, path.iter().copied().chain([link]).collect()));
                }
            }
        }
        paths
    }

    /// Returns the maximum eccentricity of these endpoints: the most hops to any endpoint. O(sources ·
    /// (vertices + links)).
    pub fn eccentricity(&self, sources: impl IntoIterator<Item = VertexId>) -> u32 {
        let most = |source| {
            let hops = self.hops_from(source);
            hops[..self.endpoints as usize].iter().flatten().copied().max().unwrap_or(0)
        };
        sources.into_iter().map(most).max().unwrap_or(0)
    }

    /// Returns the diameter: the most hops between any two endpoints. O(endpoints · (vertices +
    /// links)).
    pub fn diameter(&self) -> u32 {
        self.eccentricity((0..self.endpoints).map(VertexId))
    }

    /// Returns the bandwidth of the cut from the first `endpoints` endpoints to the others, in one
    /// direction. Switches count as others.
    pub fn cut(&self, endpoints: u32) -> BitsPerSecond {
        let leaves = |link: &&Link| link.source.0 < endpoints && link.target.0 >= endpoints;
        BitsPerSecond(self.links.iter().filter(leaves).map(|link| link.rate.0).sum())
    }

    /// Returns the number of cables of each type, each counted once for its two directions.
    pub fn cables(&self) -> BTreeMap<Cable, u32> {
        let mut counts = BTreeMap::new();
        for link in self.links.iter().filter(|link| link.source < link.target) {
            *counts.entry(link.cable).or_default() += 1;
        }
        counts
    }

    fn check_connected(&self) -> Result<(), NetworkError> {
        // If one endpoint reaches all others and is reached by all, any two are connected.
        let from = VertexId(0);
        let unreached = |hops: Vec<Option<u32>>| {
            let missing = hops[..self.endpoints as usize].iter().position(Option::is_none);
            missing.map(|vertex| VertexId(vertex as u32))
        };
        if let Some(to) = unreached(self.hops_from(from)) {
            return Err(NetworkError::Disconnected { from, to });
        }
        if let Some(from) = unreached(self.hops_to(from)) {
            return Err(NetworkError::Disconnected { from, to: VertexId(0) });
        }
        Ok(())
    }
}
