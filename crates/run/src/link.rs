//! Control connections of hosts: commands out, reports in, and heartbeats.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::HostId;
use control::Event;
use protocol::{HELLO_LIMIT, Hello, HostReply, REPORT_LIMIT, Report};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixListener;

use crate::commands::CommandQueue;
use crate::world::World;
use transport::identity::Users;
use transport::{Decision, Strangers};

/// Timeout for a new connection to authenticate.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Accepts connections of hosts until the task is dropped.
pub async fn accept_hosts(world: Arc<World>, listener: UnixListener, token: String) {
    let users = Users::owner_and(&[]);
    let mut strangers = Strangers::default();
    loop {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "a host's connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        if let Err(error) = users.check_unix(&stream) {
            tracing::warn!(%error, "a connection for hosts was refused");
            continue;
        }
        for () in strangers.make_room() {
            tracing::warn!("a connection for hosts was evicted by others before its hello");
        }
        let (world, token, decision) = (world.clone(), token.clone(), Decision::default());
        let decided = decision.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = serve_host(world, stream, &token, decided).await {
                tracing::warn!(%error, "a connection for hosts was refused");
            }
        });
        strangers.add((), task.abort_handle(), decision);
    }
}

async fn serve_host(
    world: Arc<World>,
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    token: &str,
    decision: Decision,
) -> io::Result<()> {
    let (mut input, output) = tokio::io::split(stream);
    let hello = tokio::time::timeout(HELLO_TIMEOUT, read_hello(&mut input, token))
        .await
        .map_err(|_| invalid("no hello in time"))??;
    if !decision.decide() {
        return Ok(()); // it was evicted
    }
    let host = hello.host;
    let Some(outgoing) = world.open_outgoing(host, &hello.info.data_address) else {
        return Err(invalid(&format!("there is no host {host}")));
    };
    let process = hello.info.process;
    let trying = world.clone();
    tokio::task::spawn_blocking(move || trying.try_host(host));
    world.submit(Event::HostJoined { host, info: hello.info });
    let writer = tokio::spawn(write_commands(outgoing.clone(), output));
    send_heartbeats(&world, host, &outgoing);
    let cause = match read_reports(&world, host, &outgoing, &mut input).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            format!("process {process} closed its connection")
        }
        Err(error) => format!("connection to process {process}: {error}"),
        Ok(never) => match never {},
    };
    outgoing.heartbeat.lock().take();
    writer.abort();
    world.lose_host(host, &outgoing, cause);
    Ok(())
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

async fn read_frame(input: &mut (impl AsyncRead + Unpin), limit: usize) -> io::Result<Vec<u8>> {
    let length = input.read_u32_le().await? as usize;
    if length > limit {
        return Err(invalid(&format!("a report of {length} bytes is over the limit of {limit}")));
    }
    let mut frame = vec![0; length];
    input.read_exact(&mut frame).await?;
    Ok(frame)
}

async fn read_hello(input: &mut (impl AsyncRead + Unpin), token: &str) -> io::Result<Hello> {
    let frame = read_frame(input, HELLO_LIMIT).await?;
    match protocol::decode::<Hello>(&frame) {
        Ok(hello) if hello.token == token => Ok(hello),
        Ok(_) => Err(invalid("the token is wrong")),
        Err(error) => Err(invalid(&format!("the first report is not a hello: {error}"))),
    }
}

async fn read_reports(
    world: &Arc<World>,
    host: HostId,
    outgoing: &Arc<CommandQueue>,
    input: &mut (impl AsyncRead + Unpin),
) -> io::Result<std::convert::Infallible> {
    let mut input = tokio::io::BufReader::with_capacity(64 << 10, input);
    loop {
        let frame = read_frame(&mut input, REPORT_LIMIT).await?;
        match protocol::decode(&frame).map_err(|error| invalid(&error.to_string()))? {
            Report::CommandDone { ticket, reply: HostReply::ShardDataSent {} } => {
                let world = world.clone();
                tokio::task::spawn_blocking(move || world.data_sent(host, ticket));
            }
            Report::Undelivered { to, tag, error } => {
                world.undelivered(outgoing, host, (to, tag), error).await;
            }
            Report::PeersTried { unreachable } => world.peers_tried(host, outgoing, unreachable),
            Report::ClientCalled { call } if call.operands.is_some() => {
                world.call_client((host, outgoing), *call);
            }
            Report::ClientCalled { call } => {
                let (world, outgoing) = (world.clone(), outgoing.clone());
                tokio::task::spawn_blocking(move || world.call_client((host, &outgoing), *call));
            }
            report => world.report(host, outgoing, report),
        }
    }
}

async fn write_commands(
    outgoing: Arc<CommandQueue>,
    mut output: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    let mut batch = Vec::new();
    loop {
        if outgoing.frames.lock().is_empty() {
            if *outgoing.closed.lock() {
                return output.shutdown().await;
            }
            outgoing.written.notified().await;
        }
        outgoing.frames.lock().take(&mut batch);
        output.write_all(&batch).await?;
    }
}

/// Starts the thread that sends a host's heartbeats, when the controller asks for them, until the
/// host's commands are closed. A thread of the host answers them without the Python interpreter, so a
/// long compilation causes no false alarm.
fn send_heartbeats(world: &Arc<World>, host: HostId, outgoing: &Arc<CommandQueue>) {
    let (ask, asked) = std::sync::mpsc::sync_channel(1);
    *outgoing.heartbeat.lock() = Some(ask);
    let limit = world.inspect(|controller| controller.config().heartbeat_limit());
    // Weak, as they own the sender that ends this thread.
    let (world, outgoing) = (Arc::downgrade(world), Arc::downgrade(outgoing));
    std::thread::spawn(move || {
        while asked.recv().is_ok() {
            let (Some(world), Some(outgoing)) = (world.upgrade(), outgoing.upgrade()) else {
                return;
            };
            let outcome = world.data().ping(host, Duration::from_nanos(limit.0));
            world.heartbeat(host, &outgoing, outcome);
        }
    });
}
