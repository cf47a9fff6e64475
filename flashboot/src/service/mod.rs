//! Seeds and clones that find each other at the replication service, and come and go.
//!
//! [`seed`](fn@seed) fills an arena from disk and serves it; [`clone`](fn@clone) learns from the service what proves the image and whom to read
//! from, verifies every block, and serves it on. `seat` is what both do: transports, arena, registration; `sources` finds
//! a clone another source; `payload` writes the verified bytes to a file. What a clone checks its bytes against is
//! covered by the image's id, and never comes from its source alone.

mod clone;
mod payload;
mod seat;
mod seed;
mod sources;

pub use clone::{CloneRequest, Cloned, KillAt, clone};
pub(crate) use clone::{clone_into, look};
pub(crate) use payload::write as write_payload;
pub use seat::{Labels, Seat};
pub use seed::{SeedRequest, Serving, seed};

use crate::network::Network;
use flashboot_channel::{Endpoint, Host, Security};
use flashboot_core::{Error, Kind, Result};
use flashboot_rendezvous::{
    Client, Server, ServerConfig,
    protocol::{Rules, Status},
};
use std::{net::SocketAddr, time::Duration};

/// The most connections of a service.
const CONNECTIONS: usize = 20_000;

/// Reads what `network` says of channels, off the runtime.
pub(crate) async fn security(network: &Network) -> Result<Security> {
    let config = network.security();
    let loaded = tokio::task::spawn_blocking(move || Security::load(&config)).await;
    loaded.unwrap_or_else(|e| {
        Err(Error::new(Kind::Exhausted, "security", format!("a thread to read files: {e}")))
    })
}

/// A service at `at` for who dials `advertise`, with leases of `lease`.
pub(crate) async fn bind(
    at: SocketAddr,
    advertise: Option<&Host>,
    lease: Duration,
    security: &Security,
) -> Result<Server> {
    let rules = Rules { lease, ..Rules::default() };
    let config = ServerConfig { at, advertise: advertise.cloned(), rules, connections: CONNECTIONS };
    Server::bind(config, security).await
}

/// Serves the replication service until `stop`; `told` is given what clients dial. Needs a tokio runtime.
///
/// # Errors
/// [`Kind::Permission`] off loopback when clients would have to prove nothing; the system's own.
pub async fn rendezvous(
    at: SocketAddr,
    advertise: Option<&Host>,
    lease: Duration,
    network: &Network,
    told: impl FnOnce(&Endpoint),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let server = bind(at, advertise, lease, &security(network).await?).await?;
    told(server.endpoint());
    server.serve(stop).await
}

/// Who holds what at the service at `endpoint`.
///
/// # Errors
/// Those of [`Client::ask`].
pub async fn status(endpoint: &Endpoint, network: &Network) -> Result<Status> {
    let client = Client::new(endpoint.clone(), security(network).await?);
    flashboot_rendezvous::status(&client).await
}
