//! Connections between machines: encrypted, and each end proves who it is.
//!
//! A controller has an [`Authority`] of its own, and [`Tokens`] that it has given out. Its [`Gateway`]
//! is the only listener that other machines reach: it speaks TLS 1.3, lets a peer prove its token, and
//! connects it to the service that it asked for, a socket of the controller's own machine. A [`Remote`]
//! is the other end. A token names the authority by its digest, so that a peer needs nothing else.
//!
//! A proof is bound to its TLS session. What one peer has sent is of no use to another.
//!
//! Connections within a machine need none of that: [`identity`] asks the kernel who is there.

mod authority;
mod encryption;
mod error;
mod gateway;
pub mod identity;
mod peers;
mod remote;
mod strangers;
mod stream;
mod token;

pub use authority::Authority;
pub use encryption::{EncryptedStream, Encryption};
pub use error::TransportError;
pub use gateway::{Gateway, Refusal, Service, ServiceAddress};
pub use peers::{PeerConnection, RemotePeer};
pub use remote::{Carrier, Remote};
pub use strangers::{Decision, STRANGERS_MAX, Strangers};
pub use stream::BufferedStream;
pub use token::{Grant, PeerRole, StoredToken, Token, TokenId, Tokens, unhex};
