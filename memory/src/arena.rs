//! The host arena: one sealed memfd, mapped once, writable by its owner alone.

use crate::{
    access::Access,
    budget,
    config::{ArenaReport, HostArenaConfig, NumaReport, PageKind},
    errno::failed,
    layout::Layout,
    mapping::{FileId, Mapping},
    numa, pages, prefault, seals,
    words::MappedWords,
};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, ByteSize, Error, Generation, Kind, Location, Observed, Result, ShardId,
    claims::Claim,
    control::{ControlBlock, Header},
};
use rustix::{
    fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create},
    io::Errno,
    mm::{Advice, madvise},
};
use std::{
    fmt,
    num::NonZeroU64,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

/// As it shows in `/proc/PID/maps`.
const NAME: &str = "flashboot-arena";

/// Host memory that holds one rank image and that peers map read-only.
///
/// The memfd is sealed against shrinking, growing and new writable mappings, and the owner's mapping is not
/// inherited by forked children: whoever has the descriptor can read, and nobody but this process can write.
pub struct HostArena {
    memory: Arc<HostMemory>,
}

/// What an arena and the jobs on it own together. The mapping goes when the last of them does.
pub(crate) struct HostMemory {
    mapping: Mapping,
    fd: OwnedFd,
    file: FileId,
    layout: Layout,
    shards: u32,
    control: ControlBlock<MappedWords>,
    access: Access,
    location: Location,
}

/// Exclusive ownership of a range of an arena's payload; it keeps the arena mapped.
pub struct OwnedRange {
    // The claim goes first: the range is free before the memory can go.
    claim: Claim,
    memory: Arc<HostMemory>,
}

/// A range of an arena's payload that somebody reads where it lies, for as long as this lives: the memory stays mapped, and
/// writers of this process are refused.
pub struct SharedRange {
    range: ByteRange,
    memory: Arc<HostMemory>,
}

impl HostArena {
    /// Makes an arena for `spec`: retired, without progress, every payload byte zero. Blocks for as long as
    /// the kernel needs to reserve or fault in the pages; the report has the times.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a shard count or NUMA node that cannot be, [`Kind::Exhausted`] when there is not
    /// enough memory (found out before a page is taken, where the kernel would kill a process),
    /// [`Kind::Unavailable`] for [`PageKind::Huge`] without enough huge pages or a kernel without
    /// `F_SEAL_FUTURE_WRITE`.
    pub fn create(spec: ArenaSpec, config: &HostArenaConfig) -> Result<(Arc<Self>, ArenaReport)> {
        let base_page = pages::base_page();
        let base = |why: String| Self::make(spec, config, Pages { bytes: base_page, huge: false, why });
        let (arena, report) = match (config.pages, huge_pages(spec, config.numa_node)) {
            (PageKind::Base, _) => base("asked for".into()),
            (PageKind::Huge, found) => {
                let bytes = found?;
                Self::make(spec, config, Pages { bytes, huge: true, why: "asked for".into() })
            }
            (PageKind::Auto, Ok(bytes)) if spec.payload < bytes => {
                base(format!("the payload is smaller than a huge page of {}", ByteSize(bytes)))
            }
            (PageKind::Auto, Ok(bytes)) => {
                let why = "enough huge pages are free".to_owned();
                match Self::make(spec, config, Pages { bytes, huge: true, why }) {
                    // Someone else took them meanwhile, or a control group's limit forbids them.
                    Err(e) if e.kind() == Kind::Exhausted => base(format!("huge pages failed: {e}")),
                    made => made,
                }
            }
            (PageKind::Auto, Err(e)) => base(e.to_string()),
        }?;
        for warning in &report.warnings {
            tracing::warn!(capacity = report.capacity, "{warning}");
        }
        tracing::debug!(%report, "made a host arena");
        Ok((arena, report))
    }

    fn make(spec: ArenaSpec, config: &HostArenaConfig, pages: Pages) -> Result<(Arc<Self>, ArenaReport)> {
        let layout = Layout::new(spec, pages.bytes)?;
        if !pages.huge {
            budget::admit(layout.capacity)?;
        }
        let fd = make_memfd(pages.huge)?;
        ftruncate(&fd, layout.capacity).map_err(|errno| {
            failed("ftruncate", errno, format!("sizing a memfd to {} bytes", layout.capacity))
        })?;
        let mapping = Mapping::new(&fd, layout.capacity, true)?;
        // SAFETY: the range is one mapping of ours; keeping it from children changes nothing here.
        unsafe { madvise(mapping.base().as_ptr().cast(), mapping.len(), Advice::LinuxDontFork) }
            .map_err(|errno| failed("madvise(MADV_DONTFORK)", errno, "keeping the arena from children"))?;
        let numa = match config.numa_node {
            Some(node) => numa::bind(&mapping, node)?,
            None => NumaReport::NotAsked,
        };
        let (reserve, prefault) = take_pages(&fd, &mapping, config.prefault_threads, &pages)?;
        seals::seal(&fd)?;

        let base = NonNull::new(mapping.base().as_ptr().wrapping_add(offset(layout.control)?))
            .ok_or_else(|| Error::new(Kind::Io, "mmap", "a mapping that wraps around"))?;
        // SAFETY: the layout puts control_len bytes at `control`, page-aligned, inside the writable mapping,
        // which HostMemory keeps beside the words.
        let words = unsafe { MappedWords::new(base, layout.control_len, true) };
        let control = ControlBlock::initialise(words, Header { shards: spec.shards, payload: spec.payload });
        let bound = match numa {
            NumaReport::Bound(node) => Some(node),
            _ => None,
        };
        let mut warnings = Vec::new();
        if let NumaReport::Refused { node, why } = &numa {
            warnings.push(format!("the arena is not bound to NUMA node {node}: {why}"));
        }
        let report = ArenaReport {
            huge: pages.huge,
            page_bytes: pages.bytes,
            why: pages.why,
            capacity: layout.capacity,
            numa,
            reserve,
            prefault,
            warnings,
        };
        let memory = HostMemory {
            file: FileId::of(&fd)?,
            mapping,
            fd,
            layout,
            shards: spec.shards,
            control,
            access: Access::default(),
            location: Location::Host { boot_id: pages::boot_id()?, numa_node: bound },
        };
        Ok((Arc::new(Self { memory: Arc::new(memory) }), report))
    }

    /// Owns `range` of the payload until the value is dropped, for writers that are not a method of the
    /// arena (a copy engine, a NIC, a socket). Waits for `copy_out`s of the range that are under way.
    ///
    /// # Errors
    /// [`Kind::Invalid`] past the payload, [`Kind::Busy`] when any byte of it is owned.
    pub fn own(&self, range: ByteRange) -> Result<OwnedRange> {
        self.memory.within("claim", range.start, range.len())?;
        Ok(OwnedRange { claim: self.memory.access.write(range)?, memory: Arc::clone(&self.memory) })
    }

    /// Lets somebody read `range` of the payload where it lies, for as long as they like: a framework's tensors. Copies out and
    /// peers' reads go on; writers are refused with [`Kind::Busy`].
    ///
    /// # Errors
    /// [`Kind::Invalid`] past the payload, [`Kind::Busy`] when a writer has any byte of it.
    pub fn share(&self, range: ByteRange) -> Result<SharedRange> {
        let range = self.memory.within("share", range.start, range.len())?;
        self.memory.access.share(range)?;
        Ok(SharedRange { range, memory: Arc::clone(&self.memory) })
    }

    /// Whether no byte of `range` is owned by a writer.
    pub fn is_free(&self, range: ByteRange) -> bool {
        self.memory.access.is_free(range)
    }

    /// Has the system copy the first bytes of `range` of the payload into a socket, by one `send` that raises no SIGPIPE, and
    /// gives how many it took. Nothing keeps a writer off the bytes: what is sent may be torn, as what an importer reads
    /// may be. Blocks as the socket does.
    ///
    /// # Errors
    /// The system's; [`InvalidInput`](std::io::ErrorKind::InvalidInput) past the payload.
    pub fn send(&self, socket: impl AsFd, range: ByteRange) -> std::io::Result<usize> {
        let inside = self.memory.within("send", range.start, range.len());
        let (Ok(range), Ok(len)) = (inside, usize::try_from(range.len())) else {
            return Err(std::io::ErrorKind::InvalidInput.into());
        };
        let socket = socket.as_fd().as_raw_fd();
        // SAFETY: `within` checked the bytes, which `self` keeps mapped, and the descriptor is borrowed for the call. Only
        // the kernel reads the bytes, so that a write at the same time tears them and nothing else.
        let sent = unsafe { libc::send(socket, self.memory.at(range.start).cast(), len, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| std::io::Error::last_os_error())
    }

    /// Where the layout put what.
    pub fn layout(&self) -> Layout {
        self.memory.layout
    }

    /// The file behind it.
    pub fn file_id(&self) -> FileId {
        self.memory.file
    }

    /// The first byte of the mapping, for transports that register memory. Reading or writing through it
    /// is up to `unsafe` code that owns the range ([`own`](Self::own)).
    pub fn base(&self) -> NonNull<u8> {
        self.memory.mapping.base()
    }
}

impl AsFd for HostArena {
    /// The sealed memfd. Whoever gets it can read the arena and cannot write it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.fd.as_fd()
    }
}

impl fmt::Debug for HostArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostArena")
            .field("payload", &self.memory.layout.payload)
            .field("shards", &self.memory.shards)
            .field("location", &self.memory.location)
            .finish_non_exhaustive()
    }
}

