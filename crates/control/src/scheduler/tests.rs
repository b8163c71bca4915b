//! Dispatch order, on hosts that are each modelled as a FIFO queue.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{BufferId, InputId, Status};
use protocol::Acknowledge;
use smallvec::smallvec;
use topology::IslandSpec;

use super::*;
use crate::accounts::Share;
use crate::submissions::SegmentPosition;

mod fronts;

const WINDOW: u32 = 64;

fn scheduler(islands: u32, hosts: u32) -> GangScheduler {
    let spec = IslandSpec::new(hosts, 1);
    let cluster = Cluster::new(&vec![spec; islands as usize]);
    GangScheduler::new(&cluster, WINDOW, Dispatch::Parallel)
}

fn launch(client: u64) -> Command {
    Command::Launch {
        sequence: 0,
        previous: 0,
        acknowledge: Acknowledge::No,
        executable: ExecutableId(client),
        args: smallvec![],
        first_result: BufferId(1),
        results: 1,
        keep: smallvec![],
        completion: None,
        client: ClientId(client),
    }
}

/// A segment of a whole program.
fn run(client: u64, steps: std::ops::Range<u32>) -> Command {
    Command::RunProgram {
        sequence: 0,
        previous: 0,
        acknowledge: Acknowledge::No,
        executable: ExecutableId(client),
        steps,
        args: [].into(),
        first_buffer: BufferId(1),
        first_tag: base::TransferTag(1),
        completion: None,
        plan: 0,
        client: ClientId(client),
    }
}

fn member(host: u32, command: Command) -> Member {
    Member { host: HostId(host), devices: 1, command }
}

fn wanted(client: u64, executable: ExecutableId, members: SmallVec<[Member; 2]>) -> LaunchRequest {
    let (client, position, inputs) = (ClientId(client), SegmentPosition::Whole, smallvec![]);
    LaunchRequest { client, executable, position, members, expected: Nanos(0), inputs }
}

fn submit(scheduler: &mut GangScheduler, client: u64, hosts: &[u32], out: &mut Out) {
    let members = hosts.iter().map(|&host| member(host, launch(client))).collect();
    let executable = ExecutableId(client);
    scheduler.submit(wanted(client, executable, members), out);
}

/// Returns `(host, client)` of the dispatched launches.
fn launches(out: &Out) -> Vec<(u32, u64)> {
    let of = |(host, command): &(HostId, Command)| match command {
        Command::Launch { client, .. } | Command::RunProgram { client, .. } => {
            Some((host.0, client.0))
        }
        _ => None,
    };
    out.iter().filter_map(of).collect()
}

/// Executes dispatched launches, one after another on each host; each takes its client's time.
/// Returns device time by client until `until`, on the first host.
fn simulate(
    scheduler: &mut GangScheduler,
    times: &BTreeMap<u64, u64>,
    mut out: Out,
    until: u64,
) -> BTreeMap<u64, u64> {
    let hosts = scheduler.hosts.len();
    let mut had: BTreeMap<u64, u64> = BTreeMap::new();
    let mut now = vec![0_u64; hosts];
    let mut begun = vec![0_u64; hosts];
    let mut at_host: Vec<VecDeque<(u64, Acknowledge)>> = vec![VecDeque::new(); hosts];
    loop {
        for (host, command) in out.drain(..) {
            if let Command::Launch { client, acknowledge, .. }
            | Command::RunProgram { client, acknowledge, .. } = command
            {
                at_host[host.0 as usize].push_back((client.0, acknowledge));
            }
        }
        let busiest = (0..hosts).filter(|&host| !at_host[host].is_empty());
        let Some(host) = busiest.min_by_key(|&host| now[host]) else { return had };
        let (client, acknowledge) = at_host[host].pop_front().expect("seen above");
        now[host] += times[&client];
        if now[host] > until {
            return had;
        }
        if host == 0 {
            *had.entry(client).or_default() += times[&client];
        }
        if acknowledge != Acknowledge::No {
            let busy = Nanos(now[host] - std::mem::replace(&mut begun[host], now[host]));
            scheduler.finished(HostId(host as u32), busy, &mut out);
        }
    }
}

