//! Specification of islands: `2x1x4` is islands x hosts x devices per host.

use thiserror::Error;

/// Why a text does not specify islands.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FabricError {
    /// Not three positive numbers.
    #[error(
        "cannot read islands from {found:?}; expected ISLANDSxHOSTSxDEVICES with whole numbers \
         of at least 1; try 2x1x4"
    )]
    Islands {
        /// The text.
        found: String,
    },
}

/// Specification of an island.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IslandSpec {
    /// Host processes of the island.
    pub hosts: u32,
    /// Devices of each host.
    pub devices_per_host: u32,
}

impl IslandSpec {
    /// Creates the specification of an island.
    pub fn new(hosts: u32, devices_per_host: u32) -> Self {
        Self { hosts, devices_per_host }
    }

    /// Parses `2x1x4`: two islands of one host with four devices each.
    ///
    /// ```
    /// use topology::IslandSpec;
    /// let islands = IslandSpec::parse("2x1x4").unwrap();
    /// assert_eq!(islands, vec![IslandSpec::new(1, 4); 2]);
    /// assert!(IslandSpec::parse("2x0x4").is_err());
    /// ```
    pub fn parse(text: &str) -> Result<Vec<IslandSpec>, FabricError> {
        let error = || FabricError::Islands { found: text.to_owned() };
        let parts: Option<Vec<u32>> =
            text.split('x').map(|part| part.parse().ok().filter(|&count| count > 0)).collect();
        match parts.as_deref() {
            Some(&[islands, hosts, devices_per_host]) if islands <= 1024 => {
                Ok(vec![IslandSpec::new(hosts, devices_per_host); islands as usize])
            }
            _ => Err(error()),
        }
    }
}
