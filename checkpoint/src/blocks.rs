//! Blocks on all cores: each worker takes the next block and works through it piece by piece with its own slab, so
//! that IO of one overlaps hashing of another, a piece is hashed and written while it is in the core's cache,
//! and memory is workers x slab, whatever the payload.

use crate::direct::Slab;
use crate::error::{Error, Result};
use flashboot_core::{BLOCK, BlockDigest, ByteRange, Geometry, digest};
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

/// The unit of one read, one hash and one write. Measured against 16 MiB: pieces that stay in a core's cache from
/// read to write are faster than fewer calls.
const PIECE: u64 = 4 << 20;

/// More writers than this do not make a disk faster.
pub(crate) const PACK_WORKERS: usize = 8;

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

/// Runs `others` on up to `count` threads, as many as the system gives, and `mine` on this one.
pub(crate) fn on_threads(count: usize, others: impl Fn() + Sync, mine: impl FnOnce()) {
    std::thread::scope(|scope| {
        for _ in 0..count {
            if std::thread::Builder::new().spawn_scoped(scope, &others).is_err() {
                break;
            }
        }
        mine();
    });
}

/// Runs `work` on every block of `geometry`; the first error stops all workers and is returned.
pub(crate) fn each_block(
    what: &Path,
    geometry: &Geometry,
    workers: usize,
    progress: &dyn Progress,
    work: impl Fn(u64, ByteRange, &mut Slab) -> Result<()> + Sync,
) -> Result<()> {
    let (next, done, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let failed = Mutex::new(None::<Error>);
    let (blocks, total) = (geometry.blocks(), geometry.payload());
    let slab_len = usize::try_from(PIECE.min(total)).unwrap_or(usize::MAX);
    let fail = |e| {
        stop.store(true, Ordering::Relaxed);
        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
    };
    let workers = workers.min(usize::try_from(blocks).unwrap_or(workers));
    let work = |mut slab: Slab| {
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= blocks {
                return;
            }
            if progress.cancelled() {
                return fail(Error::Cancelled { path: what.into() });
            }
            let range = geometry.block_range(index);
            if let Err(e) = work(index, range, &mut slab) {
                return fail(e);
            }
            let before = done.fetch_add(range.len(), Ordering::Relaxed);
            progress.advance(before.saturating_add(range.len()), total);
        }
    };
    // This thread works too, so a system that has no more threads or memory to give makes it slow, no worse.
    let mine = Slab::new(what, slab_len)?;
    on_threads(
        workers.saturating_sub(1),
        || {
            if let Ok(slab) = Slab::new(what, slab_len) {
                work(slab);
            }
        },
        || work(mine),
    );
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// The digest of the block `range`, whose pieces `get` puts into `slab`; each is given to `put` once it is hashed.
pub(crate) fn hash_block(
    geometry: &Geometry,
    range: ByteRange,
    slab: &mut Slab,
    mut get: impl FnMut(ByteRange, &mut [u8]) -> Result<()>,
    mut put: impl FnMut(ByteRange, &[u8]) -> Result<()>,
) -> Result<BlockDigest> {
    let mut pieces = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let piece = ByteRange::new(start, start.saturating_add(PIECE).min(range.end));
        let bytes = slab.first(usize::try_from(piece.len()).unwrap_or(usize::MAX));
        get(piece, bytes)?;
        pieces.push(digest::piece(geometry.payload(), piece.start, bytes));
        put(piece, bytes)?;
        start = piece.end;
    }
    // Only an empty range has no pieces, and no block is empty.
    Ok(digest::merge(geometry.payload(), range, &pieces).unwrap_or(BlockDigest([0; 32])))
}