fn shares(
    weights: &[u32],
    times: &[u64],
    until: u64,
    command: impl Fn(u64) -> Command,
) -> Vec<f64> {
    let mut scheduler = scheduler(1, 2);
    let mut out = Out::new();
    let times: BTreeMap<u64, u64> = (1..).zip(times.iter().copied()).collect();
    for (client, &weight) in (1..).zip(weights) {
        let share = Share { weight, priority: 0 };
        scheduler.accounts.open(ClientId(client), share);
    }
    for client in 1..=weights.len() as u64 {
        for _ in 0..2 * until / times[&client] {
            let members = [0, 1].map(|host| member(host, command(client)));
            let wanted = wanted(client, ExecutableId(client), members.into());
            scheduler.submit(LaunchRequest { expected: Nanos(5_000_000), ..wanted }, &mut out);
        }
    }
    let had = simulate(&mut scheduler, &times, out, until);
    let total: u64 = had.values().sum();
    (1..=weights.len() as u64).map(|c| had[&c] as f64 / total as f64).collect()
}

#[test]
fn device_time_follows_weights() {
    let second = 1_000_000_000;
    let part_of_a_program = |client| run(client, 0..1);
    for times in [[1_000_000; 4], [300_000, 900_000, 2_000_000, 5_000_000]] {
        for command in [&launch as &dyn Fn(u64) -> Command, &part_of_a_program] {
            let equal = shares(&[1, 1, 1, 1], &times, 2 * second, command);
            assert!(equal.iter().all(|share| (share - 0.25).abs() < 0.02), "{equal:?}");
            let graded = shares(&[1, 2, 4, 8], &times, 2 * second, command);
            for (share, weight) in graded.iter().zip([1.0, 2.0, 4.0, 8.0]) {
                assert!((share - weight / 15.0).abs() < 0.02, "{graded:?}");
            }
        }
    }
}

#[test]
fn a_program_counts_for_the_devices_that_it_runs_on() {
    let cluster = Cluster::new(&[IslandSpec::new(1, 4)]);
    let mut scheduler = GangScheduler::new(&cluster, WINDOW, Dispatch::Parallel);
    let mut out = Out::new();
    for (client, devices) in [(1, 1), (2, 4)] {
        scheduler.accounts.open(ClientId(client), Share::default());
        let members = smallvec![Member { devices, ..member(0, launch(client)) }];
        scheduler.submit(wanted(client, ExecutableId(client), members), &mut out);
        scheduler.finished(HostId(0), Nanos(10_000), &mut out);
        let account = scheduler.accounts.get(ClientId(client)).unwrap();
        assert_eq!(account.device_time, Nanos(10_000 * u64::from(devices)));
    }
}

#[test]
fn a_program_of_moves_does_not_spoil_what_is_known_of_its_calls() {
    let mut scheduler = scheduler(1, 1);
    let mut out = Out::new();
    for expected in [5_000_000, 0, 5_000_000, 0] {
        let members = smallvec![member(0, run(1, 0..1))];
        let wanted = wanted(1, ExecutableId(1), members);
        scheduler.submit(LaunchRequest { expected: Nanos(expected), ..wanted }, &mut out);
        let took = if expected > 0 { 10_000_000 } else { 20_000 };
        scheduler.finished(HostId(0), Nanos(took), &mut out);
    }
    let factor = scheduler.factor(ExecutableId(1)).expect("it has run");
    assert!((factor - 2.0).abs() < 0.1, "{factor}");
}

#[test]
fn all_hosts_see_one_order() {
    let mut scheduler = scheduler(1, 3);
    let mut out = Out::new();
    for turn in 0..500 {
        let client = 1 + turn % 3;
        let hosts: &[u32] = if turn % 2 == 0 { &[0, 1, 2] } else { &[1, 2] };
        submit(&mut scheduler, client, hosts, &mut out);
    }
    let mut sent = out.clone();
    while scheduler.hosts.iter().any(|host| host.in_flight() > 0) {
        for host in 0..3 {
            let mut more = Out::new();
            scheduler.finished(HostId(host), Nanos(1_000_000), &mut more);
            sent.extend(more);
        }
    }
    let order = |host: u32| -> Vec<(u64, u64)> {
        let numbers = sent.iter().filter(|sent| sent.0.0 == host);
        let number = |(_, command): &(HostId, Command)| match command {
            Command::Launch { sequence, previous, .. } => (*sequence, *previous),
            _ => (0, 0),
        };
        numbers.map(number).collect()
    };
    assert_eq!(order(1), order(2));
    assert_eq!((order(0).len(), order(1).len()), (250, 500));
    for host in 0..3 {
        let mut last = 0;
        for (sequence, previous) in order(host) {
            assert!(previous == last && sequence > previous);
            last = sequence;
        }
    }
}

