//! Pulls on the simulated network: block by block on tokio's clock.

use crate::{Bug, Fault, MockArena, Network};
use async_trait::async_trait;
use flashboot_core::{
    Arena as _, BlockDigest, ByteRange, Error, Generation, Geometry, InFlight, Kind, Landed, Mover, Observed,
    Pull, Result, ShardId, claims::Claim, digest,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{self, Instant},
};

#[derive(Debug)]
pub(crate) struct MockMover {
    network: Network,
    source: Arc<MockArena>,
    into: Arc<MockArena>,
    generation: Generation,
    /// What the words read when the source began to stall.
    frozen: Mutex<BTreeMap<ShardId, u64>>,
}

impl MockMover {
    pub(crate) fn new(
        network: Network,
        source: Arc<MockArena>,
        into: Arc<MockArena>,
        generation: Generation,
    ) -> Self {
        network.count_mover(1);
        Self { network, source, into, generation, frozen: Mutex::default() }
    }

    fn look(&self, shard: ShardId) -> Observed {
        let mut seen = self.source.observe(shard);
        if self.network.0.config.bug == Some(Bug::ReadsStaleGeneration) {
            seen.generation = Some(self.generation);
        }
        if self.network.is_stalled(self.source.host()) {
            let mut frozen = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.progress = *frozen.entry(shard).or_insert(seen.progress);
        }
        seen
    }
}

impl Drop for MockMover {
    fn drop(&mut self) {
        self.network.count_mover(-1);
    }
}

#[async_trait]
impl Mover for MockMover {
    fn generation(&self) -> Generation {
        self.generation
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        let until = Instant::now() + wait;
        let mut changes = self.source.changes.subscribe();
        let mut deaths = self.network.0.deaths.subscribe();
        loop {
            changes.borrow_and_update();
            deaths.borrow_and_update();
            let seen = self.look(shard);
            let arrived = seen.progress >= at_least || seen.generation != Some(self.generation);
            if self.network.is_dead(self.source.host()) && at_least > 0 {
                return Err(gone(self.source.host()));
            }
            if arrived || wait.is_zero() || Instant::now() >= until {
                return Ok(seen);
            }
            tokio::select! {
            biased;
                       _ = changes.changed() => time::sleep(self.network.0.config.latency).await,
                       _ = deaths.changed() => {}
                       () = time::sleep_until(until) => {}
                   }
        }
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        let claim = self.into.claim(pull.range)?;
        let host = self.source.host();
        let faults = self.network.next_pull(host);
        if faults.iter().any(|fault| matches!(fault, Fault::Kill { .. })) {
            self.network.kill(host);
        }
        if self.network.0.config.bug == Some(Bug::PublishesBeforeVerifying) && self.into.shards() == 1 {
            let _ = self.into.publish(ShardId(0), pull.range.end);
        }
        let (cancel, cancelled) = watch::channel(false);
        let (done, result) = watch::channel(None);
        let transfer = Transfer {
            network: self.network.clone(),
            source: Arc::clone(&self.source),
            into: Arc::clone(&self.into),
            pull,
            faults,
            cancelled,
        };
        tokio::spawn(transfer.run(claim, done));
        Ok(Box::new(MockInFlight { cancel, result }))
    }
}

fn gone(host: u32) -> Error {
    Error::new(Kind::SourceLost, "mock", format!("host {host} died"))
}

#[derive(Debug)]
struct MockInFlight {
    cancel: watch::Sender<bool>,
    result: watch::Receiver<Option<Result<Landed>>>,
}

#[async_trait]
impl InFlight for MockInFlight {
    fn cancel(&self) {
        self.cancel.send_replace(true);
    }

    async fn quiesced(&mut self) -> Result<Landed> {
        match self.result.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or_else(|| Err(gone(u32::MAX))),
            Err(_) => Err(Error::new(Kind::Cancelled, "mock", "the runtime ended under the pull")),
        }
    }
}

