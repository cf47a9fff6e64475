//! One hop between host arenas: copies of a peer's mapped arena into ours.

use crate::connection::Connection;
use async_trait::async_trait;
use flashboot_core::{Error, Generation, InFlight, Kind, Mover, Observed, Pull, Result, ShardId};
use flashboot_memory::{CopyEngine, HostArena, ImportedArena};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The first pause between two looks; each next is twice as long. The runtime's timer rounds a pause up
/// (tokio's to a millisecond), so that waiting costs a core one or two percent at most.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_micros(500);

#[derive(Debug)]
pub(crate) struct IpcMover {
    connection: Connection,
    from: Arc<ImportedArena>,
    into: Arc<HostArena>,
    generation: Generation,
    engine: Arc<CopyEngine>,
}

impl IpcMover {
    pub(crate) fn new(
        connection: Connection,
        from: ImportedArena,
        into: Arc<HostArena>,
        generation: Generation,
        engine: Arc<CopyEngine>,
    ) -> Self {
        Self { connection, from: Arc::new(from), into, generation, engine }
    }

    /// Whether the arena holds what the locator named; it may have been refilled since the exporter answered.
    pub(crate) fn check_generation(&self) -> Result<()> {
        let found = self.from.observe(ShardId(0)).generation;
        if found == Some(self.generation) {
            return Ok(());
        }
        let found = found.map_or_else(|| "is being refilled".to_owned(), |g| format!("holds generation {g}"));
        let detail = format!("the arena {found}, the locator names {}", self.generation);
        Err(Error::new(Kind::StaleGeneration, "import", detail)
            .with_peer(self.connection.peer())
            .with_remedy("fetch a fresh locator from the exporter"))
    }
}

#[async_trait]
impl Mover for IpcMover {
    fn generation(&self) -> Generation {
        self.generation
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        let enough = |seen: &Observed| seen.progress >= at_least || seen.generation != Some(self.generation);
        let started = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let seen = self.from.observe(shard);
            if enough(&seen) {
                return Ok(seen);
            }
            if self.connection.is_broken() {
                // What it published before it went counts.
                let last = self.from.observe(shard);
                if enough(&last) {
                    return Ok(last);
                }
                let progress = last.progress;
                return Err(Error::new(
                    Kind::SourceLost,
                    "observe",
                    format!("the source is gone at {progress} of {at_least} bytes of shard {}", shard.0),
                )
                .with_peer(self.connection.peer())
                .with_remedy("go on from another source"));
            }
            let left = wait.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(seen);
            }
            tokio::time::sleep(pause.min(left)).await;
            pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
        }
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        let job = self.engine.pull(&self.from, &self.into, pull);
        Ok(Box::new(job.map_err(|e| e.with_peer(self.connection.peer()))?))
    }
}
