//! A peer's arena, mapped read-only on our own GPU.

use crate::{
    Context, Device,
    mover::Looks,
    ops::{Access, AllocationKind},
    probe,
    vmm::{Mapping, Memory},
};
use flashboot_core::{Code, Error, Generation, Kind, Location, Locator, MAX_SHARDS, Result, control};
use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

/// A peer's arena in our address space. Dropping it ends the import; until then it pins the peer's memory.
#[derive(Debug)]
pub struct Import {
    mapping: Mapping,
    generation: Generation,
    payload: u64,
    shards: u32,
    /// The source lies in this GPU's own memory.
    same_gpu: bool,
    /// What the driver's calls took.
    calls: Duration,
}

impl Import {
    /// From the descriptor that a peer on this host sent. The descriptor may be closed afterwards. Blocks for about
    /// 1 ms a GiB when the memory is another GPU's.
    ///
    /// # Errors
    /// [`Kind::Mismatch`] when the locator's numbers do not fit each other, this GPU's granularity or the memory.
    pub fn from_fd(context: &Context, fd: BorrowedFd<'_>, locator: &Locator) -> Result<Self> {
        check(context, locator)?;
        Self::map(context, locator, || Memory::import_fd(context, fd, locator.capacity))
    }

    /// From the fabric handle that a peer in the same NVLink domain sent.
    ///
    /// # Errors
    /// As for [`from_fd`](Self::from_fd).
    pub fn from_fabric(context: &Context, handle: &[u8; 64], locator: &Locator) -> Result<Self> {
        check(context, locator)?;
        Self::map(context, locator, || Memory::import_fabric(context, handle, locator.capacity))
    }

    fn map(context: &Context, locator: &Locator, memory: impl FnOnce() -> Result<Memory>) -> Result<Self> {
        let began = Instant::now();
        let mapping = Mapping::new(memory()?, Access::Read).map_err(|e| {
            if e.op() == "cuMemMap" && e.code() == Some(Code::Cuda(crate::error::code::INVALID_VALUE)) {
                let detail =
                    format!("the peer's memory has not the {} bytes of its locator", locator.capacity);
                return mismatch(detail);
            }
            if e.op() == "cuMemSetAccess" {
                return apart(context.device(), locator).unwrap_or(e);
            }
            e
        })?;
        let calls = began.elapsed();
        let ours = mapping.context().device().uuid();
        let same_gpu = matches!(&locator.location, Location::Gpu { uuid, .. } if uuid == ours);
        let Locator { generation, payload, shards, .. } = *locator;
        Ok(Self { mapping, generation, payload, shards, same_gpu, calls })
    }

    /// Reads the control block's header over the fabric, and compares it with the locator. Blocks.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] when there is no control block, [`Kind::Mismatch`] or [`Kind::StaleGeneration`] when it is
    /// another arena's or another filling's.
    pub fn check_source(&self) -> Result<()> {
        Looks::new(self)?.check_header(self)
    }

    /// Payload bytes.
    pub fn payload(&self) -> u64 {
        self.payload
    }

    /// Number of progress words.
    pub fn shards(&self) -> u32 {
        self.shards
    }

    /// The filling that the locator named.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// What the driver took for the import's four calls: import, reserve, map, set access. The rest of an import's time
    /// is ours.
    pub fn driver_calls(&self) -> Duration {
        self.calls
    }

    pub(crate) fn is_same_gpu(&self) -> bool {
        self.same_gpu
    }

    pub(crate) fn context(&self) -> &Context {
        self.mapping.context()
    }

    /// The address of payload byte 0.
    pub(crate) fn at(&self) -> u64 {
        self.mapping.at()
    }

    /// The address of `len` bytes of the control block.
    pub(crate) fn control(&self, offset: u64, len: u64) -> Result<u64> {
        let base = control::offset(self.payload).and_then(|base| base.checked_add(offset));
        let base = base.ok_or_else(|| mismatch(format!("a payload of {} bytes", self.payload)))?;
        self.mapping.range("control block", base, len)
    }
}

/// What a refused access means where the two GPUs do not reach each other: the driver's number alone does not say.
fn apart(device: &Device, locator: &Locator) -> Option<Error> {
    let devices = Device::all_of(&device.ops).ok()?;
    probe::reaches(device, &devices, &locator.location).err()
}

fn mismatch(detail: String) -> Error {
    Error::new(Kind::Mismatch, "import", detail).with_remedy("fetch the locator from its exporter again")
}

/// Whether both sides can mean the same bytes.
pub(crate) fn check(context: &Context, locator: &Locator) -> Result<()> {
    if locator.shards == 0 || locator.shards > MAX_SHARDS {
        return Err(mismatch(format!("{} shards", locator.shards)));
    }
    let end = control::offset(locator.payload).and_then(|at| at.checked_add(control::size(locator.shards)));
    if end.is_none_or(|end| end > locator.capacity) {
        return Err(mismatch(format!(
            "{} bytes hold no payload of {} bytes and a control block of {} shards",
            locator.capacity, locator.payload, locator.shards
        )));
    }
    let device = context.device().ordinal;
    let kind = AllocationKind { device, handle_types: 0, gpu_direct_rdma: false };
    let granularity = context.call(|ops| ops.mem_granularity(kind))?;
    if !locator.capacity.is_multiple_of(granularity.max(1)) {
        return Err(mismatch(format!(
            "{} bytes are no multiple of this GPU's granularity, {granularity}",
            locator.capacity
        )));
    }
    Ok(())
}
