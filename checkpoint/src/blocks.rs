//! Blocks on all cores: each worker takes the next block, reads, hashes and writes it with its own slab, so that
//! IO of one overlaps hashing of another and memory is workers x slab, whatever the payload.

use crate::direct::Slab;
use crate::error::{Error, Result};
use flashboot_core::{BLOCK, ByteRange, Geometry};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Told how far a long call is; asked whether to go on. Called from several threads.
pub trait Progress: Sync {
    /// `done` of `total` bytes are through.
    fn advance(&self, done: u64, total: u64);

    /// Whether to stop. The call then fails with [`Error::Cancelled`] and leaves nothing behind.
    fn cancelled(&self) -> bool {
        false
    }
}

impl Progress for () {
    fn advance(&self, _: u64, _: u64) {}
}

impl<F: Fn(u64, u64) + Sync> Progress for F {
    fn advance(&self, done: u64, total: u64) {
        self(done, total);
    }
}

/// 6 slabs of a block are 96 MiB of the 256 that packing may use; a million tensors' tables take the rest.
pub(crate) const PACK_WORKERS: usize = 6;

/// Workers for a machine of this many cores: two more than cores, so that disks stay busy while cores hash.
pub(crate) fn workers(asked: Option<usize>, at_most: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    asked.unwrap_or(cores.saturating_add(2)).clamp(1, at_most)
}

/// The geometry of a payload whose only cut is into blocks.
pub(crate) fn geometry(payload: u64) -> Result<Geometry> {
    // One shard, chunk = block = 16 MiB: none of the three ways to fail.
    Geometry::new(payload, BLOCK, BLOCK, 1)
        .map_err(|e| Error::NotJson { file: std::path::PathBuf::new(), detail: e.to_string() })
}

/// Runs `work` on every block of `geometry`; the first error stops all workers and is returned.
pub(crate) fn each_block(
    what: &Path,
    geometry: &Geometry,
    workers: usize,
    progress: &dyn Progress,
    work: impl Fn(u64, ByteRange, &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    let (next, done, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let failed = Mutex::new(None::<Error>);
    let (blocks, total) = (geometry.blocks(), geometry.payload());
    let slab_len = usize::try_from(geometry.block().min(total)).unwrap_or(usize::MAX);
    let fail = |e| {
        stop.store(true, Ordering::Relaxed);
        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
    };
    let workers = workers.min(usize::try_from(blocks).unwrap_or(workers));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let mut slab = Slab::new(slab_len);
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= blocks {
                        return;
                    }
                    if progress.cancelled() {
                        return fail(Error::Cancelled { path: what.into() });
                    }
                    let range = geometry.block_range(index);
                    let bytes = slab.first(usize::try_from(range.len()).unwrap_or(slab_len));
                    if let Err(e) = work(index, range, bytes) {
                        return fail(e);
                    }
                    let before = done.fetch_add(range.len(), Ordering::Relaxed);
                    progress.advance(before.saturating_add(range.len()), total);
                }
            });
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
