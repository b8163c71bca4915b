//! Gangs at the front of their queues.

use super::*;

#[test]
fn a_gang_is_counted_once_behind_a_transfer_that_its_predecessor_lets_go() {
    let spec = IslandSpec::new(3, 1);
    let mut scheduler = GangScheduler::new(&Cluster::new(&[spec]), 1, Dispatch::Parallel);
    let mut out = Out::new();
    let (client, input) = (ClientId(1), InputId(7));
    scheduler.inputs.open(input, ExecutableId(1), &[HostId(2)]);
    // With a window of one, all but the first launch on each host wait.
    submit(&mut scheduler, 1, &[0, 1, 2], &mut out);
    submit(&mut scheduler, 1, &[0, 1], &mut out);
    let waits = wanted(1, ExecutableId(1), smallvec![member(2, launch(1))]);
    scheduler.submit(LaunchRequest { inputs: smallvec![input], ..waits }, &mut out);
    let (send, receive) = of_transfer(1, 1);
    scheduler.announce(7, 1);
    scheduler.send(client, HostId(0), send, TransferRole::Sends(7), &mut out);
    scheduler.send(client, HostId(1), receive, TransferRole::Receives(7), &mut out);
    submit(&mut scheduler, 1, &[1, 2], &mut out);
    out.clear();
    for host in [0, 1, 2, 1] {
        scheduler.finished(HostId(host), Nanos(1), &mut out);
    }
    assert_eq!(
        launches(&out),
        [(0, 1), (1, 1)],
        "the last gang is behind a launch without a batch"
    );
}
