//! Two endpoints of the data plane in one process.

use std::io::Write;

use super::*;

const WHILE: Duration = Duration::from_secs(10);

fn pair(scheme: &str) -> (DataPlane, DataPlane) {
    let address = |name: &str| match scheme {
        "tcp" | "tls" => "tcp:127.0.0.1:0".to_owned(),
        _ => {
            let unique = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_nanos();
            let file = format!("fairway-{}-{unique}-{name}", std::process::id());
            format!("unix:{}", std::env::temp_dir().join(file).display())
        }
    };
    let encrypt = scheme == "tls";
    let one = DataPlane::listen(HostId(1), &address("one"), &[], "secret", encrypt).unwrap();
    let two = DataPlane::listen(HostId(2), &address("two"), &[], "secret", encrypt).unwrap();
    one.add_peer(HostId(2), two.address());
    two.add_peer(HostId(1), one.address());
    (one, two)
}

#[test]
fn messages_of_every_size_arrive_whole() {
    for scheme in ["unix", "tcp", "tls"] {
        let (one, two) = pair(scheme);
        for (tag, size) in [0, 1, 70_000, 3_000_001, 3_000_001].into_iter().enumerate() {
            let bytes: Vec<u8> = (0..size).map(|i: usize| (i * 7 + tag) as u8).collect();
            one.send(HostId(2), Channel::INSIDE, TransferTag(tag as u64), &bytes).unwrap();
            let got = two.take(TransferTag(tag as u64), WHILE).unwrap();
            assert!(got.as_ref() == &bytes[..], "{scheme} {size}");
        }
        one.close();
        two.close();
    }
}

#[test]
fn a_held_message_is_not_overwritten_by_the_next() {
    let (one, two) = pair("unix");
    let held: Vec<Payload> = (0..4_u8)
        .map(|value| {
            let tag = TransferTag(u64::from(value));
            one.send(HostId(2), Channel::INSIDE, tag, &vec![value; 100_000]).unwrap();
            two.take(tag, WHILE).unwrap()
        })
        .collect();
    for (value, payload) in held.iter().enumerate() {
        assert!(payload.as_ref().iter().all(|&byte| byte == value as u8));
    }
    one.close();
    two.close();
}

#[test]
fn idle_segments_are_given_back() {
    let (one, two) = pair("unix");
    one.send(HostId(2), Channel::INSIDE, TransferTag(1), &[7; 100_000]).unwrap();
    let held = two.take(TransferTag(1), WHILE).unwrap();
    one.tidy();
    std::thread::sleep(LOOKS * super::SOON);
    assert_eq!(two.0.segments.lock().len(), 1, "it is in use");
    assert_eq!(held.as_ref()[99_999], 7);
    drop(held);
    one.tidy();
    let began = std::time::Instant::now();
    while !two.0.segments.lock().is_empty() {
        assert!(began.elapsed() < WHILE, "it is idle and still there");
        std::thread::sleep(Duration::from_millis(10));
    }
    one.send(HostId(2), Channel::INSIDE, TransferTag(2), &[8; 100_000]).unwrap();
    assert_eq!(two.take(TransferTag(2), WHILE).unwrap().as_ref()[99_999], 8);
    one.close();
    two.close();
}

#[test]
fn watches_end_when_all_their_messages_have_settled() {
    let (one, two) = pair("unix");
    let tags = |tags: &[u64]| tags.iter().map(|&tag| TransferTag(tag)).collect::<Vec<_>>();
    for tag in tags(&[1, 2, 3]) {
        two.expect(tag, HostId(1));
    }
    two.watch(7, &tags(&[1, 2]));
    two.watch(8, &tags(&[2, 3]));
    one.send(HostId(2), Channel::INSIDE, TransferTag(1), b"a").unwrap();
    one.send(HostId(2), Channel::INSIDE, TransferTag(2), b"b").unwrap();
    assert_eq!(two.arrivals(), [7]);
    two.lose_peer(HostId(1), TransferTag(0), &Status::new(Code::Unavailable, "lost"));
    assert_eq!(two.arrivals(), [8]);
    two.watch(9, &tags(&[1]));
    assert_eq!(two.arrivals(), [9], "it was there before");
    two.close();
    assert!(two.arrivals().is_empty());
    one.close();
}

