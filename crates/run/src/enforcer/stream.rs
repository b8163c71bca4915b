//! A lane: a reliable byte stream of frames between two ranks on one channel.
//!
//! Sent bytes are kept until the peer acknowledges them. So a rank can be ahead of another by at most
//! the window (flow control), and unacknowledged bytes can be retransmitted on another connection.

use std::io::{self, IoSlice, Read, Write};
use std::time::Instant;

use base::Channel;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::channel::{LaneName, Socket};

pub(super) const HEAD_BYTES: usize = 32;
/// Longest payload of a frame.
const FRAME_MAX: usize = 64 << 10;
/// Shortest payload of a frame, unless it is the last of its part.
const FRAME_MIN: usize = 16 << 10;
/// Part of the window that is reserved for acknowledgements, so that they are never blocked.
const RESERVE: usize = 16 * HEAD_BYTES;
/// Magic number at the start of every frame; also the version of this format.
const MAGIC: u32 = 0x4641_4c31;
/// Longest text of a failure.
const TEXT_MAX: usize = 8 << 10;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum MessageKind {
    /// Elements of a motif.
    Data = 1,
    /// Acknowledgement: the number of bytes of the other direction that have been read.
    Read = 2,
    /// The operation has failed; its elements are invalid. The payload is the reason.
    Poison = 3,
    /// The rank has given up. The payload is the reason.
    GivenUp = 4,
}

/// Identity of the motif of the elements. Both ranks know it; it is sent to detect divergence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subject {
    pub step: u64,
    pub operation: u32,
    pub motif: u32,
    /// Digest of the collective and its plan.
    pub digest: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub kind: MessageKind,
    pub length: usize,
    pub subject: Subject,
}

impl Head {
    fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        let Subject { step, operation, motif, digest } = self.subject;
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.length as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&digest.to_le_bytes());
        bytes[16..24].copy_from_slice(&step.to_le_bytes());
        bytes[24..28].copy_from_slice(&operation.to_le_bytes());
        bytes[28..32].copy_from_slice(&motif.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEAD_BYTES]) -> io::Result<Self> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let kinds =
            [MessageKind::Data, MessageKind::Read, MessageKind::Poison, MessageKind::GivenUp];
        let kind = kinds.into_iter().find(|&kind| kind as u32 == word(4));
        let (Some(kind), MAGIC, length) = (kind, word(0), word(8) as usize) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "what came is no frame"));
        };
        let most = match kind {
            MessageKind::Data => FRAME_MAX,
            MessageKind::Read => 0,
            MessageKind::Poison | MessageKind::GivenUp => TEXT_MAX,
        };
        if length > most {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame over the limit came"));
        }
        let step = u64::from_le_bytes(bytes[16..24].try_into().expect("8 bytes"));
        let subject = Subject { step, operation: word(24), motif: word(28), digest: word(12) };
        Ok(Self { kind, length, subject })
    }
}

/// One connection to another rank, with retransmission.
#[derive(Debug)]
pub(super) struct ReliableStream {
    pub socket: Socket,
    pub peer: u32,
    /// Retransmission buffer (ring): bytes `read..written` of the stream are not acknowledged; those
    /// before `sent` were given to the socket, those before `gone` to the kernel.
    kept: Vec<u8>,
    read: u64,
    sent: u64,
    gone: u64,
    written: u64,
    /// End of the bytes that the peer waits for; only acknowledgements follow.
    wanted: u64,
    /// Header of the frame that is being received.
    head: [u8; HEAD_BYTES],
    head_filled: usize,
    frame: Option<Head>,
    /// Number of payload bytes that have not been taken.
    left: usize,
    /// The received part of a text.
    text: Vec<u8>,
    /// Number of bytes received, and the number of them that were acknowledged.
    taken: u64,
    acknowledged: u64,
    /// Generation of the connection, why it is broken, and whether the peer has yet to acknowledge what
    /// it had read before the reconnect.
    pub epoch: u32,
    pub broken: Option<String>,
    is_resuming: bool,
    /// The channel that the connection uses.
    pub via: Channel,
    /// Number of reconnects without hearing from the peer, and the time of the last one.
    pub attempts: u32,
    pub attempted: Instant,
}

