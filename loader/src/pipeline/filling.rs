//! An arena, and what of it is there.

use super::Proof;
use flashboot_core::{Arena, BLOCK, BlockDigest, ByteRange, Digests, Error, Kind, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// An arena that is being filled, by one source after the other if need be: each block is verified once and then left alone.
#[derive(Debug)]
pub struct Filling {
    arena: Arc<dyn Arena>,
    proof: Proof,
    block: u64,
    done: Mutex<Vec<bool>>,
}

impl Filling {
    /// Nothing of `arena` is there yet. Without digests nothing can be verified, and blocks are marked as they are written.
    ///
    /// # Errors
    /// [`Kind::Mismatch`] when the digests are of another payload.
    pub fn new(arena: Arc<dyn Arena>, proof: impl Into<Proof>) -> Result<Self> {
        let (payload, proof) = (arena.payload(), proof.into());
        if let Some(found) = proof.payload().filter(|found| *found != payload) {
            let detail = format!("digests of {found} bytes for an arena of {payload}");
            return Err(Error::new(Kind::Mismatch, "load", detail));
        }
        let block = proof.block().unwrap_or(BLOCK);
        let blocks = usize::try_from(payload.div_ceil(block)).unwrap_or(usize::MAX);
        Ok(Self { arena, proof, block, done: Mutex::new(vec![false; blocks]) })
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<dyn Arena> {
        &self.arena
    }

    /// What proves it, once it is known; `None` where nothing does.
    ///
    /// # Errors
    /// Those of [`Proof::get`].
    pub fn digests(&self) -> Result<Option<&Arc<Digests>>> {
        self.proof.get()
    }

    /// Whether something proves it. Does not wait.
    pub fn is_proved(&self) -> bool {
        self.proof.is_some()
    }

    /// Bytes of a block.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// What is not there yet: whole blocks, neighbours joined, ascending.
    pub fn missing(&self) -> Vec<ByteRange> {
        self.runs(|done| !done)
    }

    /// What is there.
    pub fn present(&self) -> Vec<ByteRange> {
        self.runs(|done| done)
    }

    fn runs(&self, wanted: impl Fn(bool) -> bool) -> Vec<ByteRange> {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let mut runs: Vec<ByteRange> = Vec::new();
        for (index, _) in done.iter().enumerate().filter(|(_, done)| wanted(**done)) {
            let start = (index as u64).saturating_mul(self.block);
            let end = start.saturating_add(self.block).min(self.arena.payload());
            match runs.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => runs.push(ByteRange::new(start, end)),
            }
        }
        runs
    }

    /// Bytes that are there.
    pub fn bytes(&self) -> u64 {
        self.present().iter().map(|range| range.len()).sum()
    }

    /// Whether all of it is there.
    pub fn is_complete(&self) -> bool {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).iter().all(|done| *done)
    }

    /// Compares the values found of the blocks from number `first` on, and marks those that are right. Returns the number of
    /// blocks that were.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] naming the first that is not; the others are marked all the same. Those of [`Proof::get`].
    pub fn verified(&self, first: u64, found: &[BlockDigest]) -> Result<u64> {
        let Some(digests) = self.proof.get()? else {
            return Err(Error::new(Kind::Invalid, "verify", "there are no digests to compare with"));
        };
        let bad = digests.mismatches(first, found);
        let right = (first..).zip(found).map(|(block, _)| block).filter(|block| !bad.contains(block));
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        for block in right {
            if let Some(slot) = usize::try_from(block).ok().and_then(|block| done.get_mut(block)) {
                *slot = true;
                count += 1;
            }
        }
        drop(done);
        match bad.first() {
            None => Ok(count),
            Some(block) => {
                let detail = format!("block {block} does not match its digest");
                Err(Error::new(Kind::Corrupt, "verify", detail).with_chunk(*block))
            }
        }
    }

    /// Marks the blocks of `range` as there, unverified: only where there are no digests.
    ///
    /// # Errors
    /// [`Kind::Invalid`] where there are.
    pub fn written(&self, range: ByteRange) -> Result<()> {
        if self.is_proved() {
            return Err(Error::new(Kind::Invalid, "verify", "these bytes have digests to be compared with"));
        }
        self.mark(range);
        Ok(())
    }

    /// Marks the blocks of `range` as there, because somebody else has compared them with these digests where they lie in
    /// this arena: the driver of a replication does.
    pub fn proved(&self, range: ByteRange) {
        self.mark(range);
    }

    /// Marks every block of `range`, which begins with one.
    fn mark(&self, range: ByteRange) {
        if range.is_empty() {
            // At the payload's end it begins in the last block, of which it has nothing.
            return;
        }
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let index = |at: u64| usize::try_from(at / self.block).unwrap_or(usize::MAX);
        // A block that is there in part is not there; the payload's last one may be short.
        let end =
            if range.end >= self.arena.payload() { done.len() } else { index(range.end).min(done.len()) };
        done.get_mut(index(range.start).min(end)..end).unwrap_or_default().fill(true);
    }

    /// What is missing, in units of `blocks` blocks.
    pub(super) fn units(&self, blocks: u64) -> Vec<ByteRange> {
        let size = self.block.saturating_mul(blocks.max(1));
        let mut units = Vec::new();
        for range in self.missing() {
            let mut start = range.start;
            while start < range.end {
                let end = start.saturating_add(size).min(range.end);
                units.push(ByteRange::new(start, end));
                start = end;
            }
        }
        units
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::{ArenaSpec, Geometry};
    use flashboot_memory::{HostArena, HostArenaConfig};

    fn filling(payload: u64, with: bool) -> (Filling, Vec<BlockDigest>) {
        let bytes: Vec<u8> = (0..payload).map(|i| (i % 251) as u8).collect();
        let digests = Digests::of(&Geometry::new(payload, 4096, 4096, 1).unwrap(), &bytes);
        let spec = ArenaSpec { payload, shards: 1 };
        let arena = HostArena::create(spec, &HostArenaConfig::default()).unwrap().0;
        let values = digests.values().to_vec();
        (Filling::new(arena, with.then(|| Arc::new(digests))).unwrap(), values)
    }

    #[test]
    fn a_range_of_nothing_marks_nothing_wherever_it_lies() {
        for payload in [1, 4096, 5 * 4096 + 1] {
            let (filling, _) = filling(payload, true);
            for at in [0, payload / 2, payload] {
                filling.proved(ByteRange::new(at, at));
            }
            assert_eq!(filling.missing(), [ByteRange::new(0, payload)]);
        }
    }

    #[test]
    fn right_blocks_are_marked_and_a_wrong_one_is_named() {
        let (filling, values) = filling(5 * 4096 + 1, true);
        assert_eq!(filling.missing(), [ByteRange::new(0, 20481)]);
        assert_eq!(filling.verified(4, &values[4..]), Ok(2));
        let mut found = values[1..4].to_vec();
        found[1] = values[0];
        let e = filling.verified(1, &found).unwrap_err();
        assert_eq!((e.kind(), e.chunk()), (Kind::Corrupt, Some(2)));
        assert_eq!(filling.missing(), [ByteRange::new(0, 4096), ByteRange::new(8192, 12288)]);
        assert_eq!(filling.units(2), [ByteRange::new(0, 4096), ByteRange::new(8192, 12288)]);
        assert_eq!(filling.bytes(), 3 * 4096 + 1);
        assert!(filling.verified(0, &values).is_ok() && filling.is_complete());
        assert!(filling.verified(6, &values[..1]).is_err(), "past the end is wrong");
        assert_eq!(filling.written(ByteRange::new(0, 1)).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn without_digests_nothing_is_called_verified() {
        let (filling, values) = filling(3 * 4096, false);
        assert_eq!(filling.verified(0, &values).unwrap_err().kind(), Kind::Invalid);
        assert!(filling.missing()[0].len() == 3 * 4096 && !filling.is_complete());
        filling.written(ByteRange::new(0, 3 * 4096)).unwrap();
        assert!(filling.is_complete());
    }

    #[test]
    fn digests_of_another_payload_are_refused() {
        let (other, _) = filling(4096, true);
        let spec = ArenaSpec { payload: 8192, shards: 1 };
        let arena = HostArena::create(spec, &HostArenaConfig::default()).unwrap().0;
        let e = Filling::new(arena, other.digests().unwrap().cloned()).unwrap_err();
        assert_eq!(e.kind(), Kind::Mismatch);
    }
}
