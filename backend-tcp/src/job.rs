//! One pull: cut into parts that reading connections take, each landing in place.

use crate::{arena::Served, error::cancelled};
use flashboot_core::{
    ByteRange, Error, Kind, Landed, Pull, Result,
    digest::{self, BlockDigest, Piece},
};
use flashboot_cuda::CudaOwned;
use flashboot_memory::OwnedPart;
use std::{
    collections::VecDeque,
    num::NonZeroU64,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use tokio::sync::watch;

/// Bytes that are asked for at once: enough that asking costs nothing, and few enough that connections share a chunk.
const PART: u64 = 1 << 20;
/// Bytes received, and then hashed, at once: a piece stays in a core's L2 between the two.
const HASHED_PIECE: u64 = 256 << 10;

#[derive(Debug)]
pub(crate) struct Job {
    range: ByteRange,
    payload: u64,
    hash: Option<u64>,
    /// Bytes of a piece: what is received at once, and hashed where the host hashes.
    piece: u64,
    parts: Mutex<VecDeque<Part>>,
    /// One value a piece; empty where the host hashes nothing.
    values: Box<[OnceLock<Piece>]>,
    /// The GPU hashes the whole range at the end.
    on_gpu: Mutex<Option<Arc<CudaOwned>>>,
    /// Parts that have neither landed nor been given up.
    left: AtomicU64,
    stopped: AtomicBool,
    failure: OnceLock<Error>,
    done: watch::Sender<Option<Result<Landed>>>,
}

/// Exclusive ownership of some bytes of the range.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) range: ByteRange,
    pub(crate) memory: Memory,
}

/// Where what is left of a part goes.
pub(crate) enum Destination<'a> {
    Host(&'a mut [u8]),
    Gpu(Arc<CudaOwned>),
}

#[derive(Debug)]
pub(crate) enum Memory {
    Host(OwnedPart),
    Gpu(Arc<CudaOwned>),
}

impl Job {
    /// Owns the range of `into` until the last part has landed or been given up.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a range that is not within the payload or not cut at blocks, [`Kind::Busy`] when a byte of it
    /// is owned.
    pub(crate) fn new(into: &Served, pull: Pull) -> Result<Arc<Self>> {
        let Pull { range, hash } = pull;
        let payload = into.arena().payload();
        check(payload, pull)?;
        let piece = hash.map_or(HASHED_PIECE, |block| block.min(HASHED_PIECE));
        let step = NonZeroU64::new(PART.max(piece)).unwrap_or(NonZeroU64::MIN);
        let (parts, on_gpu): (VecDeque<Part>, _) = match into {
            Served::Host(arena) => {
                let parts = arena.own(range)?.into_parts(step).into_iter();
                (parts.map(|part| Part { range: part.range(), memory: Memory::Host(part) }).collect(), None)
            }
            Served::Gpu(arena) => {
                let owned = Arc::new(arena.own(range)?);
                let memory = || Memory::Gpu(Arc::clone(&owned));
                (cut(range, step).map(|range| Part { range, memory: memory() }).collect(), Some(owned))
            }
        };
        let values = if hash.is_some() && on_gpu.is_none() { range.len().div_ceil(piece) } else { 0 };
        let job = Arc::new(Self {
            range,
            payload,
            hash,
            piece,
            left: AtomicU64::new(parts.len() as u64),
            parts: Mutex::new(parts),
            values: (0..values).map(|_| OnceLock::new()).collect(),
            on_gpu: Mutex::new(on_gpu),
            stopped: AtomicBool::new(false),
            failure: OnceLock::new(),
            done: watch::Sender::new(None),
        });
        if range.is_empty() {
            job.finish();
        }
        Ok(job)
    }

