//! The values of the blocks of one unit, found while its pieces come.

use flashboot_core::{BlockDigest, ByteRange, Digests, Geometry, Result, digest};
use flashboot_core::{Error, Kind};

/// A unit whose pieces are being hashed. Pieces that do not fit the hash's tree are left out, and their blocks are hashed
/// whole at the end.
pub(super) struct Hashing<'d> {
    digests: &'d Digests,
    unit: ByteRange,
    pieces: Vec<(u64, u64, digest::Piece)>,
}

impl<'d> Hashing<'d> {
    pub(super) fn new(digests: &'d Digests, unit: ByteRange) -> Self {
        Self { digests, unit, pieces: Vec::new() }
    }

    /// Takes one piece, `at` bytes into the unit.
    pub(super) fn piece(&mut self, at: usize, bytes: &[u8]) {
        let (start, len) = (self.unit.start + at as u64, bytes.len() as u64);
        let (block, payload) = (self.digests.block(), self.digests.payload());
        let size = len.next_power_of_two();
        let is_subtree = len >= 1024
            && start.is_multiple_of(size)
            && size <= block
            && (len == size || start + len == payload);
        if is_subtree {
            self.pieces.push((start, len, digest::piece(payload, start, bytes)));
        }
    }

    /// The values of the unit's blocks, in order; `bytes` are all of the unit.
    pub(super) fn end(mut self, bytes: &[u8]) -> Result<Vec<BlockDigest>> {
        let (block, payload) = (self.digests.block(), self.digests.payload());
        let invalid = |what: &str| Error::new(Kind::Invalid, "verify", what.to_owned());
        let geometry = Geometry::new(payload, block, block, 1).map_err(|e| invalid(&e.to_string()))?;
        self.pieces.sort_unstable_by_key(|(start, ..)| *start);
        let mut values = Vec::new();
        let mut start = self.unit.start;
        while start < self.unit.end {
            let range = ByteRange::new(start, start.saturating_add(block).min(payload));
            let value = match self.merged(range) {
                Some(value) => value,
                None => {
                    let index = |at: u64| usize::try_from(at - self.unit.start).unwrap_or(usize::MAX);
                    let own = bytes.get(index(range.start)..index(range.end));
                    digest::block(
                        &geometry,
                        range.start / block,
                        own.ok_or_else(|| invalid("a unit that is cut short"))?,
                    )
                }
            };
            values.push(value);
            start = range.end;
        }
        Ok(values)
    }

    /// The value of a block of which every piece came, all of one size but the last.
    fn merged(&self, range: ByteRange) -> Option<BlockDigest> {
        let from = self.pieces.partition_point(|(start, ..)| *start < range.start);
        let to = self.pieces.partition_point(|(start, ..)| *start < range.end);
        let own = self.pieces.get(from..to)?;
        let size = own.first()?.1;
        let mut end = range.start;
        for (start, len, _) in own {
            if *start != end || (*len != size && start + len != range.end) || *len > size {
                return None;
            }
            end = start + len;
        }
        let pieces: Vec<_> = own.iter().map(|(.., piece)| *piece).collect();
        if end != range.end {
            return None;
        }
        digest::merge(self.digests.payload(), range, &pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn however_the_pieces_come_the_values_are_the_blocks(
            len in 1usize..60_000, blocks in 1u64..4, cuts in prop::collection::vec(1usize..9000, 0..20), even in prop::option::of(0u32..5), backwards: bool,
        ) {
            const BLOCK: u64 = 8192;
            let data: Vec<u8> = (0..len).map(|i| (i * 7 % 253) as u8).collect();
            let digests = Digests::of(&Geometry::new(len as u64, BLOCK, BLOCK, 1).unwrap(), &data);
            let mut found = Vec::new();
            let mut start = 0;
            while start < len as u64 {
                let unit = ByteRange::new(start, (start + blocks * BLOCK).min(len as u64));
                let bytes = &data[unit.start as usize..unit.end as usize];
                let mut pieces = Vec::new();
                let mut at = 0;
                let mut sizes = cuts.iter();
                while at < bytes.len() {
                    let size = match even {
                        Some(shift) => 1024 << shift,
                        None => sizes.next().copied().unwrap_or(5000),
                    };
                    let end = (at + size).min(bytes.len());
                    pieces.push((at, end));
                    at = end;
                }
                if backwards {
                    pieces.reverse();
                }
                let mut hashing = Hashing::new(&digests, unit);
                for (from, to) in pieces {
                    hashing.piece(from, &bytes[from..to]);
                }
                found.extend(hashing.end(bytes).unwrap());
                start = unit.end;
            }
            prop_assert_eq!(found, digests.values());
        }
    }
}
