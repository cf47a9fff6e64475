//! A service inside a member's process: one that it embeds, or one that stands behind a store until it is needed.

use super::{CONNECTIONS, bind, seat::Seat};
use crate::{network::Network, observe::Observed};
use flashboot_channel::{Endpoint, Host, Security};
use flashboot_core::Result;
use flashboot_rendezvous::{
    ServerConfig,
    protocol::Rules,
    store::{self, Address, Post},
};
use std::{net::SocketAddr, time::Duration};
use tokio::{sync::oneshot, task::JoinHandle, time::timeout};
use tracing::warn;

/// How long a service may take to end and to give its post up.
const END: Duration = Duration::from_secs(3);

/// A service that runs beside its member, and ends when this is dropped; in order by [`end`](Self::end).
#[derive(Debug)]
pub(super) struct Standing {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Standing {
    /// Serves at `at`, from now on; and what members dial.
    pub(super) async fn embedded(
        at: SocketAddr,
        advertise: Option<&Host>,
        lease: Duration,
        security: &Security,
        observed: &Observed,
    ) -> Result<(Self, Endpoint)> {
        let server = bind(at, advertise, lease, security).await?;
        let endpoint = server.endpoint().clone();
        let status = server.status();
        observed.service(move || Some(status()));
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            if let Err(error) = server.serve(async { drop(stopped.await) }).await {
                warn!(%error, "the embedded service ended");
            }
        });
        Ok((Self { stop, task }, endpoint))
    }

    /// Stands behind the store at `address`, and serves at `at` while it has the post.
    ///
    /// # Errors
    /// Those of opening a store.
    pub(super) fn behind(
        address: &Address,
        at: SocketAddr,
        lease: Duration,
        network: &Network,
        security: &Security,
        observed: &Observed,
    ) -> Result<Self> {
        let post = Post::default();
        observed.service({
            let post = post.clone();
            move || post.status()
        });
        let store = store::open(address, &network.etcd())?;
        let (stop, stopped) = oneshot::channel::<()>();
        let config = config(at, network.advertise(), lease);
        let stood = store::stand(store, config, security.clone(), post, async { drop(stopped.await) });
        let task = tokio::spawn(async move {
            if let Err(error) = stood.await {
                warn!(%error, "this process cannot serve the replication service, if it has to");
            }
        });
        Ok(Self { stop, task })
    }

    /// For a member at `seat` that holds everything: where an etcd says who serves, every one of those may.
    pub(super) fn candidate(
        seat: &Seat,
        address: &Address,
        lease: Duration,
        security: &Security,
    ) -> Option<Self> {
        if !matches!(address, Address::Etcd(_)) {
            return None;
        }
        let network = seat.network();
        let at = SocketAddr::new(network.tcp.bind, 0);
        let stands = Self::behind(address, at, lease, &network, security, &seat.observed);
        stands.inspect_err(|error| warn!(%error, "this process serves no replication service")).ok()
    }

    /// Ends it; what it holds at a store is given up, so that another need not wait.
    pub(super) async fn end(self) {
        drop(self.stop);
        if timeout(END, self.task).await.is_err() {
            warn!("the service in this process did not end in order");
        }
    }
}

/// How a service at `at` serves.
pub(super) fn config(at: SocketAddr, advertise: Option<&Host>, lease: Duration) -> ServerConfig {
    let rules = Rules { lease, ..Rules::default() };
    ServerConfig { at, advertise: advertise.cloned(), rules, connections: CONNECTIONS }
}
