//! Limits of a request, checked on its bytes before they are decoded.
//!
//! Two bytes of a message can decode to two hundred bytes, so a size limit alone bounds nothing. Parts
//! (length-delimited fields) are counted where messages repeat; only programs may be long.

use std::any::TypeId;
use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::proto as p;

/// Largest message that compiles no program, in bytes; uploads come in chunks of 1 MiB.
const MESSAGE_BYTES: usize = 8 << 20;
/// Maximum number of parts of a message, counted recursively for `DEPTH` levels.
const PARTS: usize = 256 << 10;
/// A request contains a body, which may contain a plan, which contains mappings.
const DEPTH: usize = 4;
/// Field `IfrtRequest.compile_request`, which carries programs and their constants.
const COMPILE: u32 = 13;
/// Longest compile options, in bytes: unlike the program beside them, they are decoded here.
pub(crate) const OPTIONS_BYTES: usize = 16 << 20;
/// Maximum number of arrays that one request creates.
pub(crate) const ARRAYS: usize = 16 << 10;
/// Assumed decoded size, per encoded byte, of a request that compiles nothing.
const DECODED: usize = 64;

/// Returns the bytes that a request without a response counts for admission.
pub(crate) fn weight(encoded: usize, compiles: bool) -> usize {
    if compiles { encoded } else { encoded.saturating_mul(DECODED) }
}

/// Checks the length of a message.
///
/// # Errors
/// It is too long.
fn check_length(message: &[u8]) -> Result<(), Status> {
    if message.len() <= MESSAGE_BYTES {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "a message of {} bytes; at most {MESSAGE_BYTES} are taken unless it compiles a program",
        message.len()
    )))
}

/// Checks the length of a request and its number of parts.
///
/// # Errors
/// It is too long, or has too many parts.
pub(crate) fn check_request(message: &[u8]) -> Result<(), Status> {
    let (mut rest, mut parts, mut compiles) = (message, 0, false);
    while let Some((number, part)) = next_field(&mut rest) {
        compiles |= number == COMPILE && part.is_some();
        // The contents of a program are not decoded here.
        let depth = if number == COMPILE { 1 } else { DEPTH - 1 };
        parts += 1;
        count_parts(part.unwrap_or_default(), depth, &mut parts);
        if parts > PARTS {
            return Err(Status::resource_exhausted(format!(
                "a request of more than {PARTS} parts; ask for fewer arrays at a time"
            )));
        }
    }
    if compiles && rest.is_empty() { Ok(()) } else { check_length(message) }
}

/// Counts the parts of a field that may be a message; other bytes parse as few parts.
fn count_parts(mut message: &[u8], depth: usize, parts: &mut usize) {
    while *parts <= PARTS
        && let Some((_, part)) = next_field(&mut message)
    {
        let Some(part) = part else { continue };
        *parts += 1;
        if depth > 1 {
            count_parts(part, depth - 1, parts);
        }
    }
}

/// Returns the number of the next field, and its bytes if it is length-delimited; `None` at the end, or
/// if there is no valid field.
fn next_field<'a>(message: &mut &'a [u8]) -> Option<(u32, Option<&'a [u8]>)> {
    if message.is_empty() {
        return None;
    }
    let (number, wire) = decode_key(message).ok()?;
    let skipped = match wire {
        WireType::Varint => {
            decode_varint(message).ok()?;
            return Some((number, None));
        }
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        WireType::LengthDelimited => {
            let length = usize::try_from(decode_varint(message).ok()?).ok()?;
            let part = message.get(..length)?;
            message.advance(length);
            return Some((number, Some(part)));
        }
        WireType::StartGroup | WireType::EndGroup => return None,
    };
    if message.len() < skipped {
        return None;
    }
    message.advance(skipped);
    Some((number, None))
}

/// A codec for the messages of the service that rejects messages over the limits.
pub(crate) struct BoundedCodec<Sent, Taken>(PhantomData<(Sent, Taken)>);

impl<Sent, Taken> Default for BoundedCodec<Sent, Taken> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<Sent, Taken> Codec for BoundedCodec<Sent, Taken>
where
    Sent: Message + Send + 'static,
    Taken: Message + Default + Send + 'static,
{
    type Encode = Sent;
    type Decode = Taken;
    type Encoder = <ProstCodec<Sent, Taken> as Codec>::Encoder;
    type Decoder = BoundedDecoder<Taken>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<Sent, Taken>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(ProstCodec::<Sent, Taken>::default().decoder())
    }
}

/// A decoder that checks a message before it decodes it.
pub(crate) struct BoundedDecoder<Taken>(ProstDecoder<Taken>);

impl<Taken: Message + Default + 'static> Decoder for BoundedDecoder<Taken> {
    type Item = Taken;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<Taken>, Status> {
        // The transport buffers each message contiguously.
        if TypeId::of::<Taken>() == TypeId::of::<p::IfrtRequest>() {
            check_request(bytes.chunk())?;
        } else {
            check_length(bytes.chunk())?;
        }
        self.0.decode(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::ifrt_request::Request;

    fn request(body: Request) -> Vec<u8> {
        p::IfrtRequest { request: Some(body), ..Default::default() }.encode_to_vec()
    }

    #[test]
    fn requests_of_many_parts_are_refused_at_any_depth() {
        let specs = |count| p::MakeErrorArraysRequest {
            array_specs: vec![p::ArraySpecProto::default(); count],
            ..Default::default()
        };
        check_request(&request(Request::MakeErrorArraysRequest(specs(ARRAYS)))).unwrap();
        let error =
            check_request(&request(Request::MakeErrorArraysRequest(specs(PARTS)))).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        let plan = p::RemapPlanProto {
            mappings: vec![p::remap_plan_proto::MappingProto::default(); PARTS],
            ..Default::default()
        };
        let remap = p::RemapArraysRequest { plan: Some(plan), ..Default::default() };
        check_request(&request(Request::RemapArraysRequest(remap))).unwrap_err();
    }

    #[test]
    fn only_programs_are_long() {
        let program = p::Serialized { data: vec![0; MESSAGE_BYTES].into(), ..Default::default() };
        let compile = p::CompileRequest { program: Some(program), ..Default::default() };
        check_request(&request(Request::CompileRequest(compile))).unwrap();
        let names = vec![7; MESSAGE_BYTES / 8];
        let delete = p::DeleteArrayRequest { array_handle: names };
        check_request(&request(Request::DeleteArrayRequest(delete))).unwrap_err();
    }

    #[test]
    fn the_contents_of_programs_and_uploads_are_not_counted() {
        let fields = [0x0a, 0].repeat(2 * PARTS);
        let program = p::Serialized { data: fields.clone().into(), ..Default::default() };
        let compile = p::CompileRequest { program: Some(program), ..Default::default() };
        check_request(&request(Request::CompileRequest(compile))).unwrap();
        check_length(&p::GrpcHostBufferStoreRequest { data: fields.into() }.encode_to_vec())
            .unwrap();
    }

    #[test]
    fn what_is_no_message_has_few_parts() {
        check_request(&[0xff; 4096]).unwrap();
        check_request(b"").unwrap();
    }
}
