//! What proves the bytes: BLAKE3 values of 16 MiB blocks that together give the file's own BLAKE3 hash.
//!
//! BLAKE3 is a binary tree over 1 KiB chunks (BLAKE3 specification, section 2.1), so a block of a power of
//! two of them, at a multiple of its own size, is one subtree. Its value depends on its bytes and its offset,
//! so a block that landed in the wrong place does not verify. A payload of a single block *is* the whole
//! tree: its one value is the root. [`root`] of the values equals `b3sum` of the payload.
//!
//! A block may be hashed in [`Piece`]s (smaller subtrees) as they land, by several threads, and the values
//! merged: that is how a copy and its hash share one pass over the memory.

use crate::{ByteRange, Geometry};
use blake3::hazmat::{ChainingValue, HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use std::fmt;

/// The BLAKE3 value of one block (see the module's page for the lone-block rule).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockDigest(pub [u8; 32]);

impl fmt::Display for BlockDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for BlockDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockDigest({self})")
    }
}

impl std::str::FromStr for BlockDigest {
    type Err = blake3::HexError;

    /// Reads 64 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        blake3::Hash::from_hex(text).map(|h| Self(*h.as_bytes()))
    }
}

impl serde::Serialize for BlockDigest {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for BlockDigest {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The value of one subtree: some bytes of a payload that begin at a multiple of `unit` and are `unit` long,
/// or shorter at the payload's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece([u8; 32]);

impl Piece {
    /// The value, to be written down while a payload is being made.
    pub fn to_bytes(self) -> [u8; 32] {
        self.0
    }

    /// A value that [`Piece::to_bytes`] gave.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

/// Hashes the subtree `bytes` at `offset` of a payload of `payload` bytes.
///
/// `offset` must be a multiple of the subtree's full size, a power of two of at least 1024; a subtree that is
/// the whole payload becomes the root.
pub fn piece(payload: u64, offset: u64, bytes: &[u8]) -> Piece {
    if offset == 0 && bytes.len() as u64 == payload {
        return Piece(*blake3::hash(bytes).as_bytes());
    }
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(offset);
    hasher.update(bytes);
    Piece(hasher.finalize_non_root())
}

/// Merges consecutive pieces that begin at `range.start` into the value of `range`.
///
/// `range` must be a subtree too: a block, or the whole payload. Returns `None` when there are no pieces.
pub fn merge(payload: u64, range: ByteRange, pieces: &[Piece]) -> Option<BlockDigest> {
    let is_root = range.start == 0 && range.end == payload;
    let value = |p: &Piece| -> ChainingValue { p.0 };
    match pieces {
        [] => None,
        [only] => Some(BlockDigest(only.0)),
        _ => {
            // BLAKE3's left subtree is the largest power of two of chunks that leaves a byte for the right;
            // all pieces but the last being one full unit, the same rule holds in pieces.
            let (left, right) = pieces.split_at(left_len(pieces.len()));
            let (left, right) = (fold(left, &value)?, fold(right, &value)?);
            Some(BlockDigest(if is_root {
                *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()
            } else {
                merge_subtrees_non_root(&left, &right, Mode::Hash)
            }))
        }
    }
}

/// Merges the pieces of `range`, of `step` bytes each but for the last, into the values of its blocks. `range` begins at a
/// block; `block` is `step` times a power of two.
pub fn merge_blocks(
    payload: u64,
    range: ByteRange,
    (block, step): (u64, u64),
    pieces: &[Piece],
) -> Vec<BlockDigest> {
    let per_block = usize::try_from(block / step.max(1)).unwrap_or(usize::MAX).max(1);
    let mut start = range.start;
    let mut digests = Vec::with_capacity(pieces.len().div_ceil(per_block));
    for pieces in pieces.chunks(per_block) {
        let end = start.saturating_add(block).min(range.end);
        digests.extend(merge(payload, ByteRange::new(start, end), pieces));
        start = end;
    }
    digests
}

/// The largest power of two below `n` (`n` > 1).
fn left_len(n: usize) -> usize {
    n.div_ceil(2).next_power_of_two()
}

fn fold<T>(values: &[T], value: &impl Fn(&T) -> ChainingValue) -> Option<ChainingValue> {
    match values {
        [] => None,
        [only] => Some(value(only)),
        _ => {
            let (left, right) = values.split_at(left_len(values.len()));
            Some(merge_subtrees_non_root(&fold(left, value)?, &fold(right, value)?, Mode::Hash))
        }
    }
}

/// The value of one whole block in one call: `bytes` are block `index` of the payload.
pub fn block(geometry: &Geometry, index: u64, bytes: &[u8]) -> BlockDigest {
    BlockDigest(piece(geometry.payload(), geometry.block_range(index).start, bytes).0)
}

/// The payload's BLAKE3 hash, from its block values in order; what `b3sum` prints for the `.img` file.
pub fn root(values: &[BlockDigest]) -> [u8; 32] {
    match values {
        [] => *blake3::hash(&[]).as_bytes(),
        [only] => only.0,
        _ => {
            let value = |d: &BlockDigest| -> ChainingValue { d.0 };
            let (left, right) = values.split_at(left_len(values.len()));
            match (fold(left, &value), fold(right, &value)) {
                (Some(left), Some(right)) => *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes(),
                // split_at of two or more values leaves neither side empty.
                _ => *blake3::hash(&[]).as_bytes(),
            }
        }
    }
}

/// The expected value of every block of one payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digests {
    payload: u64,
    block: u64,
    values: Vec<BlockDigest>,
}

/// A table whose length does not fit its payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found} block digests for a payload of {payload} bytes, which has {needed} blocks of {block} bytes")]
pub struct WrongBlockCount {
    /// Bytes of the payload.
    pub payload: u64,
    /// Bytes of a block.
    pub block: u64,
    /// Digests needed.
    pub needed: u64,
    /// Digests found.
    pub found: u64,
}

impl Digests {
    /// Takes the values of all blocks, in order; refuses a table of the wrong length.
    pub fn new(payload: u64, block: u64, values: Vec<BlockDigest>) -> Result<Self, WrongBlockCount> {
        let needed = if block == 0 { 0 } else { payload.div_ceil(block) };
        let found = values.len() as u64;
        if block == 0 || needed != found {
            return Err(WrongBlockCount { payload, block, needed, found });
        }
        Ok(Self { payload, block, values })
    }

