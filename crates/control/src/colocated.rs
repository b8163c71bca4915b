//! Python functions of clients that run beside the hosts of their devices (`colocated_python`).

use ir::ArraySpec;

/// What a client's Python function takes and returns.
#[derive(Debug, Clone)]
pub struct Colocated {
    /// Its name.
    pub name: String,
    /// Its arguments.
    pub inputs: Vec<ArraySpec>,
    /// Its results.
    pub outputs: Vec<ArraySpec>,
    /// Whether its arguments may be of any element type, and not only of those of `inputs`.
    pub takes_any_type: bool,
    /// The user that it runs as; `None` for the hosts' own.
    pub user: Option<u32>,
}