impl HostMemory {
    fn within(&self, op: &'static str, offset: u64, len: u64) -> Result<ByteRange> {
        let payload = self.layout.payload;
        match offset.checked_add(len) {
            Some(end) if end <= payload => Ok(ByteRange::new(offset, end)),
            _ => Err(Error::new(
                Kind::Invalid,
                op,
                format!("{len} bytes at {offset} are not within a payload of {payload} bytes"),
            )),
        }
    }

    /// The address of payload byte `offset`, which the caller has checked.
    fn at(&self, offset: u64) -> *mut u8 {
        // Checked offsets are below the mapping's length, which is a usize.
        self.mapping.base().as_ptr().wrapping_add(usize::try_from(offset).unwrap_or(0))
    }
}

// SAFETY: the mapping is made once with the length of `capacity` and unmapped when the last Arc of
// HostMemory goes, which the arena holds; `Layout` keeps payload and control block apart; F_SEAL_SHRINK,
// F_SEAL_FUTURE_WRITE and MADV_DONTFORK keep other processes from shrinking or writing it; every method
// checks its range with `within`.
unsafe impl Arena for HostArena {
    fn payload(&self) -> u64 {
        self.memory.layout.payload
    }

    fn capacity(&self) -> u64 {
        self.memory.layout.capacity
    }

