//! From a port to channels, whoever else knocks at it.

use crate::{
    channel::{Channel, Stream},
    endpoint::{Endpoint, Host},
    error::{deadline, failed},
    handshake,
    hello::Purpose,
    liveness::Liveness,
    security::Security,
};
use flashboot_core::{Error, Kind, Result};
use rustls::ServerConfig;
use std::{collections::VecDeque, fmt, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::TlsAcceptor;

/// How long every handshake may take undisturbed, however many others wait for its place.
const UNDISTURBED: Duration = Duration::from_millis(500);
/// How long to rest when there is no descriptor left for a connection.
const REST: Duration = Duration::from_millis(50);

/// How to listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen {
    /// What the channels are for.
    pub purpose: Purpose,
    /// How long a dialler may take for TLS and handshake together.
    pub handshake: Duration,
    /// Connections that may be in their handshake at once. When more come, the oldest goes once it has had half a second,
    /// so that ones that say nothing keep nobody out for long.
    pub max_pending: usize,
    /// After how long a silent peer is taken for gone.
    pub liveness: Liveness,
}

impl Listen {
    /// 5 s for a handshake, 64 at once.
    pub fn new(purpose: Purpose) -> Self {
        let handshake = Duration::from_secs(5);
        Self { purpose, handshake, max_pending: 64, liveness: Liveness::default() }
    }
}

/// A listening socket and the handshakes at it.
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<Arc<ServerConfig>>,
    security: Security,
    how: Listen,
    handshakes: JoinSet<Result<Channel>>,
    /// When each that may still be in its handshake began, oldest first.
    pending: VecDeque<(Instant, AbortHandle)>,
}

impl Listener {
    /// Binds `at`; port 0 lets the system choose ([`address`](Self::address) has what it chose). Needs a tokio runtime
    /// with IO and time.
    ///
    /// # Errors
    /// [`Kind::Permission`] off loopback, when dialers would have to prove nothing and that was not allowed by name.
    pub async fn bind(at: SocketAddr, security: &Security, how: Listen) -> Result<Self> {
        security.check_listen(at.ip())?;
        let refused =
            |call, what: &'static str| move |e: io::Error| Error::from_io(call, &e, format!("{what} {at}"));
        let listener = TcpListener::bind(at).await.map_err(refused("bind", "listening at"))?;
        let address = listener.local_addr().map_err(refused("getsockname", "the address of"))?;
        // Made here, so that an exporter that cannot make a certificate fails now and not at its first reader.
        let tls = security.pin(address.ip())?.map(|_| security.server()).transpose()?;
        tracing::debug!(%address, purpose = %how.purpose, tls = tls.is_some(), "listening");
        let (security, handshakes, pending) = (security.clone(), JoinSet::new(), VecDeque::new());
        Ok(Self { listener, address, tls, security, how, handshakes, pending })
    }

    /// The address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What to put into locators: `advertise` if given, else the address listened at.
    ///
    /// # Errors
    /// [`Kind::Invalid`] when that is `0.0.0.0` or `[::]`, which nobody can dial.
    pub fn endpoint(&self, advertise: Option<&Host>) -> Result<Endpoint> {
        let host = match advertise {
            Some(host) => host.clone(),
            None => Host::Address(self.address.ip()),
        };
        if matches!(&host, Host::Address(address) if address.is_unspecified()) {
            let detail = format!(
                "{} is every address of this host, and none that a reader can dial",
                self.address.ip()
            );
            return Err(Error::new(Kind::Invalid, "listen", detail)
                .with_remedy("say which host name or address readers are to dial (advertise)"));
        }
        Ok(Endpoint { host, port: self.address.port(), pin: self.security.pin(self.address.ip())? })
    }

