//! Parts of an arena that writers other than its own copy engine fill, and what readers other than importers are given:
//! both through pinned memory, for transports whose bytes come from and go to the host.

use crate::{Context, CudaArena, Pinned, Stream, stream::Event};
use flashboot_core::{Arena as _, BlockDigest, ByteRange, Error, Kind, Result, claims::Claim};
use std::{sync::Arc, time::Duration};

/// Exclusive ownership of a range of an arena's payload; it keeps the arena. The range is free again when the value and
/// every copy into it are gone.
#[derive(Debug)]
pub struct CudaOwned {
    // Given up before the arena can go.
    claim: Claim,
    arena: Arc<CudaArena>,
}

impl CudaArena {
    /// Owns `range` of the payload until the value is dropped.
    ///
    /// # Errors
    /// [`Kind::Invalid`] past the payload, [`Kind::Busy`] when any byte of it is owned.
    pub fn own(self: &Arc<Self>, range: ByteRange) -> Result<CudaOwned> {
        Ok(CudaOwned { claim: self.claim(range)?, arena: Arc::clone(self) })
    }

    /// Queues a copy of payload bytes `range` into `into`, from its first byte on, on `stream`. Nothing keeps a writer
    /// off the bytes: what is read may be torn, as it may be through an importer's mapping.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for bytes that are not there at either end, and the driver's.
    pub fn download(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        range: ByteRange,
        into: Pinned,
    ) -> Result<Passing> {
        let from = self.inside("download", range)?;
        Passing::queue(self, None, stream, into, range.len(), |ops, host, size, stream| {
            // SAFETY: `inside` checked the device's bytes and `queue` the host's; the value made of them keeps both ends
            // until the stream has passed.
            unsafe { ops.copy_dtoh(host, from, size, stream) }
        })
    }
}

impl CudaOwned {
    /// The bytes owned.
    pub fn range(&self) -> ByteRange {
        self.claim.range()
    }

    /// Payload bytes of the whole arena.
    pub fn payload(&self) -> u64 {
        self.arena.payload()
    }

    /// The context that its arena lives in.
    pub fn context(&self) -> &Context {
        self.arena.context()
    }

    /// Queues a copy of the first bytes of `from` to payload bytes `range` on `stream`. Ranges under way at once must not
    /// overlap, or either's bytes may win.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for bytes that are not owned or not in `from`, and the driver's.
    pub fn upload(self: &Arc<Self>, stream: &Arc<Stream>, range: ByteRange, from: Pinned) -> Result<Passing> {
        let owned = self.range();
        if range.start < owned.start || range.end > owned.end {
            let detail = format!("bytes {range} are not within {owned}, which are owned");
            return Err(Error::new(Kind::Invalid, "upload", detail));
        }
        let to = self.arena.inside("upload", range)?;
        Passing::queue(&self.arena, Some(self), stream, from, range.len(), |ops, host, size, stream| {
            // SAFETY: `inside` checked the device's bytes and `queue` the host's; the value made of them keeps both ends,
            // and by the claim everyone else off the destination, until the stream has passed.
            unsafe { ops.copy_htod(to, host.cast_const(), size, stream) }
        })
    }

    /// As [`CudaArena::settle_nic_writes`], for a NIC that has written the range.
    pub fn settle_nic_writes(&self) -> Result<()> {
        self.arena.settle_nic_writes()
    }

    /// The values of the blocks of the owned range, found on the GPU, or through the host where the kernel does not work.
    /// Blocks until they are there. Whatever is still being copied into the range is not waited for.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a range that is no whole blocks, and the driver's.
    pub fn digests(&self, block: u64) -> Result<Vec<BlockDigest>> {
        self.arena.digests_claimed(&self.claim, block)
    }
}

/// A copy between pinned memory and an arena that is under way. It owns the pinned memory, and keeps the arena, until it
/// is done; dropping it waits.
#[derive(Debug)]
pub struct Passing {
    done: Option<Event>,
    /// `None` once it has been handed back.
    host: Option<Pinned>,
    stream: Arc<Stream>,
    _owned: Option<Arc<CudaOwned>>,
    _arena: Arc<CudaArena>,
}

impl Passing {
    fn queue(
        arena: &Arc<CudaArena>,
        owned: Option<&Arc<CudaOwned>>,
        stream: &Arc<Stream>,
        host: Pinned,
        size: u64,
        copy: impl Fn(&dyn crate::ops::Ops, *mut u8, u64, crate::ops::Object) -> crate::ops::Call<()>,
    ) -> Result<Self> {
        let invalid = |what: &str| Err(Error::new(Kind::Invalid, "copy", format!("{size} bytes: {what}")));
        if size > host.len() as u64 {
            return invalid("more than the pinned memory has");
        }
        if !stream.context().is(arena.context()) {
            return invalid("the stream is another GPU's");
        }
        let event = Event::new(arena.context())?;
        let at = host.as_ptr();
        // From here on dropping it waits.
        let mut passing = Self {
            done: None,
            host: Some(host),
            stream: Arc::clone(stream),
            _owned: owned.cloned(),
            _arena: Arc::clone(arena),
        };
        if size > 0 {
            arena.context().call(|ops| copy(ops, at, size, stream.object()))?;
        }
        event.record(stream)?;
        passing.done = Some(event);
        Ok(passing)
    }

    /// Blocks until the bytes are in place, and gives the pinned memory back.
    pub fn wait(mut self) -> Result<Pinned> {
        self.finish()?;
        self.host.take().ok_or_else(|| Error::new(Kind::Invalid, "copy", "its memory is gone"))
    }

    fn finish(&mut self) -> Result<()> {
        match self.done.take() {
            Some(done) => done.wait(Duration::from_micros(20)).inspect_err(|_| {
                // An error that is not sticky says nothing about the copy.
                let _ = self.stream.synchronize();
            }),
            None => self.stream.synchronize(),
        }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        if self.host.is_some()
            && let Err(error) = self.finish()
        {
            tracing::warn!(%error, "a copy that nobody waited for failed");
        }
    }
}
