//! Whether `rdma` works here, and why not: found by opening devices and connecting queue pairs.

use crate::{
    arena::check_locator,
    config::RdmaConfig,
    counters::Counters,
    endpoint::Endpoint,
    exchange::attached,
    rail::{Rail, open_all},
    verbs::Verbs,
};
use flashboot_core::{Error, Location, Locator, Readiness, Result};
use std::{sync::Arc, time::Duration};

/// How long a driver may take.
pub(crate) const DRIVER: Duration = Duration::from_secs(10);
/// How long `probe_pair` may wait for its peer.
pub(crate) const PAIR: Duration = Duration::from_secs(3);

pub(crate) fn unavailable(e: &Error) -> Readiness {
    let remedy = e.remedy().unwrap_or("see the reason").to_owned();
    let mut reason = format!("{}: {}", e.op(), e.detail());
    if let Some(peer) = e.peer() {
        reason = format!("{reason} (peer {peer})");
    }
    if let Some(code) = e.code() {
        reason = format!("{reason}: {code}");
    }
    Readiness::Unavailable { reason, remedy }
}

/// The devices that an endpoint would use, as people read them.
pub(crate) fn devices(verbs: &Arc<dyn Verbs>, config: &RdmaConfig) -> Result<Vec<String>> {
    config.check()?;
    let rails = open_all(verbs, config, &Arc::new(Counters::default()))?;
    // What a device says of itself is not believed: make what a reader gets.
    for rail in &rails {
        rail.give_back(rail.pair()?);
    }
    Ok(rails.iter().map(|rail: &Arc<Rail>| rail.describe()).collect())
}

/// Dials, exchanges queue pairs, reads the source's control block over each device, and hangs up.
pub(crate) async fn pair(endpoint: &Endpoint, peer: &Locator, into: &Location) -> Result<()> {
    check_locator(peer, into)?;
    attached(endpoint, peer, None, PAIR).await.map(drop)
}
