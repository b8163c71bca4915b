//! The data-centre network (DCN), which joins hosts of different islands.
//!
//! Every host of an island has the same number of channels: paths onto the DCN that it does not share
//! with other hosts. Channels of the same number meet at one switch, which is assumed to be no
//! bottleneck. Any two hosts of an island are joined directly by one link per channel, assumed faster
//! than all channels together.

use std::collections::BTreeMap;

use base::{BitsPerSecond, Channel, HostId, IslandId, LinkId, Nanos, VertexId};

use crate::network::RATES;
use crate::{Cable, Cluster, Link, Network};

/// Bandwidth of a link inside an island, relative to the channel.
const INSIDE: f64 = 10.0;
/// Assumed latency from a host to a switch, or to a host of its island.
const LATENCY: Nanos = Nanos(25_000);

/// Hosts, their channels, and the switches that join channels.
#[derive(Debug)]
pub struct Dcn {
    network: Network,
    /// Host of each endpoint.
    hosts: Vec<HostId>,
    places: BTreeMap<HostId, VertexId>,
}

impl Dcn {
    /// Builds the network of some hosts; hosts of one island are joined directly if there are at most
    /// `beside` of them.
    ///
    /// Returns `None` if some host is unknown, or if some hosts are not connected, for instance for
    /// lack of described channels.
    pub fn of(cluster: &Cluster, hosts: Vec<HostId>, beside: usize) -> Option<Self> {
        let count = hosts.len() as u32;
        let island = |host: HostId| cluster.island(cluster.host(host)?.island);
        let mut links = Vec::new();
        let mut join = |one: u32, other: u32, rate: f64| {
            for (source, target) in [(one, other), (other, one)] {
                let (source, target) = (VertexId(source), VertexId(target));
                let (rate, latency) = (BitsPerSecond(rate), LATENCY);
                links.push(Link { source, target, rate, latency, cable: Cable::Rack });
            }
        };
        let mut switches = 0;
        for (place, &host) in (0..).zip(&hosts) {
            let channels = &island(host)?.channels;
            for (number, rate) in (0..).zip(channels) {
                join(place, count + number, rate.0);
            }
            switches = switches.max(channels.len() as u32);
        }
        let mut islands: BTreeMap<IslandId, Vec<u32>> = BTreeMap::new();
        for (place, &host) in (0..).zip(&hosts) {
            islands.entry(island(host)?.id).or_default().push(place);
        }
        for (id, places) in islands.into_iter().filter(|island| island.1.len() <= beside) {
            let channels = &cluster.island(id)?.channels;
            for (number, &one) in places.iter().enumerate() {
                for &other in &places[..number] {
                    let rates = channels.iter().map(|rate| (INSIDE * rate.0).min(*RATES.end()));
                    rates.for_each(|rate| join(one, other, rate));
                }
            }
        }
        let network = Network::new(count, switches, links).ok()?;
        let places = hosts.iter().zip(0..).map(|(&host, place)| (host, VertexId(place))).collect();
        Some(Self { network, hosts, places })
    }

    /// Returns the network, whose endpoints are the hosts.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the vertex of a host.
    pub fn vertex(&self, host: HostId) -> Option<VertexId> {
        self.places.get(&host).copied()
    }

    /// Returns the hosts along a path in order, each with the channel by which it is reached from the
    /// host before.
    pub fn steps(&self, path: impl IntoIterator<Item = LinkId>) -> Vec<(Channel, HostId)> {
        let mut channel = Channel::INSIDE;
        let mut steps = Vec::new();
        for link in path {
            let target = self.network.link(link).target.0;
            match self.hosts.get(target as usize) {
                Some(&host) => {
                    steps.push((channel, host));
                    channel = Channel::INSIDE;
                }
                None => channel = Channel(target - self.hosts.len() as u32 + 1),
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IslandSpec;

    fn cluster() -> Cluster {
        let rate = |gigabits| BitsPerSecond(gigabits * 1e9);
        let mut cluster = Cluster::new(&[3, 2, 1].map(|hosts| IslandSpec::new(hosts, 1)));
        cluster.set_channels(IslandId(0), vec![rate(1.0), rate(0.5)]);
        cluster.set_channels(IslandId(1), vec![rate(1.0)]);
        cluster
    }

    #[test]
    fn channels_of_one_number_meet() {
        let cluster = cluster();
        let dcn = Dcn::of(&cluster, [0, 3, 1, 4].map(HostId).to_vec(), 8).unwrap();
        let (from, to) = (dcn.vertex(HostId(0)).unwrap(), dcn.vertex(HostId(3)).unwrap());
        let direct = dcn.network().shortest_paths(from, to, 8);
        assert_eq!(direct.len(), 1, "only their first channels meet");
        assert_eq!(dcn.steps(direct[0].clone()), [(Channel(1), HostId(3))]);
        let home = dcn.vertex(HostId(1)).unwrap();
        let beside = dcn.network().shortest_paths(from, home, 8);
        assert_eq!(beside.len(), 2, "a link for each channel");
        assert_eq!(dcn.steps(beside[0].clone()), [(Channel::INSIDE, HostId(1))]);
        assert_eq!(dcn.vertex(HostId(2)), None);
    }

    #[test]
    fn hosts_without_channels_are_not_joined() {
        assert!(Dcn::of(&cluster(), vec![HostId(0), HostId(5)], 8).is_none());
        assert!(Dcn::of(&cluster(), vec![HostId(0), HostId(77)], 8).is_none());
    }
}
