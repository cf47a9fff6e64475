//! Seeds and clones that find each other at the replication service, and come and go.
//!
//! [`seed`](fn@seed) fills an arena from disk and serves it; [`clone`](fn@clone) learns from the service what proves the image and whom to read
//! from, verifies every block, and serves it on; [`gather`](fn@gather) reads its part from disk and the others' from them. `seat` is what
//! all do: transports, arena, registration; `sources` finds a clone another source; `standing` is a service in a member's own
//! process; `payload` writes the verified bytes to a file; `kill` is for tests. What a clone checks its bytes against is
//! covered by the image's id, and never comes from its source alone.

mod background;
mod clone;
mod gather;
mod kill;
mod payload;
mod ranks;
mod recheck;
mod seat;
mod seed;
mod sources;
mod standing;
mod told;
mod wanted;

// What the ranks of a `replicate` do in the same way, and a load from a peer.
pub(crate) use clone::{clone_into, look};
pub(crate) use payload::write as write_payload;
pub(crate) use seat::{Held, blocking, random};
pub use sources::Hop;
pub(crate) use sources::{Members, peer, stall};

pub use background::{Running, Starting, Waited};
pub use clone::{CloneRequest, Cloned, clone};
pub use gather::{GatherRequest, Gathered, gather};
pub use kill::{KillAt, Moment};
pub use ranks::{ClonedRanks, clone_ranks};
pub use seat::{Labels, Seat};
pub use seed::{SeedFrom, SeedRequest, Serving, seed};
pub use wanted::image_id;
pub(crate) use wanted::only;

use crate::{
    config::Config,
    network::Network,
    observe::{self, Observed, Showing},
};
use flashboot_channel::{Host, Security, SecurityConfig};
use flashboot_core::{Error, Kind, Result};
use flashboot_rendezvous::{
    Client, Server, descriptors,
    protocol::Status,
    store::{self, Address, Post},
};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tracing::info;

/// The most connections of a service.
const CONNECTIONS: usize = 20_000;
/// What a process that only serves has open beside them.
const BESIDE: u64 = 256;

/// Reads what `network` says of channels, off the runtime.
pub(crate) async fn security(network: &Network) -> Result<Security> {
    loaded(network.security()).await
}

/// Reads what `config` names, off the runtime.
pub(crate) async fn loaded(config: SecurityConfig) -> Result<Security> {
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
    Server::bind(standing::config(at, advertise, lease), security).await
}

/// The client of whatever is at `address`.
pub(crate) async fn client(address: &Address, network: &Network) -> Result<(Arc<Client>, Security)> {
    let security = security(network).await?;
    Ok((Arc::new(store::client(address, &network.etcd(), security.clone())?), security))
}

/// Serves the replication service until `stop`; `told` is given what members dial. With a `store` it is one of those that
/// stand behind it, and what members dial is the store. Needs a tokio runtime.
///
/// # Errors
/// [`Kind::Permission`] off loopback when clients would have to prove nothing; the system's own.
pub async fn rendezvous(
    at: SocketAddr,
    lease: Duration,
    store: Option<&Address>,
    network: &Network,
    observed: &Observed,
    told: impl FnOnce(&Address),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let security = security(network).await?;
    let config = standing::config(at, network.advertise(), lease);
    let (wanted, may) = (CONNECTIONS as u64 + BESIDE, descriptors(CONNECTIONS as u64 + BESIDE));
    if may < wanted {
        info!(
            may,
            wanted, "the hard limit of descriptors (ulimit -Hn) bounds how many members can be connected"
        );
    }
    match store {
        None => {
            let server = Server::bind(config, &security).await?;
            let status = server.status();
            observed.service(move || Some(status()));
            told(&server.endpoint().clone().into());
            server.serve(stop).await
        }
        Some(address) => {
            let store = store::open(address, &network.etcd())?;
            let post = Post::default();
            observed.service({
                let post = post.clone();
                move || post.status()
            });
            told(address);
            store::stand(store, config, security, post, stop).await
        }
    }
}

/// Shows `observed` by HTTP until it is dropped, where `config` says so. Needs a tokio runtime with IO and time.
///
/// # Errors
/// Those of [`observe::serve`].
pub async fn show(config: &Config, observed: &Observed) -> Result<Option<Showing>> {
    if config.http.listen.is_none() {
        return Ok(None);
    }
    observe::serve(&config.http, &security(&config.network()).await?, observed.clone()).await
}

/// Who holds what at the service at `address`.
///
/// # Errors
/// Those of [`Client::ask`].
pub async fn status(address: &Address, network: &Network) -> Result<Status> {
    flashboot_rendezvous::status(&client(address, network).await?.0).await
}
