//! Golden bytes of every message, its round trip, and the generated Python module.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use base::HostId;
use proptest::prelude::*;
use protocol::{
    Command, CommandFrames, Decode, Encoder, Field, Hello, HostReply, Report, Sample, Schema,
    decode, encode, python_module, sample_of,
};
use topology::{Cluster, IslandSpec};

/// Random samples of each message in the golden files.
const SAMPLES: u64 = 4;

/// Compares a text with a file; `FAIRWAY_GOLDEN=write` updates the file.
fn check_file(path: &Path, text: &str, remedy: &str) {
    if std::env::var("FAIRWAY_GOLDEN").is_ok_and(|mode| mode == "write") {
        std::fs::write(path, text).unwrap();
    }
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    assert!(text == expected, "{} is stale; {remedy}", path.display());
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn encode_command(command: &Command) -> Vec<u8> {
    let cluster = Cluster::new(&IslandSpec::parse("1x2x2").unwrap());
    let mut out = Vec::new();
    // Some of the sampled uploads are longer, and travel as messages.
    command.write(&mut Encoder::new(&mut out, HostId(0), &cluster, 64));
    out
}

/// One line a sample: the message's name, and its bytes in hexadecimal.
fn lines<T>(
    samples: impl Fn(u64) -> Vec<(&'static str, T)>,
    bytes: impl Fn(&T) -> Vec<u8>,
) -> String {
    let mut text = String::new();
    for seed in 0..SAMPLES {
        for (name, sample) in samples(seed) {
            writeln!(text, "{name} {}", hex(&bytes(&sample))).unwrap();
        }
    }
    text
}

fn check_golden(name: &str, text: &str, messages: usize) {
    assert_eq!(text.lines().count(), SAMPLES as usize * messages, "every message has its samples");
    let remedy = "if the protocol was to change, run `make protocol`";
    check_file(&root().join("tests/golden").join(name), text, remedy);
}

#[test]
fn commands_have_the_bytes_that_hosts_know() {
    let text = lines(Command::samples, encode_command);
    check_golden("commands.hex", &text, Schema::new().messages("Command").len());
}

#[test]
fn reports_have_the_bytes_that_the_controller_knows() {
    let schema = Schema::new();
    let text = lines(Report::samples, encode);
    check_golden("reports.hex", &text, schema.messages("Report").len());
    let text = lines(HostReply::samples, encode);
    check_golden("replies.hex", &text, schema.messages("HostReply").len());
    let hello = |seed| vec![("Hello", sample_of::<Hello>(seed))];
    check_golden("hello.hex", &lines(hello, encode), 1);
}

#[test]
fn the_python_module_is_generated_from_these_definitions() {
    let path = root().join("../../python/fairway/host/messages.py");
    check_file(&path, &python_module(), "run `make protocol`");
}

#[test]
fn numbers_and_names_are_unique_and_roles_name_fields() {
    let schema = Schema::new();
    for union in ["Command", "Report", "HostReply"] {
        let messages = schema.messages(union);
        for (at, message) in messages.iter().enumerate() {
            let number = message.number.expect("messages have numbers");
            assert!(number < 128, "{}: a number has one byte", message.name);
            let others = &messages[..at];
            assert!(others.iter().all(|other| other.number != message.number), "{number} twice");
            let has = |name: &str| message.fields.iter().any(|field| field.name == name);
            match message.role {
                protocol::Role::None => {}
                protocol::Role::Answers(field)
                | protocol::Role::Makes(field)
                | protocol::Role::MakesEach(field) => assert!(has(field)),
                protocol::Role::MakesRange(first, count) => assert!(has(first) && has(count)),
            }
        }
    }
    let unions = ["Command", "Report", "HostReply"];
    let messages = unions.iter().flat_map(|union| schema.messages(union)).chain(schema.records());
    let mut names: Vec<&str> = messages.map(|message| message.name).collect();
    names.sort_unstable();
    let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

#[test]
fn long_queues_are_cut_into_frames() {
    let cluster = Cluster::new(&IslandSpec::parse("1x1x1").unwrap());
    let mut frames = CommandFrames::default();
    let free = Command::Free { buffers: (0..1000).map(base::BufferId).collect() };
    (0..100).for_each(|_| frames.push(&free, HostId(0), &cluster, 64));
    let mut bytes = vec![1, 2, 3];
    frames.take(&mut bytes);
    assert!(frames.is_empty());
    let one = encode(&free).len();
    let (mut rest, mut commands) = (&bytes[..], 0);
    while let Some((head, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*head) as usize;
        let count = u32::from_be_bytes(after[1..5].try_into().unwrap()) as usize;
        assert_eq!((after[0], length), (0xdd, 5 + count * one), "an array of the commands");
        assert!(length < (64 << 10) + one);
        commands += count;
        rest = &after[length..];
    }
    assert_eq!((rest.len(), commands), (0, 100));
    frames.push(&Command::ReportEnd {}, HostId(0), &cluster, 64);
    frames.take(&mut bytes);
    assert_eq!(bytes, [7, 0, 0, 0, 0xdd, 0, 0, 0, 1, 0x91, 29]);
}

#[test]
fn malformed_reports_are_refused() {
    let refused: [&[u8]; 9] = [
        b"",
        &[0x92, 1],
        &[0x90],
        &[0x93, 1, 5, 5],
        &[0x92, 1, 5, 5],
        &[0x92, 99, 5],
        &[0x92, 1, 0xa1, 0x35],
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0x92, 4, 0xdb, 0xff, 0xff, 0xff, 0xff],
    ];
    for bytes in refused {
        assert!(decode::<Report>(bytes).is_err(), "{bytes:x?}");
    }
    let finished = Report::Finished { busy: base::Nanos(5) };
    assert_eq!(decode::<Report>(&[0x92, 1, 5]).unwrap(), finished);
}

fn check_round_trip<T: Sample + Decode + PartialEq + std::fmt::Debug>(seed: u64) {
    let message: T = sample_of(seed);
    assert_eq!(decode::<T>(&encode(&message)).unwrap(), message);
}

proptest! {
    #[test]
    fn reports_are_read_as_they_were_written(seed: u64) {
        check_round_trip::<Report>(seed);
        check_round_trip::<HostReply>(seed);
        check_round_trip::<Hello>(seed);
    }

    #[test]
    fn every_beginning_of_a_report_is_refused(seed: u64, cut: prop::sample::Index) {
        let bytes = encode(&sample_of::<Report>(seed));
        prop_assert!(decode::<Report>(&bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn noise_does_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..90)) {
        drop(decode::<Report>(&bytes));
        drop(decode::<Hello>(&bytes));
    }
}
