//! Commands and reports as MessagePack: the protocol between the controller and its hosts.
//!
//! A command is an array `[kind, ...]`; commands follow one another without framing. A report is an
//! array `[kind, ...]` behind its length in four little-endian bytes. The host's side is
//! `python/fairway/host/wire.py`.

use std::io::{Cursor, Read};
use std::sync::Arc;

use base::{
    BufferId, Bytes, ClientId, Code, ExecutableId, HostId, InputId, Nanos, Status, TransferTag,
};
use control::{
    Acknowledge, Command, CompileRole, Compiled, CompiledSharding, FunctionCode, Group, HostInfo,
    HostReply, OutputSpec, RelayHop, Report, ShardPiece, ShardSend, SparsePart,
};
use fabric::Cluster;
use ir::{ArraySpec, DType, Dims, Partition, Region, Sparse};
use rmp::encode::{
    write_array_len, write_bin, write_bool, write_nil, write_sint, write_str, write_uint,
};
use thiserror::Error;

/// Longest report that is accepted, in bytes; larger data travels on the data plane.
pub const REPORT_LIMIT: usize = 256 << 20;
/// Longest report of a host that has not authenticated, in bytes.
pub const HELLO_LIMIT: usize = 64 << 10;

/// Errors of reading a report.
#[derive(Debug, Error)]
pub enum WireError {
    /// Not MessagePack, or not of the expected structure.
    #[error("a report is malformed at byte {at}: expected {expected}")]
    Malformed {
        /// Offset in the report.
        at: u64,
        /// What was expected there.
        expected: &'static str,
    },
}

/// The first report of a host (handshake).
#[derive(Debug)]
pub struct Hello {
    /// Token that proves it was started for this run.
    pub token: String,
    /// The number of the host.
    pub host: HostId,
    /// Its devices, addresses and versions.
    pub info: HostInfo,
}

/// A message from a host: the handshake, a report, or a notice of data.
#[derive(Debug)]
pub enum Incoming {
    /// The first message.
    Hello(Box<Hello>),
    /// A report.
    Report(Report),
    /// A large reply: its bytes travel on the data plane under the ticket.
    DataSent {
        /// The ticket, which is also the tag of the message.
        ticket: u64,
    },
}

/// Appends commands for one host to a buffer.
pub struct Encoder<'a> {
    out: &'a mut Vec<u8>,
    host: HostId,
    cluster: &'a Cluster,
    inline: usize,
}

// Writing to a vector cannot fail.
macro_rules! put {
    ($call:expr) => {
        $call.expect("writing to memory cannot fail")
    };
}

impl<'a> Encoder<'a> {
    /// Creates an encoder for `host`; uploads below `inline` bytes travel in their command.
    pub fn new(out: &'a mut Vec<u8>, host: HostId, cluster: &'a Cluster, inline: usize) -> Self {
        Self { out, host, cluster, inline }
    }

