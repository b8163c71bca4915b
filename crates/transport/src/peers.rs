//! Who is at the other end of connections that the gateway carries.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Grant, PeerRole, TokenId};

/// A process of another machine that has proved a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// The token.
    pub token: TokenId,
    /// The token's role.
    pub role: PeerRole,
    /// The most that a client of the token may ask for.
    pub grant: Grant,
}

impl fmt::Display for Peer {
    /// Prints it as the line by which it is announced: address, token and role.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.address, self.token, self.role.name())
    }
}

/// The peers of a gateway's connections to TCP services, by the address of its own end of each.
///
/// The service sees a connection of this process; here it finds who is behind it.
#[derive(Clone, Default, Debug)]
pub struct Peers(Arc<Mutex<HashMap<SocketAddr, Peer>>>);

impl Peers {
    /// Returns the peer behind a connection from this address; `None` if it is carried for none.
    pub fn behind(&self, address: SocketAddr) -> Option<Peer> {
        self.locked().get(&address).copied()
    }

    /// Records a peer for as long as the value lives.
    pub(crate) fn record(&self, address: SocketAddr, peer: Peer) -> Recorded {
        self.locked().insert(address, peer);
        Recorded { peers: self.clone(), address }
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<SocketAddr, Peer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A peer in the record.
pub(crate) struct Recorded {
    peers: Peers,
    address: SocketAddr,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.peers.locked().remove(&self.address);
    }
}
