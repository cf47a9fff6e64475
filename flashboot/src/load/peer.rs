//! Other ranks that have it: what `flashboot clone` does, into the load's own arena.

use super::FromPeer;
use crate::service::{clone_into, look};
use flashboot_core::{Error, Kind, Result};
use flashboot_loader::{
    pipeline::{Filling, Phase},
    source::{Delivered, Load, Source, SourceKind},
};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::{runtime::Handle, task::JoinHandle};

/// The replication service, and whoever it says.
pub(super) struct PeerSource {
    peer: FromPeer,
    runtime: Handle,
    /// Others may still read from what it has loaded.
    leaving: Mutex<Option<JoinHandle<()>>>,
}

impl PeerSource {
    pub(super) fn new(peer: FromPeer, runtime: Handle) -> Self {
        Self { peer, runtime, leaving: Mutex::default() }
    }

    /// Waits until it has left the service: for at most the time to drain.
    pub(super) fn left(&self) {
        let leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(leaving) = leaving {
            // One that panicked has left too.
            let _ = self.runtime.block_on(leaving);
        }
    }
}

impl Source for PeerSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Peer
    }

    fn name(&self) -> String {
        self.peer.request.rendezvous.to_string()
    }

    /// Asks the service; whoever is named must have exactly what is wanted.
    fn probe(&self, load: &Load) -> Result<()> {
        let began = Instant::now();
        let manifest = self.runtime.block_on(look(&self.peer.request));
        load.phases().add(Phase::Connect, began.elapsed());
        let manifest = manifest?;
        let wanted = load.wanted();
        let same = match wanted.digests.get()? {
            Some(digests) => **digests == *manifest.table.digests(),
            None => false,
        };
        if !same || manifest.entry.coordinate.to_string() != wanted.rank {
            let detail = format!("{} has other bytes than those that are wanted", manifest.metadata.id);
            return Err(Error::new(Kind::Mismatch, "clone", detail).with_peer(self.name()));
        }
        Ok(())
    }

    fn deliver(&self, load: &Load) -> Result<Delivered> {
        let filling: Arc<Filling> = Arc::clone(load.filling()?);
        let seen = {
            let filling = Arc::clone(&filling);
            move |range| filling.proved(range)
        };
        let (cloned, leaving) = self.runtime.block_on(clone_into(
            self.peer.request.clone(),
            Arc::clone(filling.arena()),
            seen,
        ))?;
        let leaving = self.runtime.spawn(leaving);
        *self.leaving.lock().unwrap_or_else(PoisonError::into_inner) = Some(leaving);
        let ms = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
        load.phases().add(Phase::Connect, ms(cloned.setup_ms));
        load.phases().add(Phase::IoWait, ms(cloned.transfer_ms));
        load.phases().add(Phase::Verify, ms((cloned.ready_ms - cloned.transfer_ms).max(0.0)));
        Ok(Delivered::Filled)
    }
}
