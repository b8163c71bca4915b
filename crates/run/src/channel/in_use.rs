//! Connections that are being used, which end once their peer is lost.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use super::socket::Socket;

/// The connections to a peer that are being used.
#[derive(Debug, Default)]
pub(crate) struct InUse(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_lost: bool,
    connections: Vec<Arc<OwnedFd>>,
}

/// A connection that is being used.
pub(crate) struct Using<'a> {
    of: &'a InUse,
    connection: Arc<OwnedFd>,
}

impl Drop for Using<'_> {
    fn drop(&mut self) {
        self.of.0.lock().connections.retain(|used| !Arc::ptr_eq(used, &self.connection));
    }
}

impl InUse {
    /// Registers a connection that is used until what is returned is dropped.
    ///
    /// # Errors
    /// The peer is lost.
    pub fn begin(&self, socket: &Socket) -> io::Result<Using<'_>> {
        let connection = Arc::new(socket.as_fd().try_clone_to_owned()?);
        let mut state = self.0.lock();
        if state.is_lost {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the host is lost"));
        }
        state.connections.push(connection.clone());
        Ok(Using { of: self, connection })
    }

    /// Ends all connections that are being used, and those that would be.
    pub fn lose(&self) {
        let mut state = self.0.lock();
        state.is_lost = true;
        for connection in &state.connections {
            // Ignored: it may have ended already.
            let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
        }
    }

    /// Whether the peer is lost.
    pub fn is_lost(&self) -> bool {
        self.0.lock().is_lost
    }
}
