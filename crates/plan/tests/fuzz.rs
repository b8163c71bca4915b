//! Damaged schedules: ranks get them from rank 0, and the controller from hosts.

use fuzzing::damaged_text;
use ir::Collective;
use plan::RankSchedule;
use proptest::prelude::*;

/// Ranks whose part of a schedule is looked at.
const RANKS: u32 = 4;

fn valid(seed: u64) -> RankSchedule {
    let (ranks, elements) = (RANKS, 10 + seed % 3);
    let collective = match seed % 6 {
        0 => Collective::all_reduce(ranks, elements),
        1 => Collective::reduce_scatter(ranks, elements),
        2 => Collective::all_gather(ranks, elements),
        3 => Collective::broadcast(ranks, elements, 1),
        4 => Collective::reduce(ranks, elements, 2),
        _ => Collective::all_to_all(ranks, elements),
    };
    RankSchedule::series(&collective.unwrap(), (seed >> 8) as u32 % 2, 1 + (seed >> 16) as u32 % 2)
}

proptest! {
    #[test]
    fn fuzz_schedules(text in damaged_text(|seed| valid(seed).print())) {
        let Ok(script) = RankSchedule::parse(&text) else { return Ok(()) };
        for rank in 0..=RANKS {
            prop_assert_eq!(script.part(rank).len(), script.operations.len());
        }
        prop_assert_eq!(RankSchedule::parse(&script.print()).unwrap(), script);
    }
}

#[test]
fn what_is_damaged_is_sound_before() {
    (0..6).for_each(|seed| valid(seed).verify().unwrap());
}
