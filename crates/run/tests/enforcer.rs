//! Ranks execute random plans over real sockets; results must match the semantics of the collectives.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use base::{BitsPerSecond, Channel, HostId, Nanos, Random, TransferTag};
use ir::{Collective, CollectiveKind, DType, Dependency, StepGraph, StepOp};
use plan::{ChannelCost, CommPlan, Policy, Problem, RankSchedule, SearchSpace, executions};
use run::channel::DataPlane;
use run::enforcer::{
    Elements, Enforcer, EnforcerError, PreparedSchedule, Reduction, Team, TeamChannel,
};

const CHANNELS: u32 = 2;

/// Data planes, one for each rank, registered with each other; they are closed on drop.
struct Planes(Vec<DataPlane>);

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
fn planes(ranks: u32) -> Planes {
    planes_by(ranks, [false; CHANNELS as usize])
}

/// Data planes with channels of every kind: TCP, shared memory, and both.
fn planes_of_all_kinds(ranks: u32) -> impl Iterator<Item = Planes> {
    [[false, false], [true, true], [true, false]]
        .into_iter()
        .map(move |near| planes_by(ranks, near))
}

fn planes_by(ranks: u32, near: [bool; CHANNELS as usize]) -> Planes {
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
            DataPlane::listen(HostId(rank), "tcp:127.0.0.1:0", &channels, "secret").unwrap()
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
struct Cable {
    address: String,
    is_cut: Arc<AtomicBool>,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let cable = Self { address, is_cut: Arc::default(), ends: Arc::default() };
        let (this, target) = (cable.clone(), target.strip_prefix("tcp:").unwrap().to_owned());
        thread::spawn(move || {
            for one in listener.incoming() {
                if this.is_cut.load(Ordering::Relaxed) {
                    return;
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

    fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
        // The accept loop ends with the next connection.
        drop(TcpStream::connect(self.address.strip_prefix("tcp:").unwrap()));
        for end in self.ends.lock().unwrap().iter() {
            drop(end.shutdown(Shutdown::Both));
        }
    }
}

/// Runs `act` concurrently as every rank of a team.
fn as_ranks<T: Send>(
    planes: &[DataPlane],
    name: u64,
    timeout: Duration,
    act: impl Fn(u32, &DataPlane, &Enforcer) -> T + Sync,
) -> Vec<T> {
    let hosts: Vec<HostId> = (0..planes.len() as u32).map(HostId).collect();
    // A slow channel has a short queue, so ranks wait for it to drain.
    let rate = Some(BitsPerSecond(1e8));
    let ways: Vec<TeamChannel> =
        (1..=CHANNELS).map(|channel| TeamChannel { channel: Channel(channel), rate }).collect();
    thread::scope(|scope| {
        let one = |(rank, plane): (usize, &'_ DataPlane)| {
            let (hosts, ways, act, plane) = (&hosts, &ways, &act, plane.clone());
            scope.spawn(move || {
                let (rank, name) = (rank as u32, TransferTag(name));
                let team = Team {
                    plane: &plane,
                    name,
                    rank,
                    hosts,
                    names: None,
                    ways,
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

/// Generates a collective of `ranks` ranks.
fn collective(random: &mut Random, ranks: u32) -> Collective {
    let elements = match random.below(8) {
        0 | 1 => random.below(9),
        2..5 => random.below(2_000),
        5 | 6 => random.below(60_000),
        // Larger than the flow-control window of a lane.
        _ => random.below(600_000),
    };
    let root = random.below(u64::from(ranks)) as u32;
    let made = match random.below(7) {
        0 => Collective::all_reduce(ranks, elements),
        1 => Collective::reduce_scatter(ranks, elements),
        2 => Collective::all_gather(ranks, elements),
        3 => Collective::broadcast(ranks, elements, root),
        4 => Collective::reduce(ranks, elements, root),
        5 => Collective::all_to_all(ranks, elements),
        _ => {
            let sizes = (0..ranks * ranks).map(|_| random.below(3_000)).collect();
            Collective::all_to_all_of(ranks, sizes)
        }
    };
    made.unwrap()
}

/// Input of a rank: integers, so that sums are exact in any order.
fn given(step: u64, operation: u32, rank: u32, place: u64) -> f32 {
    ((step * 31 + u64::from(operation) * 7 + u64::from(rank) * 3 + place) % 97) as f32
}

/// Expected result, by the semantics of the collective.
fn expected(collective: &Collective, step: u64, operation: u32, rank: u32) -> Vec<f32> {
    let value = |rank, place| given(step, operation, rank, place);
    let ranks = collective.ranks();
    let sum = |place: u64| (0..ranks).map(|rank| value(rank, place)).sum::<f32>();
    match collective.kind() {
        CollectiveKind::AllReduce => (0..collective.elements()).map(sum).collect(),
        CollectiveKind::ReduceScatter => collective.block(rank).map(sum).collect(),
        CollectiveKind::AllGather => {
            (0..ranks).flat_map(|one| collective.block(one).map(move |at| value(one, at))).collect()
        }
        CollectiveKind::Broadcast { root } => {
            (0..collective.elements()).map(|at| value(*root, at)).collect()
        }
        CollectiveKind::Reduce { root } if *root == rank => {
            (0..collective.elements()).map(sum).collect()
        }
        CollectiveKind::Reduce { .. } => Vec::new(),
        CollectiveKind::AllToAll { .. } => (0..ranks)
            .flat_map(|one| {
                let (read, _, size) = collective.pair(one, rank);
                (read..read + size).map(move |at| value(one, at))
            })
            .collect(),
    }
}

/// A random plan of a random step without computation.
fn script(random: &mut Random, ranks: u32, ahead: bool) -> Arc<RankSchedule> {
    scripts(random, ranks, ahead, 1).remove(0)
}

/// Several random plans of one random step.
fn scripts(random: &mut Random, ranks: u32, ahead: bool, plans: u32) -> Vec<Arc<RankSchedule>> {
    let count = 1 + random.below(5);
    let mut step = StepGraph::new("step", ranks);
    for number in 0..count {
        let op = StepOp::of_ranks(collective(random, ranks), 4);
        let communicates = step.add(format!("op {number}"), op, &[]);
        if ahead {
            let time = Nanos(random.below(3_000_000));
            let op = StepOp::compute((0..ranks).collect::<Vec<_>>(), time);
            step.add(format!("compute {number}"), op, &[Dependency::on(communicates)]);
        }
    }
    let step = Problem::new(step).unwrap();
    let costs: Vec<ChannelCost> = [2e9, 1e9]
        .map(|rate| ChannelCost {
            rate: BitsPerSecond(rate),
            latency: Nanos(50_000),
            sums: BitsPerSecond(2e10),
            incast: 0.1,
            overlap: Vec::new(),
        })
        .to_vec();
    let ways: Vec<_> = step
        .nodes()
        .iter()
        .map(|node| match &node.op {
            StepOp::Collective(op) => {
                executions(&op.collective, op.element_bytes, &costs, &SearchSpace::default())
            }
            _ => Vec::new(),
        })
        .collect();
    let plan = |_| {
        let mut way = |ways: &Vec<_>| random.below(ways.len().max(1) as u64) as u32;
        let chosen: Vec<u32> = ways.iter().map(&mut way).collect();
        let policies = [Policy::CriticalPath, Policy::Fifo, Policy::Lifo];
        let policy = &policies[random.below(3) as usize];
        Arc::new(RankSchedule::of(&step, &ways, &CommPlan::of(&step, &ways, &chosen, policy)))
    };
    (0..plans).map(plan).collect()
}

fn submit(
    enforcer: &Enforcer,
    plane: &DataPlane,
    collective: &Collective,
    at: (u64, u32),
) -> Result<run::enforcer::CollectiveTicket, EnforcerError> {
    let rank = enforcer.rank();
    let elements = Elements::new(DType::F32, Reduction::Sum)?;
    let length = collective.work(rank) as usize * 4;
    // Some vectors are not in shared memory.
    let memory = if (at.0 + u64::from(at.1)).is_multiple_of(2) {
        enforcer.memory(length)
    } else {
        plane.memory(length)
    };
    let work = run::enforcer::CollectiveBuffer::of(memory.unwrap());
    // SAFETY: no other reference exists yet.
    let vector: &mut [f32] = bytemuck::cast_slice_mut(unsafe { work.slice_mut(0, length) });
    for (place, element) in (0..).zip(vector) {
        *element = given(at.0, at.1, rank, place);
    }
    enforcer.submit(at, (collective, elements), work, None)
}

fn check(
    enforcer: &Enforcer,
    part: &RankSchedule,
    ticket: run::enforcer::CollectiveTicket,
    at: (u64, u32),
) {
    let collective = &part.operations[at.1 as usize].collective;
    let work = enforcer.wait(ticket).unwrap();
    let range = collective.result(enforcer.rank());
    let count = (range.end - range.start) as usize * 4;
    // SAFETY: the collective has completed.
    let bytes = unsafe { work.slice(range.start as usize * 4, count) };
    let found: &[f32] = bytemuck::cast_slice(bytes);
    let expected = expected(collective, at.0, at.1, enforcer.rank());
    assert!(found == expected, "rank {}: {collective}, step {at:?}", enforcer.rank());
}

/// Runs several steps of one schedule, submitted in an order and at times that differ by rank.
fn steps(
    enforcer: &Enforcer,
    plane: &DataPlane,
    part: &Arc<PreparedSchedule>,
    script: &RankSchedule,
    (count, seed, together): (u64, u64, u64),
) {
    let mut random = Random::of(&[seed, u64::from(enforcer.rank()) + 100]);
    let mut done = 0;
    while done < count {
        let now = together.min(count - done);
        let mut waiting = Vec::new();
        let begin = |turn: u64| enforcer.begin(part, (now - 1 - turn) as u32).unwrap();
        let begun: Vec<u64> = (0..now).map(begin).collect();
        for step in begun {
            let mut open: Vec<u32> = (0..script.operations.len() as u32).collect();
            while !open.is_empty() {
                let operation = open.swap_remove(random.below(open.len() as u64) as usize);
                if random.below(4) == 0 {
                    thread::sleep(Duration::from_micros(random.below(2_000)));
                }
                let collective = &script.operations[operation as usize].collective;
                let ticket = submit(enforcer, plane, collective, (step, operation)).unwrap();
                waiting.push((ticket, (step, operation)));
            }
        }
        for (ticket, at) in waiting {
            check(enforcer, script, ticket, at);
        }
        done += now;
    }
}

#[test]
fn random_plans_do_what_their_collectives_mean() {
    for ranks in [1, 2, 3, 5] {
        for planes in planes_of_all_kinds(ranks) {
            for seed in 0..8 {
                let mut random = Random::of(&[seed, u64::from(ranks)]);
                let script = script(&mut random, ranks, seed % 2 == 0);
                let together = 1 + random.below(3);
                as_ranks(&planes, seed, Duration::from_secs(20), |_, plane, enforcer| {
                    let part = enforcer.prepare(script.clone()).unwrap();
                    steps(enforcer, plane, &part, &script, (6, seed, together));
                });
            }
        }
    }
}

/// Runs steps of the plan in force, at times that differ by rank; returns the plan of each step.
fn planned_steps(
    enforcer: &Enforcer,
    plane: &DataPlane,
    script: &RankSchedule,
    (count, seed): (u64, u64),
) -> Vec<u64> {
    const AHEAD: u64 = 2;
    let mut random = Random::of(&[seed, u64::from(enforcer.rank()) + 100]);
    let mut plans = Vec::new();
    for turn in 0..count {
        let (step, plan) = enforcer.begin_planned((count - 1 - turn).min(AHEAD) as u32).unwrap();
        plans.push(plan);
        if random.below(3) == 0 {
            thread::sleep(Duration::from_micros(random.below(3_000)));
        }
        let operations = (0..).zip(&script.operations);
        let submitted: Vec<_> = operations
            .map(|(number, one)| {
                let at = (step, number);
                (submit(enforcer, plane, &one.collective, at).unwrap(), at)
            })
            .collect();
        for (ticket, at) in submitted {
            check(enforcer, script, ticket, at);
        }
    }
    plans
}

#[test]
fn plans_change_in_the_same_step_on_all_ranks() {
    const STEPS: u64 = 40;
    for ranks in [1, 2, 3] {
        for planes in planes_of_all_kinds(ranks) {
            for seed in 0..3 {
                let mut random = Random::of(&[seed, u64::from(ranks), 7]);
                let scripts = scripts(&mut random, ranks, seed % 2 == 0, 4);
                let plans =
                    as_ranks(&planes, seed, Duration::from_secs(20), |rank, plane, enforcer| {
                        enforcer.follow(&enforcer.prepare(scripts[0].clone()).unwrap()).unwrap();
                        thread::scope(|scope| {
                            if rank == 0 {
                                scope.spawn(|| {
                                    let mut next = scripts[1..].iter().cycle();
                                    while enforcer.steps_begun() < STEPS {
                                        thread::sleep(Duration::from_millis(2));
                                        match enforcer.propose(next.next().unwrap()) {
                                            Ok(from) => assert!(from <= STEPS + 8, "{from}"),
                                            // A rank has not reached the previous plan, or the first.
                                            Err(EnforcerError::Refused { reason }) => {
                                                let early = ["about to begin", "to follow first"];
                                                let is_early =
                                                    early.iter().any(|one| reason.contains(one));
                                                // Or it has run all its steps, and closed.
                                                let is_over = reason.contains("is lost")
                                                    && enforcer.steps_begun() == STEPS;
                                                assert!(is_early || is_over, "{reason}");
                                            }
                                            Err(error) => panic!("{error}"),
                                        }
                                    }
                                });
                            }
                            planned_steps(enforcer, plane, &scripts[0], (STEPS, seed))
                        })
                    });
                assert!(plans.iter().all(|of_rank| *of_rank == plans[0]), "{plans:?}");
                assert!(plans[0].is_sorted());
                assert!(plans[0].last() > Some(&0), "none was ever changed: {plans:?}");
            }
        }
    }
}

#[test]
fn a_plan_that_a_rank_cannot_keep_to_is_kept_to_by_none() {
    let planes = planes(2);
    let reduce = |elements| Collective::all_reduce(2, elements).unwrap();
    let known = Arc::new(RankSchedule::single(&reduce(1000), 0));
    as_ranks(&planes, 1, Duration::from_secs(5), |rank, plane, enforcer| {
        assert_eq!(enforcer.begin_planned(0).unwrap_err(), EnforcerError::NoPlan);
        let part = enforcer.prepare(known.clone()).unwrap();
        enforcer.follow(&part).unwrap();
        planned_steps(enforcer, plane, &known, (1, 1));
        if rank == 1 {
            let error = enforcer.propose(&known).unwrap_err();
            assert_eq!(error, EnforcerError::Proposer { rank: 1 });
        } else {
            let other = RankSchedule::single(&reduce(1001), 0);
            let longer = RankSchedule::series(&reduce(1000), 0, 2);
            for wrong in [other, longer, RankSchedule::single(&reduce(1000), 7)] {
                let error = enforcer.propose(&wrong).unwrap_err();
                assert!(matches!(error, EnforcerError::Refused { .. }), "{error}");
            }
        }
        assert_eq!(planned_steps(enforcer, plane, &known, (10, 2)), [0; 10]);
    });
}

/// A timeout that only expires if something is wrong.
const LONG: Duration = Duration::from_secs(60);

/// Each rank of a team asks for a collective of its own; returns the error of each.
fn asked(
    planes: &[DataPlane],
    name: u64,
    ask: impl Fn(u32) -> Option<Collective> + Sync,
) -> Vec<Option<EnforcerError>> {
    as_ranks(planes, name, LONG, |rank, plane, enforcer| {
        let collective = ask(rank)?;
        let script = Arc::new(RankSchedule::single(&collective, 0));
        let part = enforcer.prepare(script).unwrap();
        let step = enforcer.begin(&part, 0).unwrap();
        let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
        enforcer.wait(ticket).err()
    })
}

#[test]
fn ranks_that_ask_for_different_things_are_told() {
    for planes in planes_of_all_kinds(3) {
        let reduce = |elements| Collective::all_reduce(3, elements).unwrap();
        let sizes = asked(&planes, 1, |rank| Some(reduce(if rank == 1 { 900 } else { 1000 })));
        let kinds = asked(&planes, 2, |rank| {
            Some(if rank == 2 { Collective::all_gather(3, 1000).unwrap() } else { reduce(1000) })
        });
        for errors in [sizes, kinds] {
            let errors: Vec<EnforcerError> = errors.into_iter().map(Option::unwrap).collect();
            let is_typed = |error: &EnforcerError| {
                matches!(
                    error,
                    EnforcerError::Diverged { .. }
                        | EnforcerError::Reported { .. }
                        | EnforcerError::Lost { .. }
                )
            };
            assert!(errors.iter().all(is_typed), "{errors:?}");
            assert!(errors.iter().any(|error| matches!(error, EnforcerError::Diverged { .. })));
        }
    }
}

#[test]
fn a_rank_that_does_not_come_or_goes_is_named() {
    for planes in planes_of_all_kinds(3) {
        // This rank closes at once, while others wait for it.
        let reduce = Collective::all_reduce(3, 1000).unwrap();
        let gone = asked(&planes, 1, |rank| (rank != 2).then(|| reduce.clone()));
        assert!(gone[2].is_none());
        for error in gone[..2].iter().map(|error| error.as_ref().unwrap()) {
            let is_named = match error {
                EnforcerError::Lost { rank, .. } | EnforcerError::Reported { rank, .. } => {
                    *rank < 3
                }
                _ => false,
            };
            assert!(is_named, "{error}");
        }
        // This rank joins and submits nothing until the others have given up.
        let given_up = Barrier::new(3);
        let late = as_ranks(&planes, 2, Duration::from_millis(300), |rank, plane, enforcer| {
            if rank == 2 {
                given_up.wait();
                return None;
            }
            let part = enforcer.prepare(Arc::new(RankSchedule::single(&reduce, 1))).unwrap();
            let step = enforcer.begin(&part, 0).unwrap();
            let ticket = submit(enforcer, plane, &reduce, (step, 0)).unwrap();
            let error = enforcer.wait(ticket).err();
            given_up.wait();
            error
        });
        assert!(matches!(late[0], Some(EnforcerError::Late { rank: 2, .. })), "{late:?}");
        assert!(late[1].as_ref().unwrap().to_string().contains("for rank 2"), "{late:?}");
        // This rank never joins.
        let hosts: Vec<HostId> = (0..3).map(HostId).collect();
        let ways = [TeamChannel { channel: Channel(1), rate: None }];
        let name = TransferTag(3);
        let (rank, hosts, ways) = (0, &hosts[..], &ways[..]);
        let team = Team {
            plane: &planes[0],
            name,
            rank,
            hosts,
            names: None,
            ways,
            timeout: Duration::from_secs(60),
            meeting: Duration::from_secs(60),
        };
        let began = Instant::now();
        let gone = base::Status::new(base::Code::Unavailable, "gone");
        planes[0].lose_peer(HostId(2), TransferTag(0), &gone);
        assert!(matches!(Enforcer::join(&team), Err(EnforcerError::Join { rank: 2, .. })));
        assert!(began.elapsed() < Duration::from_secs(10), "it is known to be lost");
    }
}

#[test]
fn what_a_rank_cannot_make_fails_for_all_and_the_next_goes_well() {
    for planes in planes_of_all_kinds(4) {
        let collective = Collective::all_reduce(4, 5000).unwrap();
        as_ranks(&planes, 1, Duration::from_secs(20), |rank, plane, enforcer| {
            let part = enforcer.prepare(Arc::new(RankSchedule::single(&collective, 0))).unwrap();
            let elements = Elements::new(DType::F32, Reduction::Sum).unwrap();
            let step = enforcer.begin(&part, 0).unwrap();
            let work = run::enforcer::CollectiveBuffer::of(plane.memory(20_000).unwrap());
            let poison = (rank == 1).then(|| "INTERNAL: layer 3 has failed".to_owned());
            let ticket = enforcer.submit((step, 0), (&collective, elements), work, poison).unwrap();
            let error = enforcer.wait(ticket).unwrap_err();
            assert_eq!(error, EnforcerError::Poisoned("INTERNAL: layer 3 has failed".to_owned()));
            let step = enforcer.begin(&part, 0).unwrap();
            let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
            check(enforcer, &RankSchedule::single(&collective, 0), ticket, (step, 0));
        });
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_harms_nobody() {
    for planes in planes_of_all_kinds(2) {
        let collective = Collective::all_reduce(2, 100).unwrap();
        as_ranks(&planes, 1, Duration::from_secs(20), |_, plane, enforcer| {
            let script = Arc::new(RankSchedule::single(&collective, 0));
            let part = enforcer.prepare(script.clone()).unwrap();
            let step = enforcer.begin(&part, 0).unwrap();
            let other = Collective::all_reduce(2, 101).unwrap();
            let error = submit(enforcer, plane, &other, (step, 0)).unwrap_err();
            assert!(matches!(error, EnforcerError::Different { operation: 0, .. }), "{error}");
            let error = submit(enforcer, plane, &collective, (step, 1)).unwrap_err();
            assert!(matches!(error, EnforcerError::Operation { operation: 1, .. }), "{error}");
            let error = submit(enforcer, plane, &collective, (step + 1, 0)).unwrap_err();
            assert!(matches!(error, EnforcerError::Step { .. }), "{error}");
            let ticket = submit(enforcer, plane, &collective, (step, 0)).unwrap();
            let error = submit(enforcer, plane, &collective, (step, 0)).unwrap_err();
            assert!(matches!(error, EnforcerError::Twice { .. }), "{error}");
            check(enforcer, &script, ticket, (step, 0));
            let three = Collective::all_reduce(3, 100).unwrap();
            let error = enforcer.prepare(Arc::new(RankSchedule::single(&three, 0))).unwrap_err();
            assert!(matches!(error, EnforcerError::Rank { .. }), "{error}");
            let error =
                enforcer.prepare(Arc::new(RankSchedule::single(&collective, 5))).unwrap_err();
            assert!(matches!(error, EnforcerError::Channels { found: 6, channels: 2 }), "{error}");
            assert!(Elements::new(DType::C128, Reduction::Sum).is_err());
        });
    }
}

#[test]
fn what_a_channel_no_longer_carries_goes_by_another() {
    const OPERATIONS: u32 = 6;
    let planes = planes(3);
    let cables: Vec<Cable> = planes.iter().map(|plane| Cable::to(&plane.channels()[1])).collect();
    for (one, plane) in planes.iter().enumerate() {
        for (other, peer) in planes.iter().enumerate().filter(|(other, _)| *other != one) {
            let ways = format!("{},{}", peer.channels()[0], cables[other].address);
            plane.add_peer(HostId(other as u32), &ways);
        }
    }
    let collective = Collective::all_reduce(3, 600_000).unwrap();
    let script = Arc::new(RankSchedule::series(&collective, 1, OPERATIONS));
    as_ranks(&planes, 1, Duration::from_secs(20), |rank, plane, enforcer| {
        let part = enforcer.prepare(script.clone()).unwrap();
        let step = enforcer.begin(&part, 0).unwrap();
        let submit = |operation| submit(enforcer, plane, &collective, (step, operation));
        let tickets: Vec<_> = (0..OPERATIONS).map(|number| submit(number).unwrap()).collect();
        for (number, ticket) in (0..).zip(tickets) {
            check(enforcer, &script, ticket, (step, number));
            if rank == 0 && number == 1 {
                cables.iter().for_each(Cable::cut);
            }
        }
    });
}
