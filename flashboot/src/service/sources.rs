//! Where a clone's sources come from: the membership says who and how, the registry how to reach them.

use super::seat::Seat;
use crate::{
    observe::Watched,
    registry::{Endpoints, Imported, PassedOver},
    replicate::LetGo,
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Generation, Kind, Locator, Mover, PeerId, Result, ShardId, TransportName,
};
use flashboot_driver::Sources;
use flashboot_rendezvous::{
    Loss, Membership,
    protocol::{Cause, MemberId},
};
use serde::Serialize;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tracing::{info, warn};

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
pub(super) struct Members {
    membership: Arc<Membership>,
    endpoints: Arc<Endpoints>,
    arena: Arc<dyn Arena>,
    import: Duration,
    patience: Duration,
    hops: Mutex<Vec<Hop>>,
    watched: Option<Arc<Watched>>,
}

impl Members {
    pub(super) fn new(
        membership: Arc<Membership>,
        endpoints: Arc<Endpoints>,
        arena: Arc<dyn Arena>,
        seat: &Seat,
    ) -> Self {
        let replicate = &seat.config.replicate;
        let import = replicate.import_timeout.min(replicate.stall);
        Self {
            membership,
            endpoints,
            arena,
            import,
            patience: seat.patience,
            hops: Mutex::default(),
            watched: None,
        }
    }

    /// Tells `watched` of every hop and every loss.
    pub(super) fn watched(self, watched: Arc<Watched>) -> Self {
        Self { watched: Some(watched), ..self }
    }

    pub(super) fn hops(&self) -> Vec<Hop> {
        self.hops.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A member is a peer by its filling's word.
pub(super) fn peer(member: MemberId) -> PeerId {
    PeerId(member.0.word())
}

fn member(peer: PeerId) -> Option<MemberId> {
    Generation::from_word(peer.0).map(MemberId)
}

#[async_trait]
impl Sources for Members {
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        let unknown = || Error::new(Kind::SourceLost, "import", "no plan has named it");
        let source = member(source).ok_or_else(unknown)?;
        let holder = self.membership.holder(source).ok_or_else(unknown)?;
        let locators: Vec<Locator> =
            holder.locators.iter().map(|line| line.parse().map_err(Error::from)).collect::<Result<_>>()?;
        // The service checks them too; but what names the filling is believed from nobody.
        if let Some(other) = locators.iter().find(|locator| locator.generation != source.0) {
            let detail = format!("a locator of filling {}, not {source}", other.generation);
            return Err(Error::new(Kind::Mismatch, "import", detail));
        }
        let imported = self.endpoints.import(&locators, &self.arena, self.import).await?;
        let Imported { mover, transport, passed } = imported;
        info!(%source, %transport, "reading");
        if let Some(watched) = &self.watched {
            let passed = passed.iter().map(|passed| (passed.name.to_string(), passed.reason.as_str()));
            watched.hop(transport.as_str(), passed);
        }
        let hop = Hop { source, transport, passed };
        self.hops.lock().unwrap_or_else(PoisonError::into_inner).push(hop);
        Ok(LetGo::wrap(mover))
    }

    async fn replace(&self, lost: PeerId, _shard: ShardId, from: u64, cause: &Error) -> Option<PeerId> {
        let source = member(lost)?;
        if let Some(watched) = &self.watched {
            watched.lost(cause);
        }
        let refused = cause.kind().is_refusal();
        let loss = Loss { source, cause: if refused { Cause::Refused } else { Cause::Lost } };
        let next = self.membership.lost(loss, self.patience).await?;
        warn!(lost = %source, source = %next, from, "reading on elsewhere");
        Some(peer(next))
    }
}
