//! Units as types, identifiers, and the error vocabulary every layer shares.
//!
//! Nothing here knows what an array or a device is; it only keeps an index, a count and a
//! byte size from being mistaken for one another.

mod ids;
mod ordered;
mod random;
mod status;
mod units;

pub use ids::{
    Address, BufferId, Channel, ClientId, DeviceId, ExecutableId, HostId, InputId, IslandId,
    LinkId, TransferTag, VertexId,
};
pub use ordered::Ordered;
pub use random::Random;
pub use status::{Code, Status};
pub use units::{BitsPerSecond, Bytes, Nanos, Ticks};
