//! A lane: what two ranks send each other by one channel, frame by frame.
//!
//! What leaves is kept until the other side says that it has read it. So a rank may run ahead of
//! another by that much and no more, and what was under way can be sent again.

use std::io::{self, IoSlice, Read, Write};
use std::time::Instant;

use base::Channel;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::channel::{LaneName, Socket};

pub(super) const HEAD_BYTES: usize = 32;
/// Longest payload of a frame.
const FRAME_MAX: usize = 64 << 10;
/// Shortest payload worth a frame, if more is to come.
const FRAME_MIN: usize = 16 << 10;
/// Room that only acknowledgements use, so that they always leave.
const RESERVE: usize = 16 * HEAD_BYTES;
/// Begins every frame; also the version of this format.
const MAGIC: u32 = 0x4641_4c31;
/// Longest text of a failure.
const TEXT_MAX: usize = 8 << 10;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum MessageKind {
    /// Elements of a motif.
    Data = 1,
    /// So many bytes of the other direction have been read.
    Read = 2,
    /// The operation has failed; its elements mean nothing. The payload says why.
    Poison = 3,
    /// The rank has given up. The payload says why.
    GivenUp = 4,
}

/// What elements belong to. Both ranks know it; it travels to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subject {
    pub step: u64,
    pub operation: u32,
    pub motif: u32,
    /// Of what is asked for, and how it is carried out.
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

/// One connection to one other rank.
#[derive(Debug)]
pub(super) struct ReliableStream {
    pub socket: Socket,
    pub peer: u32,
    /// What may have to be sent again: of the stream of bytes, those from `read` to `written`, of
    /// which those before `sent` have left.
    kept: Vec<u8>,
    read: u64,
    sent: u64,
    written: u64,
    /// Where what the other side waits for ends; behind it is only what has been read.
    wanted: u64,
    /// The frame that is coming.
    head: [u8; HEAD_BYTES],
    head_filled: usize,
    frame: Option<Head>,
    /// Bytes of its payload that have not been taken.
    left: usize,
    /// What has come of a text.
    text: Vec<u8>,
    /// Bytes taken from the other direction, and how many of them it knows of.
    taken: u64,
    told: u64,
    /// Which connection this is, why it is of no use any more, and whether the other side has still to
    /// say what it has read.
    pub epoch: u32,
    pub broken: Option<String>,
    is_resuming: bool,
    /// Which way it takes.
    pub way: Channel,
    /// How often it was connected again without hearing from the other side, and when last.
    pub attempts: u32,
    pub attempted: Instant,
}

impl ReliableStream {
    /// One that keeps at most so many bytes.
    pub fn new(socket: Socket, peer: u32, way: Channel, window: usize) -> io::Result<Self> {
        socket.set_nonblocking()?;
        Ok(Self {
            socket,
            peer,
            kept: vec![0; window.next_power_of_two()],
            read: 0,
            sent: 0,
            written: 0,
            wanted: 0,
            head: [0; HEAD_BYTES],
            head_filled: 0,
            frame: None,
            left: 0,
            text: Vec::new(),
            taken: 0,
            told: 0,
            epoch: 0,
            broken: None,
            is_resuming: false,
            way,
            attempts: 0,
            attempted: Instant::now(),
        })
    }

    // Other connections

    /// Bytes that were taken.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Goes on by a connection that this rank has opened; the other side says first what it has read.
    pub fn reopen(&mut self, socket: Socket, name: LaneName) -> io::Result<()> {
        self.replace(socket, name)?;
        (self.is_resuming, self.attempted) = (true, Instant::now());
        self.attempts += 1;
        Ok(())
    }

    /// Has the other side still to say what it has read?
    pub fn is_resuming(&self) -> bool {
        self.is_resuming && self.broken.is_none()
    }

