//! Unmapping aside: nobody waits for it.

use async_trait::async_trait;
use flashboot_core::{Error, Generation, InFlight, Kind, Mover, Observed, Pull, Result, ShardId};
use std::time::Duration;

/// A mover that is let go of on a thread of its own, which yields to everybody who copies: to unmap 1 GiB of 4 KiB
/// pages takes some 27 ms of a core, and neither the commit nor the clones further down wait for it.
#[derive(Debug)]
pub(crate) struct LetGo(Option<Box<dyn Mover>>, Generation);

impl LetGo {
    pub(crate) fn wrap(mover: Box<dyn Mover>) -> Box<dyn Mover> {
        let generation = mover.generation();
        Box::new(Self(Some(mover), generation))
    }

    /// There until it is dropped.
    fn inner(&self) -> Result<&dyn Mover> {
        self.0.as_deref().ok_or_else(|| Error::new(Kind::Cancelled, "mover", "it was let go of"))
    }
}

#[async_trait]
impl Mover for LetGo {
    fn generation(&self) -> Generation {
        self.1
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        self.inner()?.observe(shard, at_least, wait).await
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        self.inner()?.start(pull)
    }

    fn remarks(&self) -> Vec<String> {
        self.0.as_deref().map(Mover::remarks).unwrap_or_default()
    }
}

impl Drop for LetGo {
    fn drop(&mut self) {
        let Some(mover) = self.0.take() else { return };
        let let_go = move || {
            // Of this thread only; where it may not be, the unmap competes.
            let _ = rustix::process::setpriority_process(None, 19);
            drop(mover);
        };
        // Without a thread it is dropped with the closure, here, and the commit waits.
        let _ = std::thread::Builder::new().name("flashboot-unmap".into()).spawn(let_go);
    }
}
