//! Text format of placements: two lines.
//!
//! ```
//! let text = "placement of @train on @\"torus:4x4\"\nat [0..4,12,8]\n";
//! assert_eq!(ir::Placement::parse(text).unwrap().to_string(), text);
//! ```

use std::fmt::{self, Display};

use super::{Name, Ranges, TextError, read_lines};
use crate::placement::Placement;

impl Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "placement of @{} on @{}", Name(&self.step), Name(&self.topology))?;
        writeln!(f, "at {}", Ranges(&self.devices))
    }
}

impl Placement {
    /// Parses what [`Display`] prints.
    ///
    /// # Errors
    /// The first line that cannot be parsed.
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let mut names = None;
        let mut devices = None;
        read_lines(text, |words| {
            if names.is_none() {
                words.expect("placement of")?;
                let step = words.name()?;
                words.expect("on")?;
                names = Some((step, words.name()?));
            } else if devices.is_none() {
                words.expect("at")?;
                devices = Some(words.ranges()?);
            }
            Ok(())
        })?;
        match (names, devices) {
            (Some((step, topology)), Some(devices)) => Ok(Self { step, topology, devices }),
            _ => Err(TextError {
                line: text.lines().count() as u32 + 1,
                expected: "a placement and its devices",
                found: String::new(),
            }),
        }
    }
}
