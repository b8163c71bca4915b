//! Peers of a gateway: those that it admits, and attacks.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc;
use transport::{
    Authority, Gateway, Grant, PeerRole, Refusal, Remote, Service, ServiceAddress, StoredToken,
    Token, Tokens, TransportError,
};

/// A controller with a service of each role, which returns what it gets.
struct Controller {
    gateway: Gateway,
    authority: Authority,
    tokens: Arc<Tokens>,
    refusals: Arc<Mutex<Vec<Refusal>>>,
    folder: PathBuf,
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

async fn echo(mut stream: impl AsyncReadExt + AsyncWriteExt + Unpin) {
    let mut data = [0; 4096];
    while let Ok(count) = stream.read(&mut data).await {
        if count == 0 || stream.write_all(&data[..count]).await.is_err() {
            break;
        }
    }
}

impl Controller {
    async fn start(name: &str) -> Self {
        Self::start_with(name, Authority::create().unwrap()).await
    }

    async fn start_with(name: &str, authority: Authority) -> Self {
        let folder = std::env::temp_dir().join(format!("fairway-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (tokens, refusals) = (Arc::new(Tokens::default()), Arc::new(Mutex::default()));
        let seen: Arc<Mutex<Vec<Refusal>>> = refusals;
        let refused = seen.clone();
        let note = move |refusal| refused.lock().unwrap().push(refusal);
        let gateway = Gateway::open("127.0.0.1:0", &authority, tokens.clone(), note).await.unwrap();
        let path = folder.join("hosts.sock");
        let hosts = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = hosts.accept().await {
                tokio::spawn(echo(stream));
            }
        });
        let (arrivals, mut arrived) = mpsc::channel(4);
        let address = ServiceAddress::Inside(arrivals);
        tokio::spawn(async move {
            while let Some(arrival) = arrived.recv().await {
                tokio::spawn(echo(arrival));
            }
        });
        gateway.offer(
            "hosts",
            Service { role: PeerRole::Host, address: ServiceAddress::Unix(path.clone()) },
        );
        let named = ServiceAddress::Announced(path);
        gateway.offer("named", Service { role: PeerRole::Client, address: named });
        gateway.offer("clients", Service { role: PeerRole::Client, address });
        let gone = ServiceAddress::Unix(folder.join("gone.sock"));
        gateway.offer("gone", Service { role: PeerRole::Client, address: gone });
        Self { gateway, authority, tokens, refusals: seen, folder }
    }

    fn token(&self, role: PeerRole) -> Token {
        self.tokens.create(role, &self.authority, Grant::default(), None)
    }

    fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    fn remote(&self, token: &Token) -> Remote {
        Remote::new(&self.address().to_string(), token.clone())
    }

    /// Returns the reason why a token is refused, which the controller has noted as well.
    async fn refusal(&self, token: &Token, service: &str) -> String {
        match self.remote(token).connect(service).await {
            Err(TransportError::Refused { reason, .. }) => {
                self.has_noted(&reason).await;
                reason
            }
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it was admitted"),
        }
    }

