//! Heartbeats and the loss of silent hosts, in the controller's own time.

mod common;

use base::{HostId, Nanos};
use common::{controller, join};
use control::{Config, Controller, Effect, Event};

/// Ticks every interval from `from` to `to`; `answers` decides which hosts answer their heartbeats.
/// Returns when each host was stopped.
fn ticks(
    controller: &mut Controller,
    (from, to): (Nanos, Nanos),
    answers: impl Fn(HostId) -> bool,
) -> Vec<(HostId, Nanos)> {
    let interval = controller.config().tick_interval();
    let mut stopped = Vec::new();
    let mut now = from;
    while now <= to {
        for effect in controller.handle(now, Event::Tick) {
            match effect {
                Effect::Heartbeat(host) if answers(host) => {
                    controller.handle(now, Event::HeartbeatAnswered(host));
                }
                Effect::StopHost(host) => stopped.push((host, now)),
                _ => {}
            }
        }
        now = Nanos(now.0 + interval.0);
    }
    stopped
}

fn seconds(count: u64) -> Nanos {
    Nanos::from_millis(1000 * count)
}

/// Two islands of two hosts, of which `silent` answers until five seconds.
fn one_falls_silent(silent: u32) -> (Controller, Vec<(HostId, Nanos)>) {
    let mut controller = controller(2, 2);
    for host in 0..4 {
        join(&mut controller, host, "0.10.2");
    }
    assert_eq!(ticks(&mut controller, (Nanos(0), seconds(5)), |_| true), []);
    let silent = HostId(silent);
    let stopped =
        ticks(&mut controller, (Nanos(5_500_000_000), seconds(60)), |host| host != silent);
    (controller, stopped)
}

#[test]
fn a_silent_host_is_lost_within_the_timeout_and_no_other_island() {
    let timeout = Config::default().timeout;
    let (controller, stopped) = one_falls_silent(2);
    let hosts: Vec<u32> = stopped.iter().map(|(host, _)| host.0).collect();
    assert_eq!(hosts, [2, 3], "both hosts of its island");
    let after = stopped[0].1.since(seconds(5));
    assert!(after >= Config::default().heartbeat_limit() && after < timeout, "{after:?}");
    let overview = controller.overview();
    assert!(overview.islands[0].hosts.iter().all(|host| host.lost.is_none()));
    let lost = overview.islands[1].hosts[0].lost.clone().unwrap();
    assert!(lost.contains("host 0 of island 1 is lost (no answer for 8.0 s)"), "{lost}");
}

#[test]
fn lost_hosts_are_sent_no_heartbeats_until_they_join_again() {
    let (mut controller, _) = one_falls_silent(2);
    let asked = |controller: &mut Controller, now| -> Vec<u32> {
        let effects = controller.handle(now, Event::Tick);
        let asked = effects.iter().filter_map(|effect| match effect {
            Effect::Heartbeat(host) => Some(host.0),
            _ => None,
        });
        asked.collect()
    };
    assert_eq!(asked(&mut controller, seconds(61)), [0, 1]);
    // The answer to an old heartbeat does not bring it back.
    controller.handle(seconds(61), Event::HeartbeatAnswered(HostId(2)));
    assert_eq!(asked(&mut controller, seconds(61)), [0, 1]);
}

#[test]
fn the_error_says_why_a_host_cannot_be_reached() {
    let mut controller = controller(2, 1);
    join(&mut controller, 0, "0.10.2");
    join(&mut controller, 1, "0.10.2");
    let failed = |cause: &str| Event::HeartbeatFailed { host: HostId(1), cause: cause.to_owned() };
    controller.handle(Nanos(0), failed("connection refused"));
    // An answer takes it back.
    controller.handle(Nanos(0), Event::HeartbeatAnswered(HostId(1)));
    controller.handle(Nanos(0), failed("no route to host"));
    ticks(&mut controller, (Nanos(0), seconds(10)), |host| host == HostId(0));
    let lost = controller.overview().islands[1].hosts[0].lost.clone().unwrap();
    assert!(lost.contains("no answer for 8.0 s: no route to host"), "{lost}");
}

#[test]
fn time_in_which_the_controller_did_not_run_is_no_silence_of_its_hosts() {
    let mut controller = controller(2, 1);
    join(&mut controller, 0, "0.10.2");
    join(&mut controller, 1, "0.10.2");
    // The machine sleeps for an hour after five seconds, of which host 1 was silent for four.
    ticks(&mut controller, (Nanos(0), seconds(1)), |_| true);
    ticks(&mut controller, (seconds(1), seconds(5)), |host| host == HostId(0));
    let awake = seconds(3605);
    let stopped = ticks(&mut controller, (awake, seconds(3700)), |host| host == HostId(0));
    assert_eq!(stopped.len(), 1);
    let after = stopped[0].1.since(awake);
    assert!(after >= seconds(3) && after <= seconds(4), "{after:?}");
}