#[test]
fn failures_go_another_way_to_peers_that_are_not_reached() {
    let (one, two) = pair("tcp");
    let (error, gone) =
        (Status::new(Code::Internal, "broken"), Status::new(Code::DataLoss, "gone"));
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    one.add_peer(HostId(2), &format!("tcp:{closed}"));
    assert!(one.send_failure(HostId(2), TransferTag(1), &error).is_err(), "there is no other way");
    let (taken, other) = (Arc::new(Mutex::new(Vec::new())), two.clone());
    let seen = taken.clone();
    one.on_undelivered(Box::new(move |to, tag, error| {
        seen.lock().push((to, tag));
        other.send_failure(to, tag, error).unwrap();
    }));
    one.send_failure(HostId(2), TransferTag(1), &error).unwrap();
    assert_eq!(two.take(TransferTag(1), WHILE).unwrap_err(), error);
    // What is relayed and does not reach its receiver has failed, too.
    one.relay((TransferTag(2), HostId(1)), TransferTag(3), HostId(2), Channel::INSIDE);
    one.send(HostId(1), Channel::INSIDE, TransferTag(2), b"onward").unwrap();
    let refused = two.take(TransferTag(3), WHILE).unwrap_err();
    assert_eq!(refused.code, Code::Unavailable);
    assert!(refused.message.contains("host 2"), "{refused}");
    one.add_peer(HostId(2), two.address());
    one.send_failure(HostId(2), TransferTag(4), &error).unwrap();
    assert_eq!(two.take(TransferTag(4), WHILE).unwrap_err(), error, "it is reached again");
    one.lose_peer(HostId(2), TransferTag(5), &gone);
    assert_eq!(one.send_failure(HostId(2), TransferTag(5), &error).unwrap_err(), gone);
    let to = HostId(2);
    assert_eq!(*taken.lock(), [(to, TransferTag(1)), (to, TransferTag(3))], "and no others");
    one.close();
    two.close();
}

#[test]
fn failures_and_losses_reach_the_waiting() {
    let (one, two) = pair("unix");
    let error = Status::new(Code::Internal, "broken");
    one.send_failure(HostId(2), TransferTag(1), &error).unwrap();
    assert_eq!(two.take(TransferTag(1), WHILE).unwrap_err(), error);
    two.expect(TransferTag(2), HostId(1));
    one.send_loss(HostId(2), (HostId(1), TransferTag(3)), &error).unwrap();
    assert_eq!(two.take(TransferTag(2), WHILE).unwrap_err(), error);
    two.expect(TransferTag(3), HostId(1));
    assert_eq!(two.take(TransferTag(3), WHILE).unwrap_err(), error, "it is remembered");
    two.expect(TransferTag(4), HostId(4));
    assert_eq!(two.take(TransferTag(4), WHILE).unwrap_err().code, Code::Unavailable);
    assert_eq!(two.send(HostId(1), Channel::INSIDE, TransferTag(5), b"").unwrap_err(), error);
    two.add_peer(HostId(1), one.address());
    assert!(!two.begins_at(HostId(1), TransferTag(2)), "that process was lost");
    one.send(HostId(2), Channel::INSIDE, TransferTag(2), b"late").unwrap();
    one.send(HostId(2), Channel::INSIDE, TransferTag(9), b"later").unwrap();
    assert_eq!(two.take(TransferTag(9), WHILE).unwrap().as_ref(), b"later");
    assert!(!two.is_settled(TransferTag(2)), "what a lost process has sent is dropped");
    assert!(two.begins_at(HostId(1), TransferTag(8)));
    two.expect(TransferTag(7), HostId(1));
    assert_eq!(two.take(TransferTag(7), WHILE).unwrap_err(), error, "its process is another");
    two.drop_before(TransferTag(8));
    for tag in [7, 8] {
        one.send(HostId(2), Channel::INSIDE, TransferTag(tag), b"sent").unwrap();
    }
    two.expect(TransferTag(8), HostId(1));
    assert_eq!(two.take(TransferTag(8), WHILE).unwrap().as_ref(), b"sent");
    assert!(!two.is_settled(TransferTag(7)), "it was for an earlier process");
    two.send(HostId(1), Channel::INSIDE, TransferTag(5), b"back").unwrap();
    assert_eq!(one.take(TransferTag(5), WHILE).unwrap().as_ref(), b"back");
    one.close();
    two.close();
}

