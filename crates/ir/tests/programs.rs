//! Programs: printing and parsing round-trip, and invalid programs are rejected.

use std::sync::Arc;

use base::{DeviceId, Nanos};
use ir::{
    ArraySpec, Collective, CollectiveOp, DType, Dims, Function, FunctionId, Node, NodeId,
    Operation, Partition, Program, ProgramError, Sharding, Sparse, ValueId, Work,
};
use proptest::prelude::*;

fn dims() -> impl Strategy<Value = Dims> {
    prop::collection::vec(0_i64..99, 0..4).prop_map(Dims::from_vec)
}

fn partition(devices: usize) -> impl Strategy<Value = Partition> {
    let tiled = (dims(), prop::collection::vec(0_u32..9, devices))
        .prop_map(|(counts, tiles)| Partition::Tiled { counts, tile_of: tiles.into() });
    let uneven = prop::collection::vec(dims(), devices)
        .prop_map(|shards| Partition::Uneven { shards: shards.into() });
    prop_oneof![
        Just(Partition::Replicated),
        tiled,
        dims().prop_map(|shard| Partition::Even { shard }),
        uneven
    ]
}

fn spec(devices: Arc<[DeviceId]>) -> impl Strategy<Value = ArraySpec> {
    let memory = prop::option::of("[ -~]{1,9}".prop_map(|name| Arc::from(name.as_str())));
    (prop::sample::select(DType::ALL), dims(), memory, partition(devices.len())).prop_map(
        move |(dtype, dims, memory, partition)| ArraySpec {
            dtype,
            dims,
            sharding: Sharding { devices: devices.clone(), memory, partition },
        },
    )
}

fn devices() -> impl Strategy<Value = Arc<[DeviceId]>> {
    prop::collection::vec(0_u32..9, 1..6)
        .prop_map(|numbers| numbers.into_iter().map(DeviceId).collect())
}

fn collective() -> impl Strategy<Value = CollectiveOp> {
    (0_u64..1 << 40, 1_u32..9, prop::collection::vec(0_u32..9, 1..4), 0..3).prop_map(
        |(elements, element_bytes, devices, kind)| {
            let ranks = devices.len() as u32;
            let collective = match kind {
                0 => Collective::all_reduce(ranks, elements),
                1 => Collective::all_gather(ranks, elements),
                _ => Collective::all_to_all(ranks, elements),
            };
            let (collective, devices) = (collective.unwrap(), devices.into());
            CollectiveOp { collective, devices, element_bytes }
        },
    )
}

/// What is known of functions, by their names.
fn functions() -> impl Strategy<Value = Vec<Function>> {
    let work = (any::<u64>(), any::<u64>()).prop_map(|(flops, bytes)| Work { flops, bytes });
    let timed = (prop::option::of(0_u64..1 << 50), prop::option::of(work));
    let collectives = prop::collection::vec(collective(), 0..3);
    let known = prop_oneof![
        timed.prop_map(|(time, work)| (time, work, None)),
        collectives.prop_map(|collectives| (None, None, Some(collectives))),
    ];
    prop::collection::btree_map("[ -~]{1,9}", known, 1..4).prop_map(|functions| {
        let functions = functions.into_iter();
        let function = |(name, (time, work, collectives)): (String, (Option<u64>, _, _))| {
            Function { name, time: time.map(Nanos), work, collectives }
        };
        functions.map(function).collect()
    })
}

