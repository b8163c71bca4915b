//! What peers that have not proved a token send: requests, tokens, and a damaged file of an authority.

use std::sync::LazyLock;

use fuzzing::{damaged, damaged_text};
use proptest::prelude::*;

use super::*;
use crate::{Grant, Token};

struct Known {
    shared: Shared,
    token: Token,
    authority: String,
}

static KNOWN: LazyLock<Known> = LazyLock::new(|| {
    let (authority, tokens) = (Authority::create().unwrap(), Arc::new(Tokens::default()));
    let token = tokens.create(PeerRole::Client, &authority, Grant::default(), None);
    let address = ServiceAddress::Unix("/nowhere".into());
    let services = [("ifrt", PeerRole::Client), ("hosts", PeerRole::Host)]
        .map(|(name, role)| (name.to_owned(), Service { role, address: address.clone() }));
    let shared = Shared {
        tls: TlsAcceptor::from(authority.listener().unwrap()),
        tokens,
        services: RwLock::new(services.into()),
        serving_by: Mutex::default(),
        serving: Semaphore::new(1),
        refused: Box::new(|_| {}),
    };
    Known { shared, token, authority: authority.to_pem().expect("it is its own") }
});

fn binding(seed: u64) -> [u8; BINDING] {
    [seed as u8 % 2; BINDING]
}

fn valid_request(seed: u64) -> Vec<u8> {
    let service = ["ifrt", "hosts", "nothing"][(seed >> 8) as usize % 3];
    request(&KNOWN.token, &binding(seed), service).into_bytes()
}

/// Reads a line from bytes as from a connection, and what it asks for.
fn ask(bytes: &[u8]) -> Option<Result<PeerRole, String>> {
    let mut rest = bytes;
    let reading = read_line(&mut rest);
    let waker = std::task::Waker::noop();
    let mut reading = std::pin::pin!(reading);
    let std::task::Poll::Ready(line) =
        reading.as_mut().poll(&mut std::task::Context::from_waker(waker))
    else {
        panic!("bytes in memory are always ready")
    };
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    line.ok().map(|line| {
        admit(&line, peer, &binding(0), &KNOWN.shared).map(|admitted| admitted.peer.role)
    })
}

proptest! {
    #[test]
    fn fuzz_request_lines(bytes in damaged(valid_request)) {
        if let Some(Ok(role)) = ask(&bytes) {
            prop_assert_eq!(role, PeerRole::Client);
        }
    }

    #[test]
    fn fuzz_tokens(text in damaged_text(|_| KNOWN.token.to_string())) {
        if let Ok(token) = text.parse::<Token>() {
            let printed = token.to_string();
            prop_assert!(printed.eq_ignore_ascii_case(text.trim()), "{} {}", printed, text);
        }
        if let Ok(id) = text.parse::<TokenId>() {
            prop_assert!(id.to_string().eq_ignore_ascii_case(&text));
        }
    }

    #[test]
    fn fuzz_token_ids(text in damaged_text(|_| KNOWN.token.id().to_string())) {
        if let Ok(id) = text.parse::<TokenId>() {
            prop_assert!(id.to_string().eq_ignore_ascii_case(&text));
        }
    }

    #[test]
    fn fuzz_authorities(text in damaged_text(|_| KNOWN.authority.clone())) {
        if let Ok(authority) = Authority::from_pem(&text) {
            prop_assert_eq!(authority.pin(), authority.pin());
        }
    }
}

#[test]
fn a_sound_request_is_admitted() {
    let sound = request(&KNOWN.token, &binding(0), "ifrt");
    assert_eq!(ask(sound.as_bytes()), Some(Ok(PeerRole::Client)));
    let other = request(&KNOWN.token, &binding(1), "ifrt");
    assert!(matches!(ask(other.as_bytes()), Some(Err(_))), "the proof is of another session");
}
