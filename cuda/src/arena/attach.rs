//! Another process's arena as one of ours: mapped by its descriptor, read in place, or filled for its owner.

use super::{ArenaReport, CudaArena, CudaArenaConfig};
use crate::{
    Context, import,
    ops::Access,
    stream::Stream,
    vmm::{Mapping, Memory},
    words::DeviceWords,
};
use flashboot_core::{
    Arena as _, ArenaSpec, ByteRange, Error, Kind, Location, Locator, Result, ShardId,
    control::{self, ControlBlock},
};
use std::{
    any::Any,
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

/// What may be done with another process's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attach {
    /// It is used where it is. The driver refuses copies into it; it must hold the locator's filling.
    Read,
    /// Its payload is filled for its owner, who verifies what comes and publishes it.
    Write,
}

impl CudaArena {
    /// The arena behind the descriptor that its owner sent, in this context's own GPU. The descriptor may be closed afterwards.
    /// The owner's words are read once: they are not to change while it is attached. `keep` lives as long as the mapping.
    ///
    /// # Errors
    /// [`Kind::Mismatch`] where the locator's numbers, its GPU or the control block do not fit, [`Kind::StaleGeneration`] where
    /// another filling is there than the one to be read, [`Kind::Corrupt`] without a control block; the driver's.
    pub fn attach(
        context: &Context,
        fd: BorrowedFd<'_>,
        locator: &Locator,
        attach: Attach,
        keep: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Arc<Self>> {
        let began = Instant::now();
        import::check(context, locator)?;
        let mismatch = |detail: String| Error::new(Kind::Mismatch, "attach", detail);
        let ours = context.device().uuid();
        match &locator.location {
            Location::Gpu { uuid, .. } if uuid == ours => {}
            other => return Err(mismatch(format!("the arena is at {other:?}, this is GPU {ours}"))),
        }
        let spec = ArenaSpec { payload: locator.payload, shards: locator.shards };
        let access = match attach {
            Attach::Read => Access::Read,
            Attach::Write => Access::ReadWrite,
        };
        let mapping = Mapping::new(Memory::import_fd(context, fd, locator.capacity)?, access)?;
        let size = control::size(spec.shards);
        let at = mapping.range("control block", super::control_offset(spec.payload)?, size)?;
        let words = DeviceWords::read(context, at, size)?;
        let (control, header) = ControlBlock::open(words.clone(), size)?;
        if (header.payload, header.shards) != (spec.payload, spec.shards) {
            return Err(mismatch(format!(
                "the arena has {} bytes in {} shards, its owner says {} in {}",
                header.payload, header.shards, spec.payload, spec.shards
            )));
        }
        let report = ArenaReport {
            capacity: locator.capacity,
            granularity: 0,
            posix_fd: false,
            fabric: false,
            gpu_direct_rdma: false,
            dropped: Vec::new(),
            create: Duration::ZERO,
            map: began.elapsed(),
        };
        let half = CudaArenaConfig::default().half();
        let arena = Self {
            attached: Some(attach),
            _keep: keep,
            ..Self::over(mapping, (control, words), spec, half, report)?
        };
        let found = arena.observe(ShardId(0)).generation;
        if attach == Attach::Read && found != Some(locator.generation) {
            let found = found.map_or_else(|| "nothing".to_owned(), |generation| generation.to_string());
            let detail = format!("the arena holds {found}, its owner said {}", locator.generation);
            return Err(Error::new(Kind::StaleGeneration, "attach", detail));
        }
        Ok(Arc::new(arena))
    }

    /// Copies payload bytes `range` of `from`, which lies in the same GPU, to the same place here. Blocks.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for another GPU's arena or past either payload, [`Kind::Busy`] while somebody owns a byte of the range;
    /// the driver's.
    pub fn copy_from(&self, from: &Self, range: ByteRange) -> Result<()> {
        if !self.context().is(from.context()) {
            let detail = "the arena to copy from is another GPU's";
            return Err(Error::new(Kind::Invalid, "copy from", detail));
        }
        let _writes = self.claim(range)?;
        let _reads = from.claims.claim(range)?;
        let (to, source) = (self.inside("copy from", range)?, from.inside("copy from", range)?);
        let stream = Stream::new(self.context())?;
        let queued = self.context().call(|ops| {
            // SAFETY: both ends were checked to be inside their payloads, which `self` and `from` keep mapped, and are
            // claimed, until the stream is synchronised below.
            unsafe { ops.copy_dtod(to, source, range.len(), stream.object()) }
        });
        let done = stream.synchronize();
        queued.and(done)
    }

    /// Whether the payload may be written through this mapping.
    pub(super) fn may_write(&self) -> Result<()> {
        match self.attached {
            Some(Attach::Read) => Err(not_ours("write")),
            _ => Ok(()),
        }
    }
}

/// What is refused of an arena that is another process's.
pub(super) fn not_ours(op: &'static str) -> Error {
    Error::new(Kind::Permission, op, "the arena is attached, and its owner's to write")
        .with_remedy("attach a private copy to write it")
}
