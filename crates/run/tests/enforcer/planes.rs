//! Ranks with data planes, and cables between them that can be cut.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use base::{BitsPerSecond, Channel, HostId, TransferTag};
use run::channel::DataPlane;
use run::enforcer::{Enforcer, Team, TeamChannel};

pub const CHANNELS: u32 = 2;

/// A timeout that only expires if something is wrong.
pub const LONG: Duration = Duration::from_secs(60);

/// Data planes, one for each rank, registered with each other; they are closed on drop.
pub struct Planes(pub Vec<DataPlane>);

impl std::ops::Deref for Planes {
    type Target = [DataPlane];

    fn deref(&self) -> &[DataPlane] {
        &self.0
    }
}

impl Drop for Planes {
    fn drop(&mut self) {
        self.0.iter().for_each(DataPlane::close);
    }
}

/// Data planes with TCP channels.
pub fn planes(ranks: u32) -> Planes {
    planes_by(ranks, [false; CHANNELS as usize])
}

/// Data planes with encrypted TCP channels.
pub fn encrypted_planes(ranks: u32) -> Planes {
    planes_with(ranks, [false; CHANNELS as usize], true)
}

/// Data planes with channels of every kind: TCP, encrypted TCP, shared memory, and both.
pub fn planes_of_all_kinds(ranks: u32) -> impl Iterator<Item = Planes> {
    let kinds = [[false, false], [true, true], [true, false]];
    let plain = kinds.into_iter().map(move |near| planes_by(ranks, near));
    plain.chain(std::iter::once_with(move || encrypted_planes(ranks)))
}

pub fn planes_by(ranks: u32, near: [bool; CHANNELS as usize]) -> Planes {
    planes_with(ranks, near, false)
}

fn planes_with(ranks: u32, near: [bool; CHANNELS as usize], encrypt: bool) -> Planes {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let address = |near: bool| match near {
        false => "tcp:127.0.0.1:0".to_owned(),
        true => {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("fairway-enforcer-{}-{number}", std::process::id());
            format!("unix:{}", std::env::temp_dir().join(name).display())
        }
    };
    let planes: Vec<DataPlane> = (0..ranks)
        .map(|rank| {
            let channels = near.map(address);
            let near = "tcp:127.0.0.1:0";
            DataPlane::listen(HostId(rank), near, &channels, "secret", encrypt).unwrap()
        })
        .collect();
    for (one, plane) in planes.iter().enumerate() {
        for (other, peer) in planes.iter().enumerate().filter(|(other, _)| *other != one) {
            plane.add_peer(HostId(other as u32), &peer.channels().join(","));
        }
    }
    Planes(planes)
}

/// Forwards connections to an address until it is cut; then no bytes pass any more.
#[derive(Clone)]
pub struct Cable {
    pub address: String,
    is_cut: Arc<AtomicBool>,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    pub fn to(target: &str) -> Self {
        Self::closing(target, 0)
    }

    /// Closes the first connections, whatever came on them, and forwards later ones.
    pub fn closing(target: &str, first: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let cable = Self { address, is_cut: Arc::default(), ends: Arc::default() };
        let (this, target) = (cable.clone(), target.strip_prefix("tcp:").unwrap().to_owned());
        thread::spawn(move || {
            for (number, one) in listener.incoming().enumerate() {
                if this.is_cut.load(Ordering::Relaxed) {
                    return;
                }
                if number < first {
                    thread::sleep(Duration::from_millis(50));
                    continue;
                }
                let (one, other) = (one.unwrap(), TcpStream::connect(&target).unwrap());
                for (mut from, mut to) in [(&one, &other), (&other, &one)]
                    .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
                {
                    thread::spawn(move || {
                        drop(std::io::copy(&mut from, &mut to));
                        drop(to.shutdown(Shutdown::Both));
                    });
                }
                this.ends.lock().unwrap().extend([one, other]);
            }
        });
        cable
    }

    pub fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
        // The accept loop ends with the next connection.
        drop(TcpStream::connect(self.address.strip_prefix("tcp:").unwrap()));
        for end in self.ends.lock().unwrap().iter() {
            drop(end.shutdown(Shutdown::Both));
        }
    }
}

/// Runs `act` concurrently as every rank of a team.
pub fn as_ranks<T: Send>(
    planes: &[DataPlane],
    name: u64,
    timeout: Duration,
    act: impl Fn(u32, &DataPlane, &Enforcer) -> T + Sync,
) -> Vec<T> {
    let hosts: Vec<HostId> = (0..planes.len() as u32).map(HostId).collect();
    // A slow channel has a short queue, so ranks wait for it to drain.
    let rate = Some(BitsPerSecond(1e8));
    let channels: Vec<TeamChannel> =
        (1..=CHANNELS).map(|channel| TeamChannel { channel: Channel(channel), rate }).collect();
    thread::scope(|scope| {
        let one = |(rank, plane): (usize, &'_ DataPlane)| {
            let (hosts, channels, act, plane) = (&hosts, &channels, &act, plane.clone());
            scope.spawn(move || {
                let (rank, name) = (rank as u32, TransferTag(name));
                let team = Team {
                    plane: &plane,
                    name,
                    rank,
                    hosts,
                    names: None,
                    channels,
                    timeout,
                    meeting: LONG,
                };
                let enforcer = Enforcer::join(&team).unwrap();
                act(rank, &plane, &enforcer)
            })
        };
        let threads: Vec<_> = planes.iter().enumerate().map(one).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}