#[test]
fn long_texts_of_failures_are_cut_and_arrive() {
    for scheme in ["unix", "tcp"] {
        let (one, two) = pair(scheme);
        let error = Status::new(Code::Internal, "é".repeat(100_000));
        one.send_failure(HostId(2), TransferTag(1), &error).unwrap();
        let found = two.take(TransferTag(1), WHILE).unwrap_err();
        assert_eq!(found.code, Code::Internal);
        assert!(error.message.starts_with(&found.message));
        assert!(found.message.len() > 65_000, "{}", found.message.len());
        one.close();
        two.close();
    }
}

#[test]
fn what_is_on_its_way_ends_with_the_process_that_it_is_for() {
    let (one, two) = pair("tcp");
    let link = Link::to(two.address());
    let known = || one.0.peers.read()[&HostId(2)].clone();
    assert!(one.know_peer(HostId(2), TransferTag(1), &link.address));
    one.send(HostId(2), Channel::INSIDE, TransferTag(2), b"sent").unwrap();
    link.is_silent.store(true, Ordering::Relaxed);
    link.forth.store(10, Ordering::Relaxed);
    let other = one.clone();
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        ended.send(other.send(HostId(2), Channel::INSIDE, TransferTag(3), &[7; 3_000_000]))
    });
    let moment = Duration::from_millis(300);
    assert!(end.recv_timeout(moment).is_err(), "it is on its way");
    let before = known();
    assert!(one.know_peer(HostId(2), TransferTag(1), &link.address));
    assert!(Arc::ptr_eq(&before, &known()), "it is known already");
    assert!(end.recv_timeout(moment).is_err(), "it goes on");
    assert!(one.know_peer(HostId(2), TransferTag(4), two.address()), "another process");
    assert_eq!(end.recv_timeout(WHILE).unwrap().unwrap_err().code, Code::Unavailable);
    one.send(HostId(2), Channel::INSIDE, TransferTag(5), b"sent").unwrap();
    assert_eq!(two.take(TransferTag(5), WHILE).unwrap().as_ref(), b"sent");
    link.is_silent.store(false, Ordering::Relaxed);
    one.close();
    two.close();
}

