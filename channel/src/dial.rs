//! From an endpoint to a channel.

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
use rustls::pki_types::ServerName;
use std::{net::SocketAddr, time::Duration};
use tokio::{
    net::{TcpStream, lookup_host},
    time::{Instant, timeout},
};
use tokio_rustls::TlsConnector;

/// The most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 16;

/// How to dial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dial {
    /// What the channel is for.
    pub purpose: Purpose,
    /// Name resolution, every address tried, TLS and handshake together.
    pub timeout: Duration,
    /// After how long a silent peer is taken for gone, once there is a channel.
    pub liveness: Liveness,
}

/// Dials `endpoint`: every address of its host in the resolver's order, each with an equal share of the time left, until
/// one takes the connection. Needs a tokio runtime with IO and time.
///
/// # Errors
/// [`Kind::Deadline`]; [`Kind::SourceLost`] when nobody takes the connection; [`Kind::Unavailable`] for a name that has
/// no address; [`Kind::Permission`] when either end does not prove what the other asks for; [`Kind::Mismatch`] for
/// another release or purpose; [`Kind::Protocol`] for a peer that speaks something else.
pub async fn dial(endpoint: &Endpoint, security: &Security, how: Dial) -> Result<Channel> {
    let peer = endpoint.place();
    let dialled = timeout(how.timeout, connected(endpoint, security, how, &peer)).await;
    dialled.unwrap_or_else(|_| Err(deadline("dial", how.timeout, "dialling", &peer)))
}

async fn connected(endpoint: &Endpoint, security: &Security, how: Dial, peer: &str) -> Result<Channel> {
    // A day is beyond any caller's patience and within the clock's range.
    let until = Instant::now() + how.timeout.min(Duration::from_secs(86_400));
    let addresses = addresses(endpoint, peer).await?;
    let (socket, address) = connect(&addresses, until, peer).await?;
    how.liveness.apply(&socket).map_err(|e| e.with_peer(peer))?;
    let mut stream = if security.encrypts_to(endpoint, address.ip()) {
        let connector = TlsConnector::from(security.client(endpoint)?);
        let session = connector.connect(server_name(&endpoint.host)?, socket).await;
        Stream::Tls(Box::new(session.map_err(|e| failed("TLS", &e, "the TLS handshake", peer))?.into()))
    } else {
        Stream::Plain(socket)
    };
    handshake::dial(&mut stream, security, how.purpose, peer).await?;
    Ok(Channel::new(stream, address, peer.to_owned()))
}

async fn addresses(endpoint: &Endpoint, peer: &str) -> Result<Vec<SocketAddr>> {
    let name = match &endpoint.host {
        Host::Address(address) => return Ok(vec![SocketAddr::new(*address, endpoint.port)]),
        Host::Name(name) => name,
    };
    let unknown = |why: String| {
        Error::new(Kind::Unavailable, "getaddrinfo", format!("`{name}` {why}"))
            .with_peer(peer)
            .with_remedy("let the exporter advertise a name or address that this host can resolve")
    };
    let found = lookup_host((name.as_str(), endpoint.port)).await;
    let found: Vec<_> =
        found.map_err(|e| unknown(format!("is not resolved: {e}")))?.take(MAX_ADDRESSES).collect();
    if found.is_empty() { Err(unknown("has no address".into())) } else { Ok(found) }
}

async fn connect(addresses: &[SocketAddr], until: Instant, peer: &str) -> Result<(TcpStream, SocketAddr)> {
    let mut last = None;
    for (tried, address) in addresses.iter().enumerate() {
        let left = until.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(addresses.len().saturating_sub(tried)).unwrap_or(1).max(1);
        let error = match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(socket)) => return Ok((socket, *address)),
            Ok(Err(e)) => failed("connect", &e, &format!("connecting to {address}"), peer),
            Err(_) => deadline("connect", share, &format!("connecting to {address}"), peer),
        };
        tracing::debug!(%error, "an address that did not answer");
        last = Some(error);
    }
    Err(last.unwrap_or_else(|| Error::new(Kind::Unavailable, "connect", "no address").with_peer(peer)))
}

fn server_name(host: &Host) -> Result<ServerName<'static>> {
    match host {
        Host::Address(address) => Ok(ServerName::IpAddress((*address).into())),
        Host::Name(name) => ServerName::try_from(name.clone()).map_err(|e| {
            Error::new(Kind::Invalid, "dial", format!("`{name}` cannot be asked for over TLS: {e}"))
        }),
    }
}
