//! Damaged messages, with which tests call the parsers that face the network.
//!
//! A test has a strategy of valid messages, and gets each with some [`Damage`]: changed bits, lengths
//! with extreme values, parts that are cut off, repeated or exchanged. `PROPTEST_CASES` is the number
//! of inputs of a test; `make fuzz` runs all of them with a million.

use proptest::prelude::*;

/// Most damages of one message.
const DAMAGES_MAX: usize = 5;
/// Most bytes of a message without any structure.
const NOISE_MAX: usize = 96;
/// Most bytes of a part that is repeated, and most repetitions.
const REPEATED_MAX: (usize, usize) = (64, 32);
/// Numbers at which parsers have limits.
const EXTREMES: [u64; 16] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];
/// The same in texts, and what texts may end at.
const WORDS: [&str; 12] = [
    "0",
    "-1",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
    "\"",
    "\n",
    "ä",
    "\0",
];

/// One change of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damage {
    kind: u8,
    /// Where; counted modulo the length.
    at: u32,
    value: u64,
}

impl Damage {
    /// Changes a message. O(length).
    ///
    /// # Arguments
    /// - `donor`: another message, of which parts may be inserted.
    pub fn apply(self, message: &mut Vec<u8>, donor: &[u8]) {
        let Self { kind, at, value } = self;
        let at = at as usize % (message.len() + 1);
        let extreme = EXTREMES[value as usize % EXTREMES.len()];
        let count = (value >> 8) as usize % (message.len() - at + 1);
        match kind % 12 {
            0 | 1 => overwrite(message, at, |byte| byte ^ (1 << (value % 8))),
            2 => overwrite(message, at, |_| value as u8),
            3 => message.truncate(at),
            4 => replace(message, at, &(extreme as u32).to_le_bytes()),
            5 => replace(message, at, &(extreme as u32).to_be_bytes()),
            6 => replace(message, at, &extreme.to_le_bytes()),
            7 => replace(message, at, &extreme.to_be_bytes()),
            8 => insert(message, at, 1, &varint(extreme)),
            9 => {
                let from = (value >> 16) as usize % (donor.len() + 1);
                let most = (donor.len() - from).min((value >> 40) as usize % 64);
                insert(message, at, count.min(most), &donor[from..from + most]);
            }
            10 => {
                let part = message[at..at + count.min(REPEATED_MAX.0)].to_vec();
                insert(message, at, 0, &part.repeat((value >> 40) as usize % REPEATED_MAX.1));
            }
            _ => {
                let word = WORDS[value as usize % WORDS.len()].as_bytes();
                insert(message, at, count.min(word.len()), word);
            }
        }
    }
}

fn overwrite(message: &mut [u8], at: usize, change: impl Fn(u8) -> u8) {
    if let Some(byte) = message.get_mut(at) {
        *byte = change(*byte);
    }
}

/// Writes bytes over those at `at`, as far as the message goes.
fn replace(message: &mut [u8], at: usize, bytes: &[u8]) {
    message[at..].iter_mut().zip(bytes).for_each(|(old, new)| *old = *new);
}

/// Inserts bytes instead of `removed` ones.
fn insert(message: &mut Vec<u8>, at: usize, removed: usize, bytes: &[u8]) {
    let end = (at + removed).min(message.len());
    message.splice(at..end, bytes.iter().copied());
}

/// Encodes a number as Protocol Buffers do.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// Returns damages of a message; none for some.
fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let one = any::<(u8, u32, u64)>().prop_map(|(kind, at, value)| Damage { kind, at, value });
    prop::collection::vec(one, 0..=DAMAGES_MAX)
}

/// Returns bytes that are mostly messages that `valid` makes of a seed, with damages; one in eight has
/// no structure.
pub fn damaged(valid: impl Fn(u64) -> Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let message =
        (any::<u64>(), any::<u64>(), damages()).prop_map(move |(seed, other, damages)| {
            let (mut message, donor) = (valid(seed), valid(other));
            damages.into_iter().for_each(|damage| damage.apply(&mut message, &donor));
            message
        });
    let noise = prop::collection::vec(any::<u8>(), 0..NOISE_MAX);
    prop_oneof![7 => message, 1 => noise]
}

/// Returns the same as text; what is not UTF-8 is replaced.
pub fn damaged_text(valid: impl Fn(u64) -> String) -> impl Strategy<Value = String> {
    damaged(move |seed| valid(seed).into_bytes())
        .prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest! {
        #[test]
        fn messages_are_changed_within_bounds(bytes in damaged(|seed| seed.to_le_bytes().to_vec())) {
            let longest = 8 + DAMAGES_MAX * (8 + REPEATED_MAX.0 * REPEATED_MAX.1);
            prop_assert!(bytes.len() <= longest.max(NOISE_MAX));
        }
    }

    #[test]
    fn numbers_have_the_encoding_of_protocol_buffers() {
        assert_eq!((varint(0), varint(300)), (vec![0], vec![0xac, 2]));
        assert_eq!(varint(u64::MAX).len(), 10);
    }
}