    fn shards(&self) -> u32 {
        self.memory.shards
    }

    fn location(&self) -> Location {
        self.memory.location.clone()
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        let range = self.memory.within("copy_in", offset, from.len() as u64)?;
        let _claim = self.memory.access.write(range)?;
        // SAFETY: `within` checked the bytes; the claim keeps this process's other readers and writers out,
        // the seals other processes; `from` is a slice, and no slice of the arena exists without a claim.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.memory.at(offset), from.len()) };
        Ok(())
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let range = self.memory.within("copy_out", offset, to.len() as u64)?;
        let _read = self.memory.access.read(range)?;
        // SAFETY: `within` checked the bytes; the read keeps this process's writers out until it drops, the
        // seals other processes; `to` is a unique slice, and none of the arena exists without a claim.
        unsafe { std::ptr::copy_nonoverlapping(self.memory.at(offset), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn fill(&self, range: ByteRange, byte: u8) -> Result<()> {
        let range = self.memory.within("fill", range.start, range.len())?;
        let _claim = self.memory.access.write(range)?;
        // SAFETY: as in `copy_in`.
        unsafe { std::ptr::write_bytes(self.memory.at(range.start), byte, offset(range.len())?) };
        Ok(())
    }

    fn retire(&self) {
        self.memory.control.retire();
    }

    fn begin(&self, generation: Generation) {
        self.memory.control.begin(generation);
    }

    fn publish(&self, shard: ShardId, bytes: u64) -> Result<()> {
        self.memory.control.publish(shard, bytes)
    }

    fn observe(&self, shard: ShardId) -> Observed {
        self.memory.control.observe(shard)
    }
}

impl SharedRange {
    /// The bytes.
    pub fn range(&self) -> ByteRange {
        self.range
    }

    /// The address of the range's first byte; valid, for as many bytes as the range has, until the value is dropped.
    pub fn as_ptr(&self) -> *const u8 {
        self.memory.at(self.range.start)
    }
}

impl Drop for SharedRange {
    fn drop(&mut self) {
        self.memory.access.unshare(self.range);
    }
}

impl fmt::Debug for SharedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedRange").field(&self.range).finish()
    }
}

impl OwnedRange {
    /// The bytes owned.
    pub fn range(&self) -> ByteRange {
        self.claim.range()
    }

    /// Payload bytes of the whole arena.
    pub fn payload(&self) -> u64 {
        self.memory.layout.payload
    }

    /// The address of the range's first byte; valid, for as many bytes as the range has, until the value is
    /// dropped.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.memory.at(self.range().start)
    }

    /// The bytes, to be received or read into in place.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = usize::try_from(self.range().len()).unwrap_or(0);
        // SAFETY: `own` checked the range, and the Arc keeps it mapped. The claim keeps this process's other
        // readers and writers out, the seals other processes' writes; `&mut self` makes the slice unique.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), len) }
    }

    pub(crate) fn file_id(&self) -> FileId {
        self.memory.file
    }
}