    fn parts(&self) -> MutexGuard<'_, VecDeque<Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next part that nobody has taken.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Taken> {
        let part = self.parts().pop_front()?;
        Some(Taken { range: part.range, part: Some(part), job: Arc::clone(self) })
    }

    /// Gives up every part that nobody has taken; those who have one give theirs up soon.
    pub(crate) fn cancel(&self) {
        self.stopped.store(true, Ordering::Release);
        let given_up = std::mem::take(&mut *self.parts());
        let count = given_up.len() as u64;
        // The memory is free before it is counted.
        drop(given_up);
        self.account(count);
    }

    /// As [`cancel`](Self::cancel), for a reason; the first one counts.
    pub(crate) fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
        self.cancel();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    pub(crate) fn done(&self) -> watch::Receiver<Option<Result<Landed>>> {
        self.done.subscribe()
    }

    pub(crate) fn range(&self) -> ByteRange {
        self.range
    }

    /// Bytes of a piece.
    pub(crate) fn piece(&self) -> u64 {
        self.piece
    }

    /// Hashes a piece that has just landed at payload byte `start`, where the host hashes. One that lands once more fails
    /// the pull: what it wrote over may have been in use.
    pub(crate) fn landed(&self, start: u64, bytes: &[u8]) {
        let index = start.saturating_sub(self.range.start) / self.piece.max(1);
        let Some(slot) = usize::try_from(index).ok().and_then(|index| self.values.get(index)) else { return };
        if slot.set(digest::piece(self.payload, start, bytes)).is_err() {
            let end = start.saturating_add(bytes.len() as u64);
            let detail = format!("bytes {} landed twice", ByteRange::new(start, end));
            self.fail(Error::new(Kind::Corrupt, "pull", detail).with_remedy("report this defect"));
        }
    }

    /// Counts parts as landed or given up; the last one ends the pull.
    fn account(&self, parts: u64) {
        // AcqRel: whoever ends the pull sees every part's bytes and values, and nobody touches memory after its count.
        if parts > 0 && self.left.fetch_sub(parts, Ordering::AcqRel) == parts {
            self.finish();
        }
    }

    fn finish(&self) {
        let on_gpu = self.on_gpu.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = if let Some(error) = self.failure.get() {
            Err(error.clone())
        } else if self.is_stopped() {
            Err(cancelled(&format!("bytes {}", self.range)))
        } else {
            let hashed = match (&on_gpu, self.hash) {
                (Some(owned), Some(block)) => owned.digests(block),
                _ => Ok(self.digests()),
            };
            hashed.map(|digests| Landed { digests, generation: None })
        };
        // The range is free before anyone is told.
        drop(on_gpu);
        self.done.send_replace(Some(result));
    }

    fn digests(&self) -> Vec<BlockDigest> {
        let Some(block) = self.hash else { return Vec::new() };
        let values: Vec<Piece> = self.values.iter().filter_map(|slot| slot.get().copied()).collect();
        digest::merge_blocks(self.payload, self.range, (block, self.piece), &values)
    }
}

fn check(payload: u64, Pull { range, hash }: Pull) -> Result<()> {
    let invalid = |detail: String| Err(Error::new(Kind::Invalid, "pull", detail));
    if range.end > payload || range.start > range.end {
        return invalid(format!("bytes {range} are not within a payload of {payload} bytes"));
    }
    let Some(block) = hash else { return Ok(()) };
    if !block.is_power_of_two() || block < 1024 {
        return invalid(format!("a block of {block} bytes is not a power of two of at least 1024"));
    }
    let ends_well = range.end == payload || range.end.is_multiple_of(block);
    if !(range.is_empty() || range.start.is_multiple_of(block) && ends_well) {
        return invalid(format!("bytes {range} are not whole blocks of {block} bytes of {payload}"));
    }
    Ok(())
}

fn cut(range: ByteRange, step: NonZeroU64) -> impl Iterator<Item = ByteRange> {
    let next = move |part: &ByteRange| {
        let end = part.end.saturating_add(step.get()).min(range.end);
        (part.end < range.end).then(|| ByteRange::new(part.end, end))
    };
    std::iter::successors(next(&ByteRange::new(range.start, range.start)), next)
}

