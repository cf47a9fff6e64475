//! Private memory of whole pages, for reads that want alignment: given to the system again when it is dropped.

use crate::{budget, errno::failed, pages};
use flashboot_core::{Error, Kind, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::{fmt, ptr::NonNull, slice};

/// From this size on huge pages are asked for: a driver pins them at twice the rate.
const HUGE_FROM: usize = 4 << 20;

/// Page-aligned zeroes that nobody else sees: anonymous, private, not inherited by children.
pub struct Buffer {
    at: NonNull<u8>,
    len: usize,
    mapped: usize,
}

// SAFETY: it is plain memory that nothing but this value names; which thread touches it does not matter.
unsafe impl Send for Buffer {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` bytes, at least one page. Pages are taken when they are first touched; huge ones are asked for from 4 MiB on.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] when the machine or a control group has not that much left, or the kernel refuses.
    pub fn new(len: usize) -> Result<Self> {
        let page = usize::try_from(pages::base_page()).unwrap_or(4096);
        let mapped = len.max(1).checked_next_multiple_of(page).ok_or_else(|| {
            Error::new(Kind::Exhausted, "mmap", format!("{len} bytes exceed the address space"))
        })?;
        budget::admit(mapped as u64)?;
        // SAFETY: a new private mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|errno| failed("mmap", errno, format!("{mapped} bytes of anonymous memory")))?;
        let at = NonNull::new(at.cast::<u8>())
            .ok_or_else(|| Error::new(Kind::Io, "mmap", "the kernel gave no address"))?;
        let buffer = Self { at, len, mapped };
        // SAFETY: the range is one mapping of ours; keeping it from children changes nothing here.
        unsafe { madvise(at.as_ptr().cast(), mapped, Advice::LinuxDontFork) }
            .map_err(|errno| failed("madvise(MADV_DONTFORK)", errno, "keeping a buffer from children"))?;
        if mapped >= HUGE_FROM {
            // A kernel without huge pages refuses; base pages serve.
            // SAFETY: as above; it is advice on how to back the range.
            let _ = unsafe { madvise(at.as_ptr().cast(), mapped, Advice::LinuxHugepage) };
        }
        Ok(buffer)
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes of a mapping that lives as long as the value; nobody writes while it is shared.
        unsafe { slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none were.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for a driver that pins it; valid until the value is dropped.
    pub fn base(&self) -> NonNull<u8> {
        self.at
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length, and nothing borrowed from the value is left.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_page_aligned_zeroes_and_goes_away() {
        for len in [0, 1, 4096, 5 << 20] {
            let mut buffer = Buffer::new(len).unwrap();
            assert_eq!(buffer.base().addr().get() % usize::try_from(pages::base_page()).unwrap(), 0);
            assert_eq!(buffer.len(), len);
            assert!(buffer.as_slice().iter().all(|b| *b == 0));
            buffer.as_mut_slice().fill(7);
            assert!(buffer.as_slice().iter().all(|b| *b == 7));
            let at = buffer.base().as_ptr() as usize;
            drop(buffer);
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.lines().any(|line| line.starts_with(&format!("{at:x}-"))), "{len} is still mapped");
        }
    }

    #[test]
    fn more_than_there_is_is_refused_before_a_page_is_taken() {
        assert_eq!(Buffer::new(1 << 50).unwrap_err().kind(), Kind::Exhausted);
        assert_eq!(Buffer::new(usize::MAX).unwrap_err().kind(), Kind::Exhausted);
    }
}
