//! Receiving: a peer that connects authenticates itself, and then sends messages.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::{HostId, Status};

use super::frame::{FrameKind, HEADER_BYTES, Header, TEXT_LIMIT};
use super::handshake::admit;
use super::inbox::ReceiveResult;
use super::lanes::{LaneName, Opened};
use super::memory::{MemfdSegment, Payload, SharedBlock};
use super::socket::{ChannelListener, Socket};
use super::{Inner, Partial};

/// Pause after a connection could not be accepted.
const AFTER_FAILURE: Duration = Duration::from_millis(50);
/// Largest message that is accepted, in bytes.
const MESSAGE_LIMIT: u64 = 64 << 30;

/// Serves connections until the data plane is closed.
pub(crate) fn accept(inner: &Arc<Inner>, listener: &ChannelListener) {
    loop {
        let accepted = listener.accept();
        if inner.closed.load(Ordering::Relaxed) {
            return;
        }
        let socket = match accepted {
            Ok(socket) => socket,
            Err(error) => {
                // For example, no descriptor is left; retry once others have been closed.
                tracing::warn!(%error, "a data-plane connection could not be accepted");
                std::thread::sleep(AFTER_FAILURE);
                continue;
            }
        };
        let peer = socket.peer();
        if let Err(error) = socket.check_peer(&inner.users) {
            tracing::warn!(%error, "a data-plane connection from {peer} was refused");
            continue;
        }
        let Ok(stranger) = socket.try_clone().map(Arc::new) else { continue };
        inner.meet(stranger.clone());
        let inner = inner.clone();
        let serve = move || {
            let admitted = admit(socket, &inner.credentials);
            inner.know(&stranger);
            drop(stranger);
            match admitted {
                // Others look whether this endpoint is there.
                Err(error) if is_end(&error) => {
                    tracing::debug!(%error, "a data-plane connection ended before its hello");
                }
                Err(error) if is_timeout(&error) => {
                    tracing::warn!(
                        "a data-plane connection from {peer} was refused: no hello in time"
                    );
                }
                Err(error) => {
                    tracing::warn!(%error, "a data-plane connection from {peer} was refused");
                }
                Ok(socket) => match serve(&inner, socket) {
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        tracing::warn!(%error, "a data-plane connection from {peer} was closed");
                    }
                    Err(error) => tracing::debug!(%error, "a data-plane connection ended"),
                    Ok(()) => {}
                },
            }
        };
        let spawned = std::thread::Builder::new().stack_size(256 << 10).spawn(serve);
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for a data-plane connection");
        }
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Reads frames from one connection until it ends.
fn serve(inner: &Arc<Inner>, mut socket: Socket) -> io::Result<()> {
    let mut header = [0; HEADER_BYTES];
    loop {
        let file = socket.read_with_descriptor(&mut header)?;
        let header = Header::decode(&header)?;
        let total = if header.kind == FrameKind::Lane { 0 } else { header.total };
        if header.length > MESSAGE_LIMIT || total > MESSAGE_LIMIT {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "message over the limit"));
        }
        match header.kind {
            FrameKind::Hello | FrameKind::Ping => {}
            FrameKind::Failure => {
                let text = read_text(&mut socket, &header)?;
                deliver(inner, socket.is_local(), &header, Err(Status::parse(&text)));
            }
            FrameKind::Loss => {
                let text = read_text(&mut socket, &header)?;
                let lost = u32::try_from(header.offset).map_err(|_| io::ErrorKind::InvalidData)?;
                inner.lose_peer(HostId(lost), header.tag, &Status::parse(&text));
            }
            FrameKind::Forget => {
                inner.segments.lock().remove(&(header.from, header.total));
            }
            FrameKind::Lane => {
                let (lane, from, taken) = (LaneName::of(&header), header.from, header.total);
                return inner.lanes.offer(Opened { lane, from, taken, socket });
            }
            FrameKind::Inline if header.length == header.total => {
                receive_whole(inner, &mut socket, &header)?;
            }
            FrameKind::Inline => receive_part(inner, &mut socket, &header)?,
            FrameKind::Segment => receive_segment(inner, file, &header)?,
        }
        let is_confirmed = match header.kind {
            FrameKind::Ping => true,
            FrameKind::Inline | FrameKind::Failure | FrameKind::Loss => !socket.is_local(),
            _ => false,
        };
        if is_confirmed {
            socket.write_all(&header.encode())?;
        }
    }
}

