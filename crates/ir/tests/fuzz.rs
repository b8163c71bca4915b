//! Damaged texts of programs, which hosts send as clients' compilers wrote them, and of the files of
//! steps and placements.

use fuzzing::damaged_text;
use ir::{CollectiveOp, Placement, Program, StepGraph};
use proptest::prelude::*;

const PROGRAMS: [&str; 3] = [
    include_str!("golden/data_parallel.fw"),
    include_str!("golden/experts.fw"),
    include_str!("golden/pipeline.fw"),
];
const STEPS: [&str; 3] = [
    include_str!("golden/data_parallel.step"),
    include_str!("golden/experts.step"),
    include_str!("golden/pipeline.step"),
];
const PLACEMENT: &str = "placement of @step on @\"two racks\"\nat [0..4,7,5,6]\n";
const COLLECTIVE: &str = "all_reduce 64 of 1bytes on [0..2]";

fn one_of(texts: &[&str], seed: u64) -> String {
    texts[seed as usize % texts.len()].to_owned()
}

proptest! {
    #[test]
    fn fuzz_programs(text in damaged_text(|seed| one_of(&PROGRAMS, seed))) {
        let Ok(program) = Program::parse(&text) else { return Ok(()) };
        let printed = program.to_string();
        prop_assert_eq!(&Program::parse(&printed).expect(&printed), &program);
        if program.verify().is_ok() {
            let _ = ir::lower(&program);
        }
    }

    #[test]
    fn fuzz_steps(text in damaged_text(|seed| one_of(&STEPS, seed))) {
        let Ok(step) = StepGraph::parse(&text) else { return Ok(()) };
        let printed = step.to_string();
        prop_assert_eq!(StepGraph::parse(&printed).expect(&printed), step.clone());
        let _ = step.verify();
    }

    #[test]
    fn fuzz_placements(text in damaged_text(|_| PLACEMENT.to_owned())) {
        if let Ok(placement) = Placement::parse(&text) {
            let printed = placement.to_string();
            prop_assert_eq!(Placement::parse(&printed).expect(&printed), placement);
        }
    }

    #[test]
    fn fuzz_collectives(text in damaged_text(|_| COLLECTIVE.to_owned())) {
        let _ = CollectiveOp::parse(&text).map(|collective| collective.to_string());
    }
}

#[test]
fn what_is_damaged_is_sound_before() {
    PROGRAMS.iter().for_each(|text| Program::parse(text).unwrap().verify().unwrap());
    STEPS.iter().for_each(|text| StepGraph::parse(text).unwrap().verify().unwrap());
    Placement::parse(PLACEMENT).unwrap();
    CollectiveOp::parse(COLLECTIVE).unwrap();
}