    /// Waits until a refusal for this reason is noted.
    async fn has_noted(&self, reason: &str) {
        for _ in 0..2_000 {
            if self.refusals.lock().unwrap().iter().any(|noted| noted.reason.contains(reason)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("expected {reason:?}; noted: {:?}", self.refusals.lock().unwrap());
    }
}

#[tokio::test]
async fn peers_with_a_token_reach_the_services_of_their_role() {
    let controller = Controller::start("admits").await;
    let cases =
        [(PeerRole::Host, "hosts"), (PeerRole::Client, "clients"), (PeerRole::Admin, "clients")];
    for (role, service) in cases {
        let token = controller.token(role).to_string().parse().unwrap();
        let mut stream = controller.remote(&token).connect(service).await.unwrap();
        let sent: Vec<u8> = (0..1_000_000_u32).map(|number| number as u8).collect();
        let mut received = vec![0; sent.len()];
        let (mut read, mut write) = tokio::io::split(&mut stream);
        let (written, found) = tokio::join!(write.write_all(&sent), read.read_exact(&mut received));
        written.unwrap();
        found.unwrap();
        assert_eq!(sent, received);
    }
    assert!(controller.refusals.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_local_socket_is_carried() {
    let controller = Controller::start("carries").await;
    let path = controller.folder.join("carried.sock");
    let token = controller.token(PeerRole::Host);
    let _carrier = controller.remote(&token).carry_unix(&path, "hosts").unwrap();
    for text in ["one", "another"] {
        let mut stream = UnixStream::connect(&path).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut found = String::new();
        stream.read_to_string(&mut found).await.unwrap();
        assert_eq!(found, text);
    }
}

#[tokio::test]
async fn roles_reach_no_services_of_others() {
    let controller = Controller::start("roles").await;
    let host = controller.token(PeerRole::Host);
    let reason = controller.refusal(&host, "clients").await;
    assert_eq!(
        reason,
        format!("clients is for tokens of role client; token {} has role host", host.id())
    );
    for role in [PeerRole::Client, PeerRole::Admin] {
        let reason = controller.refusal(&controller.token(role), "hosts").await;
        assert!(reason.starts_with("hosts is for tokens of role host"), "{reason}");
    }
    let reason = controller.refusal(&controller.token(PeerRole::Client), "absent").await;
    assert_eq!(reason, "there is no service \"absent\"");
    let token = controller.token(PeerRole::Client);
    let ended = controller.remote(&token).connect("gone").await.map(drop).unwrap_err();
    assert!(ended.to_string().ends_with("refuses: the service has ended"), "{ended}");
}

#[tokio::test]
async fn tokens_that_are_wrong_late_or_revoked_are_refused() {
    let controller = Controller::start("tokens").await;
    let text = controller.token(PeerRole::Host).to_string();
    let last_of_secret = text.rfind('-').unwrap() - 1;
    let digit = if text.as_bytes()[last_of_secret] == b'0' { "1" } else { "0" };
    let mut wrong = text.clone();
    wrong.replace_range(last_of_secret..=last_of_secret, digit);
    assert_eq!(controller.refusal(&wrong.parse().unwrap(), "hosts").await, "the token is wrong");
    // The role in a token's text is a note to its reader; the controller knows what it gave out.
    let forged = text.replace("fairway-host", "fairway-client").parse().unwrap();
    let reason = controller.refusal(&forged, "clients").await;
    assert!(reason.starts_with("clients is for tokens of role client"), "{reason}");
    let (authority, grant) = (&controller.authority, Grant::default());
    let brief = controller.tokens.create(PeerRole::Host, authority, grant, Some(Duration::ZERO));
    assert_eq!(controller.refusal(&brief, "hosts").await, "the token has expired");
    let token: Token = text.parse().unwrap();
    assert!(controller.gateway.revoke(token.id()) && !controller.gateway.revoke(token.id()));
    let reason = controller.refusal(&token, "hosts").await;
    assert_eq!(reason, "there is no such token, or it was revoked");
}

#[tokio::test]
async fn a_revoked_token_loses_its_connections() {
    let controller = Controller::start("revoked").await;
    let (token, other) = (controller.token(PeerRole::Host), controller.token(PeerRole::Host));
    let mut stream = controller.remote(&token).connect("hosts").await.unwrap();
    let mut bystander = controller.remote(&other).connect("hosts").await.unwrap();
    assert_eq!(answer_to(&mut stream).await, Some(b'x'));
    assert!(controller.gateway.revoke(token.id()));
    assert_eq!(answer_to(&mut stream).await, None, "its connection has ended");
    assert_eq!(answer_to(&mut bystander).await, Some(b'x'), "those of others stay");
}

/// Sends a byte; returns the answer, `None` if the connection has ended.
async fn answer_to(stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin)) -> Option<u8> {
    let exchange = async {
        stream.write_all(b"x").await.ok()?;
        stream.flush().await.ok()?;
        stream.read_u8().await.ok()
    };
    tokio::time::timeout(Duration::from_secs(10), exchange).await.expect("it answers or ends")
}

#[tokio::test]
async fn connections_end_with_the_lifetime_of_their_token() {
    let controller = Controller::start("expires").await;
    let (authority, grant) = (&controller.authority, Grant::default());
    let lifetime = Some(Duration::from_secs(2));
    let brief = controller.tokens.create(PeerRole::Host, authority, grant, lifetime);
    let mut stream = controller.remote(&brief).connect("hosts").await.unwrap();
    assert_eq!(answer_to(&mut stream).await, Some(b'x'));
    let ended = tokio::time::timeout(Duration::from_secs(10), stream.read_u8()).await;
    assert!(ended.expect("it ends").is_err());
}

#[tokio::test]
async fn what_is_not_carried_says_why() {
    let controller = Controller::start("refused").await;
    let token = controller.token(PeerRole::Client);
    let (_carrier, address) = controller.remote(&token).carry_tcp("clients").await.unwrap();
    assert!(controller.gateway.revoke(token.id()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0").await.unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "fairway: refuses: there is no such token, or it was revoked\n");
}

#[tokio::test]
async fn services_learn_who_their_peers_are() {
    let controller = Controller::start("named").await;
    let grant = Grant { weight: 7, priority: -2 };
    let token = controller.tokens.create(PeerRole::Client, &controller.authority, grant, None);
    let mut stream = controller.remote(&token).connect("named").await.unwrap();
    let here = stream.get_ref().0.local_address().unwrap();
    let line = format!("{here} {} client\n", token.id());
    let mut announced = vec![0; line.len()];
    stream.read_exact(&mut announced).await.unwrap();
    assert_eq!(String::from_utf8(announced).unwrap(), line);

    // A service of this process gets it with the connection, which ends with its token.
    let (arrivals, mut arrived) = mpsc::channel(1);
    let address = ServiceAddress::Inside(arrivals);
    controller.gateway.offer("inside", Service { role: PeerRole::Client, address });
    let far = controller.remote(&token).connect("inside").await.unwrap();
    let mut arrival = arrived.recv().await.unwrap();
    let peer = arrival.peer;
    assert_eq!((peer.token, peer.role, peer.grant), (token.id(), PeerRole::Client, grant));
    assert_eq!(peer.address, far.get_ref().0.local_address().unwrap());
    assert!(controller.gateway.revoke(token.id()));
    assert!(arrival.read_u8().await.is_err());
}

#[tokio::test]
async fn tokens_outlive_their_controller() {
    let first = Controller::start("first").await;
    let token = first.token(PeerRole::Host);
    let [stored]: [StoredToken; 1] = first.tokens.all().try_into().ok().unwrap();
    let again = Authority::from_pem(&first.authority.to_pem().unwrap()).unwrap();
    assert_eq!(again.to_pem(), first.authority.to_pem());
    let second = Controller::start_with("second", again).await;
    let reason = second.refusal(&token, "hosts").await;
    assert_eq!(reason, "there is no such token, or it was revoked", "it is the controller");
    let named = (stored.id, stored.role);
    second.tokens.keep(StoredToken::restore(named, stored.grant, None, &stored.secret()).unwrap());
    let mut stream = second.remote(&token).connect("hosts").await.unwrap();
    assert_eq!(answer_to(&mut stream).await, Some(b'x'));
    for text in ["", "-----BEGIN CERTIFICATE-----", &first.authority.to_pem().unwrap()[..300]] {
        assert!(Authority::from_pem(text).is_err());
    }
}

#[tokio::test]
async fn one_of_several_addresses_is_enough() {
    let (ours, other) = (Controller::start("one").await, Controller::start("wrong").await);
    let token = ours.token(PeerRole::Host);
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_address = silent.local_addr().unwrap();
    let addresses = format!("127.0.0.1:1,{silent_address},{},{}", other.address(), ours.address());
    let remote = Remote::new(&addresses, token.clone());
    let mut stream = remote.connect("hosts").await.unwrap();
    assert_eq!(answer_to(&mut stream).await, Some(b'x'));
    // Another controller says more than an address where none is.
    let wrong = Remote::new(&format!("127.0.0.1:1,{}", other.address()), token);
    let error = wrong.connect("hosts").await.map(drop).unwrap_err();
    assert!(matches!(error, TransportError::NotTheController { .. }), "{error}");
}

#[tokio::test]
async fn local_ports_carry_connections() {
    let controller = Controller::start("carried").await;
    let remote = controller.remote(&controller.token(PeerRole::Client));
    let (carrier, address) = remote.carry_tcp("clients").await.unwrap();
    assert!(address.ip().is_loopback());
    let mut stream = TcpStream::connect(address).await.unwrap();
    assert_eq!(answer_to(&mut stream).await, Some(b'x'));
    drop(carrier);
    assert_eq!(answer_to(&mut stream).await, None, "it ends with its carrier");
}

#[tokio::test]
async fn another_controller_at_the_address_learns_nothing() {
    let (ours, other) = (Controller::start("ours").await, Controller::start("other").await);
    let token = ours.token(PeerRole::Host);
    let remote = Remote::new(&other.address().to_string(), token);
    let error = remote.connect("hosts").await.map(drop).unwrap_err();
    assert!(matches!(error, TransportError::NotTheController { .. }), "{error}");
    other.has_noted("no TLS").await;
}

/// Connects by TLS, whatever the certificate, sends a line, and returns the answer.
async fn send_line(controller: &Controller, line: &[u8]) -> String {
    let token = controller.token(PeerRole::Host);
    let mut stream = controller.remote(&token).handshake().await.unwrap();
    stream.write_all(line).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await; // it may be closed without a farewell
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_proof_is_of_no_use_in_another_session() {
    let controller = Controller::start("replays").await;
    let token = controller.token(PeerRole::Host);
    let (line, mut stream) = controller.remote(&token).prove("hosts").await.unwrap();
    let mut answer = [0; 3];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"ok\n", "the proof is good in its own session");
    assert_eq!(send_line(&controller, line.as_bytes()).await, "refused the token is wrong\n");
    controller.has_noted("the token is wrong").await;
}

#[tokio::test]
async fn requests_that_are_none_are_refused() {
    let controller = Controller::start("requests").await;
    let cases: [(&[u8], &str); 5] = [
        (b"hello\n", "expected fairway/1, a token's id, a proof and a service"),
        (b"fairway/9 a b hosts\n", "expected fairway/1; found \"fairway/9\""),
        (b"fairway/1 zz b hosts\n", "the token's id is malformed"),
        (b"fairway/1 0011223344556677 b hosts\n", "there is no such token, or it was revoked"),
        ("fairwa\u{1f600}\u{1f600}\u{1f600} a b c\n".as_bytes(), "expected fairway/1; found"),
    ];
    for (line, reason) in cases {
        let answer = send_line(&controller, line).await;
        assert!(answer.starts_with(&format!("refused {reason}")), "{answer}");
        controller.has_noted(reason).await;
    }
    assert_eq!(send_line(&controller, &[b'a'; 1000]).await, "", "it is not even answered");
    controller.has_noted("the line is too long").await;
}

#[tokio::test]
async fn peers_without_tls_are_refused() {
    let controller = Controller::start("plain").await;
    let mut stream = TcpStream::connect(controller.address()).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.len() < 16, "at most an alert");
    controller.has_noted("no TLS").await;
}

/// Lets this process have as many open files as the system allows; connections have both ends here.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

#[tokio::test]
async fn peers_that_say_nothing_take_no_place_of_others() {
    raise_file_limit();
    let controller = Controller::start("silent").await;
    let mut silent = Vec::new();
    for _ in 0..2200 {
        silent.push(TcpStream::connect(controller.address()).await.unwrap());
    }
    let token = controller.token(PeerRole::Host);
    let connecting = controller.remote(&token);
    let admitted = tokio::time::timeout(Duration::from_secs(5), connecting.connect("hosts")).await;
    admitted.expect("it waits for no silent peer").unwrap();
    controller.has_noted("evicted by many others before it had proved a token").await;
}

#[tokio::test]
async fn peers_that_say_nothing_are_closed_in_time() {
    let controller = Controller::start("late").await;
    let mut silent = TcpStream::connect(controller.address()).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(15), silent.read_u8()).await;
    closed.expect("it is closed").unwrap_err();
    controller.has_noted("it proved no token within 10 s").await;
}

proptest! {
    #[test]
    fn what_is_no_token_is_refused(text in "(fairway)?-?(host|client|admin)?(-[0-9a-f]{0,70}){0,4}.{0,8}") {
        if let Ok(token) = text.parse::<Token>() {
            prop_assert_eq!(token.to_string(), text.trim());
        }
    }
}

#[tokio::test]
async fn connections_of_one_token_leave_room_for_others() {
    let controller = Controller::start("many").await;
    let (many, other) = (controller.token(PeerRole::Client), controller.token(PeerRole::Client));
    let remote = controller.remote(&many);
    let mut streams = Vec::new();
    for _ in 0..512 {
        streams.push(remote.connect("named").await.unwrap());
    }
    let error = remote.connect("named").await.map(drop).unwrap_err().to_string();
    assert!(error.ends_with("refuses: too many connections of one token"), "{error}");
    controller.has_noted(&format!("too many connections of token {}", many.id())).await;
    controller.remote(&other).connect("named").await.unwrap();
    streams.clear();
    let mut admitted = remote.connect("named").await;
    for _ in 0..200 {
        if admitted.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        admitted = remote.connect("named").await;
    }
    admitted.unwrap();
}
