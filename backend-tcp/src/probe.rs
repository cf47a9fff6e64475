//! Whether `tcp` works here, and why not.

use crate::{arena::check_locator, config::TcpConfig, dial::Route, endpoint::Endpoint, runtime, wire::Lane};
use flashboot_channel::Security;
use flashboot_core::{Error, Kind, Location, Locator, Readiness};
use flashboot_cuda::{Context, Device, Pinned, bounded, probe as gpu};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

/// How long `probe_pair` may wait for its peer.
const PAIR: Duration = Duration::from_secs(2);
/// How long a driver may take: it sets the GPU up at its first use.
const DRIVER: Duration = Duration::from_secs(20);

fn unavailable(e: &Error) -> Readiness {
    let remedy = e.remedy().unwrap_or("see the reason").to_owned();
    let peer = e.peer().map(|peer| format!(" (peer {peer})")).unwrap_or_default();
    let code = e.code().map(|code| format!(": {code}")).unwrap_or_default();
    Readiness::Unavailable { reason: format!("{}: {}{peer}{code}", e.op(), e.detail()), remedy }
}

/// Reads the files that protect channels, listens, and takes pinned memory of the GPU that is configured.
pub(crate) async fn probe(config: &TcpConfig) -> Readiness {
    tried(config).await.unwrap_or_else(|e| unavailable(&e))
}

async fn tried(config: &TcpConfig) -> Result<Readiness, Error> {
    config.check()?;
    if let Some(device) = config.device.clone() {
        let trial = move || match gpu::verdict(&gpu::ladder(&device, DRIVER), gpu::VMM) {
            Readiness::Ready => {
                Pinned::new(&Context::open(&Device::find(&device)?)?, 4096)?;
                Ok(Readiness::Ready)
            }
            lacking => Ok(lacking),
        };
        let gpu = bounded("probe", "pinned memory of the driver", DRIVER * 2, trial).await?;
        if gpu != Readiness::Ready {
            return Ok(gpu);
        }
    }
    let config = config.clone();
    runtime::run("probe", async move {
        let security = Security::load(&config.security)?;
        Endpoint::open(config, security).await.map(|_| Readiness::Ready)
    })
    .await
}

/// Attaches to watch, which compares everything that the locator says, and leaves.
pub(crate) async fn probe_pair(config: &TcpConfig, peer: &Locator, into: &Location) -> Readiness {
    match attached(config, peer, into).await {
        Ok(()) => Readiness::Ready,
        Err(e) => unavailable(&e),
    }
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
