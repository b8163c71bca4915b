//! The other end of a gateway: connections to a controller on another machine.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UnixListener};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::authority::{server_name, trusting};
use crate::gateway::{read_line, request};
use crate::token::{BINDING, LABEL};
use crate::{Token, TransportError};

/// Time within which a controller answers.
const ANSWER: Duration = Duration::from_secs(10);
/// Maximum number of local connections that are carried at a time.
const CARRIED_MAX: usize = 256;

/// A controller on another machine, and the token that admits to it.
#[derive(Clone)]
pub struct Remote {
    address: String,
    token: Token,
    connector: TlsConnector,
}

impl Remote {
    /// Names a controller; nothing is sent yet.
    ///
    /// # Arguments
    /// - `address`: host and port of its gateway.
    pub fn new(address: &str, token: Token) -> Self {
        let connector = TlsConnector::from(trusting(token.pin()));
        Self { address: address.to_owned(), token, connector }
    }

    /// Connects to a service.
    ///
    /// # Errors
    /// The address does not answer, is another controller's, or refuses the token.
    pub async fn connect(&self, service: &str) -> Result<TlsStream<TcpStream>, TransportError> {
        let connecting = tokio::time::timeout(ANSWER, self.connect_now(service)).await;
        connecting.unwrap_or_else(|_| {
            let late = format!("no answer within {} s", ANSWER.as_secs());
            Err(self.unreachable(io::Error::new(io::ErrorKind::TimedOut, late)))
        })
    }

    async fn connect_now(&self, service: &str) -> Result<TlsStream<TcpStream>, TransportError> {
        let (_, mut stream) = self.prove(service).await?;
        let answer = read_line(&mut stream).await.map_err(|error| self.unreachable(error))?;
        match answer.split_once(' ') {
            None => Ok(stream),
            Some((_, reason)) => {
                let (address, reason) = (self.address.clone(), reason.to_owned());
                Err(TransportError::Refused { address, reason })
            }
        }
    }

    /// Connects, and checks that the other end is the controller.
    #[doc(hidden)]
    pub async fn handshake(&self) -> Result<TlsStream<TcpStream>, TransportError> {
        let stream = TcpStream::connect(&self.address).await;
        let stream = stream.map_err(|error| self.unreachable(error))?;
        stream.set_nodelay(true).map_err(|error| self.unreachable(error))?;
        let connected = self.connector.connect(server_name(), stream).await;
        connected.map_err(|error| TransportError::NotTheController {
            address: self.address.clone(),
            reason: error.to_string(),
        })
    }

    /// Connects and asks for a service; returns what was sent, too.
    #[doc(hidden)]
    pub async fn prove(
        &self,
        service: &str,
    ) -> Result<(String, TlsStream<TcpStream>), TransportError> {
        let mut stream = self.handshake().await?;
        let binding = stream.get_ref().1.export_keying_material([0; BINDING], LABEL, None);
        let binding = binding.map_err(|error| self.unreachable(io::Error::other(error)))?;
        let line = request(&self.token, &binding, service);
        let sent = async {
            stream.write_all(line.as_bytes()).await?;
            stream.flush().await
        };
        sent.await.map_err(|error| self.unreachable(error))?;
        Ok((line, stream))
    }

    fn unreachable(&self, source: io::Error) -> TransportError {
        TransportError::Connect { address: self.address.clone(), source }
    }

    /// Listens at a Unix socket, and carries each connection to a service.
    ///
    /// The socket is reachable by all who may open the path; its folder must be of this user alone.
    ///
    /// # Errors
    /// The path is taken.
    pub fn carry_unix(&self, path: &Path, service: &str) -> Result<Carrier, TransportError> {
        let listener = UnixListener::bind(path).map_err(|source| TransportError::Bind {
            address: path.display().to_string(),
            source,
        })?;
        let (remote, service) = (self.clone(), Arc::from(service));
        let carrying = tokio::spawn(carry(listener, remote, service)).abort_handle();
        Ok(Carrier { carrying })
    }
}

/// A local listener whose connections are carried, as long as the value lives.
pub struct Carrier {
    carrying: AbortHandle,
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.carrying.abort();
    }
}

async fn carry(listener: UnixListener, remote: Remote, service: Arc<str>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < CARRIED_MAX => match accepted {
                Ok((mut local, _)) => {
                    let (remote, service) = (remote.clone(), service.clone());
                    connections.spawn(async move {
                        // Either end may close or vanish; the other one is closed then.
                        if let Ok(mut far) = remote.connect(&service).await {
                            let _ = tokio::io::copy_bidirectional(&mut local, &mut far).await;
                        }
                    });
                }
                // No file descriptors are left, for now.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }
}
