//! Where READs of a peer's words land: a page of ours, registered on every device, in slots of a cache line.

use crate::{
    counters::Counters,
    error::{failed, not_registered},
    rail::Rail,
    verbs::{Region, VerbsError},
};
use flashboot_core::Result;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::{
    ffi::c_void,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Words of a slot.
pub(crate) const WORDS: usize = 8;
const SLOT: usize = WORDS * 8;
const LEN: usize = 64 << 10;
/// Looks that may be under way at once in one endpoint.
pub(crate) const SLOTS: usize = LEN / SLOT;

#[derive(Debug)]
pub(crate) struct Scratch {
    // Deregistered before it is unmapped.
    regions: Vec<Region>,
    page: Page,
}

#[derive(Debug)]
struct Page(*mut c_void);

// SAFETY: every access is atomic or a NIC's.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Scratch {
    pub(crate) fn new(rails: &[Arc<Rail>], counters: &Counters) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping of ours.
        let at =
            unsafe { mmap_anonymous(ptr::null_mut(), LEN, protection, MapFlags::PRIVATE) }.map_err(|e| {
                failed(
                    VerbsError { call: "mmap", errno: e.raw_os_error() },
                    "this host",
                    None,
                    "a page for words",
                )
            })?;
        let page = Page(at);
        let mut regions = Vec::new();
        for rail in rails {
            let address = at.expose_provenance() as u64;
            // SAFETY: the page is ours, lives as long as the regions, and holds nothing but words for the engine; no peer
            // is ever told its key.
            let region = unsafe { Region::of_address(rail.device(), address, LEN as u64) };
            regions.push(region.map_err(|e| not_registered(e, rail.name(), LEN as u64))?);
            counters.regions_registered.add(1);
        }
        Ok(Self { regions, page })
    }

    /// The address of word `word` of `slot`.
    pub(crate) fn address(&self, slot: usize, word: usize) -> u64 {
        self.at(slot, word).expose_provenance() as u64
    }

    fn at(&self, slot: usize, word: usize) -> *mut u64 {
        let offset = (slot.min(SLOTS - 1) * SLOT) + word.min(WORDS - 1) * 8;
        self.page.0.cast::<u8>().wrapping_add(offset).cast()
    }

    pub(crate) fn local_key(&self, rail: usize) -> u32 {
        self.regions.get(rail).map_or(0, Region::local_key)
    }

    /// The words of `slot`, once the READs that fill it have completed.
    pub(crate) fn words(&self, slot: usize) -> [u64; WORDS] {
        std::array::from_fn(|word| {
            // SAFETY: inside the page and aligned; all accesses but the NIC's are atomic, and the NIC is done.
            let word = unsafe { AtomicU64::from_ptr(self.at(slot, word)) };
            word.load(Ordering::Acquire)
        })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, whose regions are gone.
        let _ = unsafe { munmap(self.0, LEN) };
    }
}
