//! Stream sockets of the data plane: Unix on one machine, TCP between machines, encrypted or not.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use transport::identity::Users;
use transport::{EncryptedStream, Encryption};

/// Timeout of a connection attempt; an address that is not routable gives no answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time after which a silent connection ends, unless it is set; otherwise a link that is down would
/// block the messages queued on its channel for a quarter of an hour.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(60);

/// A connection.
#[derive(Debug)]
pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
    Encrypted(Box<EncryptedStream>),
}

/// An end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Connector,
    Acceptor,
}

/// A listening socket.
#[derive(Debug)]
pub(crate) enum ChannelListener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

fn bad_address(address: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{address:?} is no data-plane address; expected unix:PATH or tcp:HOST:PORT"),
    )
}

fn bind_path(path: &str) -> io::Result<UnixListener> {
    let error = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => error,
        bound => return bound,
    };
    match UnixStream::connect(path) {
        // A regular file refuses connections as well; it is not removed.
        Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
            if std::fs::symlink_metadata(path)?.file_type().is_socket() {
                std::fs::remove_file(path)?;
            }
            UnixListener::bind(path)
        }
        _ => Err(error),
    }
}

impl ChannelListener {
    /// Listens at `unix:PATH` or `tcp:HOST:PORT`; port 0 picks a free port. A stale socket file, at
    /// which no process listens, is replaced.
    pub fn bind(address: &str) -> io::Result<Self> {
        match address.split_once(':') {
            Some(("unix", "")) => Err(bad_address(address)),
            Some(("unix", path)) => bind_path(path).map(Self::Unix),
            Some(("tcp", place)) => TcpListener::bind(place).map(Self::Tcp).map_err(|error| {
                io::Error::new(error.kind(), format!("cannot listen at {address}: {error}"))
            }),
            _ => Err(bad_address(address)),
        }
    }

    /// Returns the address at which peers reach the listener.
    pub fn address(&self) -> io::Result<String> {
        match self {
            Self::Unix(listener) => {
                let address = listener.local_addr()?;
                let path = address.as_pathname().expect("bound to a path");
                Ok(format!("unix:{}", path.display()))
            }
            Self::Tcp(listener) => Ok(format!("tcp:{}", listener.local_addr()?)),
        }
    }

    pub fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Unix(listener) => Ok(Socket::Unix(listener.accept()?.0)),
            Self::Tcp(listener) => Socket::tcp(listener.accept()?.0),
        }
    }
}

impl Socket {
    pub fn connect(address: &str) -> io::Result<Self> {
        Self::connect_within(address, CONNECT_TIMEOUT)
    }