fn read_text(socket: &mut Socket, header: &Header) -> io::Result<String> {
    if header.length > TEXT_LIMIT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "text over the limit"));
    }
    let mut text = vec![0; header.length as usize];
    socket.read_exact(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Receives a message in one frame. Of a message from another machine, parts may have come before, or
/// all of it: it was sent again if their connection has failed.
fn receive_whole(inner: &Arc<Inner>, socket: &mut Socket, header: &Header) -> io::Result<()> {
    let total = header.total as usize;
    let block = Arc::new(inner.pool.take(total)?);
    // SAFETY: the block is new, so no other reference exists.
    socket.read_exact(unsafe { block.slice_mut(0, total) })?;
    inner.bytes_in.fetch_add(header.length, Ordering::Relaxed);
    deliver(inner, socket.is_local(), header, Ok(Payload::of_block(block, total)));
    Ok(())
}

/// Delivers a message, or its failure, once: from another machine it may come again.
fn deliver(inner: &Arc<Inner>, is_local: bool, header: &Header, outcome: ReceiveResult) {
    if !is_local {
        if !inner.delivered.lock().insert(header.tag) {
            return;
        }
        inner.partial.lock().remove(&header.tag);
    }
    inner.arrive_from(header.from, header.tag, outcome);
}

fn receive_part(inner: &Arc<Inner>, socket: &mut Socket, header: &Header) -> io::Result<()> {
    if header.offset.checked_add(header.length).is_none_or(|end| end > header.total) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "stripe outside its message"));
    }
    let total = header.total as usize;
    let block = {
        let mut partial = inner.partial.lock();
        if inner.delivered.lock().contains(header.tag) {
            let text = "a stripe of a message that has come already";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let known = match partial.entry(header.tag) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let block = Arc::new(inner.pool.take(total)?);
                unknown.insert(Partial::new(header.from, block, header.total))
            }
        };
        known.claim(header)?;
        known.block.clone()
    };
    // SAFETY: the stripe is in bounds of the block, and no other claimed stripe overlaps it.
    let target = unsafe { block.slice_mut(header.offset as usize, header.length as usize) };
    socket.read_exact(target)?;
    inner.bytes_in.fetch_add(header.length, Ordering::Relaxed);
    let mut partial = inner.partial.lock();
    let entry = partial.get_mut(&header.tag).ok_or(io::ErrorKind::InvalidData)?;
    entry.missing = entry.missing.saturating_sub(header.length);
    if entry.missing == 0 {
        partial.remove(&header.tag);
        drop(partial);
        deliver(inner, socket.is_local(), header, Ok(Payload::of_block(block, total)));
    }
    Ok(())
}

impl Partial {
    fn new(from: HostId, block: Arc<SharedBlock>, total: u64) -> Self {
        Self { from, block, total, missing: total, claimed: BTreeMap::new() }
    }

    /// Claims the range of a stripe that is about to be read into the block.
    ///
    /// # Errors
    /// It belongs to a message of another size, or overlaps a claimed stripe.
    fn claim(&mut self, stripe: &Header) -> io::Result<()> {
        let refuse = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        if stripe.total != self.total {
            return refuse("a stripe of a message of another size");
        }
        let (start, end) = (stripe.offset, stripe.offset + stripe.length);
        let before = self.claimed.range(..end).next_back();
        if before.is_some_and(|(_, &other)| other > start) || self.claimed.contains_key(&start) {
            return refuse("a stripe that has come already");
        }
        self.claimed.insert(start, end);
        Ok(())
    }
}

fn receive_segment(inner: &Arc<Inner>, file: Option<OwnedFd>, header: &Header) -> io::Result<()> {
    let key = (header.from, header.total);
    if let Some(file) = file {
        inner.segments.lock().insert(key, Arc::new(MemfdSegment::open(file)?));
    }
    let segment = inner.segments.lock().get(&key).cloned();
    let segment = segment.filter(|segment| header.length <= segment.capacity() as u64);
    let segment = segment.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "unknown or too small a segment is named")
    })?;
    inner.bytes_in.fetch_add(header.length, Ordering::Relaxed);
    let payload = Payload::of_segment(segment, header.length as usize);
    inner.arrive_from(header.from, header.tag, Ok(payload));
    Ok(())
}

#[cfg(test)]
mod fuzz;