#[test]
fn the_higher_priority_goes_first() {
    let mut scheduler = scheduler(1, 1);
    let mut out = Out::new();
    scheduler.accounts.open(ClientId(1), Share { weight: 9, priority: 0 });
    scheduler.accounts.open(ClientId(2), Share { weight: 1, priority: 1 });
    for client in [1, 2] {
        for _ in 0..100 {
            submit(&mut scheduler, client, &[0], &mut out);
        }
    }
    let given = out.len();
    assert!(launches(&out).iter().all(|launch| launch.1 == 1), "only client 1 was there");
    while scheduler.hosts[0].in_flight() > 0 {
        scheduler.finished(HostId(0), Nanos(1_000_000), &mut out);
    }
    assert_eq!(out.len(), 200);
    assert!(launches(&out)[given..given + 100].iter().all(|launch| launch.1 == 2));
}

#[test]
fn a_receive_leaves_after_the_sends_it_waits_for() {
    let mut scheduler = scheduler(2, 1);
    let client = ClientId(1);
    let mut out = Out::new();
    for _ in 0..100 {
        submit(&mut scheduler, 1, &[0], &mut out);
    }
    out.clear();
    scheduler.announce(7, 1);
    let free = |buffer| Command::Free { buffers: vec![BufferId(buffer)] };
    scheduler.send(client, HostId(0), free(1), TransferRole::Sends(7), &mut out);
    scheduler.send(client, HostId(1), free(2), TransferRole::Receives(7), &mut out);
    submit(&mut scheduler, 1, &[1], &mut out);
    assert!(out.is_empty(), "the send waits behind launches, so all else waits for it");
    submit(&mut scheduler, 2, &[1], &mut out);
    assert_eq!(launches(&out), [(1, 2)], "which is nothing to another client");
    out.clear();
    for _ in 0..100 {
        scheduler.finished(HostId(0), Nanos(1_000_000), &mut out);
    }
    let after: Vec<u32> = out.iter().rev().take(3).map(|left| left.0.0).collect();
    assert_eq!(after, [1, 1, 0], "send, receive, launch");
}

fn gather(source: u64, buffer: u64) -> Command {
    let sharding = ir::Sharding::single(base::DeviceId(0), None);
    let dims = ir::Dims::new();
    let spec = Arc::new(ir::ArraySpec { dtype: ir::DType::F32, dims, sharding });
    Command::AssembleShards {
        buffer: BufferId(buffer),
        spec,
        shards: vec![protocol::AssembledShard { position: 0, source: BufferId(source), shard: 0 }],
    }
}

#[test]
fn questions_about_what_is_made_do_not_wait() {
    let mut scheduler = scheduler(1, 1);
    let client = ClientId(1);
    let mut out = Out::new();
    for number in 100..200 {
        let mut command = launch(1);
        if let Command::Launch { first_result, .. } = &mut command {
            *first_result = BufferId(number);
        }
        let members = smallvec![member(0, command)];
        let executable = ExecutableId(1);
        scheduler.submit(wanted(client.0, executable, members), &mut out);
    }
    let queued = 200 - scheduler.queued(client) as u64;
    out.clear();
    let check = |buffer| Command::CheckReady { ticket: 1, buffers: vec![BufferId(buffer)] };
    let mut asks = |command| {
        let before = out.len();
        scheduler.send(client, HostId(0), command, TransferRole::None, &mut out);
        out.len() > before
    };
    assert!(asks(check(queued - 1)), "its launch has left");
    assert!(!asks(check(queued)), "its launch is the first in the queue");
    assert!(asks(gather(100, 200)) && asks(check(200)));
    assert!(!asks(gather(queued, 201)) && !asks(check(201)));
    assert!(
        !asks(Command::Free { buffers: vec![BufferId(100)] }),
        "it might be read by what is queued"
    );
}

