//! Where a clone's sources come from: the membership says who and how, the registry how to reach them.

use super::told::Told;
use crate::{
    config::Replicate,
    observe::Watched,
    registry::{Endpoints, Imported, PassedOver},
    replicate::LetGo,
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Generation, Kind, Locator, Mover, PeerId, Result, ShardId, TransportName,
};
use flashboot_driver::Sources;
use flashboot_rendezvous::{Fault, Loss, Membership, protocol::MemberId};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::watch;
use tracing::{info, warn};

/// How often one source is imported in vain.
const IMPORTS: u32 = 3;

/// A source that was read from, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// Who.
    pub source: MemberId,
    /// By which transport.
    pub transport: TransportName,
    /// What came before it in the order and was passed over.
    pub passed: Vec<PassedOver>,
}

/// The sources of one clone.
pub(crate) struct Members {
    membership: Arc<Membership>,
    endpoints: Arc<Endpoints>,
    arena: Arc<dyn Arena>,
    import: Duration,
    patience: Duration,
    /// Imported before they are asked for.
    ahead: Mutex<BTreeMap<PeerId, Box<dyn Mover>>>,
    hops: Mutex<Vec<Hop>>,
    failed: Mutex<Failed>,
    watched: Option<Arc<Watched>>,
    ends: Option<Ends>,
}

/// Imports that failed.
#[derive(Debug, Default)]
struct Failed {
    /// How often, by source, since the last that did not.
    times: BTreeMap<PeerId, u32>,
    /// Sources that cannot be imported from here.
    unreachable: BTreeSet<PeerId>,
}

impl Failed {
    /// Notes that importing `source` failed; `fixed`: by the only transport that there is to try.
    fn note(&mut self, source: PeerId, error: &Error, fixed: bool) {
        let times = self.times.entry(source).or_default();
        *times += 1;
        // A source that is only gone is not given again before it has shown life: one that fails and lives will not do.
        let never =
            matches!(error.kind(), Kind::Unavailable | Kind::Mismatch | Kind::Permission | Kind::Invalid);
        if fixed && never || *times >= IMPORTS {
            self.unreachable.insert(source);
        }
    }
}

/// Who tells of the end of a member.
struct Ends(Box<dyn Fn(MemberId) -> watch::Receiver<bool> + Send + Sync>);

impl Members {
    /// Of the clone that `membership` is; another source is looked for as long as `patience`.
    pub(crate) fn new(
        membership: Arc<Membership>,
        endpoints: Arc<Endpoints>,
        arena: Arc<dyn Arena>,
        replicate: &Replicate,
        patience: Duration,
    ) -> Self {
        // A holder that is stopped takes a connection and does not answer: no longer than a word may stand still.
        let import = replicate.import_timeout.min(replicate.stall);
        let (ahead, hops, failed) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (watched, ends) = (None, None);
        Self { membership, endpoints, arena, import, patience, ahead, hops, failed, watched, ends }
    }

    /// Tells `watched` of every hop and every loss.
    pub(super) fn watched(self, watched: Arc<Watched>) -> Self {
        Self { watched: Some(watched), ..self }
    }

    /// Hears of the ends of members from `ends`, where the transport itself does not notice; true once one has ended.
    pub(crate) fn told(
        self,
        ends: impl Fn(MemberId) -> watch::Receiver<bool> + Send + Sync + 'static,
    ) -> Self {
        Self { ends: Some(Ends(Box::new(ends))), ..self }
    }

    /// Every source imported so far, in order.
    pub(crate) fn hops(&self) -> Vec<Hop> {
        self.hops.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Imports `source` now, so that a transfer does not pay for it.
    pub(crate) async fn map_ahead(&self, source: PeerId) -> Result<()> {
        let mover = self.import(source).await?;
        self.ahead().insert(source, mover);
        Ok(())
    }

    fn ahead(&self) -> MutexGuard<'_, BTreeMap<PeerId, Box<dyn Mover>>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self) -> MutexGuard<'_, Failed> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn import(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        let unknown = || Error::new(Kind::SourceLost, "import", "no plan has named it");
        let source = member(source).ok_or_else(unknown)?;
        let holder = self.membership.holder(source).ok_or_else(unknown)?;
        let ends = || self.ends.as_ref().map(|Ends(of)| of(source));
        let import = Import { endpoints: &self.endpoints, arena: &self.arena, timeout: self.import };
        let (mover, hop) = import.of(source, &holder.locators, ends).await?;
        if let Some(watched) = &self.watched {
            watched.hops(&hop);
        }
        self.hops.lock().unwrap_or_else(PoisonError::into_inner).push(hop);
        Ok(mover)
    }
}

/// How a source is imported.
pub(super) struct Import<'e> {
    pub(super) endpoints: &'e Endpoints,
    pub(super) arena: &'e Arc<dyn Arena>,
    pub(super) timeout: Duration,
}