impl OwnedRange {
    /// Cuts the range into parts of `step` bytes (the last may be shorter), each for a writer of its own: several sockets
    /// or threads that land bytes in place at once. The range is free again when the last part is dropped.
    ///
    /// An empty range has no parts and is free at once.
    pub fn into_parts(self, step: NonZeroU64) -> Vec<OwnedPart> {
        let whole = self.range();
        let owner = Arc::new(self);
        let mut parts = Vec::new();
        let mut start = whole.start;
        while start < whole.end {
            let end = start.saturating_add(step.get()).min(whole.end);
            parts.push(OwnedPart { owner: Arc::clone(&owner), range: ByteRange::new(start, end) });
            start = end;
        }
        parts
    }
}

/// Exclusive ownership of a part of an [`OwnedRange`] that was cut: no two parts share a byte.
pub struct OwnedPart {
    owner: Arc<OwnedRange>,
    range: ByteRange,
}

impl OwnedPart {
    /// The bytes owned.
    pub fn range(&self) -> ByteRange {
        self.range
    }

    /// The bytes, to be received or read into in place.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = usize::try_from(self.range.len()).unwrap_or(0);
        let at = self.owner.memory.at(self.range.start);
        // SAFETY: the part lies within the owned range, which `owner` keeps mapped, and keeps this process's other
        // readers and writers out of by its claim, other processes' writes by the seals. `into_parts` gives each byte to
        // one part, parts cannot be copied, nobody reaches the `OwnedRange` behind them any more, and `&mut self` makes
        // the slice unique.
        unsafe { std::slice::from_raw_parts_mut(at, len) }
    }
}

impl fmt::Debug for OwnedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedPart").field(&self.range).finish()
    }
}

impl fmt::Debug for OwnedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedRange").field(&self.range()).finish()
    }
}

struct Pages {
    bytes: u64,
    huge: bool,
    why: String,
}

fn offset(n: u64) -> Result<usize> {
    usize::try_from(n)
        .map_err(|_| Error::new(Kind::Exhausted, "mmap", format!("{n} bytes exceed the address space")))
}

/// A sealable memfd that nobody can execute. Kernels before 6.3 do not know the second wish.
fn make_memfd(huge: bool) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let flags = if huge { flags | MemfdFlags::HUGETLB } else { flags };
    memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|errno| if errno == Errno::INVAL { memfd_create(NAME, flags) } else { Err(errno) })
        .map_err(|errno| failed("memfd_create", errno, "making an arena's memfd"))
}

/// The size of the system's huge pages when enough of them are there for `spec`.
fn huge_pages(spec: ArenaSpec, node: Option<u32>) -> Result<u64> {
    let unavailable = |detail: String| Error::new(Kind::Unavailable, "huge pages", detail);
    let Some(found) = pages::HugePages::read(node) else {
        return Err(unavailable("this kernel has no huge pages".into())
            .with_remedy("use base pages, or a kernel with CONFIG_HUGETLBFS"));
    };
    let needed = Layout::new(spec, found.bytes)?.capacity / found.bytes;
    if found.available < needed {
        let whole = found.total.saturating_add(needed - found.available);
        return Err(unavailable(format!(
            "{needed} huge pages of {} are needed, {} are free",
            ByteSize(found.bytes),
            found.available
        ))
        .with_remedy(format!("reserve them: sysctl vm.nr_hugepages={whole}")));
    }
    Ok(found.bytes)
}

/// Makes sure that no later touch can fail: faults the pages in, or else reserves them.
fn take_pages(
    fd: &OwnedFd,
    mapping: &Mapping,
    threads: usize,
    pages: &Pages,
) -> Result<(Duration, Option<Duration>)> {
    let started = Instant::now();
    if threads == 0 {
        reserve(fd, mapping.len() as u64)?;
        return Ok((started.elapsed(), None));
    }
    if prefault::populate(mapping, threads)?.is_ok() {
        return Ok((Duration::ZERO, Some(started.elapsed())));
    }
    reserve(fd, mapping.len() as u64)?;
    let reserved = started.elapsed();
    prefault::touch(mapping, threads, offset(pages.bytes)?);
    Ok((reserved, Some(started.elapsed().saturating_sub(reserved))))
}

fn reserve(fd: &OwnedFd, len: u64) -> Result<()> {
    loop {
        match fallocate(fd, FallocateFlags::empty(), 0, len) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(failed("fallocate", errno, format!("reserving {len} bytes of memory"))
                    .with_remedy("free memory (or huge pages), or raise the container's limit"));
            }
        }
    }
}
