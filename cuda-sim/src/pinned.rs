//! Host memory that the device may reach by itself: allocated here, or the program's own and registered.

use crate::{
    abi::{HOST_READ_ONLY, code},
    loud,
    work::{Place, Touch},
    world::{State, fresh},
};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::{collections::BTreeMap, fs, ptr};

/// By start address.
#[derive(Debug, Default)]
pub(crate) struct Pins(BTreeMap<usize, Pin>);

#[derive(Debug)]
struct Pin {
    name: u64,
    context: usize,
    size: usize,
    /// Bytes mapped, for memory allocated here.
    allocated: Option<usize>,
    /// Registered for the device to read.
    read_only: bool,
}

/// What a copy's host side is.
#[derive(Debug)]
pub(crate) enum HostRange {
    Pinned(Place, Touch),
    Pageable,
}

/// Frees what a pin holds.
fn release(start: usize, pin: &Pin) {
    if let Some(mapped) = pin.allocated {
        // SAFETY: the pages were mapped for this pin; whoever freed it promised not to use them any more.
        let gone = unsafe { munmap(ptr::with_exposed_provenance_mut(start), mapped) };
        if gone.is_err() {
            loud::stop("munmap of pinned memory failed");
        }
    }
}

impl Pins {
    /// Row `host-alloc-sizes`.
    pub(crate) fn allocate(&mut self, context: usize, size: usize, flags: u32) -> Result<usize, u32> {
        if flags > 7 {
            return Err(code::INVALID_VALUE);
        }
        if size == 0 {
            return Ok(0);
        }
        let mapped = size.checked_next_multiple_of(4096).ok_or(code::OUT_OF_MEMORY)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), mapped, access, MapFlags::PRIVATE) };
        let at = at.map_err(|_| code::OUT_OF_MEMORY)?.expose_provenance();
        self.0.insert(at, Pin { name: fresh(), context, size, allocated: Some(mapped), read_only: false });
        Ok(at)
    }

    /// Rows `register-zero` to `register-shares-page`.
    pub(crate) fn register(&mut self, context: usize, at: usize, size: usize, flags: u32) -> Result<(), u32> {
        if at == 0 || size == 0 || flags > 0xF || at.checked_add(size).is_none() {
            return Err(code::INVALID_VALUE);
        }
        match self.overlapping(at, size) {
            Some((_, Pin { allocated: Some(_), .. })) => return Err(code::INVALID_VALUE),
            Some(_) => return Err(code::HOST_MEMORY_ALREADY_REGISTERED),
            None => {}
        }
        // By the documentation: registered so, a mapping that the program may only read will do.
        let read_only = flags & HOST_READ_ONLY != 0;
        if !is_mapped(at, size, if read_only { "r" } else { "rw" }) {
            return Err(code::INVALID_VALUE);
        }
        self.0.insert(at, Pin { name: fresh(), context, size, allocated: None, read_only });
        Ok(())
    }

    fn overlapping(&self, at: usize, size: usize) -> Option<(usize, &Pin)> {
        let (start, pin) = self.0.range(..at.saturating_add(size)).next_back()?;
        (start + pin.size > at).then_some((*start, pin))
    }

    /// Rows `copy-within-registration`, `copy-across-registrations`, `copy-beyond-registration`,
    /// `copy-beyond-allocated`. Stricter than `copy-before-registration`. What was registered for the device to read is not
    /// written by it: by the documentation.
    pub(crate) fn classify(&self, at: usize, size: usize, write: bool) -> Result<HostRange, u32> {
        // Row `copy-null-host`.
        if at == 0 {
            return Err(code::INVALID_VALUE);
        }
        match self.overlapping(at, size) {
            None => Ok(HostRange::Pageable),
            Some((_, Pin { read_only: true, .. })) if write => Err(code::INVALID_VALUE),
            Some((start, pin)) if start <= at && at + size <= start + pin.size => {
                Ok(HostRange::Pinned(Place(at), Touch::Pin(pin.name)))
            }
            Some(_) => Err(code::INVALID_VALUE),
        }
    }

    /// The context is gone, and nothing of it is pending.
    pub(crate) fn forget(&mut self, context: usize) {
        for (start, pin) in self.0.extract_if(.., |_, pin| pin.context == context) {
            release(start, &pin);
        }
    }
}

impl State {
    fn unpin(&mut self, call: &str, at: usize) {
        let Some(pin) = self.pins.0.get(&at) else { return };
        if let Some(what) = self.streams.pending(&Touch::Pin(pin.name)) {
            loud::stop(&format!("{call} while {what} is pending on the same memory"));
        }
        if let Some(pin) = self.pins.0.remove(&at) {
            release(at, &pin);
        }
    }

    /// Rows `host-free-bad`, `host-free-inside`. Stricter than `host-free-under-pending-copy`.
    pub(crate) fn host_free(&mut self, at: usize) -> Result<(), u32> {
        if at == 0 {
            return Ok(());
        }
        if self.pins.0.get(&at).is_none_or(|pin| pin.allocated.is_none()) {
            return Err(code::INVALID_VALUE);
        }
        self.unpin("cuMemFreeHost", at);
        Ok(())
    }

    /// Rows `unregister-unknown`, `unregister-inside`, `unregister-twice`, `host-unregister-allocated`. Stricter
    /// than `unregister-under-pending-copy`.
    pub(crate) fn host_unregister(&mut self, at: usize) -> Result<(), u32> {
        let found = self.pins.overlapping(at, 1);
        match found {
            _ if at == 0 => return Err(code::INVALID_VALUE),
            None => return Err(code::HOST_MEMORY_NOT_REGISTERED),
            Some((start, pin)) if start != at || pin.allocated.is_some() => return Err(code::INVALID_VALUE),
            Some(_) => {}
        }
        self.unpin("cuMemHostUnregister", at);
        Ok(())
    }
}

/// Whether the program's rights to the whole range begin with `rights` (rows `register-unmapped`, `register-read-only`).
fn is_mapped(at: usize, size: usize, rights: &str) -> bool {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return false };
    let mut reached = at;
    for line in maps.lines() {
        let Some((range, rest)) = line.split_once(' ') else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
        let (start, end) = (number(start), number(end));
        if start <= reached && reached < end && rest.starts_with(rights) {
            reached = end;
        }
        if reached >= at + size {
            return true;
        }
    }
    false
}
