//! Pinned memory while a checkpoint is loaded shard by shard: slabs, and a caching host allocator that rounds each
//! request up to a power of two and reuses only blocks of the same size, as torch's does.

use std::collections::{BTreeMap, VecDeque};

/// What a slab's tensors begin at a multiple of.
const SLAB_ALIGN: u64 = 4096;

/// An allocator and the shards whose blocks are in use.
#[derive(Debug)]
pub(super) struct Pinned {
    /// Shards in use at once, the one being read included.
    depth: usize,
    free: BTreeMap<u64, u64>,
    live: VecDeque<BTreeMap<u64, u64>>,
    in_use: u64,
    /// Allocations that no free block could serve.
    pub(super) new: u64,
    /// The most bytes in use at one time.
    pub(super) peak: u64,
}

impl Pinned {
    pub(super) fn new(depth: usize) -> Self {
        Self { depth: depth.max(1), free: BTreeMap::new(), live: VecDeque::new(), in_use: 0, new: 0, peak: 0 }
    }

    /// A shard begins: the oldest one's blocks are free again, if there are as many as the loader holds.
    pub(super) fn begin_shard(&mut self) {
        if self.live.len() >= self.depth
            && let Some(oldest) = self.live.pop_front()
        {
            for (size, count) in oldest {
                *self.free.entry(size).or_default() += count;
                self.in_use = self.in_use.saturating_sub(size.saturating_mul(count));
            }
        }
        self.live.push_back(BTreeMap::new());
    }

    /// `count` buffers of `bytes` each for the shard that is being read.
    pub(super) fn take(&mut self, bytes: u64, count: u64) {
        if bytes == 0 || count == 0 {
            return;
        }
        let size = bytes.checked_next_power_of_two().unwrap_or(u64::MAX);
        let free = self.free.entry(size).or_default();
        let reused = count.min(*free);
        *free -= reused;
        self.new += count - reused;
        if let Some(shard) = self.live.back_mut() {
            *shard.entry(size).or_default() += count;
        }
        self.in_use = self.in_use.saturating_add(size.saturating_mul(count));
        self.peak = self.peak.max(self.in_use);
    }
}

/// The slabs of one shard: tensors one after the other; one that is larger than a slab has a buffer of its own.
#[derive(Debug)]
pub(super) struct Slabs {
    size: u64,
    filled: u64,
    /// Bytes of each, in the order in which they were begun or taken.
    pub(super) sizes: Vec<u64>,
}

impl Slabs {
    /// Slabs of `size` bytes, rounded down to a power of two.
    pub(super) fn new(size: u64) -> Self {
        let size = size.max(SLAB_ALIGN);
        Self { size: 1 << size.ilog2(), filled: 0, sizes: Vec::new() }
    }

    pub(super) fn add(&mut self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        if bytes > self.size {
            self.sizes.push(bytes);
            return;
        }
        let start = self.filled.next_multiple_of(SLAB_ALIGN);
        if start + bytes > self.size {
            self.sizes.push(self.filled);
            self.filled = bytes;
        } else {
            self.filled = start + bytes;
        }
    }

    /// Ends the shard: its slabs.
    pub(super) fn end(&mut self) -> std::vec::Drain<'_, u64> {
        if self.filled > 0 {
            self.sizes.push(self.filled);
            self.filled = 0;
        }
        self.sizes.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_reused_once_their_shard_is_out_of_the_window() {
        let mut pinned = Pinned::new(2);
        for _ in 0..5 {
            pinned.begin_shard();
            pinned.take(3, 10);
            pinned.take(9, 1);
        }
        assert_eq!((pinned.new, pinned.peak), (22, 2 * (10 * 4 + 16)));
    }

    #[test]
    fn slabs_are_filled_in_order_and_large_tensors_stand_alone() {
        let mut slabs = Slabs::new(10_000);
        for bytes in [4000, 4000, 1, 9000, 0, 8192] {
            slabs.add(bytes);
        }
        // 8192 a slab: the second tensor begins at 4096, the third does not fit, and neither does the last.
        assert_eq!(slabs.end().collect::<Vec<_>>(), [8096, 9000, 1, 8192]);
    }
}