    /// Hashes a payload that is at hand as one slice.
    pub fn of(geometry: &Geometry, payload: &[u8]) -> Self {
        let values = (0..geometry.blocks())
            .zip(payload.chunks(usize::try_from(geometry.block()).unwrap_or(usize::MAX)))
            .map(|(index, bytes)| block(geometry, index, bytes))
            .collect();
        Self { payload: geometry.payload(), block: geometry.block(), values }
    }

    /// Bytes of the payload they describe.
    pub fn payload(&self) -> u64 {
        self.payload
    }

    /// Bytes of a block.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// The values, in block order.
    pub fn values(&self) -> &[BlockDigest] {
        &self.values
    }

    /// The payload's BLAKE3 hash.
    pub fn root(&self) -> [u8; 32] {
        root(&self.values)
    }

    /// The numbers of the blocks, from `first` on, whose `found` value is not the expected one. A block past
    /// the table's end is bad.
    pub fn mismatches(&self, first: u64, found: &[BlockDigest]) -> Vec<u64> {
        (first..)
            .zip(found)
            .filter(|(index, value)| {
                usize::try_from(*index).ok().and_then(|i| self.values.get(i)) != Some(*value)
            })
            .map(|(index, _)| index)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 % 251) as u8).collect()
    }

    proptest! {
        #[test]
        fn the_root_of_the_blocks_is_the_hash_of_the_payload(
            len in 0usize..70_000, block in prop::sample::select(vec![1024u64, 4096, 16384]),
        ) {
            let data = bytes(len);
            let g = Geometry::new(len as u64, block, block, 1).unwrap();
            let digests = Digests::of(&g, &data);
            prop_assert_eq!(digests.root(), *blake3::hash(&data).as_bytes());
        }

        #[test]
        fn a_block_hashed_in_pieces_has_the_blocks_value(
            len in 1usize..70_000, unit in prop::sample::select(vec![1024usize, 2048]), block in prop::sample::select(vec![4096u64, 16384]),
        ) {
            let data = bytes(len);
            let g = Geometry::new(len as u64, block, block, 1).unwrap();
            for index in 0..g.blocks() {
                let range = g.block_range(index);
                let whole = &data[range.start as usize..range.end as usize];
                let pieces: Vec<_> = whole.chunks(unit).enumerate()
                    .map(|(i, part)| piece(len as u64, range.start + (i * unit) as u64, part)).collect();
                prop_assert_eq!(merge(len as u64, range, &pieces), Some(super::block(&g, index, whole)));
            }
        }
    }

    #[test]
    fn an_empty_payload_hashes_as_nothing() {
        let g = Geometry::new(0, 1024, 1024, 1).unwrap();
        assert_eq!(Digests::of(&g, &[]).root(), *blake3::hash(&[]).as_bytes());
    }

    #[test]
    fn a_block_in_the_wrong_place_does_not_verify() {
        let g = Geometry::new(4096, 1024, 1024, 1).unwrap();
        let same = [7u8; 1024];
        assert_ne!(block(&g, 0, &same), block(&g, 1, &same));
    }

    #[test]
    fn mismatches_name_the_blocks() {
        let g = Geometry::new(4096, 1024, 1024, 1).unwrap();
        let mut data = bytes(4096);
        let expected = Digests::of(&g, &data);
        data[2500] ^= 1;
        let found = Digests::of(&g, &data);
        assert_eq!(expected.mismatches(0, found.values()), vec![2]);
        assert_eq!(expected.mismatches(2, &found.values()[2..]), vec![2]);
        assert_eq!(expected.mismatches(4, &found.values()[..1]), vec![4], "past the end is bad");
    }

    #[test]
    fn a_table_of_the_wrong_length_is_refused() {
        assert_eq!(
            Digests::new(4097, 1024, vec![BlockDigest([0; 32]); 4]),
            Err(WrongBlockCount { payload: 4097, block: 1024, needed: 5, found: 4 })
        );
    }
}
