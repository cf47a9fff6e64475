//! The arenas that `rdma` serves, and owning a range of one while a NIC writes it.

use crate::transport::SERVES;
use flashboot_core::{
    BlockDigest, ByteRange, Error, Kind, Location, Locator, Result, TransportName, check_served,
};
pub(crate) use flashboot_cuda::Served;
use flashboot_cuda::{CudaArena, CudaOwned};
use flashboot_memory::{HostArena, OwnedRange};
use std::sync::{Arc, Weak};

/// The address by which a NIC knows the arena's first byte.
pub(crate) fn address(served: &Served) -> u64 {
    match served {
        Served::Host(arena) => arena.base().as_ptr().expose_provenance() as u64,
        Served::Gpu(arena) => arena.device_address(),
    }
}

/// An arena that may be gone. It keeps the allocation's identity, not its memory.
#[derive(Debug, Clone)]
pub(crate) enum Seen {
    Host(Weak<HostArena>),
    Gpu(Weak<CudaArena>),
}

impl Seen {
    pub(crate) fn of(served: &Served) -> Self {
        match served {
            Served::Host(arena) => Self::Host(Arc::downgrade(arena)),
            Served::Gpu(arena) => Self::Gpu(Arc::downgrade(arena)),
        }
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(a), Self::Host(b)) => a.ptr_eq(b),
            (Self::Gpu(a), Self::Gpu(b)) => a.ptr_eq(b),
            _ => false,
        }
    }

    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Self::Host(arena) => arena.strong_count() == 0,
            Self::Gpu(arena) => arena.strong_count() == 0,
        }
    }
}

/// A range that nobody else touches until this is dropped; it keeps the arena mapped.
#[derive(Debug)]
pub(crate) enum Owned {
    Host(OwnedRange),
    Gpu(CudaOwned),
}

impl Owned {
    /// Owns `range` until the value is dropped.
    pub(crate) fn of(served: &Served, range: ByteRange) -> Result<Self> {
        match served {
            Served::Host(arena) => arena.own(range).map(Self::Host),
            Served::Gpu(arena) => arena.own(range).map(Self::Gpu),
        }
    }

    /// Where to read the landed bytes of host memory.
    pub(crate) fn host_pointer(&self) -> Option<*const u8> {
        match self {
            Self::Host(range) => Some(range.as_mut_ptr().cast_const()),
            Self::Gpu(_) => None,
        }
    }

    /// The values of the blocks of GPU memory, after what a NIC wrote there is visible to the GPU. `None` for host memory.
    pub(crate) fn gpu_digests(&self, block: u64) -> Option<Result<Vec<BlockDigest>>> {
        match self {
            Self::Host(_) => None,
            Self::Gpu(range) => Some(range.settle_nic_writes().and_then(|()| range.digests(block))),
        }
    }

    /// Makes what a NIC wrote visible to the GPU; nothing to do for host memory.
    pub(crate) fn settle(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Gpu(range) => range.settle_nic_writes(),
        }
    }

    pub(crate) fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpu(_))
    }
}

/// Refuses a locator that memory at `into` cannot follow.
pub(crate) fn check_locator(locator: &Locator, into: &Location) -> Result<()> {
    if locator.transport != TransportName::Rdma {
        let detail = format!("the locator is of the transport {}, not rdma", locator.transport);
        return Err(Error::new(Kind::Mismatch, "import", detail));
    }
    check_served(TransportName::Rdma, SERVES, (locator.location.memory(), into.memory()))
}