#[test]
fn who_waits_for_a_result_does_not_wait_for_what_was_asked_for_since() {
    let mut scheduler = scheduler(1, 1);
    let client = ClientId(1);
    let mut out = Out::new();
    // The first of these segments are dispatched; the last of the first run and all other runs
    // wait.
    for (turn, part) in (0..10).flat_map(|turn| (0..100_u32).map(move |part| (turn, part))) {
        let mut command = run(1, part..part + 1);
        if let Command::RunProgram { first_buffer, .. } = &mut command {
            *first_buffer = BufferId(100 + turn);
        }
        let wanted = wanted(1, ExecutableId(1), smallvec![member(0, command)]);
        scheduler.submit(wanted, &mut out);
    }
    assert!(out.len() < 100);
    let ask = |ticket, buffer| Command::CheckReady { ticket, buffers: vec![BufferId(buffer)] };
    let free = Command::Free { buffers: vec![BufferId(7)] };
    scheduler.send(client, HostId(0), free, TransferRole::None, &mut out);
    for (ticket, buffer) in [(3, 102), (0, 100), (1, 100)] {
        scheduler.send(client, HostId(0), ask(ticket, buffer), TransferRole::None, &mut out);
    }
    // The same for a shard of a result.
    scheduler.send(client, HostId(0), gather(101, 2000), TransferRole::None, &mut out);
    scheduler.send(client, HostId(0), ask(2, 2000), TransferRole::None, &mut out);
    let made_before = |out: &Out, asked: u64| -> Option<usize> {
        let is_answer = |command: &Command| matches!(command, Command::CheckReady { ticket, .. } if *ticket == asked);
        let at = out.iter().position(|(_, command)| is_answer(command))?;
        Some(launches(&out[..at].to_vec()).len())
    };
    while scheduler.hosts[0].in_flight() > 0 {
        scheduler.finished(HostId(0), Nanos(1_000_000), &mut out);
    }
    let before = [0, 1, 2, 3].map(|ticket| made_before(&out, ticket));
    assert_eq!(before, [100, 100, 200, 300].map(Some));
    let is_gather = |left: &(HostId, Command)| matches!(left.1, Command::AssembleShards { .. });
    let gathered = out.iter().position(is_gather).map(|at| launches(&out[..at].to_vec()).len());
    assert_eq!(gathered, Some(200));
    assert_eq!((scheduler.queued(client), out.len()), (0, 1006));
}

#[test]
fn time_that_nobody_else_wanted_is_not_paid_for() {
    let mut scheduler = scheduler(1, 1);
    let mut out = Out::new();
    for client in [1, 2] {
        scheduler.accounts.open(ClientId(client), Share::default());
        submit(&mut scheduler, client, &[0], &mut out);
        let busy = Nanos(if client == 1 { 300_000_000 } else { 1_000_000 });
        scheduler.finished(HostId(0), busy, &mut out);
    }
    out.clear();
    for client in [2, 1] {
        for _ in 0..600 {
            submit(&mut scheduler, client, &[0], &mut out);
        }
    }
    let times = BTreeMap::from([(1, 1_000_000), (2, 1_000_000)]);
    let had = simulate(&mut scheduler, &times, out, 500_000_000);
    assert!(had[&1].abs_diff(had[&2]) < 50_000_000, "{had:?}");
}

/// Returns the number of launches dispatched at once to a host, by clients that take turns with
/// launches of 1 ms, and how many of them it acknowledges.
fn first_fill(clients: &[u64]) -> (usize, usize) {
    let mut scheduler = scheduler(1, 1);
    let mut out = Out::new();
    for &client in clients {
        submit(&mut scheduler, client, &[0], &mut out);
        scheduler.finished(HostId(0), Nanos(1_000_000), &mut out);
    }
    out.clear();
    for turn in 0..100 {
        submit(&mut scheduler, clients[turn % clients.len()], &[0], &mut out);
    }
    let is_reported = |(_, command): &&(HostId, Command)| {
        matches!(command, Command::Launch { acknowledge: Acknowledge::Finished, .. })
    };
    (launches(&out).len(), out.iter().filter(is_reported).count())
}

#[test]
fn ends_are_reported_seldom_while_a_single_client_has_much_before_a_host() {
    assert_eq!(first_fill(&[1, 2]), (20, 20), "each measures a client's share");
    assert_eq!(first_fill(&[1]), (20, 12), "nine of 1 ms, two of 5 ms, and the last that has room");
}

