//! A range of an arena that something other than this crate's mover writes: a NIC.

use super::CudaArena;
use crate::hash;
use flashboot_core::{Arena as _, BlockDigest, ByteRange, Result, claims::Claim};
use std::{fmt, sync::Arc};

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES`: no flush is ever needed.
const ORDERED_FOR_ALL: i32 = 200;

/// Exclusive ownership of a range; it keeps the arena mapped.
pub struct OwnedGpuRange {
    // The claim goes first: the range is free before the memory can go.
    claim: Claim,
    arena: Arc<CudaArena>,
}

impl CudaArena {
    /// Owns `range` of the payload until the value is dropped, for a writer that is neither a method of the arena nor its
    /// mover.
    ///
    /// # Errors
    /// [`flashboot_core::Kind::Invalid`] past the payload, [`flashboot_core::Kind::Busy`] when any byte of it is owned.
    pub fn own(arena: &Arc<Self>, range: ByteRange) -> Result<OwnedGpuRange> {
        Ok(OwnedGpuRange { claim: arena.claim(range)?, arena: Arc::clone(arena) })
    }

    /// Makes what a NIC has written to this GPU's memory visible to every GPU. Without it a kernel or copy engine may still
    /// read the old bytes, although the NIC has reported its end. Does nothing where the hardware keeps that order by
    /// itself. Never run on hardware.
    pub fn settle_nic_writes(&self) -> Result<()> {
        let device = self.context().device();
        if device.nic_writes_ordered()? >= ORDERED_FOR_ALL {
            return Ok(());
        }
        self.context().call(|ops| ops.flush_nic_writes())
    }
}

impl OwnedGpuRange {
    /// The bytes owned.
    pub fn range(&self) -> ByteRange {
        self.claim.range()
    }

    /// As [`CudaArena::settle_nic_writes`].
    pub fn settle_nic_writes(&self) -> Result<()> {
        self.arena.settle_nic_writes()
    }

    /// The values of the range's blocks, found on the GPU, or through the host where the kernel does not work. Blocks
    /// until they are there.
    ///
    /// # Errors
    /// [`flashboot_core::Kind::Invalid`] when the range is no whole blocks, and the driver's own.
    pub fn digests(&self, block: u64) -> Result<Vec<BlockDigest>> {
        hash::check_blocks(self.arena.payload(), self.range(), block)?;
        if self.range().is_empty() {
            return Ok(Vec::new());
        }
        self.arena.digests_of_owned(self.range(), block)
    }
}

impl fmt::Debug for OwnedGpuRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedGpuRange").field(&self.range()).finish()
    }
}
