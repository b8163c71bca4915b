//! Addresses of data-plane endpoints: one, or one for local peers and others for remote peers.
//!
//! An address is `unix:PATH` or `tcp:HOST:PORT`, or both, comma-separated. The advertised form of the
//! latter names the machine: `unix@MACHINE:PATH,tcp:HOST:PORT`. A network namespace counts as a
//! machine, since its traffic is meant to use its links. If all addresses are remote, they are
//! channels, in order.

use std::io;
use std::os::unix::fs::MetadataExt;

use super::socket::ChannelListener;

/// Returns the identity of this machine and network namespace.
fn machine() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::metadata("/proc/self/ns/net")?;
    Ok(format!("{}-{}", boot.trim(), namespace.ino()))
}

/// Listens at each part of an address.
pub(crate) fn bind(address: &str) -> io::Result<Vec<ChannelListener>> {
    address.split(',').map(ChannelListener::bind).collect()
}

/// Returns the address that is advertised to peers.
pub(crate) fn advertised(listeners: &[ChannelListener]) -> io::Result<String> {
    let addresses: Vec<String> =
        listeners.iter().map(ChannelListener::address).collect::<io::Result<_>>()?;
    let [_, _, ..] = addresses[..] else { return Ok(addresses.concat()) };
    let machine = machine()?;
    let named = addresses.iter().map(|address| match address.strip_prefix("unix:") {
        Some(path) => format!("unix@{machine}:{path}"),
        None => address.clone(),
    });
    Ok(named.collect::<Vec<_>>().join(","))
}

/// Returns the addresses, at least one, by which this process reaches a peer that advertises `advertised`.
pub(crate) fn choose(advertised: &str) -> Vec<String> {
    let (near, far): (Vec<&str>, Vec<&str>) =
        advertised.split(',').partition(|address| address.starts_with("unix@"));
    let here = machine().map(|machine| format!("unix@{machine}:"));
    let path =
        here.ok().and_then(|here| near.iter().find_map(|address| address.strip_prefix(&here)));
    match path {
        Some(path) => vec![format!("unix:{path}")],
        None if far.is_empty() => vec![advertised.to_owned()],
        None => far.into_iter().map(str::to_owned).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_on_this_machine_are_reached_on_it_and_others_from_afar() {
        let path = std::env::temp_dir().join(format!("fairway-address-{}", std::process::id()));
        let listeners = bind(&format!("unix:{},tcp:127.0.0.1:0", path.display())).unwrap();
        let advertised = advertised(&listeners).unwrap();
        assert_eq!(choose(&advertised), [format!("unix:{}", path.display())]);
        let elsewhere = advertised.replace("unix@", "unix@another-");
        assert_eq!(choose(&elsewhere), [listeners[1].address().unwrap()]);
        std::fs::remove_file(path).unwrap();
        assert_eq!(choose("tcp:1.2.3.4:5,tcp:2.3.4.5:6"), ["tcp:1.2.3.4:5", "tcp:2.3.4.5:6"]);
        assert_eq!(choose("unix:/there"), ["unix:/there"]);
    }
}
