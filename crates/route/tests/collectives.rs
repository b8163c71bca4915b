//! Collectives: results are correct, and schedules are close to the bound that links set.

use base::{Address, BitsPerSecond, Bytes, Nanos, Random, Ticks, VertexId};
use proptest::prelude::*;
use route::{
    Fault, RouteError, RoutePlan, RoutedCollective, Timing, all_gather, all_reduce, all_reduce_on,
    all_to_all, broadcast, reduce_scatter, verify,
};
use topology::{
    Cable, Dragonfly, Fabric, Link, LinkModel, Network, RotationalSymmetry, Topology, torus,
};

fn fabric(name: &str) -> Fabric {
    let topology: Topology = name.parse().expect("it can be");
    topology.links().expect("it is of links").clone()
}

fn timing() -> Timing {
    Timing::default()
}

/// Memories of chips, with one number per vector.
type Memories = Vec<Vec<i64>>;

/// Executes a plan vector by vector in time order, on numbers; independent of how the plan was made and
/// of rotational symmetry.
fn carry_out(network: &Network, plan: &RoutePlan, memories: &mut Memories) {
    let whole = plan.whole(network);
    verify(network, &whole).expect("what is written down holds too");
    let mut events = Vec::new();
    for train in &whole.schedule.trains {
        let transfer = whole.tasks[train.task as usize].transfer().expect("nothing computes");
        let pace = whole.schedule.timing.pace(network, train.links());
        let (first, last) = (train.hops[0], train.hops[train.hops.len() - 1]);
        let came = last.start + whole.schedule.timing.hop(network.link(last.link));
        for vector in 0..train.count {
            let later = Ticks(vector * pace.0);
            let key = (train.task, train.first + vector);
            events.push((came + later, 0, key, transfer));
            events.push((first.start + later, 1, key, transfer));
        }
    }
    events.sort_by_key(|&(when, kind, key, _)| (when, kind, key));
    let mut under_way = std::collections::BTreeMap::new();
    for (_, kind, key, transfer) in events {
        let place = |start: Address| start.0 as usize + key.1 as usize;
        if kind == 1 {
            let value = memories[transfer.source.0 as usize][place(transfer.read)];
            under_way.insert(key, value);
            continue;
        }
        let value = under_way.remove(&key).expect("what comes has been sent");
        let there = &mut memories[transfer.target.0 as usize][place(transfer.write)];
        *there = if transfer.sums { *there + value } else { value };
    }
}

/// Returns a chip's initial value of a shard.
fn own(chip: u32, of: u32, vector: u64) -> i64 {
    i64::from(chip) * 1_000_003 + i64::from(of) * 1009 + vector as i64
}

struct Run<'a> {
    network: &'a Network,
    collective: &'a RoutedCollective,
    memories: Memories,
}

impl<'a> Run<'a> {
    /// Fills in the initial values of chips, and executes the plan.
    fn new(
        network: &'a Network,
        collective: &'a RoutedCollective,
        has: impl Fn(u32, u32) -> bool,
    ) -> Self {
        verify(network, &collective.plan).expect("the plan holds");
        let layout = &collective.layout;
        let size = layout.vectors() as usize;
        let mut run = Self { network, collective, memories: vec![] };
        run.memories = vec![vec![0; size]; network.endpoints() as usize];
        for chip in 0..network.endpoints() {
            for (of, vector) in
                (0..layout.shards).flat_map(|of| (0..layout.shard).map(move |v| (of, v)))
            {
                if !has(chip, of) {
                    continue;
                }
                for start in &layout.inputs {
                    let place = run.place(*start, chip, of, vector);
                    run.memories[chip as usize][place] = own(chip, of, vector);
                }
            }
        }
        carry_out(network, &collective.plan, &mut run.memories);
        run
    }

    fn circle(&self) -> &RotationalSymmetry {
        &self.collective.plan.circle
    }

    fn place(&self, start: Address, chip: u32, of: u32, vector: u64) -> usize {
        let layout = &self.collective.layout;
        let place = layout.place(self.circle(), VertexId(chip), VertexId(of));
        (u64::from(start.0) + place + vector) as usize
    }

    fn result(&self, chip: u32, of: u32, vector: u64) -> i64 {
        let starts = self.collective.layout.results.iter();
        starts.map(|start| self.memories[chip as usize][self.place(*start, chip, of, vector)]).sum()
    }

