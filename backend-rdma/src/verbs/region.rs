//! Registered memory.

use super::{Call, Device, Registered};
use std::{fmt, os::fd::BorrowedFd, sync::Arc};

/// A range that the device's NIC may write for us and read for peers. Peers cannot write it: its keys say so to the NIC.
pub(crate) struct Region {
    device: Arc<Device>,
    registered: Registered,
}

impl Region {
    /// Registers `len` bytes at `address`.
    ///
    /// # Safety
    /// Whatever peers read there is theirs to read; nothing but requests that name this region is written, and who posts
    /// one keeps the bytes mapped until it has completed.
    pub(crate) unsafe fn of_address(device: &Arc<Device>, address: u64, len: u64) -> Call<Self> {
        // SAFETY: the caller's promise.
        let registered = unsafe { device.verbs.register(device.domain, address, len) }?;
        Ok(Self { device: Arc::clone(device), registered })
    }

    /// Registers `len` bytes from `offset` on of what a dma-buf is of; `address` names the first of them in requests.
    ///
    /// # Safety
    /// As for [`of_address`](Self::of_address).
    pub(crate) unsafe fn of_dma_buf(
        device: &Arc<Device>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
    ) -> Call<Self> {
        // SAFETY: the caller's promise.
        let registered = unsafe { device.verbs.register_dma_buf(device.domain, fd, offset, len, address) }?;
        Ok(Self { device: Arc::clone(device), registered })
    }

    pub(crate) fn local_key(&self) -> u32 {
        self.registered.local_key
    }

    pub(crate) fn remote_key(&self) -> u32 {
        self.registered.remote_key
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Err(e) = self.device.verbs.deregister(self.registered.handle) {
            tracing::error!(
                device = self.device.name(),
                call = e.call,
                errno = e.errno,
                "memory stays registered"
            );
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("device", &self.device).finish_non_exhaustive()
    }
}
