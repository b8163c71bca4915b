//! The production controller over modelled hosts.

use base::{ClientId, Nanos};
use control::{Config, Dispatch, Share};
use sim::{ClientWork, DispatchReport, SimClient, SimCosts, Simulation};
use topology::IslandSpec;

const MILLISECOND: u64 = 1_000_000;

fn island(hosts: u32, devices_per_host: u32) -> Vec<IslandSpec> {
    vec![IslandSpec::new(hosts, devices_per_host)]
}

fn client(work: ClientWork, computation: u64, weight: u32) -> SimClient {
    let share = Share { weight, priority: 0 };
    SimClient { share, work, computation: Nanos(computation) }
}

fn run(hosts: u32, clients: Vec<SimClient>, dispatch: Dispatch, millis: u64) -> DispatchReport {
    let config = Config { dispatch, ..Config::default() };
    let mut simulation = Simulation::new(&island(hosts, 4), clients, SimCosts::measured(), config);
    simulation.run(Nanos(50 * MILLISECOND), Nanos(millis * MILLISECOND))
}

fn rate(outcome: &DispatchReport) -> f64 {
    outcome.computations.iter().sum::<u64>() as f64 / outcome.measured.0 as f64 * 1e9
}

#[test]
fn the_same_run_gives_the_same_outcome() {
    let clients = || (1..=3).map(|n| client(ClientWork::OpByOp, n * 200_000, n as u32)).collect();
    let first = run(4, clients(), Dispatch::Parallel, 200);
    assert_eq!(first, run(4, clients(), Dispatch::Parallel, 200));
    assert!(first.computations.iter().all(|&count| count > 30), "{:?}", first.computations);
}

#[test]
fn long_computations_keep_devices_busy() {
    for hosts in [2, 16, 128] {
        let computation = 8 * MILLISECOND;
        let outcome =
            run(hosts, vec![client(ClientWork::OpByOp, computation, 1)], Dispatch::Parallel, 500);
        let ideal = 1e9 / (computation + SimCosts::measured().collective_over(hosts).0) as f64;
        let part = rate(&outcome) / ideal;
        assert!((0.95..1.05).contains(&part), "{part} of ideal on {hosts} hosts");
    }
}

#[test]
fn programs_are_faster_than_single_computations() {
    for hosts in [2, 32] {
        let single =
            rate(&run(hosts, vec![client(ClientWork::OpByOp, 0, 1)], Dispatch::Parallel, 200));
        let chained = rate(&run(
            hosts,
            vec![client(ClientWork::Chained(128), 0, 1)],
            Dispatch::Parallel,
            200,
        ));
        let fused =
            rate(&run(hosts, vec![client(ClientWork::Fused(128), 0, 1)], Dispatch::Parallel, 200));
        assert!(single < chained && chained <= fused * 1.05, "{single} {chained} {fused}");
    }
}

#[test]
fn stages_are_dispatched_in_parallel() {
    let work = || vec![client(ClientWork::Pipeline(16), 0, 1)];
    let parallel = rate(&run(16, work(), Dispatch::Parallel, 200));
    let sequential = rate(&run(16, work(), Dispatch::Sequential, 200));
    assert!(parallel > 1.5 * sequential, "{parallel} and {sequential}");
}

#[test]
fn shares_hold_in_every_window() {
    let weights = [1, 2, 4, 8];
    let clients = weights.iter().map(|&w| client(ClientWork::OpByOp, 330_000, w)).collect();
    let outcome = run(8, clients, Dispatch::Parallel, 3000);
    let windows = Simulation::windows(&outcome.spans, Nanos(1000 * MILLISECOND));
    for window in &windows[1..3] {
        let total: u64 = window.values().map(|time| time.0).sum();
        assert!(total > 950 * MILLISECOND, "devices are idle: {total}");
        for (client, weight) in (1..).zip(weights) {
            let share = window[&ClientId(client)].0 as f64 / total as f64;
            let wanted = f64::from(weight) / 15.0;
            assert!((share - wanted).abs() < 0.02, "{share} for {wanted}");
        }
    }
}

#[test]
fn two_thousand_devices() {
    let outcome =
        run(512, vec![client(ClientWork::OpByOp, 35 * MILLISECOND, 1)], Dispatch::Parallel, 700);
    assert!(rate(&outcome) > 27.0, "{}", rate(&outcome));
}
