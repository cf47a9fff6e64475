//! What a pull owns until nothing will touch its memory any more, and what its owner is told then.

use crate::{arena::Owned, regions::Registration};
use flashboot_core::{
    BlockDigest, ByteRange, Error, Landed, Result,
    digest::{self, Piece},
};
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
};

/// Bytes hashed by one thread at a time.
const PIECE: u64 = 1 << 20;

/// The destination, its registration, and the values that are found of it.
pub(crate) struct Landing {
    payload: u64,
    range: ByteRange,
    hash: Option<u64>,
    step: u64,
    bytes: Bytes,
    /// One a piece of host memory; empty when nothing is hashed here.
    values: Box<[OnceLock<Piece>]>,
    on_gpu: Mutex<Vec<BlockDigest>>,
    /// The engine, and each piece that is being hashed.
    left: AtomicU64,
    ends: Mutex<Option<Ends>>,
    error: Mutex<Option<Error>>,
    done: Mutex<Done>,
}

/// Kept until `left` is nought.
struct Ends {
    // The range is given back before the registration can go.
    owned: Owned,
    _registration: Arc<Registration>,
}

/// The first byte of the range in host memory; null for a GPU's.
struct Bytes(*const u8);

// SAFETY: read only for pieces that have landed, while `Ends` keeps them mapped and everyone else off them.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

#[derive(Default)]
struct Done {
    result: Option<Result<Landed>>,
    waker: Option<Waker>,
}

impl Landing {
    pub(crate) fn new(
        owned: Owned,
        registration: Arc<Registration>,
        payload: u64,
        range: ByteRange,
        hash: Option<u64>,
    ) -> Arc<Self> {
        let step = hash.map_or(PIECE, |block| block.min(PIECE));
        let on_host = owned.host_pointer();
        let pieces = if hash.is_some() && on_host.is_some() { range.len().div_ceil(step) } else { 0 };
        Arc::new(Self {
            payload,
            range,
            hash,
            step,
            bytes: Bytes(on_host.unwrap_or(std::ptr::null())),
            values: (0..pieces).map(|_| OnceLock::new()).collect(),
            on_gpu: Mutex::default(),
            left: AtomicU64::new(1),
            ends: Mutex::new(Some(Ends { owned, _registration: registration })),
            error: Mutex::default(),
            done: Mutex::default(),
        })
    }

    pub(crate) fn range(&self) -> ByteRange {
        self.range
    }

    /// Bytes of each piece that is hashed on the host, in order; empty when none is.
    pub(crate) fn pieces(&self) -> Vec<u64> {
        (0..self.values.len() as u64).map(|n| self.piece(n).len()).collect()
    }

    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    fn piece(&self, number: u64) -> ByteRange {
        let start = self.range.start.saturating_add(number.saturating_mul(self.step));
        ByteRange::new(start, start.saturating_add(self.step).min(self.range.end))
    }

    /// Call before handing a piece to another thread, which ends with [`account`](Self::account).
    pub(crate) fn hold(&self) {
        self.left.fetch_add(1, Ordering::AcqRel);
    }

    /// Hashes a piece that has landed whole; the caller holds the landing.
    pub(crate) fn hash_piece(&self, number: usize) {
        let Some(slot) = self.values.get(number) else { return };
        let piece = self.piece(number as u64);
        let offset = usize::try_from(piece.start - self.range.start).unwrap_or(0);
        let len = usize::try_from(piece.len()).unwrap_or(0);
        // SAFETY: inside the range, which `ends` owns as long as the landing is held; the NIC has reported that it is
        // done with the piece, and no READ of it is posted again.
        let landed = unsafe { std::slice::from_raw_parts(self.bytes.0.wrapping_add(offset), len) };
        let _ = slot.set(digest::piece(self.payload, piece.start, landed));
    }

    /// What is left to do with GPU memory that has landed whole: make it visible to the GPU, and hash it there. Blocks.
    pub(crate) fn settle_on_gpu(&self) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Ends { owned, .. }) = &mut *ends else { return };
        let found = match self.hash {
            Some(block) => owned.gpu_digests(block).unwrap_or_else(|| Ok(Vec::new())),
            None => owned.settle().map(|()| Vec::new()),
        };
        match found {
            Ok(values) => *self.on_gpu.lock().unwrap_or_else(PoisonError::into_inner) = values,
            Err(e) => self.fail(e),
        }
    }

    pub(crate) fn is_gpu(&self) -> bool {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.as_ref().is_some_and(|ends| ends.owned.is_gpu())
    }

    /// The first error stays.
    pub(crate) fn fail(&self, error: Error) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// Lets go of the landing. Whoever is last gives the memory back and tells the owner.
    pub(crate) fn account(&self) {
        // AcqRel: the last one sees every value and every byte.
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        // The range is free before anyone is told.
        drop(self.ends.lock().unwrap_or_else(PoisonError::into_inner).take());
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = match error {
            Some(error) => Err(error),
            None => Ok(Landed { digests: self.digests(), generation: None }),
        };
        let mut done = self.done();
        done.result = Some(result);
        let waker = done.waker.take();
        drop(done);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn digests(&self) -> Vec<BlockDigest> {
        let Some(block) = self.hash else { return Vec::new() };
        if self.values.is_empty() {
            return std::mem::take(&mut *self.on_gpu.lock().unwrap_or_else(PoisonError::into_inner));
        }
        let values: Vec<Piece> = self.values.iter().filter_map(|slot| slot.get().copied()).collect();
        digest::merge_blocks(self.payload, self.range, (block, self.step), &values)
    }

    fn done(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<Result<Landed>> {
        let mut done = self.done();
        match &done.result {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                done.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl fmt::Debug for Landing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Landing").field(&self.range).finish()
    }
}