    /// Checks the values that chips have of each shard.
    fn check(&self, expected: impl Fn(u32, u32, u64) -> Option<i64>) {
        let layout = &self.collective.layout;
        for chip in 0..self.network.endpoints() {
            for of in 0..layout.shards {
                for vector in 0..layout.shard {
                    if let Some(expected) = expected(chip, of, vector) {
                        let found = self.result(chip, of, vector);
                        assert_eq!(found, expected, "vector {vector} of {of} on chip {chip}");
                    }
                }
            }
        }
    }
}

fn check_gather(network: &Network, shard: Bytes) {
    let found = all_gather(network, shard, timing()).expect("it can be");
    let run = Run::new(network, &found, |chip, of| chip == of);
    run.check(|_, of, vector| Some(own(of, of, vector)));
}

fn check_reduce(network: &Network, found: &RoutedCollective, everywhere: bool) {
    let run = Run::new(network, found, |_, _| true);
    let chips = network.endpoints();
    run.check(|chip, of, vector| {
        let sum = || (0..chips).map(|other| own(other, of, vector)).sum();
        (everywhere || chip == of).then(sum)
    });
}

const FABRICS: [&str; 7] = [
    "dragonfly:8",
    "dragonfly:16",
    "dragonfly:24",
    "torus:3x4",
    "torus:2",
    "ring:5",
    "dragonfly:72",
];

#[test]
fn every_chip_gets_every_shard() {
    for name in FABRICS {
        for shard in [1, 320, 5000] {
            check_gather(fabric(name).network(), Bytes(shard));
        }
    }
}

#[test]
fn sums_are_of_all_chips() {
    for name in FABRICS {
        let fabric = fabric(name);
        for shard in [1, 320, 5000] {
            let scattered = reduce_scatter(fabric.network(), Bytes(shard), timing());
            check_reduce(fabric.network(), &scattered.expect("it can be"), false);
            let reduced = all_reduce(fabric.network(), Bytes(8 * shard), timing());
            check_reduce(fabric.network(), &reduced.expect("it can be"), true);
        }
    }
}

#[test]
fn sums_by_stages_are_of_all_chips() {
    for chips in [8, 16, 40, 136] {
        let dragonfly = Dragonfly::new(chips, LinkModel::default()).expect("it can be");
        for tensor in [320, 640, 20_000] {
            let found = all_reduce_on(&dragonfly, Bytes(tensor), timing()).expect("it can be");
            check_reduce(dragonfly.network(), &found, true);
        }
    }
}

#[test]
fn one_tensor_comes_to_all() {
    for name in FABRICS {
        let fabric = fabric(name);
        let root = fabric.network().endpoints() / 2;
        let found = broadcast(fabric.network(), VertexId(root), Bytes(9000), timing());
        let found = found.expect("it can be");
        assert_eq!(found.layout.shards, 1);
        let run = Run::new(fabric.network(), &found, |chip, _| chip == root);
        run.check(|_, of, vector| Some(own(root, of, vector)));
    }
}

#[test]
fn every_chip_gets_its_block_of_every_chip() {
    for name in FABRICS.iter().chain(&["fattree:4", "cluster:2x3"]) {
        let fabric = fabric(name);
        for block in [1, 3000] {
            let found = all_to_all(&fabric, Bytes(block), timing()).expect("it can be");
            let run = Run::new(fabric.network(), &found, |_, _| true);
            run.check(|chip, of, vector| (chip != of).then(|| own(of, chip, vector)));
        }
    }
}

/// Returns how long every chip's links take to receive `vectors`.
fn injection(network: &Network, vectors: u64) -> f64 {
    let links = network.into(VertexId(0));
    let rate: f64 = links.iter().map(|&l| 1.0 / timing().slot(network.link(l)).0 as f64).sum();
    vectors as f64 / rate
}

/// Returns how long a node's external links take to send its chips' data for other nodes.
fn cut(dragonfly: &Dragonfly, block: u64) -> f64 {
    let network = dragonfly.network();
    let leaves =
        |link: &&Link| dragonfly.node_of(link.source) == 0 && dragonfly.node_of(link.target) != 0;
    let links = network.links().iter().filter(leaves).count();
    let chips = u64::from(network.endpoints());
    let slot = timing().slot(&network.links()[0]).0;
    (8 * (chips - 8) * block * slot) as f64 / links.max(1) as f64
}

