//! What the stand-in provider has registered, and how it reaches it: host memory where it is, and what a dma-buf is of by
//! mapping the descriptor, from the region's own offset on.

use super::super::{Call, Registered, VerbsError};
use crate::verbs::Handle;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::{collections::HashMap, os::fd::BorrowedFd, ptr};

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
    mapped: bool,
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.mapped {
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
        self.keep(number, handle, Region { address, len, at: address as usize, mapped: false })
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
        Ok(self.keep(number, handle, Region { address, len, at, mapped: true }))
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
        let region = self.regions.get(&key)?;
        let offset = address.checked_sub(region.address)?;
        (offset + u64::from(len) <= region.len).then(|| region.at + offset as usize)
    }
}
