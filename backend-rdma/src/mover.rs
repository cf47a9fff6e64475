//! One hop: looks and pulls, all of them one-sided READs.

use crate::{
    arena::{Owned, Served},
    dial::Attachment,
    endpoint::Endpoint,
    engine::{Landing, Words, plan::Cutter},
    regions::Registration,
};
use async_trait::async_trait;
use flashboot_core::{
    Error, Generation, InFlight, Kind, Locator, Mover, Observed, Pull, Result, ShardId, control,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Between two looks at a word that is not there yet. It doubles from look to look, up to the configured one; a look itself
/// takes a few microseconds of wire.
const FIRST_PAUSE: Duration = Duration::from_micros(20);

/// A hop, as its owner has it.
#[derive(Debug)]
pub(crate) struct RdmaMover {
    // Closed before the endpoint can go.
    attachment: Attachment,
    into: Served,
    registration: Arc<Registration>,
    generation: Generation,
    payload: u64,
    shards: u32,
    message: u64,
    longest_pause: Duration,
    /// The devices stay open as long as the hop.
    _endpoint: Arc<Endpoint>,
}

impl RdmaMover {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        attachment: Attachment,
        into: Served,
        registration: Arc<Registration>,
        locator: &Locator,
    ) -> Self {
        let parts = endpoint.parts();
        let largest = parts.rails.iter().map(|rail| rail.max_message()).min().unwrap_or(1);
        // A power of two no device refuses.
        let largest = 1u64 << (63 - largest.max(1).leading_zeros());
        Self {
            attachment,
            into,
            registration,
            generation: locator.generation,
            payload: locator.payload,
            shards: locator.shards,
            message: parts.config.message.0.min(largest),
            longest_pause: parts.config.longest_pause,
            _endpoint: endpoint,
        }
    }

    async fn look(&self, shard: ShardId) -> Result<Observed> {
        let at = control::offset(self.payload).unwrap_or(u64::MAX);
        let generation = at.saturating_add(control::generation_offset());
        // The order in which the source answers: the generation around the word.
        let known = shard.0 < self.shards;
        let word = at.saturating_add(control::progress_offset(if known { shard } else { ShardId(0) }));
        let Some(words) = Words::new(&[(generation, 1), (word, 1), (generation, 1)]) else {
            return Err(Error::new(Kind::Invalid, "observe", "no words to read"));
        };
        let [before, progress, after, ..] =
            self.attachment.engine.look(self.attachment.hop, words, None).await?;
        let progress = if known { progress } else { 0 };
        Ok(if before == after {
            Observed { generation: Generation::from_word(after), progress }
        } else {
            Observed { generation: None, progress: 0 }
        })
    }

    fn lost(&self, shard: ShardId, progress: u64, at_least: u64) -> Error {
        let detail = format!("the source is gone at {progress} of {at_least} bytes of shard {}", shard.0);
        Error::new(Kind::SourceLost, "observe", detail)
            .with_peer(&self.attachment.peer)
            .with_remedy("go on from another source")
    }
}

#[async_trait]
impl Mover for RdmaMover {
    fn generation(&self) -> Generation {
        self.generation
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        let enough = |seen: &Observed| seen.progress >= at_least || seen.generation != Some(self.generation);
        let started = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            // Before the look, so that the last word of a source that has just died counts.
            let gone = self.attachment.gone.get();
            let seen = self.look(shard).await?;
            if enough(&seen) {
                return Ok(seen);
            }
            if gone {
                return Err(self.lost(shard, seen.progress, at_least));
            }
            let left = wait.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(seen);
            }
            tokio::time::sleep(pause.min(left)).await;
            pause = pause.saturating_mul(2).min(self.longest_pause);
        }
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        let Pull { range, hash } = pull;
        if let Some(block) = hash {
            check_blocks(self.payload, pull, block)?;
        }
        let owned = Owned::of(&self.into, range)?;
        let registration = Arc::clone(&self.registration);
        let cutter = Cutter::new(range, self.message, registration.extent, self.attachment.source);
        let landing = Landing::new(owned, registration, self.payload, range, hash);
        Ok(Box::new(self.attachment.engine.pull(self.attachment.hop, cutter, landing)))
    }

    fn remarks(&self) -> Vec<String> {
        self.attachment.remarks.clone()
    }
}

/// Refuses a range that is no whole blocks.
fn check_blocks(payload: u64, pull: Pull, block: u64) -> Result<()> {
    let range = pull.range;
    let ends_well = range.end == payload || range.end.is_multiple_of(block.max(1));
    let whole = block.is_power_of_two()
        && block >= 1024
        && (range.is_empty() || (range.start.is_multiple_of(block) && ends_well));
    if whole {
        return Ok(());
    }
    let detail = format!(
        "bytes {range} do not begin and end at blocks of {block} bytes or the payload's end {payload}"
    );
    Err(Error::new(Kind::Invalid, "pull", detail))
}
