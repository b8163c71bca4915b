//! What peers send once they have proved that they belong to the run.

use std::os::unix::net::UnixStream;

use base::TransferTag;
use fuzzing::damaged;
use parking_lot::{Mutex, RwLock};
use proptest::prelude::*;
use transport::identity::Users;

use super::super::detour::Detour;
use super::super::handshake::Credentials;
use super::*;

/// Returns the state of an endpoint that does not listen.
fn endpoint() -> Arc<Inner> {
    Arc::new(Inner {
        credentials: Arc::new(Credentials {
            me: HostId(0),
            token: String::new(),
            encryption: None,
        }),
        users: Users::owner_and(&[]),
        address: String::new(),
        channels: Vec::new(),
        addresses: Vec::new(),
        detour: Detour::default(),
        turns: Vec::new(),
        peers: RwLock::default(),
        lost: Mutex::default(),
        first_tags: RwLock::default(),
        inbox: Default::default(),
        relays: Default::default(),
        lanes: Default::default(),
        partial: Mutex::default(),
        delivered: Mutex::default(),
        segments: Mutex::default(),
        pool: Arc::default(),
        strangers: Mutex::default(),
        closed: false.into(),
        looks: 0.into(),
        bytes_in: 0.into(),
        bytes_out: 0.into(),
    })
}

/// Returns some frames, such as the stripes of a message, as one host sends them.
fn valid_frames(seed: u64) -> Vec<u8> {
    const KINDS: [FrameKind; 10] = [
        FrameKind::Inline,
        FrameKind::Inline,
        FrameKind::Inline,
        FrameKind::Failure,
        FrameKind::Segment,
        FrameKind::Forget,
        FrameKind::Ping,
        FrameKind::Loss,
        FrameKind::Lane,
        FrameKind::Hello,
    ];
    let mut random = base::Random::of(&[seed]);
    let mut bytes = Vec::new();
    for part in 0..1 + random.below(4) {
        let kind = KINDS[random.below(KINDS.len() as u64) as usize];
        let length = match kind {
            FrameKind::Inline => [0, 1, 8, 24][random.below(4) as usize],
            FrameKind::Failure | FrameKind::Loss => 20,
            _ => 0,
        };
        let tag = TransferTag(random.below(2));
        let (offset, total) = (part * length, 4 * length);
        let from = HostId(random.below(3) as u32);
        bytes.extend(Header { kind, from, tag, length, offset, total }.encode());
        bytes.extend(b"UNAVAILABLE: a text of 24".iter().take(length as usize));
    }
    bytes
}

proptest! {
    #[test]
    fn fuzz_frames(bytes in damaged(valid_frames)) {
        let (mut peer, here) = UnixStream::pair().unwrap();
        peer.write_all(&bytes).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        let endpoint = endpoint();
        let _ = serve(&endpoint, Socket::Unix(here));
        prop_assert!(endpoint.partial.lock().values().all(|message| message.missing > 0));
    }

    #[test]
    fn fuzz_headers(bytes in damaged(|seed| valid_frames(seed)[..HEADER_BYTES].to_vec())) {
        let Ok(header) = Header::read(&mut &bytes[..]) else { return Ok(()) };
        // What is not in a header is ignored.
        let given: Vec<u8> = header.encode().into();
        prop_assert_eq!(&given[..12], &bytes[..12]);
        prop_assert_eq!(&given[16..], &bytes[16..HEADER_BYTES]);
        if header.kind == FrameKind::Lane {
            let lane = LaneName::of(&header);
            prop_assert_eq!(LaneName::of(&lane.header(header.from, header.total)), lane);
        }
    }
}
