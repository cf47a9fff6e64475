//! A channel for a thread that blocks on it, such as one that moves payload.

use crate::{channel::Stream, error::failed};
use flashboot_core::Result;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use std::{
    fmt,
    io::{self, Read, Write},
    net::TcpStream,
};
use tokio_rustls::TlsStream;

/// A connection after its handshake. Its timeouts are the socket's ([`socket`](Self::socket)): a read or write that
/// meets one fails with `WouldBlock` and can be tried again, through TLS too.
pub struct Blocking {
    stream: Carried,
    peer: String,
}

enum Carried {
    Plain(TcpStream),
    Dialled(Box<StreamOwned<ClientConnection, TcpStream>>),
    Taken(Box<StreamOwned<ServerConnection, TcpStream>>),
}

impl Blocking {
    pub(crate) fn new(stream: Stream, peer: String) -> Result<Self> {
        let std = |stream: tokio::net::TcpStream| {
            let made = stream.into_std().and_then(|s| s.set_nonblocking(false).map(|()| s));
            made.map_err(|e| failed("fcntl", &e, "making a socket blocking", &peer))
        };
        let stream = match stream {
            Stream::Plain(stream) => Carried::Plain(std(stream)?),
            Stream::Tls(stream) => match *stream {
                TlsStream::Client(stream) => {
                    let (socket, session) = stream.into_inner();
                    Carried::Dialled(Box::new(StreamOwned::new(session, std(socket)?)))
                }
                TlsStream::Server(stream) => {
                    let (socket, session) = stream.into_inner();
                    Carried::Taken(Box::new(StreamOwned::new(session, std(socket)?)))
                }
            },
        };
        Ok(Self { stream, peer })
    }

    /// The other end as errors name it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The socket below, for its options and its end. Bytes read from or written to it directly break TLS.
    pub fn socket(&self) -> &TcpStream {
        match &self.stream {
            Carried::Plain(stream) => stream,
            Carried::Dialled(stream) => &stream.sock,
            Carried::Taken(stream) => &stream.sock,
        }
    }

    /// The socket where nothing is between it and the payload, for zero copy; `None` under TLS.
    pub fn plain(&self) -> Option<&TcpStream> {
        match &self.stream {
            Carried::Plain(stream) => Some(stream),
            Carried::Dialled(_) | Carried::Taken(_) => None,
        }
    }
}

impl fmt::Debug for Blocking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocking").field("peer", &self.peer).field("plain", &self.plain().is_some()).finish()
    }
}

impl Read for Blocking {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            Carried::Plain(stream) => stream.read(into),
            Carried::Dialled(stream) => stream.read(into),
            Carried::Taken(stream) => stream.read(into),
        }
    }
}

impl Write for Blocking {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.stream {
            Carried::Plain(stream) => stream.write(from),
            Carried::Dialled(stream) => stream.write(from),
            Carried::Taken(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.stream {
            Carried::Plain(stream) => stream.flush(),
            Carried::Dialled(stream) => stream.flush(),
            Carried::Taken(stream) => stream.flush(),
        }
    }
}
