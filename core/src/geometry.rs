//! Where blocks, chunks and shards of a payload begin and end.
//!
//! A payload is cut into *shards* (one owner each; a broadcast has one, an all-gather one per node), a shard
//! into *chunks* (one copy each), a chunk into *blocks* (one digest each). Shards and chunks begin at block
//! boundaries, so that every block lies in exactly one chunk of one shard and only the payload's last block
//! may be short.

use std::fmt;

/// The unit of verification in image format 1: 16 MiB.
pub const BLOCK: u64 = 16 << 20;

/// The most shards one payload may have; it bounds the control block to 256 KiB + its header.
pub const MAX_SHARDS: u32 = 4096;

/// A half-open range of payload bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ByteRange {
    /// The first byte.
    pub start: u64,
    /// One past the last byte; never below `start`.
    pub end: u64,
}

impl ByteRange {
    /// `start..end`; an `end` below `start` gives an empty range at `start`.
    pub fn new(start: u64, end: u64) -> Self {
        Self { start, end: end.max(start) }
    }

    /// Bytes in the range.
    pub fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it has no bytes.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether the two share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        !self.is_empty() && !other.is_empty() && self.start < other.end && other.start < self.end
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A shard's number, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ShardId(pub u32);

/// One chunk of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkRef {
    /// The shard it belongs to.
    pub shard: ShardId,
    /// Its number in the shard, from 0.
    pub index: u64,
    /// Its bytes in the payload.
    pub range: ByteRange,
}

/// Why four numbers are no geometry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// BLAKE3 subtrees need a power of two of its 1 KiB chunks.
    #[error("a block of {0} bytes is not a power of two of at least 1024")]
    Block(u64),
    /// A chunk is a whole number of blocks.
    #[error("a chunk of {chunk} bytes is not a whole number of {block}-byte blocks")]
    Chunk {
        /// The chunk given.
        chunk: u64,
        /// The block given.
        block: u64,
    },
    /// Between one and [`MAX_SHARDS`].
    #[error("{0} shards: between 1 and {MAX_SHARDS} are possible")]
    Shards(u32),
}

/// How one payload is cut. Two sides with equal geometry agree on every boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    payload: u64,
    block: u64,
    chunk: u64,
    shards: u32,
}

impl Geometry {
    /// Checks the four numbers: `payload` bytes in `shards` shards of `chunk`-byte chunks of `block`-byte
    /// blocks.
    pub fn new(payload: u64, block: u64, chunk: u64, shards: u32) -> Result<Self, GeometryError> {
        if !block.is_power_of_two() || block < 1024 {
            return Err(GeometryError::Block(block));
        }
        if chunk == 0 || !chunk.is_multiple_of(block) {
            return Err(GeometryError::Chunk { chunk, block });
        }
        if shards == 0 || shards > MAX_SHARDS {
            return Err(GeometryError::Shards(shards));
        }
        Ok(Self { payload, block, chunk, shards })
    }

    /// Bytes of the payload.
    pub fn payload(&self) -> u64 {
        self.payload
    }

    /// Bytes of a block; only the payload's last may be shorter.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// Bytes of a chunk; only a shard's last may be shorter.
    pub fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Number of shards. With fewer blocks than shards the last shards are empty.
    pub fn shards(&self) -> u32 {
        self.shards
    }

    /// Number of blocks in the payload.
    pub fn blocks(&self) -> u64 {
        self.payload.div_ceil(self.block)
    }

    /// The bytes of `shard`: blocks are dealt out contiguously and as evenly as they go, the first shards
    /// taking the remainder. A shard past the last is empty.
    pub fn shard_range(&self, shard: ShardId) -> ByteRange {
        let first = self.first_block_of(u64::from(shard.0));
        let end = self.first_block_of(u64::from(shard.0).saturating_add(1));
        ByteRange::new(self.block_start(first), self.block_start(end))
    }

    fn first_block_of(&self, shard: u64) -> u64 {
        let (blocks, shards) = (self.blocks(), u64::from(self.shards));
        let shard = shard.min(shards);
        // shard <= shards <= 4096 and blocks / shards * shard <= blocks: no overflow.
        blocks / shards * shard + (blocks % shards).min(shard)
    }