    /// Appends one command.
    pub fn command(&mut self, command: &Command) {
        match command {
            Command::Launch {
                sequence,
                previous,
                acknowledge,
                executable,
                args,
                first_result,
                results,
                keep,
                completion,
                client,
            } => {
                self.start(0, 10);
                self.uint(*sequence);
                self.uint(*previous);
                self.uint(acknowledgement(*acknowledge));
                self.uint(executable.0);
                self.uints(args.iter().map(|arg| arg.0));
                self.uint(first_result.0);
                self.uint(u64::from(*results));
                self.uints(keep.iter().map(|&index| u64::from(index)));
                self.uint(completion.map_or(0, |buffer| buffer.0));
                self.uint(client.0);
            }
            Command::Put { buffer, spec, shards } => {
                self.start(1, 3);
                self.uint(buffer.0);
                self.spec(spec);
                self.array(shards.len());
                for (positions, source) in shards {
                    self.array(4);
                    self.uints(positions.iter().map(|&position| u64::from(position)));
                    if source.data.len() < self.inline {
                        put!(write_bin(self.out, &source.data));
                    } else {
                        self.uint(source.tag.0);
                    }
                    self.ints(&source.dims);
                    self.optional_ints(source.byte_strides.as_deref());
                }
            }
            Command::Gather { buffer, spec, shards } => {
                self.start(2, 3);
                self.uint(buffer.0);
                self.spec(spec);
                self.array(shards.len());
                for (position, source, shard) in shards {
                    self.uints([u64::from(*position), source.0, u64::from(*shard)].into_iter());
                }
            }
            Command::Copy { source, buffer, spec } => {
                self.start(3, 3);
                self.uint(source.0);
                self.uint(buffer.0);
                self.spec(spec);
            }
            Command::Bitcast { source, buffer, spec } => {
                self.start(4, 3);
                self.uint(source.0);
                self.uint(buffer.0);
                self.spec(spec);
            }
            Command::Send { source, pieces, client } => {
                self.start(5, 3);
                self.uint(source.0);
                self.array(pieces.len());
                for ShardSend { shard, region, tag, to, channel } in pieces {
                    self.array(6);
                    self.uint(u64::from(*shard));
                    self.region(region);
                    self.uint(tag.0);
                    self.uint(u64::from(to.0));
                    self.uint(u64::from(channel.0));
                }
                self.uint(client.0);
            }
            Command::Relay(relays) => {
                self.start(26, 1);
                self.relays(relays);
            }
            Command::Receive { buffer, spec, shards, relays } => {
                self.start(6, 4);
                self.uint(buffer.0);
                self.spec(spec);
                self.array(shards.len());
                for (positions, pieces) in shards {
                    self.array(2);
                    self.uints(positions.iter().map(|&position| u64::from(position)));
                    self.array(pieces.len());
                    pieces.iter().for_each(|piece| self.piece(piece));
                }
                self.relays(relays);
            }
            Command::Read { ticket, buffer, shard, byte_strides } => {
                self.start(7, 4);
                self.uint(*ticket);
                self.uint(buffer.0);
                self.uint(u64::from(*shard));
                self.optional_ints(byte_strides.as_deref());
            }
            Command::CheckReady { ticket, buffers } => {
                self.start(8, 2);
                self.uint(*ticket);
                self.uints(buffers.iter().map(|buffer| buffer.0));
            }
            Command::Delete(buffers) => {
                self.start(9, 1);
                self.uints(buffers.iter().map(|buffer| buffer.0));
            }
            Command::Free(buffers) => {
                self.start(10, 1);
                self.uints(buffers.iter().map(|buffer| buffer.0));
            }
            Command::Poison { buffers, error } => {
                self.start(11, 2);
                self.uints(buffers.iter().map(|buffer| buffer.0));
                self.text(&error.to_string());
            }
            Command::Compile { ticket, executable, program, options, devices, grid, role } => {
                self.start(12, 7);
                self.uint(*ticket);
                self.uint(executable.0);
                put!(write_bin(self.out, program));
                put!(write_bin(self.out, options));
                self.uints(devices.iter().map(|&device| u64::from(device)));
                self.uints([u64::from(grid.0), u64::from(grid.1)].into_iter());
                self.role(role);
            }
            Command::FreeExecutable(executable) => {
                self.start(13, 1);
                self.uint(executable.0);
            }
            Command::ProgramText { ticket, executable } => {
                self.start(15, 2);
                self.uint(*ticket);
                self.uint(executable.0);
            }
            Command::CompileExchange { ticket, executable, program, owners } => {
                self.start(17, 4);
                self.uint(*ticket);
                self.uint(executable.0);
                put!(write_bin(self.out, program));
                self.uints(owners.iter().map(|owner| u64::from(owner.0)));
            }
            Command::Exchange { executable, args, first_result, results, first_tag, client } => {
                self.start(18, 6);
                self.uint(executable.0);
                self.uints(args.iter().map(|arg| arg.0));
                self.uint(first_result.0);
                self.array(results.len());
                results.iter().for_each(|spec| self.spec(spec));
                self.uint(first_tag.0);
                self.uint(client.0);
            }
            Command::Sparse(part) => self.sparse(part),
            Command::EndInput { input, batches, error } => {
                self.start(24, 3);
                self.uint(input.0);
                self.uint(*batches);
                self.text(&error.to_string());
            }
            Command::Tidy => self.start(19, 0),
            Command::ReportArrival(buffer) => {
                self.start(28, 1);
                self.uint(buffer.0);
            }
            Command::ReportEnd => self.start(29, 0),
            Command::Spill(buffers) => {
                self.start(22, 1);
                self.uints(buffers.iter().map(|buffer| buffer.0));
            }
            Command::Restore(buffers) => {
                self.start(23, 1);
                self.uints(buffers.iter().map(|buffer| buffer.0));
            }
            Command::ReadProgram { ticket, program } => {
                self.start(20, 2);
                self.uint(*ticket);
                put!(write_bin(self.out, program));
            }
            Command::LoadProgram { executable, steps } => {
                self.start(21, 2);
                self.uint(executable.0);
                self.array(steps.len());
                steps.iter().for_each(|step| self.command(step));
            }
            Command::Run {
                sequence,
                previous,
                acknowledge,
                executable,
                steps,
                args,
                first_buffer,
                first_tag,
                completion,
                plan,
                client,
            } => {
                self.start(14, 11);
                self.uint(*sequence);
                self.uint(*previous);
                self.uint(acknowledgement(*acknowledge));
                self.uint(executable.0);
                self.uints([u64::from(steps.start), u64::from(steps.end)].into_iter());
                self.uints(args.iter().map(|arg| arg.0));
                self.uint(first_buffer.0);
                self.uint(first_tag.0);
                self.uint(completion.map_or(0, |buffer| buffer.0));
                self.uint(u64::from(*plan));
                self.uint(client.0);
            }
            Command::Plan { executable, plan, script } => {
                self.start(27, 3);
                self.uint(executable.0);
                self.uint(u64::from(*plan));
                self.text(script);
            }
            Command::Peers(peers) => {
                self.start(16, 1);
                self.array(peers.len());
                for (host, address) in peers {
                    self.array(2);
                    self.uint(u64::from(host.0));
                    self.text(address);
                }
            }
        }
    }