#[test]
fn links_are_full_to_three_percent() {
    for chips in [8, 72, 264] {
        let dragonfly = Dragonfly::new(chips, LinkModel::default()).expect("it can be");
        let network = dragonfly.network();
        let shard = Bytes((64_u64 << 20).div_ceil(u64::from(chips)));
        let vectors = timing().vectors(shard);
        let bound = injection(network, vectors * u64::from(chips - 1));
        let check = |found: Result<RoutedCollective, RouteError>, bound: f64, what: &str| {
            let found = found.expect("it can be");
            verify(network, &found.plan).expect("the plan holds");
            let part = bound / found.plan.end().0 as f64;
            assert!(part > 0.97 && part <= 1.0, "{what}: {part} of the bound on {chips} chips");
        };
        check(all_gather(network, shard, timing()), bound, "all-gather");
        check(reduce_scatter(network, shard, timing()), bound, "reduce-scatter");
        check(all_reduce(network, Bytes(64 << 20), timing()), 2.0 * bound, "all-reduce");
        let bound = bound.max(cut(&dragonfly, vectors));
        let fabric = Fabric::Dragonfly(Box::new(dragonfly.clone()));
        check(all_to_all(&fabric, shard, timing()), bound, "all-to-all");
    }
}

/// Source: the multi-TSP system §5.6.
#[test]
fn three_hops_reduce_a_vector_over_256_chips() {
    let dragonfly = Dragonfly::new(256, LinkModel::default()).expect("it can be");
    let found = all_reduce_on(&dragonfly, Bytes(320), timing()).expect("it can be");
    let nanos = timing().nanos(found.plan.end());
    assert!((nanos - (3.0 * 722.0 + 26.24)).abs() < 0.01, "{nanos}");
}

#[test]
fn ten_thousand_chips_are_planned_as_one_rack() {
    let fabric = fabric("dragonfly:10440");
    let shard = Bytes(6400);
    let network = fabric.network();
    let bound = injection(network, timing().vectors(shard) * 10_439);
    let check = |found: Result<RoutedCollective, RouteError>, least: f64| {
        let found = found.expect("it can be");
        assert_eq!(found.plan.circle.turns(), 145);
        verify(network, &found.plan).expect("the plan holds");
        let part = bound / found.plan.end().0 as f64;
        assert!(part > least, "{part}");
    };
    check(all_gather(network, shard, timing()), 0.95);
    check(all_reduce(network, Bytes(10_440 * 6400), timing()), 0.475);
    // Links between nodes of a rack are the bottleneck: 14.11 of the 137.5 GB/s of a chip's links.
    check(all_to_all(&fabric, shard, timing()), 0.95 * 14.11 / 137.5);
}

#[test]
fn what_cannot_be_is_refused() {
    let node = fabric("dragonfly:8");
    let node = node.network();
    let large = Bytes(1 << 30);
    assert!(matches!(all_gather(node, large, timing()), Err(RouteError::Memory { .. })));
    assert!(matches!(all_reduce(node, large, timing()), Err(RouteError::Memory { .. })));
    let outside = broadcast(node, VertexId(8), Bytes(1), timing());
    assert!(matches!(outside, Err(RouteError::Vertex { .. })));
    let large = all_to_all(&fabric("dragonfly:8"), large, timing());
    assert!(matches!(large, Err(RouteError::Memory { .. })));
    let many = torus(&[1000, 1000], LinkModel::default()).expect("it can be");
    let many = all_gather(&many, Bytes(1), timing());
    assert!(matches!(many, Err(RouteError::Memory { .. } | RouteError::Planning { .. })));
    let model = LinkModel::default();
    // A unidirectional ring has no reverse links.
    let links = torus(&[3], model).expect("it can be").links().to_vec();
    let ahead = links.into_iter().filter(|link| link.target.0 == (link.source.0 + 1) % 3);
    let ring = Network::new(3, 0, ahead.collect()).expect("it is connected");
    assert!(matches!(all_reduce(&ring, Bytes(320), timing()), Err(RouteError::Uneven)));
    check_gather(&ring, Bytes(3200));
}

const GB: f64 = 8e9;

fn both(one: u32, other: u32, rate: f64) -> [Link; 2] {
    let link = |source, target| Link {
        source: VertexId(source),
        target: VertexId(target),
        rate: BitsPerSecond(rate),
        latency: Nanos(500),
        cable: Cable::Rack,
    };
    [link(one, other), link(other, one)]
}

/// Nodes of 8 with a switch of 300 GB/s each, and a network card of 25 GB/s per endpoint, on one of two
/// networks in turn.
///
/// Source: `ForestColl`'s A100 topology.
fn boxes(count: u32) -> Network {
    let gpus = 8 * count;
    let (card, net) = (|gpu| gpus + count + gpu, |gpu| gpus + count + gpus + gpu % 2);
    let links = (0..gpus).flat_map(|gpu| {
        let inside = both(gpu, gpus + gpu / 8, 300.0 * GB);
        let out = both(gpu, card(gpu), 25.0 * GB);
        inside.into_iter().chain(out).chain(both(card(gpu), net(gpu), 25.0 * GB))
    });
    Network::new(gpus, count + gpus + 2, links.collect()).expect("it is connected")
}

