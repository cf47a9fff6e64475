//! Host memory that the GPU's copy engines reach: pinned by the driver, or registered where it is.

use crate::{Context, ops::Access};
use flashboot_core::{Arena as _, ByteRange, Error, Kind, Result};
use flashboot_memory::{HostArena, ImportedArena};
use std::{any::Any, fmt, ptr::NonNull, slice, sync::Arc};

/// Pages allocated and pinned by the driver (`cuMemHostAlloc`, portable). Copies to and from them are truly
/// asynchronous.
///
/// Whoever in this crate hands one to the device owns or borrows it until the device is done with it, so that the
/// slices are never looked at meanwhile.
pub struct Pinned {
    context: Context,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: it is plain memory that nothing but this value names; which thread touches it does not matter.
unsafe impl Send for Pinned {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` bytes, at least one. Costs about 0.3 ms a MiB: keep them.
    pub fn new(context: &Context, len: usize) -> Result<Self> {
        let size = len.max(1) as u64;
        let at = context.call(|ops| ops.host_alloc(size))?;
        let at = NonNull::new(at)
            .ok_or_else(|| Error::new(Kind::Exhausted, "cuMemHostAlloc", "the driver gave no address"))?;
        Ok(Self { context: context.clone(), at, len })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the driver gave `len` bytes of mapped pages; the device does not write them meanwhile, because
        // whoever has it write them holds this value until it is done (see the type).
        unsafe { slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} bytes)", self.len)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.end(|ops| {
            // SAFETY: the driver gave this address, and the value is at its end: nobody uses it any more.
            unsafe { ops.host_free(self.at.as_ptr()) }
        });
    }
}

/// Memory of the caller's that is pinned where it is (`cuMemHostRegister`), in segments: some systems refuse to
/// register a large range at once, and no single copy may cross from one registration into the next.
pub struct Registered {
    context: Context,
    at: NonNull<u8>,
    len: usize,
    segment: usize,
    /// Ends of the segments registered so far.
    segments: Vec<NonNull<u8>>,
    /// Dropped after the last segment is unregistered.
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: as for `Pinned`; the memory's owner is `_keep`, which is Send and Sync itself.
unsafe impl Send for Registered {}
// SAFETY: this type never touches the bytes, it only has the device read them.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers `len` bytes from `at` on in segments of `segment` bytes; zero bytes need none. With 4 KiB pages
    /// this runs at 22 to 26 GB/s, with huge pages at 50 to 56 (measured on an H200 host).
    ///
    /// # Safety
    /// The bytes stay mapped as long as `keep` lives, and may be read by the device at any time until then.
    ///
    /// # Errors
    /// [`Kind::Invalid`] when `at` or `segment` is no multiple of the page size (4 KiB at least), and the driver's
    /// own; then nothing stays registered.
    pub unsafe fn new(
        context: &Context,
        at: NonNull<u8>,
        len: usize,
        segment: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // SAFETY: the caller promises it.
        unsafe { Self::register(context, at, (len, segment), Access::ReadWrite, keep) }
    }

    /// # Safety
    /// As [`new`](Self::new).
    unsafe fn register(
        context: &Context,
        at: NonNull<u8>,
        (len, segment): (usize, usize),
        access: Access,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let page = rustix::param::page_size();
        if segment == 0 || !segment.is_multiple_of(page) || !at.addr().get().is_multiple_of(page) {
            return Err(Error::new(
                Kind::Invalid,
                "cuMemHostRegister",
                format!("address {at:p} and segments of {segment} bytes must be multiples of {page}"),
            ));
        }
        let mut registered =
            Self { context: context.clone(), at, len, segment, segments: Vec::new(), _keep: keep };
        for start in (0..len).step_by(segment) {
            let size = segment.min(len - start);
            // SAFETY: `start` is below `len`, so the address is inside the caller's bytes.
            let from = unsafe { at.add(start) };
            context.call(|ops| {
                // SAFETY: the caller keeps these bytes mapped as long as `keep` lives, which this value holds until
                // it has unregistered them.
                unsafe { ops.host_register(from.as_ptr(), size as u64, access) }
            })?;
            registered.segments.push(from);
        }
        Ok(registered)
    }

    /// Registers payload bytes `range` of a host arena, as one segment. Whoever fills the arena meanwhile tears what is copied,
    /// and nothing else.
    ///
    /// # Errors
    /// [`Kind::Invalid`] past the payload or where `range` begins inside a page, and the driver's.
    pub fn arena(context: &Context, arena: &Arc<HostArena>, range: ByteRange) -> Result<Self> {
        let (at, sizes) = part(arena.base(), arena.payload(), range)?;
        // SAFETY: the bytes are inside the arena's payload, which stays mapped as long as the arena, and that is kept here.
        // The device only reads them.
        unsafe { Self::register(context, at, sizes, Access::ReadWrite, Arc::<HostArena>::clone(arena)) }
    }

    /// Registers payload bytes `range` of another process's arena, which this one may only read, as one segment: for the
    /// device to read. Whoever owns the arena can tear what is copied, as through any mapping of it: prove what lands.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where the driver does not register such memory; else as [`arena`](Self::arena).
    pub fn attached(context: &Context, arena: &Arc<ImportedArena>, range: ByteRange) -> Result<Self> {
        if !context.device().features().read_only_register {
            let detail = format!("{} registers no memory that may only be read", context.device().name());
            return Err(Error::new(Kind::Unavailable, "cuMemHostRegister", detail));
        }
        let (at, sizes) = part(arena.base(), arena.payload(), range)?;
        // SAFETY: the bytes are inside the import's payload, which stays mapped as long as the import, and that is kept
        // here; the seals keep the file behind it as long as it is. The device only reads them, and is told so.
        unsafe { Self::register(context, at, sizes, Access::Read, Arc::<ImportedArena>::clone(arena)) }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of registrations.
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Cuts `len` bytes from `offset` on where registrations meet: (offset, bytes) of each copy.
    pub fn pieces(&self, offset: usize, len: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        pieces(self.segment, offset.min(self.len), len.min(self.len.saturating_sub(offset)))
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

/// Where `range` of a payload at `base` begins, its length, and the bytes of one registration that holds it.
fn part(base: NonNull<u8>, payload: u64, range: ByteRange) -> Result<(NonNull<u8>, (usize, usize))> {
    let invalid = || {
        let detail = format!("bytes {range} of a payload of {payload} bytes");
        Error::new(Kind::Invalid, "cuMemHostRegister", detail)
    };
    if range.end > payload || range.start > range.end {
        return Err(invalid());
    }
    let offset = usize::try_from(range.start).map_err(|_| invalid())?;
    let len = usize::try_from(range.len()).map_err(|_| invalid())?;
    let at = NonNull::new(base.as_ptr().wrapping_add(offset)).ok_or_else(invalid)?;
    // A segment of whole pages holds all of it: the mapping has whole pages too.
    let segment = len.max(1).checked_next_multiple_of(rustix::param::page_size()).ok_or_else(invalid)?;
    Ok((at, (len, segment)))
}

fn pieces(segment: usize, offset: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = offset.saturating_add(len);
    let mut at = offset;
    std::iter::from_fn(move || {
        let left = end.checked_sub(at).filter(|left| *left > 0)?;
        let take = left.min(segment - at % segment);
        at += take;
        Some((at - take, take))
    })
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({} bytes in {} segments)", self.len, self.segments.len())
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        while let Some(segment) = self.segments.pop() {
            self.context.end(|ops| ops.host_unregister(segment.as_ptr()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_piece_crosses_a_registration_and_all_bytes_are_in_one(
            segment in 1usize..5000, offset in 0usize..100_000, len in 0usize..100_000,
        ) {
            let mut at = offset;
            for (start, size) in pieces(segment, offset, len) {
                prop_assert_eq!(start, at);
                prop_assert!(size > 0);
                prop_assert_eq!(start / segment, (start + size - 1) / segment);
                at += size;
            }
            prop_assert_eq!(at, offset + len);
        }
    }

    #[test]
    fn registrations_end_before_the_memory_they_pin_and_none_is_left_after_a_failure() {
        #[repr(align(4096))]
        struct Page([u8; 4096]);
        let page = rustix::param::page_size();
        let memory: Arc<Vec<Page>> = Arc::new((0..5 * page / 4096).map(|_| Page([0; 4096])).collect());
        let at = NonNull::from(&memory[0].0[0]);
        if !at.addr().get().is_multiple_of(page) {
            return;
        }
        for failing in 0..=3 {
            let fake = Fake::new();
            let context = fake.context();
            fake.fail_call("cuMemHostRegister", failing, crate::error::code::OUT_OF_MEMORY);
            // SAFETY: `memory` keeps its five pages mapped.
            let registered = unsafe { Registered::new(&context, at, 5 * page, 2 * page, memory.clone()) };
            assert_eq!(registered.is_ok(), failing == 3);
            if let Ok(registered) = registered {
                assert_eq!(registered.segments(), 3);
                assert_eq!(registered.pieces(page, 3 * page).count(), 2);
            }
            drop(context);
            assert_eq!(fake.leaks(), Vec::<String>::new());
        }
        let fake = Fake::new();
        // SAFETY: as above; zero bytes.
        let empty = unsafe { Registered::new(&fake.context(), at, 0, page, memory.clone()) }.unwrap();
        assert_eq!(empty.segments(), 0);
        // SAFETY: as above; refused.
        let crooked = unsafe { Registered::new(&fake.context(), at, page, page + 1, memory.clone()) };
        assert_eq!(crooked.unwrap_err().kind(), Kind::Invalid);
    }
}
