//! One thread's reads.

use super::{Call, Io, SourceFile};
use flashboot_core::{Error, Kind, Result};
use flashboot_memory::{Buffer, Ring};
use std::{io, sync::atomic::AtomicU64, sync::atomic::Ordering};

/// Is handed each piece once it is complete: where it begins in what is being filled, and its bytes.
pub type Each<'e> = dyn FnMut(usize, &[u8]) -> Result<()> + 'e;

/// Bytes of a lane's bounce buffer.
pub(crate) const BOUNCE: usize = 8 << 20;

/// How some bytes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    /// All of it is in the page cache.
    Cached,
    /// Some of it is in the page cache: it stays.
    Mixed,
    /// None of it is: what comes in is dropped again.
    Buffered,
}

/// One thread's way to read.
#[derive(Debug)]
pub struct Lane {
    io: Io,
    ring: Option<Ring>,
    bounce: Option<Buffer>,
}

impl Lane {
    pub(super) fn new(io: Io, ring: Option<Ring>) -> Self {
        Self { io, ring, bounce: None }
    }

    /// A page-aligned buffer for bytes that go on elsewhere, of [`BOUNCE`] bytes. To be handed back with
    /// [`keep_bounce`](Self::keep_bounce).
    ///
    /// # Errors
    /// [`Buffer::new`]'s.
    pub(crate) fn bounce(&mut self) -> Result<Buffer> {
        if let Some(bounce) = self.bounce.take() {
            return Ok(bounce);
        }
        let bounce = Buffer::new(BOUNCE)?;
        let counts = &self.io.counts;
        let now = counts.bounce.fetch_add(BOUNCE as u64, Ordering::Relaxed) + BOUNCE as u64;
        counts.bounce_peak.fetch_max(now, Ordering::Relaxed);
        Ok(bounce)
    }

    /// Keeps a buffer for the next who needs one.
    pub(crate) fn keep_bounce(&mut self, bounce: Buffer) {
        self.bounce = Some(bounce);
    }

    /// Whose lane it is.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// Fills `into` with bytes of `file` from `offset` on, and hands each finished piece to `each`, in any order. `into` may
    /// reach past the file's end by less than a page, which direct reads of a file's last bytes want; those bytes are left
    /// as they are, and `each` sees none of them.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for bytes past the file's end, [`Kind::Corrupt`] for a file that has become shorter, the system's own
    /// with path, offset and length; and what `each` says.
    pub fn read(
        &mut self,
        file: &SourceFile,
        offset: u64,
        into: &mut [u8],
        each: &mut Each<'_>,
    ) -> Result<()> {
        let needed = file.len().saturating_sub(offset).min(into.len() as u64);
        let needed = usize::try_from(needed).unwrap_or(usize::MAX);
        if into.len() - needed >= 4096 {
            let detail = format!(
                "{}: {} bytes at {offset} of a file of {}",
                file.path().display(),
                into.len(),
                file.len()
            );
            return Err(Error::new(Kind::Invalid, "pread", detail));
        }
        self.count(|c| &c.requested, needed);
        let piece = self.io.config.piece_len();
        let whole = self.way(file, offset, into, true);
        let mut at = 0;
        while at < needed {
            // Pieces of one way are read together.
            let (mut end, way) = match whole {
                Some(way) => (into.len(), way),
                None => {
                    let way = |at: usize, into: &[u8]| {
                        let part = into.get(at..(at + piece).min(into.len())).unwrap_or_default();
                        self.way(file, offset + at as u64, part, false).unwrap_or(Way::Mixed)
                    };
                    let first = way(at, into);
                    let mut end = at + piece;
                    while end < needed && way(end, into) == first {
                        end += piece;
                    }
                    (end, first)
                }
            };
            end = end.min(into.len());
            let Some(part) = into.get_mut(at..end) else { break };
            let base = at;
            let part_needed = needed.min(end) - at;
            self.run(file, offset + at as u64, part, part_needed, way, &mut |start, bytes| {
                each(base + start, bytes)
            })?;
            at = end;
        }
        Ok(())
    }

    /// Whether all of these bytes are in the page cache at this moment: then a read is a copy, to wherever they belong.
    pub(crate) fn is_cached(&self, file: &SourceFile, offset: u64, len: usize) -> bool {
        self.way_of(file, offset, len, false) == Some(Way::Cached)
    }

    /// How these bytes are best read; `None` where parts of them should be asked about.
    fn way(&self, file: &SourceFile, offset: u64, into: &[u8], cuttable: bool) -> Option<Way> {
        self.way_of(file, offset, into.len(), cuttable)
    }

    fn way_of(&self, file: &SourceFile, offset: u64, len: usize, cuttable: bool) -> Option<Way> {
        let call = Call { file, offset, len, direct: false };
        let pages = (offset + len as u64).min(file.len()).div_ceil(4096).saturating_sub(offset / 4096);
        // Pages may be larger than 4 KiB: then fewer are all of them.
        let page = rustix::param::page_size() as u64 / 4096;
        let uncached = if file.is_direct() { Way::Direct } else { Way::Buffered };
        match self.io.ops.cached(&call) {
            None | Some(0) => Some(uncached),
            Some(n) if n.saturating_mul(page.max(1)) >= pages => Some(Way::Cached),
            Some(_) if cuttable && len > self.io.config.piece_len() => None,
            // A direct read takes nothing from what is cached, and brings nothing in.
            Some(_) => Some(if file.is_direct() { Way::Direct } else { Way::Mixed }),
        }
    }

