//! Writes messages as MessagePack.

use base::HostId;
use rmp::encode;
use topology::Cluster;

/// Appends messages for one host to a buffer.
///
/// It knows the host because an array's spec is written as the shards of that host only, and where
/// uploads travel.
#[derive(Debug)]
pub struct Encoder<'a> {
    out: &'a mut Vec<u8>,
    host: HostId,
    cluster: &'a Cluster,
    inline: usize,
}

impl<'a> Encoder<'a> {
    /// Creates an encoder for `host`; uploads below `inline` bytes travel in their command.
    pub fn new(out: &'a mut Vec<u8>, host: HostId, cluster: &'a Cluster, inline: usize) -> Self {
        Self { out, host, cluster, inline }
    }

    /// The devices of all islands.
    pub(crate) fn cluster(&self) -> &'a Cluster {
        self.cluster
    }

    /// The host that reads the messages.
    pub(crate) fn host(&self) -> HostId {
        self.host
    }

    /// Size in bytes from which uploads travel on the data plane.
    pub(crate) fn inline(&self) -> usize {
        self.inline
    }

    /// Begins a message of `fields` fields.
    pub(crate) fn message(&mut self, number: u8, fields: usize) {
        self.array(fields + 1);
        self.uint(u64::from(number));
    }

    pub(crate) fn array(&mut self, length: usize) {
        written(encode::write_array_len(self.out, length as u32));
    }

    pub(crate) fn uint(&mut self, value: u64) {
        written(encode::write_uint(self.out, value));
    }

    pub(crate) fn int(&mut self, value: i64) {
        written(encode::write_sint(self.out, value));
    }

    pub(crate) fn float(&mut self, value: f64) {
        written(encode::write_f64(self.out, value));
    }

    pub(crate) fn bool(&mut self, value: bool) {
        written(encode::write_bool(self.out, value));
    }

    pub(crate) fn nil(&mut self) {
        written(encode::write_nil(self.out));
    }

    pub(crate) fn bytes(&mut self, value: &[u8]) {
        written(encode::write_bin(self.out, value));
    }

    /// Writes the concatenation of `parts` as one text.
    pub(crate) fn text(&mut self, parts: &[&str]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        written(encode::write_str_len(self.out, length as u32));
        parts.iter().for_each(|part| self.out.extend_from_slice(part.as_bytes()));
    }
}

/// Writing to a vector cannot fail.
fn written<T, E: std::fmt::Debug>(result: Result<T, E>) {
    result.expect("writing to memory cannot fail");
}
