//! Fills an arena from a payload file, verifying every block on the way.

use flashboot_core::{
    Arena, ByteRange, Digests, Error, Kind, Result,
    digest::{self, Piece},
};
use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Bytes read, hashed and copied at a time: they stay in a core's cache from the read to the copy.
const PIECE: usize = 256 << 10;

/// Reads all of `path` into `arena` with `threads` threads. Memory in flight is one piece a thread.
///
/// # Errors
/// [`Kind::Corrupt`] when the file's length or a block is not what `digests` say; the system's own otherwise.
pub(crate) fn load(path: &Path, digests: &Digests, arena: &dyn Arena, threads: usize) -> Result<()> {
    let io = |op, e: &std::io::Error| Error::from_io(op, e, path.display().to_string());
    let file = File::open(path).map_err(|e| io("open", &e))?;
    let found = file.metadata().map_err(|e| io("stat", &e))?.len();
    let payload = digests.payload();
    if found != payload {
        let detail = format!("{}: {payload} bytes needed, {found} found", path.display());
        return Err(Error::new(Kind::Corrupt, "load", detail).with_remedy("pack or fetch the image again"));
    }
    let blocks = payload.div_ceil(digests.block());
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let first_error = Mutex::new(None);
    let work = || {
        let mut buffer = vec![0; PIECE];
        while !stop.load(Ordering::Relaxed) {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return;
            }
            let start = block.saturating_mul(digests.block());
            let range = ByteRange::new(start, start.saturating_add(digests.block()).min(payload));
            let loaded = one_block(&file, path, range, digests, arena, &mut buffer);
            if let Err(e) = loaded {
                stop.store(true, Ordering::Relaxed);
                first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.max(1) {
            scope.spawn(work);
        }
        work();
    });
    match first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

fn one_block(
    file: &File,
    path: &Path,
    range: ByteRange,
    digests: &Digests,
    arena: &dyn Arena,
    buffer: &mut [u8],
) -> Result<()> {
    let payload = digests.payload();
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let len = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(buffer.len());
        let Some(piece) = buffer.get_mut(..len) else { break };
        file.read_exact_at(piece, at).map_err(|e| {
            let detail = format!("{}: {len} bytes at {at}", path.display());
            Error::from_io("pread", &e, detail)
        })?;
        pieces.push(digest::piece(payload, at, piece));
        arena.copy_in(at, piece)?;
        at += len as u64;
    }
    let index = range.start / digests.block();
    let found: Vec<_> = digest::merge(payload, range, &pieces).into_iter().collect();
    if found.is_empty() || !digests.mismatches(index, &found).is_empty() {
        let detail = format!("{}: block {index} (bytes {range}) does not match its digest", path.display());
        return Err(Error::new(Kind::Corrupt, "load", detail).with_remedy("pack or fetch the image again"));
    }
    Ok(())
}
