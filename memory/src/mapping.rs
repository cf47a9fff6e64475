//! One mapping of one file, unmapped when dropped.

use crate::errno::failed;
use flashboot_core::{Error, Kind, Result};
use rustix::{
    fs::fstat,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use std::{os::fd::AsFd, ptr::NonNull};

/// What makes two descriptors the same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(fd: impl AsFd) -> Result<Self> {
        let stat = fstat(fd).map_err(|errno| failed("fstat", errno, "reading the memfd's identity"))?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// A shared mapping of a whole file.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; who may touch which byte when is for the
// owner of the value to say (`Access`, and the control block's atomics).
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives addresses only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` shared, writable or read-only.
    pub(crate) fn new(fd: impl AsFd, len: u64, writable: bool) -> Result<Self> {
        let too_long =
            || Error::new(Kind::Exhausted, "mmap", format!("{len} bytes exceed the address space"));
        let len = usize::try_from(len).map_err(|_| too_long())?;
        isize::try_from(len).map_err(|_| too_long())?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a null hint without MAP_FIXED replaces no mapping of ours.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }
            .map_err(|errno| failed("mmap", errno, format!("mapping {len} bytes of a memfd")))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::new(Kind::Io, "mmap", "the kernel gave the null address"))?;
        Ok(Self { base, len })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of one mmap of ours, and nothing that keeps an address outlives
        // the value (arenas hold it for as long as they, and the jobs on them, live).
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(errno) = unmapped {
            tracing::error!(%errno, len = self.len, "munmap of an arena failed");
        }
    }
}