    /// Connects, at most within `timeout` for TCP.
    pub fn connect_within(address: &str, timeout: Duration) -> io::Result<Self> {
        match address.split_once(':') {
            Some(("unix", path)) => Ok(Self::Unix(UnixStream::connect(path)?)),
            Some(("tcp", place)) => {
                let place: SocketAddr = place.parse().map_err(|_| bad_address(address))?;
                let stream = TcpStream::connect_timeout(&place, timeout);
                let unreachable =
                    |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
                Self::tcp(stream.map_err(unreachable)?)
            }
            _ => Err(bad_address(address)),
        }
    }

    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let socket = Self::Tcp(stream);
        socket.set_silence(SILENCE_MAX)?;
        Ok(socket)
    }

    /// Ends a TCP connection once the other end's kernel has acknowledged nothing for `silence`: neither
    /// data (`TCP_USER_TIMEOUT`), nor probes while there are none.
    pub fn set_silence(&self, silence: Duration) -> io::Result<()> {
        use rustix::net::sockopt;
        sockopt::set_tcp_user_timeout(self, silence.as_millis() as u32)?;
        sockopt::set_socket_keepalive(self, true)?;
        sockopt::set_tcp_keepidle(self, silence / 2)?;
        sockopt::set_tcp_keepintvl(self, silence / 5)?;
        Ok(())
    }

    /// Encrypts a new TCP connection; blocks until both ends have.
    ///
    /// # Errors
    /// The connection has ended, the other end does not encrypt, or this is no TCP connection.
    pub fn encrypted(self, encryption: &Encryption, end: End) -> io::Result<Self> {
        let Self::Tcp(stream) = self else { return Err(io::ErrorKind::InvalidInput.into()) };
        let encrypted = match end {
            End::Connector => encryption.connect(stream),
            End::Acceptor => encryption.accept(stream),
        };
        encrypted.map(Box::new).map(Self::Encrypted)
    }

    /// Returns what only the two ends of an encrypted connection know; empty for other connections.
    pub fn binding(&self) -> &[u8] {
        match self {
            Self::Encrypted(stream) => stream.binding(),
            _ => &[],
        }
    }

    /// Whether written bytes wait in this process to be sent.
    pub fn has_unsent(&self) -> bool {
        matches!(self, Self::Encrypted(stream) if stream.has_unsent())
    }

    /// Whether bytes have been received that polling the descriptor misses.
    pub fn has_received(&self) -> bool {
        matches!(self, Self::Encrypted(stream) if stream.has_received())
    }

    /// Duplicates the descriptor; both refer to the same connection. The duplicate of an encrypted one
    /// can only be shut down.
    pub fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
            Self::Encrypted(stream) => stream.stream().try_clone().map(Self::Tcp),
        }
    }

    /// Shuts the connection down for all of its descriptors.
    pub fn shut_down(&self) {
        // Ignored: the connection may already have ended.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Encrypted(stream) => stream.stream().shutdown(Shutdown::Both),
        };
    }

    /// Returns the number of sent bytes that have not reached the peer's kernel.
    pub fn under_way(&self) -> io::Result<usize> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the request writes an integer of this size.
        match unsafe { libc::ioctl(self.descriptor(), libc::TIOCOUTQ, &raw mut bytes) } {
            0 if self.is_local() => Ok(0),
            0 => Ok(usize::try_from(bytes).unwrap_or(0)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Fails if the peer is a local user that may not connect. A peer on another machine, or in another
    /// network namespace, is authenticated by the token alone.
    ///
    /// # Errors
    /// The user may not connect, or the kernel does not identify the user.
    pub fn check_peer(&self, users: &Users) -> io::Result<()> {
        match self {
            Self::Encrypted(_) => Ok(()), // it was checked before it was encrypted
            Self::Unix(stream) => users.check_unix(stream),
            Self::Tcp(stream) => {
                let peer = stream.peer_addr()?;
                match users.check_tcp(stream.local_addr()?, peer) {
                    Err(error)
                        if error.kind() == io::ErrorKind::NotFound && !peer.ip().is_loopback() =>
                    {
                        Ok(())
                    }
                    checked => checked.map(drop),
                }
            }
        }
    }

    /// Returns the peer's address, for messages.
    pub fn peer(&self) -> String {
        let address = match self {
            Self::Unix(_) => return "this machine".to_owned(),
            Self::Tcp(stream) => stream.peer_addr(),
            Self::Encrypted(stream) => stream.stream().peer_addr(),
        };
        address.map_or_else(|_| "an unknown address".to_owned(), |address| address.to_string())
    }

    /// Whether the peer has closed the connection. For idle connections, on which nothing is received.
    pub fn is_ended(&self) -> bool {
        use rustix::net::RecvFlags;
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self.as_fd(), &mut [0_u8; 1][..], flags) {
            Ok((read, _)) => read == 0,
            Err(error) => error != rustix::io::Errno::AGAIN,
        }
    }

    /// Waits at most `timeout` until there is something to read, or the connection has ended.
    pub fn is_readable_within(&self, timeout: Duration) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        if self.has_received() {
            return Ok(true);
        }
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        let mut watched = [PollFd::new(self, PollFlags::IN)];
        match poll(&mut watched, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => Ok(false),
            polled => Ok(polled? > 0),
        }
    }

    /// Whether the connection can pass descriptors, and so shared memory.
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(self, direction, timeout)?;
        }
        Ok(())
    }

    fn descriptor(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }

    /// Makes all operations non-blocking: what cannot complete at once fails with `WouldBlock`.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(self, true)?)
    }

    /// Limits the number of bytes that are written but not yet sent.
    pub fn set_send_buffer(&self, bytes: usize) -> io::Result<()> {
        // The kernel doubles the requested value to include its own bookkeeping.
        rustix::net::sockopt::set_socket_send_buffer_size(self.as_fd(), bytes / 2)?;
        Ok(())
    }

    /// Writes header and payload with one system call, if the kernel takes both.
    pub fn write_frame(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
        let total = header.len() + payload.len();
        let mut written = self.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)])?;
        while written < total {
            written += match written.checked_sub(header.len()) {
                None => self.write(&header[written..])?,
                Some(done) => self.write(&payload[done..])?,
            };
        }
        Ok(())
    }

    /// Writes a header together with a file descriptor (`SCM_RIGHTS`).
    pub fn write_with_descriptor(&mut self, header: &[u8], file: BorrowedFd) -> io::Result<()> {
        let mut control = [0_u64; 4];
        let mut part =
            libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
        // SAFETY: all-zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the control buffer is aligned and large enough for one descriptor; the header
        // outlives the call.
        let sent = unsafe {
            message.msg_controllen = libc::CMSG_SPACE(4) as _;
            let entry = libc::CMSG_FIRSTHDR(&message);
            (*entry).cmsg_level = libc::SOL_SOCKET;
            (*entry).cmsg_type = libc::SCM_RIGHTS;
            (*entry).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(entry).cast::<RawFd>().write_unaligned(file.as_raw_fd());
            libc::sendmsg(self.descriptor(), &message, libc::MSG_NOSIGNAL)
        };
        match usize::try_from(sent) {
            Err(_) => Err(io::Error::last_os_error()),
            Ok(sent) => self.write_all(&header[sent..]),
        }
    }

    /// Reads exactly a header, and the descriptor that came with it, if any.
    pub fn read_with_descriptor(&mut self, header: &mut [u8]) -> io::Result<Option<OwnedFd>> {
        if !self.is_local() {
            self.read_exact(header)?;
            return Ok(None);
        }
        let mut control = [0_u64; 4];
        let mut part = libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: header.len() };
        // SAFETY: all-zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = std::mem::size_of_val(&control) as _;
        // SAFETY: both buffers are valid for writing during the call.
        let received =
            unsafe { libc::recvmsg(self.descriptor(), &mut message, libc::MSG_CMSG_CLOEXEC) };
        let received = match usize::try_from(received) {
            Err(_) => return Err(io::Error::last_os_error()),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => received,
        };
        // SAFETY: the kernel filled the control buffer.
        let mut files = unsafe { descriptors(&message) };
        let cut = message.msg_flags & libc::MSG_CTRUNC != 0;
        self.read_exact(&mut header[received..])?;
        if files.len() > 1 || cut {
            let text = "more descriptors came than the one that is expected";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(files.pop())
    }
}

