//! The arenas that `tcp` reads from and fills.

use crate::transport::SERVES;
use flashboot_core::{
    Arena, Error, Kind, Location, Locator, MemoryKind, Result, TransportName, check_served,
};
use flashboot_cuda::CudaArena;
use flashboot_memory::HostArena;
use std::{any::Any, sync::Arc};

/// An arena by what it is made of.
#[derive(Debug, Clone)]
pub(crate) enum Served {
    Host(Arc<HostArena>),
    Gpu(Arc<CudaArena>),
}

impl Served {
    /// `arena` as what it is, or which arenas `tcp` serves.
    pub(crate) fn of(arena: &Arc<dyn Arena>) -> Result<Self> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(arena) as _;
        if let Ok(host) = any.downcast() {
            return Ok(Self::Host(host));
        }
        CudaArena::from_arena(arena).map(Self::Gpu).ok_or_else(|| {
            let detail = format!(
                "{arena:?} is neither a host arena of flashboot-memory nor a GPU arena of flashboot-cuda"
            );
            Error::new(Kind::Invalid, "tcp", detail).with_remedy("allow another transport for this arena")
        })
    }

    pub(crate) fn arena(&self) -> &dyn Arena {
        match self {
            Self::Host(arena) => &**arena,
            Self::Gpu(arena) => &**arena,
        }
    }

    pub(crate) fn memory(&self) -> MemoryKind {
        match self {
            Self::Host(_) => MemoryKind::Host,
            Self::Gpu(_) => MemoryKind::Gpu,
        }
    }
}

/// Refuses a locator that memory at `into` cannot follow.
pub(crate) fn check_locator(locator: &Locator, into: &Location) -> Result<()> {
    if locator.transport != TransportName::Tcp {
        let detail = format!("the locator is of the transport {}, not tcp", locator.transport);
        return Err(Error::new(Kind::Mismatch, "import", detail));
    }
    check_served(TransportName::Tcp, SERVES, (locator.location.memory(), into.memory()))
}