#[test]
fn what_a_dead_client_queued_is_dropped() {
    let mut scheduler = scheduler(1, 2);
    let mut out = Out::new();
    for turn in 0..200 {
        submit(&mut scheduler, 1 + turn % 2, &[0, 1], &mut out);
    }
    let begun = launches(&out).iter().filter(|launch| launch.1 == 1).count();
    scheduler.drop_client(ClientId(1), &mut out);
    assert_eq!(scheduler.queued(ClientId(1)), 0);
    for _ in 0..200 {
        for host in 0..2 {
            scheduler.finished(HostId(host), Nanos(1_000_000), &mut out);
        }
    }
    let of = |client: u64| launches(&out).iter().filter(|launch| launch.1 == client).count();
    assert_eq!((of(1), of(2)), (begun, 200));
    assert_eq!((scheduler.gangs.len(), scheduler.queue_length(HostId(0))), (0, 0));
}

#[test]
fn gangs_go_on_without_a_lost_host() {
    let mut scheduler = scheduler(2, 1);
    let mut out = Out::new();
    for _ in 0..100 {
        submit(&mut scheduler, 1, &[0, 1], &mut out);
    }
    let error = Status::new(base::Code::Unavailable, "gone");
    scheduler.lose(HostId(0), error, &mut out);
    for _ in 0..100 {
        scheduler.finished(HostId(1), Nanos(1_000_000), &mut out);
    }
    let on_second = launches(&out).iter().filter(|launch| launch.0 == 1).count();
    assert_eq!((on_second, scheduler.gangs.len()), (100, 0));
}

#[test]
fn one_by_one_waits_for_no_exchange() {
    let spec = IslandSpec::new(1, 1);
    let cluster = Cluster::new(&[spec]);
    let mut scheduler = GangScheduler::new(&cluster, WINDOW, Dispatch::Sequential);
    let mut out = Out::new();
    let exchange = Command::RunExchange {
        executable: ExecutableId(2),
        args: smallvec![],
        first_result: BufferId(1),
        results: Vec::new(),
        first_tag: base::TransferTag(1),
        client: ClientId(1),
    };
    let members = smallvec![member(0, exchange)];
    let (client, executable) = (ClientId(1), ExecutableId(2));
    scheduler.submit(wanted(client.0, executable, members), &mut out);
    submit(&mut scheduler, 1, &[0], &mut out);
    assert_eq!(launches(&out).len(), 1, "hosts do not report exchanges");
}

#[test]
fn one_by_one_waits_for_each() {
    let spec = IslandSpec::new(1, 1);
    let cluster = Cluster::new(&[spec]);
    let mut scheduler = GangScheduler::new(&cluster, WINDOW, Dispatch::Sequential);
    let mut out = Out::new();
    for _ in 0..3 {
        submit(&mut scheduler, 1, &[0], &mut out);
    }
    for left in 1..=3 {
        assert_eq!(launches(&out).len(), left);
        scheduler.finished(HostId(0), Nanos(0), &mut out);
    }
}

fn of_transfer(host: u32, client: u64) -> (Command, Command) {
    let spec = std::sync::Arc::new(ir::ArraySpec {
        dtype: ir::DType::U8,
        dims: ir::Dims::new(),
        sharding: ir::Sharding::single(base::DeviceId(host), None),
    });
    let send = Command::Send { source: BufferId(client), pieces: vec![], client: ClientId(client) };
    let receive =
        Command::Receive { buffer: BufferId(client), spec, shards: vec![], relays: vec![] };
    (send, receive)
}