impl Import<'_> {
    /// Imports `source` by the first of its `locators` that works. `ends` gives the news of its end, where the transport itself does
    /// not notice that.
    pub(super) async fn of(
        self,
        source: MemberId,
        locators: &[String],
        ends: impl FnOnce() -> Option<watch::Receiver<bool>>,
    ) -> Result<(Box<dyn Mover>, Hop)> {
        let locators: Vec<Locator> =
            locators.iter().map(|line| line.parse().map_err(Error::from)).collect::<Result<_>>()?;
        // The service checks them too; but what names the filling is believed from nobody.
        if let Some(other) = locators.iter().find(|locator| locator.generation != source.0) {
            let detail = format!("a locator of filling {}, not {source}", other.generation);
            return Err(Error::new(Kind::Mismatch, "import", detail));
        }
        let imported = self.endpoints.import(&locators, self.arena, self.timeout).await?;
        let Imported { mover, transport, passed } = imported;
        info!(%source, %transport, "reading");
        for p in &passed {
            info!(%source, %transport, passed_over = %p.name, reason = p.reason, "transport chosen");
        }
        let mover: Box<dyn Mover> = match (transport, ends()) {
            // Fabric memory outlives its exporter, and there is no connection that would end.
            (TransportName::Imex, Some(ends)) => Box::new(Told(mover, ends)),
            _ => mover,
        };
        // The mock's clock must not wait for a thread.
        let mover = if transport == TransportName::Mock { mover } else { LetGo::wrap(mover) };
        Ok((mover, Hop { source, transport, passed }))
    }
}

/// How long a word may stand still before a member with `above` members above it that do not hold all leaves its source:
/// a quarter longer with each, so that whoever is next to a source that stopped finds another first, and nobody behind it
/// leaves a healthy one.
pub(crate) fn stall(stall: Duration, above: u32) -> Duration {
    stall.saturating_add((stall / 4).saturating_mul(above))
}

/// A member is a peer by its filling's word.
pub(crate) fn peer(member: MemberId) -> PeerId {
    PeerId(member.0.word())
}

/// The member that a peer is.
pub(super) fn member(peer: PeerId) -> Option<MemberId> {
    Generation::from_word(peer.0).map(MemberId)
}

#[async_trait]
impl Sources for Members {
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        let ahead = self.ahead().remove(&source);
        let imported = match ahead {
            Some(mover) => Ok(mover),
            None => self.import(source).await,
        };
        match &imported {
            Ok(_) => drop(self.failed().times.remove(&source)),
            Err(error) => self.failed().note(source, error, self.endpoints.names().len() == 1),
        }
        imported
    }

    async fn replace(&self, lost: PeerId, _shard: ShardId, from: u64, cause: &Error) -> Option<PeerId> {
        let source = member(lost)?;
        if let Some(watched) = &self.watched {
            watched.lost(cause);
        }
        let fault = match cause.kind() {
            _ if self.failed().unreachable.contains(&lost) => Fault::Unreachable,
            Kind::Corrupt => Fault::Corrupt,
            kind if kind.is_refusal() => Fault::Refused,
            _ => Fault::Lost,
        };
        let next = self.membership.lost(Loss { source, fault }, self.patience).await?;
        warn!(lost = %source, source = %next, from, "reading on elsewhere");
        Some(peer(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_never_be_imported_is_tried_once_and_what_fails_for_now_a_few_times() {
        let of = |kind| Error::new(kind, "import", "x");
        let (one, two) = (PeerId(1), PeerId(2));
        let mut failed = Failed::default();
        failed.note(one, &of(Kind::Mismatch), true);
        failed.note(two, &of(Kind::Unavailable), false);
        assert_eq!(failed.unreachable, BTreeSet::from([one]), "of several transports another may do");
        failed.note(two, &of(Kind::SourceLost), true);
        assert!(!failed.unreachable.contains(&two));
        failed.note(two, &of(Kind::SourceLost), true);
        assert!(failed.unreachable.contains(&two));
    }

    #[test]
    fn patience_grows_with_those_above() {
        let second = Duration::from_secs(1);
        assert_eq!([0, 1, 2].map(|above| stall(second, above)), [second, second * 5 / 4, second * 3 / 2]);
        assert_eq!(stall(Duration::MAX, 2), Duration::MAX);
    }
}