impl ReliableStream {
    /// Creates a lane with a window of `window` bytes, rounded up to a power of two.
    pub fn new(socket: Socket, peer: u32, via: Channel, window: usize) -> io::Result<Self> {
        socket.set_nonblocking()?;
        Ok(Self {
            socket,
            peer,
            kept: vec![0; window.next_power_of_two()],
            read: 0,
            sent: 0,
            gone: 0,
            written: 0,
            wanted: 0,
            head: [0; HEAD_BYTES],
            head_filled: 0,
            frame: None,
            left: 0,
            text: Vec::new(),
            taken: 0,
            acknowledged: 0,
            epoch: 0,
            broken: None,
            is_resuming: false,
            via,
            attempts: 0,
            attempted: Instant::now(),
        })
    }

    // Reconnecting

    /// Returns the number of bytes received.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Resumes on a connection that this rank has opened; the peer first acknowledges what it has read.
    pub fn reopen(&mut self, socket: Socket, name: LaneName) -> io::Result<()> {
        self.replace(socket, name)?;
        (self.is_resuming, self.attempted) = (true, Instant::now());
        self.attempts += 1;
        Ok(())
    }

    /// Whether the peer has yet to acknowledge what it had read before the reconnect.
    pub fn is_resuming(&self) -> bool {
        self.is_resuming && self.broken.is_none()
    }

    /// Resumes on a connection that the peer has opened; the peer has read `read` bytes.
    pub fn resume(&mut self, mut socket: Socket, name: LaneName, read: u64) -> io::Result<()> {
        let subject = Subject { step: self.taken, operation: 0, motif: 0, digest: 0 };
        socket.write_all(&Head { kind: MessageKind::Read, length: 0, subject }.encode())?;
        self.replace(socket, name)?;
        self.send_again(read)
    }

    fn replace(&mut self, socket: Socket, name: LaneName) -> io::Result<()> {
        socket.set_nonblocking()?;
        self.socket.shut_down();
        (self.socket, self.epoch, self.via) = (socket, name.epoch, Channel(name.via));
        self.broken = None;
        (self.head_filled, self.is_resuming) = (0, false);
        Ok(())
    }

    /// Rewinds to the byte after `read`, which the peer acknowledged, to retransmit from there.
    fn send_again(&mut self, read: u64) -> io::Result<()> {
        if !(self.read..=self.written).contains(&read) {
            let text = "the other side has read what is not kept, or was never sent";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        (self.read, self.sent, self.gone, self.attempts) = (read, read, read, 0);
        Ok(())
    }

    // Sending

    fn room(&self) -> usize {
        self.kept.len() - (self.written - self.read) as usize
    }

    /// Returns the number of bytes that were put but not sent.
    pub fn backlog(&self) -> usize {
        (self.written - self.sent) as usize
    }

    /// Whether everything that was put has been sent.
    pub fn is_flushed(&self) -> bool {
        self.sent == self.written && !self.socket.has_unsent()
    }

    /// Whether there are bytes to send, once the connection accepts them.
    pub fn can_flush(&self) -> bool {
        !self.is_flushed() && !self.is_resuming
    }

    /// Whether bytes that the peer waits for have not been sent.
    pub fn is_owing(&self) -> bool {
        self.gone < self.wanted
    }

    /// Puts as many of these elements into the window as fit; returns their number of bytes.
    pub fn put(&mut self, subject: Subject, elements: &[u8]) -> usize {
        let mut done = 0;
        while done < elements.len() {
            let left = elements.len() - done;
            let room = self.room().saturating_sub(RESERVE + HEAD_BYTES);
            let length = left.min(FRAME_MAX).min(room);
            if length == 0 || length < left.min(FRAME_MIN) {
                break;
            }
            self.push_head(MessageKind::Data, length, subject);
            self.push(&elements[done..done + length]);
            self.wanted = self.written;
            done += length;
        }
        done
    }

    /// Puts a text into the window, if it fits; returns whether it did.
    pub fn put_text(&mut self, kind: MessageKind, subject: Subject, text: &str) -> bool {
        let text = &text.as_bytes()[..text.len().min(TEXT_MAX)];
        if self.room() < RESERVE + HEAD_BYTES + text.len() {
            return false;
        }
        self.push_head(kind, text.len(), subject);
        self.push(text);
        self.wanted = self.written;
        true
    }

    fn push_head(&mut self, kind: MessageKind, length: usize, subject: Subject) {
        self.push(&Head { kind, length, subject }.encode());
    }

    fn push(&mut self, bytes: &[u8]) {
        let size = self.kept.len();
        let at = self.written as usize & (size - 1);
        let first = bytes.len().min(size - at);
        self.kept[at..at + first].copy_from_slice(&bytes[..first]);
        self.kept[..bytes.len() - first].copy_from_slice(&bytes[first..]);
        self.written += bytes.len() as u64;
    }

    /// Sends as much as possible without blocking; returns whether any bytes were sent.
    pub fn flush(&mut self) -> io::Result<bool> {
        let mut any = false;
        if self.is_resuming || self.broken.is_some() {
            return Ok(false);
        }
        while !self.is_flushed() {
            let size = self.kept.len();
            let at = self.sent as usize & (size - 1);
            let length = self.backlog();
            let first = length.min(size - at);
            let parts = [
                IoSlice::new(&self.kept[at..at + first]),
                IoSlice::new(&self.kept[..length - first]),
            ];
            match self.socket.write_vectored(&parts) {
                Ok(0) if length > 0 => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => {
                    self.sent += sent as u64;
                    any = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A peer that has received all that it waits for may have closed the connection.
                Err(_) if self.gone >= self.wanted => self.sent = self.written,
                Err(error) => return Err(error),
            }
            if !self.socket.has_unsent() {
                self.gone = self.sent;
            }
        }
        Ok(any)
    }

    /// Whether sent bytes have not reached the peer's kernel, and still may.
    pub fn is_under_way(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::empty())];
        let is_over = poll(&mut polled, Some(&Timespec::default())).is_ok_and(|events| events > 0);
        !is_over && self.socket.under_way().is_ok_and(|bytes| bytes > 0)
    }