/// A part that a connection has taken. Dropping it gives it up, unless [`done`](Self::done) said that it landed.
#[derive(Debug)]
pub(crate) struct Taken {
    /// What of it has not landed: whole pieces, but for the payload's last.
    range: ByteRange,
    /// `None` once it has been given up; what is still to come of it goes nowhere.
    part: Option<Part>,
    pub(crate) job: Arc<Job>,
}

impl Taken {
    /// What of it is still to be asked for.
    pub(crate) fn left(&self) -> ByteRange {
        self.range
    }

    /// The memory of what is left, until it is given up.
    pub(crate) fn memory(&mut self) -> Option<Destination<'_>> {
        let part = self.part.as_mut()?;
        let landed = self.range.start.saturating_sub(part.range.start);
        Some(match &mut part.memory {
            Memory::Host(memory) => {
                let landed = usize::try_from(landed).unwrap_or(usize::MAX);
                Destination::Host(memory.as_mut_slice().get_mut(landed..).unwrap_or_default())
            }
            Memory::Gpu(owned) => Destination::Gpu(Arc::clone(owned)),
        })
    }

    /// Everything before payload byte `at` is in place and hashed: it is never asked for again.
    pub(crate) fn landed_to(&mut self, at: u64) {
        self.range.start = at.clamp(self.range.start, self.range.end);
    }

    /// Whether nothing of it is wanted any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.part.is_none()
    }

    /// Gives it up where the pull is stopped: from now on nothing lands in it.
    pub(crate) fn heed(&mut self) {
        if self.job.is_stopped() {
            self.give_up();
        }
    }

    fn give_up(&mut self) {
        if let Some(part) = self.part.take() {
            // Not landed, so the pull is not whole, whoever gave it up.
            self.job.stopped.store(true, Ordering::Release);
            drop(part);
            self.job.account(1);
        }
    }

    /// It has landed whole.
    pub(crate) fn done(mut self) {
        if let Some(part) = self.part.take() {
            drop(part);
            self.job.account(1);
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::ArenaSpec;
    use flashboot_memory::{HostArena, HostArenaConfig};
    use proptest::prelude::*;

    fn arena(payload: u64) -> Served {
        let spec = ArenaSpec { payload, shards: 1 };
        Served::Host(HostArena::create(spec, &HostArenaConfig::default()).unwrap().0)
    }

    proptest! {
        #[test]
        fn a_range_is_cut_into_parts_that_cover_it(start in 0u64..1000, len in 0u64..5000, step in 1u64..2000) {
            let range = ByteRange::new(start, start + len);
            let mut at = start;
            for part in cut(range, NonZeroU64::new(step).unwrap()) {
                prop_assert!(part.start == at && !part.is_empty() && part.len() <= step);
                at = part.end;
            }
            prop_assert_eq!(at, range.end);
        }
    }

    #[test]
    fn a_pull_ends_with_its_last_part_and_its_range_is_free_then() {
        let into = arena(3 * PART + 5);
        let whole = ByteRange::new(0, 3 * PART + 5);
        let pull = Pull { range: whole, hash: Some(16 << 20) };
        let job = Job::new(&into, pull).unwrap();
        assert_eq!(Job::new(&into, pull).unwrap_err().kind(), Kind::Busy);
        let taken: Vec<_> = std::iter::from_fn(|| job.take()).collect();
        assert_eq!(taken.len(), 4);
        for mut part in taken {
            assert_eq!(*job.done().borrow(), None);
            let Some(Destination::Host(memory)) = part.memory() else { panic!("host memory") };
            memory.fill(7);
            for piece in cut(part.left(), NonZeroU64::new(HASHED_PIECE).unwrap()) {
                job.landed(piece.start, &vec![7; piece.len() as usize]);
            }
            part.done();
        }
        let landed = job.done().borrow().clone().unwrap().unwrap();
        assert_eq!(landed.digests, [block(&vec![7; 3 * PART as usize + 5])]);
        Job::new(&into, pull).unwrap();
    }

    #[test]
    fn a_piece_that_lands_twice_fails_its_pull() {
        let into = arena(PART);
        let pull = Pull { range: ByteRange::new(0, PART), hash: Some(16 << 20) };
        let job = Job::new(&into, pull).unwrap();
        let part = job.take().unwrap();
        for start in [0, HASHED_PIECE, HASHED_PIECE] {
            job.landed(start, &vec![7; HASHED_PIECE as usize]);
        }
        part.done();
        let twice = job.done().borrow().clone().unwrap().unwrap_err();
        assert_eq!(twice.kind(), Kind::Corrupt);
        assert!(
            twice.detail().contains(&ByteRange::new(HASHED_PIECE, 2 * HASHED_PIECE).to_string()),
            "{twice}"
        );
    }

    fn block(bytes: &[u8]) -> BlockDigest {
        let geometry = flashboot_core::Geometry::new(bytes.len() as u64, 16 << 20, 16 << 20, 1).unwrap();
        digest::block(&geometry, 0, bytes)
    }

    #[test]
    fn what_has_landed_of_a_part_is_out_of_reach_when_the_rest_is_read_again() {
        let into = arena(2 * PART);
        let job = Job::new(&into, Pull { range: ByteRange::new(0, 2 * PART), hash: None }).unwrap();
        let mut second = [(); 2].map(|()| job.take().unwrap()).into_iter().last().unwrap();
        second.landed_to(PART + HASHED_PIECE);
        assert_eq!(second.left(), ByteRange::new(PART + HASHED_PIECE, 2 * PART));
        let Some(Destination::Host(memory)) = second.memory() else { panic!("host memory") };
        assert_eq!(memory.len() as u64, PART - HASHED_PIECE);
        second.landed_to(0);
        assert_eq!(second.left().start, PART + HASHED_PIECE, "nothing comes back");
        second.landed_to(u64::MAX);
        assert!(second.left().is_empty());
    }

    #[test]
    fn a_cancelled_pull_is_quiet_once_every_taken_part_is_given_up() {
        let into = arena(3 * PART);
        let pull = Pull { range: ByteRange::new(0, 3 * PART), hash: None };
        let job = Job::new(&into, pull).unwrap();
        let mut taken = job.take().unwrap();
        job.cancel();
        assert_eq!(*job.done().borrow(), None, "one part may still be written");
        taken.heed();
        assert!(taken.memory().is_none());
        assert_eq!(job.done().borrow().clone().unwrap().unwrap_err().kind(), Kind::Cancelled);
        Job::new(&into, pull).unwrap();
        drop(taken);
    }

    #[test]
    fn a_lost_part_fails_its_pull_with_the_first_cause() {
        let into = arena(2 * PART);
        let job = Job::new(&into, Pull { range: ByteRange::new(0, 2 * PART), hash: None }).unwrap();
        let taken = job.take().unwrap();
        job.fail(Error::new(Kind::SourceLost, "read", "first"));
        job.fail(Error::new(Kind::Protocol, "read", "second"));
        drop(taken);
        assert_eq!(job.done().borrow().clone().unwrap().unwrap_err().detail(), "first");
    }

    #[test]
    fn ranges_that_cannot_be_pulled_are_refused() {
        let into = arena(3000);
        let refused = |start, end, hash| {
            Job::new(&into, Pull { range: ByteRange::new(start, end), hash }).unwrap_err().kind()
        };
        assert_eq!(refused(0, 3001, None), Kind::Invalid);
        assert_eq!(refused(0, 3000, Some(1000)), Kind::Invalid);
        assert_eq!(refused(0, 3000, Some(512)), Kind::Invalid);
        assert_eq!(refused(1, 3000, Some(1024)), Kind::Invalid);
        assert_eq!(refused(0, 1025, Some(1024)), Kind::Invalid);
        let empty = Job::new(&into, Pull { range: ByteRange::new(5, 5), hash: Some(1024) }).unwrap();
        assert_eq!(*empty.done().borrow(), Some(Ok(Landed::default())));
    }
}
