//! Identity of the peer of a local connection, as reported by the kernel.
//!
//! A token proves that a peer belongs to a run; the kernel identifies the user of a local peer without
//! its cooperation, before it has sent a byte. Every listener admits, of this machine's users, only the
//! owner of this process and the users in its allow list.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// `TCP_ESTABLISHED` in <linux/tcp.h>: both ends are open.
const ESTABLISHED: u8 = 1;
/// `SOCK_DIAG_BY_FAMILY` in <linux/sock_diag.h>.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST` in <linux/netlink.h>.
const REQUEST: u16 = 1;
/// Size of a netlink message header, in bytes.
const NETLINK_HEADER: usize = 16;
/// `struct inet_diag_req_v2` in <linux/inet_diag.h>, in bytes.
const DIAG_REQUEST: usize = 56;
/// Size of `struct inet_diag_msg`, in bytes: 4 of state, 48 of addresses, 5 numbers of 4.
const DIAG_ANSWER: usize = 72;

/// The process at the other end of a local connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPeer {
    /// Its user id.
    pub user: u32,
    /// The inode of its socket, by which `/proc` finds the process; 0 for a Unix socket.
    pub inode: u32,
}

/// The allow list of users that may connect.
#[derive(Debug, Clone)]
pub struct Users(Arc<[u32]>);

impl Users {
    /// Creates a list of the owner of this process and `others`.
    pub fn owner_and(others: &[u32]) -> Self {
        let owner = rustix::process::geteuid().as_raw();
        Self(std::iter::once(owner).chain(others.iter().copied()).collect())
    }

    /// Whether this user may connect.
    pub fn admit(&self, user: u32) -> bool {
        self.0.contains(&user)
    }

    /// Fails unless the peer of a Unix socket may connect.
    ///
    /// # Errors
    /// The user is not in the list (the error names it), or the kernel does not identify the user.
    pub fn check_unix(&self, socket: impl AsFd) -> io::Result<()> {
        let peer = rustix::net::sockopt::socket_peercred(socket)?;
        self.check(peer.uid.as_raw())
    }

    /// Fails unless the owner of the socket at `peer` may connect to the socket at `own`.
    ///
    /// # Errors
    /// The user is not in the list (the error names it), or the kernel knows no such open connection.
    pub fn check_tcp(&self, own: SocketAddr, peer: SocketAddr) -> io::Result<LocalPeer> {
        let found = tcp_peer(own, peer)?;
        self.check(found.user)?;
        Ok(found)
    }

