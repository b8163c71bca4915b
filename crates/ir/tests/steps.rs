//! Step graphs: round-trip of the text format, orders, and lowering of programs.

use std::path::{Path, PathBuf};

use base::{Bytes, Nanos};
use ir::{
    Collective, Dependency, Devices, Program, StepGraph, StepGraphError, StepNode, StepOp, lower,
};
use proptest::prelude::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Compares each program's step graph with its golden file; `FAIRWAY_GOLDEN=write` updates the files.
#[test]
fn programs_come_to_the_steps_that_lie_beside_them() {
    for name in ["pipeline", "data_parallel", "experts"] {
        let text = std::fs::read_to_string(golden(&format!("{name}.fw"))).unwrap();
        let program = Program::parse(&text).unwrap();
        program.verify().unwrap();
        assert_eq!(program.to_string(), text, "a program is printed as it was read");
        let step = lower(&program);
        step.verify().unwrap();
        let path = golden(&format!("{name}.step"));
        if std::env::var("FAIRWAY_GOLDEN").is_ok_and(|mode| mode == "write") {
            std::fs::write(&path, step.to_string()).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap();
        assert_eq!(step.to_string(), expected, "{name}");
        assert_eq!(StepGraph::parse(&expected).unwrap(), step);
    }
}

#[test]
fn what_is_only_passed_on_is_followed_through_steps() {
    let program = |carried: &str| {
        let text = format!(
            "program @p\n\
             function @f 10ns\n\
             input %0: float32[2] on [0]{carried}\n\
             input %1: float32[2] on [0] carried from %2\n\
             node %2: float32[2] on [0] = call @f (%0)\n\
             return (%2)\n"
        );
        let program = Program::parse(&text).unwrap();
        program.verify().unwrap();
        let on = lower(&program).dependencies(0).to_vec();
        on.iter().map(|on| (on.node, on.steps_before)).collect::<Vec<_>>()
    };
    // Without a dependency, the node begins once its device has ended the previous step.
    assert_eq!(program(""), [(0, 1)]);
    // It reads a value that was produced two steps before.
    assert_eq!(program(" carried from %1"), [(0, 1), (0, 2)]);
}

#[test]
fn carried_values_must_be_of_the_program_and_of_one_type() {
    for (carried, wrong) in [("%7", "value 7"), ("%2", "value 2")] {
        let text = format!(
            "program @p\nfunction @f 10ns\ninput %0: float32[2] on [0] carried from {carried}\n\
             node %1: float32[2] on [0], %2: float32[3] on [0] = call @f (%0)\nreturn (%1)\n"
        );
        let error = Program::parse(&text).unwrap().verify().unwrap_err().to_string();
        assert!(error.contains(wrong) && error.contains("input 0"), "{error}");
    }
}

#[test]
fn steps_that_make_no_sense_are_named() {
    let step = |nodes: &str| StepGraph::parse(&format!("step @s on 2 devices\n{nodes}")).unwrap();
    let error = |nodes: &str| step(nodes).verify().unwrap_err();
    let compute = "#0 = compute 1ns on [0]";
    assert_eq!(
        error("#0 = compute 1ns on [2]"),
        StepGraphError::Device { node: 0, found: 2, devices: 2 }
    );
    assert_eq!(error("#0 = compute 1ns on [1,1]"), StepGraphError::Twice { node: 0, found: 1 });
    assert_eq!(
        error(&format!("{compute} after (#0)")),
        StepGraphError::Dependency { node: 0, found: 0, nodes: 1 }
    );
    assert_eq!(
        error(&format!("{compute} after (#1)\n#1 = compute 1ns on [1] after (#0)")),
        StepGraphError::Cycle { node: 0 }
    );
    step(&format!("{compute} after (#0@-1)")).verify().unwrap();
    let huge = StepGraph::of_parts("s", u32::MAX, u32::MAX).verify().unwrap_err();
    assert!(matches!(huge, StepGraphError::Devices { .. }));
    for wrong in [
        "",
        "step @s",
        "step @s on 2 devices\n#1 = compute 1ns on [0]",
        "step @s on 2 devices\n#0 = gossip 1 of 4bytes on [0]",
        "step @s on 2 devices\n#0 = broadcast 1 root 2 of 4bytes on [0,1]",
        "step @s on 2 devices\n#0 = all_to_all (1, 2) of 4bytes on [0,1]",
        "step @s on 2 devices\n#0 = compute 1ns on [0] later",
    ] {
        assert!(StepGraph::parse(wrong).is_err(), "{wrong}");
    }
}

fn op() -> impl Strategy<Value = StepOp> {
    let devices = Just((0..6_u32).collect::<Vec<_>>()).prop_shuffle();
    let drawn = (devices, 1..7_usize, 0..8_u32, 0..1000_u64, 1..9_u32);
    drawn.prop_map(|(mut devices, count, kind, size, element)| {
        devices.truncate(count);
        let (ranks, root) = (count as u32, size as u32 % count as u32);
        let collective = match kind {
            0 => return StepOp::compute(devices, Nanos(size)),
            1 => {
                let (source, target) = (devices[0], devices[count - 1]);
                return StepOp::Transfer { source, target, size: Bytes(size) };
            }
            2 => Collective::all_reduce(ranks, size),
            3 => Collective::reduce_scatter(ranks, size),
            4 => Collective::all_gather(ranks, size),
            5 => Collective::broadcast(ranks, size, root),
            6 => Collective::reduce(ranks, size, root),
            _ => Collective::all_to_all(ranks, size),
        };
        let (collective, devices) = (collective.unwrap(), Devices::from(devices));
        StepOp::Collective(Box::new(ir::CollectiveOp {
            collective,
            devices,
            element_bytes: element,
        }))
    })
}

fn steps() -> impl Strategy<Value = StepGraph> {
    let after = prop::collection::vec((any::<prop::sample::Index>(), 0..3_u32), 0..4);
    let node = ("[ -~]{0,6}", op(), after, prop::option::of(any::<u64>()));
    (prop::collection::vec(node, 1..20), 1..3_u32).prop_map(|(nodes, parts)| {
        let mut step = StepGraph::of_parts("any \"name\"", 6, parts);
        for (number, (name, op, after, priority)) in nodes.into_iter().enumerate() {
            let on = after.into_iter().filter_map(|(which, steps_before)| {
                let is_there = number > 0 || steps_before > 0;
                let node = which.index(number.max(1)) as u32;
                is_there.then_some(Dependency { node, steps_before })
            });
            let on: Vec<Dependency> = on.collect();
            step.add_node(StepNode { name: name.into(), op, priority }, &on);
        }
        step
    })
}

proptest! {
    #[test]
    fn steps_are_read_as_they_are_printed(step in steps()) {
        prop_assert_eq!(StepGraph::parse(&step.to_string()).unwrap(), step);
    }

    #[test]
    fn orders_have_each_node_behind_what_it_depends_on(step in steps()) {
        let order = step.order().unwrap();
        let mut places = vec![usize::MAX; step.len()];
        for (place, &node) in order.iter().enumerate() {
            prop_assert_eq!(places[node as usize], usize::MAX);
            places[node as usize] = place;
        }
        let successors = step.successors();
        for node in 0..step.len() as u32 {
            for on in step.predecessors(node) {
                prop_assert!(places[on as usize] < places[node as usize]);
                prop_assert!(successors.of(on).contains(&node));
            }
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(step @s on 2 devices\n)?[ -~\n]{0,200}") {
        let _ = StepGraph::parse(&text).map(|step| step.verify());
    }
}
