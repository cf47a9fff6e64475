//! One pull of the copy engine: cut into pieces, each copied (and hashed) by one worker.

use crate::{arena::OwnedRange, imported::ImportedArena, stream};
use async_trait::async_trait;
use flashboot_core::{
    ByteRange, Error, InFlight, Kind, Landed, Result,
    digest::{self, Piece},
};
use std::{
    fmt,
    future::poll_fn,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Poll, Waker},
};

/// What a job owns until its last piece is done or skipped.
struct Ends {
    // The range is given back before the mappings can go.
    _into: OwnedRange,
    _from: Arc<ImportedArena>,
}

/// The addresses of payload byte `range.start` at both ends.
struct Addresses {
    from: *const u8,
    to: *mut u8,
}

// SAFETY: both stay mapped until `Ends` is dropped, and any thread may copy; disjoint pieces go to one
// worker each.
unsafe impl Send for Addresses {}
// SAFETY: as above.
unsafe impl Sync for Addresses {}

pub(crate) struct Job {
    addresses: Addresses,
    payload: u64,
    range: ByteRange,
    step: u64,
    count: u64,
    hash: Option<u64>,
    /// One value a piece; empty when nothing is hashed.
    values: Box<[OnceLock<Piece>]>,
    /// The next piece that nobody has taken. Goes past `count`.
    next: AtomicU64,
    /// Pieces neither done nor skipped.
    left: AtomicU64,
    skipped: AtomicBool,
    /// A worker panicked in a piece.
    broken: AtomicBool,
    ends: Mutex<Option<Ends>>,
    done: Mutex<Done>,
    finished: Condvar,
}

#[derive(Default)]
struct Done {
    result: Option<Result<Landed>>,
    waker: Option<Waker>,
}

impl Job {
    /// The caller has checked `range` and `hash` against the payload, which both ends share, and that `step`
    /// divides the hash's block.
    pub(crate) fn new(from: Arc<ImportedArena>, into: OwnedRange, hash: Option<u64>, step: u64) -> Arc<Self> {
        let (range, payload) = (into.range(), into.payload());
        let count = range.len().div_ceil(step.max(1));
        let values = if hash.is_some() { count } else { 0 };
        let start = usize::try_from(range.start).unwrap_or(0);
        let job = Arc::new(Self {
            addresses: Addresses {
                from: from.base().as_ptr().wrapping_add(start).cast_const(),
                to: into.as_mut_ptr(),
            },
            payload,
            range,
            step,
            count,
            hash,
            values: (0..values).map(|_| OnceLock::new()).collect(),
            next: AtomicU64::new(0),
            left: AtomicU64::new(count),
            skipped: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            ends: Mutex::new(Some(Ends { _into: into, _from: from })),
            done: Mutex::default(),
            finished: Condvar::new(),
        });
        if count == 0 {
            job.finish();
        }
        job
    }

    /// Takes and does one piece; `false` when none is left to take.
    pub(crate) fn step(&self) -> bool {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        if index >= self.count {
            return false;
        }
        let counted = Counted(self);
        self.piece(index);
        drop(counted);
        true
    }

    fn piece(&self, index: u64) {
        // index < count, so both are within the range.
        let start = index.saturating_mul(self.step);
        let bytes = self.step.min(self.range.len().saturating_sub(start));
        let (Ok(offset), Ok(len)) = (usize::try_from(start), usize::try_from(bytes)) else { return };
        let from = self.addresses.from.wrapping_add(offset);
        let to = self.addresses.to.wrapping_add(offset);
        // What is hashed next should stay in the cache, what is only moved should not enter it.
        let copy: unsafe fn(*const u8, *mut u8, usize) =
            if self.hash.is_some() { std::ptr::copy_nonoverlapping } else { stream::copy };
        // SAFETY: both ends have the range mapped (`ends` is held while this piece is unaccounted); they are
        // different files (`CopyEngine::pull` checks); the claim in `ends` makes the engine the only writer of
        // the destination and this worker the only one of the piece. The source may change meanwhile: the
        // bytes are then torn, which the generation and the digests find, and no reference to them exists.
        unsafe { copy(from, to, len) };
        if let Some(slot) = self.values.get(usize::try_from(index).unwrap_or(usize::MAX)) {
            // SAFETY: the destination as above, initialised by the copy. Nothing writes it while the slice
            // lives: this process because of the claim, other processes because of F_SEAL_FUTURE_WRITE.
            let landed = unsafe { std::slice::from_raw_parts(to.cast_const(), len) };
            let value = digest::piece(self.payload, self.range.start.saturating_add(start), landed);
            let first = slot.set(value);
            debug_assert!(first.is_ok(), "a piece is done once");
        }
    }

