//! Damaged descriptions of islands and networks, which are read from files and the command line.

use base::{BitsPerSecond, Nanos};
use fuzzing::damaged_text;
use proptest::prelude::*;
use topology::IslandSpec;

proptest! {
    #[test]
    fn fuzz_islands(text in damaged_text(|_| "2x4,3x1x8".to_owned())) {
        if let Ok(islands) = IslandSpec::parse(&text) {
            prop_assert!(!islands.is_empty());
        }
    }

    #[test]
    fn fuzz_quantities(text in damaged_text(|seed| ["100Gbps", "7us"][seed as usize % 2].to_owned())) {
        let _ = (BitsPerSecond::parse(&text), Nanos::parse(&text));
    }
}
