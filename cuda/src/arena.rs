//! An arena in GPU memory: one `cuMemCreate` for payload and control block, exportable as a file descriptor and,
//! where the machine can, as a fabric handle.

mod allocate;
mod attach;

use crate::{
    Context, Device,
    bounce::Bounce,
    hash::{self, Hasher},
    ops::{Access, handle_type},
    stream::{Event, Stream},
    vmm::Mapping,
    words::DeviceWords,
};
use allocate::allocate;
pub use allocate::{CudaArenaConfig, Dropped, Want};
pub use attach::Attach;
use flashboot_core::{
    Arena, ArenaSpec, BlockDigest, ByteRange, Error, Generation, Kind, Location, MAX_SHARDS, Observed,
    Result, ShardId,
    claims::{Claim, Claims},
    control::{self, ControlBlock, Header, Words as _},
    digest::{self, Piece},
};
use std::{
    any::Any,
    fs,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES`: no flush is ever needed.
const ORDERED_FOR_ALL: i32 = 200;

/// Bytes hashed at once: what fits a part of the scratch memory.
const DIGESTS_AT_ONCE: u64 = 2 << 30;

/// How an arena was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaReport {
    /// Bytes of the allocation, for the locator.
    pub capacity: u64,
    /// The allocation's granularity.
    pub granularity: u64,
    /// It can be exported as a file descriptor.
    pub posix_fd: bool,
    /// It can be exported as a fabric handle.
    pub fabric: bool,
    /// A NIC can reach it.
    pub gpu_direct_rdma: bool,
    /// What was left out.
    pub dropped: Vec<Dropped>,
    /// Time to create the memory.
    pub create: Duration,
    /// Time to map it and to write the control block.
    pub map: Duration,
}

/// An arena in the memory of one GPU. The fields' order is the order of teardown: what uses the mapping first.
#[derive(Debug)]
pub struct CudaArena {
    control: ControlBlock<DeviceWords>,
    words: DeviceWords,
    /// The same words where peers of this host read them without the GPU.
    host_words: Mutex<Option<Arc<dyn Arena>>>,
    bounce: Mutex<Option<Bounce>>,
    hasher: Hasher,
    mapping: Mapping,
    claims: Claims,
    half: usize,
    spec: ArenaSpec,
    location: Location,
    report: ArenaReport,
    /// What is not ours to do, as another process owns the memory; `None`: it is ours.
    attached: Option<Attach>,
    /// Dropped after the mapping.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl CudaArena {
    /// Makes an arena on `device`, retired and without progress. Its payload's content is undefined until it is
    /// written.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for impossible numbers, [`Kind::Exhausted`] when the GPU has not that much free memory, and
    /// the driver's refusal of what [`Want::Must`] be had.
    pub fn create(
        device: &Device,
        spec: ArenaSpec,
        config: &CudaArenaConfig,
    ) -> Result<(Arc<Self>, ArenaReport)> {
        Self::create_in(&Context::open(device)?, spec, config)
    }

    /// The same in a context at hand.
    pub fn create_in(
        context: &Context,
        spec: ArenaSpec,
        config: &CudaArenaConfig,
    ) -> Result<(Arc<Self>, ArenaReport)> {
        let began = Instant::now();
        let needed = needed(spec)?;
        let mut dropped = Vec::new();
        let (memory, kind, granularity, capacity) = allocate(context, needed, config, &mut dropped)?;
        let create = began.elapsed();
        let mapping = Mapping::new(memory, Access::ReadWrite)?;
        let offset = control_offset(spec.payload)?;
        let at = mapping.range("control block", offset, control::size(spec.shards))?;
        let words = DeviceWords::new(context, at, control::size(spec.shards))?;
        let header = Header { shards: spec.shards, payload: spec.payload };
        let control = ControlBlock::initialise(words.clone(), header);
        words.fence();
        words.check()?;
        let report = ArenaReport {
            capacity,
            granularity,
            posix_fd: kind.handle_types & handle_type::POSIX_FD != 0,
            fabric: kind.handle_types & handle_type::FABRIC != 0,
            gpu_direct_rdma: kind.gpu_direct_rdma,
            dropped,
            create,
            map: began.elapsed().saturating_sub(create),
        };
        let arena = Self::over(mapping, (control, words), spec, config.half(), report.clone())?;
        Ok((Arc::new(arena), report))
    }

    /// The arena whose words these are in `mapping`.
    fn over(
        mapping: Mapping,
        (control, words): (ControlBlock<DeviceWords>, DeviceWords),
        spec: ArenaSpec,
        half: usize,
        report: ArenaReport,
    ) -> Result<Self> {
        let uuid = mapping.context().device().uuid().to_owned();
        Ok(Self {
            control,
            words,
            host_words: Mutex::new(None),
            bounce: Mutex::new(None),
            hasher: Hasher::new(mapping.context()),
            claims: Claims::default(),
            half,
            spec,
            location: Location::Gpu { boot_id: boot_id()?, uuid },
            report,
            attached: None,
            _keep: None,
            mapping,
        })
    }

    /// `arena` as what it is, if it is one of these.
    pub fn from_arena(arena: &Arc<dyn Arena>) -> Option<Arc<Self>> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(arena) as _;
        any.downcast().ok()
    }

    /// The words of this arena's control block in host memory too: in an arena without payload, which `make` makes at
    /// the first call. It is retired before this one, and published to before this one, so that it never shows a
    /// filling that is gone nor holds back one that is there.
    ///
    /// # Errors
    /// Those of `make`; [`Kind::Invalid`] when it has another number of shards.
    pub fn host_words(&self, make: impl FnOnce() -> Result<Arc<dyn Arena>>) -> Result<Arc<dyn Arena>> {
        let mut host = self.lock_words();
        if let Some(words) = &*host {
            return Ok(Arc::clone(words));
        }
        let words = make()?;
        if words.shards() != self.spec.shards {
            let detail = format!("{} words for {} shards", words.shards(), self.spec.shards);
            return Err(Error::new(Kind::Invalid, "host words", detail));
        }
        if let Some(generation) = self.control.observe(ShardId(0)).generation {
            words.begin(generation);
            for shard in (0..self.spec.shards).map(ShardId) {
                words.publish(shard, self.control.observe(shard).progress)?;
            }
        }
        Ok(Arc::clone(host.insert(words)))
    }

    /// Whether its words are also in host memory; the lock keeps both in step.
    fn lock_words(&self) -> MutexGuard<'_, Option<Arc<dyn Arena>>> {
        self.host_words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is another process's memory, to be read where it is: the driver refuses writes, and a kernel that writes
    /// loses the context.
    pub fn is_read_only(&self) -> bool {
        self.attached == Some(Attach::Read)
    }

    /// The context it lives in.
    pub fn context(&self) -> &Context {
        self.mapping.context()
    }

    /// How it was made.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }

    /// The address of its first byte, for kernels and frameworks in this process.
    pub fn device_address(&self) -> u64 {
        self.mapping.at()
    }

    /// A descriptor for a reader on this host. It is a **write** capability, and keeps the memory until it and
    /// everything imported from it are gone.
    pub fn export_fd(&self) -> Result<OwnedFd> {
        if !self.report.posix_fd {
            return Err(self.without("POSIX_FD"));
        }
        self.mapping.memory().export_fd()
    }

    /// A handle for readers in the same NVLink domain. It is a **write** capability.
    pub fn export_fabric(&self) -> Result<Box<[u8; 64]>> {
        if !self.report.fabric {
            return Err(self.without("FABRIC"));
        }
        self.mapping.memory().export_fabric()
    }

    /// The whole allocation as a dma-buf, for a NIC's driver.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where the GPU or the host's kernel has none.
    pub fn dma_buf(&self) -> Result<OwnedFd> {
        if !self.context().device().features().dma_buf {
            return Err(Error::new(Kind::Unavailable, "dma-buf", "this GPU's driver exports no dma-buf")
                .with_remedy("use the open kernel modules on Linux 5.12 or later, or nvidia-peermem"));
        }
        self.mapping.dma_buf()
    }

    /// Makes what a NIC has written to this GPU's memory visible to every GPU. Without it a kernel or a copy engine may still
    /// read the old bytes, although the NIC has reported its end. Does nothing where the hardware keeps that order by
    /// itself. Never run on hardware.
    pub fn settle_nic_writes(&self) -> Result<()> {
        if self.context().device().nic_writes_ordered()? >= ORDERED_FOR_ALL {
            return Ok(());
        }
        self.context().call(|ops| ops.flush_nic_writes())
    }

    /// The values of the blocks of `range`, found on the GPU, or through the host where the kernel does not work.
    /// Blocks until they are there.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a range that is no whole blocks, [`Kind::Busy`] while a pull owns a byte of it.
    pub fn digests(&self, range: ByteRange, block: u64) -> Result<Vec<BlockDigest>> {
        hash::check_blocks(self.spec.payload, range, block)?;
        if range.is_empty() {
            return Ok(Vec::new());
        }
        self.with_bounce(|bounce| {
            let claim = self.claims.claim(range)?;
            self.digests_with(bounce, &claim, block)
        })
    }

    /// The same of a range that the caller has claimed.
    pub(crate) fn digests_claimed(&self, claim: &Claim, block: u64) -> Result<Vec<BlockDigest>> {
        hash::check_blocks(self.spec.payload, claim.range(), block)?;
        if claim.range().is_empty() {
            return Ok(Vec::new());
        }
        self.with_bounce(|bounce| self.digests_with(bounce, claim, block))
    }

    fn digests_with(&self, bounce: &mut Bounce, claim: &Claim, block: u64) -> Result<Vec<BlockDigest>> {
        let range = claim.range();
        let at = self.mapping.at();
        let window = (DIGESTS_AT_ONCE / block).max(1) * block;
        let mut digests = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let part = ByteRange::new(start, start.saturating_add(window).min(range.end));
            // SAFETY: the claim keeps writers off, `self` keeps the memory, until the stream has passed below.
            let launched =
                unsafe { self.hasher.launch(bounce.stream(), at, self.spec.payload, part, block) }?;
            digests.extend(match launched {
                Some(launched) => bounce.stream().synchronize().map(|()| launched.digests())?,
                None => self.digests_through(bounce, part, block)?,
            });
            start = part.end;
        }
        Ok(digests)
    }

    /// As [`digests`](Self::digests), on the GPU only and without looking at the values: what the hash of `range` took,
    /// by the GPU's own events. For benches.
    ///
    /// # Errors
    /// As for [`digests`](Self::digests); [`Kind::Unavailable`] where the kernel is refused.
    pub fn measure_hash(&self, range: ByteRange, block: u64) -> Result<Duration> {
        hash::check_blocks(self.spec.payload, range, block)?;
        let stream = Stream::new(self.context())?;
        let (begin, end) = (Event::timed(self.context())?, Event::timed(self.context())?);
        let _claim = self.claims.claim(range)?;
        begin.record(&stream)?;
        // SAFETY: the claim keeps writers off, `self` keeps the memory, until the stream has passed below.
        let launched =
            unsafe { self.hasher.launch(&stream, self.mapping.at(), self.spec.payload, range, block) };
        let marked = end.record(&stream);
        stream.synchronize()?;
        if launched?.is_none() {
            let refused = self.hasher.refused().map_or_else(|| "such blocks".to_owned(), ToString::to_string);
            return Err(hash::not_here(&refused));
        }
        marked?;
        end.elapsed_since(&begin)
    }

    /// Why verification goes through the host; `None` while the GPU does it.
    pub fn hash_fallback(&self) -> Option<&Error> {
        self.hasher.refused()
    }

    pub(crate) fn hasher(&self) -> &Hasher {
        &self.hasher
    }

    pub(crate) fn claim(&self, range: ByteRange) -> Result<Claim> {
        self.inside("pull", range)?;
        self.may_write()?;
        self.words.check()?;
        self.claims.claim(range)
    }

    /// Hashes through the host a range that the caller has claimed.
    pub(crate) fn digests_on_host(&self, range: ByteRange, block: u64) -> Result<Vec<BlockDigest>> {
        self.with_bounce(|bounce| self.digests_through(bounce, range, block))
    }

    fn digests_through(&self, bounce: &mut Bounce, range: ByteRange, block: u64) -> Result<Vec<BlockDigest>> {
        let payload = self.spec.payload;
        let mut digests = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let whole = ByteRange::new(start, start.saturating_add(block).min(range.end));
            let mut pieces: Vec<Piece> = Vec::new();
            let step = usize::try_from(block).map_or(self.half, |block| block.min(self.half));
            let mut at = start;
            let from = self.mapping.range("hash", start, whole.len())?;
            // SAFETY: the range is inside the mapping, which `self` keeps.
            unsafe {
                bounce.download(from, whole.len(), step, |bytes| {
                    pieces.push(digest::piece(payload, at, bytes));
                    at += bytes.len() as u64;
                })
            }?;
            digests.extend(digest::merge(payload, whole, &pieces));
            start = whole.end;
        }
        Ok(digests)
    }

    fn with_bounce<T>(&self, work: impl FnOnce(&mut Bounce) -> Result<T>) -> Result<T> {
        let mut bounce = self.bounce.lock().unwrap_or_else(PoisonError::into_inner);
        if bounce.is_none() {
            *bounce = Some(Bounce::new(self.context(), self.half)?);
        }
        match &mut *bounce {
            Some(bounce) => work(bounce),
            None => Err(Error::new(Kind::Exhausted, "bounce", "no pinned memory")),
        }
    }

    /// The address of payload bytes.
    pub(crate) fn inside(&self, op: &'static str, range: ByteRange) -> Result<u64> {
        if range.end > self.spec.payload {
            return Err(Error::new(
                Kind::Invalid,
                op,
                format!("bytes {range} of a payload of {} bytes", self.spec.payload),
            ));
        }
        Ok(self.mapping.at() + range.start)
    }

    fn without(&self, what: &'static str) -> Error {
        let reason = self.report.dropped.iter().find(|dropped| dropped.what == what);
        let reason = reason.map_or("it was not asked for", |dropped| &dropped.reason);
        Error::new(Kind::Unavailable, "export", format!("the arena has no {what} handle: {reason}"))
    }
}

fn range_of(op: &'static str, offset: u64, len: usize) -> Result<ByteRange> {
    let end = offset.checked_add(len as u64);
    end.map(|end| ByteRange::new(offset, end))
        .ok_or_else(|| Error::new(Kind::Invalid, op, format!("{len} bytes from {offset} on end past 2^64")))
}

// SAFETY: the mapping lives until the value is dropped, at one address with the length of `capacity`; the control
// block begins past the payload (`control::offset`); other processes get the memory only through exports, whose
// importers map it read-only (FACTS: a handle is a write capability, so this rests on who is given one), and an attached
// one is its owner's, who is trusted to leave it alone; and every method's range is checked against the payload.
unsafe impl Arena for CudaArena {
    fn payload(&self) -> u64 {
        self.spec.payload
    }

    fn capacity(&self) -> u64 {
        self.mapping.size()
    }

    fn shards(&self) -> u32 {
        self.spec.shards
    }

    fn location(&self) -> Location {
        self.location.clone()
    }

    fn usable(&self) -> Result<()> {
        self.context().lost().map_or(Ok(()), Err)
    }

    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()> {
        let range = range_of("copy in", offset, from.len())?;
        let to = self.inside("copy in", range)?;
        self.may_write()?;
        self.words.check()?;
        self.with_bounce(|bounce| {
            let _claim = self.claims.claim(range)?;
            // SAFETY: the range is inside the mapping, and ours by the claim.
            unsafe { bounce.upload(to, from) }
        })
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let range = range_of("copy out", offset, to.len())?;
        let from = self.inside("copy out", range)?;
        self.with_bounce(|bounce| {
            let _claim = self.claims.claim(range)?;
            let mut left = &mut *to;
            // SAFETY: the range is inside the mapping.
            unsafe {
                bounce.download(from, range.len(), self.half, |bytes| {
                    let (part, rest) = std::mem::take(&mut left).split_at_mut(bytes.len());
                    part.copy_from_slice(bytes);
                    left = rest;
                })
            }
        })
    }

    fn fill(&self, range: ByteRange, byte: u8) -> Result<()> {
        let at = self.inside("fill", range)?;
        self.may_write()?;
        self.words.check()?;
        self.with_bounce(|bounce| {
            let _claim = self.claims.claim(range)?;
            // SAFETY: the range is inside the mapping, and ours by the claim.
            unsafe { bounce.fill(at, range.len(), byte) }
        })
    }

    fn retire(&self) {
        let host = self.lock_words();
        if let Some(words) = &*host {
            words.retire();
        }
        self.control.retire();
    }

    fn begin(&self, generation: Generation) {
        let host = self.lock_words();
        if let Some(words) = &*host {
            words.retire();
        }
        self.control.begin(generation);
        // Whoever gets a locator of it finds it there.
        self.words.fence();
        if let Some(words) = &*host {
            words.begin(generation);
        }
    }

    fn publish(&self, shard: ShardId, bytes: u64) -> Result<()> {
        if self.attached.is_some() {
            return Err(attach::not_ours("publish"));
        }
        self.words.check()?;
        let host = self.lock_words();
        if let Some(words) = &*host {
            words.publish(shard, bytes)?;
        }
        self.control.publish(shard, bytes)?;
        self.words.check()
    }

    fn observe(&self, shard: ShardId) -> Observed {
        self.control.observe(shard)
    }
}

fn control_offset(payload: u64) -> Result<u64> {
    control::offset(payload)
        .ok_or_else(|| Error::new(Kind::Invalid, "arena", format!("a payload of {payload} bytes")))
}

/// Bytes of payload, padding and control block.
fn needed(spec: ArenaSpec) -> Result<u64> {
    if spec.shards == 0 || spec.shards > MAX_SHARDS {
        return Err(Error::new(
            Kind::Invalid,
            "arena",
            format!("{} shards: between 1 and {MAX_SHARDS} are possible", spec.shards),
        ));
    }
    let end = control_offset(spec.payload)?.checked_add(control::size(spec.shards));
    end.ok_or_else(|| Error::new(Kind::Invalid, "arena", format!("a payload of {} bytes", spec.payload)))
}

fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(path)
        .map_err(|e| Error::new(Kind::Io, "read", format!("cannot read {path}: {e}")))?;
    Ok(text.trim().to_owned())
}
