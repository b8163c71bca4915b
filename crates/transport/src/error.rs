//! Errors of connections between machines.

use std::io;

use thiserror::Error;

/// Why a connection is not made.
#[derive(Debug, Error)]
pub enum TransportError {
    /// A text is no token.
    #[error("{0} is no token; expected what fairway token create prints: fairway-ROLE-...")]
    NotAToken(String),
    /// An address cannot be listened at.
    #[error("cannot listen at {address}: {source}")]
    Bind {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// An address does not answer.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The other end does not prove that it is the controller that made the token.
    #[error("{address} is not the controller that made this token: {reason}")]
    NotTheController {
        /// The address.
        address: String,
        /// Why.
        reason: String,
    },
    /// The controller refuses the token, or the service to its role.
    #[error("the controller at {address} refuses: {reason}")]
    Refused {
        /// The address.
        address: String,
        /// Why.
        reason: String,
    },
    /// A certificate cannot be made or read.
    #[error("cannot make a certificate: {0}")]
    Certificate(String),
    /// A certificate that was given is of no use.
    #[error("cannot use the certificate: {0}")]
    GivenCertificate(String),
}