/// Takes ownership of all descriptors that came with a message; dropping them closes them.
///
/// # Safety
/// The control buffer of `message` was filled by the kernel, and this is called once.
unsafe fn descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut found = Vec::new();
    // SAFETY: the entries are in bounds of the control buffer and have the stated lengths; the
    // descriptors in it are new and owned by no other value.
    unsafe {
        let mut entry = libc::CMSG_FIRSTHDR(message);
        while let Some(header) = entry.as_ref() {
            if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
                let bytes = header.cmsg_len - libc::CMSG_LEN(0) as usize;
                let first = libc::CMSG_DATA(entry).cast::<RawFd>();
                for index in 0..bytes / size_of::<RawFd>() {
                    found.push(OwnedFd::from_raw_fd(first.add(index).read_unaligned()));
                }
            }
            entry = libc::CMSG_NXTHDR(message, entry);
        }
    }
    found
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
            Self::Encrypted(stream) => stream.stream().as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
            Self::Encrypted(stream) => stream.read(buffer),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(buffer),
            Self::Tcp(stream) => stream.write(buffer),
            Self::Encrypted(stream) => stream.write(buffer),
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write_vectored(parts),
            Self::Tcp(stream) => stream.write_vectored(parts),
            Self::Encrypted(stream) => stream.write_vectored(parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Encrypted(stream) => stream.flush(),
            _ => Ok(()),
        }
    }
}
