//! One pull, from its start to the event it ends in.

use crate::run::Limits;
use flashboot_core::{
    ChunkRef, Digests, Error, InFlight, Kind, Landed, Mover, PeerId, Result, ShardId, replica::Event,
};
use std::{sync::Arc, time::Duration};
use tokio::{sync::watch, time::timeout};

/// Turns true when the source's pulls are to be cancelled.
pub(crate) type Aborted = watch::Receiver<bool>;

/// How a pull ended, once it is quiet.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) event: Event,
    /// Set when the pull also showed that its source cannot be read any more.
    pub(crate) lost: Option<Event>,
    /// Blocks whose digest was compared and right.
    pub(crate) verified: u64,
}

/// Waits until `pull` is quiet, at most `limits.pull` and then, cancelled, `limits.quiesce`.
///
/// # Errors
/// [`Kind::Deadline`] when the transport does not give the range back in that time. Its memory stays owned:
/// the replication cannot go on.
async fn quiet(pull: &mut dyn InFlight, mut abort: Aborted, limits: Limits) -> Result<Result<Landed>> {
    tokio::select! {
        biased;
        landed = pull.quiesced() => return Ok(landed),
        // An error means that the driver let go of the source: the same as a cancel.
        _ = abort.wait_for(|aborted| *aborted) => {}
        () = tokio::time::sleep(limits.pull) => {}
    }
    pull.cancel();
    timeout(limits.quiesce, pull.quiesced()).await.map_err(|_| {
        Error::new(
            Kind::Deadline,
            "quiesce",
            format!("a cancelled pull still owns its memory after {:?}", limits.quiesce),
        )
        .with_remedy("restart this process: the range cannot be used again while a pull may write it")
    })
}

/// Waits for the pull of `chunk`, looks at the source's generation again and compares digests.
pub(crate) async fn finish(
    mut pull: Box<dyn InFlight>,
    mover: Arc<dyn Mover>,
    source: PeerId,
    chunk: ChunkRef,
    expected: Option<Arc<Digests>>,
    abort: Aborted,
    limits: Limits,
) -> Result<Ended> {
    let name = |e: Error| e.with_peer(source).with_chunk(chunk.index);
    let landed = match quiet(&mut *pull, abort, limits).await.map_err(name)? {
        Ok(landed) => landed,
        Err(cause) => {
            let event = Event::Failed { source, chunk, cause: name(cause) };
            return Ok(Ended { event, lost: None, verified: 0 });
        }
    };
    // Let go of the range before anyone may be told to pull it again.
    drop(pull);
    let stale = if landed.generation == Some(mover.generation()) {
        None
    } else {
        stale(&*mover, chunk.shard).await.err().map(name)
    };
    let Some(expected) = expected else {
        let event = match stale {
            None => Event::Verified { source, chunk },
            Some(cause) => Event::Failed { source, chunk, cause },
        };
        return Ok(Ended { event, lost: None, verified: 0 });
    };
    let first = chunk.range.start / expected.block();
    let blocks = (chunk.range.len()).div_ceil(expected.block());
    let mut bad = expected.mismatches(first, &landed.digests);
    // A mover that returns too few values has not verified the rest.
    bad.extend(first + landed.digests.len() as u64..first + blocks);
    let lost = stale.clone().map(|cause| Event::Lost { source, cause });
    let event = match (bad.is_empty(), stale) {
        // The bytes are the image's own, whatever the source holds by now.
        (true, _) => Event::Verified { source, chunk },
        (false, None) => Event::Corrupt { source, chunk, blocks: bad.clone() },
        (false, Some(cause)) => Event::Failed { source, chunk, cause },
    };
    Ok(Ended { event, lost, verified: blocks - (bad.len() as u64).min(blocks) })
}

/// One look: how much of `shard` the source has. Fails with [`Kind::StaleGeneration`] when it does not hold the
/// locator's filling any more.
pub(crate) async fn stale(mover: &dyn Mover, shard: ShardId) -> Result<u64> {
    let seen = mover.observe(shard, 0, Duration::ZERO).await?;
    if seen.generation == Some(mover.generation()) {
        return Ok(seen.progress);
    }
    let found = seen.generation.map_or_else(|| "nothing".to_owned(), |g| g.to_string());
    Err(Error::new(
        Kind::StaleGeneration,
        "observe",
        format!("the source's arena holds {found}, its locator named {}", mover.generation()),
    ))
}
