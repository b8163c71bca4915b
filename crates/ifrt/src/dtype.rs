//! Element types and their numbers in the protocol.

use ir::DType;

/// The protocol's number of each element type.
const KINDS: [(DType, i32); 30] = [
    (DType::Bool, 1),
    (DType::S8, 2),
    (DType::S16, 3),
    (DType::S32, 4),
    (DType::S64, 5),
    (DType::U8, 6),
    (DType::U16, 7),
    (DType::U32, 8),
    (DType::U64, 9),
    (DType::F16, 10),
    (DType::F32, 11),
    (DType::F64, 12),
    (DType::C64, 15),
    (DType::BF16, 16),
    (DType::Token, 17),
    (DType::C128, 18),
    (DType::F8E5M2, 19),
    (DType::F8E4M3Fn, 20),
    (DType::S4, 21),
    (DType::U4, 22),
    (DType::F8E4M3B11Fnuz, 23),
    (DType::F8E5M2Fnuz, 24),
    (DType::F8E4M3Fnuz, 25),
    (DType::S2, 26),
    (DType::U2, 27),
    (DType::F8E4M3, 28),
    (DType::F8E3M4, 29),
    (DType::F4E2M1Fn, 30),
    (DType::F8E8M0Fnu, 31),
    (DType::Str, 99),
];

pub(crate) fn from_kind(kind: i32) -> Option<DType> {
    KINDS.iter().find(|entry| entry.1 == kind).map(|entry| entry.0)
}

pub(crate) fn to_kind(dtype: DType) -> i32 {
    let entry = KINDS.iter().find(|entry| entry.0 == dtype);
    entry.expect("every element type has a number").1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_one_number() {
        for &dtype in DType::ALL {
            assert_eq!(from_kind(to_kind(dtype)), Some(dtype));
        }
    }
}
