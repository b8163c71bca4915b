//! Whatever operators are applied, the transfers together implement the collective.

use ir::{Collective, CollectiveKind};
use plan::{Form, Motif, OrderedMotif, RankTransfer};
use proptest::prelude::*;

/// Initial vectors of ranks: a distinct number for each element, so that sums reveal their terms.
fn vectors(collective: &Collective) -> Vec<Vec<u128>> {
    let value = |rank: u32, place: u64| u128::from(place) * 1_000_003 + (1 << rank);
    let ranks = 0..collective.ranks();
    ranks
        .map(|rank| {
            let work = collective.work(rank);
            let has = |place: &u64| match collective.kind() {
                CollectiveKind::AllGather => collective.block(rank).contains(place),
                CollectiveKind::Broadcast { root } => rank == *root,
                CollectiveKind::AllToAll { .. } => *place < collective.result(rank).start,
                _ => true,
            };
            (0..work).map(|place| if has(&place) { value(rank, place) } else { 0 }).collect()
        })
        .collect()
}

/// The expected result, directly from the definition of the collective.
fn expected(collective: &Collective) -> Vec<Vec<u128>> {
    let before = vectors(collective);
    let ranks = collective.ranks();
    let sums: Vec<u128> = match collective.kind() {
        CollectiveKind::AllToAll { .. } => Vec::new(),
        _ => (0..collective.elements() as usize)
            .map(|place| before.iter().map(|vector| vector[place]).sum())
            .collect(),
    };
    let result = |rank: u32| -> Vec<u128> {
        let range = collective.result(rank);
        match collective.kind() {
            CollectiveKind::AllToAll { .. } => (0..ranks)
                .flat_map(|source| {
                    let (read, _, size) = collective.pair(source, rank);
                    before[source as usize][read as usize..(read + size) as usize].to_vec()
                })
                .collect(),
            _ => sums[range.start as usize..range.end as usize].to_vec(),
        }
    };
    (0..ranks).map(result).collect()
}

/// Executes motifs in a random order that respects their dependencies, with interleaved rounds.
fn carried_out(collective: &Collective, motifs: &[OrderedMotif], mut seed: u64) -> Vec<Vec<u128>> {
    let mut vectors = vectors(collective);
    if let CollectiveKind::AllToAll { .. } = collective.kind() {
        for rank in 0..collective.ranks() {
            let (read, write, size) = collective.pair(rank, rank);
            let own = read as usize..(read + size) as usize;
            vectors[rank as usize].copy_within(own, write as usize);
        }
    }
    let mut left: Vec<std::collections::VecDeque<Vec<RankTransfer>>> =
        motifs.iter().map(|one| one.motif.rounds(collective).into()).collect();
    let mut begun = vec![false; motifs.len()];
    loop {
        let is_done = |number: u32| begun[number as usize] && left[number as usize].is_empty();
        let open: Vec<usize> = (0..motifs.len())
            .filter(|&number| !begun[number] || !left[number].is_empty())
            .filter(|&number| motifs[number].after.iter().all(|&after| is_done(after)))
            .collect();
        if open.is_empty() {
            break;
        }
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = open[(seed >> 33) as usize % open.len()];
        begun[number] = true;
        let Some(round) = left[number].pop_front() else { continue };
        let read = |transfer: &RankTransfer| {
            let range = transfer.read as usize..(transfer.read + transfer.count) as usize;
            vectors[transfer.source as usize][range].to_vec()
        };
        let moved: Vec<Vec<u128>> = round.iter().map(read).collect();
        for (transfer, values) in round.iter().zip(moved) {
            assert_ne!(transfer.source, transfer.target);
            for (place, value) in (transfer.write as usize..).zip(values) {
                let there = &mut vectors[transfer.target as usize][place];
                *there = if transfer.sums { *there + value } else { value };
            }
        }
    }
    assert!(begun.iter().all(|&begun| begun), "all are carried out");
    let results = (0..collective.ranks()).zip(vectors).map(|(rank, vector)| {
        let range = collective.result(rank);
        vector[range.start as usize..range.end as usize].to_vec()
    });
    results.collect()
}

/// Number of elements that are sent between ranks.
fn moved(collective: &Collective, motifs: &[OrderedMotif]) -> u64 {
    let rounds = motifs.iter().flat_map(|one| one.motif.rounds(collective));
    rounds.flatten().map(|transfer| transfer.count).sum()
}

#[derive(Clone, Copy, Debug)]
enum Operator {
    Segment(u64),
    Spline(u32),
    Ring,
    Direct,
    OneShot,
    Tree(u32),
    Hierarchical(u32),
}