    fn check(&self, user: u32) -> io::Result<()> {
        if self.admit(user) {
            return Ok(());
        }
        let message = format!(
            "user {user} of this machine is not admitted; the setting allow_users names others \
             than the owner"
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }
}

/// Returns the owner of the socket at `peer` that is connected to the socket at `own`, both local.
///
/// Both ends must still be open: a socket that was closed after sending has no owner any more, and the
/// kernel would report user 0.
///
/// # Errors
/// There is no such connection, or the kernel does not answer.
pub fn tcp_peer(own: SocketAddr, peer: SocketAddr) -> io::Result<LocalPeer> {
    match ask_kernel(own, peer) {
        // Some sandboxes lack netlink sockets but have the text table.
        Err(error) if error.kind() != io::ErrorKind::NotFound => read_table(own, peer),
        found => found,
    }
}

/// Whether the error means that this process or machine has no file descriptor left.
pub fn is_descriptor_shortage(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(code, Some(Errno::MFILE | Errno::NFILE))
}

fn unknown(peer: SocketAddr) -> io::Error {
    let message = format!("the kernel knows no open connection from {peer} of this machine");
    io::Error::new(io::ErrorKind::NotFound, message)
}

/// Queries the socket with these addresses (sock_diag(7)); O(1) in the number of sockets.
fn ask_kernel(own: SocketAddr, peer: SocketAddr) -> io::Result<LocalPeer> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(std::time::Duration::from_secs(1)),
    )?;
    rustix::net::send(&socket, &diag_request(own, peer), SendFlags::empty())?;
    let mut answer = [0_u8; 512];
    let (read, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    let number = |at: usize| u32::from_ne_bytes(answer[at..at + 4].try_into().expect("4 bytes"));
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    if kind != SOCK_DIAG_BY_FAMILY {
        // NLMSG_ERROR carries a negative errno; ENOENT means that there is no such socket.
        let code = (number(NETLINK_HEADER) as i32).saturating_neg();
        return Err(io::Error::from_raw_os_error(code));
    }
    if read < NETLINK_HEADER + DIAG_ANSWER {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let body = NETLINK_HEADER;
    let [user, inode] = [body + 64, body + 68].map(number);
    match (answer[body + 1], inode) {
        (ESTABLISHED, 1..) => Ok(LocalPeer { user, inode }),
        _ => Err(unknown(peer)),
    }
}

fn diag_request(own: SocketAddr, peer: SocketAddr) -> Vec<u8> {
    let length = NETLINK_HEADER + DIAG_REQUEST;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend((length as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    bytes.extend([0; 8]); // sequence number and port
    let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    bytes.push(family.as_raw() as u8);
    bytes.push(rustix::net::ipproto::TCP.as_raw().get() as u8);
    bytes.extend([0; 2]); // extensions, padding
    bytes.extend(u32::MAX.to_ne_bytes()); // any state
    bytes.extend(peer.port().to_be_bytes());
    bytes.extend(own.port().to_be_bytes());
    for address in [peer.ip(), own.ip()] {
        match address {
            IpAddr::V4(address) => {
                bytes.extend(address.octets());
                bytes.extend([0; 12]);
            }
            IpAddr::V6(address) => bytes.extend(address.octets()),
        }
    }
    bytes.extend(0_u32.to_ne_bytes()); // any interface
    bytes.extend([0xff; 8]); // no cookie
    bytes
}

/// Looks the connection up in the kernel's table as text (proc_net_tcp).
fn read_table(own: SocketAddr, peer: SocketAddr) -> io::Result<LocalPeer> {
    let table = if peer.is_ipv4() { "/proc/net/tcp" } else { "/proc/net/tcp6" };
    let text = std::fs::read_to_string(table)?;
    let (theirs, ours) = (hexadecimal(peer), hexadecimal(own));
    let row = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let mut rows = row.filter(|fields| {
        fields.len() > 9 && fields[1] == theirs && fields[2] == ours && fields[3] == "01"
    });
    let found = rows.next().and_then(|fields| {
        let (user, inode) = (fields[7].parse().ok()?, fields[9].parse().ok()?);
        (inode > 0).then_some(LocalPeer { user, inode })
    });
    found.ok_or_else(|| unknown(peer))
}

/// Formats an address as the table does: words in native byte order.
fn hexadecimal(address: SocketAddr) -> String {
    let octets = match address.ip() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let words = octets.chunks_exact(4).map(|word| {
        format!("{:08X}", u32::from_ne_bytes(word.try_into().expect("chunks of four")))
    });
    format!("{}:{:04X}", words.collect::<String>(), address.port())
}

/// Returns the process that holds a socket; `None` if it is another user's, or has ended.
///
/// O(descriptors of this user's processes).
pub fn process_of(peer: LocalPeer) -> Option<u32> {
    let wanted = format!("socket:[{}]", peer.inode);
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let mut numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(|process: &u32| {
        let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return false };
        files.flatten().any(|file| {
            std::fs::read_link(file.path()).is_ok_and(|link| link.as_os_str() == wanted.as_str())
        })
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn the_owner_of_a_connection_is_found_by_both_of_its_tables() {
        let own = rustix::process::geteuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (client, server) = pair(address);
            let (here, there) = (server.local_addr().unwrap(), server.peer_addr().unwrap());
            let found = ask_kernel(here, there).unwrap();
            assert_eq!((found.user, read_table(here, there).unwrap()), (own, found));
            assert_eq!(process_of(found), Some(std::process::id()));
            assert_eq!(Users::owner_and(&[]).check_tcp(here, there).unwrap(), found);
            drop(client);
        }
    }

    #[test]
    fn a_connection_that_was_closed_is_nobodys() {
        for lookup in [ask_kernel, read_table] {
            let (client, server) = pair("127.0.0.1:0");
            let (here, there) = (server.local_addr().unwrap(), server.peer_addr().unwrap());
            lookup(here, there).unwrap();
            drop(client);
            let error = lookup(here, there).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
        }
    }

    #[test]
    fn users_who_are_not_named_are_refused() {
        let own = rustix::process::geteuid().as_raw();
        let users = Users::owner_and(&[4242]);
        assert!(users.admit(own) && users.admit(4242) && !users.admit(4243));
        let error = users.check(4243).unwrap_err();
        assert!(error.to_string().contains("4243") && error.to_string().contains("allow_users"));
    }
}
