//! Ranks execute plans over real sockets.

mod failures;
mod planes;
mod plans;
mod steps;