    fn start(&mut self, kind: u8, fields: usize) {
        self.array(fields + 1);
        self.uint(u64::from(kind));
    }

    fn array(&mut self, length: usize) {
        put!(write_array_len(self.out, length as u32));
    }

    fn uint(&mut self, value: u64) {
        put!(write_uint(self.out, value));
    }

    fn text(&mut self, value: &str) {
        put!(write_str(self.out, value));
    }

    fn relays(&mut self, relays: &[RelayHop]) {
        self.array(relays.len());
        for RelayHop { tag, from, onward, to, channel } in relays {
            let (from, to, channel) = (u64::from(from.0), u64::from(to.0), u64::from(channel.0));
            self.uints([tag.0, from, onward.0, to, channel].into_iter());
        }
    }

    fn uints(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.array(values.len());
        values.for_each(|value| self.uint(value));
    }

    fn ints(&mut self, values: &[i64]) {
        self.array(values.len());
        values.iter().for_each(|&value| {
            put!(write_sint(self.out, value));
        });
    }

    fn optional_ints(&mut self, values: Option<&[i64]>) {
        match values {
            Some(values) => self.ints(values),
            None => put!(write_nil(self.out)),
        }
    }

    fn region(&mut self, region: &Region) {
        self.ints(&region.start);
        self.ints(&region.size);
    }

    fn piece(&mut self, piece: &ShardPiece) {
        self.array(4);
        self.uint(piece.tag.0);
        self.uint(u64::from(piece.from.0));
        self.region(&piece.region);
    }

    /// `[dtype, memory, [[position, local device, shard shape], ...]]` of this host's shards.
    fn spec(&mut self, spec: &ArraySpec) {
        let devices = spec.sharding.devices.iter().enumerate();
        let mine: Vec<_> = devices
            .filter_map(|(position, &device)| {
                let device = self.cluster.device(device)?;
                (device.host == self.host).then_some((position, device.local))
            })
            .collect();
        self.array(3);
        self.text(spec.dtype.name());
        match &spec.sharding.memory {
            Some(memory) => self.text(memory),
            None => put!(write_nil(self.out)),
        }
        self.array(mine.len());
        for (position, local) in mine {
            self.array(3);
            self.uint(position as u64);
            self.uint(u64::from(local));
            self.ints(&spec.sharding.shard_dims(&spec.dims, position));
        }
    }

