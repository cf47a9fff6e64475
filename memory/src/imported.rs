//! A peer's host arena, mapped read-only.

use crate::{
    errno::failed,
    layout::Layout,
    mapping::{FileId, Mapping},
    pages,
    seals::check_seals,
    words::MappedWords,
};
use flashboot_core::{ArenaSpec, ByteRange, Error, Kind, Observed, Result, ShardId, control::ControlBlock};
use rustix::{
    fs::fstat,
    io::Errno,
    mm::{Advice, madvise},
};
use std::{fmt, os::fd::OwnedFd, ptr::NonNull, time::Instant};

/// Bytes of one call: a few milliseconds' worth. A multiple of every page size in use.
const POPULATE_STEP: usize = 64 << 20;

/// What a locator says about the memory behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Payload bytes.
    pub payload: u64,
    /// Bytes of the allocation.
    pub capacity: u64,
    /// Number of progress words.
    pub shards: u32,
}

/// A read-only mapping of a peer's sealed memfd.
///
/// It stays valid whatever the peer does, its death included: the seals keep the file's size, and the
/// mapping keeps its pages. The peer may change the bytes at any time, so none is ever seen by reference:
/// they are copied, and then proved by their digests and the generation.
pub struct ImportedArena {
    mapping: Mapping,
    file: FileId,
    layout: Layout,
    control: ControlBlock<MappedWords>,
}

impl ImportedArena {
    /// Checks `fd` and maps it. The descriptor is closed afterwards; the mapping does not need it.
    ///
    /// # Errors
    /// [`Kind::Permission`] when it is no memfd or lacks a seal (see [`check_seals`]), [`Kind::Mismatch`] when
    /// its size or its control block differ from `expected`, [`Kind::Corrupt`] when the control block is none.
    pub fn map(fd: OwnedFd, expected: Expected) -> Result<Self> {
        // Seals first: after them the size cannot change any more.
        check_seals(&fd)?;
        let mismatch = |detail: String| Error::new(Kind::Mismatch, "import", detail);
        let stat = fstat(&fd).map_err(|errno| failed("fstat", errno, "reading the memfd's size"))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size != expected.capacity {
            return Err(mismatch(format!("the peer's memfd has {size} bytes, not {}", expected.capacity)));
        }
        let spec = ArenaSpec { payload: expected.payload, shards: expected.shards };
        let layout = Layout::new(spec, pages::base_page())?;
        let available = size.checked_sub(layout.control).filter(|left| *left >= layout.control_len);
        let Some(available) = available else {
            return Err(mismatch(format!(
                "{size} bytes do not hold a payload of {} bytes and {} progress words",
                expected.payload, expected.shards
            )));
        };
        let mapping = Mapping::new(&fd, size, false)?;
        let control_at = usize::try_from(layout.control).unwrap_or(usize::MAX);
        let base = NonNull::new(mapping.base().as_ptr().wrapping_add(control_at))
            .ok_or_else(|| Error::new(Kind::Io, "mmap", "a mapping that wraps around"))?;
        // SAFETY: `available` bytes from the page-aligned `control` to the file's end are mapped, F_SEAL_SHRINK
        // keeps them there, and the mapping is kept beside the words.
        let words = unsafe { MappedWords::new(base, available, false) };
        let (control, header) = ControlBlock::open(words, available)?;
        if (header.payload, header.shards) != (expected.payload, expected.shards) {
            return Err(mismatch(format!(
                "the peer's control block says {} bytes in {} shards, its locator {} in {}",
                header.payload, header.shards, expected.payload, expected.shards
            )));
        }
        let layout = Layout { capacity: size, ..layout };
        Ok(Self { file: FileId::of(&fd)?, mapping, layout, control })
    }

    /// Payload bytes.
    pub fn payload(&self) -> u64 {
        self.layout.payload
    }

    /// The file behind it.
    pub fn file_id(&self) -> FileId {
        self.file
    }

    /// One look at the peer's control block: see [`ControlBlock::observe`] for what it proves about bytes
    /// copied before it and bytes that may be copied after it.
    pub fn observe(&self, shard: ShardId) -> Observed {
        self.control.observe(shard)
    }

    /// Fills this process's page table for the payload, so that the first copy takes no faults; returns
    /// whether it got through before `deadline`. What is left over, the copies fault in as they go, and so
    /// they do on a kernel before 5.14. Takes no memory of its own but the page table's; one thread, since
    /// several would wait for each other.
    pub fn populate(&self, deadline: Instant) -> bool {
        self.populate_range(ByteRange::new(0, self.layout.payload), deadline)
    }

    /// The same for `range` of the payload, as far as there is one, rounded to pages: ahead of who copies or pins it. Ranges
    /// that do not share a page table may be filled by several threads at once.
    pub fn populate_range(&self, range: ByteRange, deadline: Instant) -> bool {
        let page = usize::try_from(pages::base_page()).unwrap_or(1);
        let at = |bytes: u64| usize::try_from(bytes.min(self.layout.payload)).unwrap_or(0);
        let (first, len) = (at(range.start) / page * page, at(range.end).min(self.mapping.len()));
        for start in (first..len).step_by(POPULATE_STEP) {
            if Instant::now() >= deadline {
                return false;
            }
            let at = self.base().as_ptr().wrapping_add(start);
            let step = POPULATE_STEP.min(len.saturating_sub(start)).next_multiple_of(page);
            // SAFETY: part of one mapping of ours (the payload's last page is whole); populating for reading
            // changes no byte.
            match unsafe { madvise(at.cast(), step, Advice::LinuxPopulateRead) } {
                Ok(()) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    tracing::debug!(%errno, start, "MADV_POPULATE_READ of a peer's arena");
                    return false;
                }
            }
        }
        true
    }

    /// Copies payload bytes from `offset` on into `to`. The peer may change them meanwhile: what is copied may be torn.
    ///
    /// # Errors
    /// [`Kind::Invalid`] past the payload.
    pub fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let len = to.len();
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= self.layout.payload);
        let (Ok(at), true) = (usize::try_from(offset), inside) else {
            let payload = self.layout.payload;
            let detail = format!("{len} bytes at {offset} are not within a payload of {payload} bytes");
            return Err(Error::new(Kind::Invalid, "copy_out", detail));
        };
        let from = self.base().as_ptr().wrapping_add(at).cast_const();
        // SAFETY: the bytes were checked to be inside the payload, which the mapping holds; `to` is memory of ours that
        // nothing else names. The peer may change the source meanwhile: no reference to it exists, and what is torn is
        // found by its digests.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) };
        Ok(())
    }

    /// The first byte of the mapping, to copy from. The peer may change bytes at any time: make no reference.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }
}

impl fmt::Debug for ImportedArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportedArena").field("payload", &self.layout.payload).finish_non_exhaustive()
    }
}
