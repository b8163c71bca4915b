//! What a rank receives of another one: frames, acknowledgements, and messages of an agreement.

use std::os::unix::net::UnixStream;

use base::Random;
use control::switch::{Answer, CoordinatorMessage, Participant, PlanId, Proposer};
use fuzzing::damaged;
use proptest::prelude::*;

use super::super::agreed::Letter;
use super::*;

const WINDOW: usize = 1 << 13;

/// Returns some frames as a rank sends them.
fn valid_frames(seed: u64) -> Vec<u8> {
    let mut random = Random::of(&[seed]);
    let mut bytes = Vec::new();
    for _ in 0..1 + random.below(4) {
        let kinds = [MessageKind::Data, MessageKind::Data, MessageKind::Read, MessageKind::GivenUp];
        let kind = kinds[random.below(4) as usize];
        let length = if kind == MessageKind::Read { 0 } else { random.below(100) as usize };
        let subject = Subject {
            step: random.below(3) * 40,
            operation: random.below(6) as u32,
            motif: random.below(3) as u32,
            digest: length as u32,
        };
        bytes.extend(Head { kind, length, subject }.encode());
        bytes.extend((0..length).map(|at| at as u8));
    }
    bytes
}

/// Reads all frames; returns the first error, and how many bytes were received.
fn read_all(lane: &mut ReliableStream) -> (io::Result<()>, usize) {
    let mut received = 0;
    let mut into = [0; 48];
    loop {
        match lane.frame() {
            Ok(Some(head)) if head.kind == MessageKind::Data => {
                match lane.read_payload(&mut into) {
                    Ok(0) if head.length > 0 => return (Ok(()), received),
                    Ok(count) => received += count,
                    Err(error) => return (Err(error), received),
                }
            }
            // A byte that is no text becomes a character of three.
            Ok(Some(_)) => received += lane.take_text().chars().count(),
            Ok(None) => return (Ok(()), received),
            Err(error) => return (Err(error), received),
        }
    }
}

/// Hears the message that a frame begins, as a participant and as the coordinator of two hosts.
fn hear(subject: Subject, keeper: &mut Participant, proposer: &mut Proposer) {
    let Subject { step, operation, motif, .. } = subject;
    let plan = PlanId(u64::from(motif));
    match operation {
        1 => drop(keeper.hear(CoordinatorMessage::Prepare(plan), step % 2 == 0)),
        2 => drop(keeper.hear(CoordinatorMessage::Commit(plan, step), true)),
        3 => drop(keeper.hear(CoordinatorMessage::Abort(plan), true)),
        4 => drop(proposer.hear(1, Answer::Ready(plan, step))),
        5 => drop(proposer.hear(1, Answer::Refused(plan))),
        _ => drop(proposer.propose()),
    }
    let _ = keeper.begin(4);
}

proptest! {
    #[test]
    fn fuzz_frames_of_ranks(bytes in damaged(valid_frames), resumes: bool) {
        let (mut peer, here) = UnixStream::pair().unwrap();
        let mut lane =
            ReliableStream::new(Socket::Unix(here), 1, Channel(0), WINDOW).unwrap();
        let subject = Subject { step: 1, operation: 2, motif: 3, digest: 4 };
        prop_assert_eq!(lane.put(subject, &[7; 40]), 40);
        lane.flush().unwrap();
        if resumes {
            let (other, here) = UnixStream::pair().unwrap();
            peer = other;
            let name = LaneName { team: base::TransferTag(1), channel: 0, epoch: 1, via: 0 };
            lane.reopen(Socket::Unix(here), name).unwrap();
        }
        peer.write_all(&bytes).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        let (_, received) = read_all(&mut lane);
        prop_assert!(received <= bytes.len() && lane.read <= lane.written);
        let _ = lane.flush();
    }

    #[test]
    fn fuzz_messages_of_an_agreement(bytes in damaged(valid_frames)) {
        let (mut keeper, mut proposer) = (Participant::new(4), Proposer::new(0..2));
        for frame in bytes.as_chunks::<HEAD_BYTES>().0 {
            let Ok(head) = Head::decode(frame) else { continue };
            prop_assert!(Letter::of(head.subject).is_ok_and(|letter| !letter.is_done())
                || !(1..=32 << 20).contains(&head.subject.digest));
            hear(head.subject, &mut keeper, &mut proposer);
        }
    }
}

#[test]
fn an_acknowledgement_of_what_was_never_sent_changes_nothing() {
    let (mut peer, here) = UnixStream::pair().unwrap();
    let mut lane = ReliableStream::new(Socket::Unix(here), 1, Channel(0), WINDOW).unwrap();
    let subject = Subject { step: 1 << 40, operation: 0, motif: 0, digest: 0 };
    let head = Head { kind: MessageKind::Read, length: 0, subject };
    peer.write_all(&head.encode()).unwrap();
    lane.frame().unwrap_err();
    assert_eq!((lane.read, lane.room()), (0, WINDOW));
}
