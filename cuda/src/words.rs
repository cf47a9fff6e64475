//! The words of an arena's control block in GPU memory.
//!
//! The owner is their only writer, so it keeps a mirror on the host and loads from there. A store goes to the
//! device as one aligned 8-byte copy, all of them on one stream: peers see the words change in the protocol's order. A
//! fence waits for those before it.

use crate::{Context, api::DevicePtr, host::Pinned, stream::Stream};
use flashboot_core::{Error, Result, control::Words};
use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicU64, Ordering, fence},
};

/// Cloning shares the words.
#[derive(Debug, Clone)]
pub(crate) struct DeviceWords(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    at: DevicePtr,
    mirror: Box<[AtomicU64]>,
    /// `None`: the words are another process's, and `mirror` is how they were when they were read.
    line: Option<Mutex<Line>>,
    failed: OnceLock<Error>,
}

/// What a store travels by.
#[derive(Debug)]
struct Line {
    stream: Stream,
    /// One slot a copy that may be under way.
    slots: Pinned,
    /// Slots used since the stream was last waited for.
    used: usize,
}

/// Copies that may be under way.
const SLOTS: usize = 64;

impl Line {
    /// Waits until nothing is under way.
    fn settle(&mut self) -> Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        // Refused, the slots may still be read from: they stay used.
        self.stream.synchronize()?;
        self.used = 0;
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // The slots go next. An error is sticky: nothing runs any more.
        let _ = self.settle();
    }
}

impl DeviceWords {
    /// Takes over `size` bytes of device memory from `at` on, and zeroes them. They stay mapped as long as the
    /// value and its clones are used: the arena sees to that.
    pub(crate) fn new(context: &Context, at: DevicePtr, size: u64) -> Result<Self> {
        let stream = Stream::new(context)?;
        let slots = Pinned::new(context, SLOTS * 8)?;
        context.call(|ops| {
            // SAFETY: the bytes are the arena's own control block, which nobody else has mapped yet.
            unsafe { ops.memset(at, 0, size, stream.object()) }
        })?;
        stream.synchronize()?;
        let mirror = (0..size / 8).map(|_| AtomicU64::new(0)).collect();
        let line = Some(Mutex::new(Line { stream, slots, used: 0 }));
        Ok(Self(Arc::new(Inner { context: context.clone(), at, mirror, line, failed: OnceLock::new() })))
    }

    /// Reads `size` bytes of words from `at` on, which are another process's: stores change nothing. They stay mapped during
    /// the call.
    pub(crate) fn read(context: &Context, at: DevicePtr, size: u64) -> Result<Self> {
        let stream = Stream::new(context)?;
        let slots = Pinned::new(context, usize::try_from(size).unwrap_or(usize::MAX))?;
        let queued = context.call(|ops| {
            // SAFETY: the caller keeps the words mapped; the pinned memory is ours until the stream is synchronised below.
            unsafe { ops.copy_dtoh(slots.as_ptr(), at, size, stream.object()) }
        });
        let done = stream.synchronize();
        queued.and(done)?;
        let (words, _) = slots.as_slice().as_chunks::<8>();
        let mirror = words.iter().map(|word| AtomicU64::new(u64::from_le_bytes(*word))).collect();
        Ok(Self(Arc::new(Inner {
            context: context.clone(),
            at,
            mirror,
            line: None,
            failed: OnceLock::new(),
        })))
    }

    /// The error of the first store that did not reach the device. From then on peers may read words that are older
    /// than the owner's, so the arena must not be written any more.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn slot(&self, offset: u64) -> Option<&AtomicU64> {
        self.0.mirror.get(usize::try_from(offset / 8).ok()?)
    }
}

impl Inner {
    /// Queues one store.
    fn write(&self, line: &mut Line, offset: u64, value: u64) -> Result<()> {
        if line.used == SLOTS {
            line.settle()?;
        }
        let (slots, _) = line.slots.as_mut_slice().as_chunks_mut::<8>();
        let Some(slot) = slots.get_mut(line.used) else { return Ok(()) };
        *slot = value.to_le_bytes();
        let from = slot.as_mut_ptr();
        line.used += 1;
        self.context.call(|ops| {
            // SAFETY: the word lies inside the control block (it has a slot in the mirror), the arena keeps it
            // mapped; the pinned slot is not touched again before the stream is synchronised, under this lock.
            unsafe { ops.copy_htod(self.at + offset, from, 8, line.stream.object()) }
        })
    }

    fn fail(&self, error: Error) {
        tracing::error!(%error, "a control word did not reach the GPU: the arena is beyond use");
        let _ = self.failed.set(error);
    }
}

impl Words for DeviceWords {
    fn load(&self, offset: u64) -> u64 {
        self.slot(offset).map_or(0, |slot| slot.load(Ordering::Acquire))
    }

    fn store(&self, offset: u64, value: u64) {
        let (Some(slot), Some(line)) = (self.slot(offset), &self.0.line) else { return };
        let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
        // The device holds what the mirror holds.
        if slot.load(Ordering::Relaxed) == value {
            return;
        }
        match self.0.write(&mut line, offset, value) {
            Ok(()) => slot.store(value, Ordering::Release),
            Err(error) => self.0.fail(error),
        }
    }

    fn fence(&self) {
        let settled =
            self.0.line.as_ref().map(|line| line.lock().unwrap_or_else(PoisonError::into_inner).settle());
        if let Some(Err(error)) = settled {
            self.0.fail(error);
        }
        // The host's own accesses.
        fence(Ordering::AcqRel);
    }
}
