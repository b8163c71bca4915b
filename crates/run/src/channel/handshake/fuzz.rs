//! What peers send before they have proved that they belong to the run.

use std::io::Write;
use std::os::unix::net::UnixStream;

use fuzzing::damaged;
use proptest::prelude::*;

use super::*;

const TOKEN: &str = "the token of the run";

/// Returns a frame of the handshake: of the token, or of what is drawn and proved on TCP.
fn valid_frame(seed: u64) -> Vec<u8> {
    let payload = match seed % 3 {
        0 => TOKEN.as_bytes().to_vec(),
        1 => vec![seed as u8; NONCE],
        _ => vec![seed as u8; NONCE + PROOF],
    };
    let (kind, length) = (FrameKind::Hello, payload.len() as u64);
    let from = HostId((seed >> 8) as u32 % 4);
    let header = Header { kind, from, tag: TransferTag(0), length, offset: 0, total: 0 };
    [&header.encode()[..], &payload].concat()
}

/// Returns a connection on which these bytes have come, and then its end.
fn connection(bytes: &[u8]) -> Socket {
    let (mut peer, here) = UnixStream::pair().unwrap();
    peer.write_all(bytes).unwrap();
    Socket::Unix(here)
}

proptest! {
    #[test]
    fn fuzz_tokens_of_local_peers(bytes in damaged(valid_frame)) {
        let credentials =
            Credentials { me: HostId(0), token: TOKEN.to_owned(), encryption: None };
        let is_sound = bytes.get(crate::channel::frame::HEADER_BYTES..)
            .is_some_and(|payload| payload.starts_with(TOKEN.as_bytes()));
        prop_assert!(admit(connection(&bytes), &credentials).is_err() || is_sound);
    }

    #[test]
    fn fuzz_proofs(bytes in damaged(valid_frame)) {
        let _ = receive::<NONCE>(&mut connection(&bytes), "a peer");
        let _ = receive::<{ NONCE + PROOF }>(&mut connection(&bytes), "a peer");
    }
}