/// Links of 50 GB/s between the 16 halves of 8 MI250, as (source, target, number of links).
///
/// Source: `ForestColl`, after AMD's diagram of the node.
const XGMI: [(u32, u32, u32); 28] = [
    (0, 1, 4),
    (0, 4, 2),
    (0, 8, 1),
    (1, 5, 1),
    (1, 9, 1),
    (1, 10, 1),
    (2, 3, 4),
    (2, 6, 1),
    (2, 9, 1),
    (2, 10, 1),
    (3, 7, 2),
    (3, 11, 1),
    (4, 5, 4),
    (4, 6, 1),
    (5, 6, 1),
    (5, 7, 1),
    (6, 7, 4),
    (8, 9, 4),
    (8, 12, 2),
    (9, 13, 1),
    (10, 11, 4),
    (10, 14, 1),
    (11, 15, 2),
    (12, 13, 4),
    (12, 14, 1),
    (13, 14, 1),
    (13, 15, 1),
    (14, 15, 4),
];

/// Two such nodes, on a network of 16 GB/s for each half.
fn mi250() -> Network {
    let inside = (0..2).flat_map(|one| {
        XGMI.into_iter().flat_map(move |(from, to, count)| {
            both(16 * one + from, 16 * one + to, f64::from(count) * 50.0 * GB)
        })
    });
    let between = (0..32).flat_map(|gpu| both(gpu, 32, 16.0 * GB));
    Network::new(32, 1, inside.chain(between).collect()).expect("it is connected")
}

/// Compares throughput with `ForestColl`'s optimum on the same network, in GB/s.
///
/// Shards are large, since the latency of a shard's first vector is the transfer time of megabytes.
fn check_near_the_optimum(network: &Network, best: f64) {
    // Vectors have no encoding overhead, and chips have 40 GiB.
    let timing = Timing { encoded: Bytes(320), buffer: (40 << 30) / 320, ..timing() };
    let shard = Bytes(32 << 20);
    let bytes = shard.0 * u64::from(network.endpoints());
    let found = all_gather(network, shard, timing).expect("it can be").plan;
    verify(network, &found).expect("the plan holds");
    let rate = bytes as f64 / timing.nanos(found.end());
    println!("all-gather: {rate:.1} of {best} GB/s");
    assert!((0.97..1.001).contains(&(rate / best)), "{rate:.1} of {best} GB/s");
    let found = all_reduce(network, Bytes(bytes), timing).expect("it can be").plan;
    verify(network, &found).expect("the plan holds");
    let rate = bytes as f64 / timing.nanos(found.end());
    println!("all-reduce: {rate:.1} of half of {best} GB/s");
    assert!((0.97..1.001).contains(&(rate / (best / 2.0))), "{rate:.1} of half of {best} GB/s");
}

#[test]
fn two_boxes_gather_and_add_up_as_fast_as_can_be() {
    check_near_the_optimum(&boxes(2), 346.7);
}

#[test]
fn four_boxes_gather_and_add_up_as_fast_as_can_be() {
    check_near_the_optimum(&boxes(4), 266.7);
}

#[test]
#[ignore = "takes a minute of a processor; `make test-all` runs it"]
fn boxes_of_mi250_gather_and_add_up_as_fast_as_can_be() {
    check_near_the_optimum(&mi250(), 354.1);
}

