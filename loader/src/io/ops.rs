//! The system calls of reading, as a seam: tests put faults in between.

use super::SourceFile;
use flashboot_core::Result;
use std::{fmt, io};

/// One read as it is asked of the system.
#[derive(Debug, Clone, Copy)]
pub struct Call<'f> {
    /// Of which file.
    pub file: &'f SourceFile,
    /// From which byte on.
    pub offset: u64,
    /// How many.
    pub len: usize,
    /// Past the page cache.
    pub direct: bool,
}

/// What reading asks of the system. Every method has the system's own answer; a test replaces one.
pub trait Ops: fmt::Debug + Send + Sync {
    /// One `pread`.
    fn pread(&self, call: &Call<'_>, into: &mut [u8]) -> io::Result<usize> {
        rustix::io::pread(call.file.descriptor(call.direct), into, call.offset).map_err(Into::into)
    }

    /// What io_uring said of a read.
    fn completed(&self, _call: &Call<'_>, said: io::Result<usize>) -> io::Result<usize> {
        said
    }

    /// Whether io_uring may be used.
    ///
    /// # Errors
    /// Why not.
    fn may_ring(&self) -> Result<()> {
        Ok(())
    }

    /// Pages of the range that are in the page cache, where the system says.
    fn cached(&self, call: &Call<'_>) -> Option<u64> {
        flashboot_memory::cached(call.file.descriptor(false), call.offset, call.len as u64)
    }

    /// Drops the range from the page cache.
    fn uncache(&self, call: &Call<'_>) {
        flashboot_memory::uncache(call.file.descriptor(false), call.offset, call.len as u64);
    }
}

/// The system itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct System;

impl Ops for System {}