#[test]
fn what_a_client_has_begun_goes_on_without_it() {
    let spec = IslandSpec::new(2, 1);
    let mut scheduler = GangScheduler::new(&Cluster::new(&[spec]), 1, Dispatch::Parallel);
    let mut out = Out::new();
    let client = ClientId(1);
    let submit =
        |scheduler: &mut GangScheduler, out: &mut Out, position, steps: std::ops::Range<u32>| {
            let members = smallvec![member(0, run(client.0, steps))];
            let wanted = wanted(client.0, ExecutableId(client.0), members);
            scheduler.submit(LaunchRequest { position, ..wanted }, out);
        };
    // The first segment is dispatched; with a window of one, all else waits for its end.
    submit(&mut scheduler, &mut out, SegmentPosition::First, 0..1);
    submit(&mut scheduler, &mut out, SegmentPosition::Last, 1..2);
    submit(&mut scheduler, &mut out, SegmentPosition::First, 0..1);
    submit(&mut scheduler, &mut out, SegmentPosition::Last, 1..2);
    // Of one transfer, one send has been dispatched; of the other, none.
    let (send, receive) = of_transfer(1, 1);
    scheduler.announce(7, 2);
    scheduler.send(client, HostId(1), send.clone(), TransferRole::Sends(7), &mut out);
    scheduler.send(client, HostId(0), send.clone(), TransferRole::Sends(7), &mut out);
    scheduler.send(client, HostId(1), receive.clone(), TransferRole::Receives(7), &mut out);
    scheduler.announce(8, 1);
    scheduler.send(client, HostId(0), send, TransferRole::Sends(8), &mut out);
    scheduler.send(client, HostId(1), receive, TransferRole::Receives(8), &mut out);
    assert_eq!(out.len(), 2, "the first part and a send");
    scheduler.drop_client(client, &mut out);
    out.clear();
    scheduler.finished(HostId(0), Nanos(1), &mut out);
    let kinds: Vec<(u32, &str)> = out
        .iter()
        .map(|(host, command)| match command {
            Command::RunProgram { steps, .. } if steps.start == 1 => (host.0, "the rest"),
            Command::RunProgram { .. } => (host.0, "another run"),
            Command::Send { .. } => (host.0, "send"),
            Command::Receive { .. } => (host.0, "receive"),
            _ => (host.0, "other"),
        })
        .collect();
    assert_eq!(kinds, [(0, "the rest"), (0, "send"), (1, "receive")]);
    assert_eq!(scheduler.queued(client), 0);
    assert!(scheduler.gangs.is_empty() && scheduler.transfers.unsent.is_empty());
}

#[test]
fn what_a_client_has_begun_leaves_when_what_was_before_it_is_dropped() {
    let spec = IslandSpec::new(2, 1);
    let mut scheduler = GangScheduler::new(&Cluster::new(&[spec]), 1, Dispatch::Parallel);
    let mut out = Out::new();
    let client = ClientId(1);
    // With a window of one the second launch waits.
    submit(&mut scheduler, 2, &[0], &mut out);
    submit(&mut scheduler, 1, &[0], &mut out);
    let (send, receive) = of_transfer(1, 1);
    scheduler.announce(7, 2);
    scheduler.send(client, HostId(1), send, TransferRole::Sends(7), &mut out);
    scheduler.send(
        client,
        HostId(0),
        Command::Relay { relays: vec![] },
        TransferRole::Sends(7),
        &mut out,
    );
    scheduler.send(client, HostId(1), receive, TransferRole::Receives(7), &mut out);
    assert_eq!(out.len(), 2, "a launch and a send");
    out.clear();
    scheduler.drop_client(client, &mut out);
    let kinds: Vec<(u32, bool)> = out
        .iter()
        .map(|(host, command)| (host.0, matches!(command, Command::Relay { .. })))
        .collect();
    assert_eq!(kinds, [(0, true), (1, false)], "what passes on leaves, and so does what receives");
    assert_eq!(scheduler.queued(client), 0);
    assert!(scheduler.gangs.is_empty() && scheduler.transfers.unsent.is_empty());
}

#[test]
fn a_launch_waits_for_its_batch_and_nobody_waits_for_it() {
    let mut scheduler = scheduler(1, 2);
    let input = InputId(7);
    let hosts = [HostId(0), HostId(1)];
    scheduler.inputs.open(input, ExecutableId(1), &hosts);
    let mut out = Out::new();
    for _ in 0..2 {
        let members = hosts.iter().map(|&host| member(host.0, launch(1))).collect();
        let (client, executable) = (ClientId(1), ExecutableId(1));
        let wanted = wanted(client.0, executable, members);
        scheduler.submit(LaunchRequest { inputs: smallvec![input], ..wanted }, &mut out);
    }
    submit(&mut scheduler, 2, &[0, 1], &mut out);
    assert_eq!(launches(&out), [(0, 2), (1, 2)]);
    out.clear();
    scheduler.batch_made(hosts[0], input, None, &mut out);
    assert!(out.is_empty());
    let error = Status::new(base::Code::OutOfRange, "no more");
    scheduler.batch_made(hosts[0], input, Some(error.clone()), &mut out);
    let told = out.pop();
    assert!(matches!(told, Some((HostId(1), Command::EndInput { batches: 1, .. }))), "{told:?}");
    scheduler.batch_made(hosts[1], input, None, &mut out);
    assert_eq!(launches(&out).len(), 4, "a batch of both hosts, and the error after it");
    scheduler.batch_made(hosts[1], input, Some(error), &mut out);
    assert_eq!(out.len(), 4, "the end is known");
}
