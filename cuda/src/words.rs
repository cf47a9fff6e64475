//! The words of an arena's control block in GPU memory.
//!
//! The owner is their only writer, so it keeps a mirror on the host and loads from there. A store goes to the
//! device as one aligned 8-byte copy that is waited for before the next: peers see the words change in the
//! protocol's order.

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
    line: Mutex<Line>,
    failed: OnceLock<Error>,
}

/// What a store travels by.
#[derive(Debug)]
struct Line {
    stream: Stream,
    word: Pinned,
}

impl DeviceWords {
    /// Takes over `size` bytes of device memory from `at` on, and zeroes them. They stay mapped as long as the
    /// value and its clones are used: the arena sees to that.
    pub(crate) fn new(context: &Context, at: DevicePtr, size: u64) -> Result<Self> {
        let stream = Stream::new(context)?;
        let word = Pinned::new(context, 8)?;
        context.call(|ops| {
            // SAFETY: the bytes are the arena's own control block, which nobody else has mapped yet.
            unsafe { ops.memset(at, 0, size, stream.object()) }
        })?;
        stream.synchronize()?;
        let mirror = (0..size / 8).map(|_| AtomicU64::new(0)).collect();
        let line = Mutex::new(Line { stream, word });
        Ok(Self(Arc::new(Inner { context: context.clone(), at, mirror, line, failed: OnceLock::new() })))
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
    fn write(&self, line: &mut Line, offset: u64, value: u64) -> Result<()> {
        line.word.as_mut_slice().copy_from_slice(&value.to_le_bytes());
        let queued = self.context.call(|ops| {
            // SAFETY: the word lies inside the control block (it has a slot in the mirror), the arena keeps it
            // mapped; the pinned word stays as it is until the stream is synchronised, under this lock.
            unsafe { ops.copy_htod(self.at + offset, line.word.as_ptr(), 8, line.stream.object()) }
        });
        // Also after a failure: nothing may be under way when the word is used again.
        let done = line.stream.synchronize();
        queued.and(done)
    }
}

impl Words for DeviceWords {
    fn load(&self, offset: u64) -> u64 {
        self.slot(offset).map_or(0, |slot| slot.load(Ordering::Acquire))
    }

    fn store(&self, offset: u64, value: u64) {
        let Some(slot) = self.slot(offset) else { return };
        let mut line = self.0.line.lock().unwrap_or_else(PoisonError::into_inner);
        // The device holds what the mirror holds.
        if slot.load(Ordering::Relaxed) == value {
            return;
        }
        match self.0.write(&mut line, offset, value) {
            Ok(()) => slot.store(value, Ordering::Release),
            Err(error) => {
                tracing::error!(%error, "a control word did not reach the GPU: the arena is beyond use");
                let _ = self.0.failed.set(error);
            }
        }
    }

    fn fence(&self) {
        // Every store has been waited for; this orders the host's own accesses.
        fence(Ordering::AcqRel);
    }
}
