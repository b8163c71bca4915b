//! Simulation of a network of chips in virtual time: schedules executed with data, clocks that drift,
//! link errors.

mod clocks;
mod code;
mod machine;
mod memory;
mod noise;
mod routed;
mod slots;
mod spares;

pub use clocks::{ClockError, ClockModel, Clocks, EPOCH, Latency, MEASURED, Start, measurements};
pub use code::{ENCODED, Encoded, Uncorrectable, VECTOR, decode, encode, send_with_errors};
pub use machine::{Incident, Machine, MachineError, MachineReport, Mishap};
pub use memory::{ChipMemory, Compute, Nothing, Results, SumType};
pub use noise::Noise;
pub use routed::{Delivered, Message, RingAllReduce, Routed, Routing, Traffic, Uniform};
pub use slots::{Kept, Slack, Violation, keep_slots};
pub use spares::{Provision, SpareError, SpareReport, Spares};
