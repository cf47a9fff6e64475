//! Which arenas are registered: each once, on every device of the endpoint, for as long as the arena lives.

use crate::{
    arena::{Seen, Served},
    counters::Counters,
    error::{failed, not_registered},
    extent::Extent,
    rail::Rail,
    verbs::Region,
};
use flashboot_core::{Error, Kind, Result};
use std::sync::{Arc, Mutex, PoisonError};

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
        let seen = arena.downgrade();
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
    let (address, len) = (arena.address(), arena.arena().capacity());
    // One cut for all, so that a message fits every device.
    let max = rails.iter().map(|rail| rail.device().limits().max_mr_size).min().unwrap_or(0);
    let extent = Extent::new(address, len, max).ok_or_else(|| {
        let detail = format!("an arena of {len} bytes, where a device registers {max} bytes at once");
        Error::new(Kind::Exhausted, "ibv_reg_mr", detail).with_remedy("use another device (rdma.devices)")
    })?;
    let mut regions = Vec::with_capacity(rails.len());
    for rail in rails {
        regions.push(on_rail(arena, rail, extent, counters)?);
    }
    Ok(Registration { extent, regions })
}

fn on_rail(arena: &Served, rail: &Rail, extent: Extent, counters: &Counters) -> Result<Vec<Region>> {
    let regions = match arena {
        Served::Host(_) => extent
            .parts()
            .map(|(start, len)| {
                // SAFETY: the arena's own mapping. Peers may read all of it; requests that write it are posted by the
                // engine only, for ranges that it owns (`Served::own`). The pages stay with the region until it is
                // deregistered, whatever the arena does.
                let region = unsafe { Region::of_address(rail.device(), extent.address + start, len) };
                region.map_err(|e| not_registered(e, rail.name(), extent.len))
            })
            .collect::<Result<Vec<_>>>()?,
        Served::Gpu(gpu) => vec![gpu_region(gpu, rail, extent)?],
    };
    counters.regions_registered.add(regions.len() as u64);
    Ok(regions)
}

/// By dma-buf, else by address, which needs nvidia-peermem. Never run on hardware.
fn gpu_region(gpu: &flashboot_cuda::CudaArena, rail: &Rail, extent: Extent) -> Result<Region> {
    if extent.regions() != 1 {
        let detail = format!("{} registers less at once than the arena's {} bytes", rail.name(), extent.len);
        return Err(Error::new(Kind::Unavailable, "ibv_reg_dmabuf_mr", detail));
    }
    let by_dma_buf = gpu.dma_buf().and_then(|fd| {
        use std::os::fd::AsFd as _;
        // SAFETY: as for host memory; the dma-buf keeps the GPU's memory as long as the region.
        let region = unsafe { Region::of_dma_buf(rail.device(), fd.as_fd(), extent.len, extent.address) };
        region.map_err(|e| failed(e, rail.name(), None, "registering GPU memory by dma-buf"))
    });
    let first = match by_dma_buf {
        Ok(region) => return Ok(region),
        Err(first) => first,
    };
    // SAFETY: as for host memory; nvidia-peermem takes the region away when the GPU's memory goes.
    let by_address = unsafe { Region::of_address(rail.device(), extent.address, extent.len) };
    by_address.map_err(|second| {
        let second = failed(second, rail.name(), None, "registering GPU memory by address (nvidia-peermem)");
        let code = second.code().or(first.code());
        let both = Error::new(Kind::Unavailable, "ibv_reg_dmabuf_mr", format!("{first}; {second}"));
        let both = code.map_or(both.clone(), |code| both.with_code(code));
        both.with_remedy(
            "use the GPU's open kernel modules (dma-buf, Linux 5.12 or later), or load nvidia-peermem",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::RdmaConfig, rail::open_all, verbs::fake::Fake};
    use flashboot_core::{ArenaSpec, Code};
    use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};

    #[test]
    #[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
    fn gpu_memory_is_registered_by_dma_buf_else_by_address_else_both_errors_are_told() {
        let context = Context::open(&Device::find("cuda:0").unwrap()).unwrap();
        let spec = ArenaSpec { payload: 4 << 20, shards: 1 };
        let (arena, _) = CudaArena::create_in(&context, spec, &CudaArenaConfig::default()).unwrap();
        let served = Served::Gpu(arena);
        let with = |refused: &[(&'static str, i32)]| {
            let fake = Fake::new(&["a"]);
            let counters = Arc::new(Counters::default());
            let rails = open_all(&fake.verbs(), &RdmaConfig::default(), &counters).unwrap();
            refused.iter().for_each(|(call, errno)| fake.refuse(call, *errno));
            let made = Regions::default().of(&served, &rails, &counters);
            (fake.registrations(), made.map(|made| made.local_keys(0).len()))
        };
        let (dma_buf, address) = ("ibv_reg_dmabuf_mr", "ibv_reg_mr");
        assert_eq!(with(&[]), (vec![dma_buf], Ok(1)));
        assert_eq!(with(&[(dma_buf, 95)]), (vec![dma_buf, address], Ok(1)));
        let (tried, refused) = with(&[(dma_buf, 95), (address, 14)]);
        let refused = refused.unwrap_err();
        assert_eq!((tried, refused.kind()), (vec![dma_buf, address], Kind::Unavailable));
        for code in [95, 14].map(Code::Errno) {
            assert!(refused.to_string().contains(&code.to_string()), "{refused}");
        }
        assert!(refused.remedy().is_some_and(|remedy| remedy.contains("nvidia-peermem")), "{refused}");
    }
}
