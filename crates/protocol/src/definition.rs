//! The definition of the whole protocol.

use crate::{Command, Field, Hello, HostReply, Report, Schema};

impl Schema {
    /// Returns the definition of the whole protocol.
    pub fn new() -> Self {
        let mut schema = Self::default();
        Command::define(&mut schema);
        HostReply::define(&mut schema);
        Report::define(&mut schema);
        Hello::define(&mut schema);
        schema
    }
}