    fn sparse(&mut self, part: &SparsePart) {
        self.start(25, 8);
        let (bins, credit, round) = match part.sparse {
            Sparse::Dispatch { bins, credit, round } => (bins, credit, round),
            Sparse::Collect => (0, 0, 0),
            Sparse::Reduce => (0, 0, 1),
            Sparse::Gather => (0, 0, 2),
            Sparse::Scatter => (0, 0, 3),
        };
        self.uints([bins, credit, round].map(u64::from).into_iter());
        let ends = &part.ends;
        let fields = [ends.source.rows, ends.choices, u32::from(ends.is_each)];
        self.uints(fields.map(u64::from).into_iter());
        let numbers = |shards: &[u32]| shards.iter().copied().map(u64::from).collect::<Vec<_>>();
        self.array(part.given.len());
        for Group { values, shards } in &part.given {
            self.array(2);
            self.uints(values.iter().map(|buffer| buffer.0));
            self.uints(numbers(shards).into_iter());
        }
        self.array(part.made.len());
        for Group { values, shards } in &part.made {
            self.array(2);
            self.array(values.len());
            for (buffer, spec) in values {
                self.array(2);
                self.uint(buffer.0);
                self.spec(spec);
            }
            self.uints(numbers(shards).into_iter());
        }
        for peers in [&part.to, &part.from] {
            self.array(peers.len());
            for (host, tag, shards) in peers {
                self.array(3);
                self.uint(u64::from(host.0));
                self.uint(tag.0);
                self.uints(numbers(shards).into_iter());
            }
        }
        self.uint(u64::from(part.number));
        self.uints(numbers(&part.after).into_iter());
    }

    fn role(&mut self, role: &CompileRole) {
        match role {
            CompileRole::Leader(followers) => {
                self.array(2);
                put!(write_bool(self.out, true));
                self.array(followers.len());
                for (host, tag) in followers {
                    self.uints([u64::from(host.0), tag.0].into_iter());
                }
            }
            CompileRole::Follower(leader, tag) => {
                self.array(2);
                put!(write_bool(self.out, false));
                self.uints([u64::from(leader.0), tag.0].into_iter());
            }
        }
    }
}

fn acknowledgement(acknowledge: Acknowledge) -> u64 {
    match acknowledge {
        Acknowledge::No => 0,
        Acknowledge::Finished => 1,
        Acknowledge::Enqueued => 2,
    }
}

/// Returns the tag under which the bytes of a large `Read` travel to the controller.
pub fn data_tag(ticket: u64) -> TransferTag {
    TransferTag(ticket)
}

/// Decodes reports.
struct Decoder<'a>(Cursor<&'a [u8]>);

type Result<T> = std::result::Result<T, WireError>;

/// Decodes one report, without its length prefix.
///
/// # Errors
/// It is malformed.
pub fn decode(report: &[u8]) -> Result<Incoming> {
    let mut decoder = Decoder(Cursor::new(report));
    let fields = decoder.array()?;
    let kind = decoder.uint()?;
    match (kind, fields) {
        (0, 13) => Ok(Incoming::Hello(Box::new(decoder.hello()?))),
        (1, 2) => Ok(Incoming::Report(Report::Finished { busy: Nanos(decoder.uint()?) })),
        (2, 3) => {
            let ticket = decoder.uint()?;
            let result = Ok(decoder.reply()?);
            Ok(Incoming::Report(Report::Done { ticket, result }))
        }
        (3, 4) => {
            let ticket = decoder.uint()?;
            let result = Err(decoder.code_and_message()?);
            Ok(Incoming::Report(Report::Done { ticket, result }))
        }
        (4, 2) => Ok(Incoming::Report(Report::OrderBroken { message: decoder.text()? })),
        (5, 2) => Ok(Incoming::DataSent { ticket: decoder.uint()? }),
        (6, 3) => {
            let input = InputId(decoder.uint()?);
            let end = decoder.optional(Decoder::status)?;
            Ok(Incoming::Report(Report::Batch { input, end }))
        }
        (7, 3) => {
            let client = ClientId(decoder.uint()?);
            let bytes = Bytes(decoder.uint()?);
            Ok(Incoming::Report(Report::Moved { client, bytes }))
        }
        (8, 5) => {
            let executable = ExecutableId(decoder.uint()?);
            let plan = decoder.uint()?.try_into();
            let plan = plan.map_err(|_| decoder.malformed("the number of a plan"))?;
            let script = decoder.text()?;
            let predicted = decoder.optional(Decoder::times)?;
            Ok(Incoming::Report(Report::Planned { executable, plan, script, predicted }))
        }
        (9, 2) => {
            let buffer = BufferId(decoder.uint()?);
            Ok(Incoming::Report(Report::Arrived { buffer }))
        }
        _ => Err(decoder.malformed("a known kind of report")),
    }
}