impl Drop for MockInFlight {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// One pull at work. It owns its range until `run` ends.
struct Transfer {
    network: Network,
    source: Arc<MockArena>,
    into: Arc<MockArena>,
    pull: Pull,
    faults: Vec<Fault>,
    cancelled: watch::Receiver<bool>,
}

impl Transfer {
    async fn run(mut self, claim: Claim, done: watch::Sender<Option<Result<Landed>>>) {
        let bug = self.network.0.config.bug;
        let skip = match bug {
            Some(Bug::DropsLastChunk) if self.pull.range.end == self.into.payload() => self.pull.range.len(),
            Some(Bug::OffByOne) => 1,
            _ => 0,
        };
        let range = ByteRange::new(self.pull.range.start, self.pull.range.end.saturating_sub(skip));
        if bug == Some(Bug::CompletesEarly) {
            let half = ByteRange::new(range.start, range.start + range.len() / 2);
            let rest = ByteRange::new(half.end, range.end);
            let moved = self.moved(half).await;
            drop(claim);
            done.send_replace(Some(moved.map(|()| self.landed(true))));
            time::sleep(Duration::from_secs(1)).await;
            self.copy(rest);
            return;
        }
        let moved = self.moved(range).await;
        if let Some(Fault::Late { by, .. }) = self.faults.iter().find(|f| matches!(f, Fault::Late { .. })) {
            time::sleep(*by).await;
            self.copy(range);
        }
        let result = moved.map(|()| self.landed(bug.is_some()));
        // The range is free before anyone can hear that it is quiet.
        drop(claim);
        done.send_replace(Some(result));
    }

    /// Moves `range` block by block, unless cancelled, dropped or bereft of its source.
    async fn moved(&mut self, range: ByteRange) -> Result<()> {
        let config = &self.network.0.config;
        let host = self.source.host();
        let cancelled = || Err(Error::new(Kind::Cancelled, "mock", "the pull was cancelled"));
        if self.faults.iter().any(|f| matches!(f, Fault::Drop { .. })) {
            // An error means that nobody holds the pull any more: the same as a cancel.
            let _ = self.cancelled.wait_for(|cancelled| *cancelled).await;
            return cancelled();
        }
        time::sleep(config.latency).await;
        let step = self.pull.hash.unwrap_or(1 << 20);
        let mut at = range.start;
        while at < range.end {
            let block = ByteRange::new(at, at.saturating_add(step).min(range.end));
            let mut deaths = self.network.0.deaths.subscribe();
            tokio::select! {
            biased;
                       () = time::sleep(config.time_of(block.len())) => {}
                       _ = self.cancelled.wait_for(|cancelled| *cancelled) => return cancelled(),
                       _ = deaths.wait_for(|_| self.network.is_dead(host)) => return Err(gone(host)),
                   }
            self.copy(block);
            at = block.end;
        }
        if self.faults.iter().any(|f| matches!(f, Fault::Corrupt { .. })) {
            let middle = range.start + range.len() / 2;
            self.into.with(ByteRange::new(middle, middle + 1), |bytes| {
                bytes.iter_mut().for_each(|byte| *byte ^= 0x10);
            });
        }
        Ok(())
    }

    fn copy(&self, range: ByteRange) {
        let bytes = self.source.with(range, |bytes| bytes.to_vec());
        self.into.with(range, |to| to.copy_from_slice(&bytes));
    }

    /// The digests of what landed; with a planted bug, of what should have.
    fn landed(&self, from_source: bool) -> Landed {
        let Some(block) = self.pull.hash else { return Landed::default() };
        let Ok(geometry) = Geometry::new(self.into.payload(), block, block, 1) else {
            return Landed::default();
        };
        let arena = if from_source { &self.source } else { &self.into };
        let digest = |index| -> BlockDigest {
            arena.with(geometry.block_range(index), |bytes| digest::block(&geometry, index, bytes))
        };
        Landed { digests: geometry.blocks_of(self.pull.range).map(digest).collect(), generation: None }
    }
}