#[test]
fn a_message_is_passed_on_whether_it_comes_before_or_after_it_is_asked_for() {
    let (one, two) = pair("unix");
    for (tag, early) in [(1, false), (2, true)] {
        let (tag, onward) = (TransferTag(tag), TransferTag(tag + 10));
        if early {
            one.send(HostId(2), Channel::INSIDE, tag, b"onward").unwrap();
            while !two.is_settled(tag) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        two.relay((tag, HostId(1)), onward, HostId(1), Channel::INSIDE);
        if !early {
            one.send(HostId(2), Channel::INSIDE, tag, b"onward").unwrap();
        }
        assert_eq!(one.take(onward, WHILE).unwrap().as_ref(), b"onward");
        assert_eq!(two.take(tag, WHILE).unwrap().as_ref(), b"onward");
    }
    one.close();
    two.close();
}

#[test]
fn what_a_lost_host_owes_fails_where_it_would_have_gone_on_to() {
    let (one, two) = pair("tcp");
    let three = DataPlane::listen(HostId(3), "tcp:127.0.0.1:0", &[], "secret", false).unwrap();
    two.add_peer(HostId(3), three.address());
    let error = Status::new(Code::Unavailable, "host 1 is lost");
    let relay = |tag: u64| {
        let (tag, onward) = (TransferTag(tag), TransferTag(tag + 10));
        two.relay((tag, HostId(1)), onward, HostId(3), Channel(1));
        two.discard(tag);
    };
    relay(1);
    relay(2);
    one.send(HostId(2), Channel(1), TransferTag(2), &[5; 200_000]).unwrap();
    assert_eq!(three.take(TransferTag(12), WHILE).unwrap().as_ref(), &[5; 200_000]);
    two.lose_peer(HostId(1), TransferTag(0), &error);
    assert_eq!(three.take(TransferTag(11), WHILE).unwrap_err(), error);
    relay(3);
    assert_eq!(three.take(TransferTag(13), WHILE).unwrap_err().code, Code::Unavailable);
    assert_eq!(two.traffic().2, 0, "nothing is left of what only went through");
    one.close();
    two.close();
    three.close();
}

#[test]
fn messages_by_channels_arrive_whole() {
    let listen = |me| {
        let channels = ["tcp:127.0.0.1:0".to_owned(), "tcp:127.0.0.1:0".to_owned()];
        DataPlane::listen(HostId(me), "tcp:127.0.0.1:0", &channels, "secret", false).unwrap()
    };
    let (one, two) = (listen(1), listen(2));
    one.add_peer(HostId(2), &two.channels().join(","));
    std::thread::scope(|scope| {
        for tag in 0..12_u64 {
            let one = &one;
            scope.spawn(move || {
                let bytes = vec![tag as u8; 300_000 + tag as usize];
                let channel = Channel(tag as u32 % 4);
                one.send(HostId(2), channel, TransferTag(tag), &bytes).unwrap();
            });
        }
    });
    for tag in 0..12_u64 {
        let got = two.take(TransferTag(tag), WHILE).unwrap();
        assert!(got.as_ref() == vec![tag as u8; 300_000 + tag as usize]);
    }
    one.close();
    two.close();
}

#[test]
fn strangers_are_turned_away() {
    let (one, two) = pair("tcp");
    let stranger = DataPlane::listen(HostId(3), "tcp:127.0.0.1:0", &[], "guess", false).unwrap();
    stranger.add_peer(HostId(2), two.address());
    drop(stranger.send(HostId(2), Channel::INSIDE, TransferTag(1), b"hello"));
    assert!(two.take(TransferTag(1), Duration::from_millis(300)).is_err());
    let mut raw = Socket::connect(two.address()).unwrap();
    raw.write_all(&[0x5a; 4096]).unwrap();
    one.send(HostId(2), Channel::INSIDE, TransferTag(4), b"still there").unwrap();
    assert_eq!(two.take(TransferTag(4), WHILE).unwrap().as_ref(), b"still there");
    one.close();
    two.close();
    stranger.close();
}

/// Relays one connection after another to `target`; returns its address, and what connectors sent.
fn relay(target: &str) -> (String, Arc<Mutex<Vec<u8>>>) {
    let target = target.strip_prefix("tcp:").unwrap().to_owned();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let seen: Arc<Mutex<Vec<u8>>> = Arc::default();
    let noted = seen.clone();
    std::thread::spawn(move || {
        for connector in listener.incoming().map_while(Result::ok) {
            let acceptor = std::net::TcpStream::connect(&target).unwrap();
            let (mut there, mut back) = (acceptor.try_clone().unwrap(), acceptor);
            let (mut from, mut to) = (connector.try_clone().unwrap(), connector);
            std::thread::spawn(move || std::io::copy(&mut back, &mut to));
            let noted = noted.clone();
            std::thread::spawn(move || {
                let mut part = [0; 4096];
                while let Ok(count @ 1..) = std::io::Read::read(&mut from, &mut part) {
                    noted.lock().extend_from_slice(&part[..count]);
                    there.write_all(&part[..count]).unwrap();
                }
            });
        }
    });
    (address, seen)
}

#[test]
fn over_tcp_the_token_is_proved_and_not_sent() {
    let (one, two) = pair("tcp");
    let (address, seen) = relay(two.address());
    one.add_peer(HostId(2), &address);
    one.send(HostId(2), Channel::INSIDE, TransferTag(1), b"hello").unwrap();
    assert_eq!(two.take(TransferTag(1), WHILE).unwrap().as_ref(), b"hello");
    let sent = seen.lock().clone();
    assert!(sent.windows(5).any(|bytes| bytes == b"hello"), "the relay has seen all");
    assert!(!sent.windows(6).any(|bytes| bytes == b"secret"));

    // All that a peer has sent is of no use in another connection.
    let mut replay = std::net::TcpStream::connect(two.address().strip_prefix("tcp:").unwrap());
    let replay = replay.as_mut().unwrap();
    let _ = replay.write_all(&sent); // it may be refused before all is written
    let mut answer = Vec::new();
    let _ = std::io::Read::read_to_end(replay, &mut answer);
    assert!(two.take(TransferTag(1), Duration::from_millis(300)).is_err(), "nothing arrives twice");
    one.close();
    two.close();
}

#[test]
fn over_tcp_both_ends_must_know_the_token() {
    let (one, two) = pair("tcp");
    let other = DataPlane::listen(HostId(3), "tcp:127.0.0.1:0", &[], "another", false).unwrap();
    for (from, to) in [(&one, &other), (&other, &two)] {
        from.add_peer(HostId(9), to.address());
        let error = from.send(HostId(9), Channel::INSIDE, TransferTag(1), b"hello").unwrap_err();
        assert!(error.to_string().contains("does not know the token"), "{error}");
        assert!(to.take(TransferTag(1), Duration::from_millis(100)).is_err());
    }
    for plane in [one, two, other] {
        plane.close();
    }
}

#[test]
fn what_is_encrypted_is_not_read_on_the_way() {
    let (one, two) = pair("tls");
    let (address, seen) = relay(two.address());
    one.add_peer(HostId(2), &address);
    let bytes = [b'x'; 300_000];
    one.send(HostId(2), Channel::INSIDE, TransferTag(1), &bytes).unwrap();
    assert_eq!(two.take(TransferTag(1), WHILE).unwrap().as_ref(), bytes);
    let sent = seen.lock().clone();
    assert!(sent.len() > bytes.len());
    assert!(!sent.windows(8).any(|part| part == b"xxxxxxxx"));
    one.close();
    two.close();
}

#[test]
fn an_encrypted_session_with_an_attacker_in_the_middle_proves_nothing() {
    let (one, two) = pair("tls");
    let between = Encryption::create().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let target = two.address().strip_prefix("tcp:").unwrap().to_owned();
    one.add_peer(HostId(2), &format!("tcp:{}", listener.local_addr().unwrap()));
    let passing = std::thread::spawn(move || {
        let mut from = between.accept(listener.accept().unwrap().0).unwrap();
        let to = std::net::TcpStream::connect(target).unwrap();
        let mut to = between.connect(to).unwrap();
        // The greeting and the answer are passed on as they are.
        let mut part = [0; 4096];
        let count = std::io::Read::read(&mut from, &mut part).unwrap();
        to.write_all(&part[..count]).unwrap();
        let count = std::io::Read::read(&mut to, &mut part).unwrap();
        from.write_all(&part[..count]).unwrap();
        assert_eq!(std::io::Read::read(&mut from, &mut part).unwrap(), 0, "it gives up");
    });
    let error = one.send(HostId(2), Channel::INSIDE, TransferTag(1), b"hello").unwrap_err();
    assert!(error.to_string().contains("does not know the token"), "{error}");
    passing.join().unwrap();
    one.close();
    two.close();
}

#[test]
fn one_end_that_encrypts_and_one_that_does_not_say_so() {
    let ((plain, _first), (encrypting, _second)) = (pair("tcp"), pair("tls"));
    for (from, to) in [(&plain, &encrypting), (&encrypting, &plain)] {
        from.add_peer(HostId(9), to.address());
        let error = from.send(HostId(9), Channel::INSIDE, TransferTag(1), b"hello").unwrap_err();
        assert!(error.to_string().contains("encrypt"), "{error}");
        assert!(to.take(TransferTag(1), Duration::from_millis(100)).is_err());
    }
}

/// A link to an endpoint that carries a number of bytes in each direction, and then ends all connections.
struct Link {
    address: String,
    forth: Arc<AtomicU64>,
    back: Arc<AtomicU64>,
    /// Whether it carries on by new connections after it has ended the others.
    recovers: Arc<AtomicBool>,
    /// Whether it keeps its connections open, and carries nothing any more.
    is_silent: Arc<AtomicBool>,
}

impl Link {
    const ENOUGH: u64 = 1 << 40;

    fn to(target: &str) -> Self {
        let target = target.strip_prefix("tcp:").unwrap().to_owned();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let (recovers, is_silent) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        let (forth, back) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let link = Self {
            address,
            forth: forth.clone(),
            back: back.clone(),
            recovers: recovers.clone(),
            is_silent: is_silent.clone(),
        };
        link.mend();
        std::thread::spawn(move || {
            for connector in listener.incoming().map_while(Result::ok) {
                if forth.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let acceptor = std::net::TcpStream::connect(&target).unwrap();
                for (from, to, left) in [
                    (connector.try_clone().unwrap(), acceptor.try_clone().unwrap(), forth.clone()),
                    (acceptor, connector, back.clone()),
                ] {
                    let (recovers, is_silent) = (recovers.clone(), is_silent.clone());
                    std::thread::spawn(move || {
                        Self::carry(&from, &to, &left);
                        while is_silent.load(Ordering::Relaxed) {
                            std::thread::sleep(Duration::from_millis(10));
                        }
                        if recovers.load(Ordering::Relaxed) {
                            left.store(Self::ENOUGH, Ordering::Relaxed);
                        }
                        for socket in [from, to] {
                            drop(socket.shutdown(std::net::Shutdown::Both));
                        }
                    });
                }
            }
        });
        link
    }

    fn carry(mut from: &std::net::TcpStream, mut to: &std::net::TcpStream, left: &AtomicU64) {
        let mut part = [0; 4096];
        while let Ok(count @ 1..) = std::io::Read::read(&mut from, &mut part) {
            let before = left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    Some(left.saturating_sub(count as u64))
                })
                .unwrap();
            let carried = count.min(before as usize);
            if to.write_all(&part[..carried]).is_err() || carried < count {
                return;
            }
        }
    }

    fn mend(&self) {
        self.forth.store(Self::ENOUGH, Ordering::Relaxed);
        self.back.store(Self::ENOUGH, Ordering::Relaxed);
    }
}