impl Decoder<'_> {
    fn malformed(&self, expected: &'static str) -> WireError {
        WireError::Malformed { at: self.0.position(), expected }
    }

    /// Checks that the rest of the report can hold `length` elements.
    fn length(&self, length: u32, expected: &'static str) -> Result<usize> {
        let left = self.0.get_ref().len() as u64 - self.0.position();
        if u64::from(length) > left { Err(self.malformed(expected)) } else { Ok(length as usize) }
    }

    fn array(&mut self) -> Result<usize> {
        let length = rmp::decode::read_array_len(&mut self.0);
        let length = length.map_err(|_| self.malformed("an array"))?;
        self.length(length, "an array that fits")
    }

    fn uint(&mut self) -> Result<u64> {
        rmp::decode::read_int(&mut self.0).map_err(|_| self.malformed("a whole number"))
    }

    fn small(&mut self) -> Result<u32> {
        rmp::decode::read_int(&mut self.0).map_err(|_| self.malformed("a small whole number"))
    }

    fn int(&mut self) -> Result<i64> {
        rmp::decode::read_int(&mut self.0).map_err(|_| self.malformed("a whole number"))
    }

    fn bytes(&mut self) -> Result<Vec<u8>> {
        let length = rmp::decode::read_bin_len(&mut self.0);
        let length = length.map_err(|_| self.malformed("bytes"))?;
        self.take(length)
    }

    fn text(&mut self) -> Result<String> {
        let length = rmp::decode::read_str_len(&mut self.0);
        let length = length.map_err(|_| self.malformed("a text"))?;
        String::from_utf8(self.take(length)?).map_err(|_| self.malformed("a text in UTF-8"))
    }

    fn take(&mut self, length: u32) -> Result<Vec<u8>> {
        let length = self.length(length, "as many bytes as announced")?;
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).map_err(|_| self.malformed("more bytes"))?;
        Ok(bytes)
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let length = self.array()?;
        (0..length).map(|_| item(self)).collect()
    }

    /// Reads nil, or a value by `item`.
    fn optional<T>(&mut self, item: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        let at = self.0.position() as usize;
        if self.0.get_ref().get(at) == Some(&0xc0) {
            self.0.set_position(at as u64 + 1);
            return Ok(None);
        }
        item(self).map(Some)
    }

    fn code_and_message(&mut self) -> Result<Status> {
        let code = Code::from_number(self.small()? as i32);
        Ok(Status::new(code, self.text()?))
    }

    fn status(&mut self) -> Result<Status> {
        if self.array()? != 2 {
            return Err(self.malformed("a code and a message"));
        }
        self.code_and_message()
    }

    fn times(&mut self) -> Result<(Nanos, Nanos)> {
        if self.array()? != 2 {
            return Err(self.malformed("two times"));
        }
        Ok((Nanos(self.uint()?), Nanos(self.uint()?)))
    }

    fn hello(&mut self) -> Result<Hello> {
        let token = self.text()?;
        let host = HostId(self.small()?);
        let process = self.small()?;
        let data_address = self.text()?;
        let channels = self.list(Self::text)?;
        let jaxlib = self.text()?;
        let platform = self.text()?;
        let platform_version = self.text()?;
        let device_kind = self.text()?.into();
        let memories = self.list(|this| Ok(Arc::from(this.text()?)))?.into();
        let devices = self.small()?;
        let device_memory = Some(self.uint()?).filter(|&bytes| bytes > 0);
        let info = HostInfo {
            process,
            data_address,
            channels,
            jaxlib,
            platform,
            platform_version,
            device_kind,
            memories,
            devices,
            device_memory,
        };
        Ok(Hello { token, host, info })
    }

    fn reply(&mut self) -> Result<HostReply> {
        let fields = self.array()?;
        let kind = self.uint()?;
        match (kind, fields) {
            (0, 1) => Ok(HostReply::Done),
            (1, 2) => Ok(HostReply::Data(self.bytes()?.into())),
            (2, 13) => Ok(HostReply::Compiled(Box::new(self.compiled()?))),
            (4, 2) => Ok(HostReply::Text(self.text()?)),
            (3, 4) => {
                let text = self.text()?;
                let batched = self.text()?;
                let functions = self.list(Self::function)?;
                Ok(HostReply::Program { text, batched, functions })
            }
            _ => Err(self.malformed("a known kind of answer")),
        }
    }

    fn cost(&mut self) -> Result<(String, f64)> {
        if self.array()? != 2 {
            return Err(self.malformed("a name and a value"));
        }
        let name = self.text()?;
        let value = rmp::decode::read_f64(&mut self.0);
        Ok((name, value.map_err(|_| self.malformed("a number"))?))
    }

    fn function(&mut self) -> Result<FunctionCode> {
        if self.array()? != 2 {
            return Err(self.malformed("names of options and an artifact"));
        }
        Ok(FunctionCode { options: self.list(Self::text)?, artifact: self.bytes()? })
    }

    fn compiled(&mut self) -> Result<Compiled> {
        Ok(Compiled {
            name: self.text()?,
            fingerprint: self.optional(Self::bytes)?,
            parameters: self.optional(|this| this.list(Self::cut))?,
            parameter_layouts: self.list(|this| this.list(Self::int))?,
            outputs: self.list(Self::output)?,
            output_layouts: self.list(|this| this.list(Self::int))?,
            donated: self.list(Self::small)?,
            parameter_count: self.small()?,
            memory: self.optional(|this| this.list(Self::int))?.and_then(|m| m.try_into().ok()),
            code_bytes: self.int()?,
            costs: self.optional(|this| this.list(Self::cost))?,
            input: self.optional(Self::uint)?.map(InputId),
        })
    }

    fn output(&mut self) -> Result<OutputSpec> {
        if self.array()? != 4 {
            return Err(self.malformed("an output of four fields"));
        }
        let dtype = self.text()?;
        let dtype = DType::from_name(&dtype).ok_or_else(|| self.malformed("an element type"))?;
        let dims: Dims = self.list(Self::int)?.into();
        let cut = self.cut()?;
        let memory = self.optional(|this| Ok(Arc::from(this.text()?)))?;
        Ok(OutputSpec { dtype, dims, cut, memory })
    }

    fn cut(&mut self) -> Result<CompiledSharding> {
        if self.array()? != 2 {
            return Err(self.malformed("a partition and its encoding"));
        }
        Ok(CompiledSharding { partition: self.partition()?, encoded: self.bytes()?.into() })
    }

    /// Nil for replicated, else `[tiles along each axis, tile of each position]`.
    fn partition(&mut self) -> Result<Partition> {
        let tiles = self.optional(|this| {
            if this.array()? != 2 {
                return Err(this.malformed("a partition of two fields"));
            }
            Ok((this.list(Self::int)?, this.list(Self::small)?))
        })?;
        Ok(match tiles {
            None => Partition::Replicated,
            Some((counts, tile_of)) => {
                Partition::Tiled { counts: counts.into(), tile_of: tile_of.into() }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused() {
        let mut state = 1_u64;
        for length in 0..2000 {
            let report: Vec<u8> = (0..length % 90)
                .map(|_| {
                    state =
                        state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 33) as u8
                })
                .collect();
            drop(decode(&report));
        }
        assert!(decode(&[0x92, 1]).is_err());
        let finished = decode(&[0x92, 1, 5]);
        let busy = Nanos(5);
        assert!(
            matches!(finished, Ok(Incoming::Report(Report::Finished { busy: b })) if b == busy)
        );
        assert!(decode(&[0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    }
}
