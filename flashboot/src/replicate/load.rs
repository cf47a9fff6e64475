//! Fills an arena from a payload file, verifying every block on the way.

use crate::config::Memory;
use flashboot_core::{
    Arena, ByteRange, Digests, Error, Kind, Result,
    digest::{self, Piece},
};
use flashboot_cuda::{CudaArena, HostBytes, Pinned, Stream, Upload};
use std::{
    collections::VecDeque,
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Bytes read, hashed and copied at a time: they stay in a core's cache from the read to the copy.
const PIECE: usize = 256 << 10;

/// Bytes of one pinned window, of two a thread: pinning costs 0.3 ms a MiB, and a copy of 4 MiB runs at nine tenths of
/// the link.
const WINDOW: u64 = 4 << 20;
/// The most threads that read for one GPU: 16 feed PCIe.
const READERS: usize = 16;

/// Threads that fault in, read and copy: what `memory` says, else one a core.
pub(crate) fn threads(memory: Memory) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    memory.threads.and_then(|n| usize::try_from(n).ok()).unwrap_or_else(cores).max(1)
}

/// Reads all of `path` into `arena`, wherever its memory is, and verifies it there.
///
/// # Errors
/// As [`load`] and [`load_gpu`].
pub(crate) fn fill(path: &Path, digests: &Digests, arena: &Arc<dyn Arena>, threads: usize) -> Result<()> {
    fill_range(path, digests, arena, ByteRange::new(0, digests.payload()), threads)
}

/// The same of the whole blocks of `range`.
///
/// # Errors
/// As [`load`] and [`load_gpu`].
pub(crate) fn fill_range(
    path: &Path,
    digests: &Digests,
    arena: &Arc<dyn Arena>,
    range: ByteRange,
    threads: usize,
) -> Result<()> {
    match CudaArena::from_arena(arena) {
        Some(gpu) => load_gpu(path, digests, &gpu, range, threads),
        None => load(path, digests, &**arena, range, threads),
    }
}

/// Reads `range` of `path` into `arena` with `threads` threads. Memory in flight is one piece a thread.
///
/// # Errors
/// [`Kind::Corrupt`] when the file's length or a block is not what `digests` say; the system's own otherwise.
pub(crate) fn load(
    path: &Path,
    digests: &Digests,
    arena: &dyn Arena,
    range: ByteRange,
    threads: usize,
) -> Result<()> {
    let file = open(path, digests)?;
    let one = |range, buffer: &mut Vec<u8>| {
        buffer.resize(PIECE, 0);
        one_block(&file, path, range, digests, arena, buffer)
    };
    on_threads(range, digests.block(), threads, Vec::new, one)
}

/// The same into GPU memory, through pinned windows that are read while others are copied, and verified where the bytes
/// ended: on the GPU. Memory in flight is two windows a thread, of 16 threads at most.
///
/// # Errors
/// As [`load`], and the driver's.
pub(crate) fn load_gpu(
    path: &Path,
    digests: &Digests,
    arena: &Arc<CudaArena>,
    whole: ByteRange,
    threads: usize,
) -> Result<()> {
    let file = open(path, digests)?;
    let lanes = || Lane { stream: None, windows: VecDeque::new(), flying: None };
    let one = |range, lane: &mut Lane| lane.window(&file, path, range, arena);
    on_threads(whole, WINDOW, threads.min(READERS), lanes, one)?;
    let found = arena.digests(whole, digests.block())?;
    let blocks = whole.len().div_ceil(digests.block());
    match digests.mismatches(whole.start / digests.block(), &found).first() {
        None if found.len() as u64 == blocks => Ok(()),
        first => {
            let block = first.map_or_else(|| "a block".to_owned(), |block| format!("block {block}"));
            let detail = format!("{}: {block} does not match its digest on the GPU", path.display());
            Err(Error::new(Kind::Corrupt, "load", detail).with_remedy("pack or fetch the image again"))
        }
    }
}

/// One thread's way to the GPU.
struct Lane {
    stream: Option<Arc<Stream>>,
    /// Those at hand; together with the one in flight two.
    windows: VecDeque<Arc<Pinned>>,
    flying: Option<(Upload, Arc<Pinned>)>,
}

impl Lane {
    /// Reads one window while the one before is copied, and starts its copy.
    fn window(&mut self, file: &File, path: &Path, range: ByteRange, arena: &Arc<CudaArena>) -> Result<()> {
        let context = arena.context();
        let stream = match &self.stream {
            Some(stream) => Arc::clone(stream),
            None => Arc::clone(self.stream.insert(Arc::new(Stream::new(context)?))),
        };
        let mut window = match self.windows.pop_front() {
            Some(window) => window,
            None => Arc::new(Pinned::new(context, usize::try_from(WINDOW).unwrap_or(usize::MAX))?),
        };
        let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
        let busy = || Error::new(Kind::Busy, "load", "a window is still being copied");
        let bytes = Arc::get_mut(&mut window).ok_or_else(busy)?.as_mut_slice();
        read(file, path, range.start, bytes.get_mut(..len).ok_or_else(busy)?)?;
        let from = HostBytes::Pinned(Arc::clone(&window));
        let upload = arena.upload(&stream, range.start, &from, 0, len)?;
        drop(from);
        if let Some((before, window)) = self.flying.replace((upload, window)) {
            before.wait()?;
            self.windows.push_back(window);
        }
        Ok(())
    }
}

fn read(file: &File, path: &Path, at: u64, bytes: &mut [u8]) -> Result<()> {
    file.read_exact_at(bytes, at).map_err(|e| {
        let detail = format!("{}: {} bytes at {at}", path.display(), bytes.len());
        Error::from_io("pread", &e, detail)
    })
}

/// The file, with the length that `digests` say.
fn open(path: &Path, digests: &Digests) -> Result<File> {
    let io = |op, e: &std::io::Error| Error::from_io(op, e, path.display().to_string());
    let file = File::open(path).map_err(|e| io("open", &e))?;
    let found = file.metadata().map_err(|e| io("stat", &e))?.len();
    let payload = digests.payload();
    if found != payload {
        let detail = format!("{}: {payload} bytes needed, {found} found", path.display());
        return Err(Error::new(Kind::Corrupt, "load", detail).with_remedy("pack or fetch the image again"));
    }
    Ok(file)
}

/// Does every range of `step` bytes of `whole` with `threads` threads, each with a state of its own, until one fails.
/// A state's end is awaited: what it has in flight has landed then.
fn on_threads<S>(
    whole: ByteRange,
    step: u64,
    threads: usize,
    state: impl Fn() -> S + Sync,
    one: impl Fn(ByteRange, &mut S) -> Result<()> + Sync,
) -> Result<()> {
    let steps = whole.len().div_ceil(step);
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let first_error = Mutex::new(None);
    let work = || {
        let mut state = state();
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= steps {
                return;
            }
            let start = whole.start.saturating_add(index.saturating_mul(step));
            let range = ByteRange::new(start, start.saturating_add(step).min(whole.end));
            if let Err(e) = one(range, &mut state) {
                stop.store(true, Ordering::Relaxed);
                first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.max(1) {
            // This thread works too: one that cannot be had makes it slower, no worse.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
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
        read(file, path, at, piece)?;
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
