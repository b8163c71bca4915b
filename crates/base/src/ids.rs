//! Identifiers. Each is its own type, so a host can never be passed where a device is meant.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// Devices joined by a fast interconnect.
    IslandId(u32)
);
id!(
    /// One host process, counted over all islands.
    HostId(u32)
);
id!(
    /// One device, counted over all islands; the number a JAX client sees.
    DeviceId(u32)
);
id!(
    /// One connected client. Never reused during a controller's lifetime.
    ClientId(u64)
);
id!(
    /// One logical buffer, whatever its shard count.
    BufferId(u64)
);
id!(
    /// One compiled program.
    ExecutableId(u64)
);
id!(
    /// One stream of batches that hosts produce; a random number chosen by the client that created it.
    InputId(u64)
);
id!(
    /// One message between two hosts, or between the controller and a host, on the data plane.
    TransferTag(u64)
);
id!(
    /// A path by which one host reaches another: 0 is the default connection, from 1 on are the host's
    /// channels onto the network between islands.
    Channel(u32)
);

impl Channel {
    /// The default path: between hosts of an island, and wherever no channels are known.
    pub const INSIDE: Self = Self(0);
}

id!(
    /// One vertex of a network: a chip that computes and forwards, or a switch.
    VertexId(u32)
);
id!(
    /// One direction of one link of a network.
    LinkId(u32)
);
id!(
    /// A vector's place in a chip's memory, counted in vectors.
    Address(u32)
);
