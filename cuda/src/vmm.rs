//! Virtual memory management: memory of a GPU, its mapping, its handles.
//!
//! Teardown runs in one order: whole mapping unmapped, handle released, addresses freed. The caller drains what
//! uses a mapping first. A step that fails is logged and never keeps the next from being tried.

use crate::{
    Context,
    api::{DevicePtr, Handle},
    ops::{Access, AllocationKind, Call},
};
use flashboot_core::{Error, Kind, Result};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Physical memory: created here, or imported from a peer. Each holds one reference of the driver's own, given
/// back on drop.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Context,
    handle: Handle,
    size: u64,
}

impl Memory {
    /// `size` must be a multiple of the granularity of `kind`.
    pub(crate) fn create(context: &Context, size: u64, kind: AllocationKind) -> Result<Self> {
        Ok(Self::create_raw(context, size, kind)?)
    }

    /// The same, with the driver's error as it is, for who decides on it.
    pub(crate) fn create_raw(context: &Context, size: u64, kind: AllocationKind) -> Call<Self> {
        let handle = context.raw_call(|ops| ops.mem_create(size, kind))?;
        Ok(Self { context: context.clone(), handle, size })
    }

    /// The memory behind a peer's descriptor. The driver keeps no hold on `fd` itself. Nothing tells its size:
    /// `size` is the locator's word, and mapping fails when it is more than there is.
    pub(crate) fn import_fd(context: &Context, fd: BorrowedFd<'_>, size: u64) -> Result<Self> {
        let handle = context.call(|ops| ops.import_fd(fd))?;
        Ok(Self { context: context.clone(), handle, size })
    }

    /// The memory behind a peer's fabric handle.
    pub(crate) fn import_fabric(context: &Context, fabric: &[u8; 64], size: u64) -> Result<Self> {
        let handle = context.call(|ops| ops.import_fabric(fabric))?;
        Ok(Self { context: context.clone(), handle, size })
    }

    pub(crate) fn export_fd(&self) -> Result<OwnedFd> {
        self.context.call(|ops| ops.export_fd(self.handle))
    }

    pub(crate) fn export_fabric(&self) -> Result<Box<[u8; 64]>> {
        self.context.call(|ops| ops.export_fabric(self.handle))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.context.end(|ops| ops.mem_release(self.handle));
    }
}

/// A range of addresses.
#[derive(Debug)]
struct Reservation {
    context: Context,
    at: DevicePtr,
    size: u64,
}

impl Reservation {
    fn new(context: &Context, size: u64) -> Result<Self> {
        let at = context.call(|ops| ops.address_reserve(size))?;
        Ok(Self { context: context.clone(), at, size })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.context.end(|ops| ops.address_free(self.at, self.size));
    }
}

/// The whole of some [`Memory`] at addresses of its own, for its context's device.
///
/// The fields' order is the order of teardown after `drop` has unmapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    memory: Memory,
    reservation: Reservation,
}

impl Mapping {
    pub(crate) fn new(memory: Memory, access: Access) -> Result<Self> {
        // On failure locals go in reverse: the addresses here, then the caller's memory.
        let context = memory.context.clone();
        let size = memory.size;
        let reservation = Reservation::new(&context, size)?;
        context.call(|ops| ops.mem_map(reservation.at, size, memory.handle))?;
        let mapping = Self { memory, reservation };
        let (at, device) = (mapping.at(), context.device().ordinal);
        context.call(|ops| ops.set_access(at, size, device, access))?;
        Ok(mapping)
    }

    pub(crate) fn context(&self) -> &Context {
        &self.memory.context
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn at(&self) -> DevicePtr {
        self.reservation.at
    }

    pub(crate) fn size(&self) -> u64 {
        self.memory.size
    }

    /// The address of `len` bytes from `offset` on, when they lie inside.
    pub(crate) fn range(&self, op: &'static str, offset: u64, len: u64) -> Result<DevicePtr> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size() => Ok(self.at() + offset),
            _ => Err(Error::new(
                Kind::Invalid,
                op,
                format!("{len} bytes from {offset} on of a mapping of {} bytes", self.size()),
            )),
        }
    }

    pub(crate) fn dma_buf(&self) -> Result<OwnedFd> {
        self.context().call(|ops| ops.dma_buf(self.at(), self.size()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.memory.context.end(|ops| ops.mem_unmap(self.reservation.at, self.reservation.size));
    }
}

/// `bytes` rounded up to `granularity`; `None` past 2^64 or for a granularity of zero.
pub(crate) fn rounded(bytes: u64, granularity: u64) -> Option<u64> {
    if granularity == 0 { None } else { bytes.checked_next_multiple_of(granularity) }
}
