//! Whether `tcp` works here, and why not.

use crate::{arena::check_locator, config::TcpConfig, dial::Route, endpoint::Endpoint, runtime, wire::Lane};
use flashboot_channel::Security;
use flashboot_core::{Error, Kind, Location, Locator, Readiness};
use flashboot_cuda::{Context, Device, Pinned, bounded};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

/// How long `probe_pair` may wait for its peer.
const PAIR: Duration = Duration::from_secs(2);
/// How long a driver may take: it sets the GPU up at its first use.
const DRIVER: Duration = Duration::from_secs(20);

fn readiness(outcome: Result<(), Error>) -> Readiness {
    let Err(e) = outcome else { return Readiness::Ready };
    let remedy = e.remedy().unwrap_or("see the reason").to_owned();
    let peer = e.peer().map(|peer| format!(" (peer {peer})")).unwrap_or_default();
    let code = e.code().map(|code| format!(": {code}")).unwrap_or_default();
    Readiness::Unavailable { reason: format!("{}: {}{peer}{code}", e.op(), e.detail()), remedy }
}

/// Reads the files that protect channels, listens, and takes pinned memory of the GPU that is configured.
pub(crate) async fn probe(config: &TcpConfig) -> Readiness {
    readiness(tried(config).await)
}

async fn tried(config: &TcpConfig) -> Result<(), Error> {
    config.check()?;
    if let Some(device) = config.device.clone() {
        let pinned = move || Pinned::new(&Context::open(&Device::find(&device)?)?, 4096).map(drop);
        bounded("probe", "pinned memory of the driver", DRIVER, pinned).await?;
    }
    let config = config.clone();
    runtime::run("probe", async move {
        let security = Security::load(&config.security)?;
        Endpoint::open(config, security).await.map(drop)
    })
    .await
}

/// Attaches to watch, which compares everything that the locator says, and leaves.
pub(crate) async fn probe_pair(config: &TcpConfig, peer: &Locator, into: &Location) -> Readiness {
    readiness(attached(config, peer, into).await)
}

async fn attached(config: &TcpConfig, peer: &Locator, into: &Location) -> Result<(), Error> {
    check_locator(peer, into)?;
    let (locator, config) = (Arc::new(peer.clone()), config.clone());
    let attaching = runtime::run("probe", async move {
        let security = Security::load(&config.security)?;
        Route::new(locator, &config, &security, PAIR)?.attach(Lane::Watch).await.map(drop)
    });
    timeout(PAIR * 2, attaching).await.unwrap_or_else(|_| {
        let detail = format!("no answer within {PAIR:?}");
        Err(Error::new(Kind::Deadline, "probe", detail).with_peer(&peer.endpoint))
    })
}