    /// The next channel whose dialler proved what was asked of it. Dropping the future loses nothing. Whoever fails is
    /// logged and forgotten.
    ///
    /// # Errors
    /// Only when the listening socket itself is broken.
    pub async fn accept(&mut self) -> Result<Channel> {
        loop {
            let crowded = self.make_room();
            tokio::select! {
                Some(ended) = self.handshakes.join_next() => match ended {
                    Ok(Ok(channel)) => return Ok(channel),
                    Ok(Err(error)) => tracing::debug!(%error, "a handshake failed"),
                    Err(e) if e.is_cancelled() => tracing::debug!("a handshake gave way to newer ones"),
                    Err(e) => tracing::error!(%e, "a handshake panicked"),
                },
                () = sleep_until(crowded.unwrap_or_else(Instant::now)), if crowded.is_some() => {}
                taken = self.listener.accept(), if crowded.is_none() => match taken {
                    Ok((socket, address)) => self.begin(socket, address),
                    Err(e) if is_the_connections(&e) => tracing::debug!(%e, "a connection ended in accept"),
                    Err(e) if is_exhaustion(&e) => {
                        tracing::warn!(%e, "no descriptor left for a connection");
                        sleep(REST).await;
                    }
                    Err(e) => return Err(Error::from_io("accept", &e, format!("listening at {}", self.address))),
                },
            }
        }
    }

    /// Forgets handshakes that have ended and, where there are too many, ends the oldest; when it cannot yet, says when.
    fn make_room(&mut self) -> Option<Instant> {
        let most = self.how.max_pending.max(1);
        if self.pending.len() >= most {
            self.pending.retain(|(_, handshake)| !handshake.is_finished());
        }
        if self.pending.len() < most {
            return None;
        }
        let (began, oldest) = self.pending.front()?;
        let disturb = *began + UNDISTURBED;
        if disturb > Instant::now() {
            return Some(disturb);
        }
        oldest.abort();
        self.pending.pop_front();
        None
    }

    fn begin(&mut self, socket: TcpStream, address: SocketAddr) {
        let (security, tls, how) = (self.security.clone(), self.tls.clone(), self.how);
        let handshake = async move {
            let peer = SocketAddr::new(address.ip().to_canonical(), address.port()).to_string();
            match timeout(how.handshake, taken(socket, address, &security, tls, how, &peer)).await {
                Ok(done) => done,
                Err(_) => Err(deadline("listen", how.handshake, "a handshake", &peer)),
            }
        };
        self.pending.push_back((Instant::now(), self.handshakes.spawn(handshake)));
    }
}

async fn taken(
    socket: TcpStream,
    address: SocketAddr,
    security: &Security,
    tls: Option<Arc<ServerConfig>>,
    how: Listen,
    peer: &str,
) -> Result<Channel> {
    how.liveness.apply(&socket)?;
    // A dialler that says its hello in clear would understand nothing that TLS answers; one from loopback, where nothing need
    // be encrypted, may have a pin to look at.
    let begins_tls = tls.is_some() && begins_tls(&socket, peer).await?;
    let in_clear = tls.is_some() && security.encrypts(address.ip()) && !begins_tls;
    let mut stream = match tls {
        Some(tls) if begins_tls => {
            let session = TlsAcceptor::from(tls).accept(socket).await;
            Stream::Tls(Box::new(session.map_err(|e| failed("TLS", &e, "the TLS handshake", peer))?.into()))
        }
        _ => Stream::Plain(socket),
    };
    handshake::listen(&mut stream, security, how.purpose, peer, in_clear).await?;
    Ok(Channel::new(stream, address, peer.to_owned()))
}

async fn begins_tls(socket: &TcpStream, peer: &str) -> Result<bool> {
    let mut first = [0];
    socket.peek(&mut first).await.map_err(|e| failed("recv", &e, "the first byte", peer))?;
    Ok(first == [TLS_HANDSHAKE])
}

/// What `accept` reports of a connection that is already gone; the next may be well.
fn is_the_connections(error: &io::Error) -> bool {
    use io::ErrorKind as E;
    matches!(
        error.kind(),
        E::ConnectionAborted
            | E::ConnectionReset
            | E::TimedOut
            | E::HostUnreachable
            | E::NetworkUnreachable
            | E::NetworkDown
            | E::Interrupted
            | E::PermissionDenied
    )
}

fn is_exhaustion(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| {
        Error::from_errno("accept", errno, "").kind() == Kind::Exhausted || errno == NO_BUFFERS
    })
}

/// The first byte of every TLS connection.
const TLS_HANDSHAKE: u8 = 0x16;
/// ENOBUFS, the same on x86_64 and aarch64.
const NO_BUFFERS: i32 = 105;

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("address", &self.address)
            .field("how", &self.how)
            .finish_non_exhaustive()
    }
}
