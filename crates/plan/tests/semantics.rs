//! Schedules are verified by what they compute: every enumerated option implements its collective, and
//! options that omit a motif, execute one twice, or leave an order undefined are rejected.

use base::{BitsPerSecond, Nanos, Random};
use cost::ChannelCost;
use ir::Collective;
use plan::{
    Execution, Motif, Placed, RankSchedule, RankScheduleError, RankTransfer, ScheduledCollective,
    SearchSpace, Slot, executions,
};

fn channels() -> Vec<ChannelCost> {
    let cost = |rate| ChannelCost {
        rate: BitsPerSecond(rate),
        latency: Nanos(1000),
        sums: BitsPerSecond(1e11),
        incast: 0.0,
        overlap: Vec::new(),
    };
    vec![cost(2e9), cost(1e9)]
}

fn collectives(ranks: u32, elements: u64) -> Vec<Collective> {
    let sizes = (0..u64::from(ranks * ranks)).map(|pair| pair % 5 * elements / 7).collect();
    [
        Collective::all_reduce(ranks, elements),
        Collective::reduce_scatter(ranks, elements),
        Collective::all_gather(ranks, elements),
        Collective::broadcast(ranks, elements, ranks - 1),
        Collective::reduce(ranks, elements, ranks / 2),
        Collective::all_to_all(ranks, elements),
        Collective::all_to_all_of(ranks, sizes),
    ]
    .map(Result::unwrap)
    .to_vec()
}

/// A schedule of one collective, whose motifs are in index order on each channel.
fn script(collective: &Collective, option: &Execution) -> RankSchedule {
    let mut order = vec![Vec::new(); 2];
    for (motif, placed) in (0..).zip(&option.motifs) {
        order[placed.channel as usize].push(Slot { ahead: 0, task: 0, motif });
    }
    let (name, collective) = ("it".to_owned(), collective.clone());
    let operations = vec![ScheduledCollective { name, collective, motifs: option.motifs.clone() }];
    RankSchedule { operations, order }
}

/// The option without a motif; its dependents inherit its dependencies.
fn without(option: &Execution, motif: u32) -> Execution {
    let mut option = option.clone();
    let gone = option.motifs.remove(motif as usize);
    for placed in &mut option.motifs {
        if placed.after.contains(&motif) {
            placed.after.extend(&gone.after);
        }
        placed.after.retain(|&after| after != motif);
        placed.after.iter_mut().for_each(|after| *after -= u32::from(*after > motif));
    }
    option
}

#[test]
fn every_way_means_its_collective_and_none_that_lacks_something() {
    let mut random = Random::of(&[3]);
    for (ranks, elements) in [(1, 7), (2, 100), (3, 61), (4, 1000), (6, 5), (8, 240)] {
        for collective in collectives(ranks, elements) {
            for option in executions(&collective, 4, &channels(), &SearchSpace::default()) {
                let found = script(&collective, &option).verify();
                assert_eq!(found, Ok(()), "{option} of {collective}");
                let motif = random.below(option.motifs.len() as u64) as u32;
                let moves = !option.motifs[motif as usize].motif.rounds(&collective).is_empty();
                let found = script(&collective, &without(&option, motif)).verify();
                let is_told = matches!(found, Err(RankScheduleError::Meaning { .. }));
                assert_eq!(is_told, moves, "{option} of {collective} without {motif}: {found:?}");
            }
        }
    }
}

