//! A piece of queued work: what it does and what it needs until it is done.

use crate::{kernel::Kernel, loud};
use std::{
    ptr, slice,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// Something that must stay while work is pending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Touch {
    Mapping(u64),
    /// By the handle that was mapped: an import is another one.
    Handle(u64),
    Pin(u64),
    Module(u64),
    Context(usize),
}

/// Queued work.
#[derive(Debug)]
pub(crate) struct Work {
    /// In words, for whoever gets in its way.
    pub(crate) what: String,
    pub(crate) touches: Vec<Touch>,
    pub(crate) action: Action,
}

/// Mapped memory of this process, kept mapped by `touches`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place(pub(crate) usize);

impl Place {
    pub(crate) fn at(self, offset: usize) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.0 + offset)
    }
}

/// What it does.
#[derive(Debug)]
pub(crate) enum Action {
    Copy {
        from: Place,
        to: Place,
        size: usize,
    },
    /// From a copy of pageable memory made at the call (row `copy-pageable-staged`).
    Staged {
        from: Vec<u8>,
        to: Place,
    },
    Fill {
        to: Place,
        byte: u8,
        size: usize,
    },
    Kernel(Kernel),
    Record(Arc<Marker>),
    Wait(Arc<Marker>),
    /// An access that no mapping allows.
    Fault(u32),
}

/// One recording of an event.
#[derive(Debug, Default)]
pub(crate) struct Marker(Mutex<Option<Instant>>);

impl Marker {
    /// When the work before it was done.
    pub(crate) fn done(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

impl Work {
    /// Does it. Waiting is the stream's.
    pub(crate) fn run(&self) -> Result<(), u32> {
        match &self.action {
            Action::Copy { from, to, size } => copy(*from, *to, *size),
            Action::Staged { from, to } => copy(Place(from.as_ptr().expose_provenance()), *to, from.len()),
            Action::Fill { to, byte, size } => fill(*to, *byte, *size),
            Action::Kernel(kernel) => kernel.run(),
            Action::Record(marker) => marker.set(),
            Action::Wait(marker) => {
                if marker.done().is_none() {
                    loud::stop("a stream went past an event that is not done");
                }
            }
            Action::Fault(code) => return Err(*code),
        }
        Ok(())
    }
}

/// Aligned words move whole, as over the bus: peers poll them.
pub(crate) fn copy(from: Place, to: Place, size: usize) {
    if size == 8 && from.0.is_multiple_of(8) && to.0.is_multiple_of(8) {
        // SAFETY: `touches` keeps 8 readable bytes at `from`, aligned as just checked.
        let from = unsafe { AtomicU64::from_ptr(from.at(0).cast()) };
        // SAFETY: likewise for `to`, which is writable.
        let to = unsafe { AtomicU64::from_ptr(to.at(0).cast()) };
        to.store(from.load(Ordering::Acquire), Ordering::Release);
        return;
    }
    // SAFETY: `touches` keeps `size` bytes at both ends, readable and writable as the call checked. Who else
    // writes them is the program's affair, as on a GPU; bytes are all that is read.
    unsafe { ptr::copy(from.at(0), to.at(0), size) };
}

fn fill(to: Place, byte: u8, size: usize) {
    // SAFETY: as for `copy`.
    unsafe { ptr::write_bytes(to.at(0), byte, size) };
}

/// Copies device memory into a buffer of our own, so that no reference points into memory that others write.
pub(crate) fn read(from: Place, offset: usize, into: &mut [u8]) {
    copy(
        Place(from.0 + offset),
        Place(into.as_mut_ptr().expose_provenance()),
        // One byte at a time is as good for tiny ones; nothing polls through here.
        into.len(),
    );
}

/// Writes our own bytes to device memory.
pub(crate) fn write(to: Place, offset: usize, bytes: &[u8]) {
    copy(Place(bytes.as_ptr().expose_provenance()), Place(to.0 + offset), bytes.len());
}

/// A copy of the program's pageable memory.
pub(crate) fn stage(from: *const u8, size: usize) -> Vec<u8> {
    // SAFETY: the caller of the driver promised `size` readable bytes; a wrong address faults, as it would there.
    unsafe { slice::from_raw_parts(from, size) }.to_vec()
}