    /// Reads all of `into` one way, and leaves the page cache as it was.
    fn run(
        &mut self,
        file: &SourceFile,
        offset: u64,
        into: &mut [u8],
        needed: usize,
        way: Way,
        each: &mut Each<'_>,
    ) -> Result<()> {
        let whole = Call { file, offset, len: into.len(), direct: false };
        let mut brought = way == Way::Buffered;
        let done = self.pieces(file, offset, into, needed, way, &mut brought, each);
        if brought {
            self.io.ops.uncache(&whole);
        }
        done
    }

    #[expect(clippy::too_many_arguments, reason = "one read, taken apart")]
    fn pieces(
        &mut self,
        file: &SourceFile,
        offset: u64,
        into: &mut [u8],
        needed: usize,
        way: Way,
        brought: &mut bool,
        each: &mut Each<'_>,
    ) -> Result<()> {
        let piece = self.io.config.piece_len();
        let io = &self.io;
        let fits =
            if way == Way::Direct { file.direct_len(offset, into.as_ptr() as usize, into.len()) } else { 0 };
        let direct = fits > 0;
        // From the page cache a read is a copy: a ring only adds to it.
        let Some(ring) = self.ring.as_mut().filter(|_| way != Way::Cached && into.len() > piece) else {
            let mut at = 0;
            while at < needed {
                let end = (at + piece).min(into.len());
                let Some(part) = into.get_mut(at..end) else { break };
                let part_needed = needed.min(end) - at;
                *brought |= io.piece(file, offset + at as u64, part, part_needed, 0, way)?;
                each(at, part.get(..part_needed).unwrap_or_default())?;
                at = end;
            }
            return Ok(());
        };
        *brought |= way == Way::Direct && !direct;
        let (ringed, rest) = into.split_at_mut(if direct { fits } else { into.len() });
        let (at, base) = (offset + ringed.len() as u64, ringed.len());
        ring.read(file.descriptor(direct), offset, ringed, piece, &mut |range, said, bytes| {
            let start = offset + range.start as u64;
            let part_needed = needed.saturating_sub(range.start).min(bytes.len());
            let call = Call { file, offset: start, len: bytes.len(), direct };
            // What failed, or is not all: the slow way says what is wrong, or does it.
            let got = io.ops.completed(&call, said).map_or(0, |n| n.min(part_needed));
            io.note(way, direct, got);
            if got < part_needed {
                *brought |= io.piece(file, start, bytes, part_needed, got, way)?;
            }
            each(range.start, bytes.get(..part_needed).unwrap_or_default())
        })?;
        let left = needed.saturating_sub(base);
        if left > 0 {
            *brought |= io.piece(file, at, rest, left, 0, way)?;
            each(base, rest.get(..left).unwrap_or_default())?;
        }
        Ok(())
    }

    fn count(&self, which: impl Fn(&super::Counts) -> &AtomicU64, n: usize) {
        which(&self.io.counts).fetch_add(n as u64, Ordering::Relaxed);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.bounce.is_some() {
            self.io.counts.bounce.fetch_sub(BOUNCE as u64, Ordering::Relaxed);
        }
    }
}

impl Io {
    fn note(&self, way: Way, direct: bool, n: usize) {
        let counts = &self.counts;
        let which = match way {
            Way::Cached => &counts.cached,
            _ if direct => &counts.direct,
            _ => &counts.buffered,
        };
        which.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Reads the first `needed` bytes of `into`, of which `done` are there already, with as many calls as it takes. Whether
    /// bytes that were not in the page cache came through it.
    fn piece(
        &self,
        file: &SourceFile,
        offset: u64,
        into: &mut [u8],
        needed: usize,
        mut done: usize,
        way: Way,
    ) -> Result<bool> {
        let mut brought = false;
        while done < needed {
            let at = offset + done as u64;
            let Some(rest) = into.get_mut(done..) else { break };
            // As much of it as direct reads can have; the last bytes of a file come buffered.
            let fits =
                if way == Way::Direct { file.direct_len(at, rest.as_ptr() as usize, rest.len()) } else { 0 };
            let direct = fits > 0;
            let len = if direct { fits } else { rest.len() };
            let Some(rest) = rest.get_mut(..len) else { break };
            let call = Call { file, offset: at, len: rest.len(), direct };
            match self.ops.pread(&call, rest) {
                Ok(0) => {
                    return Err(
                        file.changed(format!("nothing is at byte {at}, {} bytes when opened", file.len()))
                    );
                }
                Ok(n) => {
                    let n = n.min(needed - done);
                    brought |= !direct && matches!(way, Way::Buffered | Way::Direct);
                    self.note(way, direct, n);
                    done += n;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // EINVAL, EOPNOTSUPP: not directly, or not these bytes.
                Err(e) if direct && matches!(e.raw_os_error(), Some(22 | 95)) => {
                    self.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
                    file.refuse_direct();
                }
                Err(e) => {
                    let detail = format!("{}: {} bytes at {at}", file.path().display(), needed - done);
                    return Err(Error::from_io("pread", &e, detail));
                }
            }
        }
        Ok(brought)
    }
}
