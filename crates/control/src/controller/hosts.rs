//! Hosts that join, and what they report.

use base::{BitsPerSecond, HostId, IslandId};
use protocol::{Command, HostChannel, HostInfo, PeerAddress, Report};
use topology::RATES;

use super::Controller;
use crate::submissions::Out;

/// Returns the bandwidth of each channel of a host.
fn rates(info: &HostInfo) -> Vec<BitsPerSecond> {
    info.channels.iter().map(|channel| BitsPerSecond(channel.rate)).collect()
}

/// Checks that transfers over a host's channels can be scheduled.
fn check_rates(info: &HostInfo) -> Result<(), String> {
    let odd = |channel: &&HostChannel| !RATES.contains(&channel.rate);
    info.channels.iter().find(odd).map_or(Ok(()), |channel| {
        let (rate, least, most) = (channel.rate, RATES.start(), RATES.end());
        Err(format!("a channel has {rate} bit/s; expected {least:e} to {most:e}"))
    })
}

impl Controller {
    /// Checks that a host matches its island: its hosts share compiled programs and run collectives
    /// together.
    pub(super) fn check_alike(&self, host: HostId, info: &HostInfo) -> Result<(), String> {
        let known = self.cluster.host(host).expect("the world lets known hosts in");
        let island = self.cluster.island(known.island).expect("islands are known");
        for &other in island.hosts.iter().filter(|&&other| other != host) {
            let theirs = self.scheduler.host(other);
            let Some(theirs) = theirs.info.as_ref().filter(|_| theirs.lost.is_none()) else {
                continue;
            };
            let differs = |what: &str, mine: &str, their: &str| {
                format!(
                    "its {what} is {mine}, that of host {} is {their}; the hosts of an island \
                     must be alike",
                    self.cluster.host(other).expect("islands have known hosts").rank
                )
            };
            if theirs.jaxlib != info.jaxlib {
                return Err(differs("jaxlib", &info.jaxlib, &theirs.jaxlib));
            }
            if theirs.platform != info.platform {
                return Err(differs("platform", &info.platform, &theirs.platform));
            }
            let (mine, their) = (rates(info), rates(theirs));
            if mine != their {
                return Err(differs("channels", &format!("{mine:?}"), &format!("{their:?}")));
            }
        }
        Ok(())
    }

    pub(super) fn host_joined(&mut self, host: HostId, info: HostInfo) {
        if let Err(why) = self.check_alike(host, &info).and_then(|()| check_rates(&info)) {
            return self.fail_host(host, &why);
        }
        self.cluster.describe(host, &info.device_kind, &info.memories);
        let island = self.cluster.host(host).expect("the world lets known hosts in").island;
        self.cluster.set_channels(island, rates(&info));
        let first_tag = self.next_tag();
        self.scheduler.join(host, info, first_tag);
        self.liveness.watch(host, self.now);
        self.island_joins(island);
        if self.scheduler.nobody_is_missing() {
            self.broadcast_peers();
        }
    }

    /// Sends every host the data-plane addresses of all its peers.
    pub(super) fn broadcast_peers(&mut self) {
        let there: Vec<(HostId, IslandId, HostInfo)> = self
            .cluster
            .hosts()
            .iter()
            .filter(|peer| self.scheduler.host(peer.id).lost.is_none())
            .filter_map(|peer| {
                let info = self.scheduler.host(peer.id).info.clone()?;
                Some((peer.id, peer.island, info))
            })
            .collect();
        for (host, home, own) in &there {
            let address = |(peer, island, info): &(HostId, IslandId, HostInfo)| {
                let afar = island != home && !own.channels.is_empty() && !info.channels.is_empty();
                let address = if afar {
                    let addresses = info.channels.iter().map(|channel| channel.address.as_str());
                    addresses.collect::<Vec<_>>().join(",")
                } else {
                    info.data_address.clone()
                };
                let first_tag = self.scheduler.host(*peer).first_tag;
                PeerAddress { host: *peer, address, first_tag }
            };
            let peers = there.iter().map(address).collect();
            let first_tag = self.scheduler.host(*host).first_tag;
            self.send_now(*host, Command::Peers { peers, first_tag });
        }
    }

    pub(super) fn report(&mut self, host: HostId, report: Report) {
        match report {
            Report::Finished { busy } => {
                let mut out = Out::new();
                self.scheduler.finished(host, busy, &mut out);
                self.flush_commands(out);
            }
            Report::CommandDone { ticket, reply } => self.done(host, ticket, Ok(reply)),
            Report::CommandFailed { ticket, error } => self.done(host, ticket, Err(error)),
            Report::BatchMade { input, end } => {
                let mut out = Out::new();
                self.scheduler.batch_made(host, input, end, &mut out);
                self.flush_commands(out);
            }
            Report::Arrived { buffer } => {
                let mut out = Out::new();
                self.scheduler.arrived(host, buffer, &mut out);
                self.flush_commands(out);
            }
            Report::BuffersLost { client, buffer, count, tag, error } => {
                self.buffers_lost(host, (client, buffer, count), tag, error);
            }
            Report::Moved { client, bytes } => self.scheduler.accounts.note_moved(client, bytes),
            Report::PlanProposed { executable, plan, script, predicted } => {
                self.adopt_plan(executable, plan, &script, predicted);
            }
            // Where processes really are, and how they are reached, the world knows.
            Report::PeersTried { .. }
            | Report::Undelivered { .. }
            | Report::ClientCalled { .. } => {}
            Report::OrderBroken { message } => self.host_lost(host, &message),
        }
    }
}