    fn block_start(&self, block: u64) -> u64 {
        block.saturating_mul(self.block).min(self.payload)
    }

    /// Number of chunks in `shard`.
    pub fn chunks_in(&self, shard: ShardId) -> u64 {
        self.shard_range(shard).len().div_ceil(self.chunk)
    }

    /// Chunk `index` of `shard`, or `None` past its end.
    pub fn chunk_at(&self, shard: ShardId, index: u64) -> Option<ChunkRef> {
        let whole = self.shard_range(shard);
        let start = whole.start.checked_add(index.checked_mul(self.chunk)?)?;
        if start >= whole.end {
            return None;
        }
        let range = ByteRange::new(start, start.saturating_add(self.chunk).min(whole.end));
        Some(ChunkRef { shard, index, range })
    }

    /// Every chunk of `shard`, in order.
    pub fn chunks(&self, shard: ShardId) -> impl Iterator<Item = ChunkRef> + use<> {
        let geometry = *self;
        (0..self.chunks_in(shard)).filter_map(move |index| geometry.chunk_at(shard, index))
    }

    /// The numbers of the blocks that `range` touches.
    pub fn blocks_of(&self, range: ByteRange) -> std::ops::Range<u64> {
        if range.is_empty() {
            let at = range.start / self.block;
            return at..at;
        }
        range.start / self.block..range.end.min(self.payload).div_ceil(self.block)
    }

    /// The bytes of block `index`; empty past the end.
    pub fn block_range(&self, index: u64) -> ByteRange {
        ByteRange::new(self.block_start(index), self.block_start(index.saturating_add(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn impossible_numbers_are_refused() {
        assert_eq!(Geometry::new(0, 1000, 1000, 1), Err(GeometryError::Block(1000)));
        assert_eq!(Geometry::new(0, 512, 512, 1), Err(GeometryError::Block(512)));
        assert_eq!(Geometry::new(0, 1024, 0, 1), Err(GeometryError::Chunk { chunk: 0, block: 1024 }));
        assert_eq!(Geometry::new(0, 1024, 1536, 1), Err(GeometryError::Chunk { chunk: 1536, block: 1024 }));
        assert_eq!(Geometry::new(0, 1024, 1024, 0), Err(GeometryError::Shards(0)));
        assert_eq!(Geometry::new(0, 1024, 1024, 4097), Err(GeometryError::Shards(4097)));
    }

    #[test]
    fn an_empty_payload_has_no_chunks() {
        let g = Geometry::new(0, 1024, 4096, 3).unwrap();
        assert_eq!(g.blocks(), 0);
        assert_eq!(g.chunks(ShardId(0)).count(), 0);
        assert_eq!(g.shard_range(ShardId(2)), ByteRange::new(0, 0));
    }

    proptest! {
        #[test]
        fn every_byte_lies_in_one_chunk_of_one_shard(
            payload in 0u64..100_000, block in prop::sample::select(vec![1024u64, 2048, 4096]),
            per_chunk in 1u64..6, shards in 1u32..12,
        ) {
            let g = Geometry::new(payload, block, block * per_chunk, shards).unwrap();
            let mut at = 0;
            for shard in 0..shards {
                let whole = g.shard_range(ShardId(shard));
                prop_assert_eq!(whole.start, at);
                for chunk in g.chunks(ShardId(shard)) {
                    prop_assert_eq!(chunk.range.start, at);
                    prop_assert!(!chunk.range.is_empty() && chunk.range.len() <= g.chunk());
                    prop_assert_eq!(chunk.range.start % block, 0);
                    let blocks = g.blocks_of(chunk.range);
                    prop_assert_eq!(g.block_range(blocks.start).start, chunk.range.start);
                    prop_assert_eq!(g.block_range(blocks.end - 1).end, chunk.range.end);
                    at = chunk.range.end;
                }
                prop_assert_eq!(whole.end, at);
            }
            prop_assert_eq!(at, payload);
        }

        #[test]
        fn no_geometry_overflows(payload: u64, chunk in 0u64.., shard: u32, index: u64) {
            if let Ok(g) = Geometry::new(payload, 1 << 24, chunk << 24, 7) {
                let _ = g.shard_range(ShardId(shard));
                let _ = g.chunk_at(ShardId(shard), index);
                let _ = g.block_range(index);
            }
        }
    }
}