    /// Counts pieces as done or skipped; the last one ends the job.
    fn account(&self, pieces: u64) {
        // AcqRel: whoever ends the job sees every worker's bytes and values, and no worker touches memory
        // after its count.
        if pieces > 0 && self.left.fetch_sub(pieces, Ordering::AcqRel) == pieces {
            self.finish();
        }
    }

    /// Skips every piece that no worker has taken.
    pub(crate) fn cancel(&self) {
        let first = self.next.swap(self.count, Ordering::Relaxed);
        if first < self.count {
            self.skipped.store(true, Ordering::Relaxed);
            self.account(self.count.saturating_sub(first));
        }
    }

    fn finish(&self) {
        // The range is free and the import unpinned before anyone is told.
        drop(self.ends.lock().unwrap_or_else(PoisonError::into_inner).take());
        let result = if self.broken.load(Ordering::Relaxed) {
            let detail = format!("a copy thread panicked in bytes {}: a defect of flashboot's", self.range);
            Err(Error::new(Kind::Io, "pull", detail))
        } else if self.skipped.load(Ordering::Relaxed) {
            Err(Error::new(
                Kind::Cancelled,
                "pull",
                format!("bytes {} were cancelled; nothing of them will land any more", self.range),
            ))
        } else {
            Ok(Landed { digests: self.digests(), generation: None })
        };
        let mut done = self.done();
        done.result = Some(result);
        let waker = done.waker.take();
        drop(done);
        self.finished.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn digests(&self) -> Vec<digest::BlockDigest> {
        let Some(block) = self.hash else { return Vec::new() };
        let values: Vec<Piece> = self.values.iter().filter_map(|slot| slot.get().copied()).collect();
        digest::merge_blocks(self.payload, self.range, (block, self.step), &values)
    }

    fn done(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece being done; counted when dropped, also by a panic, so that the job always ends.
struct Counted<'a>(&'a Job);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.store(true, Ordering::Relaxed);
        }
        self.0.account(1);
    }
}

/// A pull in flight. Dropping it cancels it; the range stays owned until its last piece is done.
pub struct CopyJob {
    job: Arc<Job>,
}

impl CopyJob {
    pub(crate) fn new(job: Arc<Job>) -> Self {
        Self { job }
    }

    /// Blocks until nothing of the pull will touch memory any more; for threads that run no async runtime.
    /// The answers are those of [`InFlight::quiesced`].
    pub fn wait(&self) -> Result<Landed> {
        let mut done = self.job.done();
        loop {
            if let Some(result) = &done.result {
                return result.clone();
            }
            done = self.job.finished.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[async_trait]
impl InFlight for CopyJob {
    fn cancel(&self) {
        self.job.cancel();
    }

    async fn quiesced(&mut self) -> Result<Landed> {
        poll_fn(|context| {
            let mut done = self.job.done();
            match &done.result {
                Some(result) => Poll::Ready(result.clone()),
                None => {
                    done.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for CopyJob {
    fn drop(&mut self) {
        self.job.cancel();
    }
}

impl fmt::Debug for CopyJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = self.job.left.load(Ordering::Relaxed);
        f.debug_struct("CopyJob").field("range", &self.job.range).field("pieces_left", &left).finish()
    }
}
