//! One channel whose ends know each other.

use crate::{
    blocking::Blocking,
    error::{deadline, failed},
    frame::{self, FrameError},
};
use flashboot_core::{Error, Kind, Result};
use std::{
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsStream;

/// A connection after its handshake: bytes both ways, in clear or through TLS.
pub struct Channel {
    stream: Stream,
    address: SocketAddr,
    peer: String,
}

/// What carries the bytes.
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Channel {
    pub(crate) fn new(stream: Stream, address: SocketAddr, peer: String) -> Self {
        Self { stream, address, peer }
    }

    /// The other end's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// This end's address, by which the other end reached us or was reached.
    pub fn local_address(&self) -> Option<SocketAddr> {
        let socket = match &self.stream {
            Stream::Plain(socket) => socket,
            Stream::Tls(session) => session.get_ref().0,
        };
        socket.local_addr().ok()
    }

    /// The other end as errors name it: what was dialled, or the address it came from.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether TLS protects it.
    pub fn is_encrypted(&self) -> bool {
        matches!(self.stream, Stream::Tls(_))
    }

    /// Sends one frame of at most `cap` bytes within `timeout`. After an error the channel is of no use.
    pub async fn send(&mut self, body: &[u8], cap: usize, timeout: Duration) -> Result<()> {
        match tokio::time::timeout(timeout, frame::send(&mut self.stream, body, cap)).await {
            Ok(sent) => sent.map_err(|e| frame_failed("send", e, &self.peer)),
            Err(_) => Err(deadline("send", timeout, "sending a frame", &self.peer)),
        }
    }

    /// Takes one frame of at most `cap` bytes within `timeout`; `None` where the peer has closed the channel between
    /// frames. After an error the channel is of no use.
    pub async fn receive(&mut self, cap: usize, timeout: Duration) -> Result<Option<Vec<u8>>> {
        match tokio::time::timeout(timeout, frame::receive(&mut self.stream, cap)).await {
            Ok(received) => received.map_err(|e| frame_failed("receive", e, &self.peer)),
            Err(_) => Err(deadline("receive", timeout, "waiting for a frame", &self.peer)),
        }
    }

    /// The raw socket, for zero copy; the channel itself where it is encrypted.
    pub fn into_plain(self) -> Result<TcpStream, Self> {
        match self.stream {
            Stream::Plain(stream) => Ok(stream),
            stream @ Stream::Tls(_) => Err(Self { stream, ..self }),
        }
    }

    /// The same connection for a thread of its own.
    pub fn into_blocking(self) -> Result<Blocking> {
        Blocking::new(self.stream, self.peer)
    }
}

fn frame_failed(op: &'static str, error: FrameError, peer: &str) -> Error {
    match error {
        FrameError::TooLong { .. } => Error::new(Kind::Protocol, op, error.to_string()).with_peer(peer),
        FrameError::Cut => Error::new(Kind::SourceLost, op, error.to_string()).with_peer(peer),
        FrameError::Io(e) => failed(op, &e, "a frame", peer),
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encrypted = self.is_encrypted();
        f.debug_struct("Channel").field("peer", &self.peer).field("encrypted", &encrypted).finish()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, into),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_read(context, into),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, from),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_write(context, from),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_shutdown(context),
        }
    }
}

impl AsyncRead for Channel {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, into)
    }
}

impl AsyncWrite for Channel {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, from)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
