//! Fabrics by name: `dragonfly:264`, `torus:8x8`.

use thiserror::Error;

use crate::dragonfly::{Dragonfly, DragonflyError};
use crate::fabric::Fabric;
use crate::network::NetworkError;
use crate::topologies::{clusters, fat_tree, ring, switch, torus};
use crate::wiring::LinkModel;

/// Maximum number of endpoints of a named fabric.
const ENDPOINTS_MAX: u64 = 1 << 20;

/// Why a name does not describe a fabric.
#[derive(Debug, Error, PartialEq)]
pub enum NamedError {
    /// The name cannot be parsed.
    #[error(
        "cannot read a fabric from {found:?}; expected dragonfly:CHIPS, torus:8x8, ring:CHIPS \
         or ring:CHIPSxCABLES, switch:CHIPS, fattree:PORTS or cluster:NODESxCHIPS, of at most {ENDPOINTS_MAX} chips"
    )]
    Unknown {
        /// The name.
        found: String,
    },
    /// No such Dragonfly can be wired.
    #[error(transparent)]
    Dragonfly(#[from] DragonflyError),
    /// The parameters do not form a valid network.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

/// Builds the fabric of this name, with the same link model everywhere.
///
/// # Errors
/// The name cannot be parsed, or the fabric cannot be built.
///
/// ```
/// use fabric::{LinkModel, named};
/// assert_eq!(named("torus:4x4", LinkModel::default()).unwrap().network().endpoints(), 16);
/// assert!(named("torus:4x", LinkModel::default()).is_err());
/// ```
pub fn named(text: &str, model: LinkModel) -> Result<Fabric, NamedError> {
    let unknown = || NamedError::Unknown { found: text.to_owned() };
    let (kind, extents) = text.split_once(':').ok_or_else(unknown)?;
    let extents: Result<Vec<u32>, _> = extents.split('x').map(str::parse).collect();
    let extents = extents.map_err(|_| unknown())?;
    let check = |count: u64| if count <= ENDPOINTS_MAX { Ok(()) } else { Err(unknown()) };
    let product = extents.iter().try_fold(1_u64, |all, &one| all.checked_mul(u64::from(one)));
    check(product.ok_or_else(unknown)?)?;
    let network = match (kind, extents.as_slice()) {
        ("dragonfly", &[chips]) => {
            return Ok(Fabric::Dragonfly(Box::new(Dragonfly::new(chips, model)?)));
        }
        ("torus", extents) => torus(extents, model)?,
        ("ring", &[chips]) => ring(chips, 1, model)?,
        ("ring", &[chips, cables]) => ring(chips, cables, model)?,
        ("switch", &[chips]) => switch(chips, 1, model)?,
        ("fattree", &[ports]) => {
            check(u64::from(ports).pow(3) / 4)?;
            fat_tree(ports, model)?
        }
        ("cluster", &[nodes, per_node]) => clusters(nodes, per_node, model, model)?,
        _ => return Err(unknown()),
    };
    Ok(Fabric::Network(network))
}
