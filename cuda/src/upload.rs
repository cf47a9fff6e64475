//! Asynchronous copies from pinned host memory into an arena, for pipelines that read ahead while the GPU copies.

use crate::{CudaArena, Pinned, Registered, Stream, stream::Event};
use flashboot_core::{ByteRange, Error, Kind, Result, claims::Claim};
use std::{sync::Arc, time::Duration};

/// Host memory that the copy engine reads, kept until it has.
#[derive(Debug, Clone)]
pub enum HostBytes {
    /// Pinned by the driver.
    Pinned(Arc<Pinned>),
    /// Registered where it is. Its owner must not write the bytes while they are copied.
    Registered(Arc<Registered>),
}

impl HostBytes {
    fn len(&self) -> usize {
        match self {
            Self::Pinned(pinned) => pinned.len(),
            Self::Registered(registered) => registered.len(),
        }
    }

    fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Pinned(pinned) => pinned.as_ptr(),
            Self::Registered(registered) => registered.as_ptr(),
        }
    }

    /// (offset, bytes) of each copy: none crosses from one registration into the next.
    fn pieces(&self, offset: usize, len: usize) -> Vec<(usize, usize)> {
        match self {
            Self::Pinned(_) => vec![(offset, len)],
            Self::Registered(registered) => registered.pieces(offset, len).collect(),
        }
    }
}

/// A copy under way. It owns its range of the arena, the arena and the host memory until it is done; dropping it
/// waits.
#[derive(Debug)]
pub struct Upload {
    done: Option<Event>,
    claim: Option<Claim>,
    stream: Arc<Stream>,
    arena: Arc<CudaArena>,
    from: HostBytes,
}

impl CudaArena {
    /// Queues a copy of `len` bytes of `from`, from its byte `at` on, to payload byte `offset`, on `stream`.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for bytes that are not there at either end, [`Kind::Busy`] while a pull or another upload owns
    /// a byte of the range, and the driver's.
    pub fn upload(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        offset: u64,
        from: &HostBytes,
        at: usize,
        len: usize,
    ) -> Result<Upload> {
        let invalid = |what: &str| {
            Error::new(Kind::Invalid, "upload", format!("{len} bytes from {at} on to {offset}: {what}"))
        };
        if at.checked_add(len).is_none_or(|end| end > from.len()) {
            return Err(invalid("past the host memory's end"));
        }
        let end = offset.checked_add(len as u64).ok_or_else(|| invalid("past 2^64"))?;
        if !stream.context().is(self.context()) {
            return Err(invalid("the stream is another GPU's"));
        }
        let range = ByteRange::new(offset, end);
        let claim = self.claim(range)?;
        let to = self.inside("upload", range)?;
        let done = Event::new(self.context())?;
        // From here on dropping `upload` waits.
        let mut upload = Upload {
            done: None,
            claim: Some(claim),
            stream: Arc::clone(stream),
            arena: Arc::clone(self),
            from: from.clone(),
        };
        self.context().call(|ops| {
            for (piece, size) in from.pieces(at, len) {
                let source = from.as_ptr().wrapping_add(piece);
                let target = to + (piece - at) as u64;
                // SAFETY: both ends were checked above, and `upload` keeps them, and by its claim everyone else off
                // the destination, until the stream has passed.
                unsafe { ops.copy_htod(target, source, size as u64, stream.object()) }?;
            }
            done.record_with(ops, stream)
        })?;
        upload.done = Some(done);
        Ok(upload)
    }
}

impl Upload {
    /// Whether the bytes are in place. Does not block.
    pub fn is_done(&self) -> Result<bool> {
        self.done.as_ref().map_or(Ok(false), Event::is_done)
    }

    /// Blocks until they are, and gives the range back.
    pub fn wait(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        if self.claim.is_none() {
            return Ok(());
        }
        let waited = match &self.done {
            Some(done) => done.wait(Duration::ZERO),
            None => self.stream.synchronize(),
        };
        self.claim = None;
        waited
    }

    /// Where the bytes go.
    pub fn arena(&self) -> &Arc<CudaArena> {
        &self.arena
    }

    /// Where they come from.
    pub fn source(&self) -> &HostBytes {
        &self.from
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::warn!(%error, "an upload nobody waited for failed");
        }
    }
}