#[test]
fn what_a_failed_channel_carried_comes_once_by_another() {
    let channels = ["tcp:127.0.0.1:0".to_owned(), "tcp:127.0.0.1:0".to_owned()];
    let (one, _) = pair("tcp");
    let two = DataPlane::listen(HostId(2), "tcp:127.0.0.1:0", &channels, "secret", false).unwrap();
    let link = Link::to(&two.channels()[0]);
    one.add_peer(HostId(2), &format!("{},{}", link.address, two.channels()[1]));
    let mut next = 0;
    let mut send = |size: usize| {
        next += 1;
        let bytes: Vec<u8> = (0..size).map(|i| (i * 7 + next) as u8).collect();
        let tag = TransferTag(next as u64);
        one.send(HostId(2), Channel(1), tag, &bytes).unwrap();
        assert!(two.take(tag, WHILE).unwrap().as_ref() == &bytes[..]);
    };
    let is_down = || {
        let peer = one.0.peers.read()[&HostId(2)].clone();
        peer.avoided()
    };
    // A small message, and one of several stripes, end in the middle, or arrive without a receipt.
    for (size, forth, back) in [
        (1000, 100, Link::ENOUGH),
        (1000, Link::ENOUGH, 10),
        (1_000_000, 600_000, Link::ENOUGH),
        (1_000_000, Link::ENOUGH, 10),
        (1000, 0, 0),
    ] {
        send(size);
        assert_eq!(is_down(), [false, false], "it was whole before");
        link.forth.store(forth, Ordering::Relaxed);
        link.back.store(back, Ordering::Relaxed);
        send(size);
        assert_eq!(is_down(), [true, false], "{size} {forth} {back}");
        send(size);
        link.mend();
        let began = std::time::Instant::now();
        while is_down()[0] {
            assert!(began.elapsed() < WHILE, "it is whole again");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert_eq!(two.traffic().2, 0, "nothing came twice");
    assert!(two.0.partial.lock().is_empty());
    one.close();
    two.close();
}

#[test]
fn a_channel_is_not_avoided_when_its_idle_connections_have_ended() {
    let (one, two) = pair("tcp");
    let link = Link::to(two.address());
    one.add_peer(HostId(2), &link.address);
    for tag in 1..4 {
        one.send(HostId(2), Channel(1), TransferTag(tag), &[tag as u8; 100]).unwrap();
        assert_eq!(two.take(TransferTag(tag), WHILE).unwrap().as_ref(), [tag as u8; 100]);
        // The connection ends with the next message, after it was found to be alive.
        link.recovers.store(true, Ordering::Relaxed);
        link.forth.store(100, Ordering::Relaxed);
    }
    one.close();
    two.close();
}