    /// Goes on by a connection that the other side has opened, which has read so much.
    pub fn resume(&mut self, mut socket: Socket, name: LaneName, read: u64) -> io::Result<()> {
        let subject = Subject { step: self.taken, operation: 0, motif: 0, digest: 0 };
        socket.write_all(&Head { kind: MessageKind::Read, length: 0, subject }.encode())?;
        self.replace(socket, name)?;
        self.send_again(read)
    }

    fn replace(&mut self, socket: Socket, name: LaneName) -> io::Result<()> {
        socket.set_nonblocking()?;
        self.socket.shut_down();
        (self.socket, self.epoch, self.way) = (socket, name.epoch, Channel(name.way));
        self.broken = None;
        (self.head_filled, self.is_resuming) = (0, false);
        Ok(())
    }

    /// The other side has read so much; what comes after that leaves again.
    fn send_again(&mut self, read: u64) -> io::Result<()> {
        if !(self.read..=self.written).contains(&read) {
            let text = "the other side has read what is not kept, or was never sent";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        (self.read, self.sent, self.attempts) = (read, read, 0);
        Ok(())
    }

    // What leaves

    fn room(&self) -> usize {
        self.kept.len() - (self.written - self.read) as usize
    }

    /// How many bytes were put here and have not left.
    pub fn backlog(&self) -> usize {
        (self.written - self.sent) as usize
    }

    /// Has everything left that was put here?
    pub fn is_flushed(&self) -> bool {
        self.sent == self.written
    }

    /// Could something leave, if the connection took it?
    pub fn can_flush(&self) -> bool {
        !self.is_flushed() && !self.is_resuming
    }

    /// Is something that the other side waits for still here?
    pub fn is_owing(&self) -> bool {
        self.sent < self.wanted
    }

    /// Puts as many of these elements as there is room for; returns how many bytes that is.
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

    /// Puts a text, if there is room for it.
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

    /// Sends what can leave at once; returns whether anything did.
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
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => {
                    self.sent += sent as u64;
                    any = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Whoever has all that it wants may be gone.
                Err(_) if self.sent >= self.wanted => self.sent = self.written,
                Err(error) => return Err(error),
            }
        }
        Ok(any)
    }

    /// Does the other side's machine not have all of what was sent, and may yet get it?
    pub fn is_under_way(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::empty())];
        let is_over = poll(&mut polled, Some(&Timespec::default())).is_ok_and(|events| events > 0);
        !is_over && self.socket.under_way().is_ok_and(|bytes| bytes > 0)
    }

    // What comes

    /// The frame that is coming, if one is; a text when it is there. Those about what has been read are
    /// dealt with here.
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
            // One that was sent again may say less than is known.
            self.read = self.read.max(head.subject.step);
            if self.read > self.sent {
                let text = "the other side says it has read what was never sent";
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
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

    /// Hears what the other side has read before a connection was opened again; returns whether it has
    /// said so.
    pub fn hear(&mut self) -> io::Result<bool> {
        if self.is_resuming {
            let Some(head) = self.read_head()? else { return Ok(false) };
            self.is_resuming = false;
            self.send_again(head.subject.step)?;
        }
        Ok(true)
    }

    /// The next head, if all of it is there.
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

    /// Takes bytes of the frame's payload that are there; returns how many.
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

    /// Takes the text that is there.
    pub fn take_text(&mut self) -> String {
        self.frame = None;
        let text = String::from_utf8_lossy(&self.text).into_owned();
        self.text.clear();
        text
    }

    /// Counts what was taken, and tells the other side now and then.
    fn take(&mut self, count: usize) {
        self.taken += count as u64;
        if self.taken - self.told > self.kept.len() as u64 / 4 && self.room() >= HEAD_BYTES {
            self.told = self.taken;
            let subject = Subject { step: self.taken, operation: 0, motif: 0, digest: 0 };
            self.push_head(MessageKind::Read, 0, subject);
        }
    }
}

/// Reads what is there; nothing if nothing is.
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
