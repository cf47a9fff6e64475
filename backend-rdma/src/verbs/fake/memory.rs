//! What the stand-in provider has registered, and how it reaches it: host memory where it is, and what a dma-buf is of by
//! mapping the descriptor, from the region's own offset on. What it writes there goes by the stand-in driver, which shows it
//! to its GPUs behind the flush and not before.

use super::super::{Call, Registered, VerbsError};
use crate::verbs::Handle;
use libloading::os::unix::{Library, Symbol};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    collections::HashMap,
    ffi::c_int,
    os::fd::{AsRawFd as _, BorrowedFd, OwnedFd},
    ptr,
    sync::OnceLock,
};

/// A descriptor, the offset into it, and bytes.
type NicWrite = unsafe extern "C" fn(c_int, u64, *const u8, usize) -> u32;

/// The stand-in driver's way for a card to write.
fn nic_write() -> &'static Symbol<NicWrite> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    static NIC_WRITE: OnceLock<Symbol<NicWrite>> = OnceLock::new();
    NIC_WRITE.get_or_init(|| {
        // SAFETY: the driver whose dma-buf is written is loaded already.
        let driver = LIBRARY.get_or_init(|| unsafe { Library::new("libcuda.so.1") }.unwrap());
        // SAFETY: the stand-in's signature; a driver has no such symbol.
        unsafe { driver.get(b"flashboot_cuda_sim_nic_write") }.expect("the stand-in driver")
    })
}

/// One call that was to register memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) call: &'static str,
    /// Into the dma-buf; nought by address.
    pub(crate) offset: u64,
    pub(crate) address: u64,
    pub(crate) len: u64,
}

#[derive(Debug, Default)]
pub(super) struct Memory {
    regions: HashMap<u32, Region>,
    pub(super) asked: Vec<Asked>,
    pub(super) deregistered: usize,
}

#[derive(Debug)]
struct Region {
    address: u64,
    len: u64,
    /// Where its first byte is in this process.
    at: usize,
    /// What it is mapped from, and from where on.
    dma_buf: Option<(OwnedFd, u64)>,
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.dma_buf.is_some() {
            // SAFETY: the mapping is this region's own, and nobody uses it any more.
            unsafe { munmap(ptr::with_exposed_provenance_mut(self.at), self.len as usize) }.unwrap();
        }
    }
}

impl Memory {
    pub(super) fn count(&self) -> usize {
        self.regions.len()
    }

    pub(super) fn by_address(&mut self, (number, handle): (usize, Handle), asked: Asked) -> Registered {
        let Asked { address, len, .. } = asked;
        self.keep(number, handle, Region { address, len, at: address as usize, dma_buf: None })
    }

    pub(super) fn by_dma_buf(
        &mut self,
        (number, handle): (usize, Handle),
        fd: BorrowedFd<'_>,
        asked: Asked,
    ) -> Call<Registered> {
        let Asked { call, offset, address, len } = asked;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the system's choice.
        let mapped = unsafe { mmap(ptr::null_mut(), len as usize, access, MapFlags::SHARED, fd, offset) };
        let at = mapped.map_err(|e| VerbsError { call, errno: e.raw_os_error() })?.expose_provenance();
        let dma_buf = Some((fd.try_clone_to_owned().unwrap(), offset));
        Ok(self.keep(number, handle, Region { address, len, at, dma_buf }))
    }

    fn keep(&mut self, number: usize, handle: Handle, region: Region) -> Registered {
        let key = number as u32;
        self.regions.insert(key, region);
        Registered { handle, local_key: key, remote_key: key }
    }

    pub(super) fn deregister(&mut self, number: usize) {
        self.deregistered += usize::from(self.regions.remove(&(number as u32)).is_some());
    }

    /// Where `len` bytes that a request names by `key` and `address` are, if they are of that region.
    pub(super) fn find(&self, key: u32, address: u64, len: u32) -> Option<usize> {
        self.offset(key, address, len).map(|(region, offset)| region.at + offset as usize)
    }

    fn offset(&self, key: u32, address: u64, len: u32) -> Option<(&Region, u64)> {
        let region = self.regions.get(&key)?;
        let offset = address.checked_sub(region.address)?;
        (offset + u64::from(len) <= region.len).then_some((region, offset))
    }

    /// One READ: `len` bytes from one place that was found to one that a request names.
    pub(super) fn copy(&self, from: usize, key: u32, address: u64, len: u32) {
        let (region, offset) = self.offset(key, address, len).unwrap();
        let from = ptr::with_exposed_provenance::<u8>(from);
        match &region.dma_buf {
            Some((fd, start)) => {
                let write = nic_write();
                // SAFETY: the region's own descriptor; the bytes lie in a region that was registered, which the tests keep
                // mapped.
                let code = unsafe { write(fd.as_raw_fd(), start + offset, from, len as usize) };
                assert_eq!(code, 0, "the stand-in driver");
            }
            None => {
                let to = ptr::with_exposed_provenance_mut::<u8>(region.at + offset as usize);
                // SAFETY: both ends lie in regions that were registered, which the tests keep mapped; the requests' owner
                // keeps others off the destination.
                unsafe { ptr::copy_nonoverlapping(from, to, len as usize) };
            }
        }
    }
}
