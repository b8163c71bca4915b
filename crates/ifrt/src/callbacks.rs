//! The stream on which a client's process takes the calls of hosts (host callbacks).
//!
//! The proxy protocol has calls, which the stock client does not execute. So Fairway's plugin opens a
//! connection beside its session: a greeting and the key that its session has named, answered by one
//! byte. Then each call is its number, its function and the length of its operands, as 64-bit
//! little-endian integers, and the operands; each answer is a number, a length and the bytes.

use std::io;
use std::sync::Arc;

use base::ClientId;
use bytes::Bytes;
use control::Event;
use run::{Call, CallbackKey, Readback, World};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tonic::transport::server::Connected;

use crate::connection::{Identity, ProxyConnection};
use crate::proto as p;

/// What such a connection begins with; a session begins with the preface of HTTP/2.
pub(crate) const GREETING: &[u8] = b"fairway callbacks 1\n";
/// What a connection begins with on which a client gets the small arrays that it reads.
const READBACKS: &[u8] = b"fairway readbacks 1\n";
/// Answers to the greeting.
const WELCOME: u8 = 1;
const NO_SUCH_KEY: u8 = 0;
/// Attribute of a session that names the key.
const KEY_ATTRIBUTE: &str = "fairway_callbacks";
/// Bytes of the parts in which an answer is read that no host waits for any more.
const SKIPPED_BYTES: u64 = 64 << 10;
/// Bytes of an answer that are allocated before they have arrived.
const TRUSTED_BYTES: u64 = 1 << 20;

/// Returns the key that a client's session names, as 64 hexadecimal digits.
pub(crate) fn key(given: &p::AttributeMap) -> Option<CallbackKey> {
    use p::attribute_map::value::Value;
    let Value::StringValue(text) = given.attributes.get(KEY_ATTRIBUTE)?.value.as_ref()? else {
        return None;
    };
    transport::unhex(std::str::from_utf8(text).ok()?)
}

/// Serves a client's stream until it ends.
pub(crate) async fn serve(connection: ProxyConnection, world: Arc<World>) {
    let identity = connection.connect_info();
    let (input, mut output) = tokio::io::split(connection);
    let mut input = BufReader::with_capacity(64 << 10, input);
    let Ok((key, is_readbacks)) = greet(&mut input).await else { return };
    if is_readbacks {
        return serve_readbacks((identity, &key), (input, output), &world).await;
    }
    let Some((client, number, calls)) = world.callbacks().open(&key) else {
        drop(output.write_all(&[NO_SUCH_KEY]).await);
        return;
    };
    identity.establish();
    tokio::select! {
        Err(error) = send(calls, &mut output) => tracing::debug!(%error, client = client.0, "calls"),
        Err(error) = receive(client, &mut input, &world) => {
            tracing::debug!(%error, client = client.0, "answers");
        }
    }
    world.close_calls(client, number);
}

/// Reads the greeting; returns the key, and whether the connection is for small arrays.
async fn greet(input: &mut (impl AsyncRead + Unpin)) -> io::Result<(CallbackKey, bool)> {
    let mut greeting = vec![0; GREETING.len()];
    input.read_exact(&mut greeting).await?;
    let mut key = [0; 32];
    input.read_exact(&mut key).await?;
    match &greeting[..] {
        GREETING => Ok((key, false)),
        READBACKS => Ok((key, true)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends a client the small arrays that it reads, until its connection or session ends: of each the
/// name, the code of an error or 0, and its length, as 32-bit little-endian integers, and its bytes,
/// or the text of the error.
async fn serve_readbacks(
    (identity, key): (Arc<Identity>, &CallbackKey),
    (mut input, mut output): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    world: &World,
) {
    let opened = world.callbacks().owner(key);
    let opened = opened.and_then(|client| Some((client, world.readbacks().open(client)?)));
    let Some((client, mut readbacks)) = opened else {
        drop(output.write_all(&[NO_SUCH_KEY]).await);
        return;
    };
    identity.establish();
    let sending = async {
        output.write_all(&[WELCOME]).await?;
        while let Some(Readback { slot, read, value }) = readbacks.recv().await {
            let (code, data) = match value {
                Ok(data) => (0, data),
                Err(error) => (error.code as u32, Bytes::from(error.message.into_bytes())),
            };
            let mut message = Vec::with_capacity(12 + data.len());
            for part in [slot, code, data.len() as u32] {
                message.extend_from_slice(&part.to_le_bytes());
            }
            message.extend_from_slice(&data);
            output.write_all(&message).await?;
            world.submit(Event::ReadFetched { client, read });
        }
        io::Result::Ok(())
    };
    let mut byte = [0];
    tokio::select! {
        _ = sending => {}
        _ = input.read(&mut byte) => {} // it sends nothing more: its end is gone
    }
    while let Ok(Readback { read, .. }) = readbacks.try_recv() {
        world.submit(Event::ReadFetched { client, read });
    }
}

/// Sends a client its calls.
async fn send(
    mut calls: mpsc::UnboundedReceiver<Call>,
    output: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    output.write_all(&[WELCOME]).await?;
    while let Some(Call { number, function, operands }) = calls.recv().await {
        let mut header = Vec::with_capacity(24);
        for part in [number, function, operands.len() as u64] {
            header.extend_from_slice(&part.to_le_bytes());
        }
        if operands.len() <= SKIPPED_BYTES as usize {
            header.extend_from_slice(&operands); // one segment
            output.write_all(&header).await?;
        } else {
            output.write_all(&header).await?;
            output.write_all(&operands).await?;
        }
    }
    Err(io::ErrorKind::ConnectionAborted.into()) // the session has ended
}

/// Takes a client's answers.
async fn receive(
    client: ClientId,
    input: &mut (impl AsyncRead + Unpin),
    world: &World,
) -> io::Result<()> {
    loop {
        let (number, length) = (input.read_u64_le().await?, input.read_u64_le().await?);
        match world.callbacks().answer_limit(client, number) {
            Some(limit) if length <= limit => {
                let mut answer = Vec::with_capacity(length.min(TRUSTED_BYTES) as usize);
                (&mut *input).take(length).read_to_end(&mut answer).await?;
                if answer.len() as u64 != length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                world.answer(client, number, Bytes::from(answer));
            }
            Some(limit) => {
                let text = format!("an answer of {length} bytes; at most {limit} are taken");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            // The host that waited for it is gone.
            None => {
                let mut left = length;
                let mut part = vec![0; SKIPPED_BYTES as usize];
                while left > 0 {
                    let now = left.min(SKIPPED_BYTES) as usize;
                    input.read_exact(&mut part[..now]).await?;
                    left -= now as u64;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &[u8]) -> Option<CallbackKey> {
        let value = p::attribute_map::value::Value::StringValue(text.to_vec().into());
        let value = p::attribute_map::Value { value: Some(value) };
        let attributes = [(KEY_ATTRIBUTE.to_owned(), value)].into_iter().collect();
        key(&p::AttributeMap { attributes, ..Default::default() })
    }

    #[test]
    fn a_key_is_64_hexadecimal_digits() {
        assert_eq!(named(&[b'a'; 64]), Some([0xaa; 32]));
        for wrong in [&b""[..], b"a", &[b'a'; 63], &[b'a'; 66], &[b'x'; 64], &[0xff; 64]] {
            assert_eq!(named(wrong), None);
        }
        assert_eq!(key(&p::AttributeMap::default()), None);
    }
}
