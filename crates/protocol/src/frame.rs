//! Frames of commands, and the limits of reports.
//!
//! A frame is its length in four little-endian bytes and a MessagePack array of commands. A frame is
//! closed once it holds [`COMMAND_FRAME_BYTES`], so that a host begins with the first commands of a
//! long queue while the others arrive.

use base::HostId;
use topology::Cluster;

use crate::{Command, Encoder, Field};

/// Longest report that is accepted, in bytes; larger data travels on the data plane.
pub const REPORT_LIMIT: usize = 256 << 20;
/// Longest report of a host that has not authenticated, in bytes.
pub const HELLO_LIMIT: usize = 64 << 10;
/// Longest frame of commands that a host accepts, in bytes: a frame with one command more than
/// fits, whose program has the size of the longest request.
pub const COMMAND_FRAME_LIMIT: usize = (1 << 30) + (1 << 20);
/// Size from which a frame takes no more commands, in bytes.
const COMMAND_FRAME_BYTES: usize = 64 << 10;
/// The length, and an array whose number of elements has four bytes.
const HEAD_BYTES: usize = 9;
/// MessagePack's mark of such an array.
const ARRAY_32: u8 = 0xdd;

/// Commands for one host, encoded in frames.
#[derive(Debug, Default)]
pub struct CommandFrames {
    bytes: Vec<u8>,
    /// Where the last frame begins.
    last: usize,
    /// Number of commands in it.
    commands: u32,
}

impl CommandFrames {
    /// Returns the size of all frames in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is no command.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends a command; uploads below `inline` bytes travel in their command.
    pub fn push(&mut self, command: &Command, host: HostId, cluster: &Cluster, inline: usize) {
        let start = self.bytes.len();
        if start == 0 || start - self.last >= COMMAND_FRAME_BYTES {
            (self.last, self.commands) = (start, 0);
            self.bytes.extend_from_slice(&[0; HEAD_BYTES]);
        }
        command.write(&mut Encoder::new(&mut self.bytes, host, cluster, inline));
        self.commands += 1;
        let (head, length) = (self.last, (self.bytes.len() - self.last - 4) as u32);
        self.bytes[head..head + 4].copy_from_slice(&length.to_le_bytes());
        self.bytes[head + 4] = ARRAY_32;
        self.bytes[head + 5..head + HEAD_BYTES].copy_from_slice(&self.commands.to_be_bytes());
    }

    /// Exchanges all frames for an empty buffer.
    pub fn take(&mut self, emptied: &mut Vec<u8>) {
        emptied.clear();
        std::mem::swap(emptied, &mut self.bytes);
    }
}
