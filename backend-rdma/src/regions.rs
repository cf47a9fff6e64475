//! Which arenas are registered: each once, on every device of the endpoint, for as long as the arena lives.

use crate::{
    arena::{Seen, Served, address},
    counters::Counters,
    error::{failed, not_registered},
    extent::Extent,
    rail::Rail,
    verbs::{Call, Region, VerbsError},
};
use flashboot_core::{Error, Kind, Result};
use flashboot_cuda::CudaArena;
use std::{
    os::fd::{AsFd as _, BorrowedFd},
    sync::{Arc, Mutex, PoisonError},
};

/// An arena as every device of an endpoint knows it.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) extent: Extent,
    /// By device, then by region.
    regions: Vec<Vec<Region>>,
}

impl Registration {
    /// The keys by which our own requests write the arena's regions.
    pub(crate) fn local_keys(&self, rail: usize) -> Vec<u32> {
        self.regions
            .get(rail)
            .map_or_else(Vec::new, |regions| regions.iter().map(Region::local_key).collect())
    }

    /// The keys by which peers read them.
    pub(crate) fn remote_keys(&self, rail: usize) -> Vec<u32> {
        self.regions
            .get(rail)
            .map_or_else(Vec::new, |regions| regions.iter().map(Region::remote_key).collect())
    }
}

type Slot = Arc<Mutex<Option<Arc<Registration>>>>;

/// The arenas that are registered.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    slots: Mutex<Vec<(Seen, Slot)>>,
}

impl Regions {
    /// The registration of `arena`, made if it is the first time. Blocks for as long as the driver needs to pin the pages.
    pub(crate) fn of(
        &self,
        arena: &Served,
        rails: &[Arc<Rail>],
        counters: &Counters,
    ) -> Result<Arc<Registration>> {
        self.sweep();
        let seen = Seen::of(arena);
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            match slots.iter().find(|(other, _)| other.is(&seen)) {
                Some((_, slot)) => Arc::clone(slot),
                None => {
                    let slot = Slot::default();
                    slots.push((seen, Arc::clone(&slot)));
                    slot
                }
            }
        };
        // Whoever comes second waits here instead of registering it again.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = &*slot {
            return Ok(Arc::clone(made));
        }
        let made = Arc::new(register(arena, rails, counters)?);
        *slot = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Lets go of arenas that are gone.
    pub(crate) fn sweep(&self) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let (gone, kept) = std::mem::take(&mut *slots).into_iter().partition(|(seen, _)| seen.is_gone());
        *slots = kept;
        // To unpin takes a while: not under the lock.
        drop(slots);
        let gone: Vec<(Seen, Slot)> = gone;
        drop(gone);
    }
}

fn register(arena: &Served, rails: &[Arc<Rail>], counters: &Counters) -> Result<Registration> {
    let (address, len) = (address(arena), arena.arena().capacity());
    // One cut for all, so that a message fits every device.
    let max = rails.iter().map(|rail| rail.device().limits().max_mr_size).min().unwrap_or(0);
    let extent = Extent::new(address, len, max).ok_or_else(|| {
        let detail = format!("an arena of {len} bytes, where a device registers {max} bytes at once");
        Error::new(Kind::Exhausted, "ibv_reg_mr", detail).with_remedy("use another device (rdma.devices)")
    })?;
    let mut regions = Vec::with_capacity(rails.len());
    for rail in rails {
        regions.push(on_rail(arena, rail, extent)?);
    }
    // What stays registered: a device's refusal gives back the others' regions.
    counters.regions_registered.add(regions.iter().map(|regions| regions.len() as u64).sum());
    Ok(Registration { extent, regions })
}

fn on_rail(arena: &Served, rail: &Rail, extent: Extent) -> Result<Vec<Region>> {
    match arena {
        Served::Host(_) => {
            by_address(rail, extent).map_err(|(_, e)| not_registered(e, rail.name(), extent.len))
        }
        Served::Gpu(gpu) => gpu_regions(gpu, rail, extent),
    }
}

/// What a device would not register: the number of the region, and why.
type Refused = (u64, VerbsError);

/// Registers every part of an arena one way. The first refusal ends it, and gives back what was registered before it.
fn each(extent: Extent, register: impl Fn(u64, u64) -> Call<Region>) -> Result<Vec<Region>, Refused> {
    let numbered = (0..).zip(extent.parts());
    numbered.map(|(number, (start, len))| register(start, len).map_err(|e| (number, e))).collect()
}

fn by_address(rail: &Rail, extent: Extent) -> Result<Vec<Region>, Refused> {
    each(extent, |start, len| {
        // SAFETY: the arena's own mapping. Peers may read all of it; requests that write it are posted by the engine only,
        // for ranges that it owns (`Owned::of`). A host's pages stay with the region until it is deregistered, whatever
        // the arena does; nvidia-peermem takes a region away when the GPU's memory goes.
        unsafe { Region::of_address(rail.device(), extent.address + start, len) }
    })
}

/// One descriptor serves every part.
fn by_dma_buf(fd: BorrowedFd<'_>, rail: &Rail, extent: Extent) -> Result<Vec<Region>, Refused> {
    each(extent, |start, len| {
        // SAFETY: as by address; the dma-buf keeps the GPU's memory as long as the region.
        unsafe { Region::of_dma_buf(rail.device(), fd, start, len, extent.address + start) }
    })
}

/// By dma-buf, else by address, which needs nvidia-peermem; all regions the same way. Never run on hardware.
fn gpu_regions(gpu: &CudaArena, rail: &Rail, extent: Extent) -> Result<Vec<Region>> {
    let refused = |(number, e): Refused| (Some(number), failed(e, rail.name(), None, "registering it"));
    let exported = gpu.dma_buf().map_err(|e| (None, e));
    let (at, first) = match exported.and_then(|fd| by_dma_buf(fd.as_fd(), rail, extent).map_err(refused)) {
        Ok(regions) => return Ok(regions),
        Err(first) => first,
    };
    let (then_at, second) = match by_address(rail, extent).map_err(refused) {
        Ok(regions) => {
            let device = rail.name();
            tracing::warn!(device, error = %first, "GPU memory is registered by address (nvidia-peermem), not by dma-buf");
            return Ok(regions);
        }
        Err(second) => second,
    };
    let of = |number: Option<u64>| match (number, extent.regions()) {
        (None, _) | (_, 1) => String::new(),
        (Some(number), regions) => format!(", region {} of {regions}", number.saturating_add(1)),
    };
    let detail = format!(
        "GPU memory by dma-buf{}: {first}; by address (nvidia-peermem){}: {second}",
        of(at),
        of(then_at)
    );
    // A way by which a region was taken works: there is no room for the others.
    let remedy = if at.max(then_at) > Some(0) {
        "the device takes some regions and no more: use one that registers larger or more of them (rdma.devices), or let go \
         of other arenas"
    } else {
        "use the GPU's open kernel modules (dma-buf, Linux 5.12 or later), or load nvidia-peermem"
    };
    // The last verb's, with its number.
    let both = Error::new(Kind::Unavailable, second.op(), detail).with_remedy(remedy);
    Err(second.code().into_iter().fold(both, Error::with_code))
}

#[cfg(test)]
mod tests;