/// A ring of endpoints and switches with chords, all of arbitrary rates.
fn uneven(endpoints: u32, switches: u32, seed: u64) -> Network {
    let mut random = Random::of(&[seed]);
    let vertices = endpoints + switches;
    let rate = |random: &mut Random| (1 + random.below(12)) as f64 * 5.0 * GB;
    let around = if vertices == 2 { 0..1 } else { 0..vertices };
    let mut links: Vec<Link> =
        around.flat_map(|one| both(one, (one + 1) % vertices, rate(&mut random))).collect();
    for _ in 0..random.below(6) {
        let [one, other] = [(); 2].map(|()| random.below(u64::from(vertices)) as u32);
        if one != other {
            links.extend(both(one, other, rate(&mut random)));
        }
    }
    Network::new(endpoints, switches, links).expect("a ring is connected")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any links, all-gather and reductions are correct, and never faster than the least bandwidth
    /// into any endpoint allows.
    #[test]
    fn uneven_networks_gather_and_add_up(
        (endpoints, switches) in (2..7_u32, 0..3_u32),
        seed in any::<u64>(),
        vectors in 1..60_u64,
    ) {
        let network = uneven(endpoints, switches, seed);
        let shard = Bytes(vectors * 320);
        check_gather(&network, shard);
        let summed = reduce_scatter(&network, shard, timing()).expect("it can be");
        check_reduce(&network, &summed, false);
        let tensor = Bytes(shard.0 * u64::from(endpoints));
        let summed = all_reduce(&network, tensor, timing()).expect("it can be");
        check_reduce(&network, &summed, true);
        let root = seed as u32 % endpoints;
        let found = broadcast(&network, VertexId(root), shard, timing()).expect("it can be");
        let run = Run::new(&network, &found, |chip, _| chip == root);
        run.check(|_, of, vector| Some(own(root, of, vector)));
        let into = |vertex: u32| {
            let of = network.links().iter().filter(|link| link.target == VertexId(vertex));
            of.map(|link| link.rate.0).sum::<f64>() / GB
        };
        let least = (0..endpoints).map(into).fold(f64::INFINITY, f64::min);
        let found = all_gather(&network, shard, timing()).expect("it can be").plan;
        let others = shard.0 as f64 * f64::from(endpoints - 1);
        prop_assert!(others / timing().nanos(found.end()) <= least);
    }
}

#[test]
fn one_chip_and_no_bytes_need_nothing() {
    let one = Network::new(1, 0, vec![]).expect("it computes");
    check_gather(&one, Bytes(5));
    let alone = Network::new(1, 1, both(0, 1, GB).to_vec()).expect("a switch joins it to no other");
    assert_eq!(all_reduce(&one, Bytes(5), timing()).expect("it can be").plan.end(), Ticks(0));
    for found in [
        all_to_all(&fabric("dragonfly:8"), Bytes(0), timing()),
        all_gather(fabric("torus:3x3").network(), Bytes(0), timing()),
        all_reduce(fabric("switch:3").network(), Bytes(0), timing()),
        reduce_scatter(&alone, Bytes(5), timing()),
    ] {
        assert_eq!(found.expect("it can be").plan.end(), Ticks(0));
    }
}

#[test]
fn what_is_wrong_in_one_part_is_found() {
    let ring = fabric("torus:5");
    let network = ring.network();
    let good = all_reduce(network, Bytes(32_000), timing()).expect("it can be").plan;
    assert_eq!(good.circle.turns(), 5);
    let wrong = |change: &dyn Fn(&mut RoutePlan)| {
        let mut plan = good.clone();
        change(&mut plan);
        verify(network, &plan).expect_err("it is wrong")
    };
    let forwards = |plan: &RoutePlan| {
        let is_brought = |task: &route::Task| !task.transfer().expect("it is").from.is_empty();
        plan.tasks.iter().position(is_brought).expect("a ring forwards")
    };
    let early = wrong(&|plan| {
        let number = forwards(plan);
        plan.schedule.trains[number].hops[0].start = Ticks(0);
    });
    assert!(matches!(early, Fault::Early { .. } | Fault::Booked { .. }), "{early}");
    // A link of another part, to which this part's link rotates.
    let elsewhere = wrong(&|plan| {
        let mut again = plan.schedule.trains[0].clone();
        again.hops[0].link = plan.circle.turn_link(again.hops[0].link, 2);
        plan.schedule.trains.push(again);
    });
    assert!(matches!(elsewhere, Fault::Path { .. }), "{elsewhere}");
    let twice = wrong(&|plan| plan.schedule.trains.push(plan.schedule.trains[0].clone()));
    assert!(matches!(twice, Fault::Booked { .. }), "{twice}");
    for damage in [
        |plan: &mut RoutePlan| plan.schedule.trains[0].task = 1 << 20,
        |plan: &mut RoutePlan| plan.schedule.trains[0].hops[0].link.0 = 1 << 20,
        |plan: &mut RoutePlan| plan.schedule.trains[0].hops.clear(),
        |plan: &mut RoutePlan| plan.schedule.ends.truncate(3),
    ] {
        let unknown = wrong(&damage);
        assert!(matches!(unknown, Fault::Unknown { .. }), "{unknown}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn all_is_summed_whatever_the_torus(
        extents in prop::collection::vec(1_u32..5, 1..4),
        tensor in 1_u64..40_000,
    ) {
        let torus = torus(&extents, LinkModel::default()).expect("it can be");
        let found = all_reduce(&torus, Bytes(tensor), timing()).expect("it can be");
        check_reduce(&torus, &found, true);
        check_gather(&torus, Bytes(tensor / 16));
    }
}
