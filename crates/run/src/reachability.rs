//! Who reaches whom on the data plane: checked when hosts join, and not by the first transfer.

use std::collections::HashMap;

use base::HostId;
use parking_lot::Mutex;
use protocol::UnreachablePeer;

/// What controller and hosts have found out.
#[derive(Default)]
pub(crate) struct Reachability(Mutex<Found>);

#[derive(Default)]
struct Found {
    /// What each host that has tried its peers cannot reach.
    by_host: HashMap<HostId, Vec<UnreachablePeer>>,
    /// Why the controller does not reach a host, for those that it has tried.
    from_here: HashMap<HostId, Option<String>>,
}

impl Reachability {
    /// Forgets what is known of a host, since another process is that host now.
    pub fn forget(&self, host: HostId) {
        let mut found = self.0.lock();
        found.by_host.remove(&host);
        found.from_here.remove(&host);
    }

    /// Notes that the controller has tried a host.
    pub fn tried(&self, host: HostId, error: Option<String>) {
        self.0.lock().from_here.insert(host, error);
    }

    /// Notes that a host has tried its peers.
    pub fn peers_tried(&self, host: HostId, unreachable: Vec<UnreachablePeer>) {
        self.0.lock().by_host.insert(host, unreachable);
    }

    /// Returns which of these hosts and their peers do not reach each other, and which the controller
    /// does not reach (the host itself as peer); `None` as long as that is not known.
    pub fn unreachable(&self, hosts: &[HostId]) -> Option<Vec<(HostId, UnreachablePeer)>> {
        let known = self.0.lock();
        let mut found = Vec::new();
        for &host in hosts {
            let error = known.from_here.get(&host)?.clone();
            found.extend(error.map(|error| (host, UnreachablePeer { host, error })));
            known.by_host.get(&host)?;
        }
        let pairs = known
            .by_host
            .iter()
            .flat_map(|(&host, peers)| peers.iter().map(move |peer| (host, peer.clone())));
        found.extend(pairs.filter(|(one, peer)| hosts.contains(one) || hosts.contains(&peer.host)));
        found.sort_by_key(|(one, peer)| (*one, peer.host));
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_known_once_all_have_tried() {
        let reached = Reachability::default();
        let hosts = [HostId(0), HostId(1)];
        let blocked = |host| vec![UnreachablePeer { host: HostId(host), error: "late".to_owned() }];
        reached.tried(HostId(0), None);
        reached.peers_tried(HostId(0), blocked(1));
        assert!(reached.unreachable(&hosts).is_none());
        assert_eq!(reached.unreachable(&hosts[..1]).unwrap().len(), 1);
        reached.tried(HostId(1), Some("refused".to_owned()));
        reached.peers_tried(HostId(1), Vec::new());
        let pairs: Vec<(u32, u32)> = reached
            .unreachable(&hosts)
            .unwrap()
            .iter()
            .map(|(host, peer)| (host.0, peer.host.0))
            .collect();
        assert_eq!(pairs, [(0, 1), (1, 1)]);
        assert!(reached.unreachable(&hosts[1..]).unwrap().len() == 2, "its peers' findings count");
        reached.forget(HostId(0));
        assert!(reached.unreachable(&hosts).is_none());
    }
}
