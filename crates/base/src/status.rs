//! The error type at the borders of the running system.
//!
//! Inside a layer, errors are that crate's enum; what reaches a client is a [`Status`]: a code of the
//! gRPC vocabulary (JAX shows its name first) and one sentence that names the cause.

use std::fmt;

/// The kind of a failure, with the numbers that gRPC and XLA assign.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i32)]
#[allow(missing_docs)]
pub enum Code {
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

const CODES: [(Code, &str); 16] = [
    (Code::Cancelled, "CANCELLED"),
    (Code::Unknown, "UNKNOWN"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::AlreadyExists, "ALREADY_EXISTS"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::OutOfRange, "OUT_OF_RANGE"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::DataLoss, "DATA_LOSS"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];

impl Code {
    /// The name JAX prints in front of a message.
    pub fn name(self) -> &'static str {
        CODES[self as usize - 1].1
    }

    /// The code with this number; anything outside 1-16 is `Unknown`.
    pub fn from_number(number: i32) -> Self {
        CODES.iter().find(|(code, _)| *code as i32 == number).map_or(Code::Unknown, |entry| entry.0)
    }
}

/// A failure as a client sees it.
///
/// ```
/// use base::{Code, Status};
/// let status = Status::parse("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.");
/// assert_eq!(status.code, Code::ResourceExhausted);
/// assert_eq!(status.message, "Out of memory allocating 9 bytes.");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    /// The kind of the failure.
    pub code: Code,
    /// What failed, what was expected, what was found, what to try.
    pub message: String,
}

impl Status {
    /// Creates a status.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Parses `CODE_NAME: message`, the form of XLA's errors; without a known code name, the whole text
    /// is the message of an `Unknown`.
    pub fn parse(text: &str) -> Self {
        let split = text.split_once(": ").and_then(|(name, message)| {
            let code = CODES.iter().find(|entry| entry.1 == name)?.0;
            Some(Status::new(code, message))
        });
        split.unwrap_or_else(|| Status::new(Code::Unknown, text))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.message)
    }
}

impl std::error::Error for Status {}
