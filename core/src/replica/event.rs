//! What goes into a [`super::Replica`] and what comes out.

use crate::{ChunkRef, Error, PeerId, ShardId};
use std::time::Duration;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Begin. Once, first.
    Start,
    /// [`Command::Attach`] succeeded: the source is mapped.
    Attached {
        /// The source.
        source: PeerId,
    },
    /// [`Command::Watch`] is answered: the source has `bytes` verified bytes of `shard`.
    Seen {
        /// The source.
        source: PeerId,
        /// The shard.
        shard: ShardId,
        /// Verified bytes from the shard's start.
        bytes: u64,
    },
    /// The source is gone, could not be attached, or holds another filling. Its pulls may still be in flight.
    Lost {
        /// The source.
        source: PeerId,
        /// Why.
        cause: Error,
    },
    /// A pull quiesced; its bytes match their digests and the source's generation still holds.
    Verified {
        /// The source.
        source: PeerId,
        /// The chunk.
        chunk: ChunkRef,
    },
    /// A pull quiesced, and `blocks` of its blocks do not match their digests.
    Corrupt {
        /// The source.
        source: PeerId,
        /// The chunk.
        chunk: ChunkRef,
        /// The numbers of the blocks, in the payload.
        blocks: Vec<u64>,
    },
    /// A pull quiesced without success (cancelled, or an error that is not the source's loss).
    Failed {
        /// The source.
        source: PeerId,
        /// The chunk.
        chunk: ChunkRef,
        /// Why.
        cause: Error,
    },
    /// [`Command::Seek`] is answered: read from `source` what was to be read from `lost`, or give up.
    Reassigned {
        /// The source that was lost.
        lost: PeerId,
        /// Its replacement; the same one if it came back with the same content.
        source: Option<PeerId>,
    },
    /// Stop as soon as memory is quiet.
    Cancel,
    /// Something failed here that no source is to blame for (a word could not be published): as `Cancel`, with the cause.
    Broken {
        /// Why.
        cause: Error,
    },
    /// Time passed; see [`Command::Watch`].
    Tick,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Import this source; answer `Attached` or `Lost`.
    Attach {
        /// The source.
        source: PeerId,
    },
    /// Answer `Seen` once the word of `shard` has reached `at_least` bytes, `Lost` if the source is gone, and
    /// `Tick` at `until`. Replaces the watch before it.
    Watch {
        /// The source.
        source: PeerId,
        /// The shard.
        shard: ShardId,
        /// Verified bytes waited for.
        at_least: u64,
        /// When to give up waiting.
        until: Duration,
    },
    /// Pull this chunk; answer `Verified`, `Corrupt`, `Failed` or (after quiescing) `Lost` and `Failed`.
    Pull {
        /// The source.
        source: PeerId,
        /// The chunk.
        chunk: ChunkRef,
    },
    /// Cancel every pull of this source. Each still answers when it has quiesced.
    Abort {
        /// The source.
        source: PeerId,
    },
    /// Let go of this source's memory. None of its pulls is in flight.
    Detach {
        /// The source.
        source: PeerId,
    },
    /// Publish that the first `bytes` of `shard` are verified.
    Publish {
        /// The shard.
        shard: ShardId,
        /// Verified bytes from its start.
        bytes: u64,
    },
    /// Find another holder for what `lost` was to give; answer `Reassigned`.
    Seek {
        /// The source that was lost.
        lost: PeerId,
        /// The first shard that is still missing from it.
        shard: ShardId,
        /// The first byte of that shard that is missing.
        from: u64,
        /// Why it was lost.
        cause: Error,
    },
    /// Every byte is verified and published. Nothing follows.
    Complete,
    /// It cannot be done. Nothing follows; no pull is in flight.
    Fail {
        /// Why.
        cause: Error,
    },
}