/// Functions, inputs, and nodes of all kinds that read any earlier values; devices need not match.
fn program() -> impl Strategy<Value = Program> {
    let functions = functions();
    let value = || devices().prop_flat_map(spec);
    let node = (
        0..8_u32,
        prop::collection::vec(any::<prop::sample::Index>(), 1..4),
        prop::collection::vec(value(), 0..3),
        prop::collection::vec(any::<prop::sample::Index>(), 0..2),
        any::<prop::sample::Index>(),
    );
    let inputs = prop::collection::vec(value(), 1..4);
    ("[ -~]{1,9}", functions, inputs, prop::collection::vec(node, 0..6)).prop_map(
        |(name, functions, inputs, nodes)| {
            let mut program = Program { name, inputs: inputs.len() as u32, ..Program::default() };
            program.values = inputs;
            for (kind, args, results, after, function) in nodes {
                let start = program.values.len() as u32;
                let args: Vec<ValueId> =
                    args.iter().map(|arg| ValueId(arg.index(start as usize) as u32)).collect();
                let devices = program.value(args[0]).sharding.devices.clone();
                let function = FunctionId(function.index(functions.len()) as u32);
                let operation = match kind {
                    0 => Operation::Call { function, devices, donated: [0][..].into() },
                    1 => Operation::Move { donated: start.is_multiple_of(2) },
                    2 => Operation::Sparse(Sparse::Collect),
                    3 => Operation::Sparse(Sparse::Reduce),
                    4 => Operation::Sparse(Sparse::Gather),
                    5 => Operation::Sparse(Sparse::Scatter),
                    6 => Operation::Assemble,
                    _ => Operation::Sparse(Sparse::Dispatch { bins: 2, credit: start, round: 1 }),
                };
                let earlier = program.nodes.len();
                let after = if earlier == 0 { Vec::new() } else { after };
                program.values.extend(results);
                program.nodes.push(Node {
                    operation,
                    args: args.into(),
                    results: start..program.values.len() as u32,
                    after: after.iter().map(|a| NodeId(a.index(earlier) as u32)).collect(),
                });
            }
            program.results = vec![ValueId(program.values.len() as u32 - 1)];
            program.functions = functions;
            program.donated = vec![0];
            program.uploaded = vec![program.inputs - 1];
            program
        },
    )
}

proptest! {
    #[test]
    fn what_is_printed_can_be_read(program in program()) {
        let text = program.to_string();
        prop_assert_eq!(Program::parse(&text).expect(&text), program);
    }

    #[test]
    fn reading_nonsense_never_panics(text in "(program|node|input|%|@|\\[|\\]|\\(|[0-9]|x|=|,| |\n|\"|\\\\|on|call|dispatch|collect|reduce|gather|scatter|assemble|uploaded|collectives|bins){0,40}") {
        let _ = Program::parse(&text).map(|program| program.verify());
    }
}

const CHAIN: &str = "\
program @chain
function @f
input %0: float32[8] on [0..2] donated
node %1: float32[8] on [0..2] = call @f (%0)
node %2: float32[8] tiled 2 on [2,3] = move (%1)
node %3: float32[8] tiled 2 on [2,3] = call @f (%2) donating (0)
return (%3)
";

fn check(from: &str, to: &str) -> Result<(), ProgramError> {
    assert!(CHAIN.contains(from), "{from}");
    Program::parse(&CHAIN.replace(from, to)).expect("it can be read").verify()
}

#[test]
fn a_chain_is_a_program() {
    assert_eq!(check("@chain", "@chain"), Ok(()));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let undefined = ProgramError::Undefined { node: 0, value: 3 };
    assert_eq!(check("call @f (%0)", "call @f (%3)"), Err(undefined));
    let donated = ProgramError::Donated { node: 3, value: 2, by: 2 };
    assert_eq!(check("return (%3)", "return (%2)"), Err(donated));
    let elsewhere = ProgramError::Elsewhere { node: 0, value: 1 };
    assert_eq!(check("%1: float32[8] on [0..2]", "%1: float32[8] on [1,2]"), Err(elsewhere));
    let changed = ProgramError::Changed { node: 1, from: 1, to: 2 };
    assert_eq!(check("%2: float32[8]", "%2: float32[9]"), Err(changed));
    let unknown = ProgramError::Unknown { node: 0, what: "node", number: 4, count: 0 };
    assert_eq!(check("call @f (%0)", "call @f (%0) after (#4)"), Err(unknown));
    let count = ProgramError::Count { node: 1, what: "results", found: 1, expected: 2 };
    assert_eq!(check("move (%1)", "move (%1, %0)"), Err(count));
}