    // Receiving

    /// Returns the header of the current frame, if one has been received; for a text, once all of it
    /// has. Handles acknowledgements.
    pub fn frame(&mut self) -> io::Result<Option<Head>> {
        if self.broken.is_some() {
            return Ok(None);
        }
        if !self.hear()? {
            return Ok(None);
        }
        while self.frame.is_none() {
            let Some(head) = self.read_head()? else { return Ok(None) };
            self.take(HEAD_BYTES);
            if head.kind != MessageKind::Read {
                self.left = head.length;
                self.frame = Some(head);
                continue;
            }
            // A retransmitted acknowledgement may be older than the last one.
            let read = self.read.max(head.subject.step);
            if read > self.sent {
                let text = "the other side says it has read what was never sent";
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            self.read = read;
        }
        let is_text = self.frame.is_some_and(|head| head.kind != MessageKind::Data);
        while is_text && self.left > 0 {
            let mut part = [0; 512];
            let most = part.len().min(self.left);
            let more = read(&mut self.socket, &mut part[..most])?;
            if more == 0 {
                return Ok(None);
            }
            self.text.extend_from_slice(&part[..more]);
            self.left -= more;
            self.take(more);
        }
        Ok(self.frame)
    }

    /// Handles the peer's acknowledgement after a reconnect; returns whether the lane is in sync.
    pub fn hear(&mut self) -> io::Result<bool> {
        if self.is_resuming {
            let Some(head) = self.read_head()? else { return Ok(false) };
            self.is_resuming = false;
            self.send_again(head.subject.step)?;
        }
        Ok(true)
    }

    /// Returns the next header, once all of it has been received.
    fn read_head(&mut self) -> io::Result<Option<Head>> {
        while self.head_filled < HEAD_BYTES {
            let filled = self.head_filled;
            match read(&mut self.socket, &mut self.head[filled..])? {
                0 => return Ok(None),
                more => self.head_filled += more,
            }
        }
        self.head_filled = 0;
        Head::decode(&self.head).map(Some)
    }

    /// Reads available bytes of the frame's payload without blocking; returns their number.
    pub fn read_payload(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(self.left);
        if self.broken.is_some() {
            return Ok(0);
        }
        let count = read(&mut self.socket, &mut into[..most])?;
        self.left -= count;
        if self.left == 0 {
            self.frame = None;
        }
        self.take(count);
        Ok(count)
    }

    /// Takes the received text.
    pub fn take_text(&mut self) -> String {
        self.frame = None;
        let text = String::from_utf8_lossy(&self.text).into_owned();
        self.text.clear();
        text
    }

    /// Counts received bytes, and acknowledges them after every quarter of the window.
    fn take(&mut self, count: usize) {
        self.taken += count as u64;
        if self.taken - self.acknowledged > self.kept.len() as u64 / 4 && self.room() >= HEAD_BYTES
        {
            self.acknowledged = self.taken;
            let subject = Subject { step: self.taken, operation: 0, motif: 0, digest: 0 };
            self.push_head(MessageKind::Read, 0, subject);
        }
    }
}

/// Reads available bytes without blocking; returns 0 if there are none.
fn read(socket: &mut Socket, into: &mut [u8]) -> io::Result<usize> {
    if into.is_empty() {
        return Ok(0);
    }
    loop {
        match socket.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod fuzz;
