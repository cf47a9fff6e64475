//! The control block's words as atomics on a mapping.

use flashboot_core::control::Words;
use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering, fence},
};

/// The words of one control block; valid for as long as the mapping, which its holder keeps beside it.
#[derive(Debug)]
pub(crate) struct MappedWords {
    base: NonNull<u8>,
    len: u64,
    writable: bool,
}

// SAFETY: every access is atomic, so any thread may make it.
unsafe impl Send for MappedWords {}
// SAFETY: as above.
unsafe impl Sync for MappedWords {}

impl MappedWords {
    /// # Safety
    /// `len` bytes from `base` must stay mapped for as long as the value is used, `base` be aligned to 8,
    /// and the mapping be writable if `writable`.
    pub(crate) unsafe fn new(base: NonNull<u8>, len: u64, writable: bool) -> Self {
        Self { base, len, writable }
    }

    fn word(&self, offset: u64) -> Option<&AtomicU64> {
        if !offset.is_multiple_of(8) || offset.checked_add(8)? > self.len {
            return None;
        }
        let at = self.base.as_ptr().wrapping_add(usize::try_from(offset).ok()?).cast::<u64>();
        // SAFETY: in bounds and aligned by the check above; mapped by `new`'s contract. All accesses to the
        // block, ours and our peers', are 8-byte atomics, and an atomic load of that size may be made from
        // read-only memory.
        Some(unsafe { AtomicU64::from_ptr(at) })
    }
}

impl Words for MappedWords {
    fn load(&self, offset: u64) -> u64 {
        // Core asks inside the block only; outside there is nothing to see.
        self.word(offset).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, offset: u64, value: u64) {
        debug_assert!(self.writable, "a reader never stores");
        if self.writable
            && let Some(word) = self.word(offset)
        {
            word.store(value, Ordering::Release);
        }
    }

    fn fence(&self) {
        fence(Ordering::AcqRel);
    }
}