const SPARSE: &str = "\
program @sparse
input %0: float32[8,3] tiled 2x1 on [0..2]
input %1: int32[8,2] tiled 2x1 on [0..2]
node %2: float32[12,3] tiled 2x1 on [2,3], %3: int32[12] tiled 2 on [2,3], \
%4: int32[6] tiled 2 on [2,3] = dispatch (%0, %1) bins 3 credit 3 round 1
node %5: float32[8,2,3] tiled 2x1x1 on [0..2] = collect (%2, %3)
node %6: float32[12,3] tiled 2x1 on [2,3], %7: int32[12] tiled 2 on [2,3], \
%8: int32[6] tiled 2 on [2,3] = dispatch (%5, %1) bins 3 credit 3 round 1
return (%4, %6)
";

#[test]
fn a_sparse_exchange_says_what_it_is_between() {
    let program = Program::parse(SPARSE).unwrap();
    program.verify().unwrap();
    assert_eq!(program.to_string(), SPARSE);
    let ends = |node: usize| match &program.nodes[node].operation {
        Operation::Sparse(sparse) => {
            sparse.ends(&program, node as u32, &program.nodes[node]).unwrap()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!((ends(0).source, ends(0).target), (ends(1).source, ends(1).target));
    let sizes = |node| {
        let ends = ends(node);
        (ends.source.rows, ends.target.rows, ends.choices, ends.row_bytes, ends.is_each)
    };
    assert_eq!(sizes(0), (4, 6, 2, 12, false));
    assert_eq!(sizes(2), (4, 6, 2, 12, true), "a row for each choice");
}

#[test]
fn exchanges_between_what_does_not_fit_are_refused() {
    let refused = |from: &str, to: &str, value: u32| {
        assert!(SPARSE.contains(from), "{from}");
        let program = Program::parse(&SPARSE.replace(from, to)).expect("it can be read");
        match program.verify() {
            Err(ProgramError::Sparse { value: found, .. }) => assert_eq!(found, value, "{to}"),
            other => panic!("{to}: {other:?}"),
        }
    };
    refused("%1: int32[8,2]", "%1: int64[8,2]", 1);
    refused("%1: int32[8,2]", "%1: int32[8]", 1);
    refused("%1: int32[8,2] tiled 2x1", "%1: int32[8,2] tiled 1x2", 1);
    refused("%1: int32[8,2] tiled 2x1", "%1: int32[8,2] tiled 2x1 by [1,0]", 1);
    refused("%0: float32[8,3]", "%0: float32[10,3]", 0);
    refused("%0: float32[8,3]", "%0: bfloat16[8,3]", 2);
    refused("%3: int32[12]", "%3: int32[10]", 2);
    refused("%2: float32[12,3]", "%2: float32[]", 2);
    refused("%4: int32[6] tiled 2 on [2,3]", "%4: int32[6] tiled 2 on [3,2]", 4);
    refused("bins 3 credit 3 round 1\nnode %5", "bins 3 credit 4 round 1\nnode %5", 3);
    refused("%5: float32[8,2,3]", "%5: float32[8,2,4]", 5);
    let error = Program::parse(&SPARSE.replace("= collect (%2, %3)", "= collect (%2)")).unwrap();
    let count = ProgramError::Count { node: 1, what: "arguments", found: 1, expected: 2 };
    assert_eq!(error.verify(), Err(count));
}

/// Two islands of two hosts each: the sum over both axes, which one host of each island makes; then
/// shards of the first island are exchanged with those of the second.
const ACROSS: &str = "\
program @across
function @grow 1000ns
function @sum collectives (all_reduce 8 of 4bytes on [0,2], all_reduce 8 of 4bytes on [1,3], \
all_to_all (0, 8, 4, 0) of 1bytes on [0,2], all_reduce 2 of 4bytes on [0..2])
input %0: float32[8] tiled 2 on [0..2] carried from %3
input %1: float32[16] tiled 4 on [0..4] carried from %2
node %2: float32[16] tiled 4 on [0..4] = call @sum (%1)
node %3: float32[8] tiled 2 on [0..2] = call @grow (%0)
node = call @grow () on [2,3] after (#0)
return (%2, %3)
";

#[test]
fn functions_of_collectives_communicate_between_gangs() {
    let program = Program::parse(ACROSS).unwrap();
    program.verify().unwrap();
    assert_eq!(program.to_string(), ACROSS);
    assert_eq!(ir::gangs(&program), [[DeviceId(0), DeviceId(1)], [DeviceId(2), DeviceId(3)]]);
    assert_eq!(
        ir::lower(&program).to_string(),
        "\
step @across on 2 devices
#0 @sum = all_reduce 16 of 4bytes on [0..2] after (#1@-1, #2@-1)
#1 @sum = all_to_all (0, 8, 4, 0) of 1bytes on [0..2] after (#0)
#2 @grow = compute 1000ns on [0] after (#2@-1)
#3 @grow = compute 1000ns on [1] after (#1)
",
        "hosts of an island are one rank, and sums of different hosts are made at the same time"
    );
    let far = Program::parse(&ACROSS.replace("on [1,3]", "on [1,4]")).unwrap();
    let ranks = |found: [u32; 2]| ProgramError::Ranks { node: 0, found: found.into(), count: 4 };
    assert_eq!(far.verify(), Err(ranks([1, 4])));
    let twice = Program::parse(&ACROSS.replace("on [1,3]", "on [1,1]")).unwrap();
    assert_eq!(twice.verify(), Err(ranks([1, 1])));
}

#[test]
fn arrays_of_shards_depend_on_what_made_those() {
    let arrays = "\
        node %2: float32[16] tiled 4 on [0..4] = assemble (%0, %1)\n\
        node %3: float32[8] tiled 2 on [0..2] = call @grow (%0)\n\
        node %4: float32[16] tiled 4 on [0..4] = call @sum (%2)\n\
        node %5: float32[8] tiled 2 on [0..2] = assemble (%4)\n\
        node %6: float32[8] tiled 2 on [0..2] = call @grow (%5)\n";
    let shared = ACROSS.replace("carried from %3", "carried from %6");
    let shared = shared.replace("carried from %2", "uploaded");
    let (inputs, _) = shared.split_once("node").unwrap();
    let text = format!("{inputs}{arrays}return (%6)\n");
    let program = Program::parse(&text).unwrap();
    program.verify().unwrap();
    assert_eq!(program.to_string(), text);
    assert_eq!(
        ir::lower(&program).to_string().lines().skip(1).collect::<Vec<_>>(),
        [
            "#0 @grow = compute 1000ns on [0] after (#4@-1)",
            "#1 @sum = all_reduce 8 of 4bytes on [0..2] after (#4@-1)",
            "#2 @sum = all_reduce 8 of 4bytes on [0,2] after (#4@-1)",
            "#3 @sum = all_to_all (0, 8, 4, 0) of 1bytes on [0..2] after (#1, #2)",
            "#4 @grow = compute 1000ns on [0] after (#3)",
        ],
    );
    for (old, new, node, value) in [
        ("on [0..2] = assemble (%4)", "on [4,5] = assemble (%4)", 3, 5),
        ("%5: float32[8]", "%5: float32[10]", 3, 5),
        ("%1: float32", "%1: int32", 0, 2),
    ] {
        let other = Program::parse(&text.replacen(old, new, 1)).unwrap();
        assert_eq!(other.verify(), Err(ProgramError::Assembled { node, value }), "{new}");
    }
    let none = Program::parse(&text.replace("assemble (%4)", "assemble ()")).unwrap().verify();
    let count = ProgramError::Count { node: 3, what: "arguments", found: 0, expected: 1 };
    assert_eq!(none, Err(count));
    let both = text.replacen(" uploaded", " uploaded carried from %4", 1);
    let both = Program::parse(&both).unwrap().verify();
    assert_eq!(both, Err(ProgramError::Uploaded { input: 1 }));
}

#[test]
fn collectives_inside_gangs_are_no_communication() {
    let (_, inside) = ACROSS.split_once("@sum collectives").unwrap();
    let (_, rest) = inside.split_once('\n').unwrap();
    let text =
        format!("program @across\nfunction @grow 1000ns\nfunction @sum collectives ()\n{rest}");
    let program = Program::parse(&text).unwrap();
    assert_eq!(program.to_string(), text);
    assert_eq!(ir::gangs(&program).len(), 2);
    let step = ir::lower(&program);
    assert!(step.nodes().iter().all(|node| matches!(node.op, ir::StepOp::Compute { .. })));
    let alone = "program @t\nfunction @c collectives (all_reduce 16 of 4bytes on [0..2])\n\
                 node = call @c () on [0..4]\nreturn ()\n";
    assert_eq!(ir::lower(&Program::parse(alone).unwrap()).devices, 4);
    for wrong in ["of 4294967295bytes", "of 300bytes"] {
        let text = alone.replace("16 of 4bytes", &format!("281474976710656 {wrong}"));
        let error = Program::parse(&text).unwrap_err().to_string();
        assert!(error.contains("2^56 bytes"), "{error}");
    }
    assert!(Program::parse(&alone.replace("@c coll", "@c 5ns coll")).is_err(), "it has no time");
}

const COLLECTIVES: &str = "\
program @collectives
input %0: float32[8] tiled 2 on [0..2]
input %1: float32[8] tiled 2 on [2,3]
node %2: float32[8] tiled 2 on [0..2], %3: float32[8] tiled 2 on [2,3] = reduce (%0, %1)
node %4: float32[2,8] tiled 1x2 on [0..2], %5: float32[2,8] tiled 1x2 on [2,3] = gather (%2, %3)
node %6: float32[8] tiled 2 on [0..2], %7: float32[8] tiled 2 on [2,3] = scatter (%4, %5)
return (%6, %7)
";

#[test]
fn collectives_over_groups_say_what_they_are_between() {
    let program = Program::parse(COLLECTIVES).unwrap();
    program.verify().unwrap();
    assert_eq!(program.to_string(), COLLECTIVES);
    let whole = Program::parse(&COLLECTIVES.replace(" tiled 2 ", " ").replace(" tiled 1x2 ", " "));
    let ends = |program: &Program, node: usize| {
        let Operation::Sparse(sparse) = program.nodes[node].operation else { panic!("{node}") };
        let ends = sparse.ends(program, node as u32, &program.nodes[node]).unwrap();
        (ends.source.shards, ends.source.rows, ends.choices, ends.row_bytes)
    };
    assert_eq!(
        [0, 1, 2].map(|node| ends(&program, node)),
        [(4, 2, 2, 16), (4, 2, 2, 16), (4, 2, 2, 32)]
    );
    let whole = whole.unwrap();
    whole.verify().unwrap();
    assert_eq!(ends(&whole, 0), (4, 1, 2, 32), "all devices of a group have the same");
}

#[test]
fn collectives_of_what_does_not_fit_are_refused() {
    let refused = |from: &str, to: &str, value: u32| {
        assert!(COLLECTIVES.contains(from), "{from}");
        let program = Program::parse(&COLLECTIVES.replacen(from, to, 1)).expect("it can be read");
        match program.verify() {
            Err(ProgramError::Sparse { value: found, .. }) => assert_eq!(found, value, "{to}"),
            other => panic!("{to}: {other:?}"),
        }
    };
    refused("%1: float32[8]", "%1: bfloat16[8]", 1);
    refused("%1: float32[8]", "%1: float32[6]", 1);
    refused("%1: float32[8] tiled 2", "%1: float32[8]", 1);
    refused("%1: float32[8] tiled 2 on [2,3]", "%1: float32[8] tiled 3 on [2..5]", 3);
    refused("%3: float32[8] tiled 2 on [2,3]", "%3: float32[8] tiled 2 on [3,2]", 3);
    refused("%5: float32[2,8] tiled 1x2", "%5: float32[2,8] tiled 2x1", 5);
    refused("%5: float32[2,8]", "%5: float32[3,8]", 5);
    refused("%7: float32[8] tiled 2", "%7: float32[2,8] tiled 1x2", 7);
    refused("= reduce (%0, %1)", "= reduce (%0)", 0);
}

#[test]
fn lines_that_cannot_be_read_are_named() {
    let error = Program::parse(&CHAIN.replace("call @f (%2)", "call @g (%2)")).unwrap_err();
    assert_eq!((error.line, error.expected), (6, "the name of a function"));
    let error = Program::parse(&CHAIN.replace("float32[8] tiled", "float99[8] tiled"));
    assert_eq!(error.unwrap_err().line, 5);
}
