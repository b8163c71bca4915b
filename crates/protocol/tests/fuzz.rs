//! Damaged messages of hosts.

use fuzzing::damaged;
use proptest::prelude::*;
use protocol::{Decode, Field, Hello, HostReply, Report, Sample, decode, encode, sample_of};

fn sample<T: Sample + Field>(seed: u64) -> Vec<u8> {
    encode(&sample_of::<T>(seed))
}

/// What was decoded has an encoding that means the same.
fn check<T: Decode + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    let Ok(message) = decode::<T>(bytes) else { return };
    let again = encode(&message);
    // A float that is no number differs from itself.
    assert_eq!(encode(&decode::<T>(&again).expect("it was decoded before")), again, "{message:?}");
}

proptest! {
    #[test]
    fn fuzz_reports(bytes in damaged(sample::<Report>)) {
        check::<Report>(&bytes);
    }

    #[test]
    fn fuzz_replies(bytes in damaged(sample::<HostReply>)) {
        check::<HostReply>(&bytes);
    }

    #[test]
    fn fuzz_hellos(bytes in damaged(sample::<Hello>)) {
        check::<Hello>(&bytes);
    }
}
