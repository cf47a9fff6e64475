//! An arena of a simulated host: bytes and words behind locks.

use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Error, Generation, Kind, Location, Observed, Result, ShardId,
    claims::{Claim, Claims},
    control::{self, ControlBlock, Header, Words},
};
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering, fence},
};
use tokio::sync::watch;

/// The words of a control block.
#[derive(Debug)]
pub(crate) struct MockWords(Box<[AtomicU64]>);

impl Words for MockWords {
    fn load(&self, offset: u64) -> u64 {
        self.0.get(offset as usize / 8).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, offset: u64, value: u64) {
        if let Some(word) = self.0.get(offset as usize / 8) {
            word.store(value, Ordering::Release);
        }
    }

    fn fence(&self) {
        fence(Ordering::AcqRel);
    }
}

/// An arena of one simulated host.
#[derive(Debug)]
pub struct MockArena {
    host: u32,
    payload: Mutex<Vec<u8>>,
    len: u64,
    shards: u32,
    control: ControlBlock<MockWords>,
    claims: Claims,
    /// Counts changes of the control block, so that a reader can wait for one.
    pub(crate) changes: watch::Sender<u64>,
}

impl MockArena {
    pub(crate) fn new(host: u32, spec: ArenaSpec) -> Result<Self> {
        let len = usize::try_from(spec.payload).ok().filter(|len| isize::try_from(*len).is_ok());
        let mut payload = Vec::new();
        let reserved = len.is_some_and(|len| payload.try_reserve_exact(len).is_ok());
        let (true, Some(len)) = (reserved, len) else {
            return Err(Error::new(Kind::Exhausted, "mock arena", format!("{} bytes", spec.payload)));
        };
        payload.resize(len, 0);
        let words = (0..control::size(spec.shards) / 8).map(|_| AtomicU64::new(0)).collect();
        let header = Header { shards: spec.shards, payload: spec.payload };
        Ok(Self {
            host,
            payload: Mutex::new(payload),
            len: spec.payload,
            shards: spec.shards,
            control: ControlBlock::initialise(MockWords(words), header),
            claims: Claims::default(),
            changes: watch::Sender::new(0),
        })
    }

    /// The simulated host it is on.
    pub fn host(&self) -> u32 {
        self.host
    }

    pub(crate) fn claim(&self, range: ByteRange) -> Result<Claim> {
        self.within("claim", range)?;
        self.claims.claim(range)
    }

    /// Runs `f` on the bytes of `range`, which is cut to the payload.
    pub(crate) fn with<T>(&self, range: ByteRange, f: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut payload = self.lock();
        let end = range.end.min(self.len) as usize;
        let start = (range.start as usize).min(end);
        f(payload.get_mut(start..end).unwrap_or_default())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.payload.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn within(&self, op: &'static str, range: ByteRange) -> Result<()> {
        if range.end > self.len {
            let detail = format!("bytes {range} of a payload of {} bytes", self.len);
            return Err(Error::new(Kind::Invalid, op, detail));
        }
        Ok(())
    }

    /// The range of a span that is inside the payload and that no pull owns.
    fn free_span(&self, op: &'static str, offset: u64, len: usize) -> Result<Claim> {
        let range = ByteRange::new(offset, offset.saturating_add(len as u64));
        self.within(op, range)?;
        self.claims.claim(range)
    }
}

// SAFETY: nobody dereferences an address of this arena: payload and words live behind a lock and in atomics,
// are owned by the value, and every access is bounds-checked.
unsafe impl Arena for MockArena {
    fn payload(&self) -> u64 {
        self.len
    }

    fn capacity(&self) -> u64 {
        self.len.saturating_add(control::size(self.shards))
    }

    fn shards(&self) -> u32 {
        self.shards
    }

    fn location(&self) -> Location {
        Location::Mock { host: self.host }
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        let claim = self.free_span("copy in", offset, from.len())?;
        self.with(claim.range(), |to| to.copy_from_slice(from));
        Ok(())
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let claim = self.free_span("copy out", offset, to.len())?;
        self.with(claim.range(), |from| to.copy_from_slice(from));
        Ok(())
    }

    fn fill(&self, range: ByteRange, byte: u8) -> Result<()> {
        let claim = self.claim(range)?;
        self.with(claim.range(), |to| to.fill(byte));
        Ok(())
    }

    fn retire(&self) {
        self.control.retire();
        self.changes.send_modify(|n| *n += 1);
    }

    fn begin(&self, generation: Generation) {
        self.control.begin(generation);
        self.changes.send_modify(|n| *n += 1);
    }

    fn publish(&self, shard: ShardId, bytes: u64) -> Result<()> {
        self.control.publish(shard, bytes)?;
        self.changes.send_modify(|n| *n += 1);
        Ok(())
    }

    fn observe(&self, shard: ShardId) -> Observed {
        self.control.observe(shard)
    }
}