#[test]
fn orders_in_which_a_motif_waits_forever_are_refused() {
    let collective = Collective::all_reduce(4, 1000).unwrap();
    let space = SearchSpace::default();
    let is_chain = |option: &&Execution| {
        let [first, second] = &option.motifs[..] else { return false };
        second.after == [0] && (first.channel, second.channel) == (0, 0)
    };
    let options = executions(&collective, 4, &channels(), &space);
    let option = options.iter().find(is_chain).expect("a ring is reduced, then gathered");
    let slot = |ahead, task, motif| Slot { ahead, task, motif };
    let ordered = |slots: [Slot; 2]| {
        let order = vec![slots.to_vec(), vec![]];
        RankSchedule { order, ..script(&collective, option) }.verify()
    };
    ordered([slot(0, 0, 0), slot(0, 0, 1)]).unwrap();
    let error = ordered([slot(0, 0, 1), slot(0, 0, 0)]).unwrap_err();
    assert!(matches!(error, RankScheduleError::Deadlock { motif: 1, channel: 0, .. }), "{error}");
    // What a motif depends on may stand behind it if it is issued a step ahead.
    ordered([slot(0, 0, 1), slot(1, 0, 0)]).unwrap();
    assert!(ordered([slot(1, 0, 1), slot(0, 0, 0)]).is_err());
    // Two collectives that wait for each other across channels, though each channel alone is in order.
    let across = |first: u32, second: u32| {
        let mut motifs = option.motifs.clone();
        (motifs[0].channel, motifs[1].channel) = (first, second);
        ScheduledCollective { name: "it".to_owned(), collective: collective.clone(), motifs }
    };
    let crossed = |order| RankSchedule { operations: vec![across(0, 1), across(1, 0)], order };
    let good = vec![vec![slot(0, 0, 0), slot(0, 1, 1)], vec![slot(0, 1, 0), slot(0, 0, 1)]];
    crossed(good).verify().unwrap();
    let stuck = vec![vec![slot(0, 1, 1), slot(0, 0, 0)], vec![slot(0, 0, 1), slot(0, 1, 0)]];
    let error = crossed(stuck).verify().unwrap_err();
    assert!(matches!(error, RankScheduleError::Deadlock { .. }), "{error}");
}

#[test]
fn what_is_done_twice_or_in_no_order_is_told() {
    let collective = Collective::all_reduce(4, 1000).unwrap();
    let options = executions(&collective, 4, &channels(), &SearchSpace::default());
    let ring = options.iter().find(|option| option.form == "ring" && option.segments == 1).unwrap();
    let fault = |option: &Execution| match script(&collective, option).verify() {
        Err(RankScheduleError::Meaning { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let mut open = ring.clone();
    open.motifs[1].after.clear();
    assert!(fault(&open).contains("in no order"), "{}", fault(&open));
    let mut twice = ring.clone();
    twice.motifs.insert(0, ring.motifs[0].clone());
    twice.motifs[1].after = vec![0];
    twice.motifs[2].after = vec![1];
    assert!(fault(&twice).contains("something else in element"), "{}", fault(&twice));
    let exchange = Collective::all_to_all(4, 1000).unwrap();
    let option = executions(&exchange, 4, &channels(), &SearchSpace::default()).swap_remove(0);
    let mut twice = option.clone();
    twice.motifs.push(option.motifs[0].clone());
    let found = script(&exchange, &twice).verify();
    assert!(matches!(found, Err(RankScheduleError::Meaning { .. })), "{found:?}");
}

#[test]
fn what_is_written_down_is_carried_out_or_told() {
    let collective = Collective::all_reduce(2, 10).unwrap();
    let moves = |source: u32, (start, count): (u64, u64), sums: bool| RankTransfer {
        source,
        target: 1 - source,
        read: start,
        write: start,
        count,
        sums,
    };
    let found = |rounds: Vec<Vec<RankTransfer>>| {
        let motif = Motif::written(&collective, rounds);
        let placed = Placed { motif, after: vec![], channel: 0, time: Nanos(0) };
        let operations = vec![ScheduledCollective {
            name: "it".to_owned(),
            collective: collective.clone(),
            motifs: vec![placed],
        }];
        let order = vec![vec![Slot { ahead: 0, task: 0, motif: 0 }]];
        let script = RankSchedule { operations, order };
        let read = script.verify().map(|()| RankSchedule::parse(&script.print()).unwrap());
        assert!(read.clone().is_ok_and(|read| read == script) || read.is_err());
        read.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let halves = [(0, 5), (5, 5)];
    let sums = vec![moves(0, halves[0], true), moves(1, halves[1], true)];
    let gathers = vec![moves(1, halves[0], false), moves(0, halves[1], false)];
    assert_eq!(found(vec![sums.clone(), gathers.clone()]), "");
    assert!(found(vec![sums.clone()]).contains("something else"));
    let both: Vec<RankTransfer> = sums.iter().chain(&gathers).copied().collect();
    assert!(found(vec![both]).contains("send and receive one place at a time"));
    let swap = vec![moves(0, (0, 10), true), moves(1, (0, 10), true)];
    assert!(found(vec![swap]).contains("send and receive one place at a time"));
    assert!(found(vec![vec![moves(0, (5, 6), true)]]).contains("not there"));
    let elsewhere = RankTransfer { write: 1, ..moves(0, (0, 5), true) };
    assert!(found(vec![vec![elsewhere]]).contains("another place"));
}
