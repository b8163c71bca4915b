//! Rotational symmetry of networks: what is planned for one part is planned for all of them.

use std::ops::Range;

use base::{LinkId, VertexId};

use crate::network::Network;

/// A rotational symmetry of a network: its endpoints form a cycle of identical parts, and rotated by a
/// part, every link maps to a link of the same kind. Every network has at least the trivial symmetry of
/// one part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RotationalSymmetry {
    turns: u32,
    endpoints: u32,
    /// Kind and turn of each link.
    kinds: Vec<(u32, u32)>,
    /// Links of each turn, by kind.
    links: Vec<LinkId>,
}

impl RotationalSymmetry {
    /// Finds the symmetry with the most parts. O(divisors of the endpoints · links · log links).
    ///
    /// ```
    /// use topology::{RotationalSymmetry, Dragonfly, LinkModel};
    /// let dragonfly = Dragonfly::new(264, LinkModel::default()).unwrap();
    /// let circle = RotationalSymmetry::of(dragonfly.network());
    /// assert_eq!((circle.turns(), circle.part()), (33, 8));
    /// ```
    pub fn of(network: &Network) -> Self {
        let endpoints = network.endpoints();
        if network.vertices() > endpoints {
            return Self::trivial(network);
        }
        let mut parts = (1..=endpoints).filter(|part| endpoints.is_multiple_of(*part));
        let found = parts.find_map(|part| Self::turned(network, part));
        found.expect("all of a network is a part that is like itself")
    }

    /// Returns the trivial symmetry: the whole network as one part.
    pub fn trivial(network: &Network) -> Self {
        let links = network.links().len() as u32;
        Self {
            turns: 1,
            endpoints: network.endpoints(),
            kinds: (0..links).map(|link| (link, 0)).collect(),
            links: (0..links).map(LinkId).collect(),
        }
    }

    /// Returns the symmetry with `part` endpoints per part, if it is one.
    fn turned(network: &Network, part: u32) -> Option<Self> {
        let endpoints = network.endpoints();
        let turns = endpoints / part;
        let mut kinds = vec![(0, 0); network.links().len()];
        let mut links: Vec<LinkId> = Vec::with_capacity(network.links().len());
        let mut alike = Vec::new();
        for turn in 0..turns {
            let first = turn * part;
            let mut kind = 0;
            for chip in (first..first + part).map(VertexId) {
                // Target of a link relative to this part.
                let ahead =
                    |link: &LinkId| (network.link(*link).target.0 + endpoints - first) % endpoints;
                let mut out = network.out_of(chip).to_vec();
                out.sort_by_key(ahead);
                for id in out {
                    let link = network.link(id);
                    let seen = (chip.0 - first, ahead(&id), link.rate, link.latency);
                    if turn == 0 {
                        alike.push(seen);
                    } else if alike.get(kind as usize) != Some(&seen) {
                        return None;
                    }
                    kinds[id.0 as usize] = (kind, turn);
                    links.push(id);
                    kind += 1;
                }
            }
            if kind as usize != alike.len() {
                return None;
            }
        }
        Some(Self { turns, endpoints, kinds, links })
    }

    /// Returns the number of parts, that is, of rotations.
    pub fn turns(&self) -> u32 {
        self.turns
    }

    /// Returns the number of endpoints per part.
    pub fn part(&self) -> u32 {
        self.endpoints / self.turns
    }

    /// Returns the number of kinds of links.
    pub fn kinds(&self) -> u32 {
        (self.links.len() / self.turns as usize) as u32
    }

    /// Returns the kind of a link, and the rotation that maps the link of that kind in the first part
    /// to it.
    pub fn kind(&self, link: LinkId) -> (u32, u32) {
        self.kinds[link.0 as usize]
    }

    /// Returns the link of this kind, rotated from the first part.
    pub fn link(&self, kind: u32, turn: u32) -> LinkId {
        self.links[(turn % self.turns * self.kinds() + kind) as usize]
    }

    /// Returns the link that a rotation maps a link to.
    pub fn turn_link(&self, link: LinkId, by: u32) -> LinkId {
        let (kind, turn) = self.kind(link);
        self.link(kind, turn + by)
    }

    /// Returns the vertex that a rotation maps a vertex to; a switch is fixed.
    pub fn turn(&self, vertex: VertexId, by: u32) -> VertexId {
        if vertex.0 >= self.endpoints {
            return vertex;
        }
        VertexId((vertex.0 + by % self.turns * self.part()) % self.endpoints)
    }

    /// Returns the vertex of the first part that rotates to this one; a switch itself.
    pub fn kind_of(&self, vertex: VertexId) -> u32 {
        if vertex.0 < self.endpoints { vertex.0 % self.part() } else { vertex.0 }
    }

    /// Returns the part of an endpoint.
    pub fn turn_of(&self, vertex: VertexId) -> u32 {
        vertex.0 / self.part()
    }

    /// Returns the endpoints of the first part.
    pub fn first(&self) -> Range<u32> {
        0..self.part()
    }
}
