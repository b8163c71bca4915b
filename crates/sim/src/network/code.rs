//! Link encoding of a vector: its bytes, and an error-correcting code (ECC) with error detection.
//!
//! The paper gives a vector eight bytes of overhead, some of which framing takes, and says that links
//! correct simple errors and detect bursts (multi-TSP system §4.4-4.5). It does not say how. Here: a
//! code that corrects one bit error and detects two (SECDED), over all bits, and a cyclic redundancy
//! check (CRC) that detects more. Assumed: 2 bytes for the former, 4 for the latter, 2 for kind and
//! number.

use base::Random;
use thiserror::Error;

/// Size of a vector, in bytes.
pub const VECTOR: usize = 320;
/// Size of an encoded vector on a link, in bytes.
pub const ENCODED: usize = 328;

const WORDS: usize = ENCODED / 8;
/// Bit offset of the 14 check bits in the last word.
const CHECKS: u32 = 48;
/// Mask of the bits of the last word that are not check bits.
const TAIL: u64 = (1 << CHECKS) - 1;
/// Prefix of a data bit's number, which counts words from 1, so that it is no power of two: powers of
/// two number check bits.
const DATA: u32 = 1 << 12;
const PARITY: u32 = 1 << 13;

/// The error of a vector with more bit errors than can be corrected.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a vector came with errors that cannot be corrected; the run must be replayed")]
pub struct Uncorrectable;

/// A vector as encoded on a link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Encoded(pub [u8; ENCODED]);

impl Encoded {
    /// Flips one bit.
    pub fn flip(&mut self, bit: u32) {
        self.0[bit as usize / 8] ^= 1 << (bit % 8);
    }

    /// Returns the payload as received, without correction.
    pub fn vector(&self) -> [u8; VECTOR] {
        self.0[..VECTOR].try_into().expect("it is longer than a vector")
    }
}

/// Encodes a vector with its error-correcting code and CRC.
///
/// # Arguments
/// - `number`: the low 16 bits of the vector's number, which are protected too, so that no other vector
///   is mistaken for it.
///
/// ```
/// use sim::network::{VECTOR, decode, encode};
/// let vector = [7; VECTOR];
/// let mut sent = encode(&vector, 5);
/// sent.0[40] ^= 1 << 3;
/// assert_eq!(decode(&sent, 5), Ok((vector, true)));
/// sent.0[41] ^= 1 << 3;
/// assert!(decode(&sent, 5).is_err());
/// ```
pub fn encode(vector: &[u8; VECTOR], number: u16) -> Encoded {
    let mut bytes = [0; ENCODED];
    bytes[..VECTOR].copy_from_slice(vector);
    bytes[VECTOR..VECTOR + 4].copy_from_slice(&redundancy(vector, number).to_le_bytes());
    bytes[VECTOR + 4..VECTOR + 6].copy_from_slice(&number.to_le_bytes());
    let mut words = words(&bytes);
    let syndrome = syndrome(&words);
    let checks = syndrome | if is_odd(&words) ^ is_odd_count(syndrome) { PARITY } else { 0 };
    words[WORDS - 1] |= u64::from(checks) << CHECKS;
    bytes[ENCODED - 8..].copy_from_slice(&words[WORDS - 1].to_le_bytes());
    Encoded(bytes)
}

/// Decodes a vector; also returns whether a bit of it, or of its check bits, was corrected.
///
/// # Errors
/// Two or more bits are wrong.
pub fn decode(found: &Encoded, number: u16) -> Result<([u8; VECTOR], bool), Uncorrectable> {
    let mut words = words(&found.0);
    let checks = (words[WORDS - 1] >> CHECKS) as u32;
    let is_odd = is_odd(&words);
    words[WORDS - 1] &= TAIL;
    let wrong = syndrome(&words) ^ (checks & (PARITY - 1));
    // The parity bit makes the total number of ones even.
    let was_corrected = match (is_odd, wrong) {
        (false, 0) => false,
        (true, wrong) if wrong > DATA => {
            let bit = (wrong & (DATA - 1)) as usize;
            let (word, bit) = ((bit / 64).wrapping_sub(1), bit % 64);
            if word >= WORDS || (word == WORDS - 1 && bit >= CHECKS as usize) {
                return Err(Uncorrectable);
            }
            words[word] ^= 1 << bit;
            true
        }
        // The error is in a check bit or the parity bit itself.
        (true, wrong) if wrong == 0 || wrong.is_power_of_two() => true,
        _ => return Err(Uncorrectable),
    };
    let mut vector = [0; VECTOR];
    for (bytes, word) in vector.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let tail = words[WORDS - 1];
    let is_right = tail as u32 == redundancy(&vector, number) && (tail >> 32) as u16 == number;
    if is_right { Ok((vector, was_corrected)) } else { Err(Uncorrectable) }
}

/// Sends vectors with `bits` bit errors each; returns how many were received correctly and how many
/// were detected as wrong. The rest are silently corrupted.
pub fn send_with_errors(vectors: u32, bits: u32, seed: u64) -> (u32, u32) {
    let mut random = Random::of(&[seed]);
    let mut vector = [0; VECTOR];
    let (mut right, mut noticed) = (0, 0);
    for number in 0..vectors {
        if number % 1024 == 0 {
            vector.fill_with(|| random.word() as u8);
        }
        let mut sent = encode(&vector, number as u16);
        for bit in random.distinct(bits, 8 * ENCODED as u32) {
            sent.flip(bit);
        }
        match decode(&sent, number as u16) {
            Ok((found, _)) => right += u32::from(found == vector),
            Err(_) => noticed += 1,
        }
    }
    (right, noticed)
}

fn words(bytes: &[u8; ENCODED]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("chunks are of 8"));
    }
    words
}

/// Returns the exclusive or of the numbers of all set bits, each prefixed with [`DATA`].
fn syndrome(words: &[u64; WORDS]) -> u32 {
    let (mut high, mut all) = (0, 0);
    for (number, word) in (1..).zip(words) {
        if !word.count_ones().is_multiple_of(2) {
            high ^= DATA | number << 6;
        }
        all ^= word;
    }
    // Bit `i` of the lower part is the parity of set bits whose position in a word has bit `i` set.
    const PLACES: [u64; 6] = [
        0xAAAA_AAAA_AAAA_AAAA,
        0xCCCC_CCCC_CCCC_CCCC,
        0xF0F0_F0F0_F0F0_F0F0,
        0xFF00_FF00_FF00_FF00,
        0xFFFF_0000_FFFF_0000,
        0xFFFF_FFFF_0000_0000,
    ];
    let low =
        PLACES.iter().enumerate().map(|(bit, places)| ((all & places).count_ones() % 2) << bit);
    high | low.sum::<u32>()
}

fn is_odd(words: &[u64; WORDS]) -> bool {
    !words.iter().fold(0, |all, word| all ^ word).count_ones().is_multiple_of(2)
}

fn is_odd_count(bits: u32) -> bool {
    !bits.count_ones().is_multiple_of(2)
}

fn redundancy(vector: &[u8; VECTOR], number: u16) -> u32 {
    let mut check = crc32fast::Hasher::new();
    check.update(vector);
    check.update(&number.to_le_bytes());
    check.finalize()
}