impl Operator {
    fn apply(self, motif: &Motif) -> Form {
        match self {
            Operator::Segment(parts) => motif.segment(parts),
            Operator::Spline(most) => motif.spline(most),
            Operator::Ring => motif.ring(),
            Operator::Direct => motif.direct(),
            Operator::OneShot => motif.one_shot(),
            Operator::Tree(width) => motif.tree(width),
            Operator::Hierarchical(width) => motif.hierarchical(width),
        }
    }
}

fn operators() -> impl Strategy<Value = Vec<(Operator, bool)>> {
    let one = prop_oneof![
        (1..5_u64).prop_map(Operator::Segment),
        (1..5_u32).prop_map(Operator::Spline),
        Just(Operator::Ring),
        Just(Operator::Direct),
        Just(Operator::OneShot),
        (2..5_u32).prop_map(Operator::Tree),
        (2..5_u32).prop_map(Operator::Hierarchical),
    ];
    prop::collection::vec((one, any::<bool>()), 0..5)
}

fn collectives() -> impl Strategy<Value = Collective> {
    (1..10_u32, 0..70_u64, 0..7_u32, any::<prop::sample::Index>(), any::<u64>()).prop_map(
        |(ranks, elements, kind, root, seed)| {
            let root = root.index(ranks as usize) as u32;
            let made = match kind {
                0 => Collective::all_reduce(ranks, elements),
                1 => Collective::reduce_scatter(ranks, elements),
                2 => Collective::all_gather(ranks, elements),
                3 => Collective::broadcast(ranks, elements, root),
                4 => Collective::reduce(ranks, elements, root),
                5 => Collective::all_to_all(ranks, elements),
                _ => {
                    let pairs = u64::from(ranks) * u64::from(ranks);
                    let size = |pair: u64| (seed ^ pair.wrapping_mul(0x9E37_79B9)) >> 7 & 7;
                    Collective::all_to_all_of(ranks, (0..pairs).map(size).collect())
                }
            };
            made.expect("it makes sense")
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn forms_do_what_collectives_do(
        collective in collectives(),
        operators in operators(),
        seed in any::<u64>(),
    ) {
        let mut form = Form::of(&collective);
        for (operator, everywhere) in operators {
            // On all motifs, or on some only: segments need not be split alike.
            form = form.map(|motif| {
                let is_chosen = everywhere || motif.area.number % 2 == motif.part.number % 2;
                if is_chosen { operator.apply(motif) } else { motif.clone().into() }
            });
        }
        let motifs = form.motifs();
        for (number, one) in motifs.iter().enumerate() {
            prop_assert!(one.after.iter().all(|&after| (after as usize) < number));
        }
        prop_assert_eq!(carried_out(&collective, &motifs, seed), expected(&collective));
    }

    #[test]
    fn segments_and_splines_move_as_much(
        collective in collectives(),
        parts in 1..6_u64,
        most in 1..6_u32,
    ) {
        let whole = Form::of(&collective);
        let cut = whole.map(|motif| motif.segment(parts)).map(|motif| motif.spline(most));
        let (before, after) = (moved(&collective, &whole.motifs()), moved(&collective, &cut.motifs()));
        prop_assert_eq!(before, after);
    }
}

#[test]
fn rings_move_what_they_must() {
    let collective = Collective::all_reduce(8, 800).unwrap();
    let ring = Form::of(&collective).map(Motif::ring);
    assert_eq!(moved(&collective, &ring.motifs()), 2 * 7 * 800);
    let groups = Form::of(&collective).map(|motif| motif.hierarchical(4));
    assert_eq!(moved(&collective, &groups.motifs()), 2 * 2 * 3 * 800 + 4 * 2 * 200);
    let tree = Form::of(&collective).map(|motif| motif.tree(2)).map(|motif| motif.tree(2));
    assert_eq!(moved(&collective, &tree.motifs()), 2 * (4 + 2) * 800 + 2 * 800);
    let all_to_all = Collective::all_to_all(8, 800).unwrap();
    assert_eq!(moved(&all_to_all, &Form::of(&all_to_all).motifs()), 8 * 700);
    let permuted = Collective::permute(4, 10, &[(0, 1), (1, 0), (3, 3)]).unwrap();
    assert_eq!(moved(&permuted, &Form::of(&permuted).motifs()), 20);
}

#[test]
fn what_makes_no_sense_is_refused() {
    assert!(Collective::all_reduce(0, 1).is_err());
    assert!(Collective::all_reduce(1 << 20, 1).is_err());
    assert!(Collective::all_gather(2, u64::MAX).is_err());
    assert!(Collective::broadcast(4, 1, 4).is_err());
    assert!(Collective::all_to_all_of(3, vec![1; 8].into()).is_err());
    assert!(Collective::all_to_all_of(1, vec![u64::MAX].into()).is_err());
    assert!(Collective::permute(2, 1, &[(0, 2)]).is_err());
    assert!(Collective::permute(0, 1, &[]).is_err());
}
