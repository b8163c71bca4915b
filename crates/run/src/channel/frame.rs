//! The frame format of data-plane connections: a fixed header, then the payload.

use std::io::{self, Read, Write};

use base::{HostId, TransferTag};

/// Magic number of frames; also the version of this format.
const MAGIC: u32 = 0x4641_4952 + 4;
pub(crate) const HEADER_BYTES: usize = 48;
/// Longest text of a failure, or token, that is accepted, in bytes.
pub(crate) const TEXT_LIMIT: u64 = 64 << 10;

/// The kind of a frame. Between machines, receipts confirm frames that carry a message, its failure, or
/// the loss of a host: their receiver echoes the header once it has all of the frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum FrameKind {
    /// Handshake, first on every connection.
    Hello = 1,
    /// Bytes of a message, in the frame.
    Inline = 2,
    /// Bytes of a message, in a shared-memory segment.
    Segment = 3,
    /// The message has failed; the payload is the error.
    Failure = 4,
    /// A segment will not be used again.
    Forget = 5,
    /// Heartbeat; the receiver echoes the frame.
    Ping = 6,
    /// The host whose number is the tag is lost; the payload is the error.
    Loss = 7,
    /// The connection becomes a lane of the team that the tag names. Bits of the offset: 0-15 the
    /// lane's channel, 16-31 the channel that the connection uses, from 32 the generation of the
    /// connection. The total is the number of bytes of the lane that the sender has read. The receiver
    /// echoes the frame of the first generation once it has accepted the connection.
    Lane = 8,
}

/// The fixed part of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub kind: FrameKind,
    pub from: HostId,
    pub tag: TransferTag,
    /// Bytes that follow, or that are in the segment.
    pub length: u64,
    /// Their offset in the message.
    pub offset: u64,
    /// Size of the whole message; for segments, the segment's number.
    pub total: u64,
}

impl Header {
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.encode())
    }

    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tag.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.total.to_le_bytes());
        bytes
    }

    pub fn read(input: &mut impl Read) -> io::Result<Header> {
        let mut bytes = [0; HEADER_BYTES];
        input.read_exact(&mut bytes)?;
        Self::decode(&bytes)
    }

    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> io::Result<Header> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let kinds = [
            FrameKind::Hello,
            FrameKind::Inline,
            FrameKind::Segment,
            FrameKind::Failure,
            FrameKind::Forget,
            FrameKind::Ping,
            FrameKind::Loss,
            FrameKind::Lane,
        ];
        let kind = kinds.into_iter().find(|&kind| kind as u32 == word(4));
        let (Some(kind), MAGIC) = (kind, word(0)) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("not a data-plane frame: starts with {:#x} {:#x}", word(0), word(4)),
            ));
        };
        Ok(Header {
            kind,
            from: HostId(word(8)),
            tag: TransferTag(long(16)),
            length: long(24),
            offset: long(32),
            total: long(40),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_wire() {
        let header = Header {
            kind: FrameKind::Segment,
            from: HostId(7),
            tag: TransferTag(1 << 40),
            length: 3,
            offset: 5,
            total: u64::MAX,
        };
        assert_eq!(Header::read(&mut &header.encode()[..]).unwrap(), header);
        assert!(Header::read(&mut &[0; HEADER_BYTES][..]).is_err());
    }
}
